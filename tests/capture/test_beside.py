"""Two chains beside each other: what waits for what, and what they hand on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphengine.capture import beside as module
from graphengine.capture.beside import beside, other_stream
from graphengine.capture.runners import GraphPool, run_chain
from graphengine.capture.steps import AttentionStep, Carry, Chain, Dense, Step


class Stream:
    """Notes what runs on it, and behind what of the other one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.done: set[str] = set()  # what is in front of its next work

    def wait_stream(self, other: Stream) -> None:
        self.done |= other.done


class Device:
    """Which stream is the current one, and what each step came behind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main, self.other = Stream("main"), Stream("other")
        self.current, self.behind = self.main, dict[str, set[str]]()
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: On(self, stream))

    def step(self, kind: type[Step], name: str) -> Step:
        def run(carry: Carry) -> Carry:
            self.behind[name] = set(self.current.done)
            self.current.done.add(name)
            assert self.current is (self.other if name.startswith("front") else self.main)
            return carry

        return kind(name, run)


class On:
    def __init__(self, device: Device, stream: Stream) -> None:
        self.device, self.stream = device, stream

    def __enter__(self) -> None:
        self.device.current = self.stream

    def __exit__(self, *_: object) -> None:
        self.device.current = self.device.main


def test_who_waits_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: an attention reads keys that the chain in front has not written yet, or waits for its
    attention, so that nothing stands beside it; the first step runs in front of what both need; or
    what comes behind both reads what the chain in front is still writing."""
    device = Device(monkeypatch)
    kinds = [Dense, AttentionStep, Dense, AttentionStep, Dense]
    front, back = (
        [device.step(kind, f"{who}{i}") for i, kind in enumerate(kinds)]
        for who in ("front", "back")
    )
    device.main.done.add("inputs")
    stream: Any = device.other
    run_chain(beside(front, back, stream))
    assert all("inputs" in behind for behind in device.behind.values())
    for i, kind in enumerate(kinds):
        fronts = {name for name in device.behind[f"back{i}"] if name.startswith("front")}
        seen = i if kind is AttentionStep else max(i - 1, 0)
        assert fronts == {f"front{j}" for j in range(seen)}
        assert not any(name.startswith("back") for name in device.behind[f"front{i}"])
    assert {f"front{i}" for i in range(5)} <= device.main.done


def counting(start: float, device: str = "cpu") -> Chain:
    """start, then + 1, then doubled and stated twice."""
    return [
        Dense("0", lambda _: (torch.full((3,), start, device=device),)),
        AttentionStep("1", lambda carry: (carry[0] + 1,)),
        Dense("2", lambda carry: (carry[0] * 2, carry[0])),
    ]


def test_each_has_its_own_carry() -> None:
    """Bug: a chain is given the other's carry, or what is behind both that of the one in front."""
    steps = beside(counting(1.0), counting(10.0), other_stream(torch.device("cpu")))
    assert [(type(step), step.name) for step in steps] == [
        (Dense, "0"),
        (AttentionStep, "1"),
        (Dense, "2"),
    ]
    assert [x.tolist() for x in run_chain(steps[:1])] == [[1.0] * 3, [10.0] * 3]
    assert [x.tolist() for x in run_chain(steps[:2])] == [[2.0] * 3, [11.0] * 3]
    assert [x.tolist() for x in run_chain(steps)] == [[22.0] * 3, [11.0] * 3]
    assert beside([], [], None) == []


def test_chains_of_other_steps_are_none() -> None:
    """Bug: where steps differ, an attention runs in front of the keys it reads."""
    with pytest.raises(AssertionError):
        beside(counting(1.0)[:2], counting(1.0)[1:], None)


@pytest.mark.gpu
def test_both_are_in_the_graph() -> None:
    """Bug: the other stream's work runs once, at capture, or ends behind the graph."""
    device = torch.device("cuda", torch.cuda.current_device())
    assert other_stream(device) is module.other_stream(device)
    base = torch.zeros(1 << 22, device=device)
    seen = torch.zeros_like(base)

    def chain(add: float, end: Any) -> Chain:
        return [
            Dense("0", lambda _: (base + add,)),
            AttentionStep("1", lambda carry: (carry[0] * 2,)),
            Dense("2", end),
        ]

    front = chain(1.0, lambda carry: (seen.copy_(carry[0]),))
    steps = beside(front, chain(5.0, lambda carry: (carry[0],)), other_stream(device))
    behind = Dense("3", lambda carry: (carry[0] + seen,))
    pool, steps = GraphPool(), [*steps, behind]
    with pool.warming():
        run_chain(steps)
    graph, (found,) = pool.capture(steps, ())
    for value in (0.0, 3.0, -2.0):
        base.fill_(value)
        graph.handle.replay()
        assert (found == 2 * (value + 5) + 2 * (value + 1)).all()
