"""Requests of several threads at once: one thread runs the loop, handles wait for what it commits.

An engine's own `generate` and `stream` run the loop in the caller's thread, where nothing stands
between a step and its reader. With the first `submit` a thread takes the engine over for good; from
then on `generate` and `stream` go through it as well. Between two steps it takes in what was
submitted and cancelled meanwhile. Behind the last request of an engine that nobody holds it ends.

Invariant: only that thread touches the loop. A handle ends with a result or with an error, whatever
happens to the others; one that nobody holds any more is cancelled. Ctrl-C leaves no lock taken that
the loop's thread takes: `with` on a `threading.Condition`, and so every method of an Event, runs
lines of Python between its lock and the block, and there it would.
"""

from __future__ import annotations

import atexit
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import torch

from graphengine.decode.guards import warn_caller
from graphengine.decode.loop import DecodeLoop, StepOutput
from graphengine.decode.request import Request
from graphengine.results import Chunk, GenerationResult, Teller

Submit = Callable[[], tuple[Request, Teller]]
"""Queues a request; called by the thread that runs the loop. Raises: ValueError."""


def check_process(pid: int) -> None:
    """Raises: RuntimeError: this is a fork of the process with that id, and has none of its
    threads."""
    if os.getpid() != pid:
        raise RuntimeError(
            "this engine was made in another process, and its threads are not in a fork of that, "
            "nor are torch's; start processes by spawn and make one with from_pretrained there"
        )


class AutoResetEvent:
    """An event for one waiter, whose wait clears it."""

    def __init__(self) -> None:
        self._unset, self._pid = threading.Lock(), os.getpid()
        self._unset.acquire()

    def set(self) -> None:
        """Ends the wait that is under way, or the next one."""
        with suppress(RuntimeError):  # it is set already
            self._unset.release()

    def wait(self) -> None:
        """Returns once it was set. Raises: RuntimeError: it never will be, in a fork."""
        check_process(self._pid)
        self._unset.acquire()


class _Stream:
    """What the loop's thread and a handle share; it keeps neither alive. Only that thread puts;
    whoever sees `is_over` also sees all that was put before."""

    def __init__(self, submit: Submit, told: Callable[[], object] | None) -> None:
        self.submit: Submit | None = submit
        self.told = told
        self.waiting: deque[AutoResetEvent] = deque()
        self.chunks: deque[Chunk] = deque()
        self.result: GenerationResult | None = None
        self.error: BaseException | None = None
        self.is_over = self.is_cancelled = False
        self.pid = os.getpid()
        self.request: Request | None = None
        self.tell: Teller | None = None

    def put(self, chunk: Chunk | None, error: BaseException | None = None) -> None:
        if chunk is not None:
            self.result = chunk.result
            self.chunks.append(chunk)
        self.error = self.error or error
        if self.error is not None or self.result is not None:
            # The engine's memory is not a handle's to hold.
            self.submit = self.tell = self.request = None
            self.is_over = True
        while self.waiting:
            self.waiting.popleft().set()
        if self.told is not None:
            self.told()

    def wait(self) -> None:
        """Returns once a chunk is there, or the end. Raises: RuntimeError: none comes to a fork."""
        while not (self.chunks or self.is_over):
            check_process(self.pid)
            event = AutoResetEvent()
            self.waiting.append(event)
            if not (self.chunks or self.is_over):  # else it came before the event was seen
                event.wait()


class Handle:
    """A request that runs: iterate over its chunks, wait for its result, or cancel it. Any thread
    may do so. Each chunk is given out once."""

    def __init__(self, serving: Serving, stream: _Stream) -> None:
        self._serving, self._stream = serving, stream
        weakref.finalize(self, serving.cancel, stream)

    @property
    def done(self) -> bool:
        """Whether it has ended; its last chunks may still be there to be taken."""
        return self._stream.is_over

    def cancel(self) -> None:
        """Ends it between two steps, with finish reason "abort"; harmless if it has ended."""
        self._serving.cancel(self._stream)

    def take(self) -> list[Chunk]:
        """Chunks that are there now, without waiting.

        Raises: what ended the request, once its chunks are taken.
        """
        return self._take(len(self._stream.chunks))

    def _take(self, most: int) -> list[Chunk]:
        stream, chunks = self._stream, list[Chunk]()
        error = stream.error  # behind which no chunk comes
        with suppress(IndexError):  # where another thread takes them, too
            while len(chunks) < most:
                chunks.append(stream.chunks.popleft())
        if not chunks and error is not None:
            raise error
        return chunks

    def __iter__(self) -> Iterator[Chunk]:
        while True:
            self._stream.wait()
            is_over = self._stream.is_over
            chunks = self._take(1)  # a reader that stops leaves the others to be taken
            if not chunks and is_over:
                return
            yield from chunks  # none, where another thread was first

    def result(self) -> GenerationResult:
        """Waits for the end; takes the chunks that nobody has taken.

        Raises: what ended the request, if that was an error of the engine.
        """
        for _ in self:
            pass
        result = self._stream.result
        assert result is not None
        return result


class Serving:
    """The thread that runs an engine's loop."""

    def __init__(self, loop: DecodeLoop, reset: Callable[[DecodeLoop], None]) -> None:
        """Args: reset: makes the loop idle after an error."""
        self._reset = reset
        if loop.fallback is not None:
            loop.fallback.warn = _warn
        self._changed = AutoResetEvent()
        self._inbox: deque[_Stream] = deque()
        self._has_cancelled = self._is_closed = self._is_left = False
        self._streams: dict[int, _Stream] = {}  # by request
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(
            target=self._serve, args=(loop,), name="graphengine", daemon=True
        )
        try:
            self._thread.start()  # which waits until it runs
        except BaseException:  # Ctrl-C, or no thread is to be had; nobody gets this object
            self.leave()
            if self._thread.is_alive():
                self._thread.join()
            raise
        # The process would abort if the interpreter ended in the middle of a step.
        atexit.register(self.close)

    def submit(self, submit: Submit, told: Callable[[], object] | None = None) -> Handle:
        """Queues a request.

        Args: told: called by the loop's thread after each chunk.
        Raises: RuntimeError: closed.
        """
        stream = _Stream(submit, told)
        self._inbox.append(stream)
        if self._is_closed:  # perhaps since the line above: nobody has its handle yet
            with suppress(ValueError):
                self._inbox.remove(stream)
            raise RuntimeError("this engine is closed; make a new one with from_pretrained")
        self._changed.set()
        return Handle(self, stream)

    def cancel(self, stream: _Stream) -> None:
        """Between two steps; harmless if it has ended."""
        if not stream.is_over:
            stream.is_cancelled = self._has_cancelled = True  # in this order
            self._changed.set()

    def leave(self) -> None:
        """Nobody can submit any more: the thread ends after what runs and waits."""
        self._is_left = True
        self._changed.set()

    def close(self) -> None:
        """Ends every request with an error, and the thread after its current step."""
        atexit.unregister(self.close)
        self._is_closed = True
        self._changed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _serve(self, loop: DecodeLoop) -> None:
        if self._device is not None:  # a thread begins with device 0
            torch.cuda.set_device(self._device)
        closed = RuntimeError("the engine was closed while this request ran")
        while True:
            while not (self._inbox or self._is_closed or self._is_left):
                self._changed.wait()
            if self._is_closed or not self._inbox:
                break
            try:
                self._take_in(loop)
                for outputs in loop.run():
                    self._tell(outputs)
                    if self._is_closed:
                        break
                    self._take_in(loop)
            except BaseException as error:
                self._fail(loop, error)
        self._fail(loop, closed)
        if not self._is_closed:
            atexit.unregister(self.close)

    def _take_in(self, loop: DecodeLoop) -> None:
        """Requests and cancellations since the last step. Mutates: the loop."""
        if not (self._inbox or self._has_cancelled):
            return
        self._has_cancelled = False
        for stream in self._submitted():
            submit, stream.submit = stream.submit, None
            assert submit is not None
            try:
                stream.request, stream.tell = submit()
                self._streams[stream.request.request_id] = stream
            except Exception as error:  # its own prompt's or options'
                stream.put(None, error)
        for stream in [s for s in self._streams.values() if s.is_cancelled]:
            assert stream.request is not None
            loop.cancel(stream.request)
            self._tell([StepOutput(stream.request, [])])

    def _submitted(self) -> list[_Stream]:
        """Streams that came since the last call."""
        found = list[_Stream]()
        with suppress(IndexError):
            while True:
                found.append(self._inbox.popleft())
        return found

    def _tell(self, outputs: list[StepOutput]) -> None:
        for request, new_ids in outputs:
            stream = self._streams.get(request.request_id)
            if stream is None:
                continue  # cancelled behind this step
            assert stream.tell is not None
            chunk = stream.tell.chunk(request, new_ids)
            if chunk.result is not None:
                del self._streams[request.request_id]
            stream.put(chunk)

    def _fail(self, loop: DecodeLoop, error: BaseException) -> None:
        """Ends everything that runs or waits."""
        streams = [*self._streams.values(), *self._submitted()]
        self._streams.clear()
        try:
            if not loop.is_clean:
                self._reset(loop)
        except BaseException:  # which ends the thread
            self._is_closed = True
            streams += self._submitted()
            raise
        finally:
            for stream in streams:
                stream.put(None, error)


def _warn(text: str, category: type[Warning]) -> None:
    """Warns. Under `-W error` the warning is only shown: raised, it would end all requests."""
    try:
        warn_caller(text, category)
    except category as error:
        warnings.showwarning(error, category, __file__, 0)


def collect(handles: list[Handle], changed: AutoResetEvent, told: deque[int]) -> Iterator[Chunk]:
    """Chunks of the requests of one call, as they come; `index` is the handle's place. Dropping the
    iterator cancels them.

    Args:
        changed: set after each chunk of theirs.
        told: places of handles that have new chunks, filled before `changed` is set.
    """
    left = dict(enumerate(handles))
    try:
        while left:
            changed.wait()
            while told:
                index = told.popleft()
                if (handle := left.get(index)) is None:
                    continue
                is_over = handle.done
                for chunk in handle.take():
                    yield replace(chunk, index=index)
                if is_over:
                    del left[index]
                    handle.take()  # what went wrong comes behind the last chunks
    finally:
        for handle in left.values():
            handle.cancel()
