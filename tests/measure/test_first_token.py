"""`graphengine bench --prefill`: cases, whole requests, refusals and the stored JSON, on a small
pair."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from graphengine.api import Engine
from graphengine.cli.bench import _lengths, _settle
from graphengine.cli.main import main
from graphengine.config.draft import DraftConfig
from graphengine.decode.metrics import Acceptance, RequestMetrics
from graphengine.decode.simulate import acceptance_rate
from graphengine.measure import first_token
from graphengine.measure.first_token import (
    PrefillCase,
    Rates,
    first_requests,
    num_chunks,
    roofline_ms,
    run_prefill,
    run_prefills,
    run_request,
    simulated_length,
)
from graphengine.measure.report import first_token_table
from graphengine.profiles.result_schema import validate
from graphengine.startup.build import read_configs
from tests.support.checkpoints import make_drafter, make_target

Bench = Callable[..., Result]
OF_STEPS = "is of steps, --prefill times none: "
NO_GPU = Rates(0.0, 0.0)
RATE = acceptance_rate(2.5, 3)  # of a draft, which is the mean's in a block of 3


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
    """Bug: a case is left out, whole requests of a batch are scaled by one's luck, or the file
    breaks the schema."""
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
        assert one["request_first_p50_ms"] > 0
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


@pytest.mark.parametrize(("context", "expected"), [(191, (16,)), (192, (16, 128)), (79, (1,))])
def test_lengths_whose_first_requests_fit(
    tmp_path: Path, context: int, expected: tuple[int, ...]
) -> None:
    """Bug: of a model whose context ends just behind a default length that length is timed, and the
    very first requests end early; or the command is refused, though nobody named one."""
    target = make_target(tmp_path / "target", layers=1, max_positions=context)
    options = dict.fromkeys(("input_len", "context", "output_len")) | {"prefill": True}
    assert _lengths(str(target), None, options) == (expected, context)


@pytest.mark.parametrize(
    ("prefill", "expected"), [(True, (None, 5, None)), (False, (512, 200, 10))]
)
def test_numbers_that_nobody_named(prefill: bool, expected: tuple[int | None, ...]) -> None:
    """Bug: first tokens of 8192 are timed as often as steps are, for an hour."""
    names = ("output_len", "num_iters", "warmup")
    options = dict.fromkeys((*names, "baseline", "plot", "context")) | {"prefill": prefill}
    _settle(options)
    assert tuple(options[name] for name in names) == expected


def test_a_warm_up_of_no_steps() -> None:
    """Bug: --warmup 0 counts as none named, and ten steps are left out."""
    names = ("output_len", "num_iters", "baseline", "plot", "context")
    options = dict.fromkeys(names) | {"prefill": False, "warmup": 0}
    _settle(options)
    assert options["warmup"] == 0


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--baseline"], [f"--baseline {OF_STEPS}plain decoding's first token is --draft none's"]),
        (["--plot", "x.svg"], [f"--plot {OF_STEPS}the table and --output-json have its numbers"]),
        (["--context", "64"], [f"--context {OF_STEPS}pass the prompt's length as --input-len"]),
        (["--warmup", "0"], [f"--warmup {OF_STEPS}one call goes before each case"]),
        (["--input-len", "9999"], ["9999 tokens"]),
        (["--input-len", "500", "--output-len", "99"], ["--input-len 500", "--output-len 99"]),
    ],
)
def test_refusals(bench: Bench, args: list[str], parts: list[str]) -> None:
    """Bug: an option that is of steps is ignored, or ends in a traceback; or is said to be of first
    tokens, or with another option's remedy."""
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


def test_a_request_that_the_context_ends(pair: tuple[Path, Path]) -> None:
    """Bug: an answer that is cut short is timed as if it were whole."""
    asked: dict[str, Any] = {"input_lens": (40,), "num_iters": 1, "seed": 0, "output_len": 50}
    with (
        Engine.from_pretrained(*pair, buckets=(1,), device="cpu", max_model_len=64) as engine,
        pytest.raises(ValueError, match=r"--output-len 50 after 40 tokens .* of 64 is full"),
    ):
        run_prefills(engine, NO_GPU, lambda line: None, **asked)


def test_first_tokens_of_a_batch_behind_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: it is the first prompt's first token that is told of a batch, or one answer's luck."""
    calls(monkeypatch, 100.0)
    nobody: Any = None
    monkeypatch.setattr(first_token, "simulated_length", lambda *args: 2.0)
    assert run_request(nobody, case(batch=2), 9) == {"request_first_p50_ms": 40.0}


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


def calls(monkeypatch: pytest.MonkeyPatch, *walls_ms: float) -> None:
    """Each of two prompts in one chunk: times that are all different, 9 tokens in 6 steps."""

    def timed_calls(*args: Any) -> Iterator[Any]:
        for wall_ms in walls_ms:
            parts = [
                RequestMetrics(
                    num_prompt_tokens=8,
                    num_output_tokens=9,
                    ttft_ms=first,
                    tokenize_ms=1.0 if first == 30 else 0.25,
                    queue_ms=2.0 if first == 30 else 6.0,
                    prefill_ms=prefill,
                    launch_ms=0.5,
                    decode_ms=60.0,
                    acceptance=Acceptance(3, [4, 2, 0, 0]),
                )
                for first, prefill in ((30.0, 20.0), (40.0, 35.0))
            ]
            yield wall_ms, [SimpleNamespace(metrics=metrics) for metrics in parts]

    monkeypatch.setattr(first_token, "timed_calls", timed_calls)
    monkeypatch.setattr(first_token, "num_chunks", lambda *args: 2)


def test_the_first_requests_of_a_batch(bench: Bench, tmp_path: Path) -> None:
    """Bug: of an engine for batches the first request is one alone."""
    stored = tmp_path / "x.json"
    assert bench("--bucket", "2", "--input-len", "3", "--output-json", str(stored)).exit_code == 0
    numbers = json.loads(stored.read_text())["numbers"]["none_torch"]
    assert numbers["first_request"]["num_requests"] == 2


def test_the_last_one_to_begin_is_told() -> None:
    """Bug: of an engine's very first requests the time is that of the first one that begins."""
    times = [(9.0, 1.0), (20.0, 3.0), (15.0, 2.0)]
    made = [SimpleNamespace(ttft_ms=a, ms_per_step=b, num_steps=int(b)) for a, b in times]
    config = SimpleNamespace(buckets=(3, 8))
    nobody: Any = SimpleNamespace(
        config=config,
        built=SimpleNamespace(target=SimpleNamespace(vocab_size=7)),
        generate=lambda ids, **asked: [SimpleNamespace(metrics=made[i]) for i in range(len(ids))],
    )
    found = first_requests(nobody, 4, 0)
    expected = {"num_requests": 3, "num_prompt_tokens": 4, "ttft_ms": 20.0}
    assert found == expected | {"step_mean_ms": 3.0, "num_steps": 3}


def test_the_table_of_first_tokens() -> None:
    """Bug: batch and input stand in each other's column, or another column has its neighbour's
    number; or a text's tokenising is in none."""
    one = dict.fromkeys(("ttft_p50_ms", "tokenize_p50_ms", "queue_p50_ms"), 1.5)
    keys = ("first_token_input_9", "first_token_input_9_batch_2", "first_request")
    shown = first_token_table({"none_torch": dict.fromkeys(keys, one)}, None)
    cells = {str(column.header): list(column.cells) for column in shown.columns}
    assert (cells["batch"], cells["input"]) == (["1", "2"], ["9", "9"])
    assert cells["tok+queue_ms"] == ["3.000"] * 2 and "request_ms" not in cells
    times = {"ttft": 9.0, "first": 4.0, "prefill": 7.0, "tokenize": 0.5, "queue": 1.0, "host": 3.0}
    times |= {"request_first": 11.0, "request": 123.0, "request_step": 5.0}
    numbers = {f"{name}_p50_ms": ms for name, ms in times.items()}
    numbers |= {"num_chunks": 6, "over_roofline_ratio": 2.5}
    shown = first_token_table({"none_torch": {keys[1]: numbers}}, None)
    cells = {str(column.header): next(iter(column.cells)) for column in shown.columns}
    assert cells == {
        "mode": "none_torch",
        "batch": "2",
        "input": "9",
        "p50_ms": "9.000",
        "first_ms": "4.000",
        "/roofline": "2.50",
        "prefill_ms": "7.000",
        "tok+queue_ms": "1.500",
        "host_ms": "3.000",
        "chunks": "6",
        "its first_ms": "11.000",
        "request_ms": "123.0",
    }


@pytest.mark.parametrize("output_len", [None, 9])
def test_the_line_of_a_case(monkeypatch: pytest.MonkeyPatch, output_len: int | None) -> None:
    """Bug: of a batch the line tells the first prompt's first token, which the table does not, or
    the input stands where the batch should."""
    calls(monkeypatch, 50.0)
    monkeypatch.setattr(first_token, "check_pool", lambda *args: None)
    monkeypatch.setattr(first_token, "first_requests", lambda *args: {"num_requests": 1})
    monkeypatch.setattr(first_token, "simulated_length", lambda *args: None)
    engine: Any = SimpleNamespace(config=SimpleNamespace(buckets=(2,)))
    asked: dict[str, Any] = {"input_lens": (8,), "num_iters": 1, "seed": 0}
    lines: list[str] = []
    found = run_prefills(engine, NO_GPU, lines.append, **asked, output_len=output_len)
    assert lines == ["batch   2 input      8  first token 50.000 ms  host 3.500 ms"]
    assert set(found) == {"first_request", "first_token_input_8_batch_2"}


def test_the_parts_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a batch's prefill is its first prompt's, whose first token others still wait behind; or
    the first token of all is taken for the last one's; or of the time before the batch's first
    forward the last prompt's is told, which has waited for others' tokenising."""
    calls(monkeypatch, 50.0, 40.0, 90.0)
    nobody: Any = None
    found = run_prefill(nobody, case(batch=2), NO_GPU)
    expected = {"ttft": 50.0, "first": 30.0, "prefill": 35.0, "host": 3.5}
    expected |= {"tokenize": 1.0, "queue": 2.0}
    assert {name: found[f"{name}_p50_ms"] for name in expected} == expected
    assert found["chunk_host_us"] == 1750


@pytest.mark.parametrize(
    ("acceptance", "wall_ms", "steps"), [(None, 100.0, 6), (2.0, 80.0, 4), (1.6, 90.0, 5)]
)
def test_luck_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, acceptance: float | None, wall_ms: float, steps: int
) -> None:
    """Bug: steps that simulated acceptance drew beyond its mean count twice instead of not; the
    first token, which is the prefill's, is a step's too."""
    calls(monkeypatch, 100.0)
    monkeypatch.setattr(first_token, "simulated_length", lambda *args: acceptance)
    nobody: Any = None
    found = run_request(nobody, case(), 9)
    assert found == {
        "request_p50_ms": wall_ms,
        "request_first_p50_ms": 40.0,
        "request_step_p50_ms": 10.0,
        "num_request_steps": steps,
    }


@pytest.mark.parametrize(("number", "length"), [(3, 2.5), (1, 1 + RATE)])
def test_steps_of_a_shorter_block(pair: tuple[Path, Path], number: int, length: float) -> None:
    """Bug: a whole request of --num-speculative-tokens 3 is told as half of what it takes: as many
    steps as blocks of 15 would need for it."""
    options = {"buckets": (1,), "device": "cpu", "num_speculative_tokens": number}
    with Engine.from_pretrained(*pair, **options, simulate_acceptance=2.5) as engine:
        assert simulated_length(engine, 1) == pytest.approx(length, rel=0.01)
        steps = run_request(engine, case(num_iters=1), 33)["num_request_steps"]
        assert steps == round(32 / length)


def test_the_roofline_of_attention(pair: tuple[Path, Path]) -> None:
    """Bug: of attention's two products one is counted, or the mask's upper half too; prompts of a
    batch see each other's keys; the head is multiplied with every row of a prompt; the drafter's
    context costs nothing."""
    target, draft = read_configs(*pair)
    config = SimpleNamespace(dtype="float32", draft_quantization="none")
    built: Any = SimpleNamespace(config=config, target=target, draft=draft)
    flops = [roofline_ms(built, n, 1, Rates(math.inf, 1e-9)) for n in (99, 100, 101)]
    of_a_key = 4 * target.q_size * target.num_hidden_layers  # multiply and add, scores and values
    assert flops[2] - 2 * flops[1] + flops[0] == pytest.approx(of_a_key)
    halves = 2 * roofline_ms(built, 50, 1, Rates(math.inf, 1e-9))  # a head more, no keys of others
    assert roofline_ms(built, 50, 2, Rates(math.inf, 1e-9)) == pytest.approx(halves)
    head = 2 * target.vocab_size * target.hidden_size
    assert halves - flops[1] == pytest.approx(head - 50 * 50 * of_a_key)
    assert isinstance(draft, DraftConfig)
    built.draft = None
    plain, model = roofline_ms(built, 100, 1, Rates(math.inf, 1e-9)), draft.model
    context = draft.num_taps * draft.tap_size + 2 * model.kv_size * model.num_hidden_layers
    assert flops[1] - plain == pytest.approx(2 * 100 * context * model.hidden_size)
