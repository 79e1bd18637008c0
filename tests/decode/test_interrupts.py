"""Exceptions, Ctrl-C between any two lines, and closing: pages return, and the engine is usable."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

from graphengine.api import Engine
from graphengine.capture.steps import Dense
from graphengine.decode import loop as engine_module
from graphengine.decode.lane import Lane
from graphengine.decode.rows import Results
from tests.decode.test_engine import (
    BACKENDS,
    PROMPTS,
    Pair,
    assert_idle,
    force,
    ids_only,
    loop_of,
    tokens,
)
from tests.support.chains import runners_of
from tests.support.guarded import judge_early, plain_takes


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


impatient = pytest.fixture(judge_early)


@pytest.fixture(params=BACKENDS)
def engine(pair: Pair, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with pair.engine(attention_backend=request.param, max_model_len=44) as engine:
        yield engine
        assert_idle(engine)


def test_a_reset_forgets_what_a_warm_up_wrote(engine: Engine) -> None:
    """Bug: a bucket's build is interrupted; its warm-ups have counted their steps from 0, and the
    words that they left are taken for the results of the engine's first steps."""
    loop = loop_of(engine)
    first = [Results.of(loop.first.buckets[4].buffers, step, 1) for step in (1, 2)]
    for results in first:
        results.words_BX[:] = results.number << 32
        assert results.are_there()
    loop.reset()
    assert not any(results.are_there() for results in first)


def step_functions(engine: Engine) -> dict[str, tuple[Any, str]]:
    """Where an exception can come from: (object, attribute) by name."""
    loop = loop_of(engine)
    return {
        "queue": (loop, "queue"),
        "allocate": (loop.allocator, "allocate"),
        "write": (loop.first, "_write"),
        "wait": (loop, "wait"),
        "judge": (loop.fallback, "judge"),
        "retire": (loop, "_retire"),
        "free": (loop.allocator, "free"),
        "advance": (engine_module.Request, "advance"),
        "accept": (sys.modules["graphengine.decode.ends"], "accept_and_advance_"),
    }


@pytest.mark.parametrize(
    "where", ["queue", "allocate", "write", "wait", "judge", "retire", "free", "advance", "accept"]
)
@pytest.mark.parametrize("after", [0, 1])
def test_exception_anywhere(
    engine: Engine, pair: Pair, where: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: after an error in one phase a result buffer, a page or a row is lost, and the next
    generation fails or decodes something else."""
    owner, name = step_functions(engine)[where]
    real, calls = getattr(owner, name), []

    def explode(*args: Any, **options: Any) -> Any:
        calls.append(where)
        if len(calls) == after + 1:
            raise ZeroDivisionError(where)
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, explode)
        with pytest.raises(ZeroDivisionError, match=where):
            engine.generate(PROMPTS, max_new_tokens=9, ignore_eos=True)
    assert_idle(engine)
    assert ids_only(engine, PROMPTS, max_new_tokens=9) == [pair.plain(p, 9) for p in PROMPTS]


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line run in the engine's own files, as Ctrl-C does."""

    FILES = (
        *("loop.py", "lane.py", "fallback.py", "rows.py", "kvcache.py"),
        *("request.py", "guards.py", "holdings.py", "api.py"),
    )

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        return self.trace if "graphengine" in name and name.endswith(self.FILES) else None

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.trace


def lines_run(run: Callable[[], object]) -> int:
    """How many lines `run` executes in the engine's files."""
    counter = Interrupt(-1)
    sys.settrace(counter)
    try:
        run()
    finally:
        sys.settrace(None)
    return -1 - counter.left


def num_survived(run: Callable[[], object], plain: object, engine: Engine, lines: list[int]) -> int:
    """Interrupts `run` at each of `lines`, after which it must give `plain` again; how many of the
    interrupts reached the caller."""
    interrupted = 0
    gradients = torch.is_grad_enabled()
    for line in lines:
        sys.settrace(Interrupt(line))
        try:
            run()
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
            # Between `with torch.no_grad()` and its end Python can miss to call the latter.
            torch.set_grad_enabled(gradients)
        assert run() == plain, f"after an interrupt at line {line}"
        assert_idle(engine)
    return interrupted


@pytest.mark.slow
def test_ctrl_c_between_any_two_lines(engine: Engine, pair: Pair) -> None:
    """Bug: an interrupt between two lines, where no exception was foreseen (a page taken but not
    yet owned, a result buffer popped but not yet in flight), leaves the engine unusable."""
    prompts = PROMPTS[:3]
    plain = [pair.plain(p, 5) for p in prompts]

    def run() -> list[list[int]]:
        return ids_only(engine, prompts, max_new_tokens=5)

    total = lines_run(run)
    assert total > 300
    lines = random.Random(0).sample(range(1, total), 36)
    assert num_survived(run, plain, engine, lines) > 30


@pytest.mark.slow
def test_ctrl_c_as_a_stream_is_dropped(engine: Engine, pair: Pair) -> None:
    """Bug: an interrupt while what a dropped stream has in flight runs to its end leaves that half
    dropped, and the next generation goes on with it."""

    def run(trace: Interrupt | None) -> list[list[int]]:
        stream: Any = engine.stream_many(PROMPTS, max_new_tokens=9, ignore_eos=True)
        for _ in range(4):
            next(stream)
        sys.settrace(trace)
        try:
            stream.close()
        finally:
            sys.settrace(None)
        return ids_only(engine, PROMPTS[1:2], max_new_tokens=5)

    plain, counter = [pair.plain(PROMPTS[1], 5)], Interrupt(-1)
    assert run(counter) == plain
    for line in random.Random(2).sample(range(1, -1 - counter.left), 20):
        with pytest.raises(KeyboardInterrupt):
            run(Interrupt(line))
        torch.set_grad_enabled(True)
        assert run(None) == plain, f"after an interrupt at line {line}"
        assert_idle(engine)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_ctrl_c_at_the_hand_over(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: an interrupt while a request is between two loops, or while one of the two is reset,
    leaves a request or its pages in the other."""
    plain_takes(monkeypatch, 1e-9)
    prompts = PROMPTS[:3]
    plain = [pair.plain(p, 14) for p in prompts]
    with pair.engine(max_model_len=44, buckets=(4,), prepare_plain_decode=True) as engine:
        force(engine, pair, 0)

        def run() -> list[list[int]]:
            results = engine.generate(prompts, max_new_tokens=14, ignore_eos=True)
            assert all(result.metrics.num_plain_steps for result in results)
            return tokens(results)

        run()  # plain steps are measured once
        lines = random.Random(5).sample(range(1, lines_run(run)), 20)
        assert num_survived(run, plain, engine, lines) > 15


def test_close_frees_everything(pair: Pair) -> None:
    """Bug: the pools of a closed engine live on in a frame, a closure or a cycle until some
    collection, and the next engine finds no memory."""
    engine = pair.engine(prepare_plain_decode=True)
    ids_only(engine, PROMPTS[:1], max_new_tokens=5)
    prefill = loop_of(engine).prefill
    pools = [weakref.ref(prefill.pair.target.kv_pool), weakref.ref(prefill.pair.proposer.kv_pool)]
    del prefill
    gc.collect()
    gc.disable()
    try:
        engine.close()
        assert [pool() for pool in pools] == [None, None]
    finally:
        gc.enable()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("where", ["verify", "build", "time_step"])
def test_exception_in_plain_decode(pair: Pair, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: what the second loop holds is forgotten when the first is reset."""
    plain_takes(monkeypatch, 1e-9)
    with pair.engine(max_model_len=44, buckets=(4,)) as engine:
        loop = loop_of(engine)
        force(engine, pair, 0)
        calls: list[int] = []

        def explode(*args: Any) -> Any:
            calls.append(1)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            if where == "build":
                patch.setattr(loop.fallback, "_build_plain", explode)
            elif where == "time_step":
                patch.setattr(Lane, "time_step", explode)
            else:
                loop.fallback.prepare()
                runner = runners_of(loop.fallback.plain.buckets[4])[0]
                broken = Dense("broken", explode)
                patch.setattr(runner, "chain", [*runner.chain, broken])
                patch.setattr(Lane, "time_step", lambda self, requests: 1e-9)
            with pytest.raises(KeyboardInterrupt):
                engine.generate(PROMPTS, max_new_tokens=27, ignore_eos=True)
        assert calls
        assert_idle(engine)
        results = engine.generate(PROMPTS, max_new_tokens=27, ignore_eos=True)
        assert tokens(results) == [pair.plain(p, 27) for p in PROMPTS]
        assert all(r.metrics.num_plain_steps for r in results)


def test_closed_under_a_stream(pair: Pair) -> None:
    """Bug: a stream whose engine was closed ends without a word, as if the answer were complete."""
    engine = pair.engine()
    stream = engine.stream(PROMPTS[0], max_new_tokens=30, ignore_eos=True)
    next(stream)
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="this engine is closed; make a new one"):
        list(stream)
    for use in (lambda: engine.generate([1]), lambda: engine.stream([1]), lambda: engine.config):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    with pytest.raises(RuntimeError, match="closed"), engine:
        engine.generate([1])


def test_failed_device_closes_the_engine(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: after a CUDA error the clean-up's own error hides the first, or the engine pretends to
    be usable."""
    engine = pair.engine()
    stream = engine.stream(PROMPTS[0], max_new_tokens=30, ignore_eos=True)
    next(stream)

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    def explode() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(loop_of(engine), "reset", fail)
    monkeypatch.setattr(loop_of(engine), "collect", explode)
    with pytest.raises(ZeroDivisionError):
        list(stream)
    with pytest.raises(RuntimeError, match=r"closed because .*illegal memory access .*new process"):
        engine.generate(PROMPTS[0])
    engine.close()


def test_a_reset_that_fails_for_itself_is_told(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a defect in the clean-up is taken for a device that has failed, and hidden."""

    def fail() -> None:
        raise RuntimeError("a defect")

    with pair.engine() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(loop_of(engine), "reset", fail)
            with pytest.raises(RuntimeError, match="a defect"):
                engine._reset(loop_of(engine))
        assert tokens(engine.generate(PROMPTS[:1], max_new_tokens=3, ignore_eos=True))
