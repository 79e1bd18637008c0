"""tools/bench_kernels.py: what a sweep would try and a case would launch, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from graphengine.kernels.block_attention import choose_config
from tools import bench_kernels, kernel_cases_attention, kernel_cases_rows, kernel_sweeps


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)


@pytest.mark.parametrize("batch", [1, 8, 16, 64])
def test_a_sweep_tries_what_a_launch_accepts(batch: int) -> None:
    """Bug: the default that a sweep varies has other tiles at this batch, so that half of the
    candidates are refused and silently count as too large, or a change changes nothing."""
    tiles = kernel_sweeps.tile_candidates(batch)
    assert len(set(tiles)) == len(tiles)
    num_splits = kernel_cases_attention.default_splits(batch)
    assert tiles[0] == (num_splits, choose_config(num_splits))
    launches = kernel_sweeps.launch_candidates(*tiles[0])
    assert {config.prefetch for _, config in launches} == {True, False}
    for _, config in [*tiles, *launches]:
        assert config.chunk % config.kv_tile == 0, config


def test_pieces_are_the_end_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: blocks of 16 or split keys are timed at other positions than what they are beside."""
    monkeypatch.setattr(kernel_cases_attention, "DEVICE", "cpu")
    monkeypatch.setattr(kernel_cases_attention, "DTYPE", torch.float32)
    monkeypatch.setattr(kernel_cases_attention, "num_sets", lambda set_bytes: 2)

    def graph_us(launch: Callable[[int], object], sets: int) -> float:
        launch(sets - 1)
        return 2.0

    monkeypatch.setattr(kernel_cases_attention, "graph_us", graph_us)
    found = kernel_cases_attention.bench_piece(128, 384)
    assert set(found) == {
        f"{name}_{unit}"
        for name in ("blocks_of_16", "split", "split_in_1", "split_in_8")
        for unit in ("us", "tflops")
    }


def test_fp8_cases_measure_what_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a case that nobody has run: a shape that its kernel refuses, a reference with another
    rounding, a key without its unit. Launched here without a graph, on the references."""
    monkeypatch.setattr(kernel_cases_rows, "DEVICE", "cpu")
    monkeypatch.setattr(kernel_cases_rows, "num_sets", lambda set_bytes: 2)
    monkeypatch.setattr(kernel_cases_rows, "compiled", lambda fn: fn)
    launched: list[int] = []

    def graph_us(launch: Callable[[int], object], sets: int) -> float:
        launched.extend(i for i in range(sets) if launch(i) is not None)
        return 2.0

    monkeypatch.setattr("kernel_timing.graph_us", graph_us)  # of `compare`
    keys = {"kernel_us", "kernel_gbps", "compiled_us"}
    for D in kernel_cases_rows.WIDTHS:
        assert set(kernel_cases_rows.bench_fp8_rows(4, D)) == keys
    for partials in (1, 2):
        assert set(kernel_cases_rows.bench_add_rms_norm_round(4, partials)) == keys
    assert launched == [0, 1] * 2 * 5


def test_every_case_is_stored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: of a kernel's cases the last alone is in the result, or those of another take its
    place."""

    def bench(*args: object) -> list[tuple[str, str, dict[str, float]]]:
        cases = [("accept", "batch_1"), ("argmax", "rows_16"), ("accept", "batch_8")]
        return [(*case, {"kernel_us": i + 0.12345}) for i, case in enumerate(cases)]

    monkeypatch.setattr(bench_kernels, "bench", bench)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("sys.argv", ["bench_kernels.py"])
    bench_kernels.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["numbers"]
    assert found == {
        "accept": {"batch_1": {"kernel_us": 0.123}, "batch_8": {"kernel_us": 2.123}},
        "argmax": {"rows_16": {"kernel_us": 1.123}},
    }
