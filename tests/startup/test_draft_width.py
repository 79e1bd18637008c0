"""The default width of a block on experts: by what steps are measured to cost, and overruled."""

from __future__ import annotations

import itertools
import json
import threading
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from graphengine.api import Engine
from graphengine.cli.main import main
from graphengine.decode.metrics import DraftWidth
from graphengine.startup import draft_width
from graphengine.startup.draft_width import (
    TYPICAL_TOKENS,
    Guess,
    choose,
    expected_tokens,
    widths_of,
)
from tests.models.test_moe import CONFIGS, moe_target, token_ids
from tests.support.checkpoints import make_drafter, make_target
from tests.support.hybrids import make_hybrid

Curve = dict[int, float]
# A dense 8B: ms a step barely grow. Qwen3-30B-A3B by its bytes (targets: 1.36 .. 8.92 ms).
DENSE: Curve = {1: 3.9, 2: 4.5, 4: 4.5, 8: 4.55, 16: 4.6}
EXPERTS: Curve = {1: 1.36, 2: 2.4, 4: 3.84, 8: 6.1, 16: 9.25}


def test_expected_tokens() -> None:
    """Bug: the fit counts the bonus twice or not at all, or a cut block is fitted anew."""
    found = [expected_tokens(6.35, 16, rows) for rows in (16, 12, 8, 6, 4, 1)]
    assert found == pytest.approx([6.35, 5.86, 4.93, 4.21, 3.21, 1.0], abs=0.02)


def test_widths_of() -> None:
    """Bug: a drafter whose block is no power of two is never run whole."""
    assert [widths_of(rows) for rows in (2, 8, 10, 16)] == [
        [2],
        [2, 4, 8],
        [2, 4, 8, 10],
        [2, 4, 8, 16],
    ]


@pytest.mark.parametrize(
    ("curve", "mean", "rows", "is_below_plain"),
    [
        (DENSE, TYPICAL_TOKENS, 16, False),
        (DENSE, 2.0, 16, False),
        (EXPERTS, TYPICAL_TOKENS, 4, False),
        (EXPERTS, 8.5, 8, False),
        (EXPERTS, 2.0, 2, True),
        ({1: 1.0, 2: 1.5, 4: 1.5, 8: 1.5 * 4.93 / 3.21 * 1.02}, 4.93, 8, False),  # within SLACK
    ],
)
def test_choice(curve: Curve, mean: float, rows: int, is_below_plain: bool) -> None:
    """Bug: the cheapest step is taken for the fastest decoding, the whole block is left for what
    noise can be, or nobody hears that plain decoding is likely to win; or the tokens of the block
    that was chosen are told as the widest one's."""
    found = choose(8, curve, mean)
    assert found.rows == rows and found.num_draft_tokens == rows - 1
    assert found.is_below_plain == is_below_plain
    assert f"bucket 8 drafts {rows - 1} a step" in found.line()
    assert f"a block of {max(curve)} taken to yield {mean:.2f} tokens" in found.line()
    assert ("plain decoding" in found.line()) == is_below_plain
    assert found.to_json()[f"rows_{max(curve)}"]["step_ms"] == curve[max(curve)] * 1e3


def test_no_width_below_the_floor() -> None:
    """Bug: with --acceptance-floor 3 two rows are chosen, and every run warns; with 4 not the four
    that may reach it, or none with more than there are."""
    chosen = [choose(1, EXPERTS, 2.0, least).rows for least in (0.0, 2.0, 3.0, 4.0, 99.0)]
    assert chosen == [2, 2, 4, 4, 16]


def pair(directory: Path, block: int = 16) -> tuple[Path, Path]:
    target = moe_target(directory / "target", layers=3, **CONFIGS["untied-not-normalised"])
    return target, make_drafter(
        directory / "drafter", target, block_size=block, intermediate=96, seed=3
    )


def faked(monkeypatch: pytest.MonkeyPatch, curve: Curve) -> list[int]:
    """Steps cost `curve` whatever the batch is; returns the numbers of rows that are measured."""
    seen: list[int] = []

    def forward_seconds(pair: Any, num_rows: int) -> tuple[float, float]:
        seen.append(num_rows)
        return curve.get(num_rows, curve[max(curve)]), 0.0

    monkeypatch.setattr(draft_width, "forward_seconds", forward_seconds)
    return seen


def test_an_engine_drafts_what_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the choice reaches the config and not the buckets, or changes the text."""
    target, draft = pair(tmp_path)
    prompts = [token_ids(9, seed=1), token_ids(5, seed=2)]
    seen = faked(monkeypatch, EXPERTS)
    asked: dict[str, Any] = {"buckets": (1, 2), "max_model_len": 96}
    with Engine.from_pretrained(target, None, **asked) as engine:
        plain = engine.generate(prompts, max_new_tokens=20, ignore_eos=True)
    assert not seen
    with Engine.from_pretrained(target, draft, **asked) as engine:
        widths = engine.startup.draft_widths
        assert [type(width) for width in widths] == [DraftWidth] * 2
        assert sorted(seen) == [1, 2, 4, 8, 16, 32]
        # Two requests of w rows each cost what 2 w rows do.
        assert widths[1].step_s == {1: 2.4, 2: 3.84, 4: 6.1, 8: 9.25, 16: 9.25}
        assert engine.config.num_speculative_tokens == (3, 15)
        buckets = engine.built.loop.first.buckets
        assert [bucket.buffers.block for bucket in buckets.values()] == [4, 16]
        drafted = engine.generate(prompts, max_new_tokens=20, ignore_eos=True)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    seen.clear()
    with Engine.from_pretrained(target, draft, num_speculative_tokens=5, **asked) as engine:
        assert engine.config.num_speculative_tokens == (5, 5)
        assert not seen and not engine.startup.draft_widths


def unloaded(drafts: int, taps: tuple[int, ...] = (1,)) -> Any:
    """A pair as far as its widths are asked for."""
    own = SimpleNamespace(num_draft_tokens=drafts, taps=taps)
    config = SimpleNamespace(simulate_acceptance=None, buckets=(1,), acceptance_floor=0.0)
    target = SimpleNamespace(kv_pool=torch.empty(0))
    return SimpleNamespace(config=config, proposer=own, target=target)


def test_plain_decoding_drafts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the drafter's time is in plain decoding's too, and a block that loses to it is not told
    as such; or its times are told in another unit."""
    monkeypatch.setattr(draft_width, "forward_seconds", lambda pair, rows: (1.0, 5.0))
    (width,) = draft_width.measure_widths(unloaded(3))
    assert width.step_s == {1: 1.0, 2: 6.0, 4: 6.0}
    assert width.is_below_plain and "plain decoding" in width.line()
    assert "ms a step by rows 1: 1e+03, 2: 6e+03, 4: 6e+03;" in width.line()


def test_kernels_are_compiled_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: with empty caches a start on experts compiles what it measures one kernel after another:
    gpt-oss-20b's took 45 s where an 8B's took 24 (H200); or it compiles other numbers of rows than
    are measured."""
    ran, measured = list[tuple[int, str]](), list[int]()

    def parts(pair: Any, num_rows: int) -> Any:
        both = ((1, lambda carry, name=name: ran.append((num_rows, name))) for name in "hl")
        return list(both), [(1, lambda carry: ran.append((num_rows, "draft")))]

    def forward_seconds(pair: Any, num_rows: int) -> tuple[float, float]:
        assert {(num_rows, name) for name in ("h", "l", "draft")} <= set(ran)
        measured.append(num_rows)
        return 1.0, 1.0

    monkeypatch.setattr(draft_width, "_parts", parts)
    monkeypatch.setattr(draft_width, "run_kept", lambda work: False)
    monkeypatch.setattr(draft_width, "forward_seconds", forward_seconds)
    loaded = unloaded(3)
    loaded.config.buckets, loaded.config.compile = (1, 3), False
    loaded.target.kv_pool = SimpleNamespace(is_cuda=True)
    draft_width.measure_widths(loaded)
    assert sorted(measured) == [1, 2, 3, 4, 6, 12]
    assert sorted({rows for rows, _ in ran}) == sorted(measured) and len(ran) == 18


def test_segments_are_guessed_while_kernels_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the thread that compiles segments waits for kernels first, 9 of the 49 s that a start of
    35B-A3B took (H200); or a guess goes on behind them."""
    guessed = threading.Semaphore(0)

    def parts(pair: Any, num_rows: int) -> Any:
        return [(1, lambda carry: guessed.acquire(timeout=20) or pytest.fail("waited"))], []

    monkeypatch.setattr(draft_width, "_parts", parts)
    monkeypatch.setattr(draft_width, "run_kept", lambda work: False)
    monkeypatch.setattr(draft_width, "forward_seconds", lambda pair, rows: (1.0, 1.0))
    loaded = unloaded(3)
    loaded.config.compile, loaded.target.kv_pool = False, SimpleNamespace(is_cuda=True)
    (width,) = draft_width.measure_widths(
        loaded, None, partial(Guess, (), itertools.repeat(guessed.release))
    )
    assert width.rows == 4


def test_noise_only_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a measurement of few rows that something disturbed makes wider blocks look cheaper."""
    faked(monkeypatch, EXPERTS | {2: 4.5})
    (width,) = draft_width.measure_widths(unloaded(15))
    assert width.step_s == EXPERTS | {2: EXPERTS[4]}


def test_each_bucket_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: the log has one bucket's choice again for each of the others."""
    caplog.set_level("INFO")
    faked(monkeypatch, EXPERTS | {32: 30.0})
    loaded = unloaded(15)
    loaded.config.buckets = (1, 2)
    one, two = draft_width.measure_widths(loaded)
    assert (one.bucket, two.bucket) == (1, 2)
    assert caplog.messages == [one.line(), two.line()]


def test_a_start_heeds_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a start chooses a block that cannot reach --acceptance-floor, and every run warns."""
    faked(monkeypatch, EXPERTS)
    loaded = unloaded(15)
    loaded.config.acceptance_floor = 6.0
    (width,) = draft_width.measure_widths(loaded)
    assert width.rows == 8


@pytest.mark.parametrize(
    ("drafts", "taps", "mean"), [(15, (1,), TYPICAL_TOKENS), (3, (1,), 4.0), (15, (), 2.0)]
)
def test_a_block_yields_what_it_holds(drafts: int, taps: tuple[int, ...], mean: float) -> None:
    """Bug: a short block is taken to yield more tokens than it has, or look-up as many as a trained
    drafter."""
    assert draft_width.assumed_tokens(unloaded(drafts, taps)) == mean


def test_simulated_acceptance_is_the_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a bench that draws 15 tokens a step runs the width of a typical drafter, or counts the
    bytes of the drafter's whole block."""
    target, draft = pair(tmp_path)
    faked(monkeypatch, EXPERTS)
    for mean, number in ((15.0, 15), (2.0, 1)):
        with Engine.from_pretrained(
            target, draft, buckets=(1,), max_model_len=96, simulate_acceptance=mean
        ) as engine:
            assert engine.config.num_speculative_tokens == (number,)
            draft_config = engine.built.draft
            assert draft_config is not None and draft_config.num_draft_tokens == number


def test_dense_targets_measure_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: every start pays for a question that only experts raise."""
    target = make_target(tmp_path / "target")
    seen = faked(monkeypatch, EXPERTS)
    with Engine.from_pretrained(target, "ngram", buckets=(1,), max_model_len=96) as engine:
        assert engine.config.num_speculative_tokens == (15,)
    assert not seen


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_a_real_measurement(tmp_path: Path, kind: str) -> None:
    """Bug: a kind of layer cannot be run alone, or the curve falls where more is read."""
    if kind == "attention":
        target, draft = pair(tmp_path, block=10)
    else:
        target, draft = make_hybrid(tmp_path, model_type="qwen3_5_moe_text"), "ngram"
    with Engine.from_pretrained(target, draft, buckets=(2,), max_model_len=96) as engine:
        (width,) = engine.startup.draft_widths
        steps = list(dict(sorted(width.step_s.items())).values())
        print(width.line())
        assert set(width.step_s) == {1, *widths_of(10 if kind == "attention" else 16)}
        assert steps[0] > 0 and steps == sorted(steps)
        # On the CPU a row costs what its own experts do, so a whole block cannot be free.
        assert steps[-1] > 1.5 * steps[0]
        assert engine.config.num_speculative_tokens == (width.num_draft_tokens,)


def test_a_replay_s_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: five replays are told as one, the slowest counts, or slow layers are replayed 25 times
    for each number of rows, which a start waits for."""
    now, costs = 0.0, [9.0] * 2 + [1e-3] * 5 + [5e-4] * 5 + [3e-3] * 5 + [1e-4] * 10

    def run(*carry: object) -> None:
        nonlocal now
        now += costs.pop(0)

    graph = SimpleNamespace(handle=SimpleNamespace(replay=run))
    pool = SimpleNamespace(warming=nullcontext, capture=lambda steps, carry: (graph, ()))
    monkeypatch.setattr(draft_width, "GraphPool", lambda: pool)
    monkeypatch.setattr(draft_width, "time", SimpleNamespace(perf_counter=lambda: now))
    layer: Any = run
    assert draft_width._seconds(layer, torch.device("cpu"), True) == pytest.approx(5e-4)
    assert len(costs) == 10


def test_each_kind_counts_its_own_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: every layer of a hybrid is taken to cost what the first one does, or a kind counts
    once."""
    target = make_hybrid(tmp_path, model_type="qwen3_5_moe_text")
    with Engine.from_pretrained(target, None, buckets=(1,), max_model_len=96) as engine:
        pair = engine.built.loop.first.builder.pair
        mixers = [type(layer.mixer) for layer in pair.target.weights.layers]
        assert len(set(mixers)) == 2

        def seconds(run: Any, *_: Any) -> float:
            return (1.0, 100.0)[mixers.index(type(run)) > 0] if type(run) in mixers else 0.25

        monkeypatch.setattr(draft_width, "_layer_run", lambda config, layer, h_TD: layer.mixer)
        monkeypatch.setattr(draft_width, "_seconds", seconds)
        others = sum(mixer is not mixers[0] for mixer in mixers)
        wanted = 0.25 + (len(mixers) - others) + 100.0 * others
        assert draft_width.forward_seconds(pair, 4) == (wanted, 0.0)


def test_more_rows_than_tokens(tmp_path: Path) -> None:
    """Bug: a bucket whose rows outnumber the vocabulary ends the start in an IndexError."""
    target, draft = pair(tmp_path, block=10)
    with Engine.from_pretrained(target, draft, buckets=(60,), max_model_len=16) as engine:
        assert engine.built.target.vocab_size < 60 * 10
        assert engine.startup.draft_widths


def test_people_and_results_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a run drafts fewer tokens than the drafter has and nothing says so or why; or a result
    file breaks its schema on experts."""
    target, draft = pair(tmp_path)
    faked(monkeypatch, EXPERTS)
    models = [str(target), "--draft", str(draft), "--device", "cpu", "--bucket", "1"]
    done = CliRunner().invoke(
        main, ["run", *models, "--prompt", "a", "--raw", "--max-new-tokens", "4", "--json"]
    )
    assert done.exit_code == 0, done.output
    assert "bucket 1 drafts 3 a step: measured ms a step by rows" in done.stderr
    found = json.loads(done.stdout)
    width = found["startup"]["draft_width_bucket_1"]
    assert width["num_draft_tokens"] == 3 == found["config"]["num_speculative_tokens"][0]
    assert width["rows_16"] == pytest.approx(
        {"step_ms": 9250.0, "num_assumed_tokens": TYPICAL_TOKENS}
    )
    path = tmp_path / "bench.json"
    cases = ["--num-iters", "2", "--warmup", "0", "--input-len", "4", "--output-len", "12"]
    done = CliRunner().invoke(main, ["bench", *models, *cases, "--output-json", str(path)])
    assert done.exit_code == 0, done.output
    (stored,) = [x for k, x in json.loads(path.read_text())["numbers"].items() if "torch" in k]
    assert stored["startup"]["draft_width_bucket_1"] == width


@pytest.mark.gpu
def test_captured_on_a_gpu(tmp_path: Path) -> None:
    """Bug: a layer alone cannot be captured."""
    target, draft = pair(tmp_path)
    began = time.perf_counter()
    asked: dict[str, Any] = {"buckets": (1, 8), "max_model_len": 96, "device": "cuda"}
    with Engine.from_pretrained(target, draft, graph_mode="full", compile=False, **asked) as engine:
        print(f"{time.perf_counter() - began:.2f} s", *engine.startup.draft_widths, sep="\n")
        assert [width.bucket for width in engine.startup.draft_widths] == [1, 8]
        assert all(min(width.step_s.values()) > 0 for width in engine.startup.draft_widths)
