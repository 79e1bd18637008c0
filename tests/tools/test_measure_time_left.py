"""tools/measure.py where hardly any time is left."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tools import measure


def test_a_job_without_a_second_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a job begins half a second before the end, is killed at its start, and is told as one
    that took too long."""
    began: list[str] = []
    monkeypatch.setattr(measure, "run", lambda name, *_: began.append(name))
    monkeypatch.setattr(measure, "JOBS", {"a": measure.Job(())})
    monkeypatch.setattr(sys, "argv", ["measure.py", "--out", str(tmp_path), "--seconds", "0.9"])
    with pytest.raises(SystemExit, match="1"):
        measure.main()
    line, last = capsys.readouterr().out.splitlines()
    assert (began, line, json.loads(last)) == ([], "a: no time left", {"a": "no time left"})


def test_a_job_that_a_signal_ended_has_failed(tmp_path: Path) -> None:
    """Bug: a job that the machine killed for its memory counts as measured."""
    job = measure.Job((sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"))
    assert measure.run("a", job, tmp_path, None, 60.0, []) == "exit code -9"
