"""One result of what the splits of an attention's keys have found, each for itself.

out[t, n] = sum_z w[z] out[z, t, n] / sum_z w[z], w[z] = exp2(lse[z, t, n] - max_z lse[z, t, n])

Why: few blocks of rows do not fill a GPU, so the keys of a block are dealt to several programs. A
launch of its own, because these never wait for each other; it starts early and waits once.
Invariant: a split whose lse is -inf has seen nothing, and its `out` is not read, so nobody need
write it; a row that no split saw is zeros. What is not a number stays so. Splits are added in
their order, so results do not depend on timing.

Cost: 4 * Z * T * N * H bytes, which the splits have just left in L2.

Legend: Z splits, T rows, N query heads, H head dim.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import early_options, on_grid

ELEMENTS = 2048  # of a program, 16 a thread


class Workspace(NamedTuple):
    """Partial results of the splits, of which nothing outlives a call.

    In fp32, so that a result is rounded once, as with one split; where every CTA of 128 rows has a
    multiprocessor they are 64 KB each (heads of 128), 8.4 MB in all, which L2 holds. Calls that may
    overlap (on several streams) need workspaces of their own.
    """

    out_ZTNH: torch.Tensor  # fp32, normalised within the split
    lse_ZTN: torch.Tensor  # fp32, log2 of the split's sum of exponentials; -inf: saw nothing


def workspace(
    num_rows: int, num_heads: int, head_dim: int, num_splits: int, device: torch.device | str
) -> Workspace:
    """Buffers for so many splits: fp32 out [Z, T, N, H] and lse [Z, T, N], uninitialised."""
    shape = (num_splits, num_rows, num_heads)
    return Workspace(
        out_ZTNH=torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
        lse_ZTN=torch.empty(shape, dtype=torch.float32, device=device),
    )


def merge_splits_reference(partials: Workspace) -> torch.Tensor:
    """`merge_splits` in plain torch. Returns out in fp32."""
    out_ZTNH, lse_ZTN = partials
    saw_ZTN = lse_ZTN != -torch.inf
    highest_TN = lse_ZTN.amax(0)
    weight_ZTN = (lse_ZTN - torch.where(highest_TN == -torch.inf, 0.0, highest_TN)).exp2()
    total_TN = weight_ZTN.sum(0)
    weight_ZTN = weight_ZTN / torch.where(total_TN == 0, 1.0, total_TN)
    return (torch.where(saw_ZTN[..., None], out_ZTNH, 0.0) * weight_ZTN[..., None]).sum(0)


def merge_splits(partials: Workspace, out_TNH: torch.Tensor, pdl: bool = False) -> None:
    """Merges partial results of splits (the formula is above).

    Args:
        partials: of `workspace`, written by all splits of all rows.
        out_TNH: [T, N, H], contiguous, H a power of two.
        pdl: programmatic dependent launch; nothing is read or written before the wait.
    Mutates: out_TNH.
    """
    out_ZTNH, lse_ZTN = partials
    if not (out_TNH.is_cuda or INTERPRET):
        out_TNH.copy_(merge_splits_reference(partials))
        return
    num_rows, H = lse_ZTN[0].numel(), out_TNH.shape[2]
    rows = max(1, ELEMENTS // H)
    on_grid(merge_splits_kernel, ((num_rows + rows - 1) // rows,))(
        out_ZTNH,
        lse_ZTN,
        out_TNH,
        num_rows,
        SPLITS=len(lse_ZTN),
        ROWS=rows,
        H=H,
        **early_options(pdl),
    )


@triton.jit
def merge_splits_kernel(
    partial_out,
    partial_lse,
    out,
    num_rows,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some rows of heads; `num_rows` = T * N."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    at = row.to(tl.int64)[:, None] * H + tl.arange(0, H)[None, :]
    none = float("-inf")
    highest = tl.full([ROWS], none, tl.float32)
    for z in tl.static_range(SPLITS):  # pyright: ignore[reportGeneralTypeIssues]
        lse = tl.load(
            partial_lse + z * num_rows + row, mask=exists, other=none, cache_modifier=".cg"
        )
        highest = tl.maximum(highest, lse)
    shift = tl.where(highest == none, 0.0, highest)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, H], tl.float32)
    for z in tl.static_range(SPLITS):  # pyright: ignore[reportGeneralTypeIssues]
        lse = tl.load(partial_lse + z * num_rows + row, mask=exists, other=none)
        saw = (lse != none)[:, None]
        plane = partial_out + z * num_rows.to(tl.int64) * H
        weight = tl.exp2(lse - shift)
        total += weight
        tile = tl.load(plane + at, mask=saw, other=0.0, cache_modifier=".cg")
        acc += tile * weight[:, None]
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=exists[:, None])
