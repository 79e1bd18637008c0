"""Acceptance on the host, against naive loops: what a block commits, and how it is counted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphengine.decode.acceptance import commit
from graphengine.decode.metrics import Acceptance
from graphengine.decode.request import Request

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


@settings(deadline=None)
@given(
    prompt=st.integers(1, 9),
    limit=st.integers(1, 30),
    steps=st.lists(st.tuples(st.lists(TOKENS, min_size=4, max_size=4), st.integers(0, 3))),
    stop_ids=st.frozensets(st.just(5)),
)
def test_request_keeps_its_invariant(
    prompt: int,
    limit: int,
    steps: list[tuple[list[int], int]],
    stop_ids: frozenset[int],
) -> None:
    """Bug: start, outputs and budget of a request drift apart, or it runs on after its end."""
    request = Request(
        request_id=0,
        prompt_ids=[1] * prompt,
        max_total_tokens=prompt + limit,
        stop_ids=stop_ids,
        acceptance=Acceptance(3),
    )
    new = request.begin(0)
    for block, accepted in steps:
        if request.finish_reason is not None:
            break
        assert request.start == prompt + len(request.output_ids) - 1
        assert request.anchor == request.output_ids[-1]
        assert request.budget == limit - len(request.output_ids) > 0
        before = list(request.output_ids)
        new = request.advance(block, accepted)
        assert request.output_ids == before + new
    assert len(request.output_ids) <= limit
    ended_by_length = len(request.output_ids) == limit and 5 not in stop_ids & {new[-1]}
    assert (request.finish_reason == "length") == ended_by_length
    metrics = request.metrics()
    assert metrics.num_steps == sum(metrics.acceptance.steps_by_accepted)


@settings(deadline=None)
@given(st.lists(st.integers(0, 7)))
def test_acceptance_counts(lengths: list[int]) -> None:
    """Bug: the mean counts the bonus token twice or never, or positions are shifted by one."""
    acceptance = Acceptance(7)
    for length in lengths:
        acceptance.add(length)
    assert acceptance.num_steps == len(lengths)
    if not lengths:
        assert acceptance.mean_acceptance_length == acceptance.mean_accepted_draft_tokens == 0
        assert acceptance.per_position == []
        return
    mean = sum(lengths) / len(lengths)
    assert acceptance.mean_accepted_draft_tokens == pytest.approx(mean)
    assert acceptance.mean_acceptance_length == pytest.approx(mean + 1)
    shares = [sum(length > j for length in lengths) / len(lengths) for j in range(7)]
    assert acceptance.per_position == pytest.approx(shares)
    assert sum(acceptance.per_position) == pytest.approx(mean)


def test_counts_of_shorter_blocks() -> None:
    """Bug: a position counts as rejected in blocks that had no draft there, or the mean is taken
    over the drafts of the longest block."""
    blocks = [(7, 7), (7, 2), (3, 3), (3, 0), (3, 3), (1, 1)]  # drafted, accepted
    parts = [Acceptance(7), Acceptance(7)]
    for i, (drafted, accepted) in enumerate(blocks):
        parts[i % 2].add(accepted, drafted)
    found = Acceptance.merge(parts)
    assert (found.num_steps, found.num_drafted, found.num_accepted) == (6, 24, 16)
    assert found.mean_acceptance_length == pytest.approx(1 + 16 / 6)
    first = [5 / 6, 4 / 5, 3 / 5]
    assert found.per_position == pytest.approx([*first, *[1 / 2] * 4])
    short = Acceptance(7)
    short.add(1, 3)
    assert short.per_position == [1, 0, 0], "nobody drafted a fourth"


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3)), max_size=4))
def test_merged_histograms(parts: list[list[int]]) -> None:
    """Bug: merging means instead of counts, or losing a request."""
    built = []
    for lengths in parts:
        built.append(Acceptance(3))
        for length in lengths:
            built[-1].add(length)
    merged, flat = Acceptance.merge(built), [length for part in parts for length in part]
    assert merged.num_steps == len(flat)
    assert merged.steps_by_accepted[: 4 if parts else 0] == [
        flat.count(a) for a in range(4 if parts else 0)
    ]
