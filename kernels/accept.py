"""Greedy acceptance on the device: count, take the bonus, prepare the next block, tell the host.

Why: the number accepted is the only value of a step that the next step depends on. Deciding it
here and writing the next block's ids, positions and slots in place means that no token crosses
to the host between two steps. What the host wants to know the kernel stores into host memory
itself: a copy behind it would stop the device for longer than this kernel takes, and cannot stand
in the middle of a CUDA graph without all that follows being waited for.

Invariant: after the call the four block buffers describe the same block: `start_B` counts the
committed tokens, `block_ids_BG[:, 0]` is the last of them, not yet in the cache, at position
`start`. If one of them advanced without the others, attention would read K/V of rejected rows.
A row with start 0 is padding: it stays at position 0, slot 0 (the null page) and never advances.
A negative target id (logits that were not finite, see `argmax`) matches no draft, so it can only be
the bonus; the next block then begins with token 0, because an embedding is looked up for it, and
the host ends the request when it reads the id.

A result is a word of 64 bits: the step's number above, the value below. A store of a word is seen
whole or not at all, so a word that bears the number of the step is that step's value, whatever has
become of the words around it: no order between stores, no fence and no event is needed (NCCL's LL
protocol). Room is kept for the last NUM_RESULTS steps, so that a step may run while the one before
is read.

Cost: about 11 * B * G integers, one program a request; bound by the launch (about 2 us).

Legend: B requests, G block length (anchor + G-1 draft tokens; G = 1 without a drafter),
T = B * G rows, W pages in a row of the page table, S page size, X words of results.
"""

import torch
import triton
import triton.language as tl

from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import on_grid

MAX_BLOCK_LENGTH = 1024
NUM_RESULTS = 2


def count_accepted(draft_ids_BG: torch.Tensor, target_ids_BG: torch.Tensor) -> torch.Tensor:
    """Length of the longest draft prefix that the target would have said.

    num_accepted[b] = #{j : draft[b, i+1] == target[b, i] for all i <= j}, j < G-1

    Args: draft_ids_BG, target_ids_BG: integer [B, G]; draft[:, 0] is the anchor.
    Returns: int32 [B] in [0, G-1]; the bonus token is target[b, num_accepted[b]].
    """
    match = draft_ids_BG[:, 1:] == target_ids_BG[:, :-1]
    return match.to(torch.int32).cumprod(dim=1).sum(dim=1).to(torch.int32)


def next_block(
    start_B: torch.Tensor,
    anchor_B: torch.Tensor,
    page_table_BW: torch.Tensor,
    block_length: int,
    mask_token_id: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, positions and cache slots of the block that begins at `start`.

    ids[b] = anchor, mask, ...; position[b,i] = start + i; slot = page_table[b, p // S] * S + p % S

    Args:
        start_B: integer [B], committed tokens = position of the anchor; 0 marks a padded row.
        anchor_B: integer [B], last committed token; negative counts as 0.
        page_table_BW: int32 [B, W]; a position past the table gets slot 0.
    Returns: (block_ids int64 [B, G], positions int64 [B*G], slots int64 [B*G]); padded rows have
        positions 0 and slots 0.
    """
    W = page_table_BW.shape[1]
    row = torch.arange(block_length, device=start_B.device)
    active = (start_B > 0)[:, None]
    block_ids = torch.where(row == 0, anchor_B.long().clamp(min=0)[:, None], mask_token_id)
    positions = torch.where(active, start_B.long()[:, None] + row, 0)
    column = positions // page_size
    page = page_table_BW.long().gather(1, column.clamp(max=W - 1))
    slots = torch.where(active & (column < W), page * page_size + positions % page_size, 0)
    return block_ids, positions.view(-1), slots.view(-1)


def accept_and_advance_reference_(
    draft_ids_BG: torch.Tensor,
    target_ids_BG: torch.Tensor,
    start_B: torch.Tensor,
    page_table_BW: torch.Tensor,
    block_ids_BG: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    context_positions_T: torch.Tensor,
    context_slots_T: torch.Tensor,
    step_B: torch.Tensor,
    results_BX: torch.Tensor,
    mask_token_id: int,
    page_size: int,
) -> None:
    """`accept_and_advance_` in plain torch. Mutates: the same tensors."""
    G = draft_ids_BG.shape[1]
    context_positions_T.copy_(positions_T)
    context_slots_T.copy_(slots_T)
    active = start_B > 0
    num_accepted = torch.where(active, count_accepted(draft_ids_BG, target_ids_BG), 0)
    bonus = target_ids_BG.gather(1, num_accepted.long()[:, None])[:, 0]
    start = torch.where(active, start_B + num_accepted + 1, start_B)
    block_ids, positions, slots = next_block(
        start, bonus, page_table_BW, G, mask_token_id, page_size
    )
    values = torch.cat((target_ids_BG, num_accepted[:, None]), dim=1)
    words = (step_B[:, None] << 32) | (values & 0xFFFFFFFF)
    at = (step_B % NUM_RESULTS * (G + 1))[:, None] + torch.arange(G + 1, device=start_B.device)
    results_BX.scatter_(1, at, words)
    block_ids_BG.copy_(torch.where(active[:, None], block_ids, block_ids_BG))
    start_B.copy_(start)
    positions_T.copy_(positions)
    slots_T.copy_(slots)
    step_B.add_(1)


def accept_and_advance_(
    draft_ids_BG: torch.Tensor,
    target_ids_BG: torch.Tensor,
    start_B: torch.Tensor,
    page_table_BW: torch.Tensor,
    block_ids_BG: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    context_positions_T: torch.Tensor,
    context_slots_T: torch.Tensor,
    step_B: torch.Tensor,
    results_BX: torch.Tensor,
    mask_token_id: int,
    page_size: int,
) -> None:
    """Accept the draft's longest correct prefix plus the bonus, and move to the next block.

    a = count_accepted(draft, target);  start += a + 1;  block = [target[a], mask, ...]
    position[i] = start + i;  slot[i] = page_table[position // S] * S + position % S
    results[step % NUM_RESULTS * (G + 1) + i] = step << 32 | value[i];  value = [target.., a]

    Args:
        draft_ids_BG: int64 [B, G], anchor and draft tokens (may be block_ids_BG itself).
        target_ids_BG: int64 [B, G], the target's argmax after each row; negative: none.
        start_B: int32 [B], committed tokens; 0 marks a padded row.
        page_table_BW: int32 [B, W].
        block_ids_BG: int64 [B, G]; padded rows are left as they are.
        positions_T, slots_T: int64 [B*G]; padded rows get 0. Slot 0 past the table's end.
        context_positions_T, context_slots_T: int64 [B*G], get those of the block just verified.
        step_B: int64 [B], the number of this step, then of the next.
        results_BX: int64 [B, X >= NUM_RESULTS * (G + 1)], usually pinned memory of the host.
        All have last stride 1; those of B*G are contiguous.
    Mutates: all but the first two and page_table_BW.
    Raises: ValueError for a wrong shape, dtype or stride, with the tensor's name.
    Source: greedy speculative decoding (Leviathan et al., arXiv:2211.17192, temperature 0).
    """
    B, G = draft_ids_BG.shape
    W = page_table_BW.shape[1]
    _check("draft_ids", draft_ids_BG, (B, G), torch.int64)
    _check("target_ids", target_ids_BG, (B, G), torch.int64)
    _check("start", start_B, (B,), torch.int32)
    _check("page_table", page_table_BW, (B, W), torch.int32)
    _check("block_ids", block_ids_BG, (B, G), torch.int64)
    _check("positions", positions_T, (B * G,), torch.int64)
    _check("slots", slots_T, (B * G,), torch.int64)
    _check("context_positions", context_positions_T, (B * G,), torch.int64)
    _check("context_slots", context_slots_T, (B * G,), torch.int64)
    _check("step", step_B, (B,), torch.int64)
    X = max(results_BX.shape[-1], NUM_RESULTS * (G + 1))
    _check("results", results_BX, (B, X), torch.int64)
    if not 1 <= G <= MAX_BLOCK_LENGTH:
        raise ValueError(f"block length {G}: one program takes 1 to {MAX_BLOCK_LENGTH} rows")
    tensors = (
        *(draft_ids_BG, target_ids_BG, start_B, page_table_BW, block_ids_BG, positions_T, slots_T),
        *(context_positions_T, context_slots_T, step_B, results_BX),
    )
    if not (start_B.is_cuda or INTERPRET):
        accept_and_advance_reference_(*tensors, mask_token_id, page_size)
        return
    on_grid(_accept_and_advance_kernel, (B,))(
        *tensors,
        mask_token_id,
        draft_ids_BG.stride(0),
        target_ids_BG.stride(0),
        page_table_BW.stride(0),
        block_ids_BG.stride(0),
        results_BX.stride(0),
        W,
        S=page_size,
        G=G,
        G_POW2=1 << (G - 1).bit_length(),
        KEPT=NUM_RESULTS,
        # One warp: its loads precede its stores, so draft_ids may be block_ids, and positions,
        # slots and the step's number are read before they are overwritten.
        num_warps=1,
    )


def _check(name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if x.shape != shape or x.dtype != dtype:
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}; need {dtype} {list(shape)}")
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"{name} has strides {x.stride()}; make its last dim contiguous")


@triton.jit
def _accept_and_advance_kernel(
    draft_ids,
    target_ids,
    start,
    page_table,
    block_ids,
    positions,
    slots,
    context_positions,
    context_slots,
    steps,
    results,
    mask_token_id,
    draft_stride,
    target_stride,
    table_stride,
    block_stride,
    results_stride,
    table_width,
    S: tl.constexpr,
    G: tl.constexpr,
    G_POW2: tl.constexpr,
    KEPT: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, G_POW2)
    row, in_block = b * G + i, i < G
    old_start = tl.load(start + b)
    active = old_start > 0
    step = tl.load(steps + b)

    proposed = i < G - 1
    draft = tl.load(draft_ids + b * draft_stride + i + 1, mask=proposed, other=0)
    target = tl.load(target_ids + b * target_stride + i, mask=in_block, other=0)
    accepted = tl.min(tl.where(proposed & (draft == target), G - 1, tl.minimum(i, G - 1)), axis=0)
    accepted = tl.where(active, accepted, 0)
    bonus = tl.load(target_ids + b * target_stride + accepted)
    new_start = tl.where(active, old_start + accepted + 1, old_start)

    # .wt, on sm_90 a strong store of system scope: the host reads while later kernels run.
    word, number = results + b * results_stride + step % KEPT * (G + 1), step << 32
    value = target.to(tl.uint32).to(tl.int64)
    tl.store(word + i, number | value, mask=in_block, cache_modifier=".wt")
    tl.store(word + G, number | accepted.to(tl.int64), cache_modifier=".wt")
    tl.store(steps + b, step + 1)

    position = tl.where(active, new_start.to(tl.int64) + i, 0)
    column = position // S
    # Not `active & in_block`: triton 3.9's interpreter makes integers of a bool that it repeats.
    live = i < tl.where(active, G, 0)
    mapped = live & (column < table_width)
    page = tl.load(page_table + b * table_stride + column, mask=mapped, other=0)
    slot = tl.where(mapped, page.to(tl.int64) * S + position % S, 0)

    old_position = tl.load(positions + row, mask=in_block)
    old_slot = tl.load(slots + row, mask=in_block)
    tl.store(context_positions + row, old_position, mask=in_block)
    tl.store(context_slots + row, old_slot, mask=in_block)
    tl.store(
        block_ids + b * block_stride + i,
        tl.where(i == 0, tl.maximum(bonus, 0), mask_token_id),
        mask=live,
    )
    tl.store(positions + row, position, mask=in_block)
    tl.store(slots + row, slot, mask=in_block)
    tl.store(start + b, new_start)
