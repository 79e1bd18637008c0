"""The segments: what stands between two mixers' steps of a chain, as pure functions.

Each is compiled by itself, so that equal shapes share one compilation; stack.py builds the chains
from them. They end in a mixer's projection, in token ids or in logits: the head takes its own
argmax where no logits are wanted.

Legend: B requests, G block length, T rows, N / H query heads / head dim, C = taps * hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from graphengine.capture.steps import Carry
from graphengine.decode.simulate import force_acceptance_
from graphengine.models import decoder, dflash, layers
from graphengine.models.decoder import LayerWeights
from graphengine.models.dflash import ContextWeights
from graphengine.models.layers import Matrix, Operand


class LastWeights(NamedTuple):
    """What stands behind the last attention of a stack."""

    layer: LayerWeights
    norm_D: Tensor
    lm_head_VD: Matrix


def first_segment(embed_VD: Tensor, layer: LayerWeights, token_ids_T: Tensor, eps: float) -> Carry:
    """embed + pre(0) -> (h_TD, projected_TE)."""
    return decoder.before_mixing(layer, F.embedding(token_ids_T, embed_VD), None, eps)


def middle_segment(
    done: LayerWeights, layer: LayerWeights, h_TD: Tensor, mixed: Tensor, eps: float
) -> Carry:
    """post(i) + pre(i + 1) -> (h_TD, projected_TE)."""
    return decoder.before_mixing(layer, *decoder.after_mixing(done, h_TD, mixed, eps), eps)


def last_segment(last: LastWeights, h_TD: Tensor, mixed: Tensor, eps: float) -> Carry:
    """post(L - 1) + norm + head + argmax -> (h_TD before the norm, ids_T)."""
    h_TD, x = _final_norm(last, *decoder.after_mixing(last.layer, h_TD, mixed, eps), eps)
    return h_TD, layers.linear_argmax(x, last.lm_head_VD)


def logits_segment(last: LastWeights, h_TD: Tensor, mixed: Tensor, eps: float) -> Carry:
    """`last_segment` without its argmax, for whoever draws: (h_TD before the norm, logits_TV)."""
    h_TD, x = _final_norm(last, *decoder.after_mixing(last.layer, h_TD, mixed, eps), eps)
    return h_TD, layers.linear(x, last.lm_head_VD)


def _final_norm(
    last: LastWeights, h_TD: Tensor, update: Tensor, eps: float
) -> tuple[Tensor, Operand]:
    """`h += update; x = rms_norm(h)` -> (h_TD, x), x as the head takes it."""
    return layers.add_rms_norm(h_TD, update, last.norm_D, eps, last.lm_head_VD)


def row_logits_segment(
    rows_R: Tensor,
    is_tapped: bool,
    last: LastWeights,
    h_TD: Tensor,
    mixed: Tensor,
    eps: float,
) -> Carry:
    """`logits_segment` of the rows with these indices alone: (h_RD, logits_RV).

    Args: is_tapped: somebody reads what the last layer gives for every row: then h_TD of all.
    """
    if not is_tapped:
        return logits_segment(last, h_TD[rows_R], mixed[rows_R], eps)
    h_TD = layers.add(*decoder.after_mixing(last.layer, h_TD, mixed, eps))
    return h_TD, layers.linear(layers.rms_norm(h_TD[rows_R], last.norm_D, eps), last.lm_head_VD)


def draft_last_segment(
    last: LastWeights, h_TD: Tensor, attn_TNH: Tensor, block_length: int, eps: float
) -> Carry:
    """post + norm + head + argmax on rows 1 .. G-1 -> ids [B * (G-1)].

    Slot j predicts the token at its own position; slot 0, the anchor's, is dropped.
    """
    h_TD = layers.add(*decoder.after_mixing(last.layer, h_TD, attn_TNH, eps))
    h_TD = h_TD.unflatten(0, (-1, block_length))[:, 1:].flatten(0, 1)
    return (layers.linear_argmax(layers.rms_norm(h_TD, last.norm_D, eps), last.lm_head_VD),)


def context_segment(weights: ContextWeights, taps_TC: Tensor, eps: float) -> Carry:
    """taps -> fc, hidden_norm, every layer's K/V before k-norm and rope -> (kv_TX,)."""
    return (dflash.context(weights, taps_TC, eps),)


class Segments(NamedTuple):
    """The segment functions in use: plain, or each compiled."""

    first: Callable[..., Carry] = first_segment
    middle: Callable[..., Carry] = middle_segment
    last: Callable[..., Carry] = last_segment
    logits: Callable[..., Carry] = logits_segment
    draft_last: Callable[..., Carry] = draft_last_segment
    context: Callable[..., Carry] = context_segment
    simulate: Callable[..., None] = force_acceptance_
