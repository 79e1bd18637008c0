"""What two checkouts' result files say beside each other."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tools import side_by_side
from tools.side_by_side import compare, starts


def result(step_ms: float, startup_s: float, tokens: str = "a") -> dict:
    rows = {"bucket_1_input_128": {"step_p50_ms": step_ms}, "startup": {"startup_s": startup_s}}
    digests = {"full_triton_bucket_1_input_128": tokens}
    return {"numbers": {"full_triton": rows}, "config": {"token_digests": digests}}


def test_the_first_pair_fills_caches() -> None:
    """Bug: a cold run counts among the warm ones, or a side's runs among the other's; or tokens
    that differ between the sides count as the same, since each side's are."""
    sides = {
        "before": [result(9.0, 40.0), result(4.0, 8.0), result(5.0, 6.0)],
        "after": [result(9.0, 30.0), result(3.0, 5.0), result(3.0, 5.0, tokens="b")],
    }
    (row,) = compare(sides).values()
    assert (row["before_p50_ms"], row["after_p50_ms"]) == (4.5, 3.0)
    assert row["after_over_before_ratio"] == 3.0 / 4.5 and row["num_token_digests"] == 2
    assert (row["spread_before_ms"], row["spread_after_ms"]) == (1.0, 0.0)
    for other, count in (("a", 1), ("b", 2)):
        (row,) = compare(
            {"before": [result(4.0, 8.0)] * 2, "after": [result(4.0, 8.0, tokens=other)] * 2}
        ).values()
        assert row["num_token_digests"] == count
    assert starts(sides) == {
        "full_triton_start": {
            "before_cold_s": 40.0,
            "before_warm_s": 7.0,
            "after_cold_s": 30.0,
            "after_warm_s": 5.0,
        }
    }


def test_each_side_has_caches_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: the second side starts cold with what the first one has compiled, or each run anew; or
    one side runs behind all of the other's runs, on a warmer machine."""
    ran: list[tuple[Path, Path]] = []

    def run(checkout: Path, command: list[str], caches: Path, out: Path) -> dict[str, Any]:
        assert command == ["bench"]
        ran.append((checkout, caches))
        return result(4.0, 8.0)

    monkeypatch.setattr(side_by_side, "run", run)
    places = ["--before", str(tmp_path), "--out", str(tmp_path / "ab.json")]
    assert side_by_side.main([*places, "--runs", "1", "bench"]) == 0
    assert ran[:2] == ran[2:] and len(set(ran[:2])) == 2
    assert len({checkout for checkout, _ in ran}) == len({caches for _, caches in ran}) == 2
    assert ran[0][0] == tmp_path.resolve() and "(1.0000)" in capsys.readouterr().out


def test_what_is_told_of_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a line has the two sides in each other's place, or the file names the new checkout as
    the old one, so that nobody can tell what was compared with what."""
    times = {"old": iter([9.0, 4.0]), "new": iter([8.0, 3.0])}

    def run(checkout: Path, command: list[str], caches: Path, out: Path) -> dict[str, Any]:
        return result(next(times[checkout.name]), 8.0)

    monkeypatch.setattr(side_by_side, "run", run)
    sides = [tmp_path / "old", tmp_path / "new"]
    for side in sides:
        side.mkdir()
    line = ["--before", str(sides[0]), "--after", str(sides[1]), "--runs", "1", "--commit", "abc"]
    assert side_by_side.main([*line, "--out", str(tmp_path / "ab.json"), "bench"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines == [
        *("before 9.000", "after 8.000", "before 4.000", "after 3.000"),
        "full_triton_bucket_1_input_128: 4.0000 -> 3.0000 ms (0.7500)",
    ]
    stored = json.loads((tmp_path / "ab.json").read_text())
    assert stored["kind"] == "side_by_side" and stored["environment"]["commit"] == "abc"
    assert stored["config"] == {"command": ["bench"], "num_runs": 1, "before": "old"}
    assert stored["numbers"] == json.loads(last)


def test_a_run_that_fails_ends_the_comparison(tmp_path: Path) -> None:
    """Bug: a run that fails counts with the numbers of the one before, whose file still lies
    there."""
    package, out = tmp_path / "graphengine", tmp_path / "result.json"
    package.mkdir()
    (package / "__init__.py").touch()
    script = "import pathlib, sys; pathlib.Path(sys.argv[3]).write_text('{}')"
    (package / "__main__.py").write_text(script)
    assert side_by_side.run(tmp_path, ["bench"], tmp_path, out) == {}
    (package / "__main__.py").write_text("raise SystemExit(3)")
    with pytest.raises(subprocess.CalledProcessError):
        side_by_side.run(tmp_path, ["bench"], tmp_path, out)


def test_a_side_s_own_processes_import_that_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: compile workers of the old checkout import the new one, which PYTHONPATH names."""
    package = tmp_path / "graphengine"
    package.mkdir()
    (package / "__init__.py").touch()
    script = "import json, os, sys; json.dump(os.environ['PYTHONPATH'], open(sys.argv[3], 'w'))"
    (package / "__main__.py").write_text(script)
    for named, found in (("/new", f"{tmp_path}:/new"), ("", f"{tmp_path}")):
        monkeypatch.setenv("PYTHONPATH", named)
        out = tmp_path / "result.json"
        assert side_by_side.run(tmp_path, ["bench"], tmp_path, out) == found


def test_no_run_is_no_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: both sides run for minutes before there is no median, or another number is refused."""
    with pytest.raises(SystemExit, match="2"):
        side_by_side.main(["--before", str(tmp_path), "--out", "ab.json", "--runs", "0", "bench"])
    assert "--runs 0: there is a median of 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize("side", ["--before", "--after"])
def test_a_checkout_that_is_not_there(
    side: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a misspelt checkout is a traceback, of the second one behind a run of the first."""
    sides = {"--before": str(tmp_path), "--after": str(tmp_path), side: str(tmp_path / "no")}
    named = [word for pair in sides.items() for word in pair]
    with pytest.raises(SystemExit, match="2"):
        side_by_side.main([*named, "--out", str(tmp_path / "ab.json"), "bench"])
    assert f"{side} {tmp_path / 'no'}: no such folder" in capsys.readouterr().err
