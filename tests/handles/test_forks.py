"""What a fork does with an engine's handles and streams: it has none of its threads."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, cast

import pytest

from graphengine.api import Chunk, Engine
from graphengine.decode.loop import DecodeLoop, StepOutput
from graphengine.handles import Serving
from tests.support.submitting import submit


def told_in_a_fork(call: Callable[[], object]) -> str:
    """What a forked child's error says; "" where there is none. One that hangs is killed."""
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            call()
        except BaseException as error:
            os.write(theirs, str(error).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        text = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return text


def test_a_fork_is_refused(engine: Engine) -> None:
    """Bug: a generation in a forked child waits for ever for threads that only its parent has; or
    its user is told to load a model there, which waits for torch's."""
    engine.generate([[5]], max_new_tokens=2)
    assert "by spawn" in told_in_a_fork(lambda: engine.generate([[5]], max_new_tokens=2))


def test_who_waits_in_a_fork_is_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a forked child that asks for what its parent has submitted waits for ever, without a
    word; or what had come before the fork is lost with it."""
    is_halted, goes_on, tell = threading.Event(), threading.Event(), Serving._tell

    def halt(self: Serving, outputs: list[StepOutput]) -> None:
        tell(self, outputs)
        assert not is_halted.is_set() or goes_on.wait(60)

    monkeypatch.setattr(Serving, "_tell", halt)
    handle = submit(engine, [5], count=80)
    stream = engine.stream([1, 2, 3], max_new_tokens=80, ignore_eos=True)
    next(stream)
    is_halted.set()  # so that nothing comes to its end in front of the forks
    for wait in (handle.result, lambda: list(stream), lambda: next(iter(submit(engine, [5])))):
        assert "by spawn" in told_in_a_fork(wait)
    goes_on.set()
    assert len(handle.result().token_ids) == 80
    assert told_in_a_fork(handle.result) == ""


def test_a_fork_runs_no_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a forked child that ends, and so drops its parent's stream, waits for steps that its
    device never ends."""
    stream = engine.stream([1, 2, 3], max_new_tokens=9, ignore_eos=True)
    stream = cast("Generator[Chunk, None, None]", stream)
    next(stream)
    own, ran = os.getpid(), list[Any]()
    real = DecodeLoop.run

    def run(self: DecodeLoop, watch: Any = None) -> Any:
        ran.append(os.getpid() == own)
        return real(self, watch)

    def close() -> None:
        with suppress(StopIteration):
            stream.close()
        assert not ran, "it runs steps"

    monkeypatch.setattr(DecodeLoop, "run", run)
    assert told_in_a_fork(close) == ""
    stream.close()
    assert ran == [True]
