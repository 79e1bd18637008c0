"""tools/measure.py: its jobs are commands that exist, and one that fails does not stop the rest."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graphengine.cli.main import main
from graphengine.profiles import result_schema
from tools import bench_kernels, measure, measure_requests, record_tests, soak, tune_skinny

TOOLS: dict[str, Any] = {
    "bench_kernels.py": bench_kernels,
    "measure_requests.py": measure_requests,
    "record_tests.py": record_tests,
    "soak.py": soak,
    "tune_skinny.py": tune_skinny,
}


@pytest.mark.parametrize("name", measure.JOBS)
def test_jobs_are_valid_commands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: an option was renamed, and the job fails on the GPU after the weights are made."""
    job = measure.JOBS[name]
    options = [job.output, "out.json", *([job.folder, "folder"] if job.folder else [])]
    options += ["--commit", "abc", *job.tail]
    if job.command[: len(measure.GRAPHENGINE)] == measure.GRAPHENGINE:
        command, *args = job.command[len(measure.GRAPHENGINE) :]
        found = main.commands[command].make_context(command, [*args, *options]).params
        assert (found["output_json"], found["commit"]) == (Path("out.json"), "abc")
        return
    parsed: list[argparse.Namespace] = []
    parse_args = argparse.ArgumentParser.parse_args

    def parse(parser: Any, arguments: Any = None) -> None:
        parsed.append(parse_args(parser, arguments))
        raise SystemExit

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", [*job.command[1:], *options])
    with pytest.raises(SystemExit):
        TOOLS[Path(job.command[1]).name].main()
    assert (str(parsed[0].out), parsed[0].commit) == ("out.json", "abc")


@pytest.mark.parametrize(
    ("tool", "work", "found"),
    [(soak, "soak", {}), (tune_skinny, "tune", {"numbers": {}, "table": []})]
    + [(bench_kernels, "bench", [])],
)
def test_the_commit_is_stored(
    monkeypatch: pytest.MonkeyPatch, tool: Any, work: str, found: Any
) -> None:
    """Bug: a result measured in a copied tree names no commit, although it was told."""
    stored: list[Any] = []
    monkeypatch.setattr(result_schema, "environment", lambda commit=None: {"commit": commit})
    monkeypatch.setattr(
        result_schema, "write_result", lambda *args, env=None, **options: stored.append(env)
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(tool, work, lambda *args: found)
    monkeypatch.setattr(sys, "argv", ["tool", "--out", "x.json", "--commit", "abc"])
    tool.main()
    assert stored == [{"commit": "abc"}]


@pytest.mark.slow
def test_a_failed_job_does_not_stop_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a job that hangs or fails takes the later ones' results with it, or what it has started
    stays on the GPU and disturbs their times, also where the job itself is done."""
    alive = tmp_path / "alive"
    child = "import pathlib, sys, time; time.sleep(3); pathlib.Path(sys.argv[1]).touch()"
    hang = f"import subprocess as s, sys; s.run([sys.executable, '-c', {child!r}, {str(alive)!r}])"
    write = "import sys, pathlib; pathlib.Path(sys.argv[2]).write_text('{}'); print('said')"
    jobs = {
        "hangs": measure.Job((sys.executable, "-c", hang), timeout_s=1),
        "leaves": measure.Job((sys.executable, "-c", hang.replace("s.run", "s.Popen"))),
        "fails": measure.Job((sys.executable, "-c", "raise SystemExit(3)")),
        "works": measure.Job((sys.executable, "-c", write), tail=("--", "x")),
    }
    monkeypatch.setattr(measure, "JOBS", jobs)
    monkeypatch.setattr(sys, "argv", ["measure.py", "--out", str(tmp_path), "--commit", "abc"])
    with pytest.raises(SystemExit) as ended:
        measure.main()
    assert ended.value.code == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["hangs"] == "stopped after 1 s" and summary["fails"] == "exit code 3"
    assert isinstance(summary["works"], float) and isinstance(summary["leaves"], float)
    assert (tmp_path / "works.json").read_text() == "{}"
    assert "said" in (tmp_path / "works.log").read_text()
    time.sleep(4)
    assert not alive.exists()
    monkeypatch.setattr(sys, "argv", ["measure.py", "--out", str(tmp_path), "nothing"])
    with pytest.raises(SystemExit) as refused:
        measure.main()
    assert refused.value.code == 2


def test_terminated_it_still_says_what_ended(tmp_path: Path) -> None:
    """Bug: the `timeout` around it ends it without the summary, and the job that was running goes
    on as an orphan, on the GPU of whatever comes next."""
    write = "import sys, pathlib; pathlib.Path(sys.argv[2]).write_text('{}')"
    wait = f"import os, pathlib, time; pathlib.Path({str(tmp_path / 'pid')!r}).write_text("
    child = f"{wait}str(os.getpid())); time.sleep(60)"
    hang = f"import subprocess as s, sys; s.run([sys.executable, '-c', {child!r}])"
    commands = {"works": write, "hangs": hang, "last": write}
    script = (
        "import sys; from tools import measure; measure.JOBS = {name: measure.Job((sys.executable, "
        f"'-c', code)) for name, code in {commands!r}.items()}}; measure.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, "--out", str(tmp_path)],
        cwd=measure.ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        for _ in range(2):  # as `timeout` does: to its child, then to the group
            process.terminate()
        said, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 1
    summary = json.loads(said.splitlines()[-1])
    assert isinstance(summary.pop("works"), float)
    assert summary == {"hangs": "stopped by SIGTERM", "last": "not begun: SIGTERM"}
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline, "the job's child lives on"
        time.sleep(0.05)


@pytest.mark.slow
def test_terminated_the_recorder_stores_what_ended(tmp_path: Path) -> None:
    """Bug: six minutes of a GPU's tests are lost to a time limit one second before the file is
    written; which tests failed is told and why is not, or cut where a terminal would end; a test
    whose tear-down fails has passed; a long test begins behind the short ones."""
    reason = "a reason " + "that is longer than a terminal is wide " * 4 + "END"
    suite = tmp_path / "test_suite.py"
    suite.write_text(
        "import pathlib, pytest, time\n"
        "begun = []\n"
        "def test_passes(): assert begun\n"
        f"def test_fails(): raise RuntimeError({reason!r})\n"
        "@pytest.fixture\n"
        "def left(): yield; raise RuntimeError('left over')\n"
        "def test_leaves(left): pass\n"
        f"def test_hangs(): pathlib.Path({str(tmp_path / 'on')!r}).touch(); time.sleep(60)\n"
        "@pytest.mark.slow\n"
        "def test_long(): begun.append(1)\n"
    )
    out = tmp_path / "tests.json"
    process = subprocess.Popen(
        [
            *(sys.executable, str(measure.ROOT / "tools" / "record_tests.py"), "--jobs", "1"),
            *("--out", str(out), "--", suite.name),
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "on").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.terminate()
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 1
    stored = json.loads(out.read_text())
    for key, names in (("failed", ["test_fails", "test_leaves"]), ("unfinished", ["test_hangs"])):
        assert [each.partition("::")[2] for each in stored["config"][key]] == names
    reasons = [f"RuntimeError: {told}" for told in (reason, "left over")]
    assert list(stored["config"]["reasons"].values()) == reasons
    assert stored["numbers"]["num_passed"] == 2


def is_running(pid: int) -> bool:
    """Whether a process exists and is more than a corpse that nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("measure", ["--out", "file", "4b-modes"], "--out file"),
        ("measure", ["--out", ".", "4b-modes", "4b"], "no such job: ['4b']; see --list"),
        ("measure", ["--out", ".", "--seconds", "nan", "4b-modes"], "--seconds nan"),
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


def test_no_job_runs_longer_than_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the last job is given its own limit, and whoever lent the GPU for so many seconds ends
    all of it."""
    limits: list[float] = []

    def run(*arguments: Any) -> None:
        limits.append(arguments[4])

    monkeypatch.setattr(measure, "run", run)
    monkeypatch.setattr(
        measure, "JOBS", {name: measure.Job((), seconds) for name, seconds in (("a", 5), ("b", 99))}
    )
    monkeypatch.setattr(sys, "argv", ["measure.py", "--out", str(tmp_path), "--seconds", "20"])
    with pytest.raises(SystemExit) as ended:
        measure.main()
    assert ended.value.code == 0
    assert limits[0] == 5 and 10 < limits[1] < 20


def test_one_failed_job_is_a_failed_visit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: the exit code is that of the last job, and one that failed before it is not looked
    for."""
    jobs = {name: measure.Job((sys.executable,)) for name in ("fails", "works")}
    monkeypatch.setattr(measure, "JOBS", jobs)
    monkeypatch.setattr(measure, "run", lambda name, *_: "exit code 3" if name == "fails" else None)
    clock = SimpleNamespace(monotonic=lambda: 5.0)
    monkeypatch.setattr(measure, "time", clock)
    monkeypatch.setattr(sys, "argv", ["measure.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        measure.main()
    assert ended.value.code == 1
    assert capsys.readouterr().out.splitlines() == [
        "fails: exit code 3",
        "works: 0.0",
        '{"fails": "exit code 3", "works": 0.0}',
    ]


def test_a_list_of_jobs_is_what_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a long name and its command are one word, or what follows a command's options is left
    out, and whoever copies the line runs all tests instead of the GPU's."""
    monkeypatch.setattr(sys, "argv", ["measure.py", "--list"])
    measure.main()
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert listed == {
        name: " ".join([*job.command[1:], *job.tail]) for name, job in measure.JOBS.items()
    }


def test_the_limit_that_ended_a_job_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: where less time was left than a job may take, the job's own limit is told as what has
    ended it."""
    now_s = [5.0]

    def sleep(seconds: float) -> None:
        now_s[0] += 30

    monkeypatch.setattr(measure, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))
    job = measure.Job((sys.executable, "-c", "import time; time.sleep(60)"), timeout_s=300)
    assert measure.run("a", job, tmp_path, None, 40.0, []) == "stopped after 40 s"
    assert now_s == [65.0]


def test_a_fixture_that_fails_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: tests whose set-up fails are counted nowhere, and a file without a failure is stored."""
    ran = record_tests.Ran({"a.py::b": "PASSED", "a.py::c": "ERROR", "a.py::d": "FAILED"}, {}, "")
    monkeypatch.setattr(record_tests, "collect", lambda arguments: [*ran.outcomes, "a.py::e"])
    monkeypatch.setattr(record_tests, "run", lambda *arguments: ran)
    monkeypatch.setattr(sys, "argv", ["record_tests.py"])
    with pytest.raises(SystemExit) as ended:
        record_tests.main()
    numbers = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = ("num_selected", "num_passed", "num_failed", "num_unfinished")
    assert ended.value.code == 1 and [numbers[name] for name in names] == [4, 1, 2, 1]


def test_what_did_not_end_has_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a run that its time limit has ended exits with 0, as none of its tests failed."""
    monkeypatch.setattr(record_tests, "collect", lambda arguments: ["a.py::b", "a.py::c"])
    ran = record_tests.Ran({"a.py::b": "PASSED"}, {}, "")
    monkeypatch.setattr(record_tests, "run", lambda *arguments: ran)
    monkeypatch.setattr(sys, "argv", ["record_tests.py"])
    with pytest.raises(SystemExit) as ended:
        record_tests.main()
    assert ended.value.code == 1


@pytest.mark.parametrize(("count", "num_jobs"), [(1, 1), (2, 8), (3, 3), (7, 3)])
def test_every_test_is_dealt_once(count: int, num_jobs: int) -> None:
    """Bug: a job to which no test is left names none, so that its pytest runs all there are."""
    ids = [f"a.py::{i}" for i in range(count)]
    dealt = record_tests.deal(ids, num_jobs)
    assert all(dealt) and len(dealt) == min(num_jobs, count)
    assert sorted(name for share in dealt for name in share) == ids


def test_a_share_of_the_cores_is_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a user who says how many threads a job may have gets others."""
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    found = record_tests.environment(4)
    assert (found["OMP_NUM_THREADS"], found["TORCHINDUCTOR_COMPILE_THREADS"]) == ("7", "3")


@pytest.mark.parametrize(("outcome", "code"), [("PASSED", 0), ("FAILED", 1)])
def test_what_judges_times_runs_alone(
    outcome: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a test of measured times runs beside the others too, and its failure there is stored; or
    it has the whole limit again, and whoever lent the GPU for so long ends all of it; or of tests
    that failed beside others nobody is told why."""
    runs: list[tuple[list[str], int, float]] = []
    now_s = [5.0]

    def run(ids: list[str], num_jobs: int, timeout_s: float, _: object) -> record_tests.Ran:
        runs.append((ids, num_jobs, timeout_s))
        now_s[0] += 100
        why = {name: f"{name} is slow" for name in ids}
        return record_tests.Ran(dict.fromkeys(ids, outcome), why, f"{num_jobs} jobs\n")

    def store(path: Path, kind: str, numbers: Any, *, config: Any, env: Any) -> None:
        stored.append(config["reasons"])

    stored: list[dict[str, str]] = []
    monkeypatch.setattr(result_schema, "write_result", store)
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr(record_tests, "time", clock)
    monkeypatch.setattr(record_tests, "collect", lambda arguments: ["a.py::b", "a.py::timed"])
    monkeypatch.setattr(record_tests, "run", run)
    typed = "record_tests.py --jobs 3 --timeout 300 --alone timed --out x.json --commit abc"
    monkeypatch.setattr(sys, "argv", typed.split())
    with pytest.raises(SystemExit) as ended:
        record_tests.main()
    assert runs == [(["a.py::b"], 3, 300), (["a.py::timed"], 1, 200)]
    assert stored == [{"a.py::b": "a.py::b is slow", "a.py::timed": "a.py::timed is slow"}]
    said = capsys.readouterr().out
    assert ended.value.code == code and f'"num_{outcome.lower()}": 2' in said
    assert "3 jobs" in said and "1 jobs" in said


def test_what_follows_all_options_is_last(tmp_path: Path) -> None:
    """Bug: the commit stands behind a job's dashes: pytest takes it for its own, and no test runs
    on a machine whose time is spent; or the log has another command than the one that ran."""
    write = "import json, pathlib, sys; pathlib.Path(sys.argv[2]).write_text(json.dumps(sys.argv))"
    tail = ("--", "-m", "gpu")
    job = measure.Job((sys.executable, "-c", write), output="--out", folder="--keep", tail=tail)
    assert measure.run("a", job, tmp_path, "abc", 60.0, []) is None
    stored = tmp_path / "a.json"
    options = ["--out", str(stored), "--keep", str(tmp_path / "a"), "--commit", "abc"]
    assert json.loads(stored.read_text())[1:] == [*options, *tail]
    typed = " ".join([*job.command, *options, *tail])  # to be typed again from the log
    assert (tmp_path / "a.log").read_text() == f"{typed}\n"
