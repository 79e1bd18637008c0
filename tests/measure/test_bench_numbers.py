"""What `graphengine bench` tells of made-up steps: numbers, speedups, table and picture."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy
import pytest
from rich.console import Console

from graphengine.cli.bench import _time_steps
from graphengine.measure import bench as measure
from graphengine.measure.bench import NUM_DIGEST_TOKENS, CaseResult, _digest, gpu_memory
from graphengine.measure.report import CaseRow, picture, speedups_, step_bars, table, tokens_equal
from tests.support.bench_cases import case


def result(step_ms: list[float], num_tokens: int, **changes: Any) -> CaseResult:
    return CaseResult(
        case=case(),
        step_ms=step_ms,
        host_ms=[0.5] * len(step_ms),
        num_tokens=num_tokens,
        step_bytes=4e9,
        **changes,
    )


def test_what_of_a_step_is_the_host_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the host's time ends where it begins to wait, and what it does with a step's tokens is
    nobody's; or a step lasts from its own launch."""
    times = iter([0.0, 1.0, 5.0, 7.0, 8.0, 10.0, 13.0, 16.0])
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    clock, seen = measure._Clock(), []
    outputs: Any = [SimpleNamespace(token_ids=[1, 2]), SimpleNamespace(token_ids=[3])]
    for _ in range(2):
        clock.launching()
        clock.launched()
        clock.waited()
        clock.collected(outputs)
        seen.append(clock.step)
    assert seen == [None, (9000.0, 5000.0, 3)]


def test_numbers() -> None:
    """Bug: a key means something else than vLLM's of that name, or idle is not wall less busy."""
    found = result([1.0, 2.0, 3.0, 4.0], 40, busy_fraction=0.8, context_tokens=800).numbers(4000.0)
    assert found["mean_acceptance_length"] == 5.0
    assert found["mean_context_tokens"] == 100.0
    # vLLM: time per output token of one request; tokens of all requests per second.
    assert found["mean_tpot_ms"] == pytest.approx(2.5 / 5)
    assert found["median_tpot_ms"] == pytest.approx(2.5 / 5)
    assert found["output_throughput"] == pytest.approx(40 / 10e-3)
    assert found["median_tokens_per_s"] == pytest.approx(5 * 2 / 2.5e-3)
    assert found["gpu_idle_ms"] == pytest.approx(0.5)
    assert found["gpu_idle_percent"] == pytest.approx(20)
    assert found["floor_ms"] == pytest.approx(1.0)
    assert found["over_floor_ratio"] == pytest.approx(2.5)


def test_a_cpu_has_no_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a result of a machine without a GPU says that 0 bytes of one are in use."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_memory() == {}


def test_numbers_of_uneven_steps() -> None:
    """Bug: mean and median are mixed up, or a rate is off by a thousand."""
    uneven = result([1.0, 2.0, 6.0], 30)
    uneven.host_ms = [0.9, 0.1, 0.2]
    found = uneven.numbers(4000.0)
    expected = {
        "step_mean_ms": 3.0,
        "step_p50_ms": 2.0,
        "host_p50_ms": 0.2,
        "mean_tpot_ms": 0.6,
        "median_tpot_ms": 0.4,
        "output_throughput": 30 / 9e-3,
        "step_read_gb": 4.0,
        "achieved_gbps": 2000.0,
        "bandwidth_percent": 50.0,
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected)


def test_percentiles_agree_everywhere() -> None:
    """Bug: p95 of 20 steps is their maximum, and the picture's p50 is not the table's."""
    steps = [float(n) for n in range(20, 0, -1)]
    known = result(steps, 40)
    found = known.numbers(0.0)
    for percent in (50, 95, 99):
        expected = numpy.percentile(steps, percent)
        assert found[f"step_p{percent}_ms"] == pytest.approx(expected)
    text = picture([CaseRow("m", "k", known, found)], None, ".svg").decode()
    for percent in (50, 99):
        assert f"p{percent} {found[f'step_p{percent}_ms']:.3f}<" in text
    assert result([3.0], 1).numbers(0.0)["step_p99_ms"] == 3.0


def test_idle_is_unknown_or_not_negative() -> None:
    """Bug: a machine without events reports 0 % idle, or noise gives a negative share."""
    assert not [key for key in result([1.0], 2).numbers(0.0) if key.startswith("gpu_")]
    assert result([1.0], 2, busy_fraction=1.2).numbers(0.0)["gpu_idle_percent"] == 0.0


def test_speedup_is_over_the_same_case() -> None:
    """Bug: the speedup of a bucket is taken over another bucket's plain decoding, or time over
    time, which leaves out that a step gives several tokens."""
    rows = [
        CaseRow("full_triton_plain", "bucket_1", result([1.0], 2), {"median_tokens_per_s": 100.0}),
        CaseRow("full_triton", "bucket_1", result([1.0], 2), {"median_tokens_per_s": 300.0}),
        CaseRow("full_triton", "bucket_8", result([1.0], 2), {"median_tokens_per_s": 900.0}),
        CaseRow("none_torch", "bucket_1", result([1.0], 2), {"median_tokens_per_s": 50.0}),
    ]
    speedups_(rows)
    assert [row.numbers.get("speedup_ratio") for row in rows] == [None, 3.0, None, None]


def test_modes_that_say_something_else() -> None:
    """Bug: a captured mode whose tokens differ is called equal; or two attentions, which round in
    their own ways, are held against each other."""
    same = {"none_triton_bucket_1": "a", "full_triton_bucket_1": "a"}
    others = {"full_flashinfer_bucket_1": "b", "full_triton_bucket_8": "c"}
    assert tokens_equal(same | others)
    assert not tokens_equal(same | {"piecewise_triton_bucket_1": "b"})


def test_what_is_unknown_is_a_dash() -> None:
    """Bug: a column without a number raises or shows 0, or one whose number is 0 shows none."""
    found = result([1.0], 2)
    rows = [CaseRow("m", "k", found, found.numbers(0.0))]
    rows.append(CaseRow("n", "k", found, found.numbers(0.0) | {"gpu_idle_percent": 0.0}))
    shown = table(rows, 6.35)
    cells = {str(column.header): list(column.cells) for column in shown.columns}
    assert cells["%read"] == cells["/floor"] == ["-", "-"]
    assert cells["idle%"] == ["-", "0.0"] and cells["p50_ms"] == ["1.000"] * 2
    assert "speedup" not in cells
    assert "SIMULATED at 6.35" in str(shown.title)


def test_every_column_has_its_own_number() -> None:
    """Bug: a column has another one's number, as p99 that of p95, or too few digits of it."""
    known = result([1.0, 2.0, 6.0], 30, busy_fraction=0.75, context_tokens=600)
    row = CaseRow("m", "k", known, known.numbers(4000.0) | {"speedup_ratio": 3.0})
    shown = {str(column.header): next(iter(column.cells)) for column in table([row], None).columns}
    times = "p50_ms 2.000 p95_ms 5.600 p99_ms 5.920 host_ms 0.500 ms/tok 0.400"
    rates = "accept 5.00 tok/s 5000 speedup 3.00 GB/s 2000 %read 50 /floor 2.00 idle% 25.0"
    words = f"mode m bucket 2 input 8 context 100 steps 3 {times} {rates}".split()
    assert shown == dict(zip(words[::2], words[1::2], strict=True))


def test_the_line_of_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the line tells a mean or the host's time as the median step, a length as the bucket, or
    its case is kept under another one's key."""
    known = result([1.0, 2.0, 6.0], 30)
    monkeypatch.setattr(measure, "check_pool", lambda *args: None)
    monkeypatch.setattr(measure, "run_case", lambda engine, case: replace(known, case=case))
    engine: Any = SimpleNamespace(config=SimpleNamespace(buckets=(1, 16)))
    options = {"input_lens": (8,), "output_len": 16, "num_iters": 3, "seed": 0, "warmup": 1}
    screen = io.StringIO()
    console = Console(width=140, file=screen, highlight=False)
    rows = _time_steps(engine, "full_triton", options, 4000.0, console)
    line = "full_triton            bucket {:3} input      8  step 2.000 ms  host 0.500 ms\n"
    assert screen.getvalue() == line.format(1) + line.format(16)
    assert [row.key for row in rows] == ["bucket_1_input_8", "bucket_16_input_8"]
    assert [row.result.case for row in rows] == [
        case(bucket=n, output_len=16, num_iters=3, warmup=1) for n in (1, 16)
    ]


def test_picture() -> None:
    """Bug: bars that should be equally long differ, also where the device was busy for longer than
    a median step took, or the file is no SVG."""
    known = result([1.0, 2.0, 4.0], 6, busy_fraction=0.75)
    rows = [CaseRow("piecewise_flashinfer", "k", known, known.numbers(4000.0))]
    assert step_bars(rows[0]) == {
        "host": {"host working": 500.0, "host waiting": 1500.0},
        "GPU": {"GPU busy": 1500.0, "GPU idle": 500.0},
        "floor": {"floor": 1000.0},
    }
    slow = CaseRow("m", "k", known, rows[0].numbers | {"host_p50_ms": 3.0})  # by its median
    assert step_bars(slow)["host"] == {"host working": 2000.0, "host waiting": 0.0}
    busy = CaseRow("m", "k", known, rows[0].numbers | {"gpu_busy_ms": 2.5})  # of other steps
    assert step_bars(busy)["GPU"] == {"GPU busy": 2000.0, "GPU idle": 0.0}
    text = picture(rows, 6.35, ".svg").decode()
    ElementTree.fromstring(text)
    for shown in ("piecewise_flashinfer, bucket 2, input 8", "SIMULATED", "p99 3.960", "1500.0"):
        assert shown in text
    assert picture(rows, 6.35, ".png").startswith(b"\x89PNG")


def test_a_digest_is_of_the_first_tokens_alone() -> None:
    """Bug: what a step has committed beyond them counts too, and modes that say the same differ."""

    def digest(num_tokens: int) -> str:
        request: Any = SimpleNamespace(output_ids=list(range(num_tokens)), finish_reason=None)
        loop: Any = SimpleNamespace(run=lambda: [[]])
        return _digest(loop, [request])

    most = NUM_DIGEST_TOKENS
    assert digest(most) == digest(most + 1) == digest(most + 9) != digest(most - 1)


def test_a_digest_waits_for_every_request() -> None:
    """Bug: a digest ends with the first request that has said enough; of the others it has as many
    tokens as acceptance has given them, and runs that say the same differ."""

    def digest(*speeds: int) -> str:
        requests: Any = [SimpleNamespace(output_ids=[], finish_reason=None) for _ in speeds]

        def run() -> Iterator[None]:
            while True:
                for request, speed in zip(requests, speeds, strict=True):
                    start = len(request.output_ids)
                    request.output_ids += range(start, start + speed)
                yield

        loop: Any = SimpleNamespace(run=run)
        return _digest(loop, requests)

    assert digest(1, 1) == digest(7, 2)
