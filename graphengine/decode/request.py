"""One request's life on the host: waiting, running, finished.

Invariant: `start` is the number of tokens whose K/V is committed and equals the position of the
anchor, the newest known token; so `start == num_prompt_tokens + len(output_ids) - 1` while it runs.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

from graphengine.decode.acceptance import Commit, FinishReason, commit
from graphengine.decode.grammar import Matcher
from graphengine.decode.logprobs import Logprobs, Scores
from graphengine.decode.metrics import Acceptance, RequestMetrics
from graphengine.decode.sampling import GREEDY, Sampling

NOT_FINITE_TEXT = (
    "the target's logits for position {position} hold a NaN or an infinity, so there is no next "
    "token; check the weights (damaged, or of another model) and that the dtype is bfloat16 or "
    "float32"
)
NO_CHOICE_TEXT = (
    "no token is left for position {position}: allowed_token_ids, bad_words, min_tokens, a penalty "
    "or logit_bias rule out all that there is, or that the grammar allows; or the target's logits "
    "are not finite"
)


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A prompt being continued. Created by the engine; times are `time.perf_counter` seconds."""

    request_id: int
    prompt_ids: list[int]
    max_total_tokens: int
    stop_ids: Collection[int]
    asked_stop_ids: Collection[int] = ()
    """Those of them that the user named."""
    acceptance: Acceptance
    sampling: Sampling = GREEDY
    matcher: Matcher | None = None
    """Where its answer stands in a grammar; None: it has none."""
    logprobs: int | None = None
    """Alternatives of each token to tell log-probabilities of; None: of no token."""
    prompt_logprobs: int | None = None
    """The same of the prompt."""
    arrival_s: float = field(default_factory=time.perf_counter)
    pages: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    """Of the prompt, whose K/V an earlier request has left."""
    state_slot: int = 0
    """Of its recurrent states; the null slot for a target that has none."""
    spare_slots: list[int] = field(default_factory=list)
    """For states that are to be kept of its prompt."""
    kept_slots: dict[int, int] = field(default_factory=dict)
    """Those that its prefill writes, by how many tokens they are behind."""
    answer_slots: list[int] = field(default_factory=list)
    """Two for the last states that its answer leaves, every so many tokens, by the state's number
    modulo 2: steps in flight at its end may leave another. Empty: nothing is kept."""
    output_ids: list[int] = field(default_factory=list)
    start: int = 0
    output_logprobs: list[Logprobs] = field(default_factory=list)
    """One a token of the output, where they were asked for; those of `prompt_ids[1:]` below."""
    prompt_scores: list[Logprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """With "stop": the token or text that was asked for; None where the model itself ended."""
    error: str | None = None
    """What went wrong, where `finish_reason` is "error"."""
    fallback_reason: str | None = None
    """Why it left speculation; for good, as the drafter's context is not kept in plain decoding."""
    num_plain_steps: int = 0
    submitted_s: float = field(default_factory=time.perf_counter)
    prefill_s: float = 0.0
    """When its first row was queued."""
    queued_s: float = 0.0
    """When all was queued that was admitted with it."""
    prefilled_s: float = 0.0
    """When its first token was there."""
    first_token_s: float = 0.0
    last_token_s: float = 0.0

    @property
    def budget(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_total_tokens - len(self.prompt_ids) - len(self.output_ids)

    @property
    def token_ids(self) -> list[int]:
        """All that are known; the last is the anchor."""
        return self.prompt_ids + self.output_ids

    @property
    def chooses(self) -> bool:
        """Whether its tokens are anything but the model's first choices."""
        draws = not self.sampling.is_greedy or self.sampling.adjusts
        return draws or self.matcher is not None

    @property
    def anchor(self) -> int:
        """The newest known token; its K/V is not written yet."""
        return self.output_ids[-1]

    def begin(self, first_token: int) -> list[int]:
        """Takes the prefill's token. Mutates: self. Returns the new tokens."""
        self.start = len(self.prompt_ids)
        self.first_token_s = time.perf_counter()
        return self._extend(commit([first_token], 0, self.stop_ids, self.budget))

    def advance(self, target_ids: list[int], num_accepted: int) -> list[int]:
        """Takes a verified block. Mutates: self. Returns the new tokens."""
        if len(target_ids) == 1 and self.acceptance.num_draft_tokens:
            self.num_plain_steps += 1
        else:
            self.acceptance.add(num_accepted, len(target_ids) - 1)
        self.start += num_accepted + 1
        return self._extend(commit(target_ids, num_accepted, self.stop_ids, self.budget))

    def tell(self, scores: Scores, new: int) -> None:
        """Notes the log-probabilities of the newest tokens. Mutates: self."""
        if self.logprobs is not None and new:
            self.output_logprobs += scores.told(self.output_ids[-new:], self.logprobs)

    def end_at(self, text: str, num_dropped: int) -> None:
        """Ends it at a stop string; the newest tokens lie behind it. Mutates: self."""
        count = len(self.output_ids) - num_dropped
        del self.output_ids[count:], self.output_logprobs[count:]
        self.finish_reason, self.stop_reason, self.error = "stop", text, None

    def fail(self, error: str) -> None:
        """Ends it with an error. Mutates: self."""
        self.finish_reason, self.error = "error", error

    def _extend(self, committed: Commit) -> list[int]:
        wrong = None
        if self.matcher is not None:  # which nobody asks behind an end, but for what went wrong
            wrong = self.matcher.advance([] if committed.finish_reason else committed.token_ids)
        if wrong is not None:  # then these may be none of the grammar's
            committed = Commit([], "error")
        self.output_ids += committed.token_ids
        self.finish_reason = committed.finish_reason
        if committed.finish_reason == "stop" and self.anchor in self.asked_stop_ids:
            self.stop_reason = self.anchor
        if wrong is not None:
            self.fail(f"the grammar cannot be followed any further: {wrong}")
        elif committed.finish_reason == "error":
            position = len(self.prompt_ids) + len(self.output_ids)
            asks = self.matcher is not None or self.sampling.adjusts
            text = NO_CHOICE_TEXT if asks else NOT_FINITE_TEXT
            self.fail(text.format(position=position))
        self.last_token_s = time.perf_counter()
        return committed.token_ids

    def metrics(self) -> RequestMetrics:
        """Cost so far; what has not begun or not come yet has cost nothing."""

        def ms(begin_s: float, end_s: float) -> float:
            return (end_s - begin_s) * 1e3 if begin_s and end_s else 0.0

        return RequestMetrics(
            num_prompt_tokens=len(self.prompt_ids),
            num_output_tokens=len(self.output_ids),
            num_cached_tokens=self.num_cached_tokens,
            ttft_ms=ms(self.arrival_s, self.first_token_s),
            tokenize_ms=ms(self.arrival_s, self.submitted_s),
            queue_ms=ms(self.submitted_s, self.prefill_s),
            prefill_ms=ms(self.prefill_s, self.prefilled_s),
            launch_ms=ms(self.prefill_s, self.queued_s),
            first_token_ms=ms(self.prefilled_s, self.first_token_s),
            decode_ms=ms(self.first_token_s, self.last_token_s),
            acceptance=self.acceptance,
            num_plain_steps=self.num_plain_steps,
            fallback_reason=self.fallback_reason if self.num_plain_steps else None,
        )
