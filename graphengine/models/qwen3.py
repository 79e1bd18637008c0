"""The Qwen3 dense transformer as pure functions, cut at attention.

One layer is `post_attention(pre_attention -> attention)`; between the cuts sits everything that
Inductor compiles and a CUDA graph captures. The drafter reuses the same layer functions.

Legend: T rows, V vocabulary, D hidden, N / K / H query heads / kv heads / head dim, F = N * H,
E = (N + 2K) * H, I MLP width, J = 2 * I, P positions.
Source: Qwen3 technical report (arXiv 2505.09388); golden-tested against transformers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from graphengine.models.layers import (
    Matrix,
    Rows,
    add_rms_norm,
    linear,
    linear_argmax,
    linear_partials,
    linear_swiglu,
    rms_norm,
)


class LayerWeights(NamedTuple):
    """One decoder layer, fields in the order of use."""

    input_norm_D: Tensor
    qkv_ED: Matrix  # rows [q | k | v]
    qkv_bias_E: Tensor | None
    q_norm_H: Tensor
    k_norm_H: Tensor
    o_DF: Matrix
    o_bias_D: Tensor | None
    post_norm_D: Tensor
    gate_up_JD: Matrix  # rows [gate | up]
    down_DI: Matrix


class Weights(NamedTuple):
    """A whole target. `lm_head_VD` is `embed_VD` itself when the checkpoint ties them."""

    embed_VD: Tensor
    layers: tuple[LayerWeights, ...]
    norm_D: Tensor
    lm_head_VD: Tensor
    rope_PH: Tensor  # float32, see layers.rope_table


def embed(embed_VD: Tensor, token_ids_T: Tensor) -> Tensor:
    """Rows of the embedding table: ids [T] -> h_TD."""
    return F.embedding(token_ids_T, embed_VD)


def pre_attention(
    layer: LayerWeights, h_TD: Tensor, update: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Input norm and the packed projection: `h += update; rms_norm(h) @ Wqkv^T` -> (h_TD, qkv_TE),
    rows [q | k | v], or its partial sums qkv_ZTE.

    `update` is what the layer before left to add; None for the embedding. Per-head norm, rope and
    the cache write follow in `kernels.qk_norm_rope`, one kernel on a GPU.
    """
    if update is None:
        x = rms_norm(h_TD, layer.input_norm_D, eps)
    else:
        projection = (layer.qkv_ED, layer.qkv_bias_E)
        h_TD, x = add_rms_norm(h_TD, update, layer.input_norm_D, eps, *projection)
    return h_TD, linear_partials(x, layer.qkv_ED, layer.qkv_bias_E)


def post_attention(
    layer: LayerWeights, h_TD: Tensor, attn_TNH: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`h += attn @ Wo^T;  update = down(swiglu(rms_norm(h)))` -> (h_TD, update).

    The update, [T, D] or partial sums [Z, T, D], is added by whatever norm comes next.
    """
    update = linear_partials(attn_TNH.flatten(1), layer.o_DF, layer.o_bias_D)
    h_TD, x = add_rms_norm(h_TD, update, layer.post_norm_D, eps, layer.gate_up_JD)
    return h_TD, linear_partials(linear_swiglu(x, layer.gate_up_JD), layer.down_DI)


def final_norm(
    norm_D: Tensor, lm_head_VD: Matrix, h_TD: Tensor, update: Tensor | None, eps: float
) -> tuple[Tensor, Rows]:
    """`h += update; x = rms_norm(h)` -> (h_TD, x), x as the head takes it."""
    if update is None:
        return h_TD, rms_norm(h_TD, norm_D, eps)
    return add_rms_norm(h_TD, update, norm_D, eps, lm_head_VD)


def logits(
    norm_D: Tensor, lm_head_VD: Matrix, h_TD: Tensor, update: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Final norm and head: `h += update; rms_norm(h) @ W^T` -> (h_TD, logits_TV in h's dtype)."""
    h_TD, x = final_norm(norm_D, lm_head_VD, h_TD, update, eps)
    return h_TD, linear(x, lm_head_VD)


def greedy(
    norm_D: Tensor, lm_head_VD: Matrix, h_TD: Tensor, update: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """`logits`, of which each row's first choice alone is wanted -> (h_TD, ids_T); -1 where logits
    are not finite."""
    h_TD, x = final_norm(norm_D, lm_head_VD, h_TD, update, eps)
    return h_TD, linear_argmax(x, lm_head_VD)
