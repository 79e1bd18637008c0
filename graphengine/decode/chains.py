"""The chains: which segments and attentions make a forward pass, for the target and the drafter.

Written once; capture/ runs them eagerly, piecewise or as one graph. A chain alternates dense
segments and attentions: `verify.00` = embed + pre(0), `verify.L0.attn`, `verify.01` = post(0) +
pre(1), .. , the last = post + norm + head + argmax, one op without logits where the GEMM is ours;
a step that draws its tokens ends in logits instead. Cutting only at attention lets Inductor fuse
across the layer boundary. A dense step is a compiled segment, which is pure (segments.py), followed
by the one kernel that writes the cache (`kernels.qk_norm_rope`); attention only reads.

Legend: B requests, G block length, T rows, N / H query heads / head dim, C = taps * hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine import names
from graphengine.capture.steps import Attention, Carry, Dense, Step
from graphengine.config.model import DraftConfig, DraftQuantization, ModelConfig
from graphengine.decode.attention import Attention as AttentionBackend
from graphengine.decode.buffers import StepBuffers
from graphengine.decode.sampling import Controls, sample_rows
from graphengine.decode.segments import Segments
from graphengine.decode.simulate import Simulation
from graphengine.kernels.accept import accept_and_advance_
from graphengine.kernels.context_kv import context_kv_write_
from graphengine.kernels.qk_norm_rope import qk_norm_rope_write_
from graphengine.kernels.skinny_config import SKINNY_T
from graphengine.kernels.write_tap import write_tap_
from graphengine.models.dflash import ContextWeights, DraftWeights
from graphengine.models.layers import Matrix
from graphengine.models.qwen3 import LayerWeights, Weights


class Rows(NamedTuple):
    """Where a forward's rows come from and where their K/V goes."""

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A loaded target: config, weights, and its K/V pool [L, 2, num_pages, S, K, H]."""

    config: ModelConfig
    weights: Weights
    kv_pool: Tensor


# Most rows of a drafter's forward in FP8. Up to these our GEMM keeps activations exact; above them
# they are rounded as well, which only "fp8-dynamic" does.
MAX_QUANTIZED_ROWS: dict[DraftQuantization, float] = {
    "none": 0,
    "fp8": SKINNY_T,
    "fp8-dynamic": math.inf,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """A loaded drafter and its K/V pool, which shares the target's page table.

    Embedding and head are the target's own tensors or the drafter's. With a reduced vocabulary
    `target_ids_V` maps a row of the head to the target's id.
    """

    config: DraftConfig
    weights: DraftWeights
    embed_VD: Tensor
    lm_head_VD: Matrix
    kv_pool: Tensor
    target_ids_V: Tensor | None = None
    quantized: DraftWeights | None = None
    """The same weights in FP8 with `quantized_lm_head_VD`, for forwards of few enough rows."""
    quantized_lm_head_VD: Matrix | None = None
    max_quantized_rows: float = 0

    def at(self, num_rows: int) -> tuple[DraftWeights, Matrix]:
        """Weights and head for a forward of `num_rows` rows."""
        if (
            self.quantized is None
            or self.quantized_lm_head_VD is None
            or num_rows > self.max_quantized_rows
        ):
            return self.weights, self.lm_head_VD
        return self.quantized, self.quantized_lm_head_VD


def layer_steps(
    chain: str,
    embed_VD: Tensor,
    layers: tuple[LayerWeights, ...],
    rope_PH: Tensor,
    kv_pool: Tensor,
    rows: Rows,
    attentions: Sequence[AttentionBackend],
    attn_TNH: Tensor,
    eps: float,
    segments: Segments,
    tap_: Callable[[int, Tensor], None] = lambda layer, h_TD: None,
) -> list[Step]:
    """Steps 00, L0.attn, 01, .. , L(n-1).attn of a stack; the caller appends its own last segment.

    The carry after a dense step is (h_TD, q_TNH), after an attention (h_TD, attn_TNH).

    Args:
        attentions: one a layer; layers of one kind share a plan.
        attn_TNH: where attention writes; fixed, so captured segments read it in place.
        tap_: called with (layer, h_TD) for the output of every layer but the last.
    """

    def query(layer: int) -> Callable[[Tensor], Tensor]:
        """Per-head norm, rope and the cache write of a layer's projections; gives the query."""
        weights, kv_cache = layers[layer], kv_pool[layer]

        def run(qkv_TE: Tensor) -> Tensor:
            return qk_norm_rope_write_(
                qkv_TE,
                weights.q_norm_H,
                weights.k_norm_H,
                rope_PH,
                rows.positions_T,
                rows.slots_T,
                kv_cache,
                eps,
            )

        return run

    def first() -> Step:
        query_ = query(0)

        def run(carry: Carry) -> Carry:
            h_TD, qkv_TE = segments.first(embed_VD, layers[0], rows.token_ids_T, eps)
            return h_TD, query_(qkv_TE)

        return Dense(names.dense_name(chain, 0), run)

    def attend(layer: int) -> Step:
        kv_cache, attention = kv_pool[layer], attentions[layer]

        def run(carry: Carry) -> Carry:
            h_TD, q_TNH = carry
            attention.run(q_TNH, kv_cache, attn_TNH)
            return h_TD, attn_TNH

        return Attention(names.attention_name(chain, layer), run)

    def middle(layer: int) -> Step:
        done, following, query_ = layers[layer], layers[layer + 1], query(layer + 1)

        def run(carry: Carry) -> Carry:
            h_TD, qkv_TE = segments.middle(done, following, *carry, eps)
            q_TNH = query_(qkv_TE)
            tap_(layer, h_TD)
            return h_TD, q_TNH

        return Dense(names.dense_name(chain, layer + 1), run)

    steps: list[Step] = [first()]
    for layer in range(len(layers)):
        steps.append(attend(layer))
        if layer + 1 < len(layers):
            steps.append(middle(layer))
    return steps


def tap_writer(config: DraftConfig, taps_TC: Tensor) -> Callable[[int, Tensor], None]:
    """Copies a tapped layer's output into its columns of the taps buffer."""
    hidden = config.tap_size
    columns = {layer: i * hidden for i, layer in enumerate(config.target_layer_ids)}

    def tap_(layer: int, h_TD: Tensor) -> None:
        column = columns.get(layer)
        if column is not None:
            write_tap_(h_TD, taps_TC, column)

    return tap_


def target_chain(
    chain: str,
    target: Target,
    rows: Rows,
    attention: AttentionBackend,
    attn_TNH: Tensor,
    segments: Segments,
    tap_: Callable[[int, Tensor], None],
    end: Callable[..., Carry],
) -> list[Step]:
    """A whole target forward; the last carry is what `end` gives beside h, see `last_step`."""
    config, weights = target.config, target.weights
    steps = layer_steps(
        chain,
        weights.embed_VD,
        weights.layers,
        weights.rope_PH,
        target.kv_pool,
        rows,
        [attention] * config.num_hidden_layers,
        attn_TNH,
        config.rms_norm_eps,
        segments,
        tap_,
    )
    return [*steps, last_step(chain, target, tap_, end)]


def last_step(
    chain: str, target: Target, tap_: Callable[[int, Tensor], None], end: Callable[..., Carry]
) -> Step:
    """The last segment of a target forward, and its tap.

    Args:
        end: `last_segment` (ids_T), `logits_segment` (logits_TV), or either's like.
    """
    config, weights = target.config, target.weights
    final = config.num_hidden_layers - 1
    matrices = (weights.layers[final], weights.norm_D, weights.lm_head_VD)

    def last(carry: Carry) -> Carry:
        h_TD, found = end(*matrices, *carry, config.rms_norm_eps)
        tap_(final, h_TD)
        return (found,)

    return Dense(names.dense_name(chain, final + 1), last)


def _verify_taps(
    drafter: Drafter | None, buffers: StepBuffers
) -> tuple[str, Callable[[int, Tensor], None]]:
    """Name of the chain that a step verifies by, and what it does with layers' outputs."""
    if drafter is None:
        return "decode", lambda layer, h_TD: None
    return "verify", tap_writer(drafter.config, buffers.taps_TC)


def verify_chain(
    target: Target,
    drafter: Drafter | None,
    buffers: StepBuffers,
    attention: AttentionBackend,
    page_size: int,
    segments: Segments,
    simulation: Simulation | None = None,
) -> list[Step]:
    """Target forward over the block, acceptance, the next block's inputs.

    Without a drafter the same chain with one row per request is plain decoding.
    """
    chain, tap_ = _verify_taps(drafter, buffers)
    rows = Rows(buffers.draft_ids_BG.view(-1), buffers.positions_T, buffers.slots_T)
    steps = target_chain(
        chain, target, rows, attention, buffers.attn_TNH, segments, tap_, segments.last
    )

    def accept(carry: Carry) -> Carry:
        target_ids_BG = carry[0].view_as(buffers.draft_ids_BG)
        if simulation is not None:
            segments.simulate(simulation, buffers.draft_ids_BG, target_ids_BG)
        _advance_(drafter, buffers, target_ids_BG, page_size)
        return ()

    return [*steps, Dense(names.ACCEPT, accept)]


def sampled_last_step(
    target: Target, drafter: Drafter | None, buffers: StepBuffers, segments: Segments
) -> Step:
    """The other last step but one of `verify_chain`: it leaves logits, from which
    `sampled_accept_step` takes a greedy request's first choice as well, the same to the bit."""
    chain, tap_ = _verify_taps(drafter, buffers)
    return last_step(chain, target, tap_, segments.logits)


def sampled_accept_step(drafter: Drafter | None, buffers: StepBuffers, page_size: int) -> Step:
    """The other last step of `verify_chain`: the target's tokens are drawn, not its first choices.

    A draft is kept while it equals the draw at its row, so every emitted token is a draw of the
    target given the tokens before it: the drafter's proposal is a point mass, and this is rejection
    sampling for that case.
    """
    controls = Controls(buffers.temperature_B, buffers.top_p_B, buffers.top_k_B, buffers.seed_B)

    def accept(carry: Carry) -> Carry:
        (logits_TV,) = carry
        drawn_T = sample_rows(logits_TV, buffers.positions_T, controls)
        _advance_(drafter, buffers, drawn_T.view_as(buffers.draft_ids_BG), page_size)
        return ()

    return Dense(names.ACCEPT, accept)


def _advance_(
    drafter: Drafter | None, buffers: StepBuffers, target_ids_BG: Tensor, page_size: int
) -> None:
    """Accepts drafts that equal the target's tokens, and tells the host.

    Mutates: the block's and the context's buffers, the results.
    """
    accept_and_advance_(
        buffers.draft_ids_BG,
        target_ids_BG,
        buffers.start_B,
        buffers.page_table_BW,
        buffers.block_ids_BG,
        buffers.positions_T,
        buffers.slots_T,
        buffers.context_positions_T,
        buffers.context_slots_T,
        buffers.step_B,
        buffers.results_BX,
        # Without a drafter the block has no mask rows; any id will do.
        drafter.config.mask_token_id if drafter else 0,
        page_size,
    )


def context_chain(
    drafter: Drafter,
    taps_TC: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    segments: Segments,
    name: str = names.DRAFT_CONTEXT,
) -> list[Step]:
    """One step: the drafter's context K/V of rows that the target has just run.

    All rows are written, rejected ones too: the next block overwrites those slots before anything
    attends to them, so no shape depends on how many were accepted.
    """

    weights, _ = drafter.at(taps_TC.shape[0])

    def context(carry: Carry) -> Carry:
        eps = drafter.config.model.rms_norm_eps
        (kv_TX,) = segments.context(ContextWeights.of(weights), taps_TC, eps)
        context_kv_write_(
            kv_TX, weights.k_norm_LH, weights.rope_PH, positions_T, slots_T, drafter.kv_pool, eps
        )
        return ()

    return [Dense(name, context)]


def draft_chain(
    drafter: Drafter,
    buffers: StepBuffers,
    attentions: Sequence[AttentionBackend],
    segments: Segments,
) -> list[Step]:
    """[anchor, MASK..] -> draft ids, one forward over the block.

    Args:
        attentions: one a layer, by `DraftConfig.attention_rules`.
    """
    config = drafter.config
    weights, lm_head_VD = drafter.at(buffers.draft_positions_T.shape[0])
    eps = config.model.rms_norm_eps
    rows = Rows(
        buffers.draft_block_ids_BG.view(-1), buffers.draft_positions_T, buffers.draft_slots_T
    )
    steps = layer_steps(
        "draft",
        drafter.embed_VD,
        weights.layers,
        weights.rope_PH,
        drafter.kv_pool,
        rows,
        attentions,
        buffers.draft_attn_TNH,
        eps,
        segments,
    )
    anchor_first = config.slot_convention == "anchor-first"
    if anchor_first:
        steps[0] = _after_copying_rows(steps[0], buffers)

    def last(carry: Carry) -> Carry:
        h_TD, attn_TNH = carry
        end = (weights.layers[-1], weights.norm_D, lm_head_VD, h_TD, attn_TNH)
        if anchor_first:
            _, drafted_T = segments.last(*end, eps)
        else:
            (drafted_T,) = segments.draft_last(*end, config.block_size, eps)
        if drafter.target_ids_V is not None:
            drafted_T = drafter.target_ids_V.index_select(0, drafted_T.clamp(min=0))
        buffers.draft_ids_BG[:, :1].copy_(buffers.block_ids_BG[:, :1])
        # A drafter whose logits are not finite (-1) proposes token 0: it costs acceptance alone.
        drafted_BG = drafted_T.view(-1, config.num_draft_tokens)
        torch.clamp(drafted_BG, min=0, out=buffers.draft_ids_BG[:, 1:])
        return ()

    steps.append(Dense(names.dense_name("draft", len(weights.layers)), last))
    return steps


def _after_copying_rows(step: Step, buffers: StepBuffers) -> Step:
    """`step` behind a copy of the block's rows but each request's last, which only verify runs."""

    def run(carry: Carry) -> Carry:
        rows_BG, block_BG = buffers.draft_block_ids_BG, buffers.block_ids_BG
        for rows, block in (
            (rows_BG, block_BG),
            (buffers.draft_positions_T, buffers.positions_T),
            (buffers.draft_slots_T, buffers.slots_T),
        ):
            rows.view_as(rows_BG).copy_(block.view_as(block_BG)[:, : rows_BG.shape[1]])
        return step.run(carry)

    return Dense(step.name, run)
