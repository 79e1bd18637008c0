"""tools/measure_requests.py on the bundled pair: what does not depend on a clock, and what a visit
to a GPU must not lose."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphengine.api import Engine
from graphengine.decode.sampling import Sampling
from graphengine.measure.bench import TimedStep
from graphengine.profiles import result_schema
from tools import (
    measure_requests,
    request_hits,
    request_joins,
    request_parts,
)
from tools.request_hits import Trace, compare
from tools.request_parts import Bar

SMALL = {
    "--rounds": 2,
    "--steps": 4,
    "--repeats": 1,
    "--turn-tokens": 360,
    "--turns": 3,
    "--answer-tokens": 8,
    "--newcomer-tokens": 600,
    "--hit-tokens": 100,
    "--busy-steps": 8,
    "--max-num-batched-tokens": 128,
    "--max-model-len": 1400,
}
SIZES = [str(word) for pair in SMALL.items() for word in pair]


def measured(
    capsys: pytest.CaptureFixture[str], code: int, *arguments: str
) -> tuple[dict[str, Any], str]:
    assert measure_requests.main([*SIZES, *arguments]) == code
    said = capsys.readouterr().out
    return json.loads(said.splitlines()[-1], parse_constant=pytest.fail), said


@pytest.mark.slow
def test_every_part_on_the_bundled_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: a part fails after the weights are made, or tells another number than its name says."""
    out = tmp_path / "requests.json"
    result, said = measured(capsys, 0, "--baseline-engine", "--out", str(out))
    stored = json.loads(out.read_text())
    assert result_schema.validate(stored) == []
    assert (stored["numbers"], stored["config"]) == (result["numbers"], result["config"])
    numbers, bars = result["numbers"], result["config"]["bars"]
    assert result["config"]["problems"] == {}
    assert "/" not in json.dumps(result["config"]), "a machine's paths"
    options = {k: row["num_steps"] for k, row in numbers["options"].items() if k != "wall_s"}
    assert len(options) == 12 and set(options.values()) == {8}
    assert numbers["options"]["greedy"]["over_greedy_ratio"] == 1
    assert numbers["options"]["greedy"]["host_p50_ms"] > 0
    turn, chat = numbers["turns"]["second_turn"], numbers["turns"]["chat_from_360"]
    assert turn["num_cached_tokens"] in (359, 360)  # its last token may have been a draft
    assert chat["num_turns"] == 3 and chat["num_repeated_tokens"] == 368 + 416
    assert chat["cached_pages_fraction"] == 1
    for row, found in numbers["texts"].items():
        if row != "wall_s":
            assert 0 < found["encode_ms"] < found["first_token_ms"]
            assert 0.9 < found["num_tokens"] / int(row.removeprefix("text_")) < 3
    assert list(numbers["texts"])[:2] == ["text_32", "text_128"]
    for row in ("budget_512", "budget_128"):
        assert numbers["join"][row]["num_joining_gaps"] > 0
    assert numbers["join"]["budget_512"]["num_quiet_gaps"] > 40
    for row, num_cached in (("again", 99), ("behind_another", 75)):
        found = numbers["hit"][row]
        assert found["num_cached_tokens"] == num_cached and found["num_drafts"] > 0
        assert found["target_kv_difference_ratio"] < 1e-5 > found["draft_kv_difference_ratio"]
    hits = [bar for name, bar in bars.items() if name.startswith("hit")]
    assert len(hits) == 5 and all(bar["held"] for bar in hits)
    assert [numbers["busy"][row]["num_steps"] for row in ("quiet", "busy_long_turns", "busy")] == [
        8
    ] * 3
    assert "hit_changed_shared_pools" in said and "at most" in said


def test_a_failed_part_does_not_take_the_others_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: an exception in one part loses what others have measured on a rented GPU, a request
    that it has left keeps the next part waiting, or the file does not say that the last failed;
    or it names a seed that nothing was drawn by."""

    def fails(m: Any) -> Any:
        handle = m.engine.submit([1, 2, 3], max_new_tokens=1000, ignore_eos=True)
        next(iter(handle))
        raise RuntimeError("not this one")  # and drops the handle

    def stores_nonsense(m: Any) -> Any:
        return {"a_row": {"step_ms": float("nan")}}

    def late(m: Any) -> Any:
        m.deadline = 0
        m.bars |= {"late": Bar(2.0, at_most=1.0), "early": Bar(1.0, at_least=1.0)}
        num_steps = len(m.engine.generate([5], max_new_tokens=3))
        return {"a_row": {"num_steps": num_steps, "num_seed": m.generator.initial_seed()}}

    parts = {"fails": fails, "nonsense": stores_nonsense, "late": late, "last": fails}
    monkeypatch.setattr(measure_requests, "PARTS", parts)
    out = tmp_path / "requests.json"
    line = ["--only", ",".join(sorted(parts)), "--seed", "3", "--out", str(out)]
    result, said = measured(capsys, 1, *line)
    stored, problems = json.loads(out.read_text()), result["config"]["problems"]
    assert stored["config"] == result["config"]
    assert result["config"]["bars"] == {
        "late": {"measured": 2.0, "at_most": 1.0, "at_least": None, "held": False},
        "early": {"measured": 1.0, "at_most": None, "at_least": 1.0, "held": True},
    }
    assert "not finite" in problems.pop("nonsense")
    assert problems == {"fails": "RuntimeError: not this one", "last": "no time left"}
    assert stored["numbers"]["late"]["a_row"] == {"num_steps": 1, "num_seed": 3}
    assert "FAILED: RuntimeError: not this one" in said


def test_what_is_printed_of_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: the context that was asked for is told as the engine's; a missed bar is told as held or
    ends with 1; or a number stands under another one's name."""

    def one(m: Any) -> Any:
        m.bars |= {"slow": Bar(2.5, at_most=1.125), "right": Bar(1.0, at_least=0.99)}
        return {"a_row": {"num_steps": 3, "step_p50_ms": 12.34567}}

    monkeypatch.setattr(measure_requests, "PARTS", {"one": one})
    monkeypatch.setattr(measure_requests, "time", SimpleNamespace(monotonic=lambda: 7.0))
    result, said = measured(capsys, 0, "--only", "one", "--max-model-len", "9000")
    pair = {name: result["config"][name] for name in ("target", "draft")}
    assert pair == {"target": "target", "draft": "draft"}
    *lines, _ = said.splitlines()
    assert lines == [
        "started in 0.0 s; context 4080",
        "one     a_row             num_steps 3  step_p50_ms 12.346",
        "one     wall_s            0",
        "",
        f"MISSED  {'slow':36}    2.5000  at most 1.125",
        f"held    {'right':36}    1.0000  at least 0.99",
    ]


@pytest.mark.slow
def test_options_are_measured_without_a_plain_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: two engines do not fit into a GPU, and no option's cost is known."""
    opened, open_engine = [], Engine.from_pretrained

    def open_one(*args: Any, **options: Any) -> Engine:
        if opened:
            raise ValueError("no memory left")
        opened.append(options)
        return open_engine(*args, **options)

    monkeypatch.setattr(Engine, "from_pretrained", open_one)
    small = ["--only", "options", "--rounds", "1", "--steps", "1", "--baseline-engine"]
    result, _ = measured(capsys, 1, *small)
    assert result["config"]["problems"] == {"plain_engine": "ValueError: no memory left"}
    assert "mixed" in result["numbers"]["options"]
    assert "greedy_over_plain_engine" not in result["config"]["bars"]


def test_what_a_hit_changes_is_told() -> None:
    """Bug: a hit that changes K/V or drafts is told as none, or drafts are compared behind another
    token, where they must differ."""
    kv = {"target": torch.tensor([[1.0, -4.0]])}
    cold = Trace([5, 6, 7, 8], {1: [6, 1], 2: [3, 4], 3: [9, 9]}, 0, kv)
    assert compare(cold, cold)["equal_drafts_fraction"] == 1
    other = Trace([5, 6, 0, 8], {1: [6, 2], 2: [3, 4], 3: [0, 0]}, 16, {"target": kv["target"] + 1})
    found = compare(cold, other)
    assert found["equal_tokens_fraction"] == 0.5
    assert (found["num_drafts"], found["equal_drafts_fraction"]) == (4, 0.75)
    assert found["target_kv_difference_ratio"] == 0.25


def test_every_number_of_a_hit_stands_at_its_name() -> None:
    """Bug: steps or cached tokens of the cold run are told as those behind cached pages."""
    kv = {"target": torch.tensor([[1.0, -4.0]]), "draft": torch.tensor([[2.0, 0.0]])}
    cold = Trace([5, 6, 7, 8], {1: [6, 1], 2: [3, 4], 3: [9, 9]}, 0, kv)
    warm = Trace([5, 6, 7, 8], {1: [6, 1], 3: [9, 0]}, 16, kv | {"draft": kv["draft"] / 2})
    assert compare(cold, warm) == {
        "num_cached_tokens": 16,
        "num_tokens": 4,
        "equal_tokens_fraction": 1.0,
        "num_drafts": 4,
        "equal_drafts_fraction": 0.75,
        "num_cold_steps": 3,
        "num_warm_steps": 2,
        "target_kv_difference_ratio": 0.0,
        "draft_kv_difference_ratio": 0.5,
    }


def test_a_hit_that_fails_leaves_the_loop_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: behind it all steps run one at a time, and the next part's are slow."""
    resets: list[int] = []
    first = SimpleNamespace(depth=2)
    loop = SimpleNamespace(first=first, reset=lambda: resets.append(first.depth))
    sizes = {"answer-tokens": 4}
    m: Any = SimpleNamespace(
        loop=loop, sizes=sizes, at_most=lambda *_: 8, random_ids=lambda count: [1] * count
    )
    monkeypatch.setattr(request_hits, "traced", lambda loop, *_: 1 / (loop.first.depth - 1))
    with pytest.raises(ZeroDivisionError):
        request_hits.hit(m)
    assert resets and first.depth == 2


def test_the_first_steps_of_a_generation_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: steps that write rows and fill the pipeline are an option's, or nobody asks for it."""
    steps = [TimedStep(float(i), 0.0, 1) for i in range(20)]
    monkeypatch.setattr(request_parts, "timed_steps", lambda loop, requests: iter(steps))
    asked: list[Any] = []
    loop = SimpleNamespace(block=1, reset=lambda: None)
    loop.submit = lambda *given, **told: asked.append((given[3], told))
    m: Any = SimpleNamespace(random_ids=lambda count: [1] * count)
    m.grammars = SimpleNamespace(matcher=lambda constraint: f"{constraint}'s")
    engine: Any = SimpleNamespace(built=SimpleNamespace(loop=loop))
    option = request_parts.DRAWN | {"logprobs": 5, "constraint": "a grammar"}
    found = request_parts.run_steps(m, engine, 3, option)
    assert found == steps[request_parts.WARMUP :][:3]
    drawn = Sampling(**request_parts.DRAWN)
    assert asked == [(drawn, {"logprobs": 5, "matcher": "a grammar's"})]


def test_bars() -> None:
    """Bug: a missed bar is told as held."""
    assert Bar(1.0, at_most=1).held and not Bar(1.01, at_most=1).held
    assert Bar(0.99, at_least=0.99).held and not Bar(0.98, at_least=0.99).held


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "turn,join"], "error: --only turn: no such part; there are options, turns"),
        (["--turns", "1"], "error: --turns 1: pass more, or nothing is measured"),
        (["--max-num-batched-tokens", "256,x"], "--max-num-batched-tokens 256,x: pass integers"),
        (["--max-num-batched-tokens", "0"], "--max-num-batched-tokens 0: pass integers from 16"),
    ],
)
def test_refusals(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    """Bug: a misspelt part is left out in silence, a division by zero ends the visit, or the script
    defines everything and runs nothing; or a misspelt number of rows is a traceback."""
    no_time = ("--seconds", "0")  # where it is not refused
    monkeypatch.setattr(sys, "argv", ["measure_requests.py", *no_time, *arguments])
    with pytest.raises(SystemExit):
        runpy.run_path(str(measure_requests.__file__), run_name="__main__")
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("typed", "budgets"), [("16", [16]), ("", []), ("256,1024", [256, 1024])])
def test_rows_that_are_taken(typed: str, budgets: list[int]) -> None:
    """Bug: a step of just 16 rows of a prompt, or none beside the default's, is refused."""
    assert measure_requests.parse(["--max-num-batched-tokens", typed]).budgets == budgets


def test_a_budget_that_was_tried_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a long prompt comes in beside every later part's steps as the last of `join`'s budgets
    has it, also where one of them failed; or that budget is what the bars judge, or of its gaps
    another than the longest; or the prompt is told as long as its answer."""

    @dataclass(frozen=True)
    class Config:
        max_num_batched_tokens: int = 512

    asked, tried = Config(), list[int]()
    newcomer = SimpleNamespace(metrics=SimpleNamespace(ttft_ms=2.0))
    engine = SimpleNamespace(submit=lambda *_, **__: SimpleNamespace(result=lambda: newcomer))
    m: Any = SimpleNamespace(
        engine=engine,
        loop=SimpleNamespace(config=asked),
        sizes={"repeats": 1},
        budgets=[256, 1024],
        bars={},
        at_most=lambda *_: 8,
        random_ids=lambda count: [1] * count,
        settle=lambda: None,
    )

    def beside(m: Any, length: int) -> dict[str, float]:
        tried.append(m.loop.config.max_num_batched_tokens)
        gaps = {"gap_joining_max_ms": tried[-1] / 512, "gap_beside_max_ms": tried[-1] / 1024}
        return gaps | {"first_token_ms": tried[-1] / 128}

    monkeypatch.setattr(request_joins, "join_beside", beside)
    numbers = request_joins.join(m)
    assert numbers["alone"] == {"num_prompt_tokens": 8, "first_token_ms": 2.0}
    assert numbers["budget_1024"]["over_alone_ratio"] == 4
    assert [bar.measured for bar in m.bars.values()] == [1, 2]
    assert tried == [512, 256, 1024] and m.loop.config is asked
    m.budgets = [0]
    monkeypatch.setattr(request_joins, "join_beside", lambda m, _: 1 / m.loop.config.missing)
    with pytest.raises(AttributeError):
        request_joins.join(m)
    assert m.loop.config is asked


def test_what_a_context_holds_beside_other_tokens() -> None:
    """Bug: a prompt of the length that was asked for leaves its answer no room, and the part ends
    in a refusal."""
    config = SimpleNamespace(max_model_len=1000)
    m: Any = SimpleNamespace(sizes={"long": 5000, "short": 90}, engine=SimpleNamespace())
    m.engine.config = config
    at_most = request_parts.Measurement.at_most
    assert at_most(m, "long") == 999 and at_most(m, "long", 100, 20) == 879
    assert at_most(m, "short", 100) == 90


def test_a_gap_belongs_to_what_it_began_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the longest gap, in which the newcomer's last rows run, is told as one of the steps
    beside its answer; or of several newcomers the first token that came soonest counts."""
    firsts_ms = iter([3000.0, 9000.0, 3500.0])

    def newcomer() -> Any:
        return SimpleNamespace(metrics=SimpleNamespace(ttft_ms=next(firsts_ms)))

    handle = SimpleNamespace(result=newcomer, done=False, cancel=lambda: None)
    m: Any = SimpleNamespace(
        engine=SimpleNamespace(submit=lambda *_, **__: handle),
        sizes={"repeats": 3},
        random_ids=lambda count: [1] * count,
    )

    def note_times(stream: Any, times: list[float], is_steady: Any) -> None:
        times += [0.0] * request_parts.WARMUP + [98.0, 99.0, 101.0, 103.5, 104.0]
        is_steady.set()

    monkeypatch.setattr(request_joins, "note_times", note_times)
    clock = SimpleNamespace(perf_counter=lambda: 100.0)  # so first tokens come at 103, 109, 103.5
    monkeypatch.setattr(request_joins, "time", clock)
    found = request_joins.join_beside(m, 8)
    gaps = {"quiet": (3, 1000.0), "joining": (7, 2500.0), "beside": (2, 500.0)}
    assert {n: (found[f"num_{n}_gaps"], found[f"gap_{n}_max_ms"]) for n in gaps} == gaps
    assert found["first_token_ms"] == 3500.0
