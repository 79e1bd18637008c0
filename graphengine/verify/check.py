"""Is the output what the plain model would say? Decode, judge every token, decide.

`decode` runs prompts through a decode loop and keeps which step committed which token; `judge`
compares every token with the plain model's own scores (teacher.py); `decide` turns the numbers into
named checks. Why positions and not texts: in bfloat16 two equally right forwards disagree on near
ties, and one makes the rest of two texts incomparable; position i is judged after the tokens that
were emitted before it.

Which check catches what:
    regret       the output itself: K/V slots, masks, positions, stale plans or graphs of the target
    identical    the same faults while they are still small: too many near ties are no coincidence
    finite       NaN or Inf logits, in decoding (the request stops) or in the plain model
    ends         lost or surplus tokens: stops and budgets inside an accepted run (told.py)
    logprobs     other log-probabilities than the plain model's: of other rows, steps, logits
    acceptance   the drafter: taps, rope theta, masks, K/V. They never change the output (a wrong
                 draft is rejected), so nothing else here can see them
    modes        a graph mode that gives other tokens than the same kernels launched one by one

Invariant: a token passes only by a comparison that is true, so NaN fails.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from graphengine.checkpoints.tokenizer import Tokenizer
from graphengine.decode.loop import DecodeLoop
from graphengine.decode.metrics import Acceptance
from graphengine.decode.request import Request
from graphengine.results import GenerationResult, Teller
from graphengine.verify.teacher import TokenScores
from graphengine.verify.told import Ask, Transcript, options_text, wrong_end

CheckName = Literal["regret", "identical", "finite", "ends", "logprobs", "acceptance", "modes"]
Mix = Literal["alone", "together", "mixed"]

# In bfloat16 logits of 16 to 32 are spaced 1/8 apart, and two roundings make 0.25: seen on an H200
# in 2 of 5,282 tokens that options led away from what the model learnt, on an H100 in 1 of 1,386 of
# the bundled hybrid's, with the same token in every mode, and in none of 28,611 in float32.
TOLERANCE_NATS = {"float32": 0.20, "bfloat16": 0.30}
# Share of tokens that must be the plain model's first choice. In float32 margins dwarf the noise;
# in bfloat16 logits are spaced 1/16 apart at 8..16, so exact ties alone are common.
MIN_IDENTICAL = {"float32": 0.999, "bfloat16": 0.95}
# Nats that a log-probability may be off by. Measured on the bundled pairs on the CPU: 5e-5 and
# 0.31, for tokens 15 nats below the first: unlike a regret it has the largest logits' rounding.
MAX_LOGPROB_ERROR = {"float32": 1e-3, "bfloat16": 0.5}


class Place(NamedTuple):
    """A judged token that is not the plain model's first choice, and where it came from."""

    request: int
    index: int  # in the output
    step: int  # 0: the prefill
    row: int  # in the step's block
    num_committed: int  # tokens of that step
    emitted_id: int
    best_id: int
    regret_nats: float
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What passes. `min_acceptance` is a mean acceptance length; None only reports it."""

    tolerance_nats: float = TOLERANCE_NATS["float32"]
    min_identical: float = MIN_IDENTICAL["float32"]
    min_acceptance: float | None = None
    max_logprob_error_nats: float = MAX_LOGPROB_ERROR["float32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All judged tokens of one run. `first_true` lies above the tolerance (or is NaN), `ties` are
    the other tokens that differ from the plain model's first choice."""

    num_tokens: int
    num_identical: int
    num_nonfinite: int
    max_regret_nats: float
    mean_regret_nats: float
    first_true: Place | None
    num_true: int
    ties: list[Place]
    acceptance: Acceptance
    acceptance_per_prompt: list[float]
    wrong_ends: dict[int, str]  # request -> how
    errors: dict[int, str]  # requests that decoding stopped

    @property
    def identical_fraction(self) -> float:
        """Share of tokens that are the plain model's first choice; 0 without tokens."""
        return self.num_identical / max(self.num_tokens, 1)


def decode(
    loop: DecodeLoop,
    prompts: Sequence[Sequence[int]],
    budgets: Sequence[int],
    stop_ids: Collection[int],
    *,
    bucket: int | None = None,
    one_by_one: bool = False,
    asks: Sequence[Ask] | None = None,
    tokenizer: Tokenizer | None = None,
    begins: Callable[[int, Request], object] = lambda place, request: None,
) -> list[Transcript]:
    """Runs prompts to their end; who runs together is the same each time, in each graph mode.

    Args:
        budgets: most new tokens, per prompt.
        bucket: runs in this built bucket alone, however few rows are taken; None as usual.
        one_by_one: submits a prompt when the one before it has ended.
        asks: how each prompt is answered; default greedily.
        tokenizer: writes the texts, in which stop strings are found.
        begins: told each prompt's place and its request before that runs.

    Raises:
        ValueError: a prompt that cannot run.
    """
    vocab = loop.prefill.pair.target.config.vocab_size
    outside = [token for prompt in prompts for token in prompt if not 0 <= token < vocab]
    if outside:
        raise ValueError(
            f"token ids {outside[:5]} lie outside the vocabulary of {vocab}; pass ids of this "
            "model's tokenizer"
        )
    loop.reset()
    loop.first.only_bucket, loop.is_repeatable = bucket, True
    asks = asks or [Ask()] * len(prompts)
    tellers: dict[int, Teller] = {}
    steps: dict[int, list[int]] = defaultdict(list)
    results: dict[int, GenerationResult] = {}

    def run() -> None:
        for outputs in loop.run():
            for request, token_ids in outputs:
                number = request.request_id
                chunk = tellers[number].chunk(request, token_ids)
                steps[number].append(len(chunk.token_ids))
                if chunk.result is not None:
                    results[number] = chunk.result

    try:
        each = enumerate(zip(prompts, budgets, asks, strict=True))
        for place, (prompt, budget, (sampling, matcher, own)) in each:
            request = loop.submit(
                list(prompt),
                budget,
                () if own.ignore_eos else stop_ids,
                sampling,
                asked_stop_ids=own.stop_token_ids,
                logprobs=own.logprobs,
                prompt_logprobs=own.prompt_logprobs,
                matcher=matcher,
            )
            begins(place, request)
            tellers[request.request_id] = Teller(loop, [request], tokenizer, own)
            if one_by_one:
                run()
        run()
    finally:
        loop.reset()
        loop.first.only_bucket, loop.is_repeatable = None, False
    room = loop.config.max_model_len
    return [
        Transcript(
            prompt_ids=list(prompt),
            output_ids=result.token_ids,
            committed=steps[number],
            budget=min(budget, room - len(prompt)),
            finish_reason=result.finish_reason,
            acceptance=result.metrics.acceptance,
            error=result.error,
            asked=ask.options,
            stop_reason=result.stop_reason,
            text=result.text if tokenizer is not None else None,
            logprobs=result.logprobs,
            prompt_logprobs=result.prompt_logprobs,
        )
        for prompt, budget, ask, number in zip(prompts, budgets, asks, tellers, strict=True)
        for result in [results[number]]
    ]


def mixed(lengths: Sequence[int], max_new_tokens: int) -> tuple[list[int], list[int]]:
    """An order in which short and long prompts are neighbours, and budgets that end at different
    times: rows then leave, join and are reloaded in the middle of others.

    Args:
        lengths: of the prompts.

    Returns:
        (indices of the prompts in the new order, budgets in that order)
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    zigzag = [order[-1 - i // 2 if i % 2 else i // 2] for i in range(len(order))]
    shares = (1.0, 0.25, 0.75, 0.1, 0.5)
    return zigzag, [max(1, int(max_new_tokens * shares[i % 5])) for i in range(len(order))]


def judge(
    transcripts: Sequence[Transcript],
    scores: Sequence[TokenScores],
    tolerance_nats: float,
    stop_ids: Collection[int],
    num_counted: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> Report:
    """Sums up what the plain model says about every token of every transcript.

    Args:
        num_counted: acceptance is that of the first so many transcripts; default all.
        tokenizer: of the texts, where any were written.
    """
    places: list[Place] = []
    regrets: list[float] = []
    num_identical = 0
    for number, (transcript, score) in enumerate(zip(transcripts, scores, strict=True)):
        rows = [(step, row, n) for step, n in enumerate(transcript.committed) for row in range(n)]
        judged = zip(rows, transcript.output_ids, *score, strict=True)
        for index, (where, emitted, regret, best, logprob) in enumerate(judged):
            regrets.append(regret)
            if emitted == best and math.isfinite(regret):
                num_identical += 1
            else:
                places.append(Place(number, index, *where, emitted, best, regret, logprob))
    ties = [place for place in places if place.regret_nats <= tolerance_nats]
    true = [place for place in places if not place.regret_nats <= tolerance_nats]  # NaN too
    finite = [regret for regret in regrets if math.isfinite(regret)]
    errors = {i: t.error for i, t in enumerate(transcripts) if t.error}
    ends = {i: wrong_end(t, stop_ids, tokenizer) for i, t in enumerate(transcripts) if not t.error}
    return Report(
        num_tokens=len(regrets),
        num_identical=num_identical,
        num_nonfinite=len(regrets) - len(finite),
        max_regret_nats=max(finite, default=0.0),
        mean_regret_nats=math.fsum(finite) / max(len(finite), 1),
        first_true=true[0] if true else None,
        num_true=len(true),
        ties=ties,
        acceptance=Acceptance.merge(t.acceptance for t in transcripts[:num_counted]),
        acceptance_per_prompt=[t.acceptance.mean_acceptance_length for t in transcripts],
        wrong_ends={
            i: f"({options_text(transcripts[i].asked)}): {how}" for i, how in ends.items() if how
        },
        errors=errors,
    )


def decide(report: Report, limits: Limits) -> dict[CheckName, str]:
    """The checks that failed, each with what was measured against what; empty: PASS."""
    failed: dict[CheckName, str] = {}
    if report.num_nonfinite:
        failed["finite"] = f"{report.num_nonfinite} tokens have NaN or Inf under the plain model"
    if report.errors:
        failed["finite"] = stopped(report.errors)
    if report.num_true:
        failed["regret"] = (
            f"{report.num_true} of {report.num_tokens} tokens lie more than "
            f"{limits.tolerance_nats:g} nats below the plain model's choice, the worst by "
            f"{report.max_regret_nats:.3g}"
        )
    if not report.identical_fraction >= limits.min_identical:
        failed["identical"] = (
            f"{report.identical_fraction:.2%} of the tokens are the plain model's first choice, "
            f"{limits.min_identical:.2%} expected"
        )
    if report.wrong_ends:
        request, how = next(iter(report.wrong_ends.items()))
        failed["ends"] = f"{len(report.wrong_ends)} wrong ends; request {request} {how}"
    mean = report.acceptance.mean_acceptance_length
    if limits.min_acceptance is not None and not mean >= limits.min_acceptance:
        failed["acceptance"] = (
            f"{mean:.2f} tokens a step, {limits.min_acceptance:g} expected: the output is right, "
            "the drafter is fed or wired wrongly (taps, rope, mask, K/V) or is another target's"
        )
    return failed


def stopped(errors: dict[int, str]) -> str:
    """What the check `finite` says where decoding stopped requests: number -> why, not empty."""
    request, error = next(iter(errors.items()))
    return f"{len(errors)} requests were stopped; request {request}: {error}"


def disagreement(first: Sequence[Transcript], other: Sequence[Transcript]) -> str | None:
    """Where two runs of the same kernels part, which they must not; None where they agree."""
    for number, (a, b) in enumerate(zip(first, other, strict=True)):
        if a.output_ids != b.output_ids:
            pairs = enumerate(zip(a.output_ids, b.output_ids, strict=False))
            where = next((f"token {i}" for i, (x, y) in pairs if x != y), "its length")
            return f"request {number} differs from the first graph mode in {where}"
    return None
