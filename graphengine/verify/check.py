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
    ends         lost or surplus tokens: stop tokens and budgets inside an accepted run
    acceptance   the drafter: taps, rope theta, masks, K/V. They never change the output (a wrong
                 draft is rejected), so nothing else here can see them
    modes        a graph mode that gives other tokens than the same kernels launched one by one

Invariant: a token passes only by a comparison that is true, so NaN fails.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from graphengine.decode.acceptance import FinishReason
from graphengine.decode.grammar import Matcher
from graphengine.decode.loop import DecodeLoop
from graphengine.decode.metrics import Acceptance
from graphengine.decode.request import Request
from graphengine.decode.sampling import GREEDY, Sampling
from graphengine.verify.teacher import Scores

CheckName = Literal["regret", "identical", "finite", "ends", "acceptance", "modes"]
Mix = Literal["alone", "together", "mixed"]

DEFAULT_TOLERANCE_NATS = 0.20
# Share of tokens that must be the plain model's first choice. In float32 margins dwarf the noise;
# in bfloat16 logits are spaced 1/16 apart at 8..16, so exact ties alone are common.
MIN_IDENTICAL = {"float32": 0.999, "bfloat16": 0.95}


class Transcript(NamedTuple):
    """What one request decoded. `committed[k]` tokens came with step k; step 0 is the prefill.
    A step's last token is the target's own (unless a stop or the budget cut it), the others are
    accepted drafts."""

    prompt_ids: list[int]
    output_ids: list[int]
    committed: list[int]
    budget: int
    finish_reason: FinishReason | None
    acceptance: Acceptance
    error: str | None = None  # why decoding stopped it, where it did


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

    tolerance_nats: float = DEFAULT_TOLERANCE_NATS
    min_identical: float = MIN_IDENTICAL["float32"]
    min_acceptance: float | None = None


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
    wrong_ends: list[int]
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
    samplings: Sequence[Sampling] | None = None,
    matchers: Sequence[Matcher | None] | None = None,
) -> list[Transcript]:
    """Runs prompts to their end.

    Args:
        budgets: most new tokens, per prompt.
        bucket: runs in this built bucket alone, however few rows are taken; None as usual.
        one_by_one: submits a prompt when the one before it has ended.
        samplings: how each prompt's tokens are picked; default greedily.
        matchers: of the grammar that each answer follows; default none.

    Raises:
        ValueError: a prompt that cannot run.
    """
    vocab = loop.prefill.pair.target.config.vocab_size
    outside = [token for prompt in prompts for token in prompt if not 0 <= token < vocab]
    if outside:
        raise ValueError(f"token ids {outside[:5]} lie outside the vocabulary {vocab}")
    loop.reset()
    loop.first.only_bucket = bucket
    samplings = samplings or [GREEDY] * len(prompts)
    matchers = matchers or [None] * len(prompts)
    steps: dict[int, list[int]] = defaultdict(list)
    requests: list[Request] = []

    def run() -> None:
        for outputs in loop.run():
            for request, token_ids in outputs:
                steps[request.request_id].append(len(token_ids))

    try:
        asked = zip(prompts, budgets, samplings, matchers, strict=True)
        for prompt, budget, sampling, matcher in asked:
            ids = list(prompt)
            requests.append(loop.submit(ids, budget, stop_ids, sampling, matcher=matcher))
            if one_by_one:
                run()
        run()
    finally:
        loop.reset()
        loop.first.only_bucket = None
    return [
        Transcript(
            request.prompt_ids,
            request.output_ids,
            steps[request.request_id],
            request.max_total_tokens - len(request.prompt_ids),
            request.finish_reason,
            request.acceptance,
            request.error,
        )
        for request in requests
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
    scores: Sequence[Scores],
    tolerance_nats: float,
    stop_ids: Collection[int],
    num_counted: int | None = None,
) -> Report:
    """Sums up what the plain model says about every token of every transcript.

    Args:
        num_counted: acceptance is that of the first so many transcripts; default all.
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
    wrong = [i for i, t in enumerate(transcripts) if not _ends_rightly(t, stop_ids)]
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
        wrong_ends=[i for i in wrong if i not in errors],
        errors=errors,
    )


def _ends_rightly(transcript: Transcript, stop_ids: Collection[int]) -> bool:
    """Stops at the first stop token or at the budget, for the reason that it gives."""
    ids, reason = transcript.output_ids, transcript.finish_reason
    if not ids or any(token in stop_ids for token in ids[:-1]):
        return False
    if ids[-1] in stop_ids:
        return reason == "stop"
    return reason == "length" and len(ids) == transcript.budget


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
        failed["ends"] = f"requests {report.wrong_ends[:8]} end too early, too late or mislabelled"
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
