"""A handle's stream of chunks, without an engine: errors, leavers, several readers."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest

from graphengine import AsyncEngine
from graphengine.handles import AutoResetEvent, Handle, Serving, _Stream, collect
from graphengine.results import Chunk
from tests.support.submitting import soon


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

    changed, queue = AutoResetEvent(), cast(Any, Queue())
    said: list[str] = []
    with pytest.raises(RuntimeError, match="a step went wrong"):
        said.extend(chunk.text for chunk in collect([failed(changed.set)], changed, deque([0])))

    async def main() -> None:
        async for chunk in AsyncEngine(queue).stream("x"):
            said.append(chunk.text)

    with pytest.raises(RuntimeError, match="a step went wrong"):
        asyncio.run(main())
    assert said == ["one", "one"]


def test_an_error_of_one_cancels_the_others() -> None:
    """Bug: the other requests of a call run on for as long as somebody holds the error of one, as
    an interactive session does."""
    cancelled: list[_Stream] = []

    class Serving:
        def cancel(self, stream: _Stream) -> None:
            cancelled.append(stream)

    serving: Any = Serving()
    changed = AutoResetEvent()
    running, failed = (
        _Stream(lambda: (_ for _ in ()).throw(AssertionError), None) for _ in range(2)
    )
    failed.put(None, RuntimeError("a step went wrong"))
    changed.set()
    chunks = collect([Handle(serving, running), Handle(serving, failed)], changed, deque([0, 1]))
    with pytest.raises(RuntimeError, match="a step went wrong") as held:
        next(chunks)
    assert running in cancelled, held


def test_a_chunk_costs_no_look_at_other_prompts() -> None:
    """Bug: behind each chunk of a call all of its prompts are looked at, those too that wait or
    have said nothing new: half a millisecond for 1,000, beside the engine's thread."""

    class Silent:
        done, num_looks = False, 0

        def take(self) -> list[Chunk]:
            self.num_looks += 1
            return [] if self.num_looks == 1 else [Chunk(index=0, text="a", token_ids=[1])]

        def cancel(self) -> None:
            pass

    handles, changed, told = [Silent() for _ in range(100)], AutoResetEvent(), deque[int]()
    chunks = collect(cast(Any, handles), changed, told)
    for place in range(0, 100, 7):
        handles[place].num_looks = 1  # it has said something
        told.append(place)
        changed.set()
        assert next(chunks).index == place
    assert sum(handle.num_looks for handle in handles) == 2 * 15
    cast(Any, chunks).close()


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

    class Chunks(deque[Any]):
        def popleft(self) -> Any:
            chunk = super().popleft()
            thread.start()  # between the chunk and what is made of it
            thread.join(0.2)
            return chunk

    stream.chunks = Chunks()
    last: Any = SimpleNamespace(result="the result")
    stream.put(last)
    assert handle.result() == "the result"
    thread.join()
    assert found == ["the result"]


def test_who_comes_too_late_for_a_chunk_waits_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bug: of two threads that wait for one result, one finds that the other has just taken a chunk
    in the middle, and ends there: an AssertionError."""
    deaf: Any = Deaf()
    stream = _Stream(lambda: (_ for _ in ()).throw(AssertionError), None)
    stream.put(Chunk(index=0, text="one", token_ids=[1]))
    handle, left = Handle(deaf, stream), list[object]()
    last: Any = SimpleNamespace(result="the result")

    wait = stream.wait

    def waited() -> None:
        wait()
        if not left:
            left.append(stream)
            handle.take()  # as another thread
            threading.Timer(0.1, stream.put, [last]).start()

    monkeypatch.setattr(stream, "wait", waited)
    assert handle.result() == "the result"


def test_all_who_wait_are_woken() -> None:
    """Bug: of several threads that wait for one result all but one wait for ever."""
    deaf: Any = Deaf()
    stream = _Stream(lambda: (_ for _ in ()).throw(AssertionError), None)
    handle, found = Handle(deaf, stream), list[object]()
    for _ in range(3):
        threading.Thread(target=lambda: found.append(handle.result()), daemon=True).start()
    soon(lambda: len(stream.waiting) == 3)
    last: Any = SimpleNamespace(result="the result")
    stream.put(last)
    soon(lambda: len(found) == 3)


@pytest.mark.parametrize("error", [None, RuntimeError("a step went wrong")])
def test_an_end_that_comes_as_one_begins_to_wait(error: Exception | None) -> None:
    """Bug: what is put between a reader's look and its wait wakes nobody, and it waits for ever."""
    stream = _Stream(lambda: (_ for _ in ()).throw(AssertionError), None)

    class Waiting(deque[AutoResetEvent]):
        def append(self, event: AutoResetEvent, /) -> None:
            chunk = Chunk(index=0, text="one", token_ids=[1])
            stream.put(None if error else chunk, error)
            super().append(event)

    stream.waiting = Waiting()
    assert ends(stream.wait)


def test_a_cancellation_is_there_when_it_is_told() -> None:
    """Bug: the loop's thread, told of it first, looks for whom it is in that moment, finds nobody,
    and the request runs to its end."""
    stream, seen = _Stream(lambda: (_ for _ in ()).throw(AssertionError), None), list[bool]()

    class Looking(SimpleNamespace):
        def __setattr__(self, name: str, value: object) -> None:
            seen.append(stream.is_cancelled)

    Serving.cancel(cast(Any, Looking(_changed=AutoResetEvent())), stream)
    assert seen == [True]


def test_a_reset_that_fails_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: where the loop cannot be made idle behind an error, the thread ends, and who waits then
    or asks later waits for ever."""
    told, late = list[Any](), list[Handle]()
    monkeypatch.setattr(threading, "excepthook", told.append)

    def begin() -> Any:
        return SimpleNamespace(request_id=1), None

    def run() -> None:
        raise RuntimeError("a step went wrong")

    def reset(loop: Any) -> None:
        late.append(serving.submit(begin))
        raise RuntimeError("a fault of the reset")

    loop: Any = SimpleNamespace(fallback=None, is_clean=False, run=run)
    serving = Serving(loop, reset)
    first = serving.submit(begin)
    soon(lambda: first.done and late[0].done)
    for handle in (first, *late):
        with pytest.raises(RuntimeError, match="a step went wrong"):
            handle.result()
    with pytest.raises(RuntimeError, match="this engine is closed"):
        serving.submit(begin)
    serving.close()
    assert "a fault of the reset" in str(told[0].exc_value)


@contextmanager
def interrupted(number: int) -> Iterator[None]:
    """Raises KeyboardInterrupt at one of the places where Ctrl-C may: lines of handles, and where a
    function begins, those of Python's own modules too."""
    left = number

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace if frame.f_code.co_filename.endswith("handles.py") else None

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def ends(call: Callable[[], object]) -> bool:
    """Whether another thread comes to its end."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(5)
    return not thread.is_alive()


READERS: dict[str, Callable[[Handle, AutoResetEvent], object]] = {
    "result": lambda handle, changed: handle.result(),
    "take": lambda handle, changed: handle.take(),
    "generate": lambda handle, changed: list(collect([handle], changed, deque([0]))),
}


@pytest.mark.parametrize("reader", READERS)
def test_ctrl_c_as_one_reads(reader: str) -> None:
    """Bug: Ctrl-C between a lock and its block leaves it taken, and the engine's thread, which puts
    the next chunk, stands still for good, with the requests of everybody; or it comes between the
    last chunk and its result, and whoever asks again meets an AssertionError."""
    deaf: Any = Deaf()
    last: Any = Chunk(index=0, text="two", token_ids=[2], result=cast(Any, "the result"))
    for number in range(1, 1000):
        changed = AutoResetEvent()
        stream = _Stream(lambda: (_ for _ in ()).throw(AssertionError), changed.set)
        handle = Handle(deaf, stream)
        stream.put(Chunk(index=0, text="one", token_ids=[1]))
        stream.put(last)
        try:
            with interrupted(number):
                READERS[reader](handle, changed)
        except KeyboardInterrupt:
            assert ends(partial(stream.put, last)), f"after an interrupt at {number}"
            assert handle.result() == "the result"
        else:
            break
    assert 5 < number < 1000


def test_ctrl_c_as_one_submits() -> None:
    """Bug: as above, where a request is queued or cancelled: nobody's is taken in any more."""

    def refuse() -> Any:
        raise ValueError("an impossible wish")

    loop: Any = SimpleNamespace(fallback=None, is_clean=True, run=lambda: iter(()))
    serving = Serving(loop, lambda loop: None)
    held, late = list[Handle](), list[Handle]()
    for number in range(1, 1000):
        try:
            with interrupted(number):
                serving.cancel(_Stream(refuse, None))
                held.append(serving.submit(refuse))
        except KeyboardInterrupt:
            assert ends(lambda: late.append(serving.submit(refuse)))
            soon(lambda: late[-1].done)
        else:
            break
    assert 5 < number < 1000
    serving.close()
