"""Rows rounded to one or two FP8 rows with a scale each: fp8.py's formulas as one kernel.

Why: Inductor's kernels that round to one FP8 row read it twice and let the next kernel start only
after their last load: 10 to 20 us each under nsys at 256 rows, four a layer (Qwen3-8B's drafter,
H200, profiles/results/2026-11-22-h200-8b-profile-one-graph-bs16.json).
Here a row is read once, into registers, and the next kernel starts as soon as the input of this
one is complete. add_rms_norm.py ends in the same `store_fp8`.

Invariant: the numbers are `fp8.round_rows_fp8`'s and `fp8.split_rows_fp8`'s, bit for bit but for
the sign of a zero, NaN and infinity included: a row of either multiplies to NaN. (On a GPU torch
divides by 448 through its reciprocal, so theirs on a CPU.) Before `gdc_wait` nothing is read.

Cost: T * D * (2 + F) bytes, 9.4 MB for 256 rows of SwiGLU's 12,288 columns, out of L2.

Legend: T rows, D columns, F FP8 rows that hold a row: 1 rounds, 2 split.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.fp8 import FP8, round_rows_fp8, split_rows_fp8
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import all_registers, on_grid, pdl_options

FEW_ROWS = 64
MAX_D = 32768  # a row is held in registers; five taps of a target 4,096 wide are 20,480


def round_rows(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`fp8.round_rows_fp8` as one kernel; last stride 1. Returns (fp8 [T, D], scale_T)."""
    return torch.ops.graphengine.rows_to_fp8(x_TD, 1)


def split_rows(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`fp8.split_rows_fp8` as one kernel; last stride 1. Returns (fp8 [2, T, D], scale_T)."""
    return torch.ops.graphengine.rows_to_fp8(x_TD, 2)


def runs_here(x: torch.Tensor, D: int) -> bool:
    """Whether the kernels take rows of D here."""
    return (x.is_cuda or INTERPRET) and D <= MAX_D


def row_options(T: int, D: int, device: torch.device) -> dict[str, Any]:
    """Launch options for T rows of D, a program each: 16 columns a thread, up to 16 warps; of few
    rows, which have a multiprocessor each, 4 and 32, whose threads have 64 registers each."""
    block = 1 << (D - 1).bit_length()
    columns, most = (4, 32) if T <= FEW_ROWS and block <= MAX_D // 2 else (16, 16)
    warps = max(1, min(most, block // (32 * columns)))
    return {"BLOCK": block, **all_registers(warps), **pdl_options(device)}


def empty_fp8(x: torch.Tensor, F: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What x [T, D] is rounded into: (fp8 [T, D] or [F, T, D], scale_T)."""
    shape = x.shape if F == 1 else (F, *x.shape)
    rows = torch.empty(shape, dtype=FP8, device=x.device)
    return rows, torch.empty(x.shape[0], dtype=torch.float32, device=x.device)


def rows_to_fp8_reference(x: torch.Tensor, F: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain torch."""
    return round_rows_fp8(x) if F == 1 else split_rows_fp8(x)


@triton.jit
def _divide(x, scale):
    """x / scale for a scale of the whole row, correctly rounded where FP8 can tell (above 2^-11).

    As div.rn computes it, but with one reciprocal a row and no branches for exponents that a scale
    does not have: 5 instructions an element instead of some 25.
    """
    inverse = tl.div_rn(1.0, scale) + tl.zeros_like(x)
    # x / inf is 0 and inf / inf NaN: there is nothing to correct.
    back = tl.where(scale < float("inf"), -scale, 0.0) + tl.zeros_like(x)
    quotient = x * inverse
    quotient = tl.fma(tl.fma(quotient, back, x), inverse, quotient)  # to one of the two nearest
    return tl.fma(tl.fma(quotient, back, x), inverse, quotient)  # to the nearest (Markstein 1990)


@triton.jit
def store_fp8(x, rows, scales, t, num_rows, at, live, D: tl.constexpr, F: tl.constexpr):
    """Writes row t rounded, or as hi + lo, with one scale; x is 0 where it is not live."""
    # As integers magnitudes keep their order and NaN, which a maximum of floats drops, is above.
    largest = tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=0).to(tl.float32, bitcast=True)
    largest = tl.maximum(largest, 1e-12, propagate_nan=tl.PropagateNan.ALL)
    scale = tl.div_rn(largest, 448.0)
    tl.store(scales + t, scale)
    scaled = _divide(x, scale)
    hi = scaled.to(tl.float8e4nv)
    tl.store(rows + t * D + at, hi, mask=live)
    if F == 2:
        lo = (scaled - hi.to(tl.float32)).to(tl.float8e4nv)
        tl.store(rows + (num_rows + t) * D + at, lo, mask=live)


@triton.jit(do_not_specialize=["num_rows"])
def _rows_to_fp8_kernel(
    x,
    rows,
    scales,
    num_rows,
    row_stride,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    F: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < D
    row = tl.load(x + t * row_stride + at, mask=live, other=0.0).to(tl.float32)
    store_fp8(row, rows, scales, t, num_rows, at, live, D, F)


def _rows_to_fp8(x, F):
    T, D = x.shape
    if x.stride(1) != 1:
        raise ValueError(f"x has strides {x.stride()}; make its rows contiguous")
    if not runs_here(x, D) or not T:
        return rows_to_fp8_reference(x, F)
    rows, scales = empty_fp8(x, F)
    options = row_options(T, D, x.device)
    on_grid(_rows_to_fp8_kernel, (T,))(x, rows, scales, T, x.stride(0), D=D, F=F, **options)
    return rows, scales


# A custom op, because dynamo does not trace a launch with launch_pdl.
@torch.library.custom_op(
    "graphengine::rows_to_fp8",
    mutates_args=(),
    schema="(Tensor x, int num_fp8) -> (Tensor, Tensor)",
)
def _rows_to_fp8_op(x, num_fp8):
    return _rows_to_fp8(x, num_fp8)


@_rows_to_fp8_op.register_fake
def _(x, num_fp8):
    return empty_fp8(x, num_fp8)
