"""What proposes: all that a step, a prefill and a plan know of a drafter, and the loaded pair.

    propose   committed state -> draft_ids_BG[:, 1:]; the anchor stands in block_ids_BG[:, 0]
    context   what the target has just run (taps, ids or nothing) -> the drafter's own state

Acceptance compares ids row by row and knows no drafter; `graphengine.drafters` holds them.

Invariant: no shape depends on data and no step waits for the host. `context` is given all rows of
the block, rejected ones too: what it writes for those is overwritten before anything reads it.
Where attention is planned, `context` and the first step of `propose` are run again when a row
begins: on the same state they must leave the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Self

from torch import Tensor

from graphengine.capture.steps import Step
from graphengine.config.draft import AttentionRule
from graphengine.config.draft_length import draft_at
from graphengine.config.engine import EngineConfig
from graphengine.config.model import ModelConfig
from graphengine.decode.adjustments import take_tables
from graphengine.decode.attention import Attention
from graphengine.decode.buffers import Arena, StepBuffers
from graphengine.decode.kvcache import pages_for
from graphengine.decode.logprobs import Scores
from graphengine.decode.masks import take_grammar
from graphengine.decode.recurrence import take_buffers
from graphengine.decode.request import Request
from graphengine.decode.segments import Segments
from graphengine.decode.simulate import Simulation
from graphengine.decode.stack import Rows, Tap, Target, no_tap

Attentions = Mapping[AttentionRule, Attention]
"""What a propose chain attends with, by rule."""


class Attends(NamedTuple):
    """One kind of attention that a chain runs: `rows` query rows a request."""

    model: ModelConfig
    rule: AttentionRule
    rows: int


class Proposer:
    """A loaded drafter. This one proposes nothing: a block is one row, and the same loop decodes
    plainly; a drafter overrides what it does."""

    @property
    def num_draft_tokens(self) -> int:
        """Tokens proposed a step, G - 1."""
        return 0

    @property
    def mask_token_id(self) -> int:
        """What a block holds behind its anchor before it is drafted."""
        return 0

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target that `tap` reads."""
        return ()

    @property
    def attends(self) -> tuple[Attends, ...]:
        """Every kind of attention of the propose chain once."""
        return ()

    @property
    def tensors(self) -> Any:
        """Weights and pools, a tree; for counting bytes."""
        return ()

    @property
    def kv_pools(self) -> tuple[Tensor, ...]:
        """What stands behind the target's page table, [.., .., num_pages, ..]."""
        return ()

    def shortened(self, num_draft_tokens: int) -> Self:
        """The same, proposing fewer tokens."""
        assert num_draft_tokens == 0
        return self

    def buffers(self, arena: Arena, num_requests: int) -> tuple[Tensor, ...]:
        """What it keeps between replays, `StepBuffers.own`: a NamedTuple of its own."""
        return ()

    def propose(
        self, buffers: StepBuffers, attentions: Attentions, segments: Segments
    ) -> list[Step]:
        """The chain that writes `buffers.draft_ids_BG`; empty where nothing is proposed."""
        return []

    def published_(self, buffers: StepBuffers) -> None:
        """Takes note of drafts that a grammar may have changed. Mutates: buffers.own."""

    def tap(self, buffers: StepBuffers) -> Tap:
        """What a verify does with the outputs of the target's layers."""
        return no_tap

    def context(self, buffers: StepBuffers, segments: Segments) -> list[Step]:
        """The chain behind acceptance; rows stand at `context_positions_T`, `context_slots_T`."""
        return []

    def prefill(self, rows: Rows) -> tuple[Tap, list[Step]]:
        """A prompt's rows: what taps them, and the chain behind the target's."""
        return no_tap, []

    def write_rows_(self, buffers: StepBuffers, rows: Mapping[int, Request | None]) -> None:
        """Begins these rows anew with their requests; None: padding. Mutates: buffers.own."""


@dataclass(frozen=True, slots=True)
class Pair:
    """What is loaded, and how it is run: all that buckets and prefills are made of.

    `proposer`: with the longest block of any bucket. `num_positions`: that a request's pages hold.
    """

    config: EngineConfig
    target: Target
    proposer: Proposer
    num_positions: int
    simulation: Simulation | None = None

    @property
    def width(self) -> int:
        """Pages of a request at most."""
        return pages_for(self.num_positions, self.config.page_size)

    @property
    def kv_pools(self) -> tuple[Tensor, ...]:
        """What stands behind the page table, the target's first."""
        return self.target.kv_pool, *self.proposer.kv_pools

    def at(self, size: int) -> Pair:
        """As the bucket of `size` runs it."""
        return replace(self, proposer=draft_at(self.config, self.proposer, size))

    def shortened(self) -> Pair:
        """With the target's first layers alone, as few as have all kernels and segments of a whole
        forward: one that is tapped, all windows and kinds of neighbours, the last of the last one's
        kind. Compiling these (`compile_ahead`) takes less time."""
        kinds, windows = self.target.config.layer_kinds, self.target.config.windows
        neighbours, least = {*pairwise(kinds)}, max(2, min(self.proposer.taps, default=0) + 1)
        enough = (
            n
            for n in range(least, len(kinds))
            if kinds[n - 1] == kinds[-1]
            and {*pairwise(kinds[:n])} == neighbours
            and {*windows[:n]} == {*windows}
        )
        count = next(enough, len(kinds))
        return replace(self, target=self.target.shortened(count))


def step_buffers(
    arena: Arena,
    target: ModelConfig,
    proposer: Proposer,
    num_requests: int,
    width: int,
    config: EngineConfig | None = None,
) -> StepBuffers:
    """A step's buffers, the proposer's own among them, and those of what a config offers beside
    sampling; `width` pages a request."""
    block, vocab = proposer.num_draft_tokens + 1, target.vocab_size
    buffers = StepBuffers.take(arena, target, num_requests, block, width)
    tables = scores = None
    if config is not None and config.adjustments:
        tables = take_tables(arena, num_requests, vocab)
    if config is not None and config.max_logprobs:
        scores = Scores.take(arena.take, num_requests, block, min(config.max_logprobs, vocab))
    grammar = None
    if config is not None and config.structured_outputs:
        grammar = take_grammar(arena, num_requests, block, vocab)
    recurrent = take_buffers(arena, target, num_requests, block)
    own = proposer.buffers(arena, num_requests)
    return buffers._replace(
        own=own, recurrent=recurrent, tables=tables, scores=scores, grammar=grammar
    )
