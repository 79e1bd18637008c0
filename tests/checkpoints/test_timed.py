"""timed: a call that does not end is given up, and others begin no thread."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graphengine.checkpoints import timed
from graphengine.checkpoints import tokenizer as tokenizer_module
from graphengine.checkpoints.tokenizer import Tokenizer
from tests.support.checkpoints import make_target


def test_a_template_that_does_not_end_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a loop goes on behind its error, and takes half of Python's time from later steps."""
    monkeypatch.setattr(tokenizer_module, "MAX_TEMPLATE_S", 0.1)
    monkeypatch.setattr(timed, "_WAITING", [])  # one of these would not be seen to be left
    directory = make_target(tmp_path, layers=1)
    loops = "{% for a in range(9999) %}" * 3 + "{% endfor %}" * 3
    (directory / "chat_template.jinja").write_text(loops)
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="longer"):
        Tokenizer(directory).encode_chat([{"role": "user", "content": "hi"}])
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


def test_a_chat_begins_no_thread(tokenizer: Tokenizer) -> None:
    """Bug: each chat begins a thread that renders it, 0.2 ms of a first token; or one that was
    ended, or that a fork has not, is asked again."""
    tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    threads = set(threading.enumerate())
    for i in range(5):
        tokenizer.encode_chat([{"role": "user", "content": f"hi {i}"}])
    assert threads >= set(threading.enumerate())  # an earlier test's may end meanwhile
    with pytest.raises(TimeoutError):
        timed.within(0.01, lambda: time.sleep(0.3))
    assert [timed.within(5, lambda: 7) for _ in range(3)] == [7] * 3
    code = (
        "import os; from graphengine.checkpoints.timed import within as w; w(5, int);"
        "pid = os.fork(); print(w(5, str) == '', flush=True); pid and os.waitpid(pid, 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    # Both may write at once, and a line's end behind the other's word.
    assert done.stdout.split() in (["True", "True"], ["TrueTrue"]), done.stderr


def test_no_thread_is_no_fault_of_the_messages(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: where the machine gives no thread, its template is said to reject a chat."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(timed, "_WAITING", [])
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match=r"^can't start new thread$"):
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])


def test_nobody_else_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a call returns just as its time is up, its thread ends, and another one, which has its
    number since, is ended in its place: the engine's own, maybe."""
    thread, was_there = timed._Aside(), list[bool]()

    def end(ident: Any, error: Any) -> None:
        thread.join(0.3)
        was_there.append(thread.is_alive())

    api = SimpleNamespace(PyThreadState_SetAsyncExc=end)
    kinds = {"c_ulong": ctypes.c_ulong, "py_object": ctypes.py_object}
    monkeypatch.setattr(timed, "ctypes", SimpleNamespace(pythonapi=api, **kinds))
    thread.end()
    thread.join(10)
    assert was_there == [True] and not thread.is_alive()
