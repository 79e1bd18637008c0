"""One captured chain with several ends: which of them a replay runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from graphengine.capture import cuda_driver
from graphengine.capture.runners import Graph, GraphPool, capture_ends, run_chain
from graphengine.capture.steps import Dense


def test_two_ends_of_one_captured_chain() -> None:
    """Bug: the other end replays the first end too, or reads a carry that is not the chain's."""
    log: list[str] = []
    memory = torch.zeros(5)

    class Recorded:
        def __init__(self, steps: Any, carry: Any) -> None:
            self.steps, self.carry = steps, carry

        def replay(self) -> None:
            run_chain(self.steps, self.carry)

    class Pool:
        num_captures = 0

        def capture(self, steps: Any, carry: Any) -> Any:
            self.num_captures += 1
            graph: Any = Recorded(steps, carry)
            return Graph(graph, 0, 0), run_chain(steps, carry)

    def step(name: str, place: int, carries: bool = False) -> Dense:
        def run(carry: Any) -> Any:
            log.append(name)
            memory[place] = 1.0 + (carry[0] if carry else 0.0)
            return (memory[place : place + 1],) if carries else ()

        return Dense(name, run)

    first, context = step("first", 0, carries=True), step("context", 4)
    ends = {
        "greedy": [step("ids", 1, carries=True), step("accept", 2)],
        "sampled": [step("logits", 1, carries=True), step("draw", 3)],
    }
    pool: Any = Pool()
    runner, other = capture_ends("step", [first], ends, [context], (), pool, whole=False).values()
    assert pool.num_captures == 6
    assert list(capture_ends("step", [context], {}, [], (), pool, whole=False)) == [""]
    for chosen, names, expected in (
        (runner, ["first", "ids", "accept", "context"], [1.0, 2.0, 3.0, 0.0, 1.0]),
        (other, ["first", "logits", "draw", "context"], [1.0, 2.0, 0.0, 3.0, 1.0]),
    ):
        log.clear()
        memory.zero_()
        chosen.run()
        assert log == names and memory.tolist() == expected
        assert [call.name for call in chosen.calls] == names


@pytest.mark.parametrize("left", ["x", "y"])
def test_an_end_hands_nothing_on(left: str) -> None:
    """Bug: a tail is captured with what one of the ends has left, and reads it behind another; or
    what follows continues the end and not the tail."""
    graph = Graph(cast(Any, SimpleNamespace(replay=int)), 0, 0)
    pool: Any = SimpleNamespace(capture=lambda steps, carry: (graph, run_chain(steps, carry)))

    def step(name: str) -> Dense:
        return Dense(name, lambda carry: (torch.zeros(1),) if name == left else ())

    ends, tail = {name: [step(name)] for name in "xy"}, [step("tail")]
    with pytest.raises(AssertionError):
        capture_ends("step", [step("head")], ends, tail, (), pool, whole=False)
    runners = capture_ends("step", [step("head")], ends, [], (), pool, whole=False)
    assert [len(runner.carry) for runner in runners.values()] == [left == "x", left == "y"]
    ends = {"x": [step("a")], "y": [step("b")]}
    runners = capture_ends("step", [], ends, [step(left)], (), pool, whole=False)
    assert [len(runner.carry) for runner in runners.values()] == [1, 1]


def test_a_graph_is_recorded_and_uploaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a chunk of 4,096 rows runs once more at each start, in front of its capture. A graph is
    uploaded by way of another stream than replays it, or in front of its being there. What it took
    of the pool is told as what it keeps in use."""
    ran: list[str] = []
    log: list[object] = []
    graph = SimpleNamespace(instantiate=lambda: log.append("there"), raw_cuda_graph_exec=lambda: 7)
    stream = SimpleNamespace(cuda_stream=5)
    names = [f"{kind}_bytes.all.current" for kind in ("reserved", "allocated")]
    memory = iter([dict(zip(names, counts, strict=True)) for counts in ((70, 5), (100, 12))])

    def call(name: str, *handles: Any) -> None:
        log.append((name, *(handle.value for handle in handles)))

    monkeypatch.setattr(cuda_driver, "call", call)
    fakes = {
        "graph": lambda *_, **__: nullcontext(),
        "current_stream": lambda: stream,
        "CUDAGraph": lambda **_: graph,
        "memory_stats": lambda: next(memory),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    pool: Any = SimpleNamespace(stream=SimpleNamespace(cuda_stream=4), handle=None, num_graphs=0)
    steps = [Dense(name, lambda carry, name=name: ran.append(name) or carry) for name in "abc"]
    captured, _ = GraphPool.capture(pool, steps, ())
    assert (captured.pool_bytes, captured.live_bytes) == (30, 7)
    assert ran == [*"abc"] and pool.num_graphs == 1
    assert log == ["there", ("cuGraphUpload", 7, 5)]


def test_what_ends_early_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a start that finds a kernel missing goes on while what it has queued until then still
    runs: buffers that are cleared, and draws that are put back, are written again."""
    log: list[str] = []

    @contextmanager
    def stream(of: Any) -> Iterator[None]:
        log.append("begun")
        try:
            yield
        finally:
            log.append("ended")

    current = SimpleNamespace(wait_stream=lambda other: log.append(f"current waits for {other}"))
    side = SimpleNamespace(wait_stream=lambda other: log.append("side waits"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    pool: Any = SimpleNamespace(stream=side)
    with pytest.raises(ValueError, match="missing"), GraphPool.warming(pool):
        raise ValueError("missing")
    assert log == ["side waits", "begun", "ended", f"current waits for {side}"]
