"""FP8 operands of the skinny GEMM: rows of e4m3 with one scale each.

Weights are rounded once; an activation row is kept as the sum of two FP8 rows, which hold bf16's
mantissa, so that a product rounds the weights alone. Where tensor cores are the limit, two rows
cost twice as much as one: there an activation may be rounded as well (`round_rows_fp8`). Both
in plain torch; fp8_rows.py is their kernel.
"""

from typing import NamedTuple

import torch

FP8 = torch.float8_e4m3fn


class Fp8Scales(NamedTuple):
    """With FP8 operands: x is `split_rows_fp8`'s [2, T, D] or `round_rows_fp8`'s [T, D], weight
    `quantize_rows_fp8`'s."""

    x_T: torch.Tensor  # fp32
    weight_E: torch.Tensor  # fp32, contiguous


class Fp8Rows(NamedTuple):
    """Activations as `split_rows_fp8` or `round_rows_fp8` writes them."""

    rows: torch.Tensor  # [2, T, D]: hi, lo; or [T, D]
    scale_T: torch.Tensor  # fp32


def quantize_rows_fp8(weight_ED: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds each row to e4m3 with a scale of its own: `weight[e] ~ fp8[e] * scale[e]`.

    scale[e] = max_d |weight[e, d]| / 448; the relative error of an element is at most 2^-4 where
    fp8 is normal (over 2^-6 * scale).

    Returns: (float8_e4m3fn [E, D], fp32 scale_E [E]), on weight's device.
    """
    quantized = torch.empty_like(weight_ED, dtype=FP8, memory_format=torch.contiguous_format)
    scale_E = torch.empty(weight_ED.shape[0], dtype=torch.float32, device=weight_ED.device)
    chunk = 16384  # rows at a time: an lm_head in fp32 is 2.5 GB
    for first in range(0, weight_ED.shape[0], chunk):
        part = slice(first, first + chunk)
        quantized[part], scale_E[part] = round_rows_fp8(weight_ED[part])
    return quantized, scale_E


def round_rows_fp8(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_rows_fp8` of activations, without its loop.

    Returns: (float8_e4m3fn [T, D], fp32 scale_T [T]).
    """
    x32 = x_TD.float()
    limit = torch.finfo(FP8).max
    scale_T = x32.abs().amax(dim=-1).clamp(min=1e-12) / limit
    return (x32 / scale_T[:, None]).clamp(-limit, limit).to(FP8), scale_T


def split_rows_fp8(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes each row as the sum of two e4m3 rows with one scale: `x ~ (hi + lo) * scale`.

    scale[t] = max_d |x[t, d]| / 448; hi = fp8(x / scale); lo = fp8(x / scale - hi). The error of an
    element is at most max(2^-8 |x|, 2^-10 scale), which is bf16's own or 2e-6 of the row's maximum.

    Returns: (float8_e4m3fn [2, T, D], fp32 scale_T [T]).
    """
    x32 = x_TD.float()
    scale_T = x32.abs().amax(dim=-1).clamp(min=1e-12) / torch.finfo(FP8).max
    scaled = x32 / scale_T[:, None]
    hi = scaled.to(FP8)
    lo = (scaled - hi.float()).to(FP8)
    return torch.stack([hi, lo]), scale_T


def widened(
    x: torch.Tensor, weight_ED: torch.Tensor, scales: Fp8Scales | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operands as the references take them: FP8 multiplied out to fp32."""
    if scales is None:
        return x, weight_ED
    x32 = x.float().sum(0) if x.dim() == 3 else x.float()
    return x32 * scales.x_T[:, None], weight_ED.float() * scales.weight_E[:, None]
