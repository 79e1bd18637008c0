"""Drafts that somebody else chose: another proposer runs for real, then its drafts are replaced.

For `verify --forced-acceptance` and tests, which choose acceptance lengths. What is drafted at a
position of a row is read from a table on the device, filled when a request begins in its row, so a
graph can hold it.

Legend: B requests, G rows of a block, P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor

from graphengine.capture.steps import Carry, Dense, Step
from graphengine.decode.buffers import Arena, StepBuffers
from graphengine.decode.proposer import Attends, Attentions, Proposer
from graphengine.decode.request import Request
from graphengine.decode.segments import Segments
from graphengine.decode.stack import Rows, Tap


class ForcedBuffers(NamedTuple):
    """The table, and what the proposer inside keeps."""

    table_BP: Tensor  # int64: what is drafted at each position
    inner: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Forced(Proposer):
    """A proposer around another one.

    Args:
        tokens: (a row's request, rows of a block, P) -> P tokens, by position.
        seen: called with the buffers between the inner's drafts and ours; not captured.
    """

    inner: Proposer
    num_positions: int
    tokens: Callable[[Request, int, int], list[int]]
    seen: Callable[[StepBuffers], None] = lambda buffers: None

    @property
    def num_draft_tokens(self) -> int:
        return self.inner.num_draft_tokens

    @property
    def mask_token_id(self) -> int:
        return self.inner.mask_token_id

    @property
    def taps(self) -> tuple[int, ...]:
        return self.inner.taps

    @property
    def attends(self) -> tuple[Attends, ...]:
        return self.inner.attends

    @property
    def tensors(self) -> Any:
        return self.inner.tensors

    @property
    def kv_pools(self) -> tuple[Tensor, ...]:
        return self.inner.kv_pools

    def shortened(self, num_draft_tokens: int) -> Self:
        return replace(self, inner=self.inner.shortened(num_draft_tokens))

    def buffers(self, arena: Arena, num_requests: int) -> ForcedBuffers:
        table_BP = arena.take("forced", num_requests, self.num_positions)
        return ForcedBuffers(table_BP, self.inner.buffers(arena, num_requests))

    def propose(
        self, buffers: StepBuffers, attentions: Attentions, segments: Segments
    ) -> list[Step]:
        table_BP = cast(ForcedBuffers, buffers.own).table_BP
        drafts_BG = buffers.draft_ids_BG
        row = torch.arange(1, drafts_BG.shape[1], device=drafts_BG.device)

        def replaced(carry: Carry) -> Carry:
            self.seen(buffers)
            at = (buffers.start_B.long()[:, None] + row).clamp(max=self.num_positions - 1)
            drafts_BG[:, :1].copy_(buffers.block_ids_BG[:, :1])
            drafts_BG[:, 1:] = table_BP.gather(1, at)
            return ()

        steps = self.inner.propose(_inside(buffers), attentions, segments)
        return [*steps, Dense("draft.forced", replaced)]

    def tap(self, buffers: StepBuffers) -> Tap:
        return self.inner.tap(_inside(buffers))

    def context(self, buffers: StepBuffers, segments: Segments) -> list[Step]:
        return self.inner.context(_inside(buffers), segments)

    def prefill(self, rows: Rows) -> tuple[Tap, list[Step]]:
        return self.inner.prefill(rows)

    def write_rows_(self, buffers: StepBuffers, rows: Mapping[int, Request | None]) -> None:
        table_BP = cast(ForcedBuffers, buffers.own).table_BP
        for row, request in rows.items():
            if request is not None:
                tokens = self.tokens(request, buffers.block, self.num_positions)
                table_BP[row] = torch.tensor(tokens, dtype=torch.int64)
        self.inner.write_rows_(_inside(buffers), rows)


def right_at_first(
    request: Request, truth: Sequence[int], lengths: Callable[[int], int], block: int, width: int
) -> tuple[list[int], list[int]]:
    """What to draft at each position from the request's start on, so that its step number i accepts
    `lengths(i)` drafts, or all: drafts are right up to there and wrong behind.

    A step that begins at position s and shall accept a < G-1 drafts ends at the draft of position
    s + a + 1, which is where the next step begins: no draft that is to be right stands there.

    Args: truth: what the target says behind the prompt; past its end drafts are of no meaning.

    Returns:
        (`width` tokens by position, the lengths of all steps up to the end of the truth)
    """
    tokens = [*request.prompt_ids, *truth, *[0] * width][:width]
    step, start, asked = request.acceptance.num_steps, request.start, []
    while start < len(request.prompt_ids) + len(truth):
        accepted = lengths(step)
        asked.append(accepted)
        step, start = step + 1, start + min(accepted, block - 1) + 1
        if accepted < block - 1 and start < width:
            tokens[start] = tokens[start] - 1 if tokens[start] else 1
    return tokens, asked


def _inside(buffers: StepBuffers) -> StepBuffers:
    return buffers._replace(own=cast(ForcedBuffers, buffers.own).inner)
