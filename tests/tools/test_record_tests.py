"""What tools/record_tests.py stores of a run, and what it prints of a failure."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools import record_tests


def test_what_is_stored_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: the file has the ids of all tests in the place of what was typed, or a test is in
    another list than it belongs to."""
    outcomes = {"a.py::b": "PASSED", "a.py::d": "FAILED", "a.py::c": "ERROR", "a.py::s": "SKIPPED"}
    reasons = {"a.py::d": "RuntimeError: why", "a.py::c": "no fixture"}
    ran = record_tests.Ran(outcomes, reasons, "the end of a log")
    monkeypatch.setattr(record_tests, "collect", lambda arguments: [*outcomes, "a.py::x"])
    monkeypatch.setattr(record_tests, "run", lambda *arguments: ran)
    monkeypatch.setattr(record_tests, "time", SimpleNamespace(monotonic=lambda: 3.0))
    typed = f"record_tests.py --jobs 2 --commit abc --out {tmp_path / 'r.json'} -- -m gpu"
    monkeypatch.setattr(sys, "argv", typed.split())
    with pytest.raises(SystemExit, match="1"):
        record_tests.main()
    shown, last = capsys.readouterr().out.splitlines()
    stored = json.loads((tmp_path / "r.json").read_text())
    assert shown == "the end of a log" and stored["numbers"] == json.loads(last)
    assert stored["numbers"] == {
        "num_selected": 5,
        "num_passed": 1,
        "num_failed": 2,
        "num_skipped": 1,
        "num_unfinished": 1,
        "wall_s": 0.0,
    }
    assert (stored["kind"], stored["environment"]["commit"]) == ("tests", "abc")
    assert stored["config"] == {
        "pytest": ["-m", "gpu"],
        "jobs": 2,
        "failed": ["a.py::c", "a.py::d"],
        "reasons": reasons,
        "unfinished": ["a.py::x"],
    }


@pytest.mark.parametrize(
    ("longrepr", "reason"),
    [
        ("def test():\n>   assert a == b\nE   assert 1 == 2\nE    +  where 1 = a", "assert 1 == 2"),
        ("file a.py, line 3\nfixture 'gone' not found", "fixture 'gone' not found"),
        ("", ""),
    ],
)
def test_why_a_test_failed(longrepr: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: of a failure its last remark is told, which says nothing without its first."""
    for failed in (False, True):
        report = SimpleNamespace(failed=failed, longrepr=longrepr, nodeid="a.py::b")
        record_tests.pytest_runtest_logreport(report)
        told = capsys.readouterr().out
        assert record_tests.REASON.findall(told) == [("a.py::b", reason)] * failed
        assert longrepr in told or not failed


def test_a_job_s_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: every job takes all cores, or none where there are more jobs than cores; or threads that
    the user has set are passed over."""
    monkeypatch.setattr(record_tests.os, "cpu_count", lambda: 12)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    names = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    found = [[record_tests.environment(jobs)[name] for name in names] for jobs in (1, 5, 30)]
    assert found == [["7", "12"], ["7", "2"], ["7", "1"]]


def test_the_end_of_a_failed_job_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: of a job that failed the begin of its log is shown, where all still passes; or one that
    passed is shown too."""
    script = "import sys; print('a.py::b PASSED\\n' * 900 + 'a.py::c FAILED'); sys.exit(%s)"
    for code in (0, 1):
        monkeypatch.setattr(record_tests, "PYTEST", [sys.executable, "-c", script % code])
        ran = record_tests.run(["a.py::b", "a.py::c"], 1, 60, [])
        assert ran.outcomes == {"a.py::b": "PASSED", "a.py::c": "FAILED"}
        assert len(ran.tails) == 4000 * code
        assert ran.tails.endswith("a.py::c FAILED\n" * code)


def test_what_selects_no_test_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a misspelt selection ends the run without its name, or what pytest said of it."""
    done = SimpleNamespace(stdout="no tests ran", returncode=5)
    monkeypatch.setattr(record_tests.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(SystemExit) as ended:
        record_tests.collect(["-m", "gpus", "tests"])
    assert ended.value.code == "pytest cannot select -m gpus tests\nno tests ran"
