"""The DFlash drafter (arXiv 2602.06036, z-lab checkpoints): what it has beyond decoder layers.

A drafter layer is a Qwen3 layer over the block's rows; its attention also sees one context row per
committed token. A context row is a pure function of the target's tapped hidden states and its
position, so it is computed once, for all layers in one GEMM, and cached like any K/V. It never
passes a layer's input norm, has no query and no MLP.

Legend: T rows, C = taps * target hidden, D hidden, L layers, K / H kv heads / head dim,
X = L * 2 * K * H.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.config.draft import DraftConfig
from graphengine.models.decoder import LayerFields, LayerWeights
from graphengine.models.layers import Matrix, add_rms_norm, linear, linear_partials
from graphengine.models.weight import Fields, Weight, norm


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
        """A drafter's."""
        return cls(*(getattr(weights, name) for name in cls._fields))


def outer_weights(config: DraftConfig) -> Fields:
    """Declares what a drafter has around its layers, but for its vocabulary."""
    hidden = config.model.hidden_size
    return {
        "fc_DC": (Weight("fc.weight", (hidden, config.num_taps * config.tap_size), 1),),
        "hidden_norm_D": norm("hidden_norm.weight", hidden),
        "norm_D": norm("norm.weight", hidden),
    }


def context_parts(layer: LayerFields) -> tuple[Weight, ...]:
    """Those tensors of a layer whose rows are packed again for the context: k and v."""
    return layer.mixer["qkv_ED"][1:]


def vocabulary_weights(config: DraftConfig, has: Callable[[str], bool], prefix: str = "") -> Fields:
    """Declares the tables that are the drafter's own; those that it lacks are the target's.

    A table that stands in the file is declared, even if its values turn out to be the target's.
    `d2t` holds offsets: target id = i + d2t[i]; `t2d` marks the same ids.

    Args: has: whether the file has a tensor of that name.
    """
    vocab, hidden, num_ids = config.model.vocab_size, config.model.hidden_size, config.num_draft_ids
    has_width, reduced = config.tap_size == hidden, num_ids != vocab
    embed = Weight(f"{prefix}embed_tokens.weight", (vocab, hidden), 0)
    head = Weight("lm_head.weight", (num_ids, hidden), 0)
    offsets = Weight("d2t", (num_ids,), dtype=torch.int64)
    marks = Weight("t2d", (vocab,), dtype=torch.int64)
    has_marks = has(marks.name)
    declared = {
        "embed_VD": (embed, has(embed.name) or not has_width),
        "lm_head_VD": (head, has(head.name) or not has_width or reduced),
        "offsets_V": (offsets, has(offsets.name) or has_marks or reduced),
        "marks_V": (marks, has_marks),
    }
    return {field: (weight,) if is_own else () for field, (weight, is_own) in declared.items()}


def context(weights: ContextWeights, taps_TC: Tensor, eps: float) -> Tensor:
    """K/V of context rows, before k-norm and rope: `rms_norm(taps @ fc^T) @ Wkv^T`.

    Args: taps_TC: [T, C] target hidden states after each tapped layer, concatenated in tap order.

    Returns:
        kv_TX: [T, X], each row laid out [L, 2, K, H].
    """
    fused = linear_partials(taps_TC, weights.fc_DC)
    kv_XD, bias_X = weights.context_kv_XD, weights.context_kv_bias_X
    _, ctx = add_rms_norm(None, fused, weights.hidden_norm_D, eps, kv_XD, bias_X)
    return linear(ctx, kv_XD, bias_X)
