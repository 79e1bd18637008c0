"""Every accepted length, on purpose: drafts that are right exactly so many times a step.

Why: what is committed of a block (K/V that stays, recurrent states that advance by the accepted
rows, the next anchor) depends on how many drafts were accepted, and a drafter accepts some lengths
rarely or never. Drafts are plain decoding's tokens, made wrong behind the length. The drafter runs
all the same, and what it drafts is lost. Where a near tie parts the text from plain decoding's, all
drafts behind it are wrong: tokens are judged as ever, and the length is not forced there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from graphengine.config.draft_length import draft_at
from graphengine.decode.loop import DecodeLoop
from graphengine.decode.request import Request
from graphengine.drafters.forced import Forced, right_at_first
from graphengine.verify.check import Report
from graphengine.verify.told import Transcript


@dataclass(slots=True)
class ForcedLength:
    """`length` drafts of every step are right, or all of a shorter block. Set it while no request
    runs.

    `truth`: what plain decoding says behind each prompt; one that is there twice may be asked for
    two things.
    """

    truth: Sequence[Sequence[int]]
    length: int = 0
    _answers: dict[int, Sequence[int]] = field(default_factory=dict)  # by request

    @classmethod
    def of(cls, plain: Sequence[Transcript]) -> ForcedLength:
        """By the tokens of a plain run."""
        return cls([t.output_ids for t in plain])

    def install_(self, loop: DecodeLoop) -> None:
        """Builds the loop's buckets anew around these drafts. Mutates: the loop, which is idle."""
        pair = loop.first.builder.pair
        forced = Forced(inner=pair.proposer, num_positions=pair.num_positions, tokens=self._tokens)
        loop.first.rebuild(forced)

    def begins(self, place: int, request: Request) -> None:
        """A request is to run with the prompt of that place. Mutates: self."""
        self._answers[request.request_id] = self.truth[place]

    def _tokens(self, request: Request, block: int, width: int) -> list[int]:
        truth = self._answers[request.request_id]
        return right_at_first(request, truth, lambda step: self.length, block, width)[0]


def lengths(loop: DecodeLoop, bucket: int) -> range:
    """All that a block of this bucket can accept, 0 to G - 1."""
    pair = loop.first.builder.pair
    return range(draft_at(pair.config, pair.proposer, bucket).num_draft_tokens + 1)


def missed(report: Report, length: int) -> str | None:
    """Why nothing was shown of a length; None where a step accepted so many."""
    if report.acceptance.steps_by_accepted[length]:
        return None
    return (
        f"no step accepted {length} drafts: texts are too short, or part from plain decoding's; "
        "raise --max-new-tokens"
    )
