"""What tests of the command line share: `graphengine` in this process and in one of its own."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from graphengine.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "graphengine"]
REMOVED = ("GRAPHENGINE_NVTX", "FORCE_COLOR")
ENV = {k: v for k, v in os.environ.items() if k not in REMOVED} | {"PYTHONPATH": str(ROOT)}
Run = Callable[..., Result]


def runner(target: Path) -> Run:
    """`graphengine run` on a target, with one small bucket."""

    def call(*args: str, model: Path | None = target, **kwargs: Any) -> Result:
        where = ["run"] if model is None else ["run", str(model), "--bucket", "2"]
        return CliRunner().invoke(main, [*where, *args], **kwargs)

    return call


def invoke(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def document(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(result: Result, *parts: object) -> None:
    """Exit code 2, a message with every part, no text on stdout, and no traceback."""
    assert result.exit_code == 2, result.output
    flat = " ".join(result.stderr.split())
    assert "Error: " in flat
    assert "Traceback" not in flat
    assert [str(part) for part in parts if str(part) not in flat] == [], flat
    assert result.stdout == ""


def shell(*args: str, env: dict[str, str] = ENV, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, **kwargs
    )


def processor_s() -> float:
    """Processor time of this process's children, those that have been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def heed_interrupts() -> None:
    """Undoes what a shell does to background jobs, of which these tests may be part."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def heeding(number: int) -> Iterator[None]:
    """Here a signal counts that nohup, or a shell, has this process ignore."""
    before = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def streaming(*args: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command that has written its first byte of output and goes on."""
    with subprocess.Popen(
        [*COMMAND, *args],
        cwd=ROOT,
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=heed_interrupts,
    ) as process:
        assert process.stdout is not None and process.stdout.read(1)
        yield process
