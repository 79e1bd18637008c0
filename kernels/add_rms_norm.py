"""Residual add, RMSNorm and the split into FP8 rows: what stands between two GEMMs.

Why: Inductor fuses these as well, but its kernel lets the next one start only after its last load:
in a node trace of a step (Qwen3-8B, batch 1, H200) the GEMM behind a norm began to fetch weights
0.4 to 0.6 us before the norm's end. Here the next kernel starts as soon as this one's input is
complete, and a row is read once, into registers: 5.18 -> 5.05 ms a step, 4B plain 2.57 -> 2.47
(profiles/results/2026-11-22-h200-norm-ab.json).

Invariant: before `gdc_wait` only the norm's weight is read and nothing is written. The sum over
partials runs in rising z, in fp32, and rounds once; the norm is taken of the rounded sum, so that
it equals the reference up to the order of one reduction.

Cost: T * D * (4 Z + 2 + 4) bytes, at T = 16, Z = 2, D = 4096 0.9 MB out of L2: bound by the launch
and one reduction, about 2 us.

Legend: T rows, D hidden, Z partial sums.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.fp8 import FP8, split_rows_fp8
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.qk_norm_rope import sum_partials, supports_pdl

MAX_D = 16384  # a row is held in registers


def add_rms_norm_reference(
    h_TD: torch.Tensor | None, update: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` in plain torch."""
    sum_TD = sum_partials(update, torch.float32).float()
    if h_TD is not None:
        sum_TD = h_TD.float() + sum_TD
    h_TD = sum_TD.to(weight_D.dtype, copy=True)  # an op's results may not be its arguments
    x_TD = h_TD.float()
    x_TD = x_TD * torch.rsqrt(x_TD.square().mean(-1, keepdim=True) + eps) * weight_D.float()
    return h_TD, x_TD.to(weight_D.dtype)


def add_rms_norm(
    h_TD: torch.Tensor | None,
    update: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    early: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds an update to the residual stream and normalises the sum.

    h[t] = round(h[t] + sum_z update[z, t]);  x[t] = h[t] * rsqrt(mean(h[t]^2) + eps) * weight

    Args:
        h_TD: contiguous [T, D] in weight's dtype; None is zero.
        update: contiguous [T, D] in weight's dtype, or fp32 partial sums [Z, T, D].
        weight_D: [D], bf16, fp16 or fp32.
        early: let the next kernel start beside the one before this, not behind it. Measured, not
            understood: 4B plain, whose GEMMs have two CTAs a multiprocessor, 2.47 -> 2.42 ms a
            step; 8B, one CTA, 5.05 -> 5.09; FP8 layers, two to four, 63.4 -> 65.6 us.
    Returns: (h_TD, x_TD), new tensors in weight's dtype; computed in fp32, rounded once each.
    Raises: ValueError for shapes and strides that the kernel cannot address.
    """
    return torch.ops.graphengine.add_rms_norm(h_TD, update, weight_D, eps, early)


def add_rms_norm_split(
    h_TD: torch.Tensor | None, update: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`add_rms_norm` with x as `fp8.split_rows_fp8` writes it: (h_TD, fp8 [2, T, D], scale_T)."""
    return torch.ops.graphengine.add_rms_norm_split(h_TD, update, weight_D, eps)


def split_rows(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`fp8.split_rows_fp8` as one kernel; x_TD contiguous. Returns (fp8 [2, T, D], scale_T)."""
    return torch.ops.graphengine.split_rows(x_TD)


@triton.jit
def _split(x, rows, scales, t, num_rows, at, live, D: tl.constexpr):
    """Writes row t as hi + lo with one scale; x is 0 where it is not live."""
    scale = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-12) / 448.0
    tl.store(scales + t, scale)
    scaled = tl.div_rn(x, tl.zeros_like(x) + scale)
    hi = scaled.to(tl.float8e4nv)
    lo = (scaled - hi.to(tl.float32)).to(tl.float8e4nv)
    tl.store(rows + t * D + at, hi, mask=live)
    tl.store(rows + (num_rows + t) * D + at, lo, mask=live)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm_kernel(
    h,
    update,
    weight,
    h_out,
    x_out,
    scales,
    num_rows,
    eps,
    D: tl.constexpr,
    Z: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    SPLIT: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL and EARLY:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < D
    w = tl.load(weight + at, mask=live, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    y = tl.load(update + t * D + at, mask=live, other=0.0).to(tl.float32)
    for z in tl.static_range(1, Z):  # pyright: ignore[reportGeneralTypeIssues]
        y += tl.load(update + (z * num_rows + t) * D + at, mask=live, other=0.0)
    if ADDS:
        y = tl.load(h + t * D + at, mask=live, other=0.0).to(tl.float32) + y
    rounded = y.to(h_out.dtype.element_ty)
    tl.store(h_out + t * D + at, rounded, mask=live)
    y = rounded.to(tl.float32)
    x = (y * tl.rsqrt(tl.sum(y * y, axis=0) / D + eps) * w).to(h_out.dtype.element_ty)
    if SPLIT:
        _split(x.to(tl.float32), x_out, scales, t, num_rows, at, live, D)
    else:
        tl.store(x_out + t * D + at, x, mask=live)


@triton.jit(do_not_specialize=["num_rows"])
def _split_rows_kernel(
    x, rows, scales, num_rows, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < D
    row = tl.load(x + t * D + at, mask=live, other=0.0).to(tl.float32)
    _split(row, rows, scales, t, num_rows, at, live, D)


def _launch(h, update, weight, eps, early, split):
    """(h_out, x_out, scales): by the kernel on a GPU, else by the reference."""
    T, D = update.shape[-2:]
    if weight.shape != (D,) or (h is not None and h.shape != (T, D)):
        raise ValueError(
            f"h {None if h is None else tuple(h.shape)}, update {tuple(update.shape)}, weight "
            f"{tuple(weight.shape)}: need [T, D], [T, D] or [Z, T, D], and [D]"
        )
    wanted = torch.float32 if update.dim() == 3 else weight.dtype
    if update.dtype != wanted or (h is not None and h.dtype != weight.dtype):
        raise ValueError(
            f"h is {None if h is None else h.dtype}, update {update.dtype}: need {weight.dtype}, "
            "and float32 for partial sums"
        )
    runs = _runs(weight, D) and T > 0
    if not runs:
        h_out, x = add_rms_norm_reference(h, update, weight, eps)
        return h_out, *(split_rows_fp8(x) if split else (x, x))
    if not (update.is_contiguous() and weight.is_contiguous() and (h is None or h.is_contiguous())):
        raise ValueError("h, update and weight must be contiguous")
    num_parts = update.shape[0] if update.dim() == 3 else 1
    h_out = torch.empty((T, D), dtype=weight.dtype, device=update.device)
    x_out, scales = _empty_split(h_out) if split else (torch.empty_like(h_out), h_out)
    _add_rms_norm_kernel[(T,)](
        h if h is not None else h_out,
        update,
        weight,
        h_out,
        x_out,
        scales,
        T,
        eps,
        D=D,
        EARLY=early,
        **_options(D, update.device) | {"Z": num_parts, "ADDS": h is not None, "SPLIT": split},
    )
    return h_out, x_out, scales


def _runs(x: torch.Tensor, D: int) -> bool:
    """Whether the kernels take rows of D here."""
    return (x.is_cuda or INTERPRET) and D <= MAX_D


def _options(D: int, device: torch.device) -> dict[str, Any]:
    """Launch options for rows of D: 16 columns a thread, up to 16 warps."""
    block = triton.next_power_of_2(D)
    pdl = supports_pdl(device)
    warps = max(1, min(16, block // 512))
    return {"BLOCK": block, "num_warps": warps, "PDL": pdl} | ({"launch_pdl": True} if pdl else {})


def _empty_split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.empty((2, *x.shape), dtype=FP8, device=x.device)
    return rows, torch.empty(x.shape[0], dtype=torch.float32, device=x.device)


def _split_rows(x):
    T, D = x.shape
    if not _runs(x, D) or not T:
        return split_rows_fp8(x)
    if not x.is_contiguous():
        raise ValueError(f"x has strides {x.stride()}; make it contiguous")
    rows, scales = _empty_split(x)
    _split_rows_kernel[(T,)](x, rows, scales, T, D=D, **_options(D, x.device))
    return rows, scales


# Custom ops, because dynamo does not trace a launch with launch_pdl. All return new tensors.
_SCHEMA = "(Tensor? h, Tensor update, Tensor weight, float eps"


@torch.library.custom_op(
    "graphengine::add_rms_norm",
    mutates_args=(),
    schema=_SCHEMA + ", bool early) -> (Tensor, Tensor)",
)
def _add_rms_norm_op(h, update, weight, eps, early):
    return _launch(h, update, weight, eps, early, False)[:2]


@_add_rms_norm_op.register_fake
def _(h, update, weight, eps, early):
    x = weight.new_empty(update.shape[-2:])
    return x, torch.empty_like(x)


@torch.library.custom_op(
    "graphengine::add_rms_norm_split",
    mutates_args=(),
    schema=_SCHEMA + ") -> (Tensor, Tensor, Tensor)",
)
def _add_rms_norm_split_op(h, update, weight, eps):
    return _launch(h, update, weight, eps, False, True)


@_add_rms_norm_split_op.register_fake
def _(h, update, weight, eps):
    x = weight.new_empty(update.shape[-2:])
    return x, *_empty_split(x)


@torch.library.custom_op(
    "graphengine::split_rows", mutates_args=(), schema="(Tensor x) -> (Tensor, Tensor)"
)
def _split_rows_op(x):
    return _split_rows(x)


@_split_rows_op.register_fake
def _(x):
    return _empty_split(x)
