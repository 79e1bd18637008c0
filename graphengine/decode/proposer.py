"""The protocol of drafters: all that a step, a prefill and a plan know of whoever proposes.

    propose   committed state -> draft_ids_BG[:, 1:]; the anchor stands in block_ids_BG[:, 0]
    context   what the target has just run (taps, ids or nothing) -> the drafter's own state

Acceptance compares ids row by row and knows no drafter. `graphengine.drafters` holds what
implements this: dflash, ngram, none, and forced, which tests use.

Invariant: no shape depends on data and no step waits for the host. `context` is given all rows of
the block, rejected ones too: what it writes for those is overwritten before anything reads it.
Where attention is planned, `context` and the first step of `propose` are run again when a row
begins: on the same state they must leave the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

from torch import Tensor

from graphengine.capture.steps import Step
from graphengine.config.draft import AttentionRule
from graphengine.config.model import ModelConfig
from graphengine.decode.attention import Attention
from graphengine.decode.buffers import Arena, StepBuffers
from graphengine.decode.segments import Segments
from graphengine.decode.stack import Rows

Tap = Callable[[int, Tensor], None]
"""Called with (layer, h_TD) behind every layer of the target."""


def no_tap(layer: int, h_TD: Tensor) -> None:
    """Of a proposer that reads no hidden states."""


class Attends(NamedTuple):
    """One kind of attention that a propose chain runs: `rows` query rows a request."""

    model: ModelConfig
    rule: AttentionRule
    rows: int


class RowContent(NamedTuple):
    """A request as its row begins: all tokens known of it (the last is the anchor); None: padding.
    `request` is for tests, which tell requests apart."""

    token_ids: list[int]
    request: Any = None


class Proposer(Protocol):
    """A loaded drafter."""

    @property
    def num_draft_tokens(self) -> int:
        """Tokens proposed a step, G - 1."""
        ...

    @property
    def mask_token_id(self) -> int:
        """What a block holds behind its anchor before it is drafted."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target that `tap` reads."""
        ...

    @property
    def attends(self) -> tuple[Attends, ...]:
        """Every kind of attention of the propose chain once."""
        ...

    @property
    def tensors(self) -> Any:
        """Weights and pools, a tree; for counting bytes."""
        ...

    def shortened(self, num_draft_tokens: int) -> Self:
        """The same, proposing fewer tokens."""
        ...

    def buffers(self, arena: Arena, num_requests: int) -> tuple[Tensor, ...]:
        """What it keeps between replays, `StepBuffers.own`: a NamedTuple of its own."""
        ...

    def propose(
        self, buffers: StepBuffers, attention: Mapping[AttentionRule, Attention], segments: Segments
    ) -> list[Step]:
        """The chain that writes `buffers.draft_ids_BG`; empty where nothing is proposed."""
        ...

    def tap(self, buffers: StepBuffers) -> Tap:
        """What a verify does with the outputs of the target's layers."""
        ...

    def context(self, buffers: StepBuffers, segments: Segments) -> list[Step]:
        """The chain behind acceptance; rows stand at `context_positions_T`, `context_slots_T`."""
        ...

    def prefill(self, rows: Rows, segments: Segments) -> tuple[Tap, list[Step]]:
        """A prompt's rows: what taps them, and the chain behind the target's."""
        ...

    def write_rows_(
        self, buffers: StepBuffers, rows: Sequence[int], contents: Sequence[RowContent | None]
    ) -> None:
        """Begins these rows anew. Mutates: buffers.own."""
        ...


def step_buffers(
    arena: Arena, target: ModelConfig, proposer: Proposer, num_requests: int, width: int
) -> StepBuffers:
    """A step's buffers, the proposer's own among them; `width` pages a request."""
    block = proposer.num_draft_tokens + 1
    buffers = StepBuffers.take(arena, target, num_requests, block, width)
    return buffers._replace(own=proposer.buffers(arena, num_requests))
