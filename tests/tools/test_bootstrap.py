"""tools/bootstrap.py: its decisions, and one real pass with nothing to install."""

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "bootstrap.py"

_spec = importlib.util.spec_from_file_location("bootstrap", SCRIPT)
assert _spec is not None and _spec.loader is not None
bootstrap = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(bootstrap)

PYPROJECT = (ROOT / "pyproject.toml").read_text()


def test_only_the_standard_library() -> None:
    """Bug: the script that installs everything needs something installed."""
    code = f"import runpy; runpy.run_path({str(SCRIPT)!r})"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_pythons_are_pyproject_s() -> None:
    """Bug: the set-up refuses a Python that pip accepts, or makes an environment pip refuses."""
    low, last = bootstrap.SUPPORTED[0], bootstrap.SUPPORTED[-1]
    bounds = f'requires-python = ">={low[0]}.{low[1]},<{last[0]}.{last[1] + 1}"'
    assert bounds in PYPROJECT


def test_hash_follows_what_decides_an_installation() -> None:
    """Bug: a new dependency is not installed, or a linter's setting reinstalls everything."""
    before = bootstrap.requirements_hash(PYPROJECT)
    assert bootstrap.requirements_hash(PYPROJECT + "\n[tool.other]\nx = 1\n") == before
    assert bootstrap.requirements_hash(PYPROJECT.replace('"click>=', '"click>1,>=')) != before


@pytest.mark.parametrize(
    ("output", "word"),
    [
        ("OSError: [Errno 28] No space left on device", "TMPDIR"),
        (
            "NewConnectionError: Temporary failure in name resolution\n"
            "ERROR: No matching distribution found for torch<2.16,>=2.11",
            "PIP_FIND_LINKS",
        ),
        ("ERROR: No matching distribution found for flashinfer-python>=0.6.12", "--no-cuda"),
        ("ERROR: No matching distribution found for torch<2.14,>=2.11", "PIP_INDEX_URL"),
        ("The virtual environment was not created: ensurepip is not available", "python3-venv"),
        ("something else", "delete it"),
    ],
)
def test_failures_come_with_a_remedy(output: str, word: str) -> None:
    """Bug: a full disk or a missing network is reported as something else."""
    assert word in bootstrap.diagnose(output)


def test_arguments_after_the_dashes_are_passed_on() -> None:
    """Bug: graphengine's or pytest's options are taken for the bootstrap's own."""
    options, rest = bootstrap.parse(["test", "--no-cuda", "--", "-k", "accept", "--", "x"])
    assert options.action == "test"
    assert options.no_cuda
    assert rest == ["-k", "accept", "--", "x"]
    command = bootstrap.command_for("run", [])
    assert command[1:] == ["run", "--prompt", bootstrap.DEFAULT_PROMPT]
    assert bootstrap.command_for("run", ["--help"])[1:] == ["run", "--help"]


def test_the_long_tests_run_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: the README's command takes an hour, CI leaves the long tests out, or two processes meet
    on one GPU."""
    command = bootstrap.command_for("test", ["-k", "accept"])
    assert command[command.index("-m", 3) + 1] == "not slow" and command[-2:] == ["-k", "accept"]
    assert "-n" in command and "-n" not in bootstrap.command_for("test", [], cuda=True)
    assert "not slow" not in bootstrap.command_for("test", [], everything=True)
    assert bootstrap.parse(["test", "--all"])[0].all
    assert "bootstrap.py test --all" in (ROOT / ".ci" / "run").read_text()
    with pytest.raises(SystemExit):
        bootstrap.parse(["run", "--all"])
    assert "run takes no --all" in capsys.readouterr().err


def test_arguments_without_the_dashes_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: `bootstrap.py run --prompt x` fails without a word about `--`."""
    with pytest.raises(SystemExit):
        bootstrap.parse(["run", "--prompt", "x"])
    assert "come after --" in capsys.readouterr().err


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A checkout whose .venv is up to date; returns the commands that set-up then runs."""
    commands: list[list[str]] = []

    def record(command: list[str], what: str) -> None:
        commands.append(command)
        (tmp_path / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / ".venv" / "bin" / "python").touch()

    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(bootstrap, "MARKER", tmp_path / ".venv" / "bootstrap.json")
    monkeypatch.setattr(bootstrap, "command_output", record)
    monkeypatch.setattr(bootstrap, "check_disk", lambda cuda: None)
    assert bootstrap.ensure_environment({"test"}, cuda=False) is False
    assert [command[1:3] for command in commands] == [["-m", "venv"], ["-m", "pip"]]
    commands.clear()
    return commands


def test_second_time_installs_nothing(environment: list[list[str]]) -> None:
    """Bug: every start costs a pip call, and a start without a network fails."""
    assert bootstrap.ensure_environment({"test"}, cuda=False) is True
    assert bootstrap.ensure_environment(set(), cuda=False) is True
    assert environment == []


def test_extras_add_up(environment: list[list[str]]) -> None:
    """Bug: `test` after `install --dev` drops the linters, or reinstalls each time in turn."""
    assert bootstrap.ensure_environment({"dev"}, cuda=False) is False
    assert environment[-1][-1] == ".[dev,test]"
    assert bootstrap.ensure_environment({"test"}, cuda=False) is True


def test_changed_requirements_update_in_place(environment: list[list[str]]) -> None:
    """Bug: a changed pyproject.toml goes unnoticed, or downloads everything again."""
    text = PYPROJECT.replace('"click>=', '"click>1,>=')
    (bootstrap.ROOT / "pyproject.toml").write_text(text)
    assert bootstrap.ensure_environment(set(), cuda=False) is False
    assert [command[1:3] for command in environment] == [["-m", "pip"]]
    assert environment[-1][-1] == ".[test]"


def test_a_python_that_is_gone_starts_over(environment: list[list[str]]) -> None:
    """Bug: the system's Python is another after an upgrade, .venv links to the old one, and what
    is run there ends in `No such file or directory`."""
    (bootstrap.VENV / "bin" / "python").unlink()
    assert bootstrap.ensure_environment({"test"}, cuda=False) is False
    assert [command[1:3] for command in environment] == [["-m", "venv"], ["-m", "pip"]]


def test_another_place_starts_over(environment: list[list[str]]) -> None:
    """Bug: a copied checkout runs the code of the original through its editable install, or what
    starts over takes the extras of before along."""
    marker = json.loads(bootstrap.MARKER.read_text())
    bootstrap.MARKER.write_text(json.dumps({**marker, "root": "/elsewhere"}))
    assert bootstrap.ensure_environment({"dev"}, cuda=False) is False
    assert environment[0][1:3] == ["-m", "venv"]
    assert environment[-1][-1] == ".[dev]"


def test_a_failed_install_leaves_no_marker(
    environment: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: after an interrupted installation the broken environment counts as up to date."""

    def fail(command: list[str], what: str) -> None:
        raise bootstrap.SetupError("no network")

    monkeypatch.setattr(bootstrap, "command_output", fail)
    with pytest.raises(bootstrap.SetupError):
        bootstrap.ensure_environment({"dev"}, cuda=False)
    assert not bootstrap.MARKER.exists()


@pytest.mark.parametrize(("code", "told"), [(0, 0), (3, 3), (-15, 143)])
def test_the_end_of_what_it_runs(code: int, told: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: tests that failed end in a success, or what a signal has ended in no code that a shell
    knows."""
    done = SimpleNamespace(returncode=code)
    monkeypatch.setattr(bootstrap, "ensure_environment", lambda *_: True)
    monkeypatch.setattr(bootstrap.subprocess, "run", lambda *_, **__: done)
    assert bootstrap.main(["test", "--no-cuda"]) == told


@pytest.mark.parametrize(
    ("typed", "is_part"),
    [([], True), (["--all"], False), (["--", "-m", "slow"], False), (["--", "-k", "x"], True)],
)
def test_it_says_whether_the_long_tests_ran(
    typed: list[str],
    is_part: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bug: whoever has chosen the long tests with pytest's own -m is told that they did not run."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(bootstrap, "ensure_environment", lambda *_: True)
    monkeypatch.setattr(bootstrap.subprocess, "run", run)
    assert bootstrap.main(["test", "--no-cuda", *typed]) == 0
    assert ("the long tests did not run" in capsys.readouterr().out) == is_part
    assert ("not slow" in commands[0]) == is_part


def test_what_pip_does_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: a package more is told than there are, or of the downloads that take minutes none."""
    lines = [
        "Collecting torch>=2.11",
        "  Downloading https://host/whl/torch-2.11.0.whl (780.5 MB)",
        "Collecting click",
        "  Downloading click-8.whl (98 kB)",
        "Installing collected packages: click, torch",
    ]
    bootstrap.command_output([sys.executable, "-c", f"print('\\n'.join({lines}))"], "pip install")
    *told, done = capsys.readouterr().out.splitlines()
    assert told == [
        "[bootstrap]   downloading torch-2.11.0.whl (780.5 MB)",
        "[bootstrap]   unpacking (2 packages)",
    ]
    assert done.startswith("[bootstrap]   done in ")


@pytest.mark.usefixtures("environment")
def test_steps_of_an_installation_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: who waits for CUDA's gigabytes is told the few of the CPU, or another command."""
    step = "[bootstrap] step 1 of 2: .venv exists; its packages need an update"
    told = "[bootstrap] step 2 of 2: pip install -e '.[{}]' (first time: minutes; {})"
    cpu = "CPU builds of torch: 0.2 GB, CUDA builds: 3 GB"
    capsys.readouterr()
    bootstrap.ensure_environment({"dev"}, cuda=False)
    bootstrap.ensure_environment({"cuda"}, cuda=True)
    bootstrap.ensure_environment({"cuda"}, cuda=True)
    assert capsys.readouterr().out.splitlines() == [
        *(step, told.format("dev,test", cpu)),
        *(step, told.format("cuda,dev,test", "several GB with CUDA")),
        "[bootstrap] environment: .venv is up to date",
    ]


def test_times_that_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: the time of the set-up is told as that of all, or that of the answer is left out."""
    now_s = [5.0]

    def taking(seconds: float, found: object) -> Callable[..., object]:
        def later(*_: object, **__: object) -> object:
            now_s[0] += seconds
            return found

        return later

    done = SimpleNamespace(returncode=2)
    monkeypatch.setattr(bootstrap, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(bootstrap, "ensure_environment", taking(3.0, True))
    monkeypatch.setattr(bootstrap.subprocess, "run", taking(60.0, done))
    assert bootstrap.main(["install", "--no-cuda"]) == 0
    assert bootstrap.main(["run", "--no-cuda"]) == 2
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "[bootstrap] OK: .venv is ready (3.0 s)"
    assert said[-1] == "[bootstrap] FAILED: run ended with exit code 2 after 63.0 s"


@pytest.mark.parametrize("code", [0, 3])
def test_signs_of_life_end_with_the_command(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: what pip said last is said again every 20 seconds while the tests run, or what it said
    first as what it does now."""
    seen = tmp_path / "seen"
    monkeypatch.setattr(bootstrap, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(bootstrap, "say", lambda text: " s: said" in text and seen.touch())
    wait = f"""
import pathlib, time
print("before\\nsaid", flush=True)
end = time.monotonic() + 20
while time.monotonic() < end and not pathlib.Path({str(seen)!r}).exists():
    time.sleep(0.01)
raise SystemExit({code})
"""
    before = set(threading.enumerate())
    failure = pytest.raises(bootstrap.SetupError, match="exit 3") if code else nullcontext()
    with failure:
        bootstrap.command_output([sys.executable, "-c", wait], "waiting")
    assert seen.exists()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=5)
        assert not thread.is_alive()


def test_help_shows_examples() -> None:
    """Bug: `--help` fails, or does not show the two commands of the README."""
    done = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "python3 tools/bootstrap.py run" in done.stdout
    assert "python3 tools/bootstrap.py test" in done.stdout


def test_a_shim_without_its_python_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a version manager's python3.14, behind which is no version, ends a set-up that 3.13
    beside it could have done."""
    for name, code in (("python3.14", 127), ("python3.13", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    here = SimpleNamespace(version_info=(3, 10, 2), argv=["bootstrap.py", "run"])
    started: list[list[str]] = []

    def execv(program: str, arguments: list[str]) -> None:
        started.append([program, *arguments])
        raise SystemExit

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(bootstrap, "sys", here)
    monkeypatch.setattr(bootstrap.os, "execv", execv)
    with pytest.raises(SystemExit):
        bootstrap.suitable_python()
    good = str(tmp_path / "python3.13")
    assert started == [[good, good, "bootstrap.py", "run"]]
    (tmp_path / "python3.13").unlink()
    with pytest.raises(bootstrap.SetupError, match=r"none of python3\.11 to python3\.14"):
        bootstrap.suitable_python()


def test_the_disk_that_an_installation_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: without CUDA as much is asked for as with it, or pip fills the disk with CUDA's wheels
    and fails in the middle."""
    free = SimpleNamespace(free=5 << 30)
    monkeypatch.setattr(bootstrap.shutil, "disk_usage", lambda path: free)
    bootstrap.check_disk(cuda=False)
    with pytest.raises(bootstrap.SetupError, match=r"5\.0 GiB free .* about 12 GiB needed"):
        bootstrap.check_disk(cuda=True)
