"""Ids, positions, slots and pages of a prefill's rows, from what the host has sent of its chunk.

Why: a dozen torch operations are twenty launches, in front of everything else of a first token.

Legend: n rows in B blocks, R prompts, W pages a prompt.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import on_grid

PAGES = 256  # copied at once


class Placed(NamedTuple):
    """What a chunk's layers read; all int64 but for the table."""

    ids_n: Tensor
    positions_n: Tensor
    slots_n: Tensor
    table_BW: Tensor  # int32, the pages of a block's prompt
    last_R: Tensor


def place_rows_reference_(
    ids_n: Tensor,
    start_B: Tensor,
    end_B: Tensor,
    owner_B: Tensor,
    last_R: Tensor,
    pages_RW: Tensor,
    page_size: int,
    placed: Placed,
) -> None:
    """`place_rows_` in plain torch."""
    torch.index_select(pages_RW, 0, owner_B, out=placed.table_BW)
    placed.last_R.copy_(last_R)
    placed.ids_n.copy_(ids_n)
    row = torch.arange(len(ids_n) // len(start_B), device=start_B.device)
    at_BG = start_B.long()[:, None] + row
    column_BG = (at_BG // page_size).clamp(0, pages_RW.shape[1] - 1)
    slots_BG = placed.table_BW.gather(1, column_BG).long() * page_size + at_BG % page_size
    is_there = (start_B[:, None] >= 0) & (at_BG // page_size == column_BG)
    positions_BG = torch.where(is_there & (at_BG < end_B[:, None]), at_BG, 0)
    placed.positions_n.view_as(at_BG).copy_(positions_BG)
    placed.slots_n.view_as(at_BG).copy_(torch.where(is_there, slots_BG, 0))


def place_rows_(
    ids_n: Tensor,
    start_B: Tensor,
    end_B: Tensor,
    owner_B: Tensor,
    last_R: Tensor,
    pages_RW: Tensor,
    page_size: int,
    placed: Placed,
) -> None:
    """Row i of block b is at p = start[b] + i of prompt r = owner[b].

    `position = p`, 0 behind the prompt's rows, p >= end[b]
    `slot = pages[r, p // page_size] * page_size + p % page_size`
    both 0 in a block without a prompt, and where the prompt's table has no such page

    Args: what was sent, int32 and dense. start_B: -1: no prompt. owner_B: in [0, R), always.
    Mutates: placed.
    Raises: ValueError for rows that are not whole blocks of a power of two.
    """
    blocks, (prompts, width) = len(start_B), pages_RW.shape
    rows = len(ids_n) // blocks
    if rows * blocks != len(ids_n) or rows & (rows - 1):
        raise ValueError(f"{len(ids_n)} rows in {blocks} blocks; need 2^k rows in each")
    sent = ids_n, start_B, end_B, owner_B, last_R, pages_RW
    if not (ids_n.is_cuda or INTERPRET):
        place_rows_reference_(*sent, page_size, placed)
        return
    on_grid(_place_rows_kernel, (blocks,))(
        *sent,
        *placed,
        page_size,
        width,
        prompts,
        ROWS=rows,
        PAGES=PAGES,
        PROMPTS=1 << (prompts - 1).bit_length(),
        num_warps=1 if rows < 64 else 4,
    )


@triton.jit
def _place_rows_kernel(
    ids,
    starts,
    ends,
    owners,
    lasts,
    pages,
    placed_ids,
    positions,
    slots,
    table,
    placed_lasts,
    page_size,
    width,
    prompts,
    ROWS: tl.constexpr,
    PAGES: tl.constexpr,
    PROMPTS: tl.constexpr,
):
    b = tl.program_id(0)
    start, end = tl.load(starts + b), tl.load(ends + b)
    own = pages + tl.load(owners + b).to(tl.int64) * width
    for begin in range(0, width, PAGES):
        column = begin + tl.arange(0, PAGES)
        page = tl.load(own + column, mask=column < width)
        tl.store(table + b.to(tl.int64) * width + column, page, mask=column < width)
    i = b * ROWS + tl.arange(0, ROWS)
    at = start + tl.arange(0, ROWS)
    column = at // page_size
    is_there = (start >= 0) & (column < width)
    page = tl.load(own + column, mask=is_there, other=0).to(tl.int64)
    tl.store(slots + i, tl.where(is_there, page * page_size + at % page_size, 0))
    tl.store(positions + i, tl.where(is_there & (at < end), at, 0).to(tl.int64))
    tl.store(placed_ids + i, tl.load(ids + i).to(tl.int64))
    if b == 0:
        r = tl.arange(0, PROMPTS)
        last = tl.load(lasts + r, mask=r < prompts).to(tl.int64)
        tl.store(placed_lasts + r, last, mask=r < prompts)
