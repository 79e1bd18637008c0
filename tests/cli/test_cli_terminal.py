"""Ctrl-C and other ends of commands, and the chat, on a terminal of their own."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from graphengine.api import Chunk, Engine
from graphengine.cli.main import _ends_are_told, main
from graphengine.measure import profile_run  # before a test changes what it imports
from tests.support.command_line import (
    COMMAND,
    ENV,
    ROOT,
    Run,
    document,
    heed_interrupts,
    heeding,
    shell,
    streaming,
)


def test_interrupt(target: Path) -> None:
    """Bug: Ctrl-C prints a traceback, or exits as if all went well."""
    args = ["run", str(target), "--bucket", "1", "--ignore-eos", "--max-new-tokens", "8000"]
    with streaming(*args, "--prompt", "x") as process:
        assert process.stdout is not None and process.stderr is not None
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        errors = process.stderr.read().decode()
        assert process.wait() == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors


class Terminal:
    """The command on a pseudo-terminal: what is typed, and what has been shown so far."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def wait_for(self, text: str, limit_s: float = 60, repeat: str = "") -> str:
        """What was shown up to and with `text` since the last call; types `repeat`, and again
        in every quiet second."""
        end = time.monotonic() + limit_s
        self.type(repeat)
        while text not in self.shown:
            assert time.monotonic() < end, f"no {text!r} after {limit_s} s in {self.shown!r}"
            if not select.select([self.descriptor], [], [], 1)[0]:
                self.type(repeat)
                continue
            try:
                self.shown += os.read(self.descriptor, 4096).decode(errors="replace")
            except OSError as error:  # the other side has closed
                raise AssertionError(f"ended without {text!r}: {self.shown!r}") from error
        found, _, self.shown = self.shown.partition(text)
        return found + text


@contextmanager
def on_a_terminal(*args: str) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *args],
        cwd=ROOT,
        env=ENV | {"TERM": "dumb"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(theirs)
    try:
        yield Terminal(ours), process
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt, 130), (lambda: SystemExit(143), 143), (lambda: RuntimeError("gone"), 1)],
)
def test_a_stopped_batch_keeps_its_finished_answers(
    cli: Run, monkeypatch: pytest.MonkeyPatch, error: Callable[[], BaseException], code: int
) -> None:
    """Bug: Ctrl-C, or a device that fails, in the last of a hundred prompts throws away the
    ninety-nine answers before it."""
    stream_many = Engine.stream_many

    def stopped(*args: Any, **kwargs: Any) -> Iterator[Chunk]:
        for chunk in stream_many(*args, **kwargs):
            yield chunk
            if chunk.result is not None:
                raise error()  # anew: its traceback holds this run's engine

    expected = document(cli("--prompt", "one", "--max-new-tokens", "3", "--json"))
    monkeypatch.setattr(Engine, "stream_many", stopped)
    args = ("--prompt", "one", "--prompt", "two", "--bucket", "1", "--max-new-tokens", "3")
    result = cli(*args)
    assert result.exit_code == code, result.output
    assert result.stdout == f"[1] {expected['results'][0]['text'].rstrip()}\n"
    result = cli(*args, "--json")
    assert result.exit_code == code, result.output
    told = json.loads(result.stdout)
    assert [r["text"] for r in told["results"]] == [expected["results"][0]["text"]]
    assert not told["is_complete"] and expected["is_complete"]


def _take_terminal() -> None:
    """Makes stdin the controlling terminal, so that a typed Ctrl-C becomes a signal."""
    import fcntl
    import termios

    heed_interrupts()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_chat(target: Path, draft: Path) -> None:
    """Bug: Ctrl-C ends the chat with the answer, /reset keeps the history, or the engine is
    unusable after a stopped answer."""
    args = ["--bucket", "1", "--ignore-eos", "--draft", str(draft)]
    with on_a_terminal("run", str(target), *args, "--max-new-tokens", "6000") as (screen, process):
        screen.wait_for("/quit")
        screen.wait_for("> ")
        screen.type("hello\n")
        screen.wait_for("hello")
        screen.wait_for("\n")
        time.sleep(0.3)  # some of the answer is out
        screen.type("\x03")
        screen.wait_for("stopped")
        screen.wait_for("> ")
        screen.type("/what\n")
        screen.wait_for("no command")
        screen.type("/reset\n")
        screen.wait_for("forgotten")
        screen.wait_for("> ")
        # CPython's readline sleeps through a signal that comes between its prompt and its wait.
        screen.wait_for("ends the chat", repeat="\x03")
        screen.wait_for("> ")
        time.sleep(1.1)  # a repeated Ctrl-C has been dealt with
        screen.type("\x04")
        screen.wait_for("start-up")
        assert process.wait(timeout=30) == 0


@pytest.mark.slow
def test_chat_remembers(target: Path) -> None:
    """Bug: the second question is asked without the first, so the chat is none; or all answers are
    called the first."""
    args = ["--bucket", "1", "--ignore-eos", "--max-new-tokens", "40", "--max-model-len", "80"]
    with on_a_terminal("run", str(target), *args) as (screen, process):
        screen.wait_for("> ")
        screen.type("hello there\n")
        screen.wait_for("40 tokens")
        screen.wait_for("> ")
        screen.type("and now a question\n")  # with the first turn it exceeds the context
        screen.wait_for("the context holds 80")
        screen.wait_for("> ")
        screen.type("/reset\n")
        screen.wait_for("forgotten")
        screen.type("hello there\n")
        screen.wait_for("40 tokens")
        screen.type("/quit\n")
        screen.wait_for("\n 2 ")  # of the table
        assert process.wait(timeout=30) == 0


@pytest.mark.parametrize("command", ["bench", "profile", "graphs", "compile"])
@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device"), 1, "No space left on device\n"),
        (OSError(30, "Read-only file system"), 1, "set GRAPHENGINE_CACHE, HOME and TMPDIR"),
        (MemoryError(), 1, "out of memory"),
    ],
)
def test_every_command_tells_its_end(
    monkeypatch: pytest.MonkeyPatch, command: str, error: BaseException, code: int, text: str
) -> None:
    """Bug: Ctrl-C in a benchmark counts as a failure (1, "Aborted!"), and a full disk or a machine
    that is too small ends in a traceback: only `run` had told them."""

    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr("graphengine.checkpoints.pairs.named_pair", fail)
    monkeypatch.setattr(profile_run, "named_pair", fail)
    done = CliRunner().invoke(main, [command])
    assert done.exit_code == code, done.output
    assert text in done.stderr and "Aborted" not in done.stderr
    assert isinstance(done.exception, SystemExit)


def test_an_end_where_stdout_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a full disk is a traceback about a stdout that is not there."""

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("graphengine.checkpoints.pairs.named_pair", fail)
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(click.ClickException, match="No space left"):
        main.main(["graphs"], standalone_mode=False)


def test_a_reader_that_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: `graphs | head -1` ends in a message about the system."""

    def fail(*args: Any) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("graphengine.checkpoints.pairs.named_pair", fail)
    done = CliRunner().invoke(main, ["graphs"])
    assert done.exit_code == 1 and "Broken pipe" not in done.stderr


class _Destroyed:
    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)


class _Named(_Destroyed):
    def __del__(self) -> None: ...

    def __set_name__(self, owner: type, name: str) -> None:
        os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(
    "send", [lambda number: _Destroyed(number) and None, lambda n: type("_", (), {"x": _Named(n)})]
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_is_not_lost(send: Callable[[int], object], number: int) -> None:
    """Bug: SIGTERM while the garbage collector runs a destructor is dropped and the command goes
    on; amid an import it is a traceback or an abort; or a terminal that closes (SIGHUP) costs the
    answers that were finished."""

    @_ends_are_told(main)
    def wait() -> None:
        send(number)
        time.sleep(1)  # it comes meanwhile

    with heeding(number), pytest.raises(SystemExit) as end:
        wait()
    assert end.value.code == 128 + number


def test_a_second_signal_ends_at_once() -> None:
    """Bug: a second Ctrl-C, while Python ends, prints what it interrupts there; or a first one that
    was put off kills a command that has ended, with another code."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(n) for n in numbers]
    with suppress(SystemExit), _ends_are_told(main):
        _ = _Destroyed(signal.SIGTERM) and None  # is put off
        os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(n) for n in numbers] == before
    time.sleep(0.1)  # nothing comes


def test_ctrl_c_amid_the_first_imports(tmp_path: Path) -> None:
    """Bug: Ctrl-C before a command has begun is a traceback of an import."""
    stub = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(1)"
    (tmp_path / "click.py").write_text(stub)
    env = ENV | {"PYTHONPATH": f"{tmp_path}:{ENV['PYTHONPATH']}"}
    done = shell("run", env=env, preexec_fn=heed_interrupts)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_is_ignored_stays_so(number: int) -> None:
    """Bug: a command under nohup ends with its terminal after all."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(n, signal.SIG_IGN) for n in numbers]
    try:
        with _ends_are_told(main):
            os.kill(os.getpid(), number)
            time.sleep(0.05)
    finally:
        for n, handler in zip(numbers, before, strict=True):
            signal.signal(n, handler)
