"""The DFlash drafter (arXiv 2602.06036, z-lab checkpoints): what it has beyond Qwen3 layers.

A drafter layer is a Qwen3 layer over the block's rows; its attention also sees one context row per
committed token. A context row is a pure function of the target's tapped hidden states and its
position, so it is computed once, for all layers in one GEMM, and cached like any K/V. It never
passes a layer's input norm, has no query and no MLP.

Legend: T rows, C = taps * target hidden, D hidden, L layers, K / H kv heads / head dim,
X = L * 2 * K * H.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from graphengine.models.layers import Matrix, add_rms_norm, linear, linear_partials
from graphengine.models.qwen3 import LayerWeights


class DraftWeights(NamedTuple):
    """A whole drafter but for its `DraftVocabulary`."""

    fc_DC: Matrix  # columns in the order of target_layer_ids
    hidden_norm_D: Tensor
    context_kv_XD: Matrix  # rows [L, 2, K, H]: every layer's k_proj and v_proj
    context_kv_bias_X: Tensor | None
    k_norm_LH: Tensor
    layers: tuple[LayerWeights, ...]
    norm_D: Tensor
    rope_PH: Tensor  # float32; the drafter's own theta


class DraftVocabulary(NamedTuple):
    """How a drafter reads and names tokens: with the target's own tensors, or with its own."""

    embed_VD: Tensor  # rows by target id
    lm_head_VD: Tensor  # rows by draft id
    target_ids_V: Tensor | None  # int64, draft id -> target id; None where they are the same


class ContextWeights(NamedTuple):
    """What a context row is computed from; no rope, so of no length."""

    fc_DC: Matrix
    hidden_norm_D: Tensor
    context_kv_XD: Matrix
    context_kv_bias_X: Tensor | None

    @classmethod
    def of(cls, weights: DraftWeights) -> ContextWeights:
        """Those of a drafter."""
        return cls(*(getattr(weights, name) for name in cls._fields))


def context(weights: ContextWeights, taps_TC: Tensor, eps: float) -> Tensor:
    """K/V of context rows, before k-norm and rope: `rms_norm(taps @ fc^T) @ Wkv^T`.

    Args:
        taps_TC: [T, C] target hidden states after each tapped layer, concatenated in tap order.

    Returns:
        kv_TX: [T, X], each row laid out [L, 2, K, H].
    """
    fused = linear_partials(taps_TC, weights.fc_DC)
    kv = (weights.context_kv_XD, weights.context_kv_bias_X)
    _, ctx = add_rms_norm(None, fused, weights.hidden_norm_D, eps, *kv)
    return linear(ctx, *kv)
