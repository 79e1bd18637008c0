"""Residual add, RMSNorm and rounding to one or two FP8 rows: what stands between two GEMMs.

Why: Inductor fuses these as well, but its kernel lets the next one start only after its last load:
in a node trace of a step (Qwen3-8B, batch 1, H200) the GEMM behind a norm began to fetch weights
0.4 to 0.6 us before the norm's end. Here the next kernel starts as soon as this one's input is
complete, and a row is read once, into registers: 5.18 -> 5.05 ms a step, 4B plain 2.57 -> 2.47
(profiles/results/2026-11-22-h200-norm-ab.json).

Invariant: before `gdc_wait` only the norm's weight is read and nothing is written. The sum over
partials runs in rising z, in fp32, and rounds once; the norm is taken of the rounded sum, so that
it equals the reference up to the order of one reduction. What is rounded to FP8 is x as it would
have been stored.

Cost: T * D * (4 Z + 2 + 4) bytes, at T = 16, Z = 2, D = 4096 0.9 MB out of L2: bound by the launch
and one reduction, about 2 us.

Legend: T rows, D hidden, Z partial sums, F FP8 rows that hold a row of x (fp8_rows.py), 0: it stays
as it is.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.fp8_rows import (
    empty_fp8,
    row_options,
    rows_to_fp8_reference,
    runs_here,
    store_fp8,
)
from graphengine.kernels.launch import on_grid
from graphengine.kernels.qk_norm_rope import sum_partials


def add_rms_norm_reference(
    h_TD: torch.Tensor | None, update: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` in plain torch."""
    sum_TD = sum_partials(update, torch.float32).float()
    if h_TD is not None:
        sum_TD = h_TD.float() + sum_TD
    dtype = like(h_TD, update, weight_D).dtype
    h_TD = sum_TD.to(dtype, copy=True)  # an op's results may not be its arguments
    x_TD = h_TD.float()
    x_TD = x_TD * torch.rsqrt(x_TD.square().mean(-1, keepdim=True) + eps) * weight_D.float()
    return h_TD, x_TD.to(dtype)


def like(h_TD: torch.Tensor | None, update: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    """Whose dtype the results have."""
    if h_TD is not None:
        return h_TD
    return weight_D if update.dim() == 3 else update


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
        h_TD: contiguous [T, D], bf16, fp16 or fp32; None is zero, in update's dtype, or in weight's
            where that is partial sums.
        update: contiguous [T, D] in h's dtype, or fp32 partial sums [Z, T, D].
        weight_D: [D], h's dtype, or fp32 for a weight that it cannot hold (`1 + w`).
        early: let the next kernel start beside the one before this, not behind it. Measured, not
            understood: 4B plain, whose GEMMs have two CTAs a multiprocessor, 2.47 -> 2.42 ms a
            step; 8B, one CTA, 5.05 -> 5.09; FP8 layers, two to four, 63.4 -> 65.6 us.
    Returns: (h_TD, x_TD), new tensors in h's dtype; computed in fp32, rounded once each.
    Raises: ValueError for shapes and strides that the kernel cannot address.
    """
    return torch.ops.graphengine.add_rms_norm(h_TD, update, weight_D, eps, early)


def add_rms_norm_round(
    h_TD: torch.Tensor | None, update: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`add_rms_norm` with x as `fp8.round_rows_fp8` writes it: (h_TD, fp8 [T, D], scale_T)."""
    return torch.ops.graphengine.add_rms_norm_fp8(h_TD, update, weight_D, eps, 1)


def add_rms_norm_split(
    h_TD: torch.Tensor | None, update: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`add_rms_norm` with x as `fp8.split_rows_fp8` writes it: (h_TD, fp8 [2, T, D], scale_T)."""
    return torch.ops.graphengine.add_rms_norm_fp8(h_TD, update, weight_D, eps, 2)


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
    F: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL and EARLY:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    # By 8, as bf16 is loaded: an FP8 store would ask for 16 and exchange rows in shared memory.
    at = tl.max_contiguous(tl.arange(0, BLOCK), 8)
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
    if F:
        store_fp8(x.to(tl.float32), x_out, scales, t, num_rows, at, live, D, F)
    else:
        tl.store(x_out + t * D + at, x, mask=live)


def _launch(h, update, weight, eps, early, F):
    """(h_out, x_out, scales): by the kernel on a GPU, else by the reference."""
    T, D = update.shape[-2:]
    if weight.shape != (D,) or (h is not None and h.shape != (T, D)):
        raise ValueError(
            f"h {None if h is None else tuple(h.shape)}, update {tuple(update.shape)}, weight "
            f"{tuple(weight.shape)}: need [T, D], [T, D] or [Z, T, D], and [D]"
        )
    dtype = like(h, update, weight).dtype
    wanted = torch.float32 if update.dim() == 3 else dtype
    if update.dtype != wanted or weight.dtype not in (dtype, torch.float32):
        raise ValueError(
            f"h is {None if h is None else h.dtype}, update {update.dtype}, weight {weight.dtype}: "
            "need one dtype; float32 for partial sums, and for a weight if you like"
        )
    if not runs_here(weight, D) or not T:
        h_out, x = add_rms_norm_reference(h, update, weight, eps)
        return h_out, *(rows_to_fp8_reference(x, F) if F else (x, x))
    if not (update.is_contiguous() and weight.is_contiguous() and (h is None or h.is_contiguous())):
        raise ValueError("h, update and weight must be contiguous")
    num_parts = update.shape[0] if update.dim() == 3 else 1
    h_out = torch.empty((T, D), dtype=dtype, device=update.device)
    x_out, scales = empty_fp8(h_out, F) if F else (torch.empty_like(h_out), h_out)
    on_grid(_add_rms_norm_kernel, (T,))(
        h if h is not None else h_out,
        update,
        weight,
        h_out,
        x_out,
        scales,
        T,
        eps,
        D=D,
        F=F,
        EARLY=early,
        **row_options(T, D, update.device) | {"Z": num_parts, "ADDS": h is not None},
    )
    return h_out, x_out, scales


# Custom ops, because dynamo does not trace a launch with launch_pdl. All return new tensors.
_SCHEMA = "(Tensor? h, Tensor update, Tensor weight, float eps"


@torch.library.custom_op(
    "graphengine::add_rms_norm",
    mutates_args=(),
    schema=_SCHEMA + ", bool early) -> (Tensor, Tensor)",
)
def _add_rms_norm_op(h, update, weight, eps, early):
    return _launch(h, update, weight, eps, early, 0)[:2]


@_add_rms_norm_op.register_fake
def _(h, update, weight, eps, early):
    x = like(h, update, weight).new_empty(update.shape[-2:])
    return x, torch.empty_like(x)


@torch.library.custom_op(
    "graphengine::add_rms_norm_fp8",
    mutates_args=(),
    schema=_SCHEMA + ", int num_fp8) -> (Tensor, Tensor, Tensor)",
)
def _add_rms_norm_fp8_op(h, update, weight, eps, num_fp8):
    return _launch(h, update, weight, eps, False, num_fp8)


@_add_rms_norm_fp8_op.register_fake
def _(h, update, weight, eps, num_fp8):
    x = like(h, update, weight).new_empty(update.shape[-2:])
    return x, *empty_fp8(x, num_fp8)
