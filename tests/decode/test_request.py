"""request.Request: its counters stay together, whatever a block commits."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphengine.decode.grammar import Matcher
from graphengine.decode.logprobs import Scores
from graphengine.decode.metrics import Acceptance
from graphengine.decode.request import Request
from graphengine.decode.sampling import Sampling

TOKENS = st.integers(0, 5)


def a_request(drafts: int = 3) -> Request:
    return Request(
        request_id=0,
        prompt_ids=[1] * 3,
        max_total_tokens=12,
        stop_ids=frozenset(),
        acceptance=Acceptance(drafts),
    )


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


def test_plain_steps_are_counted_apart() -> None:
    """Bug: a step without drafts lowers the acceptance of a request that has left speculation, or
    a plain engine's steps are said to be a fallback."""
    request = a_request()
    request.begin(0)
    request.fallback_reason = "slow"
    assert request.metrics().fallback_reason is None, "nothing was decoded plainly yet"
    request.advance([2, 3, 4, 5], 1)
    request.advance([7], 0)
    metrics = request.metrics()
    assert (metrics.num_plain_steps, metrics.fallback_reason) == (1, "slow")
    assert metrics.acceptance.steps_by_accepted == [0, 1, 0, 0]
    plain = a_request(drafts=0)
    plain.begin(0)
    plain.advance([7], 0)
    assert plain.metrics().num_plain_steps == 0 and plain.metrics().acceptance.num_steps == 1


def test_a_block_shorter_than_the_longest() -> None:
    """Bug: a bucket of fewer drafts counts as one that had all, with the rest rejected."""
    request = a_request()
    request.begin(0)
    request.advance([2, 3], 1)
    assert request.metrics().acceptance.per_position == [1.0]


@pytest.mark.parametrize(("rows", "position"), [([-1, 5, 5, 5], 4), ([5, 6, -1, 5], 6)])
def test_an_error_names_its_position(rows: list[int], position: int) -> None:
    """Bug: a NaN in the logits is reported for another position, or a token behind it comes out; or
    a step that says nothing tells the log-probabilities of all that was said before."""
    request = a_request()
    request.logprobs = 0
    request.begin(0)
    new = request.advance(rows, 2)
    request.tell(Scores(torch.zeros(4), *torch.zeros(2, 4, 0)), len(new))
    assert len(request.output_logprobs) == len(new)
    assert request.finish_reason == "error"
    assert f"position {position} " in str(request.error)
    assert len(request.output_ids) == position - 3


def test_an_error_of_what_was_asked_for_does_not_blame_the_weights() -> None:
    """Bug: min_tokens rules out stop tokens that are the whole vocabulary, and the user is told to
    check the weights."""
    request = a_request()
    request.sampling = Sampling(min_tokens=3)
    request.begin(-1)
    assert request.finish_reason == "error" and "min_tokens" in (request.error or "")


@pytest.mark.parametrize("block", [[3, 4, 2, 1], [3, 5, 2, 1]])
def test_nothing_is_said_by_a_broken_grammar(block: list[int]) -> None:
    """Bug: what masks of a matcher in an error allowed is given out, or its end is believed."""

    class Broken:
        def advance(self, token_ids: list[int]) -> str:
            return "too many items"

    request = a_request()
    request.stop_ids, broken = {5}, Broken()
    request.begin(2)
    request.matcher = cast(Matcher, broken)
    assert request.advance(block, 2) == [] and request.output_ids == [2]
    assert request.finish_reason == "error" and "too many items" in (request.error or "")


def test_a_stop_string_in_front_of_an_error() -> None:
    """Bug: an answer that was complete before its logits broke ends in "stop" and in an error."""
    request = a_request()
    request.begin(0)
    request.advance([5, -1, 0, 0], 1)
    assert request.error is not None
    request.end_at("text", 0)
    assert (request.finish_reason, request.stop_reason, request.error) == ("stop", "text", None)


def test_the_parts_of_a_first_token_s_time() -> None:
    """Bug: a part counts another's time with it, so that the four are more than the whole."""
    request = a_request()
    request.begin(0)
    request.arrival_s, request.submitted_s, request.prefill_s = 1.0, 2.0, 4.0
    request.queued_s, request.prefilled_s, request.first_token_s = 5.0, 8.0, 16.0
    request.last_token_s = 48.0
    m = request.metrics()
    parts = m.tokenize_ms, m.queue_ms, m.prefill_ms, m.first_token_ms
    assert parts == (1e3, 2e3, 4e3, 8e3) and sum(parts) == m.ttft_ms
    assert (m.launch_ms, m.decode_ms) == (1e3, 32e3)


def test_who_ends_without_a_token_has_cost_no_time() -> None:
    """Bug: a request that is cancelled in the queue had its first token hours before it came."""
    request = a_request()
    m = request.metrics()
    assert (m.ttft_ms, m.queue_ms, m.prefill_ms, m.launch_ms, m.first_token_ms) == (0.0,) * 5
    request.arrival_s, request.submitted_s, request.prefill_s = 1.0, 2.0, 4.0
    m = request.metrics()
    assert (m.tokenize_ms, m.queue_ms) == (1e3, 2e3)
    assert m.ttft_ms == m.prefill_ms == m.launch_ms == m.decode_ms == 0
