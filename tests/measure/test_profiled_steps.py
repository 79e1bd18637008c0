"""What a profile's facts say of the steps, or the calls, that it has run: of made-up times."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from graphengine.measure import profiled_steps
from graphengine.measure.bench import TimedStep
from graphengine.measure.profiled_steps import Workload, run_prefills, run_steps
from graphengine.measure.report import print_report


@dataclass(frozen=True)
class Config:
    device: str = "cpu"
    max_model_len: int = 4096


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs nothing; a bucket reads 7 bytes times its size."""
    monkeypatch.setattr(profiled_steps, "dense_bytes", lambda built, size: {"verify": 7 * size})
    monkeypatch.setattr(profiled_steps, "num_chunks", lambda engine, case: case.batch)
    loop = SimpleNamespace(block=4, reset=lambda: None)
    return SimpleNamespace(built=SimpleNamespace(config=Config(), loop=loop))


def test_the_facts_of_steps(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the host's time without a profiler is the whole step's, steps that warm or that the
    profiler slows are among those without it, or the context is that of another moment."""
    request = SimpleNamespace(start=10)
    monkeypatch.setattr(profiled_steps, "submit_random", lambda *_: [request] * 2)
    walls = [90.0, 80.0, 1.0, 5.0, 2.0, 10.0, 30.0, 20.0, 40.0, 99.0]

    def timed_steps(loop: Any, requests: Any) -> Iterator[TimedStep]:
        for i, wall_ms in enumerate(walls):
            request.start += 3
            yield TimedStep(wall_ms, wall_ms / 10, (2, 2, 4, 6, 8)[i] if i < 5 else 100)

    monkeypatch.setattr(profiled_steps, "timed_steps", timed_steps)
    seen: list[int] = []

    @contextmanager
    def profiler() -> Iterator[None]:
        seen.append(request.start)
        yield
        seen.append(request.start)

    workload = Workload(bucket=2, input_len=4, num_steps=3, warmup=2, seed=5)
    assert run_steps(engine, workload, profiler()) == {
        "workload": {"bucket": 2, "input_len": 4, "num_steps": 3, "warmup": 2, "seed": 5},
        "config": {"device": "cpu", "max_model_len": 4096},
        "gpu_name": None,
        "context_len": 25,
        "mean_acceptance_length": 3.0,  # of each request
        "unprofiled_step_ms": 2.0,
        "unprofiled_host_ms": 0.2,
        "profiled_step_ms": 25.0,
        "segment_bytes": {"verify": 14},
    }
    assert seen == [25, 37]


def test_the_facts_of_first_tokens(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: of first tokens' calls, those that warm, those without the profiler and those within
    are mixed up, or the host's time is the call's."""
    walls = [80.0, 1.0, 5.0, 2.0, 10.0, 30.0, 20.0, 40.0]  # one more has gone before them
    asked: list[Any] = []

    def timed_calls(engine: Any, case: Any, max_new_tokens: int) -> Iterator[tuple[float, Any]]:
        asked.append((case.batch, case.input_len, case.num_iters, case.seed, max_new_tokens))
        yield from ((wall_ms, wall_ms / 10) for wall_ms in walls)

    monkeypatch.setattr(profiled_steps, "timed_calls", timed_calls)
    monkeypatch.setattr(profiled_steps, "host_ms", lambda results: results)
    workload = Workload(bucket=2, input_len=4, num_steps=3, warmup=2, seed=5)
    found = run_prefills(engine, workload, nullcontext())
    assert asked == [(2, 4, 8, 5, 1)]
    expected = {
        "prefill": True,
        "num_chunks": 2,
        "unprofiled_step_ms": 2.0,
        "unprofiled_host_ms": 0.2,
        "profiled_step_ms": 25.0,
    }
    assert {name: found[name] for name in expected} == expected


def test_every_number_of_a_report_stands_at_its_name() -> None:
    """Bug: mean and median are swapped, or a column shows another one's numbers."""
    row = {"busy_us": 3.0, "idle_us": 4.0, "read_bytes": 6e6, "floor_us": 1.5}
    kernel = {"total_us": 8.0, "num_calls": 2.0, "mean_us": 4.0}
    numbers = {
        "num_steps": 9,
        "wall_mean_us": 80.0,
        "wall_p50_us": 70.0,
        "busy_mean_us": 60.0,
        "idle_mean_us": 20.0,
        "idle_percent": 25.0,
        "busy_by_class": {"gemm_us": 11.0},
        "idle_by_class": {"gemm_us": 12.0, "host_us": 13.0},
        "by_name": {"verify.00": row},
        "host_by_name": {"verify.00": {"host_us": 5.0}, "collect": {"host_us": 7.0}},
        "kernels": {"matmul": kernel, "norm": kernel, "copy": kernel | {"num_calls": 1.0}},
    }
    screen = io.StringIO()
    print_report(Console(width=140, file=screen), "mine", numbers, 1)
    lines = [line.split() for line in screen.getvalue().splitlines()]
    for text in (
        "mine: mean of 9 steps",
        "wall 80.0 us (p50 70.0) busy 60.0 us (75.0 %) idle 20.0 us (25.0 %)",
        "class busy us idle us",
        "gemm 11.0 12.0",
        "host - 13.0",
        "step count busy us idle us host us MB GB/s floor us /floor",
        "verify.00 1 3.0 4.0 5.0 6.0 2000 1.5 2.00",
        "collect 1 - - 7.0 - - - -",
        "us/step calls/step mean us kernel",
        "8.0 2.0 4.00 matmul",
        "16.0 3.0 2 more",
    ):
        assert text.split() in lines, text
