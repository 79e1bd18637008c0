"""The runs of `graphengine verify`: which graph modes, buckets and batch mixes, in which order.

Every way to run is a `Cell`; one engine serves all cells of a graph mode. Outputs of the same
tokens are judged once per engine.

Invariant: two graph modes of one attention backend run the same kernels on the same batches, so
their tokens must be equal, not only within the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from graphengine.checkpoints.tokenizer import Tokenizer
from graphengine.decode.metrics import Acceptance
from graphengine.decode.request import Request
from graphengine.decode.sampling import Sampling
from graphengine.prompts import Turn
from graphengine.startup.build import Built
from graphengine.verify import check
from graphengine.verify.check import CheckName, Limits, Mix, Report
from graphengine.verify.forced import ForcedLength, lengths, missed
from graphengine.verify.option_cases import OptionCase, judge_of, matcher_of
from graphengine.verify.teacher import TokenScores, first_choice, teacher_force
from graphengine.verify.told import Ask, Transcript, wrong_logprobs

PLAIN = "plain"
RETURNING = (129, 130)  # tokens: whole pages of every kernel, and a row or two behind them


class Mode(NamedTuple):
    """How steps are launched, as `Engine.from_pretrained` takes it."""

    graph_mode: str
    attention_backend: str


class Cell(NamedTuple):
    """One row of the table: `mode` is resolved, e.g. "full triton", or "plain" with no drafter;
    with forced drafts the length stands behind it, "full triton forced 3"."""

    mode: str
    bucket: int
    mix: Mix

    def __str__(self) -> str:
        return f"{self.mode} bucket {self.bucket} {self.mix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """What a cell measured and which of its checks failed; `same_as_plain`: of all transcripts;
    `max_logprob_error_nats`: None where none were asked for."""

    cell: Cell
    report: Report
    failed: dict[CheckName, str]
    transcripts: list[Transcript]
    same_as_plain: int | None = None
    max_logprob_error_nats: float | None = None


class Draws(NamedTuple):
    """Sampled outputs [prompt][run][position]. `errors` of requests that decoding stopped, by
    prompt * runs + run; where there are any, nothing can be compared."""

    outputs: list[list[list[int]]]
    mean_acceptance_length: float
    errors: dict[int, str]


def matrix_modes(
    device: str, refusal: Callable[[Mode], str | None]
) -> tuple[list[Mode], str | None]:
    """The graph modes and attentions that a pair can run on a device, and why FlashInfer's are not
    among them.

    Args: refusal: why the pair cannot run a mode.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return [Mode("none", "torch"), Mode("none", "triton")], None
    without = refusal(Mode("none", "flashinfer"))
    backends = ["triton"] if without else ["flashinfer", "triton"]
    modes = ("none", "piecewise", "full")
    return [Mode(mode, name) for name in backends for mode in modes], without


def mixes_of(bucket: int) -> tuple[Mix, ...]:
    """alone: one row, the rest padding; together: full; mixed: short beside long, ragged ends."""
    return ("alone", "mixed") if bucket == 1 else ("alone", "together", "mixed")


def encode(tokenizer: Tokenizer | None, prompts: Sequence[Turn], raw: bool) -> list[list[int]]:
    """Token ids of single prompts; ids are taken as they are.

    Raises:
        ValueError: text for a model without a tokenizer.
    """
    found: list[list[int]] = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            found.append(prompt)
        elif tokenizer is None:
            raise ValueError("this model has no tokenizer; pass token ids with --prompt-file")
        elif raw:
            found.append(tokenizer.encode_prompt(prompt))
        else:
            found.append(tokenizer.encode_chat([{"role": "user", "content": prompt}]))
    return found


def returning(prompt: Sequence[int], room: int) -> list[list[int]]:
    """Prompts to append to others, made of one of them. Each comes twice; run alone, the second
    finds all but its last row or two in the cache, as a chat's next turn does.

    Args: room: they have fewer tokens.
    """
    lengths = [length for length in RETURNING if length < room]
    return [(list(prompt) * length)[:length] for length in lengths for _ in range(2)]


def verify_mode(
    built: Built,
    label: str,
    ids: Sequence[Sequence[int]],
    cells: Sequence[tuple[int, Mix]],
    *,
    max_new_tokens: int,
    limits: Limits,
    num_counted: int | None = None,
    first: Sequence[CellResult] = (),
    forced: ForcedLength | None = None,
    cases: Sequence[OptionCase] | None = None,
    progress: Callable[[Cell], None] = lambda cell: None,
) -> list[CellResult]:
    """Runs and judges every cell of one loaded engine.

    Args:
        ids: the prompts.
        num_counted: acceptance is that of the first so many prompts; default all.
        first: earlier results; in another graph mode of the same attention tokens must be equal.
        forced: runs each cell with every accepted length instead of the drafter's own drafts.
        cases: what each prompt asks for; default nothing.

    Raises:
        ValueError: a prompt that cannot run.
    """
    cases = cases or [OptionCase()] * len(ids)
    judged: dict[tuple[int, ...], TokenScores] = {}
    reference = {_kernels(r.cell): r.transcripts for r in reversed(first)}
    results: list[CellResult] = []
    runs: list[tuple[Cell, int | None]] = [(Cell(label, *cell), None) for cell in cells]
    if forced is not None:
        forced.install_(built.loop)
        runs = [
            (Cell(f"{label} forced {length}", bucket, mix), length)
            for bucket, mix in cells
            for length in lengths(built.loop, bucket)
        ]
    for cell, length in runs:
        progress(cell)
        if forced is not None and length is not None:
            forced.length = length
        transcripts = _answers(built, ids, cases, cell, max_new_tokens, forced)
        scores, limit, stop_ids = [], limits.tolerance_nats, built.stop_ids
        for i, (t, case) in enumerate(zip(transcripts, cases, strict=True)):
            key = (i if case.chooses else -1, len(t.prompt_ids), *t.prompt_ids, *t.output_ids)
            if key not in judged:
                judge = first_choice
                if case.chooses:
                    judge = judge_of(built, case, t.prompt_ids, t.output_ids, limit)
                judged[key] = teacher_force(built.loop, t.prompt_ids, t.output_ids, judge)
            scores.append(judged[key])
        report = check.judge(transcripts, scores, limit, stop_ids, num_counted, built.tokenizer)
        failed = check.decide(report, limits)
        if length is not None and (text := missed(report, length)):
            failed["acceptance"] = text
        worst, wrong = _worst_logprob(built, transcripts, limits.max_logprob_error_nats)
        if wrong is not None:
            failed["logprobs"] = wrong
        before = reference.get(_kernels(cell), transcripts)
        if parted := check.disagreement(before, transcripts):
            failed["modes"] = parted
        results.append(
            CellResult(
                cell=cell,
                report=report,
                failed=failed,
                transcripts=transcripts,
                max_logprob_error_nats=worst,
            )
        )
    return results


def _answers(
    built: Built,
    ids: Sequence[Sequence[int]],
    cases: Sequence[OptionCase],
    cell: Cell,
    max_new_tokens: int,
    forced: ForcedLength | None,
) -> list[Transcript]:
    """What is decoded in a cell, in the order of the prompts, so that cells can be compared."""
    order, budgets = list(range(len(ids))), [max_new_tokens] * len(ids)
    if cell.mix == "mixed":
        order, budgets = check.mixed([len(prompt) for prompt in ids], max_new_tokens)

    def begins(place: int, request: Request) -> None:
        if forced is not None:
            forced.begins(order[place], request)

    ran = check.decode(
        built.loop,
        [ids[i] for i in order],
        [cases[i].budget(most) for i, most in zip(order, budgets, strict=True)],
        built.stop_ids,
        bucket=cell.bucket,
        one_by_one=cell.mix == "alone",
        asks=[Ask(cases[i].sampling, matcher_of(built, cases[i]), cases[i].asked) for i in order],
        tokenizer=built.tokenizer,
        begins=begins,
    )
    return [transcript for _, transcript in sorted(zip(order, ran, strict=True))]


def _worst_logprob(
    built: Built, transcripts: Sequence[Transcript], bound_nats: float
) -> tuple[float | None, str | None]:
    """(the largest error in nats, None where none were asked for; the first that is wrong)."""
    worst = first = None
    for i, t in enumerate(transcripts):
        if t.asked.num_logprobs is not None and not t.error:
            off, wrong = wrong_logprobs(built.loop, t, bound_nats)
            worst = off if worst is None else max(worst, off)
            if first is None and wrong is not None:
                first = f"request {i}, {wrong}"
    return worst, first


def _kernels(cell: Cell) -> tuple[str, int, Mix]:
    """Cells that differ in nothing but their graph mode have the same."""
    return cell.mode.partition(" ")[2], cell.bucket, cell.mix


def compare_with_plain(
    results: Sequence[CellResult], plain: Sequence[CellResult]
) -> list[CellResult]:
    """Counts the requests that say exactly what plain decoding said in the same cell."""
    baseline = {(r.cell.bucket, r.cell.mix): r.transcripts for r in plain}

    def same(r: CellResult) -> int:
        pairs = zip(baseline[r.cell.bucket, r.cell.mix], r.transcripts, strict=True)
        return sum(a.output_ids == b.output_ids for a, b in pairs)

    return [replace(result, same_as_plain=same(result)) for result in results]


def draw(
    built: Built,
    ids: Sequence[Sequence[int]],
    num_samples: int,
    max_new_tokens: int,
    sampling: Sampling,
) -> Draws:
    """Draws every prompt `num_samples` times, with consecutive seeds from `sampling.seed` on."""
    prompts = [prompt for prompt in ids for _ in range(num_samples)]
    asks = [Ask(sampling.numbered(i)) for i in range(len(prompts))]
    budgets = [max_new_tokens] * len(prompts)
    transcripts = check.decode(built.loop, prompts, budgets, built.stop_ids, asks=asks)
    outputs = [t.output_ids for t in transcripts]
    return Draws(
        [outputs[i : i + num_samples] for i in range(0, len(outputs), num_samples)],
        Acceptance.merge(t.acceptance for t in transcripts).mean_acceptance_length,
        {i: t.error for i, t in enumerate(transcripts) if t.error},
    )


def numbers(results: Sequence[CellResult]) -> dict[str, Any]:
    """Mode -> cell -> measurements, keys with their units (profiles/result_schema.py)."""
    found: dict[str, Any] = {}
    same = ("num_tokens", "identical_fraction", "max_regret_nats", "mean_regret_nats")
    for result in results:
        report, cell = result.report, result.cell
        values: dict[str, Any] = {name: getattr(report, name) for name in same}
        values |= {"num_over_tolerance": report.num_true, "num_ties": len(report.ties)}
        values["num_nonfinite"] = report.num_nonfinite
        if report.acceptance.num_draft_tokens:
            values["mean_acceptance_length"] = report.acceptance.mean_acceptance_length
            values["mean_acceptance_per_prompt_tokens"] = report.acceptance_per_prompt
        if result.max_logprob_error_nats is not None:
            values["max_logprob_error_nats"] = result.max_logprob_error_nats
        if result.same_as_plain is not None:
            values["num_same_as_plain"] = result.same_as_plain
            values["num_prompts"] = len(result.transcripts)
        name = f"bucket_{cell.bucket}_{cell.mix}"
        found.setdefault(cell.mode.replace(" ", "_"), {})[name] = values
    return found
