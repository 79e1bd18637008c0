"""tools/measure.py: its jobs are commands that exist, and one that fails does not stop the rest."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from graphengine.cli import main
from tools import measure, record_tests


@pytest.mark.parametrize("name", measure.JOBS)
def test_jobs_are_valid_commands(name: str) -> None:
    """Bug: an option was renamed, and the job fails on the GPU after the weights are made."""
    job = measure.JOBS[name]
    if job.command[: len(measure.GRAPHENGINE)] != measure.GRAPHENGINE:
        assert Path(job.command[1]).is_file()
        return
    command, *args = job.command[len(measure.GRAPHENGINE) :]
    options = [*args, job.output, "out.json", "--commit", "abc"]
    options += [job.folder, "folder"] if job.folder else []
    context = main.commands[command].make_context(command, options)
    assert context.params["output_json"] == Path("out.json")


def test_a_failed_job_does_not_stop_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a job that hangs or fails takes the later ones' results with it, or what it has started
    stays on the GPU and disturbs their times."""
    alive = tmp_path / "alive"
    child = "import pathlib, sys, time; time.sleep(3); pathlib.Path(sys.argv[1]).touch()"
    hang = f"import subprocess as s, sys; s.run([sys.executable, '-c', {child!r}, {str(alive)!r}])"
    write = "import sys, pathlib; pathlib.Path(sys.argv[2]).write_text('{}'); print('said')"
    jobs = {
        "hangs": measure.Job((sys.executable, "-c", hang), timeout_s=1),
        "fails": measure.Job((sys.executable, "-c", "raise SystemExit(3)")),
        "works": measure.Job((sys.executable, "-c", write), takes_commit=False, tail=("--", "x")),
    }
    monkeypatch.setattr(measure, "JOBS", jobs)
    monkeypatch.setattr(sys, "argv", ["measure.py", "--out", str(tmp_path), "--commit", "abc"])
    with pytest.raises(SystemExit) as ended:
        measure.main()
    assert ended.value.code == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["hangs"] == "stopped after 1 s" and summary["fails"] == "exit code 3"
    assert isinstance(summary["works"], float)
    assert (tmp_path / "works.json").read_text() == "{}"
    assert "said" in (tmp_path / "works.log").read_text()
    time.sleep(3)
    assert not alive.exists()
    monkeypatch.setattr(sys, "argv", ["measure.py", "--out", str(tmp_path), "nothing"])
    with pytest.raises(SystemExit) as refused:
        measure.main()
    assert refused.value.code == 2


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("measure", ["--out", "file", "4b"], "--out file"),
        ("measure", ["--out", ".", "--seconds", "nan", "4b"], "--seconds nan"),
        ("record_tests", ["--jobs", "0"], "--jobs 0"),
        ("record_tests", ["--timeout", "nan"], "--timeout nan"),
        ("record_tests", ["--alone", "["], "--alone ["),
    ],
)
def test_tools_refuse_what_cannot_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tool: str,
    arguments: list[str],
    message: str,
) -> None:
    """Bug: a traceback after the tests were collected, or nan seconds that never run out."""
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    monkeypatch.setattr(sys, "argv", [tool, *arguments])

    def started(*args: object, **options: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr("subprocess.run", started)
    monkeypatch.setattr("subprocess.Popen", started)
    with pytest.raises(SystemExit) as refused:
        {"measure": measure, "record_tests": record_tests}[tool].main()
    assert refused.value.code == 2
    assert message in capsys.readouterr().err
