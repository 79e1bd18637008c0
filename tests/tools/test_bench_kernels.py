"""tools/bench_kernels.py: what a sweep would try and a case would launch, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphengine.kernels.block_attention import choose_config
from graphengine.profiles import result_schema
from tools import (
    bench_kernels,
    kernel_cases_attention,
    kernel_cases_logits,
    kernel_cases_rows,
    kernel_sweeps,
    kernel_timing,
)


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)


def test_times_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: GB/s are TB/s, or the rate is the compiled reference's."""

    def graph_us(launch: Callable[[int], float], sets: int) -> float:
        return launch(sets)

    monkeypatch.setattr(kernel_timing, "graph_us", graph_us)
    found = kernel_timing.compare(lambda sets: 2.0 * sets, lambda sets: 5.0 * sets, 3, 12_000)
    assert found == {"kernel_us": 6.0, "kernel_gbps": 2.0, "compiled_us": 15.0}


@pytest.mark.parametrize(("sets", "num_launches"), [(3, 20), (50, 50)])
def test_a_launch_s_time(sets: int, num_launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a graph's time is over another number than its launches, those that warm up count, or
    some buffers are never read, so that the L2 cache holds the others."""
    times, launched = iter([900.0, 800.0, 700.0, *map(float, range(15))]), list[int]()
    event = SimpleNamespace(
        record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: next(times)
    )
    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes: dict[str, Any] = {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": nullcontext,
        "synchronize": lambda: None,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "graph": nullcontext,
        "Event": lambda enable_timing: event,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    us = kernel_timing.graph_us(launched.append, sets)
    assert us == pytest.approx(7 * 1000 / num_launches)
    assert launched == [0, 1, 2, *(i % sets for i in range(num_launches))]


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
    """Bug: blocks of 16 or split keys are timed at other positions than what they are beside, or
    their arithmetic is counted as if rows saw what is behind them."""
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
    of_a_key = 4 * kernel_cases_attention.N * kernel_cases_attention.H
    flops = [of_a_key * keys for keys in range(1, 385)]
    assert found["split_tflops"] == pytest.approx(sum(flops[-128:]) / 2e6, rel=1e-2)
    found = kernel_cases_attention.bench_chunk_attention(384, flashinfer=False)
    assert found == {"kernel_us": 2.0, "kernel_tflops": pytest.approx(sum(flops) / 2e6)}


@pytest.mark.parametrize("kernel", ["context_kv", "qk_norm_rope"])
def test_what_is_written_is_compared(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a kernel that writes no K/V, or others, is timed and called fast."""
    monkeypatch.setattr(kernel_cases_rows, "DEVICE", "cpu")
    monkeypatch.setattr(kernel_cases_rows, "num_sets", lambda set_bytes: 1)
    monkeypatch.setattr(kernel_cases_rows, "graph_us", lambda launch, sets: 2.0)
    bench = getattr(kernel_cases_rows, f"bench_{kernel}")
    assert bench(4, baseline=False) == {"kernel_us": 2.0}
    module, name = getattr(kernel_cases_rows, kernel), f"{kernel}_write_"
    real = getattr(module, name)

    def forgets(*given: Any) -> Any:
        q = real(*given)
        given[-2].zero_()
        return q

    monkeypatch.setattr(module, name, forgets)
    with pytest.raises(AssertionError, match="not close"):
        bench(4, baseline=False)


def test_rates_of_attention_and_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: GB/s are TB/s, of other bytes than those that are read, or of a time that what runs
    between the kernels is part of."""
    for module in (kernel_cases_attention, kernel_cases_logits):
        monkeypatch.setattr(module, "DEVICE", "cpu")
        monkeypatch.setattr(module, "num_sets", lambda set_bytes: 1)
    times_us = iter([1.0, 5.0])

    def graph_us(launch: Callable[[int], object], sets: int) -> float:
        launch(0)
        return next(times_us)

    monkeypatch.setattr(kernel_cases_attention, "graph_us", graph_us)
    monkeypatch.setattr(kernel_cases_attention, "DTYPE", torch.float32)
    found = kernel_cases_attention.bench_block_attention(2, 128, True, flashinfer=False)
    assert found == {"kernel_us": 4.0, "kernel_gbps": 2 * 128 * 2 * 8 * 128 * 4 / 4e3}
    monkeypatch.setattr(kernel_cases_logits, "V", 64)
    monkeypatch.setattr(kernel_cases_logits, "graph_us", lambda launch, sets: 2.0)
    found = kernel_cases_logits.bench_gumbel_argmax(4)
    assert found == {"kernel_us": 2.0, "kernel_gbps": 4 * 64 * 2 / 2e3, "eager_us": 2.0}


def test_rates_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: what a kernel reads and writes is counted once, or of another shape, and a rate beyond
    the memory's, or half of it, is stored."""
    for module in (kernel_cases_rows, kernel_cases_logits):
        monkeypatch.setattr(module, "DEVICE", "cpu")
        monkeypatch.setattr(module, "num_sets", lambda set_bytes: 1)
        monkeypatch.setattr(module, "compiled", lambda fn: fn)
    monkeypatch.setattr(kernel_cases_logits, "V", 64)
    monkeypatch.setattr("kernel_timing.graph_us", lambda launch, sets: 2.0)  # of `compare`
    monkeypatch.setattr(kernel_cases_logits, "graph_us", lambda launch, sets: 2.0)
    qkv, kv = (32 + 2 * 8) * 128 * 2, 5 * 2 * 8 * 128 * 2  # of a row, in bytes
    for found, num_bytes in (
        (kernel_cases_rows.bench_qk_norm_rope(4), 2 * 4 * qkv),
        (kernel_cases_rows.bench_context_kv(4), 2 * 4 * kv),
        (kernel_cases_rows.bench_accept(2), 2 * 11 * 16 * 8),
        (kernel_cases_logits.bench_argmax(4), 4 * 64 * 2),
    ):
        assert found["kernel_gbps"] == num_bytes / 2e3


def test_each_filter_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: what one filter takes is told as another's, or as that of all."""

    def threshold(logits: Any, best: Any, temperature: Any, top_p: Any, top_k: Any, _: Any) -> Any:
        return round(float(top_p[0]), 2), int(top_k[0])

    kernel = SimpleNamespace(filter_threshold=threshold, filter_threshold_reference=threshold)
    for name, value in (
        ("DEVICE", "cpu"),
        ("V", 64),
        ("filter_threshold", kernel),
        ("check_rows", lambda found, expected: None),
        ("num_sets", lambda set_bytes: 1),
        ("graph_us", lambda launch, sets: launch(0)),
    ):
        monkeypatch.setattr(kernel_cases_logits, name, value)
    found: Any = kernel_cases_logits.bench_filter_threshold(2)
    both, top_p, top_k, plain = (0.95, 50), (0.95, 0), (1.0, 50), (1.0, 0)
    assert found == {"kernel_us": both, "top_p_us": top_p, "top_k_us": top_k, "plain_us": plain}
    assert kernel_cases_logits.bench_filter_threshold(2, baseline=False) == {"kernel_us": both}


def test_a_tail_samples_as_its_name_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: what one filter costs is told as another's, or as that of all."""

    def sample_rows(logits: Any, positions: Any, controls: Any) -> tuple[float, int]:
        return round(float(controls.top_p_B[0]), 2), int(controls.top_k_B[0])

    for name, value in (("DEVICE", "cpu"), ("V", 64), ("sample_rows", sample_rows)):
        monkeypatch.setattr(kernel_cases_logits, name, value)
    monkeypatch.setattr(kernel_cases_logits, "num_sets", lambda set_bytes: 1)
    monkeypatch.setattr(kernel_cases_logits, "graph_us", lambda launch, sets: launch(0))
    found: Any = kernel_cases_logits.bench_sampled_tail(2)
    both, top_p, top_k, plain = (0.95, 50), (0.95, 0), (1.0, 50), (1.0, 0)
    assert found == {"both_us": both, "top_p_us": top_p, "top_k_us": top_k, "plain_us": plain}


def test_a_sweep_goes_on_around_the_fastest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: splits and launches are tried around the tiles that came first, and the best pair is
    never timed."""
    base = choose_config(4)
    tiles = [(4, base._replace(chunk=chunk)) for chunk in (64, 128, 256)]
    around: list[Any] = []

    def launch_candidates(*winner: Any) -> list[Any]:
        around.append(winner)
        return [(8, winner[1])]

    def ours_us(num_splits: int, config: Any) -> float:
        return 1e3 / config.chunk / num_splits

    compiled = SimpleNamespace(map=lambda compile_, jobs, chunksize: [None] * len(jobs))
    context = SimpleNamespace(Pool=lambda num_workers: nullcontext(compiled))
    for name, value in (
        ("multiprocessing", SimpleNamespace(get_context=lambda kind: context)),
        ("tile_candidates", lambda batch: tiles),
        ("launch_candidates", launch_candidates),
        ("AttentionCase", lambda *_: SimpleNamespace(ours_us=ours_us)),
    ):
        monkeypatch.setattr(kernel_sweeps, name, value)
    args: Any = SimpleNamespace(batch=[1], kv=[400])
    assert len(list(kernel_sweeps.sweep_attention(args))) == 3 + 2
    assert around == tiles[:0:-1]
    assert "best at batch 1, kv 400:    0.49 us  batch_1_splits_8_" in capsys.readouterr().out


@pytest.mark.parametrize("no_flashinfer", [False, True])
def test_flashinfer_is_beside_every_attention(
    no_flashinfer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the baseline of one attention is missing, or the option that leaves it out does not; or
    the mask is told of the other case."""
    kinds = ["block_attention", "chunk_attention"]
    for kind in kinds:
        monkeypatch.setattr(bench_kernels, f"bench_{kind}", lambda *given: {"given": given})
    args: Any = SimpleNamespace(batch=[1], kv=[128], no_flashinfer=no_flashinfer)
    found = list(bench_kernels.bench(kinds, args))
    assert [kernel for kernel, *_ in found] == ["chunk_attention", *["block_attention"] * 2]
    cases = {label: numbers["given"] for _, label, numbers in found}
    assert cases == {
        "prompt_128": (128, not no_flashinfer),
        "batch_1_kv_128_causal": (1, 128, True, not no_flashinfer),
        "batch_1_kv_128_full": (1, 128, False, not no_flashinfer),
    }


def test_fp8_cases_measure_what_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a case that nobody has run: a shape that its kernel refuses, a reference with another
    rounding, a key without its unit, a rate of other bytes. Launched here without a graph, on the
    references."""
    monkeypatch.setattr(kernel_cases_rows, "DEVICE", "cpu")
    monkeypatch.setattr(kernel_cases_rows, "num_sets", lambda set_bytes: 2)
    monkeypatch.setattr(kernel_cases_rows, "compiled", lambda fn: fn)
    launched: list[int] = []

    def graph_us(launch: Callable[[int], object], sets: int) -> float:
        launched.extend(i for i in range(sets) if launch(i) is not None)
        return 2.0

    monkeypatch.setattr("kernel_timing.graph_us", graph_us)  # of `compare`
    times = {"kernel_us": 2.0, "compiled_us": 2.0}
    for D in kernel_cases_rows.WIDTHS:
        found = kernel_cases_rows.bench_fp8_rows(4, D)
        assert found == times | {"kernel_gbps": 4 * D * (2 + 1) / 2e3}
    for partials in (1, 2):
        found = kernel_cases_rows.bench_add_rms_norm_round(4, partials)
        num_bytes = 4 * 4096 * (2 + 4 * partials + 2 + 1)  # residual twice, sums, an FP8 row
        assert found == times | {"kernel_gbps": num_bytes / 2e3}
    assert launched == [0, 1] * 2 * 5


def test_constants_are_swept_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a sweep leaves one constant as it is, times what it does not name, or its rows are the
    batch."""
    module, seen = kernel_sweeps.qk_norm_rope, list[tuple[int, int]]()
    for name in ("HEADS_PER_PROGRAM", "NUM_WARPS"):  # put back behind this test
        monkeypatch.setattr(module, name, getattr(module, name))

    def bench(T: int, baseline: bool) -> dict[str, float]:
        seen.append((module.HEADS_PER_PROGRAM, module.NUM_WARPS))
        return {"kernel_us": float(T)}

    monkeypatch.setattr(kernel_sweeps, "bench_qk_norm_rope", bench)
    args: Any = SimpleNamespace(batch=[2, 8])
    found = list(kernel_sweeps.sweep_constants("qk_norm_rope", args))
    both = [(heads, warps) for heads in (2, 4, 8, 16) for warps in (1, 2, 4, 8)]
    labels = [f"heads_per_program_{heads}_num_warps_{warps}" for heads, warps in both]
    times = {"rows_32_us": 32.0, "rows_128_us": 128.0}
    assert found == [("qk_norm_rope", label, times) for label in labels]
    assert seen == [one for one in both for _ in range(2)]


def test_a_case_is_named_by_its_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a row of the result says the batch for its rows, or one kernel's shapes are another's;
    or a prompt that is no whole number of blocks is timed."""

    def told(*shape: Any) -> Any:
        return shape

    for name in ("accept", "fp8_rows", "add_rms_norm_round", "piece"):
        monkeypatch.setattr(bench_kernels, f"bench_{name}", told)
    for name in ("block_attention", "chunk_attention"):
        monkeypatch.setattr(bench_kernels, f"bench_{name}", told)
    monkeypatch.setattr(bench_kernels, "ROW_KERNELS", {"argmax": told, "context_kv": told})
    args: Any = SimpleNamespace(no_flashinfer=True, kv=[100, 256], batch=[2])
    assert list(bench_kernels.bench([*bench_kernels.KERNELS], args)) == [
        ("chunk_attention", "prompt_256", (256, False)),
        ("pieces", "rows_128_kv_100", (128, 100)),
        ("pieces", "rows_128_kv_256", (128, 256)),
        ("pieces", "rows_256_kv_100", (256, 100)),
        ("pieces", "rows_256_kv_256", (256, 256)),
        ("argmax", "rows_32", (32,)),
        ("context_kv", "rows_32", (32,)),
        ("accept", "batch_2", (2,)),
        ("fp8_rows", "rows_32_columns_4096", (32, 4096)),
        ("fp8_rows", "rows_32_columns_12288", (32, 12288)),
        ("fp8_rows", "rows_32_columns_20480", (32, 20480)),
        ("add_rms_norm_round", "rows_32_partials_1", (32, 1)),
        ("add_rms_norm_round", "rows_32_partials_2", (32, 2)),
        ("block_attention", "batch_2_kv_100_causal", (2, 100, True, False)),
        ("block_attention", "batch_2_kv_100_full", (2, 100, False, False)),
        ("block_attention", "batch_2_kv_256_causal", (2, 256, True, False)),
        ("block_attention", "batch_2_kv_256_full", (2, 256, False, False)),
    ]


def test_every_case_is_stored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: of a kernel's cases the last alone is in the result, or those of another take its
    place; or the result does not say of which shapes they are."""
    stored: dict[str, Any] = {}

    def bench(*args: object) -> list[tuple[str, str, dict[str, float]]]:
        cases = [("accept", "batch_1"), ("argmax", "rows_16"), ("accept", "batch_8")]
        return [(*case, {"kernel_us": i + 0.12345}) for i, case in enumerate(cases)]

    monkeypatch.setattr(bench_kernels, "bench", bench)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(result_schema, "environment", lambda commit: {"commit": commit})
    monkeypatch.setattr(result_schema, "write_result", lambda *_, **parts: stored.update(parts))
    line = "bench_kernels.py --batch 2 --kv 99 640 --out x.json --commit abc"
    monkeypatch.setattr("sys.argv", line.split())
    bench_kernels.main()
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert stored == {"config": printed["config"], "env": {"commit": "abc"}}
    assert printed["config"] == {
        "sweep": None,
        "heads": [32, 8, 128],
        "block_length": 16,
        "page_size": 128,
        "batch": [2],
        "kv": [99, 640],
        "dtype": "torch.bfloat16",
    }
    assert printed["numbers"] == {
        "accept": {"batch_1": {"kernel_us": 0.123}, "batch_8": {"kernel_us": 2.123}},
        "argmax": {"rows_16": {"kernel_us": 1.123}},
    }
