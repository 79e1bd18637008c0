"""Requests that leave speculation: at the last positions, where it loses, where memory lacks.

No judgement may change a token: every test compares with transformers' plain continuation.
"""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphengine.decode.fallback import LAST_BLOCK, Fallback
from graphengine.decode.guards import FallbackWarning
from graphengine.decode.lane import Verified
from graphengine.decode.metrics import Acceptance
from graphengine.decode.request import Request
from tests.decode.test_engine import (
    BACKENDS,
    BLOCK,
    PROMPTS,
    Pair,
    assert_idle,
    force,
    ids_only,
    loop_of,
    run_to_end,
    tokens,
)
from tests.support.checkpoints import edit_config
from tests.support.guarded import judge_early, plain_takes


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A pair of 48 positions."""
    return Pair(tmp_path_factory.mktemp("small"), max_positions=48)


impatient = pytest.fixture(judge_early)


@pytest.mark.parametrize(("page_size", "backend"), [(1, "triton"), (16, "triton"), (16, "torch")])
def test_last_block_in_plain_decode(small: Pair, backend: str, page_size: int) -> None:
    """Bug: the last positions are refused, drafted beyond, or decoded from wrong positions, pages
    or anchors after the hand-over; or plain steps count as blocks that accepted nothing."""
    options = {"page_size": page_size, "attention_backend": backend}
    with small.engine(
        max_model_len=None, finish_in_plain_decode=True, buckets=(1, 2, 4), **options
    ) as engine:
        assert engine.config.max_model_len == 48
        assert engine.config.speculation_limit == 48 - BLOCK
        num_plain: list[int] = []
        for accepted in range(BLOCK):
            force(engine, small, accepted)
            results = engine.generate(PROMPTS[:4], max_new_tokens=99, ignore_eos=True)
            for prompt, result in zip(PROMPTS, results, strict=False):
                assert result.token_ids == small.plain(prompt, 48 - len(prompt))
                assert result.finish_reason == "length"
                metrics = result.metrics
                num_plain.append(metrics.num_plain_steps)
                reason = LAST_BLOCK if num_plain[-1] else None
                assert metrics.fallback_reason == reason
                assert metrics.acceptance.steps_by_accepted[accepted] == (
                    metrics.num_steps - metrics.num_plain_steps
                )
            assert_idle(engine)
        # A last block that just fits leaves nothing to do; one may be in flight past the limit.
        assert max(num_plain) in (BLOCK - 1, BLOCK - 2) and 0 in num_plain


def test_without_the_option_nothing_changes(small: Pair) -> None:
    """Bug: the longer context is given out unasked, or the refusal does not name the option, or
    advises it to who has passed it."""
    with small.engine(max_model_len=None) as engine:
        assert engine.config.max_model_len == 44
        force(engine, small, 2)
        (result,) = engine.generate(PROMPTS[0], max_new_tokens=99, ignore_eos=True)
        assert result.token_ids == small.plain(PROMPTS[0], 41)
        assert result.metrics.fallback_reason is None and loop_of(engine).fallback.plain is None
    with pytest.raises(ValueError, match=r"between 2 and 44 .* --finish-in-plain-decode all"):
        small.engine(max_model_len=48)
    with pytest.raises(ValueError, match=r"between 2 and 48 for this model$"):
        small.engine(max_model_len=49, finish_in_plain_decode=True)
    with small.engine(draft=False, max_model_len=48, finish_in_plain_decode=True) as engine:
        assert ids_only(engine, PROMPTS[:1], max_new_tokens=99) == [small.plain(PROMPTS[0], 45)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_drafter_with_a_shorter_context(tmp_path: Path, backend: str) -> None:
    """Bug: a target may not use its own context because its drafter's is shorter; or a prompt that
    is longer than the drafter's context is drafted, or reads past the drafter's rope table."""
    short = Pair(tmp_path, max_positions=64)
    edit_config(short.drafter, lambda values: values | {"max_position_embeddings": 14})
    with short.engine(
        max_model_len=None, finish_in_plain_decode=True, attention_backend=backend
    ) as engine:
        assert engine.config.max_model_len == 64 and engine.config.speculation_limit == 10
        rng = random.Random(0)
        force(engine, short, lambda request, step: rng.randrange(BLOCK))
        results = engine.generate(PROMPTS, max_new_tokens=40, ignore_eos=True)
        assert tokens(results) == [short.plain(p, 40) for p in PROMPTS]
        steps = [r.metrics.acceptance.num_steps for r in results]
        assert [n > 0 for n in steps] == [len(p) <= 10 for p in PROMPTS]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("backend", BACKENDS)
def test_lost_speculation_falls_back(
    pair: Pair, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a losing drafter is kept for ever; a step is lost, doubled or read from a stale row at
    the hand-over; measuring a plain step changes what the requests decode."""
    calls = plain_takes(monkeypatch, 1e-9)
    with pair.engine(max_model_len=44, attention_backend=backend, buckets=(1, 4)) as engine:
        force(engine, pair, 0)
        for prompts in (PROMPTS[:1], PROMPTS[:4], PROMPTS):
            results = engine.generate(prompts, max_new_tokens=27, ignore_eos=True)
            assert tokens(results) == [pair.plain(p, 27) for p in prompts]
            for result in results:
                metrics = result.metrics
                assert "speculation lost: 1.00 tokens" in (metrics.fallback_reason or "")
                assert metrics.num_plain_steps + metrics.acceptance.num_steps == 26
                assert 8 <= metrics.acceptance.num_steps <= 8 + 2 * 4
                assert metrics.num_steps == 26
            assert_idle(engine)
    assert calls == [1, 4], "a bucket is measured once"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("backend", BACKENDS)
def test_measuring_alone_changes_nothing(
    pair: Pair, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the plain steps that were only measured leave K/V, positions or anchors behind."""
    calls = plain_takes(monkeypatch, 1e9)
    with pair.engine(max_model_len=44, attention_backend=backend) as engine:
        rng = random.Random(1)
        force(engine, pair, lambda request, step: rng.choice([0, 0, 0, 1, 3]))
        for prompts in (PROMPTS[:1], PROMPTS[:2], PROMPTS):
            results = engine.generate(prompts, max_new_tokens=27, ignore_eos=True)
            assert tokens(results) == [pair.plain(p, 27) for p in prompts]
            assert all(r.metrics.fallback_reason is None for r in results)
    assert calls


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("backend", BACKENDS)
def test_drafted_and_plain_side_by_side(
    pair: Pair, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a request that decodes plainly holds up, mixes with or takes a row from one that drafts;
    a cancelled one keeps its pages."""
    plain_takes(monkeypatch, 1e-9)
    with pair.engine(max_model_len=44, attention_backend=backend, buckets=(1, 2, 4)) as engine:
        loop = loop_of(engine)
        accepted = {0: 0, 1: 0, 2: 3, 3: 3, 4: 3, 5: 1}
        first = [loop.submit(list(p), 27, frozenset()) for p in PROMPTS[:2]]
        base = first[0].request_id
        force(engine, pair, lambda request, step: accepted[request.request_id - base])
        late: list[Any] = []

        def join() -> None:
            if not late and loop.fallback.plain is not None and loop.fallback.plain.running:
                late.extend(loop.submit(list(p), 27, frozenset()) for p in PROMPTS[2:5])
            plain = loop.fallback.plain
            if late and late[1].output_ids and plain is not None and plain.running:
                loop.cancel(first[0])

        run_to_end(engine, join)
        assert len(late) == 3
        assert [r.fallback_reason is not None for r in first] == [True, True]
        assert first[0].finish_reason == "abort"
        for request in [first[1], *late]:
            assert request.output_ids == pair.plain(request.prompt_ids, 27)
        assert all(request.fallback_reason is None for request in late)
        assert_idle(engine)


@pytest.mark.usefixtures("impatient")
def test_no_measuring_while_another_decodes_plainly(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a plain step is to be measured in the loop in which another request runs: that one's
    rows are lost, or the generation ends in an assertion."""
    calls = plain_takes(monkeypatch, 1e-9)
    with pair.engine(max_model_len=60, buckets=(2,)) as engine:
        force(engine, pair, 0)
        loop = loop_of(engine)
        budgets = (20, 30)
        first, other = (loop.submit(list(p), n, ()) for p, n in zip(PROMPTS, budgets, strict=False))
        seen: list[tuple[bool, int]] = []

        def each_step() -> None:
            if len(first.output_ids) == 5:  # enough times to judge, too few blocks
                loop.fallback.leave([first], "a test says so")
            seen.append(
                (loop.fallback.plain is not None and bool(loop.fallback.plain.running), len(calls))
            )

        run_to_end(engine, each_step)
        assert [request.output_ids for request in (first, other)] == [
            pair.plain(p, n) for p, n in zip(PROMPTS, budgets, strict=False)
        ]
        assert other.fallback_reason is not None and calls == [1]
        assert (True, 0) in seen and seen.index((True, 1)) > 15, "measured when the first was done"


@pytest.mark.usefixtures("impatient")
def test_what_was_due_for_who_has_left(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a plain step of who is left of two is held against a drafted step of both; or one that
    was due when everything was dropped is measured for the next request that leaves, beside whoever
    decodes plainly by then: the generation ends in an assertion."""
    calls = plain_takes(monkeypatch, 1e-9)
    with pair.engine(max_model_len=44, buckets=(1, 2)) as engine, torch.no_grad():
        force(engine, pair, 0)
        loop = loop_of(engine)
        first, _ = (loop.submit(list(p), 27, ()) for p in PROMPTS[:2])
        loop.admit()
        for is_second in (False, True):
            while not loop.first.must_drain:
                loop.launch()
                loop.collect()
            if not is_second:
                while loop.first.in_flight:
                    loop.collect()
                loop.cancel(first)
                loop.launch()
                assert not calls and not loop.first.must_drain
        loop.reset()
        request = loop.submit(list(PROMPTS[1]), 5, ())
        loop.admit()
        loop.fallback.leave([request], "a test says so")
        run_to_end(engine)
    assert request.num_plain_steps == 4 and not calls


@pytest.mark.usefixtures("impatient")
def test_good_drafts_never_measure(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: every request pays for plain steps, or an option does not turn the guard off."""
    calls = plain_takes(monkeypatch, 1e-9)
    with pair.engine(max_model_len=44) as engine:
        force(engine, pair, 1)
        ids_only(engine, PROMPTS, max_new_tokens=27)
    with pair.engine(max_model_len=44, fallback=False, acceptance_floor=0.0) as engine:
        assert loop_of(engine).fallback.guard is None
        force(engine, pair, 0)
        assert ids_only(engine, PROMPTS, max_new_tokens=27) == [pair.plain(p, 27) for p in PROMPTS]
    with pair.engine(max_model_len=44, simulate_acceptance=1.0) as engine:
        assert loop_of(engine).fallback.guard is None, "drawn acceptance says nothing"
    assert not calls


def test_plain_decode_is_built_when_needed(pair: Pair) -> None:
    """Bug: every start-up pays for a second set of graphs, or asking for it does nothing."""
    with pair.engine() as engine:
        assert loop_of(engine).fallback.plain is None
    with pair.engine(prepare_plain_decode=True) as engine:
        assert list(loop_of(engine).fallback.plain.buckets) == [1, 2, 4]
    with pair.engine(draft=False, prepare_plain_decode=True) as engine:
        assert loop_of(engine).fallback is None, "it decodes plainly itself"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_no_memory_for_plain_decode(
    pair: Pair, small: Pair, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """Bug: building what only makes a request faster ends it; or a request that cannot go on
    otherwise hangs, or takes its neighbours along."""

    def build() -> Any:
        raise kind("CUDA out of memory. Tried to allocate 1 GiB")

    with pair.engine(max_model_len=44) as engine:
        monkeypatch.setattr(loop_of(engine).fallback, "_build_plain", build)
        force(engine, pair, 0)
        with pytest.warns(FallbackWarning, match=r"no memory to build .*CUDA out of memory\)"):
            found = ids_only(engine, PROMPTS[:2], max_new_tokens=27)
        assert found == [pair.plain(p, 27) for p in PROMPTS[:2]]
    with small.engine(max_model_len=48, finish_in_plain_decode=True) as engine:
        monkeypatch.setattr(loop_of(engine).fallback, "_build_plain", build)
        force(engine, small, 1)
        prompts = [PROMPTS[1], PROMPTS[0]]
        with pytest.warns(FallbackWarning):
            long, short = engine.generate(prompts, max_new_tokens=31, ignore_eos=True)
        assert long.finish_reason == "error" and "memory lacks to decode plainly" in (
            long.error or ""
        )
        assert long.token_ids == small.plain(PROMPTS[1], len(long.token_ids))
        assert len(long.token_ids) >= 48 - BLOCK - len(PROMPTS[1])
        assert short.token_ids == small.plain(PROMPTS[0], 31) and short.finish_reason == "length"
        assert_idle(engine)


def test_a_fault_is_no_lack_of_memory(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a defect in what decodes plainly is told as a lack of memory, and never found."""

    def build() -> Any:
        raise RuntimeError("a defect")

    with pair.engine() as engine:
        fallback = loop_of(engine).fallback
        monkeypatch.setattr(fallback, "_build_plain", build)
        with pytest.raises(RuntimeError, match="a defect"):
            fallback.plain_lane()


@pytest.mark.usefixtures("impatient")
def test_building_is_tried_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: where memory lacks, every judgement builds and warns again, a stall in each answer."""
    calls: list[int] = []

    def build() -> Any:
        calls.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    with pair.engine(max_model_len=44) as engine:
        monkeypatch.setattr(loop_of(engine).fallback, "_build_plain", build)
        force(engine, pair, 0)
        with pytest.warns(FallbackWarning, match="no memory to build"):
            ids_only(engine, PROMPTS[:1], max_new_tokens=27)
        ids_only(engine, PROMPTS[:2], max_new_tokens=27)
    assert calls == [1]


def test_plain_steps_behind_simulated_ones(pair: Pair) -> None:
    """Bug: the plain lane of an engine that draws its acceptance draws too, from no table."""
    with pair.engine(simulate_acceptance=2.0, buckets=(1,)) as engine:
        loop = loop_of(engine)
        request = loop.submit(list(PROMPTS[0]), 12, ())
        with torch.no_grad():
            loop.admit()
        loop.fallback.leave([request], "a test says so")
        for _ in loop.run():
            pass
    assert request.num_plain_steps == 11 and request.output_ids == pair.plain(PROMPTS[0], 12)


def test_the_first_reason_to_leave_counts() -> None:
    """Bug: a request that leaves for a loss is said to have left at the last position, which a step
    still in flight has brought it to; or one that has ended stops the lane."""
    lane: Any = SimpleNamespace(
        config=SimpleNamespace(acceptance_floor=0.0, fallback=False), must_drain=False
    )
    request = Request(
        request_id=0, prompt_ids=[1], max_total_tokens=9, stop_ids=(), acceptance=Acceptance(3)
    )
    leaving = Fallback(lane, build_plain=lambda: lane)
    leaving.leave([request], "speculation lost")
    assert lane.must_drain
    lane.must_drain = False
    leaving.leave([request], LAST_BLOCK)
    assert request.fallback_reason == "speculation lost"
    request.fallback_reason, request.finish_reason = None, "stop"
    leaving.leave([request], LAST_BLOCK)
    assert request.fallback_reason is None and not lane.must_drain


@pytest.mark.usefixtures("impatient")
def test_what_was_due_is_measured_once() -> None:
    """Bug: behind the first measurement whoever leaves, for whatever reason, has another one taken,
    also in the loop in which somebody decodes plainly: the generation ends in an assertion; or one
    that was due as the last row ended is taken of nobody's, and counts from then on."""
    requests = [
        Request(
            request_id=i, prompt_ids=[1], max_total_tokens=9, stop_ids=(), acceptance=Acceptance(3)
        )
        for i in range(2)
    ]
    measured, joined = list[int](), list[Request]()
    plain: Any = SimpleNamespace(has_work=False, rows=[], join=joined.extend)
    plain.time_step = lambda timed: measured.append(len(timed)) or 1.0
    config = SimpleNamespace(acceptance_floor=0.0, fallback=True, speculation_limit=None)
    lane: Any = SimpleNamespace(config=config, must_drain=False, in_flight=[], step_s=0.1)
    lane.size_for, lane.leave = lambda count: max(count, 1), lambda leaving: None
    leaving = Fallback(lane, build_plain=lambda: plain)
    for running, num_steps in ((requests[:1], 8), (requests[:1], 4), (requests, 3)):
        lane.rows = lane.running = running
        for _ in range(num_steps):
            leaving.judge([Verified(request, [], 0) for request in running], len(running), True)
        assert lane.must_drain == (num_steps != 3)  # to be judged, and timed
        if num_steps == 8:
            lane.rows = lane.running = []
        if num_steps == 3:
            leaving.leave(running[:1], LAST_BLOCK)
        leaving.hand_over()
    assert joined == requests[:1] and measured == [1]
