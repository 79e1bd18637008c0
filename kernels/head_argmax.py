"""The head and its argmax as one: the most likely token of every row, no logits in memory.

Why: greedy decoding wants a token a row, and [256, 151936] bf16 logits are 78 MB that the head
writes and the argmax reads back, twice a step: 39 us of argmax alone (H200, profiles/results/
2026-11-22-h200-8b-profile-one-graph-bs16.json). Here the GEMM of skinny_linear.py ends each tile
with one candidate a row of x (argmax_epilogue.py), and `combine_argmax` reduces those.

Invariant: the answer is `argmax_rows(skinny_linear(x, weight, config, scales))`, bit for bit: equal
sums, rounded to bf16 before they are compared, the lowest index among equals, NOT_FINITE where the
best is no number. So a greedy row gets the same token where the logits are written, because another
row of its batch is sampled.

Cost: the GEMM's, less T * V * 2 bytes of stores; candidates are 8 bytes a row and CTA (up to 64
rows), tile, or consumer of a tile: [256, 1187] is 2.4 MB, [192, 2374] 3.6, out of L2. Two launches.

Legend: T rows, D inputs, V vocabulary, C candidates of a row.
"""

import torch

from graphengine.kernels.argmax import argmax_rows, combine_argmax
from graphengine.kernels.argmax_epilogue import MAX_RANKED
from graphengine.kernels.fp8 import Fp8Scales
from graphengine.kernels.skinny_config import SkinnyConfig, cdiv
from graphengine.kernels.skinny_linear import (
    SCHEMA,
    launch,
    num_ctas,
    prepare,
    resolve,
    runs_tma,
    skinny_linear,
)


def skinny_argmax_reference(
    x_TD: torch.Tensor, weight_VD: torch.Tensor, config: SkinnyConfig, scales: Fp8Scales | None
) -> torch.Tensor:
    """`skinny_argmax` through logits: its reference, and what runs where its kernels do not."""
    return argmax_rows(skinny_linear(x_TD, weight_VD, config, scales))


def skinny_argmax(
    x_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    config: SkinnyConfig | None = None,
    scales: Fp8Scales | None = None,
) -> torch.Tensor:
    """Index of the largest logit of each row.

    out[t] = min{v : y[t, v] == max_w y[t, w]}, y = skinny_linear(x, weight), NaN the largest;
    NOT_FINITE (-1) where that maximum is NaN, +inf or -inf

    Args: as `skinny_linear`. Other GPUs than Hopper, other dtypes than bf16 and FP8 and rows that
        TMA cannot address go through logits.
    Returns: int64 [T], -1 or in [0, V). Clamp it before it indexes anything.
    Raises: ValueError for shapes, dtypes or strides that `skinny_linear` cannot address.
    """
    config = resolve(x_TD, weight_VD, config, swiglu=False)._replace(num_splits=1)
    operands = (x_TD, weight_VD, *(scales or (None, None)))
    return torch.ops.graphengine.skinny_argmax(*operands, list(config))


def _launch(
    x: torch.Tensor, weight_VD: torch.Tensor, scales: Fp8Scales | None, config: SkinnyConfig
) -> torch.Tensor:
    """Both kernels where they run, else the reference."""
    tiles = cdiv(weight_VD.shape[0], config.rows)
    fits = runs_tma(x, weight_VD, config) and x.dtype != torch.float16
    num_ranking = num_ctas(tiles, config, x.device) if fits and not config.cols else tiles
    if not fits or cdiv(tiles, num_ranking) * config.rows > MAX_RANKED:
        return skinny_argmax_reference(x, weight_VD, config, scales)
    num_candidates = num_ranking * max(1, config.consumers)
    candidate_TC = x.new_empty((x.shape[-2], num_candidates), dtype=torch.int64)
    return combine_argmax(launch(x, weight_VD, scales, candidate_TC, config, swiglu=False))


@torch.library.custom_op("graphengine::skinny_argmax", mutates_args=(), schema=SCHEMA)
def _argmax_op(x, weight, x_scale, w_scale, config):
    scales, config, _ = prepare(x, weight, x_scale, w_scale, config, False)
    return _launch(x, weight, scales, config)


@_argmax_op.register_fake
def _(x, weight, x_scale, w_scale, config):
    return x.new_empty(x.shape[-2], dtype=torch.int64)
