"""What a request is told beside its tokens: where and why it ended, its text, log-probabilities.

    ends        looked for in the text of the first 1, 2, .. tokens, each decoded from nothing: no
                text is held back, no run is cut, no step is in flight
    logprobs    held against the plain model's own distribution (vLLM's `raw_logprobs`), over one
                forward of the whole text, prompt and answer alike

Invariant: a number passes only by a comparison that is true, so NaN fails.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from torch import Tensor

from graphengine.checkpoints.tokenizer import REPLACEMENT, Tokenizer
from graphengine.config.constraint import KINDS
from graphengine.config.options import SamplingParams
from graphengine.decode.acceptance import FinishReason
from graphengine.decode.grammar import Matcher
from graphengine.decode.logprobs import Logprobs
from graphengine.decode.loop import DecodeLoop
from graphengine.decode.metrics import Acceptance
from graphengine.decode.sampling import GREEDY, Sampling
from graphengine.verify.teacher import TokenScores, teacher_force

NOTHING = SamplingParams()


class Ask(NamedTuple):
    """How a prompt is answered. `options` say here what ends the answer and what is told of it."""

    sampling: Sampling = GREEDY
    matcher: Matcher | None = None
    options: SamplingParams = NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
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
    asked: SamplingParams = NOTHING
    stop_reason: int | str | None = None
    text: str | None = None  # None: nobody wrote it
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None


def options_text(asked: SamplingParams) -> str:
    """What is asked for, by the options' names; of a grammar its kind."""
    given = {
        field.name: value
        for field in fields(SamplingParams)
        if (value := getattr(asked, field.name)) != getattr(NOTHING, field.name)
    }
    texts = [name if name in KINDS else f"{name} {value}" for name, value in given.items()]
    return ", ".join(texts) or "greedy"


# --- ends ---


class End(NamedTuple):
    """Where an answer ends, why, and its text."""

    num_tokens: int
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    text: str | None = None

    def __str__(self) -> str:
        why = "" if self.stop_reason is None else f" at {self.stop_reason!r}"
        return f"behind {self.num_tokens} tokens by {self.finish_reason}{why}"


def wrong_end(
    transcript: Transcript, stop_ids: Collection[int], tokenizer: Tokenizer | None
) -> str | None:
    """How an end is not the one that is due; None if it is.

    Args: stop_ids: the model's own.
    """
    t = transcript
    due = _due_end(t, stop_ids, tokenizer)
    found = End(len(t.output_ids), t.finish_reason, t.stop_reason, t.text)
    if due is None:
        return f"it ends {found}, where nothing is due to end it"
    if t.text is None:
        due = due._replace(text=None)
    if found[:3] != due[:3]:
        return f"it ends {found}, not {due}"
    return None if found == due else f"its text is {found.text!r}, not {due.text!r}"


def _due_end(t: Transcript, stop_ids: Collection[int], tokenizer: Tokenizer | None) -> End | None:
    """By the answer's own tokens; None: none of them ends it."""
    asked, before = t.asked, ""
    ends = {*asked.stop_token_ids, *(() if asked.ignore_eos else stop_ids)}
    is_kept = asked.include_stop_str_in_output

    # The first word's space is seen behind the prompt alone, where a tokenizer keeps none in front.
    behind = t.prompt_ids if tokenizer is not None and tokenizer.is_contextual else []

    def text(count: int) -> str:
        if tokenizer is None:
            return ""
        ids = behind, [*behind, *t.output_ids[:count]]
        begun, whole = (tokenizer.decode(x, asked.skip_special_tokens) for x in ids)
        return whole[len(begun) :]

    for n, token in enumerate(t.output_ids, 1):
        if token in ends and n > asked.min_tokens:
            why = token if token in asked.stop_token_ids else None
            return End(n, "stop", why, text(n if is_kept else n - 1))
        if asked.stop:
            now = text(n)
            whole = now.removesuffix(REPLACEMENT)  # the rest of a character may follow
            found = sorted(
                (begin + len(stop), begin, stop)
                for stop in asked.stop
                if (begin := whole.find(stop, max(0, len(before) + 1 - len(stop)))) >= 0
            )
            if found and n > asked.min_tokens:
                end, begin, stop = found[0]
                return End(n, "stop", stop, now[: end if is_kept else begin])
            before = whole
        if n == t.budget:
            return End(n, "length", None, text(n))
    return None


# --- log-probabilities ---


def wrong_logprobs(
    loop: DecodeLoop, transcript: Transcript, bound_nats: float
) -> tuple[float, str | None]:
    """(the largest error in nats, the first that is wrong: its option, position and why).

    Args:
        loop: idle.
        bound_nats: that each may be off by.
    """
    t, asked, worst = transcript, transcript.asked, 0.0
    num_prompt = len(t.prompt_ids)
    told: dict[int, tuple[str, int, Logprobs]] = {}  # by the token's place in the whole text
    for name, k, entries, first, due in (
        ("prompt_logprobs", asked.prompt_logprobs, t.prompt_logprobs, 0, num_prompt),
        ("logprobs", asked.logprobs, t.logprobs, num_prompt, len(t.output_ids)),
    ):
        if entries is None and k is None:
            continue
        if entries is None or k is None or len(entries) != due:
            return worst, f"{name} {k}: {len(entries or ())} entries, {due} tokens"
        for i, entry in enumerate(entries):
            if entry is not None:
                told[first + i] = f"{name} {k}: token {i}", k, entry
    if not told:
        return worst, None
    ids, wrong = [*t.prompt_ids, *t.output_ids], list[str]()

    def compare(logits_TV: Tensor, positions: Sequence[int], emitted_T: Tensor) -> TokenScores:
        nonlocal worst
        logprobs_TV = logits_TV.float().log_softmax(-1).cpu()
        for row_V, p in zip(logprobs_TV, positions, strict=True):
            where, k, entry = told.get(p + 1, ("", 0, {}))
            if entry:
                off, why = _compare(row_V, ids[p + 1], k, entry, bound_nats)
                worst = max(worst, off)
                wrong.extend([f"{where}: {why}"] if why else [])
        nothing = [0.0] * len(positions)
        return TokenScores(nothing, emitted_T.tolist(), nothing)

    teacher_force(loop, ids[:1], ids[1:], compare)
    return worst, wrong[0] if wrong else None


def _compare(
    true_V: Tensor, token: int, k: int, entry: Logprobs, bound_nats: float
) -> tuple[float, str | None]:
    """(the largest error of a token's entry, what is wrong with it)."""
    own, *others = entry
    if own != token:
        return 0.0, f"{own} stands first, {token} was said"
    found = {id: entry[id] - float(true_V[id]) for id in entry}
    worst = max(map(abs, found.values()))
    for id, off in found.items():
        if not abs(off) <= bound_nats:
            return worst, f"{id} has {entry[id]:.4f}, the plain model {entry[id] - off:.4f} nats"
    least = float(true_V.topk(k).values[-1]) - bound_nats if k else -math.inf
    likely = others if len(others) == k else [own, *others]  # the chosen one among them
    if len(likely) != k or any(true_V[id] < least for id in likely):
        return worst, f"{likely} are not the {k} most likely tokens"
    values = [entry[id] for id in others]
    if values != sorted(values, reverse=True):
        return worst, f"{others} are out of order"
    return worst, None
