"""A tapped layer's output into its columns of the drafter's input.

Why not `copy_`: it takes no part in programmatic dependent launch, so attention, and the GEMM
behind it, would start when it is over; in a node trace (Qwen3-8B, batch 1, H200) a layer with a tap
took about 3 us more than one without, five times a step.
Invariant: nothing is read or written before `gdc_wait`. Cost: 4 T D bytes, bound by the launch.

Legend: T rows, D hidden, C = taps * D.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import on_grid, pdl_options

BLOCK = 1024


def write_tap_(h_TD: torch.Tensor, taps_TC: torch.Tensor, column: int) -> None:
    """`taps[:, column : column + D] = h`.

    Args: h_TD contiguous; taps_TC of h's dtype, last stride 1. Mutates: taps_TC.
    Raises: ValueError where the columns do not lie in taps, or dtypes or strides do not fit.
    """
    (T, D), (rows, C) = h_TD.shape, taps_TC.shape
    if rows != T or not 0 <= column <= C - D or h_TD.dtype != taps_TC.dtype:
        raise ValueError(
            f"h is {h_TD.dtype} {(T, D)}, taps {taps_TC.dtype} {(rows, C)}: columns {column} to "
            f"{column + D} of as many rows and one dtype are needed"
        )
    if not (h_TD.is_cuda or INTERPRET) or not T:
        taps_TC[:, column : column + D].copy_(h_TD)
        return
    if not h_TD.is_contiguous() or taps_TC.stride(1) != 1:
        raise ValueError(
            f"strides of h {h_TD.stride()}, of taps {taps_TC.stride()}: make rows dense"
        )
    on_grid(_write_tap_kernel, (T, (D + BLOCK - 1) // BLOCK))(
        h_TD,
        taps_TC,
        column,
        taps_TC.stride(0),
        D=D,
        BLOCK=BLOCK,
        **pdl_options(h_TD.device),
    )


@triton.jit
def _write_tap_kernel(
    h, taps, column, row_stride, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(h + t * D + d, mask=d < D)
    tl.store(taps + t * row_stride + column + d, row, mask=d < D)
