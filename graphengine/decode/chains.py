"""The chains of a step: verify and accept for the target; draft and context for the drafter.

Legend: B requests, G block length, T rows, N / H query heads / head dim, C = taps * hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphengine import names
from graphengine.capture.steps import Carry, Dense, Step
from graphengine.config.draft import DraftConfig
from graphengine.config.engine import DraftQuantization
from graphengine.decode.attention import Attention as AttentionBackend
from graphengine.decode.buffers import StepBuffers
from graphengine.decode.sampling import Controls, sample_rows
from graphengine.decode.segments import Segments
from graphengine.decode.simulate import Simulation
from graphengine.decode.stack import Rows, Target, last_step, layer_steps, target_chain
from graphengine.kernels.accept import accept_and_advance_
from graphengine.kernels.context_kv import context_kv_write_
from graphengine.kernels.skinny_config import SKINNY_T
from graphengine.kernels.write_tap import write_tap_
from graphengine.models.dflash import ContextWeights, DraftWeights
from graphengine.models.layers import Matrix

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


def tap_writer(config: DraftConfig, taps_TC: Tensor) -> Callable[[int, Tensor], None]:
    """Copies a tapped layer's output into its columns of the taps buffer."""
    hidden = config.tap_size
    columns = {layer: i * hidden for i, layer in enumerate(config.target_layer_ids)}

    def tap_(layer: int, h_TD: Tensor) -> None:
        column = columns.get(layer)
        if column is not None:
            write_tap_(h_TD, taps_TC, column)

    return tap_


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
