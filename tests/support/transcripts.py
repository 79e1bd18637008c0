"""Transcripts of the prompt `[1]` that nothing decoded, for tests of what judges them."""

from typing import Any

from graphengine.decode.metrics import Acceptance
from graphengine.verify.told import Transcript


def transcript(output: list[int], committed: list[int], **other: Any) -> Transcript:
    """Of 3 drafts a step; by default the budget ends it."""
    acceptance = Acceptance(3)
    for count in committed[1:]:
        acceptance.add(count - 1)
    given: dict[str, Any] = {"prompt_ids": [1], "budget": len(output), "finish_reason": "length"}
    given |= {"acceptance": acceptance, **other}
    return Transcript(output_ids=output, committed=committed, **given)
