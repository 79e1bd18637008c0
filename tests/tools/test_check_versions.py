"""tools/check_versions.py, with a runner that stands for pytest."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import check_versions
import pytest

from graphengine.profiles import result_schema


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """(environment, arguments) of each run; the newest has a test that fails."""
    runs: list[tuple[str, list[str]]] = []

    def run(python: Path, jobs: int, timeout_s: float, arguments: list[str]) -> dict[str, Any]:
        is_new = "new" in str(python)
        runs.append((str(python), arguments))
        versions = {"python": "3.11.7", "torch": "2.15.0", "triton": "3.9.0", "transformers": "5"}
        numbers = dict.fromkeys(check_versions.COLUMNS, 0) | {"num_passed": 7, "num_failed": is_new}
        failed = ["tests/test_a.py::test_b"] * is_new
        config = {"pytest": arguments, "failed": failed, "unfinished": []}
        numbers = {name: int(value) for name, value in numbers.items()}
        return {"environment": {"versions": versions}, "numbers": numbers, "config": config}

    monkeypatch.setattr(check_versions, "run_tests", run)
    return runs


def test_both_ends_run_and_are_stored(
    ran: list[tuple[str, list[str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bug: one end is not run, a failure ends with 0, or the stored file does not say with what."""
    line = ["check_versions.py", "--out", str(tmp_path / "out.json")]
    for label in check_versions.LABELS:
        (tmp_path / label / "bin").mkdir(parents=True)
        (tmp_path / label / "bin" / "python").touch()  # so that none is made
        line += ["--env", f"{label}={tmp_path / label}"]
    monkeypatch.setattr(sys, "argv", [*line, "--", "tests/kernels", "-k", "accept"])
    with pytest.raises(SystemExit) as ended:
        check_versions.main()
    assert ended.value.code == 1
    assert [Path(python).parts[-3] for python, _ in ran] == ["oldest", "newest"]
    assert all(arguments == ["tests/kernels", "-k", "accept"] for _, arguments in ran)
    *shown, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["newest"]["num_failed"] == 1
    assert any(text.startswith("oldest") and "torch 2.15.0" in text for text in shown)
    stored = json.loads((tmp_path / "out.json").read_text())
    assert result_schema.validate(stored) == []
    assert stored["config"]["newest"]["failed"] == ["tests/test_a.py::test_b"]


def test_a_missing_environment_is_made(
    ran: list[tuple[str, list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the oldest environment has the newest versions, or the newest is held back."""
    asked: list[tuple[list[str], str]] = []

    def call(command: list[str], **_: Any) -> None:
        held = "".join(Path(c).read_text() for c in command if c.endswith(".txt"))
        asked.append((command, held))

    monkeypatch.setattr(check_versions.subprocess, "run", call)
    for label in check_versions.LABELS:
        check_versions.make(label, tmp_path / label)
    assert [command[1:3] for command, _ in asked] == [["-m", "venv"], ["-m", "pip"]] * 2
    assert asked[1][1].split() == ["torch~=2.11.0", "transformers~=5.2.0", "triton~=3.6.0"]
    assert asked[3][1] == ""
    assert asked[3][0][-1].endswith("[test]")


def test_a_run_has_the_limits_that_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the tests of an end run without --jobs or --timeout, or of another checkout than this
    one; or where none ran the last end's numbers are told."""
    asked: list[list[str]] = []

    def call(command: list[str], **given: Any) -> Any:
        asked.append(command)
        assert given["cwd"] == check_versions.ROOT == Path(given["env"]["PYTHONPATH"])
        if len(asked) == 1:
            Path(command[3]).write_text('{"numbers": {}}')
        return SimpleNamespace(stdout="no module named pytest")

    monkeypatch.setattr(check_versions.subprocess, "run", call)
    python = tmp_path / "python"
    assert check_versions.run_tests(python, 3, 90.0, ["-k", "a"]) == {"numbers": {}}
    ((program, script, *rest),) = asked
    assert (program, Path(script).name) == (str(python), "record_tests.py")
    assert [rest[0], *rest[2:]] == "--out --jobs 3 --timeout 90.0 -- -k a".split()
    with pytest.raises(SystemExit, match="python: no test ran\nno module named pytest"):
        check_versions.run_tests(python, 3, 90.0, ["-k", "a"])


@pytest.mark.parametrize("env", ["older=/x", "oldest=", "oldest"])
def test_environments_that_are_not_understood(
    env: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a misspelt environment is left out, and another is installed for half an hour; or what
    was typed is not told."""
    monkeypatch.setattr(sys, "argv", ["check_versions.py", "--env", env])
    with pytest.raises(SystemExit) as ended:
        check_versions.main()
    assert ended.value.code == 2
    assert f"--env {env}: pass oldest=FOLDER or newest=FOLDER" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "code"), [("num_unfinished", 1), ("num_skipped", 0)])
def test_what_did_not_end_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    """Bug: tests that were cut off by the time limit count as passed; or skipped ones as failed; or
    the result does not say which versions were tested."""
    numbers = dict.fromkeys(check_versions.COLUMNS, 0) | {name: 1}
    result = {
        "environment": {"versions": dict.fromkeys(("python", "torch", "triton", "transformers"))},
        "numbers": numbers,
        "config": {"pytest": [], "failed": [], "unfinished": []},
    }
    monkeypatch.setattr(check_versions, "make", lambda label, folder: folder)
    ran: list[Any] = []
    monkeypatch.setattr(check_versions, "run_tests", lambda *asked: ran.append(asked[1:]) or result)
    stored: list[Any] = []
    write = check_versions.result_schema
    monkeypatch.setattr(write, "write_result", lambda *args, config: stored.append((args, config)))
    line = ["check_versions.py", "--folder", str(tmp_path), "--out", "versions.json"]
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(SystemExit) as ended:
        check_versions.main()
    assert ended.value.code == code
    ((_, kind, told), config) = stored[0]
    own = result["config"] | {"versions": result["environment"]["versions"]}
    assert (kind, told) == ("versions", dict.fromkeys(check_versions.LABELS, numbers))
    assert config == dict.fromkeys(check_versions.LABELS, own)
    assert ran == [(1, 3600, ["tests"])] * 2  # all of them where nothing is selected


@pytest.mark.usefixtures("ran")
def test_each_end_has_an_environment_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the newest versions are never installed: where they belong the oldest ones are found."""
    made: dict[str, Path] = {}
    monkeypatch.setattr(
        check_versions, "make", lambda label, folder: made.setdefault(label, folder)
    )
    line = ["check_versions.py", "--folder", str(tmp_path)]
    for given in ({}, {"oldest": tmp_path / "mine"}):
        made.clear()
        own = [f"--env={label}={folder}" for label, folder in given.items()]
        monkeypatch.setattr(sys, "argv", [*line, *own])
        with pytest.raises(SystemExit):
            check_versions.main()
        assert made == {label: tmp_path / label for label in check_versions.LABELS} | given
