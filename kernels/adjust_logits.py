"""What a request asks to be said less, more or never, as a change of the target's logits.

    bad words, min_tokens     the logit becomes -inf
    logit_bias                z += bias
    repetition_penalty        z = z / r if z > 0 else z r    (where prompt or answer have it)
    frequency, presence       z -= f count + p [count > 0]    (of the answer alone)

Names, meanings and order are vLLM's; temperature and filters come behind. Why on the device: row i
of a block is verified before the host knows whether the drafts in front of it are right. It counts
drafts 1 .. i as said, which they are wherever row i matters, so its choice is plain decoding's.

Invariant: `Tables` hold what is committed, the block's anchor included. `advance_tables_` runs once
a step, in front of acceptance and by its rule: it adds the accepted drafts and the bonus token,
nothing else. A row whose `is_on` is 0 is copied, and its tables, which may be an older request's,
are neither read nor written.

Cost: [T, V] logits and two tables of [B, V] are read, float32 logits written: 4.9, 1.2 and 9.7 MB
for 16 rows of one request at 152k tokens in bf16, 3.6 us at 4.46 TB/s, and up to 15 comparisons a
logit with its block's drafts (not timed alone). Two launches, and one of `advance_tables_`.

Legend: B requests, G rows of a block, T = B * G rows, V vocabulary, K bad words of several tokens,
L tokens of one at most.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphengine.kernels.accept import count_accepted
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import on_grid

# A token's word: how often the answer has it, and two flags above that.
PROMPT, STOP = 1 << 29, 1 << 30
COUNT = PROMPT - 1
NOTHING = -1  # no token, in a bad word or in front of an answer
MAX_WORDS, MAX_WORD_TOKENS = 64, 16
CHUNK = 1024  # elements of a row in one program
NUM_WARPS = 4


class Tables(NamedTuple):
    """What B requests ask for, and what their answers hold so far."""

    is_on_B: Tensor  # int32, 0: nothing is asked
    repetition_B: Tensor  # float32 > 0, 1 changes nothing
    presence_B: Tensor  # float32
    frequency_B: Tensor  # float32
    until_B: Tensor  # int64: rows at smaller positions choose no token with STOP
    seen_BV: Tensor  # int32: count, PROMPT where the prompt has it, STOP where it ends the answer
    bias_BV: Tensor  # float32
    words_BKL: Tensor  # int32: the banned token last, before it those that it must not follow,
    # NOTHING for any; a word whose last is NOTHING is none
    recent_BL: Tensor  # int32 [B, L - 1]: the answer in front of the block; NOTHING before it began


def adjust_logits_reference(
    logits_TV: Tensor, block_ids_BG: Tensor, positions_T: Tensor, tables: Tables
) -> Tensor:
    """`adjust_logits` in plain torch."""
    B, G = block_ids_BG.shape
    z_BGV = logits_TV.float().view(B, G, -1)
    own = Tables(*(x[:, None] for x in tables))
    new_BGV = torch.zeros(z_BGV.shape, dtype=torch.int32, device=logits_TV.device)
    new_BGV[:, 1:].scatter_(2, block_ids_BG[:, 1:, None].clamp(min=0), 1)
    count_BGV = (own.seen_BV & COUNT) + new_BGV.cumsum(1)
    is_early_BG1 = positions_T.view(B, G, 1) < own.until_B[..., None]
    banned_BGV = _banned(block_ids_BG, tables, z_BGV.shape[2])
    banned_BGV |= ((own.seen_BV & STOP) != 0) & is_early_BG1
    r_B11, f_B11, p_B11 = (
        x[..., None] for x in (own.repetition_B, own.frequency_B, own.presence_B)
    )
    x_BGV = z_BGV + own.bias_BV
    has_it_BGV = (count_BGV > 0) | ((own.seen_BV & PROMPT) != 0)
    x_BGV = torch.where(has_it_BGV, torch.where(x_BGV > 0, x_BGV / r_B11, x_BGV * r_B11), x_BGV)
    x_BGV = x_BGV - f_B11 * count_BGV - p_B11 * (count_BGV > 0)
    x_BGV = x_BGV.masked_fill(banned_BGV, -torch.inf)
    return torch.where(own.is_on_B[..., None] != 0, x_BGV, z_BGV).view_as(logits_TV)


def _banned(block_ids_BG: Tensor, tables: Tables, V: int) -> Tensor:
    """Whether a bad word would be complete, bool [B, G, V]."""
    (B, G), L = block_ids_BG.shape, tables.words_BKL.shape[2]
    said = torch.cat([tables.recent_BL, block_ids_BG.int()], dim=1)
    before_BG1L = said.unfold(1, L - 1, 1)[:, 1:, None]  # up to each row's own token
    prefix_B1KL, last_B1K = tables.words_BKL[:, None, :, :-1], tables.words_BKL[:, None, :, -1]
    follows_BGK = ((prefix_B1KL == before_BG1L) | (prefix_B1KL == NOTHING)).all(-1)
    last_BGK = torch.where(follows_BGK & (last_B1K != NOTHING), last_B1K, V).long()
    banned = torch.zeros(B, G, V + 1, dtype=torch.bool, device=said.device)
    return banned.scatter_(2, last_BGK, True)[..., :V]


def adjust_logits(
    logits_TV: Tensor, block_ids_BG: Tensor, positions_T: Tensor, tables: Tables
) -> Tensor:
    """The logits that requests choose from.

        count[b, i, v] = seen[b, v] & COUNT + #{1 <= j <= i : block[b, j] == v}
        out = as the module says;  -inf for STOP at positions[t] < until, and where a bad word ends

    Args:
        logits_TV: [T, V] bf16, fp16 or fp32; last stride 1, row stride free.
        block_ids_BG: int64 [B, G], anchor and drafts; NOTHING as the anchor of a prompt's last row.
        positions_T: int64 [T], of the rows; the token chosen stands one further.
        tables: of B requests.
    Returns: float32 [T, V], contiguous; rows of requests that ask for nothing are equal.
    Raises: ValueError for a wrong shape, dtype or stride, with the tensor's name.
    Source: vLLM's v1 sampler; repetition: Keskar et al., arXiv:1909.05858.
    """
    (T, V), (B, G) = logits_TV.shape, block_ids_BG.shape
    if logits_TV.stride(1) != 1 or not logits_TV.dtype.is_floating_point or T != B * G:
        raise ValueError(
            f"logits are {logits_TV.dtype} {tuple(logits_TV.shape)}, strides "
            f"{logits_TV.stride()}; need contiguous rows of floats, {B * G} of them"
        )
    _check("block_ids", block_ids_BG, (B, G), torch.int64)
    _check("positions", positions_T, (T,), torch.int64)
    K, L = _check_tables(tables, B, V)
    if not (logits_TV.is_cuda or INTERPRET):
        return adjust_logits_reference(logits_TV, block_ids_BG, positions_T, tables)
    out_TV = torch.empty(T, V, dtype=torch.float32, device=logits_TV.device)
    on_grid(_adjust_kernel, ((V + CHUNK - 1) // CHUNK, T))(
        logits_TV,
        block_ids_BG,
        positions_T,
        *tables[:7],
        out_TV,
        logits_TV.stride(0),
        V,
        G,
        CHUNK=CHUNK,
        PROMPT=PROMPT,
        STOP=STOP,
        num_warps=NUM_WARPS,
    )
    on_grid(_ban_words_kernel, (T,))(
        block_ids_BG,
        tables.is_on_B,
        tables.words_BKL,
        tables.recent_BL,
        out_TV,
        V,
        G,
        K=K,
        L=L,
        NOTHING=NOTHING,
        num_warps=1,
    )
    return out_TV


def advance_tables_reference_(
    draft_ids_BG: Tensor, target_ids_BG: Tensor, start_B: Tensor, tables: Tables
) -> None:
    """`advance_tables_` in plain torch. Mutates: tables' counts and recent tokens."""
    num_accepted_B1 = count_accepted(draft_ids_BG, target_ids_BG)[:, None].long()
    is_on_B1 = ((start_B > 0) & (tables.is_on_B != 0))[:, None]
    row_G = torch.arange(draft_ids_BG.shape[1], device=start_B.device)
    is_said_BG = is_on_B1 & (row_G <= num_accepted_B1) & (target_ids_BG >= 0)
    tables.seen_BV.scatter_add_(1, target_ids_BG.clamp(min=0), is_said_BG.int())
    said = torch.cat([tables.recent_BL, draft_ids_BG.int()], dim=1)
    ahead_L = torch.arange(tables.recent_BL.shape[1], device=start_B.device)
    moved_BL = said.gather(1, num_accepted_B1 + 1 + ahead_L)
    tables.recent_BL.copy_(torch.where(is_on_B1, moved_BL, tables.recent_BL))


def advance_tables_(
    draft_ids_BG: Tensor, target_ids_BG: Tensor, start_B: Tensor, tables: Tables
) -> None:
    """Counts what `accept_and_advance_` commits; runs in front of it, on the same inputs.

        a = count_accepted(draft, target);  seen[target[i]] += 1 for i <= a
        recent = the last L - 1 of (recent, draft[0 .. a])

    Args:
        draft_ids_BG: int64 [B, G], anchor and drafts. target_ids_BG: int64 [B, G]; negative: none.
        start_B: int32 [B]; 0 marks a padded row, which counts nothing.
    Mutates: tables.seen_BV, tables.recent_BL.
    Raises: ValueError for a wrong shape, dtype or stride, with the tensor's name.
    """
    B, G = draft_ids_BG.shape
    _check("draft_ids", draft_ids_BG, (B, G), torch.int64)
    _check("target_ids", target_ids_BG, (B, G), torch.int64)
    _check("start", start_B, (B,), torch.int32)
    V = tables.seen_BV.shape[1]
    _, L = _check_tables(tables, B, V)
    if not (start_B.is_cuda or INTERPRET):
        advance_tables_reference_(draft_ids_BG, target_ids_BG, start_B, tables)
        return
    on_grid(_advance_kernel, (B,))(
        draft_ids_BG,
        target_ids_BG,
        start_B,
        tables.is_on_B,
        tables.seen_BV,
        tables.recent_BL,
        V,
        G=G,
        G_POW2=1 << (G - 1).bit_length(),
        L=L,
        num_warps=1,  # its loads precede its stores, so the recent tokens move in place
    )


def _check_tables(tables: Tables, B: int, V: int) -> tuple[int, int]:
    """(K, L)."""
    K, L = tables.words_BKL.shape[1:]
    if K & (K - 1) or L & (L - 1) or L < 2:
        raise ValueError(f"words are {K} of {L} tokens; need powers of two, and 2 tokens at least")
    shapes = [*[(B,)] * 5, (B, V), (B, V), (B, K, L), (B, L - 1)]
    f32, i32 = torch.float32, torch.int32
    dtypes = [i32, f32, f32, f32, torch.int64, i32, f32, i32, i32]
    for name, x, shape, dtype in zip(tables._fields, tables, shapes, dtypes, strict=True):
        _check(name, x, shape, dtype)
    return K, L


def _check(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if x.shape != shape or x.dtype != dtype or not x.is_contiguous():
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)}, strides {x.stride()}; need {dtype} "
            f"{list(shape)}, contiguous"
        )


@triton.jit(do_not_specialize=["rows"])
def _adjust_kernel(
    logits,
    block_ids,
    positions,
    is_on,
    repetition,
    presence,
    frequency,
    until,
    seen,
    bias,
    out,
    row_stride,
    V,
    rows,
    CHUNK: tl.constexpr,
    PROMPT: tl.constexpr,
    STOP: tl.constexpr,
):
    t = tl.program_id(1).to(tl.int64)
    request = t // rows
    index = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    live = index < V
    x = tl.load(logits + t * row_stride + index, mask=live, other=0.0).to(tl.float32)
    if tl.load(is_on + request) != 0:
        word = tl.load(seen + request * V + index, mask=live, other=0)
        count = word & (PROMPT - 1)
        block = block_ids + request * rows
        for j in range(1, (t - request * rows).to(tl.int32) + 1):
            count += (index == tl.load(block + j)).to(tl.int32)
        x += tl.load(bias + request * V + index, mask=live, other=0.0)
        r = tl.load(repetition + request)
        # Rounded as torch's: a divisor that all lanes share would become a product.
        penalized = tl.where(x > 0, tl.div_rn(x, r + tl.zeros_like(x)), x * r)
        x = tl.where((count > 0) | ((word & PROMPT) != 0), penalized, x)
        x -= tl.load(frequency + request) * count.to(tl.float32)
        x -= tl.where(count > 0, tl.load(presence + request), 0.0)
        is_early = tl.load(positions + t) < tl.load(until + request)
        x = tl.where(((word & STOP) != 0) & is_early, -float("inf"), x)
    tl.store(out + t * V + index, x, mask=live)


@triton.jit(do_not_specialize=["rows"])
def _ban_words_kernel(
    block_ids,
    is_on,
    words,
    recent,
    out,
    V,
    rows,
    K: tl.constexpr,
    L: tl.constexpr,
    NOTHING: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    request = t // rows
    if tl.load(is_on + request) == 0:
        return
    i = (t - request * rows).to(tl.int32)
    word = words + request * K * L + tl.arange(0, K) * L
    last = tl.load(word + L - 1)
    ends = (last != NOTHING).to(tl.int32)
    for back in range(L - 1):
        at = i - back  # of the block, or before it
        of_block = tl.load(block_ids + request * rows + at, mask=at >= 0, other=0).to(tl.int32)
        before = tl.load(recent + request * (L - 1) + L - 1 + at, mask=at < 0, other=0)
        token = tl.where(at >= 0, of_block, before)
        wanted = tl.load(word + L - 2 - back)
        ends = ends & ((wanted == token) | (wanted == NOTHING)).to(tl.int32)
    tl.store(out + t * V + last, -float("inf"), mask=ends != 0)


@triton.jit
def _advance_kernel(
    draft_ids,
    target_ids,
    start,
    is_on,
    seen,
    recent,
    V,
    G: tl.constexpr,
    G_POW2: tl.constexpr,
    L: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    if (tl.load(start + b) > 0) & (tl.load(is_on + b) != 0):
        i = tl.arange(0, G_POW2)
        proposed = i < G - 1
        draft = tl.load(draft_ids + b * G + i + 1, mask=proposed, other=0)
        target = tl.load(target_ids + b * G + i, mask=i < G, other=-1)
        wrong = proposed & (draft != target)
        accepted = tl.min(tl.where(wrong, i, G - 1), axis=0)
        is_said = (i <= accepted) & (target >= 0)
        tl.atomic_add(seen + b * V + tl.maximum(target, 0), 1, mask=is_said, sem="relaxed")
        ahead = tl.arange(0, L)
        at = accepted + 1 + ahead  # of the L - 1 recent ones and the block behind them
        kept = tl.load(recent + b * (L - 1) + at, mask=at < L - 1, other=0)
        of_block = (at >= L - 1) & (ahead < L - 1)
        moved = tl.load(draft_ids + b * G + at - (L - 1), mask=of_block, other=0).to(tl.int32)
        tl.store(recent + b * (L - 1) + ahead, tl.where(at < L - 1, kept, moved), ahead < L - 1)
