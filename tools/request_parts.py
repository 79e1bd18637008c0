"""What tools/measure_requests.py measures of one engine: each part is a function of a `Measurement`
that returns its numbers and notes as bars what is promised of them. Texts, joins and hits have
files of their own.

Steps are timed between the moments at which the host holds two steps' tokens (measure/bench.py),
first tokens from the call.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from graphengine.api import Engine
from graphengine.checkpoints.tokenizer import Tokenizer
from graphengine.config.constraint import Constraint
from graphengine.decode import turns as interpreter
from graphengine.decode.grammar import Grammars
from graphengine.decode.loop import DecodeLoop
from graphengine.decode.sampling import Sampling
from graphengine.measure.bench import TimedStep, timed_steps

PROMPT_LEN = 128
WARMUP = 6  # steps of a generation that are not counted: rows are written, the pipeline fills
GENERATION = 512  # steps of a generation at most, so that its context stays short
NEW_TOKENS = 128  # of the second turn
TURN_TOKENS = 40  # of every turn of a chat
CHAT_LEN = 512  # tokens of a chat's first prompt
SETTLING_S = 60
DRAWN = {"temperature": 0.8, "seed": 1}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
BIAS = {"logit_bias": {token: token / 8 - 2 for token in range(32)}}
WORDS = {"bad_words": ((7,), (8, 9), (10, 11, 12))}
FILTERS = {"top_p": 0.95, "top_k": 50, "min_p": 0.01}
SCHEMA = Constraint(
    "json_schema",
    json.dumps(
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 40},
                    "age": {"type": "integer", "minimum": 0, "maximum": 150},
                    "kind": {"enum": ["bee", "duck", "tree frog"]},
                    "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}},
                },
                "required": ["name", "age", "kind", "tags"],
                "additionalProperties": False,
            },
            "minItems": 10_000,
        }
    ),
)
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": DRAWN,
    **{name: DRAWN | {name: value} for name, value in FILTERS.items()},
    "penalties": PENALTIES,
    "logit_bias": BIAS,
    "bad_words": WORDS,
    "logprobs": {"logprobs": 5},
    "grammar": {"constraint": SCHEMA},
    "mixed": DRAWN | FILTERS | PENALTIES | BIAS | WORDS | {"logprobs": 5},
}
PLAIN = "plain_engine"  # greedy, in an engine that offers nothing else

Numbers = dict[str, Any]


class Bar(NamedTuple):
    """What is promised of a number: at most so much, or at least."""

    measured: float
    at_most: float | None = None
    at_least: float | None = None

    @property
    def held(self) -> bool:
        """Whether it is kept; one side is None."""
        is_low = self.at_most is None or self.measured <= self.at_most
        return is_low and (self.at_least is None or self.measured >= self.at_least)


@dataclass(slots=True, kw_only=True)
class Measurement:
    """One engine and how much is asked of it. `loop` is driven by this thread while no handle of
    the engine is at work."""

    engine: Engine
    open_plain: Callable[[], Engine] | None
    sizes: dict[str, int]
    budgets: list[int]
    deadline: float
    generator: torch.Generator
    grammars: Grammars | None = None
    tokenizer: Tokenizer | None = None
    bars: dict[str, Bar] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    """What could not be measured, and why."""

    @property
    def loop(self) -> DecodeLoop:
        return self.engine.built.loop

    def random_ids(self, count: int) -> list[int]:
        """A prompt that nothing cached begins like."""
        vocab = self.engine.built.target.vocab_size
        return torch.randint(0, vocab, (count,), generator=self.generator).tolist()

    def settle(self) -> None:
        """Waits until the thread behind handles has left the loop; then forgets what is cached.

        Raises:
            RuntimeError: it does not leave.
        """
        until = time.monotonic() + SETTLING_S
        while not self.loop.is_clean:
            if time.monotonic() > until:
                raise RuntimeError(f"requests of an earlier part still run after {SETTLING_S} s")
            time.sleep(0.001)
        self.loop.reset()

    def fail(self, name: str, error: Exception) -> None:
        """Notes what went wrong while an exception is handled."""
        traceback.print_exc()
        self.problems[name] = f"{type(error).__name__}: {error}"

    def at_most(self, wanted: str, *beside: int) -> int:
        """A size that was asked for, or what the context holds with so many tokens beside it."""
        return min(self.sizes[wanted], self.engine.config.max_model_len - 1 - sum(beside))


def percentiles(name: str, times_ms: Sequence[float]) -> Numbers:
    """Of times in milliseconds."""
    p50, p99 = np.percentile(times_ms, (50, 99)).tolist()
    return {f"{name}_p50_ms": p50, f"{name}_p99_ms": p99, f"{name}_max_ms": max(times_ms)}


def options(m: Measurement) -> Numbers:
    """Each option's step over the greedy one of its round."""
    plain = None
    if m.open_plain is not None:
        try:
            plain = m.open_plain()
        except Exception as error:  # two engines may not fit; one has still much to tell
            m.fail(PLAIN, error)
    asked: dict[str, dict[str, Any]] = {} if plain is None else {PLAIN: {}}
    has_grammars = m.grammars is not None
    asked |= {name: o for name, o in OPTIONS.items() if has_grammars or "constraint" not in o}
    rounds: dict[str, list[list[TimedStep]]] = {name: [] for name in asked}
    try:
        for i in range(m.sizes["rounds"]):
            for name in list(asked)[:: 1 if i % 2 else -1]:  # whoever is first is last next
                engine = plain if plain is not None and name == PLAIN else m.engine
                rounds[name].append(run_steps(m, engine, m.sizes["steps"], asked[name]))
    finally:
        if plain is not None:
            plain.close()
    medians = {
        name: [statistics.median(step.wall_ms for step in steps) for steps in found]
        for name, found in rounds.items()
    }
    numbers: Numbers = {}
    for name, found in rounds.items():
        pairs = zip(medians[name], medians["greedy"], strict=True)
        ratios = [own / greedy for own, greedy in pairs]
        numbers[name] = {
            **numbers_of([step for steps in found for step in steps]),
            "over_greedy_ratio": statistics.median(ratios),
            "over_greedy_spread_ratio": max(ratios) - min(ratios),
        }
    if plain is not None:
        over = 1 / numbers[PLAIN]["over_greedy_ratio"]
        m.bars["greedy_over_plain_engine"] = Bar(over, at_most=1.005)
    for name, most in (("top_p", 1.05), ("penalties", 1.03), ("grammar", 1.03)):
        if name in numbers:
            m.bars[f"{name}_over_greedy"] = Bar(numbers[name]["over_greedy_ratio"], at_most=most)
    if (found := numbers.get("grammar")) is not None:
        over = found["step_p99_ms"] / found["step_p50_ms"]
        m.bars["grammar_p99_over_p50"] = Bar(over, at_most=1.5)
    return numbers


def numbers_of(steps: Sequence[TimedStep]) -> Numbers:
    """How many, how long they took, how much of that the host worked, what they committed."""
    return {
        "num_steps": len(steps),
        "mean_acceptance_length": statistics.fmean(step.num_tokens for step in steps),
        **percentiles("step", [step.wall_ms for step in steps]),
        **percentiles("host", [step.host_ms for step in steps]),
    }


def run_steps(m: Measurement, engine: Engine, count: int, asked: dict[str, Any]) -> list[TimedStep]:
    """`count` steps of one request, of as many generations as that takes."""
    loop = engine.built.loop
    own = {"logprobs", "constraint"}
    sampling = Sampling(**{name: value for name, value in asked.items() if name not in own})
    constraint, matcher = asked.get("constraint"), None
    found: list[TimedStep] = []
    while len(found) < count:
        wanted = min(count - len(found), GENERATION) + WARMUP + 2
        length = wanted * loop.block  # if every draft is accepted
        if constraint is not None and m.grammars is not None:
            matcher = m.grammars.matcher(constraint)
        told = {"logprobs": asked.get("logprobs"), "matcher": matcher}
        request = loop.submit(m.random_ids(PROMPT_LEN), length, (), sampling, **told)
        steps: list[TimedStep] = []
        try:
            with torch.no_grad():
                for step in timed_steps(loop, [request]):
                    steps.append(step)
                    if len(steps) == wanted:
                        break
        finally:
            loop.reset()
        found += steps[WARMUP:]
        if len(steps) <= WARMUP:
            raise ValueError(
                f"a generation of {len(request.output_ids)} tokens has {len(steps)} steps, of "
                f"which {WARMUP} do not count; raise --max-model-len"
            )
    return found[:count]


def turns(m: Measurement) -> Numbers:
    """First tokens of a second turn, and how much of a chat comes from the cache."""
    cold_ms, warm_ms, cached = [], [], 0
    answer = m.sizes["answer-tokens"]
    total = m.at_most("turn-tokens", NEW_TOKENS)
    for _ in range(m.sizes["repeats"]):
        m.loop.reset()
        first = m.random_ids(total - answer)
        (said,) = m.engine.generate([first], max_new_tokens=answer, ignore_eos=True)
        second = first + said.token_ids + m.random_ids(NEW_TOKENS)
        ms, cached = first_token(m.engine, second)
        warm_ms.append(ms)
        m.loop.reset()
        ms, num_cached = first_token(m.engine, second)
        assert num_cached == 0
        cold_ms.append(ms)
    cold, warm = statistics.median(cold_ms), statistics.median(warm_ms)
    m.bars["warm_over_cold_first_token"] = Bar(warm / cold, at_most=1 / 15)
    numbers: Numbers = {
        "second_turn": {
            "num_first_turn_tokens": total,
            "num_new_tokens": NEW_TOKENS,
            "num_cached_tokens": cached,
            "first_token_cold_ms": cold,
            "first_token_warm_ms": warm,
            "warm_over_cold_ratio": warm / cold,
        }
    }
    room = m.engine.config.max_model_len - m.sizes["turns"] * (TURN_TOKENS + answer)
    for begin in dict.fromkeys(min(n, max(room, CHAT_LEN)) for n in (CHAT_LEN, total)):
        found = numbers[f"chat_from_{begin}"] = chat(m, begin)
        for what in ("cached_tokens", "cached_pages"):
            m.bars[f"chat_from_{begin}_{what}"] = Bar(found[f"{what}_fraction"], at_least=0.99)
    return numbers


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Milliseconds from the call to the only token, and how many of the prompt were cached."""
    began = time.perf_counter()
    (result,) = engine.generate([prompt], max_new_tokens=1, ignore_eos=True)
    return (time.perf_counter() - began) * 1e3, result.metrics.num_cached_tokens


def chat(m: Measurement, begin: int) -> Numbers:
    """Turns of which each prompt is all that was said, and some new tokens. `tokens`: of all that
    repeat; `pages`: of the whole pages that they fill, the last token apart: where it is the
    target's own and no accepted draft, nothing has run it.

    Raises:
        ValueError: no turn repeats a page.
    """
    m.loop.reset()
    size, answer, said = m.engine.config.page_size, m.sizes["answer-tokens"], m.random_ids(begin)
    repeated = cached = pages = cached_pages = num_turns = 0
    times: list[float] = []
    for turn in range(m.sizes["turns"]):
        prompt = said + m.random_ids(TURN_TOKENS if turn else 0)
        if len(prompt) + answer >= m.engine.config.max_model_len:
            break
        (result,) = m.engine.generate([prompt], max_new_tokens=answer, ignore_eos=True)
        if turn:
            whole, found = (len(said) - 1) // size, result.metrics.num_cached_tokens
            repeated, cached = repeated + len(said), cached + found
            pages, cached_pages = pages + whole, cached_pages + min(found // size, whole)
            times.append(result.metrics.ttft_ms)
        said, num_turns = prompt + result.token_ids, num_turns + 1
    if not pages:
        raise ValueError(
            f"a chat from {begin} tokens has {num_turns} turns in a context of "
            f"{m.engine.config.max_model_len}, none of which repeats a page of {size}; raise "
            "--max-model-len or --turns"
        )
    return {
        "num_turns": num_turns,
        "num_repeated_tokens": repeated,
        "num_cached_tokens": cached,
        "cached_tokens_fraction": cached / repeated,
        "cached_pages_fraction": cached_pages / pages,
        **percentiles("first_token", times),
    }


def busy(m: Measurement) -> Numbers:
    """Greedy steps beside the busy thread and, a quarter as many, without it; and one answer's with
    the interpreter's own turns, which says what the engine's shorter ones are worth."""
    steps: dict[str, list[TimedStep]] = {"quiet": [], "busy_long_turns": [], "busy": []}
    wanted = m.sizes["busy-steps"]
    while len(steps["busy"]) < wanted and (not steps["busy"] or time.monotonic() < m.deadline):
        count = min(GENERATION, wanted - len(steps["busy"]))
        if len(steps["quiet"]) <= len(steps["busy"]) // 4:
            steps["quiet"] += run_steps(m, m.engine, count, {})
        if not steps["busy_long_turns"]:
            short, interpreter.SWITCH_INTERVAL_S = interpreter.SWITCH_INTERVAL_S, 1.0
            try:
                with busy_thread():
                    steps["busy_long_turns"] += run_steps(m, m.engine, count, {})
            finally:
                interpreter.SWITCH_INTERVAL_S = short
        with busy_thread():
            steps["busy"] += run_steps(m, m.engine, count, {})
    numbers: Numbers = {name: numbers_of(found) for name, found in steps.items()}
    for found in numbers.values():
        found["p99_over_p50_ratio"] = found["step_p99_ms"] / found["step_p50_ms"]
    m.bars["busy_p99_over_p50"] = Bar(numbers["busy"]["p99_over_p50_ratio"], at_most=1.1)
    return numbers


@contextmanager
def busy_thread() -> Iterator[None]:
    """A thread that computes in Python, and so wants the interpreter all the time."""
    is_over, number = False, 0

    def work() -> None:
        nonlocal number
        while not is_over:
            number = (number * 31 + 7) % 1_000_003

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over = True
        thread.join()
