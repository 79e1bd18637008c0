"""Requests from several threads and tasks at once: handles, and the engine for asyncio."""

from __future__ import annotations

import asyncio
import atexit
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from graphengine import AsyncEngine
from graphengine.api import Engine, PromptError
from graphengine.decode.loop import DecodeLoop
from graphengine.decode.request import Request
from graphengine.handles import Handle, Serving, _Stream, collect
from graphengine.results import Chunk
from tests.decode.test_engine import Pair, loop_of

COUNT = 12


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"), likely_tokens=3)


@pytest.fixture(scope="module")
def truth(pair: Pair) -> dict[tuple[int, ...], list[int]]:
    """Random prompts and what they say alone."""
    rng = random.Random(0)
    prompts = [[rng.randrange(1, 250) for _ in range(rng.randrange(1, 40))] for _ in range(12)]
    with pair.engine() as engine:
        results = [engine.generate([p], max_new_tokens=COUNT, ignore_eos=True)[0] for p in prompts]
    return {tuple(p): r.token_ids for p, r in zip(prompts, results, strict=True)}


@pytest.fixture
def engine(pair: Pair) -> Iterator[Engine]:
    with pair.engine(max_num_batched_tokens=16) as engine:
        yield engine


def submit(engine: Engine, prompt: Any, count: int = COUNT) -> Any:
    return engine.submit(list(prompt), max_new_tokens=count, ignore_eos=True)


def soon(happens: Callable[[], object]) -> None:
    """Waits for it; a hang of the engine's thread is no hang of the test."""
    deadline = time.perf_counter() + 20
    while not happens() and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert happens()


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
        raise ValueError("an impossible wish")

    assert serving is not None
    with pytest.raises(ValueError, match="an impossible wish"):
        serving.submit(refuse).result()
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


class Deaf:
    """A thread that hears no cancellation."""

    def cancel(self, stream: Any) -> None:
        pass


def test_what_was_said_before_an_error_is_there() -> None:
    """Bug: an error takes the chunks with it that nobody had taken yet."""
    deaf: Any = Deaf()
    said = [Chunk(index=0, text=text, token_ids=[1]) for text in ("one ", "two")]
    stream = _Stream(lambda: (_ for _ in ()).throw(AssertionError), None)
    for chunk in said:
        stream.put(chunk)
    stream.put(None, RuntimeError("a step went wrong"))
    handle = Handle(deaf, stream)
    assert handle.take() == said
    with pytest.raises(RuntimeError, match="a step went wrong"):
        handle.take()


def test_a_slow_reader_hears_of_an_error() -> None:
    """Bug: an error that comes while chunks are still to be taken is lost with the last of them: a
    call of several prompts, or a task's stream, ends as if its answer were complete."""
    deaf: Any = Deaf()

    def failed(told: Callable[[], object]) -> Handle:
        stream = _Stream(lambda: (_ for _ in ()).throw(AssertionError), told)
        stream.put(Chunk(index=0, text="one", token_ids=[1]))
        stream.put(None, RuntimeError("a step went wrong"))
        return Handle(deaf, stream)

    class Queue:
        def queue(self, prompt: Any, sampling: Any, params: Any, told: Any) -> Handle:
            return failed(told)

    changed, queue = threading.Event(), cast(Any, Queue())
    said: list[str] = []
    with pytest.raises(RuntimeError, match="a step went wrong"):
        said.extend(chunk.text for chunk in collect([failed(changed.set)], changed))

    async def main() -> None:
        async for chunk in AsyncEngine(queue).stream("x"):
            said.append(chunk.text)

    with pytest.raises(RuntimeError, match="a step went wrong"):
        asyncio.run(main())
    assert said == ["one", "one"]


def test_whoever_leaves_an_iteration_leaves_the_rest() -> None:
    """Bug: chunks that came together are lost where the loop over them ends at the first."""
    deaf: Any = Deaf()
    said = [Chunk(index=0, text=text, token_ids=[1]) for text in ("one ", "two ", "three")]
    stream = _Stream(lambda: (_ for _ in ()).throw(AssertionError), None)
    for chunk in said:
        stream.put(chunk)
    handle = Handle(deaf, stream)
    assert next(iter(handle)) == said[0]
    assert handle.take() == said[1:]


def test_two_threads_wait_for_one_result() -> None:
    """Bug: the one that comes too late for the last chunk comes too early for the result, which is
    an AssertionError."""
    deaf: Any = Deaf()
    stream = _Stream(lambda: (_ for _ in ()).throw(AssertionError), None)
    handle, found = Handle(deaf, stream), list[object]()
    thread = threading.Thread(target=lambda: found.append(handle.result()))

    class Last:
        @property
        def result(self) -> str:
            if stream.is_over and not thread.is_alive():
                thread.start()
                thread.join(0.2)
            return "the result"

    last: Any = Last()
    stream.put(last)
    assert handle.result() == "the result"
    thread.join()
    assert found == ["the result"]


class Racing:
    """A handle whose last chunk comes right behind a look that found none."""

    def __init__(self, told: Callable[[], object]) -> None:
        self.chunks: list[Chunk] = []
        self.done, self.told, self.num_looks = False, told, 0
        told()

    def take(self) -> list[Chunk]:
        found, self.chunks = self.chunks, []
        if not self.num_looks:
            self.chunks, self.done = [Chunk(index=0, text="last", token_ids=[1])], True
            self.told()
        self.num_looks += 1
        return found

    def cancel(self) -> None:
        pass


def test_a_chunk_that_comes_while_one_looks() -> None:
    """Bug: whether it is over is asked behind the look, and its last chunk is lost."""
    changed = threading.Event()
    handle: Any = Racing(changed.set)
    assert [chunk.text for chunk in collect([handle], changed)] == ["last"]

    class Queue:
        def queue(self, prompt: Any, sampling: Any, params: Any, told: Any) -> Any:
            return Racing(told)

    queue: Any = Queue()
    engine = AsyncEngine(queue)

    async def main() -> list[str]:
        return [chunk.text async for chunk in engine.stream("x")]

    assert asyncio.run(main()) == ["last"]


def test_a_text_is_encoded_beside_the_event_loop() -> None:
    """Bug: every other task stands still while one's long text is encoded."""
    goes_on = threading.Event()

    class Queue:
        def queue(self, *args: Any) -> Any:
            assert goes_on.wait(5), "no other task came to run"
            return Racing(args[-1])

    engine = AsyncEngine(cast(Any, Queue()))

    async def said() -> list[str]:
        return [chunk.text async for chunk in engine.stream("x")]

    async def other() -> None:
        goes_on.set()

    async def main() -> list[str]:
        texts, _ = await asyncio.gather(said(), other())
        return texts

    assert asyncio.run(main()) == ["last"]


def test_an_event_loop_that_closes_while_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: it closes behind the look whether it is closed, and the error, on the engine's thread,
    ends every request of every other loop."""
    told: list[Callable[[], object]] = []

    class Queue:
        def queue(self, *args: Any) -> Any:
            told.append(args[-1])
            return Racing(told[0])

    queue: Any = Queue()

    async def main() -> asyncio.AbstractEventLoop:
        engine = AsyncEngine(queue)
        assert [chunk.text async for chunk in engine.stream("x")] == ["last"]
        return asyncio.get_running_loop()

    monkeypatch.setattr(asyncio.run(main()), "is_closed", lambda: False)
    told[0]()


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


def test_an_engine_that_is_dropped_is_freed(pair: Pair, truth: dict[Any, list[int]]) -> None:
    """Bug: behind the first `submit` an engine whose variable gets another value keeps its weights,
    K/V and thread for the process's life; or it ends what still runs."""
    prompt, said = next(iter(truth.items()))
    engine = pair.engine()
    before = threading.active_count()
    loop, handle = weakref.ref(engine.built.loop), submit(engine, prompt)
    last = submit(engine, prompt, 60)
    del engine
    gc.collect()
    assert handle.result().token_ids == said and len(last.result().token_ids) == 60
    soon(lambda: loop() is None and threading.active_count() == before)


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
    with pytest.raises(RuntimeError, match="another generation"):
        next(stream)


def test_tasks(pair: Pair, truth: dict[Any, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a task blocks the event loop, a cancelled one leaves its request running, or one whose
    request failed waits for ever."""

    async def user(engine: AsyncEngine, prompt: Any) -> list[int]:
        stream = engine.stream(list(prompt), max_new_tokens=COUNT, ignore_eos=True)
        return [token async for chunk in stream for token in chunk.token_ids]

    endings: list[str] = []
    real = DecodeLoop.cancel

    def cancel(loop: DecodeLoop, request: Request) -> None:
        real(loop, request)
        endings.append(str(request.finish_reason))

    async def main() -> None:
        async with AsyncEngine(pair.engine(max_num_batched_tokens=16)) as engine:
            found = await asyncio.gather(*(user(engine, prompt) for prompt in truth))
            assert list(found) == list(truth.values())
            result = await engine.generate([5], max_new_tokens=3, ignore_eos=True)
            assert len(result.token_ids) == 3
            begun = asyncio.Event()
            monkeypatch.setattr(DecodeLoop, "cancel", cancel)

            async def endless() -> None:
                async for _ in engine.stream([9] * 10, max_new_tokens=80, ignore_eos=True):
                    begun.set()

            task = asyncio.create_task(endless())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            loop = loop_of(engine.engine)
            await asyncio.to_thread(soon, lambda: not loop.has_work)
            assert endings == ["abort"]
            with pytest.raises(ValueError, match="outside the vocabulary"):
                await engine.generate([10**9])

            def explode(*args: Any) -> None:
                raise RuntimeError("a step went wrong")

            monkeypatch.setattr(DecodeLoop, "launch", explode)
            with pytest.raises(RuntimeError, match="a step went wrong"):
                await asyncio.wait_for(engine.generate([5], max_new_tokens=3), 20)

    asyncio.run(main())


def test_what_comes_as_it_closes_is_refused(engine: Engine) -> None:
    """Bug: a request that another thread submits while the engine closes waits for ever."""
    submit(engine, [5]).result()
    serving: Any = engine._serving
    serving.close()
    with pytest.raises(RuntimeError, match="this engine is closed"):
        serving.submit(lambda: None)


def test_whoever_leaves_a_stream_cancels_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a task's request runs on for as long as anybody still holds its handle, as a traceback
    does."""
    held: list[Handle] = []

    async def leave() -> None:
        async with AsyncEngine(pair.engine()) as engine:
            queue = engine.engine.queue
            monkeypatch.setattr(
                engine.engine, "queue", lambda *a: (held.append(queue(*a)), held[-1])[1]
            )
            stream = engine.stream([1, 2, 3], max_new_tokens=80, ignore_eos=True)
            async for chunk in stream:
                assert chunk.token_ids
                break
            await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue]
            await asyncio.to_thread(soon, lambda: held[0].done)
            assert held[0].result().finish_reason == "abort"

    asyncio.run(leave())
