"""turns: Python's lock changes hands at once, and as before when the last has left."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from threading import Thread
from typing import Any

import pytest

from graphengine import TINY_TARGET, Engine
from graphengine.decode import turns
from graphengine.decode.turns import SWITCH_INTERVAL_S, short_turns


def test_turns_that_overlap() -> None:
    """Bug: of two at a time, the one that ends last restores what the other had set."""
    before = sys.getswitchinterval()
    one, other = short_turns(), short_turns()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert sys.getswitchinterval() < before
    other.__exit__(None, None, None)
    assert sys.getswitchinterval() == before


def test_turns_that_are_shorter_already() -> None:
    """Bug: a process that has chosen shorter turns gets longer ones while a stream runs."""
    before, own = sys.getswitchinterval(), SWITCH_INTERVAL_S / 5
    sys.setswitchinterval(own)
    try:
        with short_turns(), short_turns():
            assert sys.getswitchinterval() < 2 * own
        assert sys.getswitchinterval() < 2 * own
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("during", ["append", "pop"])
def test_a_stream_that_is_dropped_as_turns_change(
    monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    """Bug: the collector of garbage closes a forgotten stream while another one begins or ends, and
    that one waits for ever; or turns stay short."""
    before, forgotten = sys.getswitchinterval(), ExitStack()

    def collect(intervals: list[float], *args: float) -> float | None:
        forgotten.close()
        return getattr(list, during)(intervals, *args)

    def begin_and_end() -> None:
        intervals = type("Intervals", (list,), {during: collect})()
        monkeypatch.setattr(turns, "_INTERVALS", intervals)
        forgotten.enter_context(short_turns())
        with short_turns():
            pass

    thread = Thread(target=begin_and_end, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    assert sys.getswitchinterval() == before


def test_streams_have_short_turns() -> None:
    """Bug: a thread that computes beside a stream keeps the lock for a step's time; or a stream
    that was dropped leaves the process switching threads all the time."""
    before = sys.getswitchinterval()
    with Engine.from_pretrained(TINY_TARGET, draft="none") as engine:
        stream: Any = engine.stream("Hi", max_new_tokens=9)
        assert sys.getswitchinterval() == before
        next(stream)
        assert abs(sys.getswitchinterval() - SWITCH_INTERVAL_S) < 1e-6
        stream.close()
        assert sys.getswitchinterval() == before
        engine.generate("Hi", max_new_tokens=3)
        assert sys.getswitchinterval() == before
