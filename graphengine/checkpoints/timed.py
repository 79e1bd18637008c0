"""Calls that are given up where they take too long, such as a chat template's rendering."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """What a call returns. It runs in a thread that is ended when time is up: a template's loops
    may nest without end, and tracing them costs more than rendering. Threads are kept for further
    calls: to start one takes 0.2 ms (2-core cloud CPU), more than rendering a short chat.

    Raises:
        TimeoutError: it took longer.
        NoThreadError: it was not made.
    """
    try:
        thread = _WAITING.pop()
    except IndexError:
        thread = _begun()
    found: Future[Any] = Future()
    thread.calls.put((call, found))
    try:
        return found.result(seconds)
    except TimeoutError:
        raise TimeoutError(f"it takes longer than {seconds:g} s") from None
    finally:
        if found.done():
            _WAITING.append(thread)
        else:
            thread.end()


class NoThreadError(RuntimeError):
    """The machine gives no thread, which is nothing that a caller has done wrong."""


def _begun() -> _Aside:
    try:
        return _Aside()
    except RuntimeError as error:
        raise NoThreadError(str(error)) from error


class _Aside(Thread):
    """Makes calls, one after another, until it is ended."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self.start()

    def run(self) -> None:
        while (asked := self.calls.get()) is not None:
            call, found = asked
            try:
                found.set_result(call())
            except BaseException as error:  # the end that comes from below, too
                found.set_exception(error)
            del asked, call, found  # which hold a tokenizer, and the next may never come

    def end(self) -> None:
        """Ends the thread, in the middle of its call."""
        end = ctypes.pythonapi.PyThreadState_SetAsyncExc
        end(ctypes.c_ulong(self.ident or 0), ctypes.py_object(SystemExit))
        self.calls.put(None)  # behind that: a thread that has ended leaves its number to others


_WAITING: list[_Aside] = []
os.register_at_fork(after_in_child=_WAITING.clear)  # a fork has none of them
