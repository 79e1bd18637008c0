"""lane.Lane: rows that stay where they are, whoever else comes and goes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphengine import TINY_DRAFT, TINY_TARGET
from graphengine.api import Engine
from graphengine.decode import lane as lanes
from tests.decode.test_engine import BACKENDS, PROMPTS, Pair, assert_idle, force
from tests.support.counted import Counted


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(params=BACKENDS)
def engine(pair: Pair, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with pair.engine(attention_backend=request.param, buckets=(1, 4)) as engine:
        yield engine
        assert_idle(engine)


@torch.no_grad()
def test_only_the_row_that_changes_is_written(
    engine: Engine, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: when one request joins or leaves, rows of running ones are written anew: a row is
    written from a host that is a step behind the device, or the pipeline is drained for nothing."""
    force(engine, pair, 1)
    loop = engine.built.loop
    lane, written, real = loop.first, [], lanes.write_rows_

    def spy(buffers: Any, rows: Any, *others: Any) -> None:
        written.append((sorted(rows), len(lane.in_flight)))
        real(buffers, rows, *others)

    monkeypatch.setattr(lanes, "write_rows_", spy)
    budgets = (6, 30, 30, 30)
    first = [loop.submit(list(p), n, ()) for p, n in zip(PROMPTS, budgets, strict=False)]
    late = None
    while loop.has_work:
        loop.admit()
        loop.launch()
        loop.collect()
        if late is None and first[0].finish_reason is not None:
            late = loop.submit(list(PROMPTS[4]), 20, ())
            assert lane.rows[1:] == first[1:] and lane.rows[0] is None
            loop.admit()
            assert lane.rows == [late, *first[1:]]
    assert late is not None
    for request in (*first, late):
        count = len(request.output_ids)
        assert request.output_ids == pair.plain(request.prompt_ids, count) and count >= 6
    alone = [rows for rows, _ in written[1:] if len(rows) == 1]
    assert written[0][0] == [0, 1, 2, 3] and [0] in alone
    # Nobody waits for the pipeline to be empty, unless another bucket is due.
    assert any(num_in_flight for _, num_in_flight in written) == (lane.depth > 1)


@torch.no_grad()
def test_a_plan_does_not_read_all_pages_anew(engine: Engine, pair: Pair) -> None:
    """Bug: each plan of a step makes numbers of a tensor of the pages of all texts, one by one: 2
    ms, twice a step, for 16 requests behind 30,000 tokens in pages of 16."""
    loop = engine.built.loop
    requests = [loop.submit(list(p), 30, ()) for p in PROMPTS[:2]]
    loop.admit()
    loop.launch()
    loop.collect()
    counted = [Counted(request.pages) for request in requests]
    for request, pages in zip(requests, counted, strict=True):
        request.pages = pages
    for _ in range(3):
        loop.launch()
        loop.collect()
    assert [pages.num_read for pages in counted] == [0, 0]
    while loop.has_work:
        loop.launch()
        loop.collect()
    assert [r.output_ids for r in requests] == [pair.plain(p, 30) for p in PROMPTS[:2]]


@torch.no_grad()
def test_rows_behind_a_smaller_bucket_move(engine: Engine, pair: Pair) -> None:
    """Bug: a request whose row lies behind the end of a smaller bucket is lost, or runs on with
    another's pages; one that has joined and never run among them."""
    loop = engine.built.loop
    requests = [loop.submit(list(p), 30, ()) for p in PROMPTS[:3]]
    loop.admit()
    for cancelled, runs in ((0, False), (1, True)):
        if runs:
            loop.launch()
            loop.collect()
        loop.cancel(requests[cancelled])
    while loop.has_work:
        loop.admit()
        loop.launch()
        loop.collect()
    assert loop.first.bucket is not None and loop.first.bucket.size == 1
    assert requests[2].output_ids == pair.plain(PROMPTS[2], 30)


@torch.no_grad()
def test_no_step_behind_the_last_token(
    engine: Engine, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: an answer is given back only when a step that was launched ahead of its end is over, a
    whole step behind its last token; or one is launched that no budget can use, for which the next
    request then waits."""
    waited: list[int] = []
    real = lanes.Results.wait
    monkeypatch.setattr(
        lanes.Results, "wait", lambda results: waited.append(results.number) or real(results)
    )
    force(engine, pair, 0)  # a token a step: the budget is what the steps in flight commit
    loop = engine.built.loop
    for stop_ids in ((), (pair.plain(PROMPTS[0], 9)[-1],)):
        waited.clear()
        before = loop.first._next_step
        request = loop.submit(list(PROMPTS[0]), 9, stop_ids)
        for _ in loop.run():
            pass
        assert request.output_ids == pair.plain(PROMPTS[0], 9)[: len(request.output_ids)]
        num_steps = len(request.output_ids) - 1
        assert len(set(waited)) == num_steps and not loop.first.in_flight
        if request.finish_reason == "length":
            assert loop.first._next_step - before == num_steps
    # Whoever comes next does not take what it left for its own.
    later = loop.submit(list(PROMPTS[1]), 9, ())
    for _ in loop.run():
        pass
    assert later.output_ids == pair.plain(PROMPTS[1], 9)


@torch.no_grad()
def test_hops_and_types_of_a_launch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: between `launch` and what runs a chain, layers grow back that a reader has to cross and
    a step to pay for: at most five calls into other modules, of which the last runs the chain."""
    loop = engine.built.loop
    loop.submit(list(PROMPTS[0]), 20, ())
    loop.admit()
    loop.launch()
    loop.collect()

    depth: list[list[str]] = []
    stack: list[str] = []

    def trace(frame: Any, event: str, arg: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call":
            stack.append(module)
            if frame.f_code.co_name == "run_chain":
                depth.append([m for m in stack if m.startswith("graphengine.")])
        elif event == "return" and stack:
            stack.pop()

    sys.setprofile(trace)
    try:
        loop.launch()
    finally:
        sys.setprofile(None)
    loop.collect()
    loop.reset()
    for modules in depth:
        hops = sum(a != b for a, b in itertools.pairwise(modules))
        assert hops <= 5, modules
    assert depth


@torch.no_grad()
def test_a_timed_step_is_warm(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the first step of a timing, which compiles, captures or fetches, counts with the others:
    plain decoding looks slower than it is."""
    loop = engine.built.loop
    lane, waits = loop.first, [900.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    loop.submit(list(PROMPTS[0]), 20, ())
    loop.admit()
    requests, now = lane.running, 0.0
    lane.leave(requests)

    def wait(self: object) -> None:
        nonlocal now
        now += waits.pop(0)

    monkeypatch.setattr(lanes.Results, "wait", wait)
    monkeypatch.setattr(lanes, "time", SimpleNamespace(perf_counter=lambda: now))
    assert lane.time_step(requests) == 3.0 and not waits
    loop.reset()


@torch.no_grad()
def test_the_time_of_several_steps_is_nobody_s(engine: Engine) -> None:
    """Bug: what two launches took in front of one wait, or rows that were written, counts as a
    step's, and a guard leaves speculation for it."""
    loop = engine.built.loop
    for prompt in PROMPTS[:2]:
        loop.submit(list(prompt), 60, ())
    loop.admit()
    lane, known = loop.first, list[bool]()
    for num_collected in (1, 1, lane.depth):
        loop.launch()
        loop.wait()
        known.append(lane.step_s is not None)
        for _ in range(num_collected):
            loop.collect()
    loop.launch()
    loop.wait()
    assert known == [False, True, True] and (lane.step_s is None) == (lane.depth > 1)
    loop.collect()
    loop.submit(list(PROMPTS[2]), 60, ())
    loop.admit()
    loop.launch()
    loop.wait()
    assert lane.step_s is None
    loop.reset()


@torch.no_grad()
def test_a_step_takes_its_launch_and_its_wait(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: of what a step takes the host's part is left out, or the device's, and a guard compares
    it with the whole of a plain one."""
    loop, now = engine.built.loop, 0.0
    lane = loop.first
    loop.submit(list(PROMPTS[0]), 60, ())
    loop.admit()
    loop.launch()
    loop.collect()
    real = lane._queue_step

    def queue_step() -> None:
        nonlocal now
        now += 3.0
        real()

    def wait(self: object) -> None:
        nonlocal now
        now += 5.0

    monkeypatch.setattr(lane, "_queue_step", queue_step)
    monkeypatch.setattr(lanes.Results, "wait", wait)
    monkeypatch.setattr(lanes, "time", SimpleNamespace(perf_counter=lambda: now))
    loop.launch()
    loop.wait()
    assert lane.step_s == 3.0 + 5.0
    loop.reset()


@torch.no_grad()
def test_who_joins_as_the_other_leaves_moves_up(engine: Engine, pair: Pair) -> None:
    """Bug: the bucket of one stays the right one, so nobody sees that its request has row 1; the
    loop steps for ever over a row of padding."""
    loop = engine.built.loop
    first = loop.submit(list(PROMPTS[0]), 60, ())
    loop.admit()
    loop.launch()
    while loop.first.in_flight:
        loop.collect()
    second = loop.submit(list(PROMPTS[1]), 9, ())
    loop.admit()
    loop.cancel(first)
    for _ in range(20):
        loop.launch()
        loop.collect()
    assert loop.first.bucket is not None and loop.first.bucket.size == 1
    assert second.output_ids == pair.plain(PROMPTS[1], 9)


def test_a_lane_that_was_rebuilt_runs_what_was_built(engine: Engine, pair: Pair) -> None:
    """Bug: it goes on with the bucket that it ran last, so another proposer is never asked."""
    lane, asked = engine.built.loop.first, {"max_new_tokens": 6, "ignore_eos": True}
    engine.generate(PROMPTS[:1], **asked)
    lane.rebuild()
    (result,) = engine.generate(PROMPTS[:1], **asked)
    assert lane.bucket is lane.buckets[1] and result.token_ids == pair.plain(PROMPTS[0], 6)


def test_drafts_are_made_once() -> None:
    """Bug: in front of every step with a grammar the drafter runs again on what the step before has
    drafted already, or where a request has joined, not at all."""
    options: dict[str, Any] = {"max_model_len": 256, "attention_backend": "triton"}
    with Engine.from_pretrained(TINY_TARGET, draft=TINY_DRAFT, device="cpu", **options) as engine:
        ran: list[int] = []
        lane = engine.built.loop.first
        for size, bucket in lane.buckets.items():
            drafting: Any = SimpleNamespace(run=lambda size=size: ran.append(size))
            lane._buckets[size] = replace(bucket, drafting=drafting)
        for _ in range(2):
            ran.clear()
            (result,) = engine.generate(["17 + 4 ="], regex="[0-9]{30}", max_new_tokens=20)
            assert len(ran) == 1 and result.metrics.num_steps > 1
