"""DFlash as a proposer: one forward of the drafter over [anchor, MASK ..] drafts a whole block.

Its attention sees one context row per committed token, which is a function of what the target's
tapped layers gave for it: `tap` keeps those outputs, `context` turns them into the drafter's K/V.
All rows are written, rejected ones too: the next block overwrites those slots before anything
attends to them. The K/V lies behind the target's page table.

Legend: B requests, G rows of a draft forward, T rows, N / H query heads / head dim,
C = taps * hidden, X = L * 2 * K * H.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor

from graphengine import names
from graphengine.capture.steps import Carry, Dense, Step
from graphengine.config.draft import DraftConfig
from graphengine.config.options import DraftQuantization
from graphengine.decode.buffers import Arena, StepBuffers
from graphengine.decode.proposer import Attends, Attentions, Proposer
from graphengine.decode.segments import LastWeights, Segments
from graphengine.decode.stack import Rows, Stack, Tap, Target, layer_steps
from graphengine.kernels.context_kv import context_kv_write_
from graphengine.kernels.skinny_config import SKINNY_T
from graphengine.kernels.write_tap import write_tap_
from graphengine.models.dflash import ContextWeights, DraftWeights
from graphengine.models.layers import Matrix, rms_norm

# Most rows of a drafter's forward in FP8. Up to these our GEMM keeps activations exact; above them
# they are rounded as well, which only "fp8-dynamic" does.
MAX_QUANTIZED_ROWS: dict[DraftQuantization, float] = {
    "none": 0,
    "fp8": SKINNY_T,
    "fp8-dynamic": math.inf,
}


class DFlashBuffers(NamedTuple):
    """What the drafter keeps between replays. Where a draft forward has as many rows as a verify,
    the first three are the step's own memory; else the chain copies them, because an anchor-first
    drafter has one row less than a verify."""

    block_ids_BG: Tensor  # int64
    positions_T: Tensor  # int64
    slots_T: Tensor  # int64
    taps_TC: Tensor  # model dtype; T rows of a verify
    attn_TNH: Tensor  # model dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlash(Proposer):
    """A loaded drafter.

    Embedding and head are the target's own tensors or the drafter's. With a reduced vocabulary
    `target_ids_V` maps a row of the head to the target's id.
    """

    config: DraftConfig
    weights: DraftWeights
    embed_VD: Tensor
    lm_head_VD: Matrix
    kv_pool: Tensor
    target_ids_V: Tensor | None = None
    quantized: tuple[DraftWeights, Matrix] | None = None
    """Weights and head in FP8, for forwards of few enough rows."""
    max_quantized_rows: float = 0
    target: Target | None = None
    """Whose final norm stands in front of a tap of the last layer."""

    @property
    def num_draft_tokens(self) -> int:
        return self.config.num_draft_tokens

    @property
    def mask_token_id(self) -> int:
        return self.config.mask_token_id

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    @property
    def attends(self) -> tuple[Attends, ...]:
        config = self.config
        rules = dict.fromkeys(config.attention_rules)
        return tuple(Attends(config.model, rule, config.block_size) for rule in rules)

    @property
    def tensors(self) -> Any:
        return self.weights, self.embed_VD, self.lm_head_VD, self.target_ids_V, self.quantized

    @property
    def kv_pools(self) -> tuple[Tensor, ...]:
        return (self.kv_pool,)

    def shortened(self, num_draft_tokens: int) -> Self:
        return replace(self, config=self.config.shortened(num_draft_tokens))

    def buffers(self, arena: Arena, num_requests: int) -> DFlashBuffers:
        config, dtype = self.config, arena.dtype
        block, heads = config.block_size, config.model.num_attention_heads
        prefix = "" if block == config.num_verify_rows else "draft_"
        rows, taps = num_requests * block, config.num_taps * config.tap_size
        return DFlashBuffers(
            arena.take(f"{prefix}block_ids", num_requests, block),
            arena.take(f"{prefix}positions", rows),
            arena.take(f"{prefix}slots", rows),
            arena.take("taps", num_requests * config.num_verify_rows, taps, dtype=dtype),
            arena.take("draft_attn", rows, heads, config.model.head_dim, dtype=dtype),
        )

    def propose(
        self, buffers: StepBuffers, attentions: Attentions, segments: Segments
    ) -> list[Step]:
        """[anchor, MASK..] -> draft ids, one forward over the block."""
        config, own = self.config, cast(DFlashBuffers, buffers.own)
        weights, lm_head_VD = self.at(own.positions_T.shape[0])
        eps = config.model.rms_norm_eps
        stack = Stack(self.embed_VD, weights.layers, weights.rope_PH, self.kv_pool, eps)
        rows = Rows(own.block_ids_BG.view(-1), own.positions_T, own.slots_T)
        by_layer = [attentions[rule] for rule in config.attention_rules]
        steps = layer_steps("draft", stack, rows, by_layer, own.attn_TNH, segments)
        behind = LastWeights(weights.layers[-1], weights.norm_D, lm_head_VD)
        anchor_first = config.slot_convention == "anchor-first"
        if anchor_first:
            steps[0] = _after_copying_rows(steps[0], buffers)

        def last(carry: Carry) -> Carry:
            if anchor_first:
                _, drafted_T = segments.last(behind, *carry, eps)
            else:
                (drafted_T,) = segments.draft_last(behind, *carry, config.block_size, eps)
            if self.target_ids_V is not None:
                drafted_T = self.target_ids_V.index_select(0, drafted_T.clamp(min=0))
            buffers.draft_ids_BG[:, :1].copy_(buffers.block_ids_BG[:, :1])
            # Logits that are not finite (-1) propose token 0: it costs acceptance alone.
            drafted_BG = drafted_T.view(-1, config.num_draft_tokens)
            torch.clamp(drafted_BG, min=0, out=buffers.draft_ids_BG[:, 1:])
            return ()

        return [*steps, Dense(names.dense_name("draft", len(weights.layers)), last)]

    def tap(self, buffers: StepBuffers) -> Tap:
        return self._writer(cast(DFlashBuffers, buffers.own).taps_TC)

    def context(self, buffers: StepBuffers, segments: Segments) -> list[Step]:
        taps_TC = cast(DFlashBuffers, buffers.own).taps_TC
        positions_T, slots_T = buffers.context_positions_T, buffers.context_slots_T
        return self._context(names.DRAFT_CONTEXT, taps_TC, positions_T, slots_T, segments)

    def prefill(self, rows: Rows) -> tuple[Tap, list[Step]]:
        config = self.config
        shape = rows.token_ids_T.shape[0], config.num_taps * config.tap_size
        taps_TC = self.kv_pool.new_zeros(shape)  # a target that is shortened taps few of them
        return self._writer(taps_TC), self._context(
            names.PREFILL_CONTEXT, taps_TC, rows.positions_T, rows.slots_T, Segments()
        )

    def at(self, num_rows: int) -> tuple[DraftWeights, Matrix]:
        """Weights and head for a forward of `num_rows` rows."""
        if self.quantized is None or num_rows > self.max_quantized_rows:
            return self.weights, self.lm_head_VD
        return self.quantized

    def _writer(self, taps_TC: Tensor) -> Tap:
        """Copies a tapped layer's output into its columns; the last layer's behind the final norm,
        which is where z-lab's code and transformers' `output_hidden_states` have it."""
        target = self.target
        columns = {layer: i * self.config.tap_size for i, layer in enumerate(self.taps)}

        def tap_(layer: int, h_TD: Tensor) -> None:
            if layer not in columns:
                return
            if target is not None and layer + 1 == target.config.num_hidden_layers:
                h_TD = rms_norm(h_TD, target.weights.norm_D, target.config.rms_norm_eps)
            write_tap_(h_TD, taps_TC, columns[layer])

        return tap_

    def _context(
        self, name: str, taps_TC: Tensor, positions_T: Tensor, slots_T: Tensor, segments: Segments
    ) -> list[Step]:
        """The drafter's context K/V of rows that the target has just run."""
        weights, _ = self.at(taps_TC.shape[0])
        eps = self.config.model.rms_norm_eps

        def context(carry: Carry) -> Carry:
            (kv_TX,) = segments.context(ContextWeights.of(weights), taps_TC, eps)
            norms, rope = weights.k_norm_LH, weights.rope_PH
            context_kv_write_(kv_TX, norms, rope, positions_T, slots_T, self.kv_pool, eps)
            return ()

        return [Dense(name, context)]


def _after_copying_rows(step: Step, buffers: StepBuffers) -> Step:
    """`step` behind a copy of the block's rows but each request's last, which only verify runs."""
    own = cast(DFlashBuffers, buffers.own)
    pairs = (
        (own.block_ids_BG, buffers.block_ids_BG),
        (own.positions_T, buffers.positions_T),
        (own.slots_T, buffers.slots_T),
    )

    def run(carry: Carry) -> Carry:
        for rows, block in pairs:
            block_BG = block.view_as(buffers.block_ids_BG)
            rows.view_as(own.block_ids_BG).copy_(block_BG[:, : own.block_ids_BG.shape[1]])
        return step.run(carry)

    return Dense(step.name, run)
