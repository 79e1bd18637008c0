"""One captured chain with several ends: which of them a replay runs."""

from __future__ import annotations

from typing import Any

import torch

from graphengine.capture.runners import Graph, capture_ends, run_chain
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
