"""Run-time guards: what is judged (pure), and what the user is told.

No judgement may change a token; that requests leave speculation is test_fallback.py's business.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphengine.decode import guards, lane
from graphengine.decode.guards import AcceptanceWarning, SpeculationGuard, warn_caller
from tests.decode.test_engine import (
    BACKENDS,
    PROMPTS,
    Pair,
    force,
    ids_only,
    loop_of,
    run_to_end,
)
from tests.support.chains import insert_
from tests.support.checkpoints import make_drafter, make_target
from tests.support.guarded import judge_early, run_cli

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


def test_a_step_whose_requests_have_all_ended_is_none() -> None:
    """Bug: steps that are still in flight at an answer's end push what was seen out of the window,
    or bring a judgement forward."""
    judge = guard()
    feed(judge, guards.WINDOW, [3])
    assert feed(judge, guards.WINDOW, []) == 0
    assert judge.mean_acceptance_length == 4


def test_warning_comes_once_and_in_time() -> None:
    """Bug: a warning after a handful of unlucky steps, again with every step, or never; or one
    whose numbers, causes or remedy are others: a drafter is blamed for what a regex rules out."""
    judge = guard(floor=1.5)
    feed(judge, guards.FEWEST_TO_WARN - 1, [0])
    assert judge.warning() is None
    feed(judge, 1, [1])
    text = judge.warning()
    assert text == (
        "drafts are rarely accepted: 1.03 tokens a step (mean acceptance length, 1 is useless) "
        "over the last 32 steps, the floor is 1.5. The output is right, the speed is not. Likely "
        "causes: "
        "(1) the drafter belongs to another target (or to another fine-tune of it); "
        "(2) the prompts lack the chat template or the thinking mode that it was trained with (raw "
        "text); "
        "(3) rope theta or rope scaling of the drafter's config.json is not what it was trained "
        "with; "
        "(4) target_layer_ids are off (another index convention), or the slot convention is; "
        "(5) the drafter or the target is quantised (try draft_quantization none); "
        "(6) the context is far longer than the drafter's training; "
        "(7) the requests ask for what no draft says (a grammar, a penalty, a bias, a high "
        "temperature). "
        "`graphengine doctor` checks the pair; --acceptance-floor 0 (in Python acceptance_floor=0) "
        "turns this warning off"
    )
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
    [
        *(([0], 4.9, True), ([0], 5.0, False), ([0], 5.1, False)),
        *(([0, 1], 3.3, True), ([0, 1], 3.4, False)),
    ],
)
def test_gain(accepted: list[int], plain_ms: float, falls: bool) -> None:
    """Bug: the gain is upside down, counts without the bonus, or sums the batch's tokens; or equal
    speeds count as a loss."""
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
        assert reason == (
            f"speculation lost: {length:.2f} tokens in a step of 5.00 ms against one in "
            f"{plain_ms:.2f} ms (gain {length * plain_ms / 5:.2f})"
        )


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


# --- the warning ---


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


impatient = pytest.fixture(judge_early)


@pytest.mark.usefixtures("impatient")
def test_acceptance_warning(pair: Pair) -> None:
    """Bug: acceptance is lost silently, or warned about with every request."""
    with pair.engine(max_model_len=44, fallback=False) as engine:
        force(engine, pair, 0)
        said = r"1\.00 tokens a step .* floor is 1\.5"
        with pytest.warns(AcceptanceWarning, match=said) as caught:
            ids_only(engine, PROMPTS[:1], max_new_tokens=27)
        assert "tests" in Path(caught[0].filename).parts, "not a frame inside the package"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ids_only(engine, PROMPTS, max_new_tokens=27)
    with pair.engine(max_model_len=44, fallback=False) as engine:
        force(engine, pair, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ids_only(engine, PROMPTS, max_new_tokens=27)


@pytest.mark.usefixtures("impatient")
def test_a_warning_that_is_an_error_ends_no_other_s_request(pair: Pair) -> None:
    """Bug: under -W error the first warning ends all that is served, of whoever."""
    with pair.engine(max_model_len=44, fallback=False) as engine:
        force(engine, pair, 0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("error")
            handles = [engine.submit(p, max_new_tokens=27, ignore_eos=True) for p in PROMPTS[:2]]
            found = [handle.result().token_ids for handle in handles]
    assert found == [pair.plain(p, 27) for p in PROMPTS[:2]]
    assert [warning.category for warning in caught] == [AcceptanceWarning]


def test_a_caller_beside_the_package_is_named() -> None:
    """Bug: the warning of a script whose path begins like the package's, graphengine_demo.py beside
    it, is laid at the door of whatever called that, or of Python itself."""
    script = guards.PACKAGE.rstrip(os.sep) + "_demo.py"
    code = compile("warn('slow', kind)", script, "exec")
    with pytest.warns(AcceptanceWarning, match="slow") as caught:
        exec(code, {"warn": warn_caller, "kind": AcceptanceWarning})
    assert caught[0].filename == script


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
    assert "--acceptance-floor 0" in text
    assert found.stderr.count("warning: drafts are rarely accepted") == 1
    assert not re.search(r"(guards|engine|fallback)\.py", found.stderr)
    silent = run_cli(*options, "--acceptance-floor", 0)
    assert "rarely" not in silent.stderr + silent.stdout
    refused = run_cli(*options, "--acceptance-floor", 4.5)
    assert refused.exit_code == 2 and "--acceptance-floor 4.5: a mean" in refused.stderr


# --- what is judged ---


class Clock:
    """Stands in for `fallback.time`: the loop's own work takes no time, what `spend` wraps does."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def spend(self, seconds: float, then: Callable[..., Any] = lambda *args: None) -> Any:
        def spent(*args: Any) -> Any:
            self.now += seconds
            return then(*args)

        return spent


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_step_takes(pair: Pair, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a step's time leaves out its launch or its wait, which is over when it is asked for the
    second time, or takes in the loading of a batch, two launches, or the plain steps of other
    requests: speculation is judged by another number."""
    clock, real, come = Clock(), lane.Results.wait, set[int]()

    def wait(results: lane.Results) -> None:
        clock.now += 0 if results.number in come else 10
        come.add(results.number)
        real(results)

    monkeypatch.setattr(lane, "time", clock)
    with pair.engine(max_model_len=44, attention_backend=backend, buckets=(2,)) as engine:
        force(engine, pair, 0)
        loop = loop_of(engine)
        loop.fallback.prepare()
        monkeypatch.setattr(loop.first, "_write", clock.spend(1000, loop.first._write))
        monkeypatch.setattr(lane.Results, "wait", wait)
        insert_(loop.first.buckets[2], "verify.00", clock.spend(1))
        ids_only(engine, PROMPTS[:2], max_new_tokens=12)
        times = loop.fallback.guard._times_s
        assert len(times) >= 8 and set(times) == {11.0}  # not the last, with which none is launched
        first, other = (loop.submit(list(p), n, ()) for p, n in zip(PROMPTS, (5, 20), strict=False))
        loop.admit()
        loop.fallback.leave([first], "a test says so")
        counts: list[tuple[bool, int]] = []
        run_to_end(engine, lambda: counts.append((bool(loop.fallback.plain.running), len(times))))
        beside = [count for is_beside, count in counts if is_beside]
        assert len(beside) > 2 and len(set(beside)) == 1
        assert counts[-1][1] > beside[0] and set(times) == {11.0}
        assert first.num_plain_steps == 4 and other.num_plain_steps == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_behind_a_prompt_s_rows_are_not_timed(pair: Pair, backend: str) -> None:
    """Bug: while a long prompt comes in, each step waits on the device for some of its rows: the
    drafter seems to lose time, and whoever streams beside it leaves speculation for good."""
    options = {"max_model_len": 160, "buckets": (2,), "max_num_batched_tokens": 16}
    with pair.engine(attention_backend=backend, **options) as engine:
        loop, counts = loop_of(engine), list[tuple[bool, int]]()
        loop.submit(list(PROMPTS[0]), 120, ())
        for i, _ in enumerate(loop.run()):
            if i == 12:
                loop.submit(list(range(5, 125)), 2, ())
            counts.append((bool(loop.prefilling), len(loop.fallback.guard._times_s)))
        depth = loop.first.depth
        beside = [i for i, (is_beside, _) in enumerate(counts) if is_beside and i > 12]
        assert len(beside) >= 5
        seen = [count for _, count in counts]
        assert seen[beside[0]] == seen[beside[-1] + depth + 1] > 4
        assert seen[-1] > seen[beside[-1] + depth + 1] + 4


def test_rows_that_are_judged(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: rows of no running request count as blocks that accepted nothing, so that a good drafter
    is given up; or a step of two, one of whom has ended meanwhile, is taken for a step of one."""
    real, seen = SpeculationGuard.observe, []

    def observe(self: SpeculationGuard, num_accepted: list[int], size: int, seconds: Any) -> bool:
        seen.append((num_accepted, size))
        return real(self, num_accepted, size, seconds)

    monkeypatch.setattr(SpeculationGuard, "observe", observe)
    with pair.engine(max_model_len=44, buckets=(1, 2, 4), attention_backend="triton") as engine:
        force(engine, pair, 3)
        loop = loop_of(engine)
        for prompt, count in zip(PROMPTS, (21, 10, 10), strict=False):
            loop.submit(list(prompt), count, ())
        run_to_end(engine)
    # A step is launched before the one in which the two end is read.
    assert [entry for entry in seen if entry[0]] == [([3, 3, 3], 4)] * 3 + [([3], 4), ([3], 1)]
