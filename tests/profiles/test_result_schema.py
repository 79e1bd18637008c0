"""profiles/result_schema.py, and every stored measurement held to it."""

import copy
import json
import math
import os
import re
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graphengine.profiles import result_schema

ROOT = Path(__file__).resolve().parents[2]
RESULTS, LOG = ROOT / "profiles" / "results", ROOT / "profiles" / "LOG.md"

ENVIRONMENT: dict[str, Any] = dict.fromkeys(result_schema.REQUIRED_ENVIRONMENT, None)
NUMBERS = {"batch_1": {"step_us": 812.5, "tokens_per_s": 1510.0, "num_steps": 64}}


def valid(tmp_path: Path) -> dict[str, Any]:
    return result_schema.write_result(
        tmp_path / "r.json", "decode", NUMBERS, config={"batch": 1}, env=ENVIRONMENT
    )


def test_stored_results_are_valid() -> None:
    """Bug: a number is committed without the GPU, commit or unit that makes it comparable."""
    broken = {}
    for path in sorted(RESULTS.glob("*.json")):
        problems = result_schema.validate(json.loads(path.read_text()))
        if problems:
            broken[path.name] = problems
    assert broken == {}


def test_what_is_cited_exists() -> None:
    """Bug: a document or a comment cites a file that was never committed or has been deleted. (The
    log may, if it says where to find it: profiles/README.md.)"""
    cited = re.compile(r"20\d\d-\d\d-\d\d-(?:h100|h200|cpu)-[\w.-]+?\.json")
    missing = {}
    for folder in ("graphengine", "kernels", "capture", "profiles", "tools", "tests", "."):
        pattern = "*.md" if folder == "." else "**/*.md"
        for path in [*(ROOT / folder).glob(pattern), *(ROOT / folder).glob(pattern[:-2] + "py")]:
            names = (
                set() if path.name.startswith(LOG.stem) else set(cited.findall(path.read_text()))
            )
            if gone := sorted(name for name in names if not (RESULTS / name).exists()):
                missing[str(path.relative_to(ROOT))] = gone
    assert missing == {}
    assert re.search(r"git show [0-9a-f]{7}:profiles/results/", LOG.read_text())


def test_written_file_reads_back(tmp_path: Path) -> None:
    """Bug: the file differs from what was validated."""
    result = valid(tmp_path)
    assert json.loads((tmp_path / "r.json").read_text()) == result
    assert result_schema.validate(result) == []


def test_notes_are_stored(tmp_path: Path) -> None:
    """Bug: what a reader must know to not misread the numbers is lost, or stands there empty."""
    env = dict.fromkeys(result_schema.REQUIRED_ENVIRONMENT)
    for notes in ("one stream", ""):
        kept: dict[str, Any] = {"config": {}, "notes": notes, "env": env}
        result_schema.write_result(tmp_path / "x.json", "steps", {"step_ms": 1.0}, **kept)
        assert json.loads((tmp_path / "x.json").read_text()).get("notes", "") == notes


def test_the_date_is_utc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a result's date is its machine's local time, so that of two runs the earlier one, made
    further east, is taken for the newest."""
    before = datetime.now(UTC)
    try:
        monkeypatch.setenv("TZ", "EAST-9")
        time.tzset()
        told = datetime.fromisoformat(valid(tmp_path)["date_utc"])
    finally:
        monkeypatch.undo()
        time.tzset()
    assert before - timedelta(seconds=1) < told <= datetime.now(UTC)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """Bug: a full disk leaves half of a result, under its name or another, or ends in a traceback
    after the measurement."""
    path, link = tmp_path / "a.svg", tmp_path / "link"
    path.write_text("before")
    link.symlink_to(path)
    with pytest.raises(ValueError, match=r"a\.svg: cannot be written"), full_disk():
        result_schema.write_whole(path, "after" * 1000)
    assert path.read_text() == "before"
    assert sorted(os.listdir(tmp_path)) == ["a.svg", "link"]
    result_schema.write_whole(link, "after")
    assert path.read_text() == "after" and link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["a.svg", "link"]
    for place in ("/dev/full", "/dev/full/x.json", "/proc/nowhere/x.json"):
        with pytest.raises(ValueError, match=place):
            result_schema.write_result(place, "k", NUMBERS, config={}, env=ENVIRONMENT)


def test_a_pipe_is_written_by_the_name_of_its_number() -> None:
    """Bug: what `--output-json /dev/stdout | jq` or `>(gzip > a.gz)` is to read cannot be written,
    behind minutes of measuring."""
    reads, writes = os.pipe()
    result_schema.write_whole(Path(f"/dev/fd/{writes}"), "after")
    os.close(writes)
    with open(reads, encoding="utf-8") as pipe:
        assert pipe.read() == "after"


@contextmanager
def full_disk() -> Iterator[None]:
    """Files of this process hold 100 bytes at most."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    """Bug: a required key can be left out, or the schema is another one, older or newer."""
    result = valid(tmp_path)
    for version in (0, 2):
        assert "schema_version" in result_schema.validate(result | {"schema_version": version})[0]
    for key in result_schema.REQUIRED:
        part = {name: value for name, value in result.items() if name != key}
        assert result_schema.validate(part) == [f"missing key {key}"]
    for key in result_schema.REQUIRED_ENVIRONMENT:
        part = copy.deepcopy(result)
        del part["environment"][key]
        assert result_schema.validate(part) == [f"missing key environment.{key}"]


@pytest.mark.parametrize(
    "numbers",
    [
        {"step": 1.0},
        {"latency": {"p50": 1.0}},
        {"step_us": "fast"},
        {"step_us": True},
        {"step_us": float("nan")},
        {"steps_us": [1.0, float("inf")]},
        {},
    ],
)
def test_bad_numbers_are_refused(tmp_path: Path, numbers: dict[str, Any]) -> None:
    """Bug: a number without a unit, or no number at all, is stored; or a broken file stays."""
    path = tmp_path / "bad.json"
    with pytest.raises(ValueError, match="not a valid result"):
        result_schema.write_result(path, "decode", numbers, config={}, env=ENVIRONMENT)
    assert not path.exists()


def test_what_is_refused_is_named(tmp_path: Path) -> None:
    """Bug: of a list of a thousand times all are told instead of the one that is no number; or of
    several problems the first alone, and the rest one by one."""
    numbers = {"full": {"step_us": [1.0, "fast", 2, True, math.inf]}, "speed": 3}
    units = ", ".join(result_schema.UNITS)
    assert result_schema.validate(valid(tmp_path) | {"numbers": numbers}) == [
        "numbers.full.step_us: 'fast' is no number; put it into config",
        "numbers.full.step_us: True is no number; put it into config",
        "numbers.full.step_us: inf is not finite",
        f"numbers.speed: no unit; end it in one of {units}, or num_*",
    ]
    told = "numbers.step_us: 'fast' is no number; put it into config; numbers.speed: no unit"
    bad = {"step_us": "fast", "speed": 3}
    with pytest.raises(ValueError, match=f"not a valid result: {re.escape(told)}"):
        result_schema.write_result(tmp_path / "x.json", "x", bad, config={}, env=ENVIRONMENT)


def test_environment_has_all_keys_on_this_machine() -> None:
    """Bug: a machine without a GPU, git or nvidia-smi makes the measurement fail at its end; a tree
    of which nothing is known is called clean."""
    env = result_schema.environment()
    assert set(result_schema.REQUIRED_ENVIRONMENT) <= set(env)
    assert env["versions"]["torch"]
    json.dumps(env)
    copied = result_schema.environment(commit="abc")
    assert (copied["commit"], copied["commit_dirty"]) == ("abc", None)


@pytest.mark.parametrize(("changed", "is_dirty"), [("", False), (" M api.py", True)])
def test_a_checkout_without_changes_is_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, is_dirty: bool
) -> None:
    """Bug: of a checkout in which nothing is changed it is not known whether it is clean."""
    program = tmp_path / "git"
    program.write_text(f"#!/bin/sh\n[ $1 = rev-parse ] && echo abc || echo '{changed}'\n")
    program.chmod(0o755)
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(result_schema, "__file__", str(tmp_path / "profiles" / "file.py"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = result_schema.environment()
    assert (found["commit"], found["commit_dirty"]) == ("abc", is_dirty)


@pytest.mark.parametrize("said", ["echo 'NVIDIA-SMI has failed'\nexit 9", "echo '[N/A]'"])
def test_nvidia_smi_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    """Bug: what nvidia-smi says where it fails, or does not know, is stored as the driver's
    version."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{said}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert result_schema.environment(commit="abc")["driver_version"] is None


def test_clocks_are_those_of_the_gpu_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: with CUDA_VISIBLE_DEVICES=1, or another current device, a result has the clocks and the
    temperature of the machine's first GPU, which idles."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\ncase "$*" in *driver_version*) echo 570.1;;\n'
        "*--id=GPU-ab-cd) echo 1980, 3201, 1980, 3201, 700, 61;;\n"
        "*) echo 345, 3201, 1980, 3201, 700, 29;; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    used = SimpleNamespace(name="the second", uuid="ab-cd")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "the first")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda: used)
    found = result_schema.environment(commit="abc")
    assert (found["gpu_name"], found["driver_version"]) == ("the second", "570.1")
    assert (found["gpu_clocks"]["sm_mhz"], found["gpu_clocks"]["temperature_c"]) == (1980, 61)


@pytest.mark.gpu
def test_nvidia_smi_knows_the_gpu_in_use() -> None:
    """Bug: nvidia-smi does not know the name by which it is asked, and results have no clocks."""
    clocks = result_schema.environment(commit="abc")["gpu_clocks"]
    assert clocks["sm_mhz"] and clocks["temperature_c"]


def test_command_line_names_no_machine() -> None:
    """Bug: stored commands carry home folders, and differ between machines for the same run; or an
    argument with white space is told as two."""
    shown = result_schema.command_line(
        ["/home/u/x/graphengine/__main__.py", "bench", "--model", "/data/m/Qwen3-8B", "a b", "c\td"]
    )
    assert shown == "graphengine bench --model Qwen3-8B 'a b' 'c\td'"
    assert result_schema.command_line(["/v/bin/graphengine", "--out=/a/b/c.json"]) == (
        "graphengine --out=c.json"
    )
