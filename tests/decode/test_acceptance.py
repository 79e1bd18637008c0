"""acceptance.commit against a naive loop: what a block commits, and why it ends there."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphengine.decode.acceptance import commit

TOKENS = st.integers(0, 5)
BLOCKS = st.lists(st.integers(-1, 5), min_size=1, max_size=17)


@settings(deadline=None)
@given(block=BLOCKS, stop_ids=st.frozensets(TOKENS, max_size=3), data=st.data())
def test_commit_equals_a_loop(
    block: list[int], stop_ids: frozenset[int], data: st.DataObject
) -> None:
    """Bug: a stop token, or a row that is not finite, on the last row, at the budget's edge or
    behind it decides wrongly."""
    accepted = data.draw(st.integers(0, len(block) - 1))
    budget = data.draw(st.integers(1, len(block) + 1))
    emitted: list[int] = []
    reason = None
    for token in block[: accepted + 1]:
        if token < 0:
            reason = "error"
            break
        emitted.append(token)
        if token in stop_ids:
            reason = "stop"
            break
        if len(emitted) == budget:
            reason = "length"
            break
    assert commit(block, accepted, stop_ids, budget) == (emitted, reason)


@pytest.mark.parametrize(("accepted", "budget"), [(-1, 5), (4, 5), (0, 0)])
def test_commit_refuses_nonsense(accepted: int, budget: int) -> None:
    """Bug: a count from an uninitialised buffer silently commits garbage tokens."""
    with pytest.raises(AssertionError):
        commit([1, 2, 3, 4], accepted, (), budget)


def test_stop_token_wins_over_the_budget() -> None:
    """Bug: a request whose last allowed token is a stop token is reported as cut off; or one behind
    the budget, or a row there that is not finite, still counts."""
    assert commit([7, 8], 1, {8}, 2) == ([7, 8], "stop")
    assert commit([7, 7, 8], 2, {8}, 2) == ([7, 7], "length")
    assert commit([7, 7, -1], 2, {8}, 2) == ([7, 7], "length")
