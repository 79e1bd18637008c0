"""Run-time guards: what is judged (pure), and what the engine does about it.

No judgement may change a token: every engine test compares with transformers' plain continuation.
"""

from __future__ import annotations

import gc
import json
import random
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from graphengine import engine as engine_module
from graphengine import fallback, guards
from graphengine.api import Engine
from graphengine.cli import main
from graphengine.fallback import LAST_BLOCK, FallbackLoop, PlainLoop
from graphengine.guards import AcceptanceWarning, FallbackWarning, SpeculationGuard
from tests.checkpoints import edit_config, make_drafter, make_target
from tests.test_engine import (
    BACKENDS,
    BLOCK,
    PROMPTS,
    After,
    Pair,
    assert_idle,
    force,
    ids_only,
    loop_of,
    run_to_end,
    tokens,
)

# --- the judgement ---


def guard(floor: float = 1.5, may_fall_back: bool = True) -> SpeculationGuard:
    return SpeculationGuard(acceptance_floor=floor, may_fall_back=may_fall_back)


def feed(judge: SpeculationGuard, steps: int, accepted: list[int], seconds: float = 5e-3) -> int:
    """How often it was time to judge."""
    return sum(judge.observe(accepted, 1, seconds) for _ in range(steps))


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 15), max_size=4), max_size=200))
def test_running_mean_is_the_windows(steps: list[list[int]]) -> None:
    """Bug: the running sums drift from the window, or old steps never leave it."""
    judge = guard()
    for accepted in steps:
        judge.observe(accepted, 1, None)
    window = [a + 1 for accepted in [s for s in steps if s][-guards.WINDOW :] for a in accepted]
    expected = sum(window) / len(window) if window else 0.0
    assert judge.mean_acceptance_length == pytest.approx(expected)


def test_warning_comes_once_and_in_time() -> None:
    """Bug: a warning after a handful of unlucky steps, again with every step, or never."""
    judge = guard(floor=1.5)
    feed(judge, guards.FEWEST_TO_WARN - 1, [0])
    assert judge.warning() is None
    feed(judge, 1, [1])
    text = judge.warning()
    assert text is not None
    assert "1.03 tokens a step" in text and "over the last 32 steps, the floor is 1.5" in text
    for cause in ("another target", "chat template", "rope theta", "target_layer_ids", "quantised"):
        assert cause in text
    feed(judge, 100, [0])
    assert judge.warning() is None


@pytest.mark.parametrize(("floor", "accepted"), [(0.0, 0), (1.5, 1), (2.0, 1)])
def test_no_warning_at_or_above_the_floor(floor: float, accepted: int) -> None:
    """Bug: the floor itself warns, or 0 does not turn the warning off."""
    judge = guard(floor=floor)
    feed(judge, 200, [accepted, accepted])
    assert judge.warning() is None


@pytest.mark.parametrize(
    ("accepted", "plain_ms", "falls"),
    [([0], 4.9, True), ([0], 5.1, False), ([0, 1], 3.3, True), ([0, 1], 3.4, False)],
)
def test_gain(accepted: list[int], plain_ms: float, falls: bool) -> None:
    """Bug: the gain is upside down, counts without the bonus, or sums the batch's tokens."""
    judge = guard()
    assert feed(judge, guards.WINDOW - 1, accepted) == 3
    assert not judge.needs_plain_time(1), "too few blocks to judge"
    feed(judge, 1, accepted)
    assert judge.needs_plain_time(1) and not judge.needs_plain_time(8)
    assert judge.verdict(1) is None, "nothing was measured yet"
    judge.plain_step_s[1] = plain_ms / 1e3
    assert not judge.needs_plain_time(1)
    reason = judge.verdict(1)
    assert (reason is not None) == falls
    if reason is not None:
        length = 1 + sum(accepted) / len(accepted)
        assert f"{length:.2f} tokens in a step of 5.00 ms against one in {plain_ms:.2f}" in reason


def test_good_drafters_are_never_measured() -> None:
    """Bug: a working drafter pays for plain steps, or is given up because of a slow consumer."""
    judge = guard()
    feed(judge, 200, [1], seconds=1e3)
    assert not judge.needs_plain_time(1)
    judge.plain_step_s[1] = 1e-6
    assert judge.verdict(1) is None


def test_one_slow_step_decides_nothing() -> None:
    """Bug: a mean instead of a median: one page fault or one compilation ends speculation."""
    judge = guard()
    feed(judge, guards.WINDOW - 1, [0])
    feed(judge, 1, [0], seconds=1e3)
    judge.plain_step_s[1] = 5.1e-3
    assert judge.verdict(1) is None


def test_times_of_another_bucket_do_not_count() -> None:
    """Bug: a step of eight requests is compared with a plain step of one."""
    judge = guard()
    feed(judge, guards.WINDOW, [0])
    judge.plain_step_s = {1: 1e-3, 8: 1e-3}
    assert judge.verdict(1) is not None and judge.verdict(8) is None
    judge.observe([0] * 8, 8, 9e-3)
    assert judge.verdict(8) is None and judge.verdict(1) is None, "one time is too few"


# --- the engine ---


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A pair of 48 positions."""
    return Pair(tmp_path_factory.mktemp("small"), max_positions=48)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judges after 8 blocks: the truth known to the tests is short."""
    for module, name, value in (
        (guards, "WINDOW", 8),
        (guards, "FEWEST_TIMES", 3),
        (guards, "JUDGE_EVERY", 4),
        (guards, "FEWEST_TO_WARN", 8),
        (fallback, "WINDOW", 8),
    ):
        monkeypatch.setattr(module, name, value)


def plain_takes(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[int]:
    """Plain steps run for real, then are said to have taken `seconds`; one entry a measurement."""
    real, calls = PlainLoop.time_step, []

    def time_step(self: PlainLoop, requests: list[Any]) -> float:
        assert real(self, requests) > 0
        calls.append(len(requests))
        return seconds

    monkeypatch.setattr(PlainLoop, "time_step", time_step)
    return calls


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_last_block_in_plain_decode(small: Pair, backend: str, page_size: int) -> None:
    """Bug: the last positions are refused, drafted beyond, or decoded from wrong positions, pages
    or anchors after the hand-over; or plain steps count as blocks that accepted nothing."""
    options = {"page_size": page_size, "attention_backend": backend}
    with small.engine(
        max_model_len=None, finish_in_plain_decode=True, buckets=(1, 2, 4), **options
    ) as engine:
        assert engine.config.max_model_len == 48
        assert engine.config.speculation_limit == 48 - BLOCK
        num_plain: list[int] = []
        for accepted in range(BLOCK):
            force(engine, small, accepted)
            results = engine.generate(PROMPTS[:4], max_new_tokens=99, ignore_eos=True)
            for prompt, result in zip(PROMPTS, results, strict=False):
                assert result.token_ids == small.plain(prompt, 48 - len(prompt))
                assert result.finish_reason == "length"
                metrics = result.metrics
                num_plain.append(metrics.num_plain_steps)
                reason = LAST_BLOCK if num_plain[-1] else None
                assert metrics.fallback_reason == reason
                assert metrics.acceptance.steps_by_accepted[accepted] == (
                    metrics.num_steps - metrics.num_plain_steps
                )
            assert_idle(engine)
        # A last block that just fits leaves nothing to do; one may be in flight past the limit.
        assert max(num_plain) in (BLOCK - 1, BLOCK - 2) and 0 in num_plain


def test_without_the_option_nothing_changes(small: Pair) -> None:
    """Bug: the longer context is given out unasked, or the refusal does not name the option."""
    with small.engine(max_model_len=None) as engine:
        assert engine.config.max_model_len == 44
        force(engine, small, 2)
        (result,) = engine.generate(PROMPTS[0], max_new_tokens=99, ignore_eos=True)
        assert result.token_ids == small.plain(PROMPTS[0], 41)
        assert result.metrics.fallback_reason is None and loop_of(engine).plain is None
    with pytest.raises(ValueError, match=r"between 2 and 44 .* --finish-in-plain-decode all"):
        small.engine(max_model_len=48)
    with small.engine(draft=False, max_model_len=48, finish_in_plain_decode=True) as engine:
        assert ids_only(engine, PROMPTS[:1], max_new_tokens=99) == [small.plain(PROMPTS[0], 45)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_drafter_with_a_shorter_context(tmp_path: Path, backend: str) -> None:
    """Bug: a target may not use its own context because its drafter's is shorter; or a prompt that
    is longer than the drafter's context is drafted, or reads past the drafter's rope table."""
    short = Pair(tmp_path, max_positions=64)
    edit_config(short.drafter, lambda values: values | {"max_position_embeddings": 14})
    with short.engine(
        max_model_len=None, finish_in_plain_decode=True, attention_backend=backend
    ) as engine:
        assert engine.config.max_model_len == 64 and engine.config.speculation_limit == 10
        rng = random.Random(0)
        force(engine, short, lambda request, step: rng.randrange(BLOCK))
        results = engine.generate(PROMPTS, max_new_tokens=40, ignore_eos=True)
        assert tokens(results) == [short.plain(p, 40) for p in PROMPTS]
        steps = [r.metrics.acceptance.num_steps for r in results]
        assert [n > 0 for n in steps] == [len(p) <= 10 for p in PROMPTS]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("backend", BACKENDS)
def test_lost_speculation_falls_back(
    pair: Pair, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a losing drafter is kept for ever; a step is lost, doubled or read from a stale row at
    the hand-over; measuring a plain step changes what the requests decode."""
    calls = plain_takes(monkeypatch, 1e-9)
    with pair.engine(max_model_len=44, attention_backend=backend, buckets=(1, 4)) as engine:
        force(engine, pair, 0)
        for prompts in (PROMPTS[:1], PROMPTS[:4], PROMPTS):
            results = engine.generate(prompts, max_new_tokens=27, ignore_eos=True)
            assert tokens(results) == [pair.plain(p, 27) for p in prompts]
            for result in results:
                metrics = result.metrics
                assert "speculation lost: 1.00 tokens" in (metrics.fallback_reason or "")
                assert metrics.num_plain_steps + metrics.acceptance.num_steps == 26
                assert 8 <= metrics.acceptance.num_steps <= 8 + 2 * 4
                assert metrics.num_steps == 26
            assert_idle(engine)
    assert calls == [1, 4], "a bucket is measured once"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("backend", BACKENDS)
def test_measuring_alone_changes_nothing(
    pair: Pair, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the plain steps that were only measured leave K/V, positions or anchors behind."""
    calls = plain_takes(monkeypatch, 1e9)
    with pair.engine(max_model_len=44, attention_backend=backend) as engine:
        rng = random.Random(1)
        force(engine, pair, lambda request, step: rng.choice([0, 0, 0, 1, 3]))
        for prompts in (PROMPTS[:1], PROMPTS[:2], PROMPTS):
            results = engine.generate(prompts, max_new_tokens=27, ignore_eos=True)
            assert tokens(results) == [pair.plain(p, 27) for p in prompts]
            assert all(r.metrics.fallback_reason is None for r in results)
    assert calls


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("backend", BACKENDS)
def test_drafted_and_plain_side_by_side(
    pair: Pair, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a request that decodes plainly holds up, mixes with or takes a row from one that drafts;
    a cancelled one keeps its pages."""
    plain_takes(monkeypatch, 1e-9)
    with pair.engine(max_model_len=44, attention_backend=backend, buckets=(1, 2, 4)) as engine:
        loop = loop_of(engine)
        accepted = {0: 0, 1: 0, 2: 3, 3: 3, 4: 3, 5: 1}
        first = [loop.submit(list(p), 27, frozenset()) for p in PROMPTS[:2]]
        base = first[0].request_id
        force(engine, pair, lambda request, step: accepted[request.request_id - base])
        late: list[Any] = []

        def join() -> None:
            if not late and loop.plain is not None and loop.plain.running:
                late.extend(loop.submit(list(p), 27, frozenset()) for p in PROMPTS[2:5])
            plain = loop.plain
            if late and late[1].output_ids and plain is not None and plain.running:
                loop.cancel(first[0])

        run_to_end(engine, join)
        assert len(late) == 3
        assert [r.fallback_reason is not None for r in first] == [True, True]
        assert first[0].finish_reason == "cancelled"
        for request in [first[1], *late]:
            assert request.output_ids == pair.plain(request.prompt_ids, 27)
        assert all(request.fallback_reason is None for request in late)
        assert_idle(engine)


@pytest.mark.usefixtures("impatient")
def test_good_drafts_never_measure(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: every request pays for plain steps, or an option does not turn the guard off."""
    calls = plain_takes(monkeypatch, 1e-9)
    with pair.engine(max_model_len=44) as engine:
        force(engine, pair, 1)
        ids_only(engine, PROMPTS, max_new_tokens=27)
    with pair.engine(max_model_len=44, fallback=False, acceptance_floor=0.0) as engine:
        assert loop_of(engine).guard is None
        force(engine, pair, 0)
        assert ids_only(engine, PROMPTS, max_new_tokens=27) == [pair.plain(p, 27) for p in PROMPTS]
    with pair.engine(max_model_len=44, simulate_acceptance=1.0) as engine:
        assert loop_of(engine).guard is None, "drawn acceptance says nothing"
    assert not calls


def test_plain_decode_is_built_when_needed(pair: Pair) -> None:
    """Bug: every start-up pays for a second set of graphs, or asking for it does nothing."""
    with pair.engine() as engine:
        assert loop_of(engine).plain is None
    with pair.engine(prepare_plain_decode=True) as engine:
        assert list(loop_of(engine).plain.buckets) == [1, 2, 4]
    with pair.engine(draft=False, prepare_plain_decode=True) as engine:
        assert not isinstance(loop_of(engine), FallbackLoop), "it decodes plainly itself"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_no_memory_for_plain_decode(
    pair: Pair, small: Pair, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """Bug: building what only makes a request faster ends it; or a request that cannot go on
    otherwise hangs, or takes its neighbours along."""

    def build() -> Any:
        raise kind("CUDA out of memory. Tried to allocate 1 GiB")

    with pair.engine(max_model_len=44) as engine:
        monkeypatch.setattr(loop_of(engine), "_build_plain", build)
        force(engine, pair, 0)
        with pytest.warns(FallbackWarning, match=r"no memory to build .*CUDA out of memory\)"):
            found = ids_only(engine, PROMPTS[:2], max_new_tokens=27)
        assert found == [pair.plain(p, 27) for p in PROMPTS[:2]]
    with small.engine(max_model_len=48, finish_in_plain_decode=True) as engine:
        monkeypatch.setattr(loop_of(engine), "_build_plain", build)
        force(engine, small, 1)
        prompts = [PROMPTS[1], PROMPTS[0]]
        with pytest.warns(FallbackWarning):
            long, short = engine.generate(prompts, max_new_tokens=31, ignore_eos=True)
        assert long.finish_reason == "error" and "memory lacks to decode plainly" in (
            long.error or ""
        )
        assert long.token_ids == small.plain(PROMPTS[1], len(long.token_ids))
        assert len(long.token_ids) >= 48 - BLOCK - len(PROMPTS[1])
        assert short.token_ids == small.plain(PROMPTS[0], 31) and short.finish_reason == "length"
        assert_idle(engine)


@pytest.mark.usefixtures("impatient")
def test_acceptance_warning(pair: Pair) -> None:
    """Bug: acceptance is lost silently, or warned about with every request."""
    with pair.engine(max_model_len=44, fallback=False) as engine:
        force(engine, pair, 0)
        said = r"1\.00 tokens a step .* floor is 1\.5"
        with pytest.warns(AcceptanceWarning, match=said) as caught:
            ids_only(engine, PROMPTS[:1], max_new_tokens=27)
        assert Path(caught[0].filename).name == "api.py", "not a frame inside the loop"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ids_only(engine, PROMPTS, max_new_tokens=27)
    with pair.engine(max_model_len=44, fallback=False) as engine:
        force(engine, pair, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ids_only(engine, PROMPTS, max_new_tokens=27)


# --- logits that are not finite ---


@pytest.fixture(params=BACKENDS)
def engine(pair: Pair, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with pair.engine(attention_backend=request.param, max_model_len=44) as engine:
        yield engine
        assert_idle(engine)


def embedding(engine: Engine) -> torch.Tensor:
    return engine.built.loop._prefill.target.weights.embed_VD


def first_place(row: list[int], others: list[list[int]], begin: int) -> int:
    """A place in `row` whose token comes up for the first time there and nowhere in `others`."""
    taken = {token for other in others for token in other}
    return next(i for i in range(begin, len(row)) if row[i] not in taken and row[i] not in row[:i])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("accepted", [0, 1, BLOCK - 1])
def test_not_finite_ends_one_request(
    engine: Engine, pair: Pair, value: float, accepted: int
) -> None:
    """Bug: a NaN ends the engine or its neighbours, comes out as token 0, or goes unnoticed."""
    prompts = PROMPTS[:4]
    plain = [pair.plain(p, 24) for p in prompts]
    others = [*prompts, plain[0], plain[2], plain[3]]
    place = first_place(plain[1], others, 5)
    table, token = embedding(engine), plain[1][place]
    kept = table[token].clone()
    table[token] = value  # the rows of this token, and all behind them, are not finite
    force(engine, pair, accepted)
    results = engine.generate(prompts, max_new_tokens=24, ignore_eos=True)
    assert [r.finish_reason for r in results] == ["length", "error", "length", "length"]
    # Masked keys count with weight 0, and 0 * NaN is NaN: rows before it in its block fall too.
    broken, count = results[1], len(results[1].token_ids)
    assert place + 1 - BLOCK < count <= place + 1
    assert [r.token_ids for r in results] == [plain[0], plain[1][:count], *plain[2:]]
    position = len(prompts[1]) + count
    assert f"logits for position {position} hold a NaN or an infinity" in (broken.error or "")
    assert [r.error for r in results if r.finish_reason == "length"] == [None] * 3
    table[token] = kept
    # The pages that hold NaN belong to others now.
    assert ids_only(engine, prompts, max_new_tokens=24) == plain


def test_not_finite_in_the_prompt(engine: Engine, pair: Pair) -> None:
    """Bug: the first token is the prefill's, and nobody looks at its logits."""
    table = embedding(engine)
    kept = table[400].clone()
    table[400] = float("nan")
    for prompts in ([[9, 400, 8]], [[9, 400, 8], PROMPTS[0]]):
        last = [c.result for c in engine.stream_many(prompts) if c.index == 0][-1]
        assert last is not None and last.finish_reason == "error" and last.token_ids == []
        assert last.text == "" and "position 3" in (last.error or "")
        assert last.metrics.num_output_tokens == 0 and last.metrics.tokens_per_s == 0
    bad, good = engine.generate([[400], PROMPTS[0]], max_new_tokens=9, ignore_eos=True)
    assert bad.finish_reason == "error" and good.token_ids == pair.plain(PROMPTS[0], 9)
    table[400] = kept


def test_broken_drafter_costs_acceptance_alone(engine: Engine, pair: Pair) -> None:
    """Bug: a drafter that gives NaN drafts row -1 of the embedding, or ends the request."""
    drafter = engine.built.loop._prefill.drafter
    assert drafter is not None
    drafter.weights.norm_D.fill_(float("nan"))
    results = engine.generate(PROMPTS, max_new_tokens=20, ignore_eos=True)
    assert tokens(results) == [pair.plain(p, 20) for p in PROMPTS]


def test_not_finite_without_a_drafter(pair: Pair) -> None:
    """Bug: plain decoding has a check of its own, or none."""
    plain = pair.plain(PROMPTS[0], 24)
    place = first_place(plain, PROMPTS[:1], 4)
    with pair.engine(draft=False) as engine:
        embedding(engine)[plain[place]] = float("nan")
        (result,) = engine.generate(PROMPTS[0], max_new_tokens=24, ignore_eos=True)
        assert result.token_ids == plain[: place + 1] and result.finish_reason == "error"


def run_cli(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["run", *map(str, arguments)])


def test_command_says_what_failed(tmp_path: Path) -> None:
    """Bug: an answer that broke off looks like a short answer, the exit code says all went well,
    or --quiet hides why it does not."""
    target = make_target(tmp_path / "target", max_positions=128)
    path = target / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, path, metadata={"format": "pt"})
    found = run_cli(target, "--draft", "none", "--prompt", "hello", "--bucket", "1", "--json")
    assert found.exit_code == 1, found.output
    (result,) = json.loads(found.stdout)["results"]
    assert result["finish_reason"] == "error" and "a NaN or an infinity" in result["error"]
    assert "warning: prompt 1 failed: the target's logits for position" in found.stderr
    quiet = run_cli(target, "--draft", "none", "--prompt", "hello", "--bucket", "1", "--quiet")
    assert quiet.exit_code == 1 and quiet.stdout.strip() == ""
    assert quiet.stderr.startswith("warning: prompt 1 failed: ") and quiet.stderr.count("\n") == 1


def test_command_warns(tmp_path: Path) -> None:
    """Bug: the warning shows as a line of source code, ends up in the text, or nowhere."""
    target = make_target(tmp_path / "target", max_positions=256)
    drafter = make_drafter(tmp_path / "drafter", target)
    options = [target, "--draft", drafter, "--prompt", "hello", "--bucket", 1, "--ignore-eos"]
    options += ["--max-new-tokens", 100, "--no-fallback"]
    found = run_cli(*options, "--json")
    assert found.exit_code == 0, found.output
    (text,) = json.loads(found.stdout)["warnings"]
    assert text.startswith("drafts are rarely accepted: 1.")
    assert found.stderr.count("warning: drafts are rarely accepted") == 1
    assert not re.search(r"(guards|engine|fallback)\.py", found.stderr)
    silent = run_cli(*options, "--acceptance-floor", 0)
    assert "rarely" not in silent.stderr + silent.stdout
    refused = run_cli(*options, "--acceptance-floor", 4.5)
    assert refused.exit_code == 2 and "--acceptance-floor 4.5: a mean" in refused.stderr


# --- exceptions, interrupts, lifetime ---


def step_functions(engine: Engine) -> dict[str, tuple[Any, str]]:
    """Where an exception can come from: (object, attribute) by name."""
    loop = loop_of(engine)
    return {
        "submit": (loop, "submit"),
        "allocate": (loop.allocator, "allocate"),
        "load": (loop, "_load"),
        "wait": (loop, "wait"),
        "judge": (loop, "_judge"),
        "retire": (loop, "_retire"),
        "free": (loop.allocator, "free"),
        "advance": (engine_module.Request, "advance"),
        "accept": (sys.modules["graphengine.forward"], "accept_and_advance_"),
    }


@pytest.mark.parametrize(
    "where", ["submit", "allocate", "load", "wait", "judge", "retire", "free", "advance", "accept"]
)
@pytest.mark.parametrize("after", [0, 1])
def test_exception_anywhere(
    engine: Engine, pair: Pair, where: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: after an error in one phase a result buffer, a page or a row is lost, and the next
    generation fails or decodes something else."""
    owner, name = step_functions(engine)[where]
    real, calls = getattr(owner, name), []

    def explode(*args: Any, **options: Any) -> Any:
        calls.append(where)
        if len(calls) == after + 1:
            raise ZeroDivisionError(where)
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, explode)
        with pytest.raises(ZeroDivisionError, match=where):
            engine.generate(PROMPTS, max_new_tokens=9, ignore_eos=True)
    assert_idle(engine)
    assert ids_only(engine, PROMPTS, max_new_tokens=9) == [pair.plain(p, 9) for p in PROMPTS]


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line run in the engine's own files, as Ctrl-C does."""

    FILES = (
        *("engine.py", "fallback.py", "rows.py", "kvcache.py"),
        *("request.py", "guards.py", "api.py"),
    )

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        return self.trace if "graphengine" in name and name.endswith(self.FILES) else None

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.trace


def lines_run(run: Callable[[], object]) -> int:
    """How many lines `run` executes in the engine's files."""
    counter = Interrupt(-1)
    sys.settrace(counter)
    try:
        run()
    finally:
        sys.settrace(None)
    return -1 - counter.left


def test_ctrl_c_between_any_two_lines(engine: Engine, pair: Pair) -> None:
    """Bug: an interrupt between two lines, where no exception was foreseen (a page taken but not
    yet owned, a result buffer popped but not yet in flight), leaves the engine unusable."""
    prompts = PROMPTS[:3]
    plain = [pair.plain(p, 5) for p in prompts]

    def run() -> list[list[int]]:
        return ids_only(engine, prompts, max_new_tokens=5)

    total = lines_run(run)
    assert total > 300
    rng = random.Random(0)
    interrupted = 0
    for line in rng.sample(range(1, total), 36):
        sys.settrace(Interrupt(line))
        try:
            run()
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        assert run() == plain, f"after an interrupt at line {line} of {total}"
        assert_idle(engine)
    assert interrupted > 30


@pytest.mark.usefixtures("impatient")
def test_ctrl_c_at_the_hand_over(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: an interrupt while a request is between two loops, or while one of the two is reset,
    leaves a request or its pages in the other."""
    plain_takes(monkeypatch, 1e-9)
    prompts = PROMPTS[:3]
    plain = [pair.plain(p, 14) for p in prompts]
    with pair.engine(max_model_len=44, buckets=(4,), prepare_plain_decode=True) as engine:
        force(engine, pair, 0)

        def run() -> list[list[int]]:
            results = engine.generate(prompts, max_new_tokens=14, ignore_eos=True)
            assert all(result.metrics.num_plain_steps for result in results)
            return tokens(results)

        run()  # plain steps are measured once
        total = lines_run(run)
        interrupted = 0
        for line in random.Random(5).sample(range(1, total), 20):
            sys.settrace(Interrupt(line))
            try:
                run()
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                sys.settrace(None)
            assert run() == plain, f"after an interrupt at line {line} of {total}"
            assert_idle(engine)
        assert interrupted > 15


def test_close_frees_everything(pair: Pair) -> None:
    """Bug: the pools of a closed engine live on in a frame, a closure or a cycle until some
    collection, and the next engine finds no memory."""
    engine = pair.engine(prepare_plain_decode=True)
    ids_only(engine, PROMPTS[:1], max_new_tokens=5)
    prefill = loop_of(engine)._prefill
    pools = [weakref.ref(prefill.target.kv_pool), weakref.ref(prefill.drafter.kv_pool)]
    del prefill
    gc.collect()
    gc.disable()
    try:
        engine.close()
        assert [pool() for pool in pools] == [None, None]
    finally:
        gc.enable()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("where", ["verify", "build", "time_step"])
def test_exception_in_plain_decode(pair: Pair, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: what the second loop holds is forgotten when the first is reset."""
    plain_takes(monkeypatch, 1e-9)
    with pair.engine(max_model_len=44, buckets=(4,)) as engine:
        loop = loop_of(engine)
        force(engine, pair, 0)
        calls: list[int] = []

        def explode(*args: Any) -> Any:
            calls.append(1)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            if where == "build":
                patch.setattr(loop, "_build_plain", explode)
            elif where == "time_step":
                patch.setattr(PlainLoop, "time_step", explode)
            else:
                loop.prepare_plain_decode()
                bucket = loop.plain.buckets[4]
                broken = replace(bucket, verify=After(bucket.verify, explode))
                patch.setitem(loop.plain._buckets, 4, broken)
                patch.setattr(PlainLoop, "time_step", lambda self, requests: 1e-9)
            with pytest.raises(KeyboardInterrupt):
                engine.generate(PROMPTS, max_new_tokens=27, ignore_eos=True)
        assert calls
        assert_idle(engine)
        results = engine.generate(PROMPTS, max_new_tokens=27, ignore_eos=True)
        assert tokens(results) == [pair.plain(p, 27) for p in PROMPTS]
        assert all(r.metrics.num_plain_steps for r in results)


def test_closed_under_a_stream(pair: Pair) -> None:
    """Bug: a stream whose engine was closed ends without a word, as if the answer were complete."""
    engine = pair.engine()
    stream = engine.stream(PROMPTS[0], max_new_tokens=30, ignore_eos=True)
    next(stream)
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="this engine is closed; make a new one"):
        list(stream)
    for use in (lambda: engine.generate([1]), lambda: engine.stream([1]), lambda: engine.config):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    with pytest.raises(RuntimeError, match="closed"), engine:
        engine.generate([1])


def test_failed_device_closes_the_engine(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: after a CUDA error the clean-up's own error hides the first, or the engine pretends to
    be usable."""
    engine = pair.engine()
    stream = engine.stream(PROMPTS[0], max_new_tokens=30, ignore_eos=True)
    next(stream)

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    def explode() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(loop_of(engine), "reset", fail)
    monkeypatch.setattr(loop_of(engine), "collect", explode)
    with pytest.raises(ZeroDivisionError):
        list(stream)
    with pytest.raises(RuntimeError, match=r"closed because .*illegal memory access .*new process"):
        engine.generate(PROMPTS[0])
    engine.close()
