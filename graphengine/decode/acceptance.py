"""What one verified block means for a request: which tokens it commits and whether it ends.

The device decides how many drafts were right (kernels/accept.py); this is the host's half, pure.
Invariant: committed tokens are the target's own choices, row by row; a stop token, the token budget
or the context limit inside the accepted run cuts it there, and what lies behind is forgotten.
A negative id in the run is no token: the target's logits there were not finite.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


class Commit(NamedTuple):
    """Tokens to emit, in order, and why the request ends with them (None: it goes on)."""

    token_ids: list[int]
    finish_reason: FinishReason | None


def commit(
    target_ids: Sequence[int], num_accepted: int, stop_ids: Collection[int], budget: int
) -> Commit:
    """Cuts an accepted run at the first stop token or at the budget.

    The run is `target_ids[0 .. num_accepted]`: the accepted drafts, which equal the target's
    choices, and the bonus token.

    Args:
        target_ids: the target's choice after each row of the block, G of them; a negative one ends
            the run before it with "error".
        num_accepted: drafts accepted, 0 .. G-1.
        stop_ids: tokens that end the request; the stop token itself is emitted last.
        budget: tokens the request may still emit, >= 1.
    """
    assert 0 <= num_accepted < len(target_ids) and budget >= 1
    run = list(target_ids[: num_accepted + 1])
    for i, token in enumerate(run[:budget]):
        if token < 0:
            return Commit(run[:i], "error")
        if token in stop_ids:
            return Commit(run[: i + 1], "stop")
    if len(run) >= budget:
        return Commit(run[:budget], "length")
    return Commit(run, None)
