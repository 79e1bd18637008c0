"""tools/tune_skinny.py: what would run, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graphengine.kernels.skinny_config import MIDDLE_T, PDL_EARLY, SKINNY_T, SkinnyConfig
from tools import skinny_layer, tune_skinny

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    """Bug: the tool does not find its own module from another folder, or a case has nothing to try:
    told on the GPU, minutes before its time is over; or a shape is the wrong way round."""
    line = [sys.executable, str(ROOT / "tools/tune_skinny.py"), "--dry-run"]
    line += ["--cases", "8b", "4b-fp8", "--rows", "16", "64"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert len(rows) == 2 * 2 * 6
    counts = [int(row[row.index("candidates,") - 1]) for row in rows]
    assert min(counts) > 0
    row = next(row for row in rows if row[:4] == ["8b", "qkv", "T", "16"])
    assert " ".join(row[4:6]) == "[6144, 4096]"


@pytest.mark.parametrize("rows", ["0", "257"])
def test_rows_that_no_gemm_has(
    rows: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: rows that are none, or more than the table has, end in a traceback."""
    monkeypatch.setattr(sys, "argv", ["tune_skinny.py", "--dry-run", "--rows", "16", rows])
    with pytest.raises(SystemExit, match="2"):
        tune_skinny.main()
    assert f"--rows {rows}: pass 1 to 256" in capsys.readouterr().err


def test_wide_candidates() -> None:
    """Bug: a shape of batches 8 and 16 with nothing to try, or so much that the time is over, or
    without the tiles that are best at its rows; or cuBLAS is timed on FP8 rows in two."""
    for case in tune_skinny.cases(["8b", "4b", "8b-fp8"], [16, 64, 120, 192, 256]):
        found = [
            c for v in tune_skinny.variants(case) for c in tune_skinny.candidates(case, v, 132)
        ]
        in_two = case.weight_bytes == 1 and case.T <= SKINNY_T
        assert (1 < sum(c.cols > 0 for c in found) <= 45) or in_two
        assert case.has_library is not in_two
        consumers = {variant.consumers for variant in tune_skinny.variants(case)}
        assert ({1, 2, 3} <= consumers) == (case.T <= MIDDLE_T and not in_two)
        assert len({*found}) == len(found)
        now = tune_skinny.config_now(case)
        assert now in found or now is None or not now.cols


def test_a_floor_is_of_the_weights_bytes() -> None:
    """Bug: weights in FP8 are counted as two bytes each, and no GEMM of them is near its floor."""
    for name, size in (("4b", 2), ("4b-fp8", 1)):
        (case,) = tune_skinny.cases([name], [16], ["down"])
        assert case.us_at_peak == pytest.approx(2560 * 9728 * size / 4.46e6)


def test_the_first_of_the_bursts_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the round in which the clocks settle is in the median, or a graph's bursts are all of
    its own clocks."""
    graphs: list[Any] = ["short", "long"]
    scale, calls = {"short": 1, "long": 10}, list[tuple[str, int]]()

    def replays_us(graph: str, num_replays: int) -> float:
        number = sum(graph == before for before, _ in calls)  # of its calls so far
        calls.append((graph, num_replays))
        return scale[graph] * (900, 800, 50, 10, 20, 40, 30)[number]

    monkeypatch.setattr(skinny_layer, "replays_us", replays_us)
    assert skinny_layer.bursts_us(graphs, 2) == [15, 150]
    assert calls == [("short", 1), ("long", 1)] + 6 * [("short", 33), ("long", 3)]


def test_a_launch_s_time_is_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: replays in which clocks settle count, or the luckiest one alone does."""
    times = iter([900.0, 800.0, 10.0, 20.0, 30.0, 50.0, 44.0])
    monkeypatch.setattr(skinny_layer, "captured", lambda launches: launches)
    monkeypatch.setattr(skinny_layer, "replays_us", lambda graph, count: next(times) * count)
    assert skinny_layer.graph_us(lambda: None, 2) == 15


def test_the_layer_decides() -> None:
    """Bug: the GEMM that is fastest alone stays in the table where cuBLAS is better in its place,
    or a number is stored under another path's name."""
    slow, fast, early = (SkinnyConfig(rows=r, cols=256) for r in (64, 128, 192))
    early = early._replace(pdl=PDL_EARLY)

    def gemm_us(name: str, config: SkinnyConfig | None) -> int:
        if config is None:
            return {"qkv": 1, "gate_up": 80}.get(name, 40)
        return {128: 20, 64: 30, 192: 10}[config.rows] + (config.pdl != PDL_EARLY)

    def us(*paths: Any) -> list[float]:
        return [sum(gemm_us(n, c) for n, c in configs.items()) for configs, _ in paths]

    cases = {c.name: c for c in tune_skinny.cases(["8b"], [256]) if c.name in tune_skinny.LAYER}
    best = {n: [tune_skinny.Timed(1, fast), tune_skinny.Timed(2, slow)] for n in cases}
    best["down"].append(tune_skinny.Timed(3, early))
    bench: Any = SimpleNamespace(cases=cases, us=us)
    numbers, chosen = tune_skinny.tune_layer(bench, best, float("inf"))
    fast = fast._replace(pdl=PDL_EARLY)
    assert chosen == {"qkv": None, "o": fast, "gate_up": fast, "down": early}
    assert numbers["skinny_best_us"] == 1 + 20 + 20 + 10
    assert numbers["cublas_glue_0_us"] == 1 + 40 + 80 + 40
    assert numbers["skinny_best_but_gate_up_by_cublas_us"] == 1 + 20 + 80 + 10


def test_what_is_slower_or_wrong_is_no_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a GEMM that cuBLAS beats, or whose product is wrong on the whole shape, gets an entry in
    the table that is printed, and every engine runs it; or one that cuBLAS has not gets none; or
    its rate is not that of its weights' bytes, or a slower candidate's."""
    config, slower = (SkinnyConfig(rows=r, cols=256) for r in (64, 128))
    beside = {name: {"cublas_us": us} for name, us in (("qkv", 5.0), ("o", 0.5), ("down", 5.0))}
    beside["fc"] = {}

    def time_case(case: Any, *_: object) -> tuple[dict[str, float], list[tune_skinny.Timed]]:
        candidates = tune_skinny.Timed(1.0, config), tune_skinny.Timed(3.0, slower)
        return beside[case.name], list(candidates)

    monkeypatch.setattr(tune_skinny, "time_case", time_case)
    monkeypatch.setattr(tune_skinny, "compile_all", lambda jobs, seconds: set())
    monkeypatch.setattr(tune_skinny, "Pool", lambda num_bytes: None)
    monkeypatch.setattr(tune_skinny, "is_right", lambda case, config: case.name != "down")
    args: Any = SimpleNamespace(seconds=60.0, gb=1.0, layer=False)
    found = tune_skinny.tune(tune_skinny.cases(["8b"], [256], beside), args)
    numbers = found["numbers"]["8b_rows_256"]
    assert numbers.keys() == beside.keys()
    tbps, floor_us = 6144 * 4096 * 2 / 1e6, 6144 * 4096 * 2 / 1e6 / tune_skinny.PEAK_TBPS
    of_qkv = {"cublas_us": 5.0, "skinny_us": 1.0, "skinny_tbps": tbps, "floor_us": floor_us}
    assert numbers["qkv"] == pytest.approx(of_qkv, abs=5e-3)
    assert found["table"] == [
        f"    ({E}, {D}, 2, 256): SkinnyConfig{tuple(config)},"
        for E, D in ((6144, 4096), (4096, 20480))
    ]


def test_what_a_layer_leaves_to_cublas_is_no_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the GEMM that is fastest alone, in whose place a layer has cuBLAS or whose other config
    is wrong, keeps its entry in the table."""
    alone, other, wrong = (SkinnyConfig(rows=r, cols=256) for r in (64, 128, 192))
    chosen = {"qkv": None, "o": other, "gate_up": wrong, "down": alone}
    todo = tune_skinny.cases(["8b"], [256], chosen)
    bench = SimpleNamespace(cases={case.name: case for case in todo})
    timed = {"cublas_us": 5.0}, [tune_skinny.Timed(1.0, alone)]
    monkeypatch.setattr(tune_skinny, "time_case", lambda *_: timed)
    monkeypatch.setattr(tune_skinny, "compile_all", lambda jobs, seconds: set())
    monkeypatch.setattr(tune_skinny, "Pool", lambda num_bytes: None)
    monkeypatch.setattr(tune_skinny, "LayerBench", lambda *_: bench)
    monkeypatch.setattr(tune_skinny, "tune_layer", lambda *_: ({"skinny_best_us": 3.0}, chosen))
    monkeypatch.setattr(tune_skinny, "is_right", lambda case, config: config is not wrong)
    args: Any = SimpleNamespace(seconds=60.0, gb=1.0, layer=True)
    found = tune_skinny.tune(todo, args)
    assert found["numbers"]["8b_rows_256"]["layer"] == {"skinny_best_us": 3.0}
    assert found["table"] == [
        f"    (4096, 4096, 2, 256): SkinnyConfig{tuple(other)},",
        f"    (4096, 12288, 2, 256): SkinnyConfig{tuple(alone)},",
    ]


def test_variants_are_compiled_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: what two shapes share counts for each, so that a run seems longer than it is."""
    todo = skinny_layer.cases(["8b"], [16], ["qkv", "o"])
    tune_skinny.dry_run(todo)
    first, *rows = capsys.readouterr().out.splitlines()
    tried = [{*tune_skinny.variants(case)} for case in todo]
    count = len(tried[0] | tried[1])
    assert first == f"{count} variants to compile" and len(rows) == 2
    assert count < len(tried[0]) + len(tried[1])
