"""Requests from several threads at once: handles, their errors, and the end of their engine."""

from __future__ import annotations

import atexit
import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from graphengine import api
from graphengine.api import Engine, PromptError
from graphengine.decode.loop import DecodeLoop
from graphengine.handles import Handle, Serving
from tests.decode.test_engine import Pair, loop_of
from tests.support.submitting import COUNT, soon, submit


def test_threads_share_the_steps(engine: Engine, truth: dict[Any, list[int]]) -> None:
    """Bug: two threads drive one loop, a thread gets another's tokens, or generate beside handles
    is refused."""
    found: dict[Any, list[int]] = {}

    def user(prompts: list[Any]) -> None:
        for i, prompt in enumerate(prompts):
            if i % 2:
                (result,) = engine.generate([list(prompt)], max_new_tokens=COUNT, ignore_eos=True)
                found[prompt] = result.token_ids
            else:
                found[prompt] = [t for chunk in submit(engine, prompt) for t in chunk.token_ids]

    submit(engine, [5]).result()
    prompts = list(truth)
    threads = [threading.Thread(target=user, args=(prompts[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == truth
    loop = loop_of(engine)
    assert loop.allocator.num_free == loop.allocator.num_usable


def test_two_threads_begin_at_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: of two threads whose first `submit` comes at the same time one is refused, for the other
    is about to start what both need."""

    def begin(*args: Any) -> Serving:
        time.sleep(0.05)
        return Serving(*args)

    monkeypatch.setattr(api, "Serving", begin)
    with ThreadPoolExecutor(2) as pool:
        handles = list(pool.map(partial(submit, engine), ([5], [7])))
    assert all(handle.result().token_ids for handle in handles)


def test_several_prompts_of_one_call(engine: Engine, truth: dict[Any, list[int]]) -> None:
    """Bug: beside handles the chunks of a call lose their prompts' places."""
    submit(engine, [5]).result()
    prompts = [list(p) for p in truth]
    results = engine.generate(prompts, max_new_tokens=COUNT, ignore_eos=True)
    assert [r.token_ids for r in results] == list(truth.values())


def test_what_cannot_run_is_refused_as_without_handles(engine: Engine) -> None:
    """Bug: beside handles a prompt that is too long names no prompt, is found when the others have
    been run, and `submit` takes it."""
    prompts = [[1, 2, 3], list(range(1, 97))]
    for _ in range(2):
        with pytest.raises(PromptError, match="prompt 2 of 2: the prompt has 96 tokens") as error:
            engine.stream_many(prompts, max_new_tokens=2)
        assert error.value.index == 1
        submit(engine, [5]).result()
    with pytest.raises(PromptError, match="the prompt has 96 tokens"):
        submit(engine, prompts[1])


def test_the_wait_for_a_step_is_the_queue_s(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: what a request waits for others' steps counts as encoding its text."""
    real = Serving._take_in

    def take_in(serving: Serving, loop: DecodeLoop) -> None:
        time.sleep(0.2)
        real(serving, loop)

    monkeypatch.setattr(Serving, "_take_in", take_in)
    metrics = submit(engine, [5], 1).result().metrics
    assert metrics.queue_ms >= 200 and metrics.tokenize_ms < 200


def test_cancel_and_drop(engine: Engine) -> None:
    """Bug: a cancelled request runs on, its waiter waits for ever, or what nobody holds any more
    takes up a row."""
    handle = submit(engine, [1, 2, 3], 80)
    first = next(iter(handle))
    assert first.token_ids
    handle.cancel()
    assert handle.result().finish_reason == "abort"
    assert handle.done
    handle.cancel()
    dropped = submit(engine, [4, 5], 80)
    next(iter(dropped))
    request = dropped._stream.request
    del dropped
    gc.collect()
    soon(lambda: not loop_of(engine).has_work)
    assert request.finish_reason == "abort"


def test_who_is_cancelled_before_it_begins(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a cancellation is forgotten that comes before the engine's thread has taken its request
    in, which runs to its end for nobody."""
    real, cancelled = Serving._take_in, threading.Event()

    def take_in(serving: Serving, loop: DecodeLoop) -> None:
        assert cancelled.wait(20)
        real(serving, loop)

    monkeypatch.setattr(Serving, "_take_in", take_in)
    handle = submit(engine, [1, 2, 3], 80)
    handle.cancel()
    cancelled.set()
    result = handle.result()
    assert (result.finish_reason, result.token_ids) == ("abort", [])


def test_errors_reach_who_waits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: an error ends the thread, and handles wait for ever; or one request's impossible wish
    ends the others."""
    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.submit([10**9])
    good, serving = submit(engine, [1, 2, 3]), engine._serving

    def refuse() -> Any:
        raise MemoryError("an impossible wish")

    assert serving is not None
    refused = serving.submit(refuse)
    soon(lambda: refused.done)
    with pytest.raises(MemoryError, match="an impossible wish"):
        refused.result()
    assert good.result().finish_reason == "length"

    late: list[Handle] = []

    def explode(*args: Any) -> None:
        late.append(submit(engine, [8]))
        raise RuntimeError("a step went wrong")

    monkeypatch.setattr(DecodeLoop, "launch", explode)
    failed = submit(engine, [7])
    with pytest.raises(RuntimeError, match="a step went wrong"):
        failed.result()
    soon(lambda: late[0].done)
    with pytest.raises(RuntimeError, match="a step went wrong"):
        late[0].result()
    monkeypatch.undo()
    assert submit(engine, [1, 2, 3]).result().token_ids == good.result().token_ids


def test_who_asks_again_as_a_step_fails(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: what waited while a step failed is taken in behind its error, and whoever has come
    meanwhile waits for ever."""
    waiting: list[Handle] = []
    again: list[Handle] = []

    def explode(*args: Any) -> None:
        monkeypatch.undo()
        waiting.append(engine.queue([8], None, {}, lambda: again.append(submit(engine, [5]))))
        raise RuntimeError("a step went wrong")

    monkeypatch.setattr(DecodeLoop, "launch", explode)
    with pytest.raises(RuntimeError, match="a step went wrong"):
        submit(engine, [7]).result()
    soon(lambda: again and again[0].done)
    assert waiting[0].done and len(again[0].result().token_ids) == COUNT


def test_close_while_it_runs(pair: Pair) -> None:
    """Bug: closing waits for every request, or its waiters hang."""
    engine = pair.engine()
    handle = submit(engine, [1, 2, 3], 80)
    next(iter(handle))
    engine.close()
    with pytest.raises(RuntimeError, match="closed while this request ran"):
        handle.result()
    with pytest.raises(RuntimeError, match="closed"):
        submit(engine, [1])


def test_close_while_the_first_begins(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: closed by another thread while the first `submit` starts the engine's own, it is closed
    and answers all the same, and keeps that thread, weights and pools."""
    engine, real = pair.engine(), Serving.__init__
    closing = threading.Thread(target=engine.close)

    def begin(*args: Any) -> None:
        closing.start()
        closing.join(0.2)
        real(*args)

    monkeypatch.setattr(Serving, "__init__", begin)
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="closed"):
        submit(engine, [1, 2, 3]).result()
    soon(lambda: threading.active_count() == before)


def test_no_thread_for_the_first(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: where the machine gives no thread the engine stays taken, by nobody."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        submit(engine, [5])
    monkeypatch.undo()
    assert engine.generate([5], max_new_tokens=2)[0].token_ids
    assert submit(engine, [5]).result().token_ids


def test_ctrl_c_while_the_thread_starts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the first `submit` leaves a thread that nobody knows, and with it weights and pools of
    the engine for good."""
    before, real = threading.active_count(), threading.Thread.start

    def start(thread: threading.Thread) -> None:
        real(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            submit(engine, [5])
    assert threading.active_count() == before
    assert submit(engine, [5]).result().token_ids


def test_a_process_ends_while_it_runs(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a script without `close` ends in an abort (exit code 134), its thread torn out of a
    step; or every closed engine is kept until then."""
    at_exit: list[Callable[[], object]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", at_exit.remove)
    with pair.engine() as engine:
        handle = submit(engine, [1, 2, 3], 80)
        serving: Any = engine._serving
        assert serving.close in at_exit
        serving.close()
        assert handle.done and not serving._thread.is_alive()
        assert serving.close not in at_exit
        monkeypatch.undo()  # `close` again does no harm


def test_close_frees_everything(pair: Pair) -> None:
    """Bug: a handle that is kept keeps weights and pools of a closed engine."""
    engine = pair.engine()
    handle, left = submit(engine, [1, 2, 3]), submit(engine, [5], 80)
    assert handle.result().finish_reason == "length"
    pool = weakref.ref(loop_of(engine).prefill.pair.target.kv_pool)
    engine.close()
    gc.collect()
    assert pool() is None
    assert handle.done and left.done


def test_an_engine_that_is_dropped_is_freed(
    pair: Pair, truth: dict[Any, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: behind the first `submit` an engine whose variable gets another value keeps its weights,
    K/V and thread for the process's life, or what ends that thread until then; or it ends what
    still runs."""
    at_exit: list[Callable[[], object]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", at_exit.remove)
    prompt, said = next(iter(truth.items()))
    engine = pair.engine()
    before = threading.active_count()
    loop, handle = weakref.ref(engine.built.loop), submit(engine, prompt)
    last = submit(engine, prompt, 60)
    assert len(at_exit) == 1
    del engine
    gc.collect()
    assert handle.result().token_ids == said and len(last.result().token_ids) == 60
    soon(lambda: loop() is None and threading.active_count() == before)
    assert not at_exit


def test_a_stream_from_before_is_not_overtaken(engine: Engine) -> None:
    """Bug: the thread takes the loop from a stream that another frame is reading."""
    stream = engine.stream([1, 2, 3], max_new_tokens=30, ignore_eos=True)
    next(stream)
    found: list[BaseException] = []

    def other() -> None:
        try:
            submit(engine, [5])
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(20)
    assert "another generation" in str(found[0])
    for _ in stream:
        pass
    assert submit(engine, [5]).result().token_ids


def test_a_stream_that_nobody_began_is_dropped(engine: Engine) -> None:
    """Bug: what it has queued runs beside the first handle, for nobody."""
    stream = engine.stream([1, 2, 3], max_new_tokens=80, ignore_eos=True)
    (request,) = loop_of(engine).waiting
    assert submit(engine, [5]).result().token_ids
    assert not request.output_ids
    with pytest.raises(RuntimeError, match="before it began"):
        next(stream)


def test_what_comes_as_it_closes_is_refused(engine: Engine) -> None:
    """Bug: a request that another thread submits while the engine closes waits for ever."""
    submit(engine, [5]).result()
    serving: Any = engine._serving
    serving.close()
    with pytest.raises(RuntimeError, match="this engine is closed"):
        serving.submit(lambda: None)
