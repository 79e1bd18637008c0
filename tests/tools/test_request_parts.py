"""Parts of tools/measure_requests.py on made-up times: what is counted, and what is promised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphengine.measure.bench import TimedStep
from tools import request_joins, request_parts, request_texts


def test_the_numbers_of_steps() -> None:
    """Bug: the host's times are those of whole steps, or a percentile stands under another's
    name."""
    steps = [TimedStep(float(i), i / 100, 1 + i % 3) for i in range(101)]
    found = request_parts.numbers_of(steps)
    times = {f"step_{part}_ms": ms for part, ms in (("p50", 50), ("p99", 99), ("max", 100))}
    hosts = {name.replace("step", "host"): ms / 100 for name, ms in times.items()}
    counts = {"num_steps": 101, "mean_acceptance_length": sum(s.num_tokens for s in steps) / 101}
    assert found == pytest.approx(counts | times | hosts)


def test_what_is_promised_of_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a bar is held against the ratio upside down, the plain engine's steps count as those of
    the one that offers everything, or that engine stays open; or each round begins with the same
    one, which has a cooler machine then."""
    asked = {"greedy": {}, "top_p": {"top_p": 0.9}, "grammar": {"constraint": "x"}}
    monkeypatch.setattr(request_parts, "OPTIONS", asked)
    closed: list[int] = []
    plain = SimpleNamespace(name="plain", close=lambda: closed.append(1))
    own = SimpleNamespace(name="own")
    wall_ms = {("plain", ()): 4.0, ("own", ()): 5.0, ("own", ("top_p",)): 6.0}

    ran: list[tuple[str, ...]] = []

    def run_steps(m: Any, engine: Any, count: int, asked: Any) -> list[TimedStep]:
        ran.append((engine.name, *asked))
        ms = wall_ms.get((engine.name, tuple(asked)), 5.5)
        slowest = 3 * ms if asked.get("constraint") else ms
        return [TimedStep(ms, 1.0, 2)] * (count - 1) + [TimedStep(slowest, 1.0, 2)]

    monkeypatch.setattr(request_parts, "run_steps", run_steps)
    sizes = {"rounds": 2, "steps": 60}  # so that the slowest of all is no percentile
    m: Any = SimpleNamespace(engine=own, open_plain=lambda: plain, sizes=sizes, bars={})
    m.grammars = "some"
    numbers = request_parts.options(m)
    assert closed == [1] and [row["num_steps"] for row in numbers.values()] == [120] * 4
    order = [("plain",), ("own",), ("own", "top_p"), ("own", "constraint")]
    assert ran == [*reversed(order), *order]
    over = {name: row["over_greedy_ratio"] for name, row in numbers.items()}
    assert over == pytest.approx({"plain_engine": 0.8, "greedy": 1, "top_p": 1.2, "grammar": 1.1})
    grammar = numbers["grammar"]["step_p99_ms"] / 5.5
    assert {name: bar.measured for name, bar in m.bars.items()} == pytest.approx(
        {
            "greedy_over_plain_engine": 1.25,
            "top_p_over_greedy": 1.2,
            "grammar_over_greedy": 1.1,
            "grammar_p99_over_p50": grammar,
        }
    )
    assert not any(bar.held for bar in m.bars.values()) and 2 < grammar < 3


def test_the_spread_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: how far the rounds' ratios lie apart is told as one of them over another, which is never
    near 0."""
    times = iter([6.0, 4.0, 4.0, 5.0])  # the second round goes the other way round
    monkeypatch.setattr(request_parts, "OPTIONS", {"greedy": {}, "top_k": {"top_k": 2}})
    monkeypatch.setattr(request_parts, "run_steps", lambda *_: [TimedStep(next(times), 1.0, 2)] * 3)
    sizes = {"rounds": 2, "steps": 3}
    m: Any = SimpleNamespace(engine=None, open_plain=None, sizes=sizes, bars={}, grammars=None)
    row = request_parts.options(m)["top_k"]
    assert (row["over_greedy_ratio"], row["over_greedy_spread_ratio"]) == (1.375, 0.25)


def test_what_is_promised_of_second_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a cold first token is held against a warm one, so that the worse it is the better; or
    cold and warm stand in each other's place."""
    found = iter([(2.0, 90), (40.0, 0), (3.0, 91), (60.0, 0)])  # warm and cold by turns
    monkeypatch.setattr(request_parts, "first_token", lambda *_: next(found))
    chats = {"cached_tokens_fraction": 0.98, "cached_pages_fraction": 1.0}
    monkeypatch.setattr(request_parts, "chat", lambda m, begin: dict(chats))
    answers = [SimpleNamespace(token_ids=[0] * 4)]
    config = SimpleNamespace(max_model_len=10_000)
    m: Any = SimpleNamespace(
        engine=SimpleNamespace(config=config, generate=lambda *_, **__: answers),
        loop=SimpleNamespace(reset=lambda: None),
        sizes={"answer-tokens": 4, "repeats": 2, "turns": 3},
        at_most=lambda *_: 100,
        random_ids=lambda count: [1] * count,
        bars={},
    )
    numbers = request_parts.turns(m)
    assert numbers["second_turn"] == {
        "num_first_turn_tokens": 100,
        "num_new_tokens": 128,
        "num_cached_tokens": 91,
        "first_token_cold_ms": 50.0,
        "first_token_warm_ms": 2.5,
        "warm_over_cold_ratio": 0.05,
    }
    assert list(numbers) == ["second_turn", "chat_from_512", "chat_from_100"]
    bars = {name: (bar.measured, bar.held) for name, bar in m.bars.items()}
    assert bars == {
        "warm_over_cold_first_token": (0.05, True),
        **{f"chat_from_{n}_cached_tokens": (0.98, False) for n in (512, 100)},
        **{f"chat_from_{n}_cached_pages": (1.0, True) for n in (512, 100)},
    }


def test_what_is_promised_beside_a_busy_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the longest step of all is held against the median as the 99th percentile; or the bar
    judges steps without a busy thread, or with the interpreter's own turns."""
    is_busy: list[bool] = []

    @contextmanager
    def busy_thread() -> Iterator[None]:
        is_busy.append(True)
        yield
        is_busy.pop()

    def run_steps(m: Any, engine: Any, count: int, asked: Any) -> list[TimedStep]:
        long_turns = request_parts.interpreter.SWITCH_INTERVAL_S == 1.0
        ms = 4.0 if long_turns else 2.0 if is_busy else 1.0
        slowest = [TimedStep(ms * times, 0.5, 1) for times in (3, 10)]
        return [TimedStep(ms, 0.5, 1)] * (count - 2) + slowest

    monkeypatch.setattr(request_parts, "busy_thread", busy_thread)
    monkeypatch.setattr(request_parts, "run_steps", run_steps)
    sizes = {"busy-steps": 401}
    m: Any = SimpleNamespace(engine=None, sizes=sizes, bars={}, deadline=float("inf"))
    numbers = request_parts.busy(m)
    found = {name: (row["step_p50_ms"], row["step_max_ms"]) for name, row in numbers.items()}
    assert found == {"quiet": (1, 10), "busy_long_turns": (4, 40), "busy": (2, 20)}
    assert {row["p99_over_p50_ratio"] for row in numbers.values()} == {1.0}
    assert m.bars == {"busy_p99_over_p50": request_parts.Bar(1.0, at_most=1.1)}


def test_a_generation_that_is_too_short_to_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the refusal tells how many steps were wanted as those that there were."""
    steps = [TimedStep(1.0, 0.5, 2)] * 4
    monkeypatch.setattr(request_parts, "timed_steps", lambda loop, requests: iter(steps))
    request = SimpleNamespace(output_ids=[1] * 9)
    loop = SimpleNamespace(block=1, reset=lambda: None, submit=lambda *_, **__: request)
    engine: Any = SimpleNamespace(built=SimpleNamespace(loop=loop))
    m: Any = SimpleNamespace(random_ids=lambda count: [1] * count)
    told = "^a generation of 9 tokens has 4 steps, of which 6 do not count; raise --max-model-len$"
    with pytest.raises(ValueError, match=told):
        request_parts.run_steps(m, engine, 3, {})


def test_a_text_s_first_call_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the first text of a length, which meets what is not warm, is in the medians; or what
    encoding takes is no part of the first token's time."""
    now_s, num_calls = [0.0], [0]

    def encode(messages: Any) -> list[int]:
        num_calls[0] += 1
        now_s[0] += 9.0 if num_calls[0] == 1 else num_calls[0] / 1000
        return [1] * (30 + num_calls[0])

    def generate(ids: list[list[int]], **asked: Any) -> None:
        now_s[0] += num_calls[0] / 100

    m: Any = SimpleNamespace(
        tokenizer=SimpleNamespace(encode_chat=encode),
        engine=SimpleNamespace(config=SimpleNamespace(max_model_len=100), generate=generate),
        sizes={"repeats": 3},
        generator=torch.Generator().manual_seed(0),
    )
    clock = SimpleNamespace(perf_counter=lambda: now_s[0])
    monkeypatch.setattr(request_texts, "time", clock)
    found = request_texts.texts(m)
    assert found == {
        "text_32": pytest.approx({"num_tokens": 33, "encode_ms": 3.0, "first_token_ms": 33.0})
    }


def test_what_of_a_chat_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a last token that happens to be cached fills a page that nobody expects, and makes up
    for one that is lost; the first turn counts, or a turn's own tokens as repeated ones."""
    monkeypatch.setattr(request_parts, "TURN_TOKENS", 5)
    cached, asked = iter([0, 12, 16]), list[int]()

    def generate(ids: list[list[int]], **options: Any) -> list[Any]:
        asked.append(len(ids[0]))
        ttft_ms = 100.0 if len(asked) == 1 else 10.0 * len(asked)
        metrics = SimpleNamespace(num_cached_tokens=next(cached), ttft_ms=ttft_ms)
        return [SimpleNamespace(token_ids=[0] * options["max_new_tokens"], metrics=metrics)]

    config = SimpleNamespace(page_size=4, max_model_len=31)
    m: Any = SimpleNamespace(
        loop=SimpleNamespace(reset=lambda: None),
        engine=SimpleNamespace(config=config, generate=generate),
        sizes={"answer-tokens": 3, "turns": 50},
        random_ids=lambda count: [1] * count,
    )
    found = request_parts.chat(m, 9)
    assert asked == [9, 17, 25]  # one more is past the context
    assert found == {
        "num_turns": 3,
        "num_repeated_tokens": 12 + 20,
        "num_cached_tokens": 28,
        "cached_tokens_fraction": 28 / 32,
        "cached_pages_fraction": 1.0,
        **request_parts.percentiles("first_token", [20.0, 30.0]),
    }


@pytest.mark.parametrize(("begin", "context", "size"), [(28, 31, 4), (9, 20, 16), (9, 12, 4)])
def test_a_chat_that_repeats_nothing(
    begin: int, context: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: where the context ends a chat before a second turn, or what that repeats fills no page,
    the part fails for a division by zero, which names nothing that could be passed."""
    monkeypatch.setattr(request_parts, "TURN_TOKENS", 5)
    metrics = SimpleNamespace(num_cached_tokens=0, ttft_ms=1.0)
    answers = [SimpleNamespace(token_ids=[0] * 3, metrics=metrics)]
    config = SimpleNamespace(page_size=size, max_model_len=context)
    m: Any = SimpleNamespace(
        loop=SimpleNamespace(reset=lambda: None),
        engine=SimpleNamespace(config=config, generate=lambda *_, **__: answers),
        sizes={"answer-tokens": 3, "turns": 2},
        random_ids=lambda count: [1] * count,
    )
    with pytest.raises(ValueError, match=f"a chat from {begin} tokens .* raise --max-model-len"):
        request_parts.chat(m, begin)


def test_a_generation_is_long_enough_for_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a request whose drafts are accepted ends before its steps are timed; or steps in which
    the pipeline fills count."""
    lengths: list[int] = []

    def submit(prompt: list[int], length: int, *_: Any, **__: Any) -> Any:
        lengths.append(length)
        return SimpleNamespace(output_ids=[])

    loop = SimpleNamespace(block=4, submit=submit, reset=lambda: None)
    timed = [TimedStep(float(i), 0.5, 4) for i in range(20)]
    monkeypatch.setattr(request_parts, "timed_steps", lambda loop, requests: iter(timed))
    m: Any = SimpleNamespace(random_ids=lambda count: [1] * count, grammars=None)
    engine: Any = SimpleNamespace(built=SimpleNamespace(loop=loop))
    found = request_parts.run_steps(m, engine, 3, {"temperature": 0.5})
    assert [step.wall_ms for step in found] == [6.0, 7.0, 8.0]
    assert lengths == [4 * (3 + request_parts.WARMUP + 2)]


def test_a_stream_is_steady_before_others_join() -> None:
    """Bug: the newcomer joins while the stream still begins, and no gap without it is known; or it
    waits for ever where the stream ended before."""
    times: list[float] = []
    steady: list[int] = []
    event: Any = SimpleNamespace(set=lambda: steady.append(len(times)))
    stream: Any = range(request_joins.NUM_QUIET + 9)
    request_joins.note_times(stream, times, event)
    assert steady == [request_joins.NUM_QUIET, len(stream)] == [50, len(times)]
    request_joins.note_times(stream[:3], times, event)
    assert steady[2:] == [len(stream) + 3]
