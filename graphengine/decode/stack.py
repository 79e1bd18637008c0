"""A stack of layers as a chain: which segments and attentions make a forward pass.

Written once; capture/ runs a chain eagerly, piecewise or as one graph. It alternates dense segments
and attentions: `verify.00` = embed + pre(0), `verify.L0.attn`, `verify.01` = post(0) + pre(1), .. ,
the last = post + norm + head and what an end makes of it. Cutting only at attention lets Inductor
fuse across the layer boundary. A dense step is a compiled segment, which is pure (segments.py),
followed by the mixer's kernel that writes its state (`models.decoder.Mixer`); attention only reads.

Legend: T rows, N / K / H query heads / kv heads / head dim, L layers that attend, S page size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from graphengine import names
from graphengine.capture.steps import AttentionStep, Carry, Dense, Step
from graphengine.config.model import ModelConfig
from graphengine.decode.attention import Attention, LayerAttentions
from graphengine.decode.recurrence import Recurrence, States
from graphengine.decode.segments import LastWeights, Segments
from graphengine.models.attention import AttentionWeights
from graphengine.models.decoder import LayerWeights, Weights, mixer_of
from graphengine.models.gated_delta import GatedDeltaWeights

Tap = Callable[[int, Tensor], None]
"""Called with (layer, h_TD) for the output of every layer."""


def no_tap(layer: int, h_TD: Tensor) -> None:
    """The tap of a forward whose hidden states nobody reads."""


class Rows(NamedTuple):
    """Where a forward's rows come from and where their K/V goes."""

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    slots_T: Tensor  # int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A loaded target: config, weights, its K/V pool [L, 2, num_pages, S, K, H] of the layers that
    attend, and the states of those that have one of a fixed size."""

    config: ModelConfig
    weights: Weights
    kv_pool: Tensor
    states: States | None = None

    def shortened(self, num_layers: int) -> Target:
        """The first layers alone, as many as there are."""
        layers = self.weights.layers[:num_layers]
        config = self.config.shortened(len(layers))
        return replace(self, config=config, weights=self.weights._replace(layers=layers))


class Stack(NamedTuple):
    """Layers as a forward runs them, a target's or a drafter's."""

    embed_VD: Tensor
    layers: tuple[LayerWeights, ...]
    rope_PH: Tensor
    kv_pool: Tensor
    eps: float


def layer_steps(
    chain: str,
    stack: Stack,
    rows: Rows,
    attentions: Sequence[Attention],
    attn_TNH: Tensor,
    segments: Segments,
    tap_: Tap = no_tap,
    recurrence: Recurrence | None = None,
) -> list[Step]:
    """Steps 00, L0.attn, 01, .. , L(n-1).attn of a stack; the caller appends its own last segment,
    and the last layer's tap. A recurrent layer's step is L0.delta, which nobody plans.

    The carry after a dense step is (h_TD, q_TNH), and the projection too where the mixer gates;
    after an attention (h_TD, attn_TNH).

    Args:
        attentions: one a layer; layers of one kind share a plan.
        attn_TNH: where attention writes; fixed, so captured segments read it in place.
        recurrence: runs recurrent layers.
    """
    embed_VD, layers, rope_PH, kv_pool, eps = stack
    is_paged = [mixer_of(weights).write_state_ is not None for weights in layers]

    def dense(layer: int) -> Step:
        """The segment in front of a layer's mixing, and what its mixer writes."""
        weights, mixer = layers[layer], mixer_of(layers[layer])
        write_state_, where = mixer.write_state_, ()
        if write_state_ is not None:
            kv_cache = kv_pool[sum(is_paged[:layer])]
            where = rope_PH, rows.positions_T, rows.slots_T, kv_cache, eps

        def run(carry: Carry) -> Carry:
            if layer == 0:
                h_TD, projected = segments.first(embed_VD, weights, rows.token_ids_T, eps)
            else:
                h_TD, mixed = carry
                h_TD, projected = segments.middle(layers[layer - 1], weights, h_TD, mixed, eps)
            query = projected
            if write_state_ is not None:
                query = write_state_(weights.mixer, projected, *where)
            if layer:
                tap_(layer - 1, h_TD)
            return (h_TD, query, projected) if mixer.gates else (h_TD, query)

        return Dense(names.dense_name(chain, layer), run)

    def attend(layer: int) -> Step:
        kv_cache, attention = kv_pool[sum(is_paged[:layer])], attentions[layer]
        mixer = layers[layer].mixer
        sinks_N = mixer.sinks_N if isinstance(mixer, AttentionWeights) else None

        def run(carry: Carry) -> Carry:
            h_TD, q_TNH, *gate = carry
            gate_TE = gate[0] if gate else None
            attention.run(q_TNH, kv_cache, attn_TNH, gate_TE, sinks_N)
            return h_TD, attn_TNH

        return AttentionStep(names.attention_name(chain, layer), run)

    def recur(layer: int) -> Step:
        weights, index = layers[layer].mixer, layer - sum(is_paged[:layer])
        assert recurrence is not None and isinstance(weights, GatedDeltaWeights)
        mix = recurrence.run

        def run(carry: Carry) -> Carry:
            h_TD, projected_TE = carry
            return h_TD, mix(weights, index, projected_TE, eps)

        return Dense(names.delta_name(chain, layer), run)

    mixings = [attend if paged else recur for paged in is_paged]
    return [step for i, mixing in enumerate(mixings) for step in (dense(i), mixing(i))]


def target_chain(
    chain: str,
    target: Target,
    rows: Rows,
    attention: LayerAttentions,
    attn_TNH: Tensor,
    segments: Segments,
    tap_: Tap,
    recurrence: Recurrence | None = None,
) -> list[Step]:
    """A target forward up to its last mixing; `last_step` follows."""
    weights, eps = target.weights, target.config.rms_norm_eps
    stack = Stack(weights.embed_VD, weights.layers, weights.rope_PH, target.kv_pool, eps)
    return layer_steps(chain, stack, rows, attention.layers, attn_TNH, segments, tap_, recurrence)


def last_step(chain: str, target: Target, tap_: Tap, end: Callable[..., Carry]) -> Step:
    """The last segment of a target forward, and its tap.

    Args: end: `last_segment` (ids_T), `logits_segment` (logits_TV), or either's like.
    """
    config, weights = target.config, target.weights
    final = config.num_hidden_layers - 1
    behind = LastWeights(weights.layers[final], weights.norm_D, weights.lm_head_VD)

    def last(carry: Carry) -> Carry:
        h_TD, mixed = carry
        h_TD, found = end(behind, h_TD, mixed, config.rms_norm_eps)
        tap_(final, h_TD)
        return (found,)

    return Dense(names.dense_name(chain, final + 1), last)
