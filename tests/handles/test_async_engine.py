"""The engine for asyncio: tasks that share it, leave it, and are told from its thread."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import pytest

from graphengine import AsyncEngine
from graphengine.decode.loop import DecodeLoop
from graphengine.decode.request import Request
from graphengine.handles import AutoResetEvent, Handle, collect
from graphengine.results import Chunk
from tests.decode.test_engine import Pair, loop_of
from tests.support.submitting import COUNT, soon


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
    changed, told = AutoResetEvent(), deque[int]()
    handle: Any = Racing(lambda: (told.append(0), changed.set()))
    assert [chunk.text for chunk in collect([handle], changed, told)] == ["last"]

    class Queue:
        def queue(self, prompt: Any, sampling: Any, params: Any, told: Any) -> Any:
            return Racing(told)

    queue: Any = Queue()
    engine = AsyncEngine(queue)

    async def main() -> list[str]:
        return [chunk.text async for chunk in engine.stream("x")]

    assert asyncio.run(main()) == ["last"]


def test_the_event_loop_runs_while_an_engine_closes() -> None:
    """Bug: closing, which waits for a step, stops all that the process serves meanwhile."""
    goes_on, seen = threading.Event(), list[bool]()

    class Closing:
        def close(self) -> None:
            seen.append(goes_on.wait(0.5))

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.01, goes_on.set)
        await AsyncEngine(cast(Any, Closing())).close()

    asyncio.run(main())
    assert seen == [True]


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


def test_a_task_that_is_cancelled_cancels_its_request() -> None:
    """Bug: only who leaves a stream cancels it: a cancelled task's request runs on for as long as
    anybody holds its handle."""
    seen, begun = list[str](), asyncio.Event()

    class Running:
        done = False

        def take(self) -> list[Chunk]:
            begun.set()
            return []

        def cancel(self) -> None:
            seen.append("cancelled")

    class Queue:
        def queue(self, *args: Any) -> Any:
            args[-1]()  # it looks once, and then waits
            return Running()

    engine = AsyncEngine(cast(Any, Queue()))

    async def main() -> None:
        task = asyncio.create_task(engine.generate("x"))
        await asyncio.wait_for(begun.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen == ["cancelled"]

    asyncio.run(main())
