"""What tools/shrink_nsys.py prints of the export that it has cut."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from graphengine.names import STEP
from graphengine.profiles.nsys import open_export, read_export
from tests.support import nsys_exports as exports
from tools import shrink_nsys


def test_what_is_told_of_a_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: the size that is told is the whole recording's, or the sums are other ones than those
    beside the file."""
    source = exports.write_export(tmp_path / "a.sqlite", num_steps=9)
    target = tmp_path / "cut.sqlite.gz"
    shrink_nsys.main([str(source), str(target), "--steps", "4"])
    line, sums = capsys.readouterr().out.splitlines()
    assert line == f"{target}: {len(target.read_bytes())} bytes"
    assert json.loads(sums) == {
        "num_steps": 3,
        "wall_mean_us": 100.0,
        "busy_mean_us": 27.0,
        "idle_mean_us": 73.0,
    }
    assert (tmp_path / "cut.json").read_text() == f"{sums}\n"


def test_the_middle_of_a_recording_stays(tmp_path: Path) -> None:
    """Bug: what stays are the first steps, in which clocks and pipeline still settle."""
    source = exports.write_export(tmp_path / "a.sqlite", num_steps=9)
    shrink_nsys.shrink(source, target := tmp_path / "cut.sqlite.gz", 3)
    starts = [found.start_ns for found in read_export(target).ranges if found.name == STEP]
    before = [found.start_ns for found in read_export(source).ranges if found.name == STEP]
    assert starts == before[3:6]


def test_other_programs_are_not_named(tmp_path: Path) -> None:
    """Bug: what is stored names the libraries that ran beside graphengine, and their ranges."""
    source = exports.write_export(tmp_path / "a.sqlite", num_steps=9)
    shrink_nsys.shrink(source, target := tmp_path / "cut.sqlite.gz", 3)
    query = "SELECT text FROM NVTX_EVENTS WHERE text IS NOT NULL"
    said = []
    for path in (source, target):
        with closing(open_export(path)) as connection:
            said.append({text for (text,) in connection.execute(query)})
    assert said[0] - said[1] == {"cublasLt", "cublasLtMatmul"} and "graphengine" in said[1]


def test_kernels_keep_the_names_that_they_have(tmp_path: Path) -> None:
    """Bug: where a recording has short names alone, all kernels of what stays are one."""
    source = exports.write_export(tmp_path / "a.sqlite", num_steps=9)
    with closing(sqlite3.connect(source)) as connection:
        connection.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET demangledName = NULL")
        connection.commit()
    shrink_nsys.shrink(source, target := tmp_path / "cut.sqlite.gz", 3)
    before, after = ({a.name for a in read_export(x).activities} for x in (source, target))
    assert after == before and {"gemm", "norm"} < after


@pytest.mark.parametrize(
    ("target", "steps", "message"),
    [
        ("cut.sqlite", "4", "cut.sqlite: name the output *.sqlite.gz"),
        ("cut.sqlite.gz", "0", "--steps 0: keep at least 1"),
        ("cut.sqlite.gz", "9", "a.sqlite: 9 steps; ask for fewer than that"),
    ],
)
def test_refusals(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    target: str,
    steps: str,
    message: str,
) -> None:
    """Bug: the refusal names another file or number than the one that cannot be taken."""
    monkeypatch.chdir(tmp_path)
    exports.write_export(Path("a.sqlite"), num_steps=9)
    with pytest.raises(SystemExit, match="2"):
        shrink_nsys.main(["a.sqlite", target, "--steps", steps])
    assert capsys.readouterr().err.splitlines()[-1].partition("error: ")[2] == message
    assert not Path(target).exists()
