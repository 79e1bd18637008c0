"""Nobody proposes: a block is one row, and the same loop decodes plainly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from graphengine.capture.steps import Step
from graphengine.config.draft import AttentionRule
from graphengine.decode.attention import Attention
from graphengine.decode.buffers import Arena, StepBuffers
from graphengine.decode.proposer import Attends, RowContent, Tap, no_tap
from graphengine.decode.segments import Segments
from graphengine.decode.stack import Rows


@dataclass(frozen=True, slots=True)
class NoDraft:
    """`decode.proposer.Proposer` of no tokens; also the base of what keeps little."""

    num_draft_tokens: int = 0
    mask_token_id: int = 0
    taps: tuple[int, ...] = ()
    attends: tuple[Attends, ...] = ()
    tensors: tuple[Tensor, ...] = ()

    def shortened(self, num_draft_tokens: int) -> Self:
        """There is nothing to shorten."""
        assert num_draft_tokens == 0
        return self

    def buffers(self, arena: Arena, num_requests: int) -> tuple[Tensor, ...]:
        """None."""
        return ()

    def propose(
        self, buffers: StepBuffers, attention: Mapping[AttentionRule, Attention], segments: Segments
    ) -> list[Step]:
        """No step."""
        return []

    def tap(self, buffers: StepBuffers) -> Tap:
        """Reads nothing."""
        return no_tap

    def context(self, buffers: StepBuffers, segments: Segments) -> list[Step]:
        """No step."""
        return []

    def prefill(self, rows: Rows, segments: Segments) -> tuple[Tap, list[Step]]:
        """Nothing of a prompt."""
        return no_tap, []

    def write_rows_(
        self, buffers: StepBuffers, rows: Sequence[int], contents: Sequence[RowContent | None]
    ) -> None:
        """Keeps nothing of a request."""
