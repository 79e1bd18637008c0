"""Prompt look-up: what followed the last few tokens when they last stood in the request's text.

For targets without a trained drafter (Saxena, "Prompt Lookup Decoding", 2023; vLLM's method
"ngram"). Of all earlier places whose last n tokens, n from `longest` down to `shortest`, equal the
text's, the one with the largest n counts, and of those the latest. What followed is drafted; where
it runs into the end of the text it is repeated from there, so a loop of any length is drafted on.
No place: token 0 is drafted, which costs acceptance alone.

On the device, because steps are launched before the host has read the last one's tokens: the text
of each row is kept there, and a block is written into it when it is drafted, which may be done
twice, and again when a grammar has changed it. Drafts that are rejected lie behind the text's end,
where the next block overwrites them. Reads B * P int32, 0.3 MB at 16 requests of 4,096 tokens.

Legend: B requests, G rows of a block, P positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor

from graphengine import names
from graphengine.capture.steps import Carry, Dense, Step
from graphengine.config.draft import NgramConfig
from graphengine.decode.buffers import Arena, StepBuffers
from graphengine.decode.proposer import Attentions, Proposer
from graphengine.decode.request import Request
from graphengine.decode.segments import Segments


class NgramBuffers(NamedTuple):
    """The text of every row, its anchor included; the last column is for what is no row's."""

    text_BP: Tensor  # int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Ngram(Proposer):
    """Looks drafts up in the text so far. A prompt is written when its row begins, and what is
    accepted of a block stands in the text already: no prefill, no context."""

    config: NgramConfig
    num_positions: int

    @property
    def num_draft_tokens(self) -> int:
        return self.config.num_draft_tokens

    def shortened(self, num_draft_tokens: int) -> Self:
        return replace(self, config=self.config.shortened(num_draft_tokens))

    def buffers(self, arena: Arena, num_requests: int) -> NgramBuffers:
        width = self.num_positions + 1
        return NgramBuffers(arena.take("text", num_requests, width, dtype=torch.int32))

    def propose(
        self, buffers: StepBuffers, attentions: Attentions, segments: Segments
    ) -> list[Step]:
        text_BP, config = cast(NgramBuffers, buffers.own).text_BP, self.config

        def look_up_(carry: Carry) -> Carry:
            anchor_B1 = buffers.block_ids_BG[:, :1]
            last_B1 = buffers.start_B.long()[:, None]
            text_BP.scatter_(1, last_B1, anchor_B1.int())
            drafts_BD = look_up(
                text_BP, last_B1, config.num_draft_tokens, config.shortest, config.longest
            )
            buffers.draft_ids_BG.copy_(torch.cat([anchor_B1, drafts_BD], dim=1))
            self.published_(buffers)
            return ()

        return [Dense(names.dense_name("draft", 0), look_up_)]

    def published_(self, buffers: StepBuffers) -> None:
        text_BP, block_BG = cast(NgramBuffers, buffers.own).text_BP, buffers.draft_ids_BG
        row_G = torch.arange(block_BG.shape[1], device=text_BP.device)
        at_BG = (buffers.start_B.long()[:, None] + row_G).clamp(max=self.num_positions)
        text_BP.scatter_(1, at_BG, block_BG.int())

    def write_rows_(self, buffers: StepBuffers, rows: Mapping[int, Request | None]) -> None:
        text_BP: Any = cast(NgramBuffers, buffers.own).text_BP
        for row, request in rows.items():
            ids = request.token_ids if request is not None else [0]
            text_BP[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)


def look_up(
    text_BP: Tensor, last_B1: Tensor, num_drafts: int, shortest: int, longest: int
) -> Tensor:
    """Drafts for each row.

        m[j] = #{k < longest : text[j - i] == text[last - i] for all i <= k},  j < last
        j* = the latest j of the largest m[j] >= shortest
        draft[i] = text[j* + 1 + i % (last - j*)]

    Args:
        text_BP: int32 [B, P]; tokens behind `last` are of no meaning.
        last_B1: int64 [B, 1], place of the newest token.

    Returns:
        int64 [B, num_drafts]; zeros where no place matches.
    """
    place_P = torch.arange(text_BP.shape[1], device=text_BP.device)
    same_BP = (place_P < last_B1).to(torch.int64)
    length_BP = torch.zeros_like(same_BP)
    for back in range(longest):
        token_B1 = text_BP.gather(1, (last_B1 - back).clamp(min=0))
        # torch.roll brings the end of the text to its beginning, where no n tokens have stood.
        equal_BP = text_BP.roll(back, 1) == token_B1
        same_BP = same_BP * (equal_BP & (place_P >= back) & (last_B1 >= back))
        length_BP = length_BP + same_BP
    found_B1 = (length_BP * text_BP.shape[1] + place_P).argmax(1, keepdim=True)
    matches_B1 = length_BP.gather(1, found_B1) >= shortest
    ahead = torch.arange(num_drafts, device=text_BP.device)
    period_B1 = (last_B1 - found_B1).clamp(min=1)
    at_BD = (found_B1 + 1 + ahead % period_B1).clamp(max=text_BP.shape[1] - 1)
    return torch.where(matches_B1, text_BP.gather(1, at_BD).long(), 0)
