"""metrics: how blocks, requests and times are counted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphengine.decode.metrics import Acceptance, RequestMetrics, acceptance_by_prompt


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


def test_rates_of_a_request() -> None:
    """Bug: a rate counts the first token, which is the prefill's; plain steps are lost from the
    steps; a request of one token divides by zero, or has the host's time behind it as its own."""
    acceptance = Acceptance(3)
    acceptance.add(2)
    found = RequestMetrics(
        num_prompt_tokens=5,
        num_output_tokens=5,
        ttft_ms=1.0,
        decode_ms=20.0,
        acceptance=acceptance,
        num_plain_steps=1,
    )
    assert (found.num_steps, found.ms_per_step) == (2, 10.0)
    assert (found.ms_per_token, found.tokens_per_s) == (5.0, 200.0)
    one = RequestMetrics(
        num_prompt_tokens=5,
        num_output_tokens=1,
        ttft_ms=1.0,
        decode_ms=0.01,  # of the host, behind it
        acceptance=Acceptance(3),
    )
    assert (one.ms_per_token, one.ms_per_step, one.tokens_per_s) == (0, 0, 0)


def test_acceptance_apart_by_prompt() -> None:
    """Bug: acceptance behind a cached prefix, or of long prompts, hides in the mean of all."""

    def request(prompt: int, cached: int, accepted: int) -> RequestMetrics:
        acceptance = Acceptance(3)
        acceptance.add(accepted)
        return RequestMetrics(
            num_prompt_tokens=prompt,
            num_output_tokens=accepted + 2,
            num_cached_tokens=cached,
            ttft_ms=1.0,
            decode_ms=1.0,
            acceptance=acceptance,
        )

    made = [request(9000, 0, 1), request(127, 64, 0), request(128, 0, 3), request(128, 0, 2)]
    found = acceptance_by_prompt(made)
    assert list(found) == [(False, 1024), (False, None), (True, 128)]
    assert found[False, 1024].steps_by_accepted == [0, 0, 1, 1]
    assert found[True, 128].mean_acceptance_length == 1.0


def test_a_rate_of_no_time() -> None:
    """Bug: tokens that came within one tick of the clock divide by zero, and the answer is lost."""
    found = RequestMetrics(
        num_prompt_tokens=5,
        num_output_tokens=2,
        ttft_ms=1.0,
        decode_ms=0.0,
        acceptance=Acceptance(3),
    )
    assert (found.ms_per_token, found.tokens_per_s) == (0, 0)
