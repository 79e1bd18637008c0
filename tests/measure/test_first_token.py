"""`graphengine bench --prefill`: cases, whole requests, refusals and the stored JSON, on a small
pair."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from graphengine.api import Engine
from graphengine.cli.main import main
from graphengine.measure.first_token import (
    PrefillCase,
    Rates,
    num_chunks,
    roofline_ms,
    run_prefill,
    run_request,
)
from graphengine.profiles.result_schema import validate
from tests.support.checkpoints import make_drafter, make_target

Bench = Callable[..., Result]
NO_GPU = Rates(0.0, 0.0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("pair")
    target = make_target(directory / "target", layers=2)
    return target, make_drafter(directory / "draft", target, taps=(0, 1), block_size=4)


@pytest.fixture
def bench(pair: tuple[Path, Path]) -> Bench:
    def call(*args: str) -> Result:
        where = ["bench", str(pair[0]), "--draft", str(pair[1]), "--device", "cpu", "--prefill"]
        return CliRunner().invoke(main, [*where, "--num-iters", "2", *args])

    return call


def case(**changes: int) -> PrefillCase:
    values = {"input_len": 8, "batch": 1, "num_iters": 2, "seed": 0} | changes
    return PrefillCase(**values)


def test_every_length_with_every_batch(bench: Bench, tmp_path: Path) -> None:
    """Bug: a case is left out, whole requests are timed unasked or in batches, or the file breaks
    the schema."""
    stored = tmp_path / "x.json"
    done = bench(
        *["--bucket", "1,2", "--input-len", "3,9", "--output-len", "12"],
        *["--simulate-acceptance", "2.5", "--output-json", str(stored), "--json"],
    )
    assert done.exit_code == 0, done.output
    found = json.loads(stored.read_text())
    assert validate(found) == [] and found["kind"] == "bench_first_token"
    assert json.loads(done.stdout)["numbers"] == found["numbers"]
    numbers = found["numbers"]["none_torch"]
    assert numbers["first_request"]["num_prompt_tokens"] == 3
    assert numbers["first_request"]["ttft_ms"] > 0 < numbers["first_request"]["step_mean_ms"]
    keys = {f"first_token_input_{n}{b}" for n in (3, 9) for b in ("", "_batch_2")}
    assert keys == set(numbers) - {"startup", "memory", "first_request"}
    for key in keys:
        one = numbers[key]
        assert len(one["ttft_ms"]) == 2
        assert 0 < one["first_p50_ms"] <= one["ttft_p50_ms"]
        assert one["prefill_p50_ms"] < one["ttft_p50_ms"] > one["host_p50_ms"] > 0
        assert one["chunk_host_us"] * one["num_chunks"] == pytest.approx(one["host_p50_ms"] * 1e3)
        assert ("request_p50_ms" in one) == (not key.endswith("_batch_2"))
        assert "roofline_ms" not in one, "there is no GPU to be as fast as"
    assert numbers["first_token_input_9"]["num_request_steps"] == round(11 / 2.5)
    assert "/roofline" in done.stderr and "SIMULATED at 2.5" in done.stderr


def test_lengths_that_nobody_named(bench: Bench) -> None:
    """Bug: the default lengths are refused, or not cut, where the context is shorter."""
    done = bench("--compare", "none,none:torch", "--json")
    assert done.exit_code == 0, done.output
    numbers = json.loads(done.stdout)["numbers"]["none_torch"]
    lengths = [key.rsplit("_", 1)[1] for key in numbers if key.startswith("first_token")]
    assert lengths == ["16", "128"]
    assert "none:torch is none_torch again" in done.stderr


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--baseline"], ["--baseline", "--draft none"]),
        (["--plot", "x.svg"], ["--plot", "--output-json"]),
        (["--context", "64"], ["--context", "--input-len"]),
        (["--warmup", "0"], ["--warmup", "one call"]),
        (["--output-len", "16", "--bucket", "2"], ["--output-len 16", "add 1 to --bucket"]),
        (["--input-len", "9999"], ["9999 tokens"]),
        (["--input-len", "500", "--output-len", "99"], ["--output-len 99 after 500", "is full"]),
    ],
)
def test_refusals(bench: Bench, args: list[str], parts: list[str]) -> None:
    """Bug: an option that is of steps is ignored, or ends in a traceback."""
    done = bench(*args)
    assert done.exit_code == 2, done.output
    text = " ".join(done.stderr.split())
    assert [part for part in parts if part not in text] == []


def test_prompts_that_do_not_fit_together(pair: tuple[Path, Path]) -> None:
    """Bug: half of a batch waits for the other half, and that is its time to the first token."""
    options = {"buckets": (4,), "device": "cpu", "max_model_len": 64, "kv_cache_memory": 1 << 18}
    with (
        Engine.from_pretrained(*pair, **options) as engine,
        pytest.raises(ValueError, match=r"K/V for \d of 4 prompts of 60 tokens; raise --kv-cache"),
    ):
        run_prefill(engine, case(input_len=60, batch=4), NO_GPU)


def test_what_a_case_counts(pair: tuple[Path, Path]) -> None:
    """Bug: the call that warms a case is counted, chunks are counted once a prompt, or the luck of
    acceptance is in a request's time."""
    with Engine.from_pretrained(*pair, buckets=(1, 2), device="cpu") as engine:
        loop = engine.built.loop
        loop.prefill = replace(loop.prefill, chunk=8)
        assert num_chunks(engine, case(input_len=8)) == 1
        assert num_chunks(engine, case(input_len=20, batch=2)) == 5
        assert not loop.has_work
        found = run_prefill(engine, case(num_iters=3), Rates(100.0, 1.0))
        assert len(found["ttft_ms"]) == 3
        roofline = roofline_ms(engine.built, 8, 1, Rates(100.0, 1.0))
        assert found["over_roofline_ratio"] == pytest.approx(found["ttft_p50_ms"] / roofline)
        assert run_request(engine, case(), 9)["num_request_steps"] <= 8
