"""runners and steps: one chain called step by step, replayed, and captured."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from graphengine import names
from graphengine.capture.runners import (
    Call,
    EagerRunner,
    Graph,
    GraphPool,
    ReplayRunner,
    _no_collection,
    capture_ends,
    capture_full,
    run_chain,
    shapes,
)
from graphengine.capture.steps import AttentionStep, Carry, Chain, Dense, Host, Step


def counting(log: list[str]) -> list[Step]:
    """Two steps that note their names and add one."""

    def step(name: str) -> Callable[[Carry], Carry]:
        def run(carry: Carry) -> Carry:
            log.append(name)
            return tuple(x + 1 for x in carry)

        return run

    return [Dense("d", step("d")), AttentionStep("a", step("a"))]


def test_a_chain_hands_on_what_its_steps_leave() -> None:
    """Bug: a step is skipped, called twice, or given what the first one was given."""
    log: list[str] = []
    (x,) = run_chain(counting(log), (torch.zeros(2),))
    assert log == ["d", "a"] and x.tolist() == [2, 2]


def test_an_eager_runner_asks_for_its_carry_each_time() -> None:
    """Bug: the drafter's first attention runs on what its head left steps ago."""
    left = EagerRunner(counting([]), lambda: (torch.zeros(1),))
    following = EagerRunner(counting([]), lambda: left.carry)
    assert left.carry == ()
    for _ in range(2):
        left.run()
        following.run()
        assert following.carry[0].item() == 4
        left.source = lambda: (torch.zeros(1),)


def test_a_replay_calls_in_order_and_names_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: ranges are opened while nobody looks, which costs a step microseconds; or calls are
    replayed in another order where somebody does."""
    log: list[str] = []
    calls = [Call(n, lambda n=n: log.append(n), None, [], []) for n in ("x", "y")]
    runner = ReplayRunner([], calls, ())
    ranges: list[str] = []

    @contextmanager
    def range_(name: str) -> Iterator[None]:
        ranges.append(name)
        yield

    monkeypatch.setattr(names, "range_", range_)
    monkeypatch.setattr(names, "is_enabled", lambda: False)
    runner.run()
    assert (log, ranges) == (["x", "y"], [])
    monkeypatch.setattr(names, "is_enabled", lambda: True)
    runner.run()
    assert (log, ranges) == (["x", "y"] * 2, ["x", "y"])


def test_shapes_are_said_as_people_read_them() -> None:
    """Bug: `graphs` prints torch.Size([16, 4096]) torch.bfloat16."""
    carry = torch.zeros(16, 4096, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int64)
    assert shapes(carry) == ["16x4096 bfloat16", "3 int64"]


def warmed_and_captured(steps: Chain) -> tuple[Graph, Carry]:
    pool = GraphPool()
    with pool.warming():
        run_chain(steps)
    return pool.capture(steps, ())


@pytest.mark.gpu
def test_garbage_is_not_collected_in_a_capture() -> None:
    """Bug: while a graph is captured the collector destroys the graphs of an earlier engine, which
    CUDA answers by ending the capture."""
    x = torch.zeros(8, device="cuda")

    def leave_behind() -> None:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            left = x + 1
        graph.instantiate()
        graph.replay()
        pinned = torch.zeros(1 << 20, pin_memory=True)
        cycle = [graph, left, pinned, pinned.to("cuda", non_blocking=True)]
        cycle.append(cycle)  # pyright: ignore[reportArgumentType]

    calls: list[object] = []

    def step(carry: Carry) -> Carry:
        calls.append(x)
        if len(calls) > 1:  # recorded
            gc.set_threshold(1, 1, 1)
            calls.append([[] for _ in range(1000)])
        return (x + len(calls),)

    threshold = gc.get_threshold()
    try:
        gc.set_threshold(10**9)
        leave_behind()
        graph, (y,) = warmed_and_captured([Dense("step", step)])
    finally:
        gc.set_threshold(*threshold)
    graph.handle.replay()
    assert (y == 3).all()


@pytest.mark.gpu
def test_other_threads_allocate_in_a_capture() -> None:
    """Bug: a process that has another model beside the engine ends a capture, and the start with
    it, by asking CUDA for memory on a thread of its own."""
    x = torch.zeros(8, device="cuda")
    calls, others = [0], list[torch.Tensor]()

    def allocate() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            device = torch.ones(1 << 26, device="cuda")
            others.extend([device, device[:8].to("cpu"), torch.ones(1 << 22).pin_memory()])

    def step(carry: Carry) -> Carry:
        calls[0] += 1
        if calls[0] > 1:  # recorded
            thread = threading.Thread(target=allocate)
            thread.start()
            thread.join()
        return (x + calls[0],)

    graph, (y,) = warmed_and_captured([Dense("step", step)])
    graph.handle.replay()
    assert (y == 2).all() and [o.shape[0] for o in others] == [1 << 26, 8, 1 << 22]


class Pool:
    """Captures without a device: what a capture gives holds nothing before its replay."""

    def capture(self, steps: Chain, carry: Carry) -> tuple[Graph, Carry]:
        static = tuple(torch.full_like(x, torch.nan) for x in run_chain(steps, carry))

        def replay() -> None:
            for x, new in zip(static, run_chain(steps, carry), strict=True):
                x.copy_(new)

        handle: Any = SimpleNamespace(replay=replay)
        return Graph(handle, 0, 0), static


def noting(log: list[str], kind: type[Step], name: str) -> Step:
    """Notes its name, and that an attention is given what is there; doubles it."""

    def run(carry: Carry) -> Carry:
        log.append(name)
        assert kind is not AttentionStep or all(x.isfinite().all() for x in carry), name
        return carry if kind is Host else tuple(2 * x for x in carry)

    return kind(name, run)


@pytest.mark.parametrize("whole", [False, True])
def test_each_end_has_what_is_its_own(whole: bool) -> None:
    """Bug: what an end has in front of the head, or the tail, is left out of its graphs; eager
    attention is called on what no graph has written yet; an end without steps cannot be captured,
    for the head has left something."""
    log: list[str] = []
    head = [
        noting(log, kind, n) for kind, n in ((Dense, "h0"), (AttentionStep, "h1"), (Dense, "h2"))
    ]
    ends = {name: [noting(log, Dense, name), drop(log)] for name in "ab"} | {"": []}
    tail = [noting(log, Dense, "tail")]
    fronts = {"b": [drop(log, "front")]}
    where: Any = (torch.ones(1),), Pool()
    found = capture_ends("verify", head, ends, tail, *where, whole=whole, fronts=fronts)
    for name, runner in found.items():
        log.clear()
        runner.run()
        own = [name, "drop"] if name else []
        assert log == [*["front"] * (name == "b"), "h0", "h1", "h2", *own, "tail"]
        assert [step.name for step in runner.chain] == log


@pytest.mark.parametrize("whole", [False, True])
def test_a_chain_without_ends_leaves_its_carry(whole: bool) -> None:
    """Bug: the drafter's head, captured ahead of a step, leaves nothing for the rest to go on
    with."""
    head, pool = [noting([], Dense, "a"), noting([], Dense, "b")], cast(GraphPool, Pool())
    found = capture_ends("draft", head, {}, [], (torch.ones(1),), pool, whole=whole)
    found[""].run()
    assert [x.item() for x in found[""].carry] == [4]


def drop(log: list[str], name: str = "drop") -> Step:
    return Dense(name, lambda carry: log.append(name) or ())


def test_parts_around_the_host_have_names_of_their_own() -> None:
    """Bug: the first of a step's two graphs has the name of both, or what follows a prompt's first
    token has the whole prompt's; a chain of one step loses its own; the host's work is captured."""
    log: list[str] = []
    kinds = (Dense, AttentionStep, Host, Dense, Dense)
    chain = [noting(log, kind, kind.__name__) for kind in kinds]
    pool: Any = Pool()
    runner = capture_full("verify", chain, (torch.ones(1),), pool)
    assert [(call.name, call.graph is None) for call in runner.calls] == [
        *(("verify.00", False), ("Host", True), ("verify.02", False))
    ]
    runner.run()
    assert runner.carry[0].item() == 16
    behind = capture_full("prefill.T16", chain[:4], (torch.ones(1),), pool)
    assert [call.name for call in behind.calls] == ["prefill.T16", "Host", "Dense"]
    for steps in (chain[:2], chain[:1]):
        (call,) = capture_full("verify", steps, (torch.ones(1),), pool).calls
        assert call.name == "verify"


def test_a_collector_that_was_off_stays_off() -> None:
    """Bug: a process that collects when it likes is made to collect after each capture."""
    gc.disable()
    try:
        with _no_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
    with _no_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
