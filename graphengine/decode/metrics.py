"""What a request cost and how well it was drafted.

Two counts of the same thing are in use in the field, so both are named: the acceptance length
counts the bonus token (vLLM, SGLang, the DFlash paper; 1.0 = drafting is useless), the accepted
draft tokens do not (pegainfer, lmdeploy; 0.0 = useless).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

PROMPT_LENGTHS = (128, 1024, 8192)


@dataclass(slots=True)
class Acceptance:
    """Histograms of verified blocks: `steps_by_accepted[a]` accepted a drafts, and
    `steps_by_drafted[n]` held n, at most `num_draft_tokens`; by default all held so many."""

    num_draft_tokens: int
    steps_by_accepted: list[int] = field(default_factory=list)
    steps_by_drafted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps_by_accepted = self.steps_by_accepted or [0] * (self.num_draft_tokens + 1)
        full = [0] * self.num_draft_tokens + [self.num_steps]
        self.steps_by_drafted = self.steps_by_drafted or full

    def add(self, num_accepted: int, num_drafted: int | None = None) -> None:
        """Counts one block, by default of `num_draft_tokens` drafts. Mutates: self."""
        self.steps_by_accepted[num_accepted] += 1
        self.steps_by_drafted[-1 if num_drafted is None else num_drafted] += 1

    @property
    def num_steps(self) -> int:
        """Verified blocks."""
        return sum(self.steps_by_accepted)

    @property
    def num_drafted(self) -> int:
        """Drafts of all blocks."""
        return sum(d * n for d, n in enumerate(self.steps_by_drafted))

    @property
    def num_accepted(self) -> int:
        """Accepted drafts of all blocks, bonus not counted."""
        return sum(a * n for a, n in enumerate(self.steps_by_accepted))

    @property
    def mean_accepted_draft_tokens(self) -> float:
        """Accepted drafts per block, bonus not counted: 0 .. G-1."""
        return self.num_accepted / self.num_steps if self.num_steps else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed per block, bonus counted: 1 .. G."""
        return self.mean_accepted_draft_tokens + 1.0 if self.num_steps else 0.0

    @property
    def per_position(self) -> list[float]:
        """Share, of the blocks that held a draft j (0-based), of those that accepted it; up to the
        last draft of the longest block."""
        held = [sum(self.steps_by_drafted[j + 1 :]) for j in range(self.num_draft_tokens)]
        return [sum(self.steps_by_accepted[j + 1 :]) / n for j, n in enumerate(held) if n]

    @classmethod
    def merge(cls, parts: Iterable[Acceptance]) -> Acceptance:
        """The histograms of several requests together."""
        parts = list(parts)
        total = cls(max((part.num_draft_tokens for part in parts), default=0))
        for part in parts:
            for accepted, steps in enumerate(part.steps_by_accepted):
                total.steps_by_accepted[accepted] += steps
            for drafted, steps in enumerate(part.steps_by_drafted):
                total.steps_by_drafted[drafted] += steps
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Cost of one request. Times are wall-clock milliseconds of the host.

    `ttft_ms`: from the call to the first token, which is the sum of `tokenize_ms` (of all prompts
    of the call), `queue_ms` (until its first row is queued), `prefill_ms` (until the first token is
    on the host; of a shared chunk it is everyone's) and `first_token_ms` (until it is taken). Of
    a request that ended before, what it did not come to is 0.
    `num_cached_tokens` of the prompt were not run, an earlier request had left them.
    `launch_ms` of `prefill_ms` the host queued, this request and those admitted with it.
    `decode_ms`: from the first token to the last. `num_steps`: verified blocks and plain steps.
    `fallback_reason`: why a drafted request went on plainly, for `num_plain_steps` steps; these do
    not count in `acceptance`.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    ttft_ms: float
    tokenize_ms: float = 0.0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    launch_ms: float = 0.0
    first_token_ms: float = 0.0
    decode_ms: float
    acceptance: Acceptance
    num_plain_steps: int = 0
    fallback_reason: str | None = None

    @property
    def num_steps(self) -> int:
        """Target forwards after the prefill."""
        return self.acceptance.num_steps + self.num_plain_steps

    @property
    def ms_per_token(self) -> float:
        """Mean time per output token after the first (TPOT); 0 for a single token."""
        rest = self.num_output_tokens - 1
        return self.decode_ms / rest if rest > 0 else 0.0

    @property
    def ms_per_step(self) -> float:
        """Mean time per step; with other requests in the batch it is the batch's step."""
        return self.decode_ms / self.num_steps if self.num_steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Output tokens after the first per second of decoding; 0 for a single token."""
        rest = self.num_output_tokens - 1
        return rest / self.decode_ms * 1e3 if self.decode_ms > 0 and rest > 0 else 0.0


def acceptance_by_prompt(
    requests: Iterable[RequestMetrics],
) -> dict[tuple[bool, int | None], Acceptance]:
    """Acceptance apart by where it is lost unseen: (behind cached prompt tokens, prompt tokens
    below: of PROMPT_LENGTHS; None: longer) -> of these requests, in order."""
    parts: dict[tuple[bool, int | None], list[Acceptance]] = {}
    for request in requests:
        below = next((n for n in PROMPT_LENGTHS if request.num_prompt_tokens < n), None)
        parts.setdefault((request.num_cached_tokens > 0, below), []).append(request.acceptance)
    order = sorted(parts, key=lambda part: (part[0], part[1] or float("inf")))
    return {part: Acceptance.merge(parts[part]) for part in order}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWidth:
    """Why a bucket's blocks are as long as they are (`startup.draft_width`).

    `step_s`: rows of a request in a verify -> seconds that a step takes, 1 is plain decoding;
    `tokens`: rows -> tokens of a request that it is assumed to commit.
    """

    bucket: int
    rows: int
    step_s: Mapping[int, float]
    tokens: Mapping[int, float]

    @property
    def num_draft_tokens(self) -> int:
        """Drafts of a block."""
        return self.rows - 1

    @property
    def is_below_plain(self) -> bool:
        """Whether plain decoding would be faster than every width."""
        return self.tokens[self.rows] / self.step_s[self.rows] < 1 / self.step_s[1]

    def line(self) -> str:
        """The choice and its reason, for people."""
        widest = max(self.step_s)
        curve = ", ".join(f"{rows}: {s * 1e3:.3g}" for rows, s in sorted(self.step_s.items()))
        text = (
            f"bucket {self.bucket} drafts {self.num_draft_tokens} a step: measured ms a step by "
            f"rows {curve}; a block of {widest} taken to yield {self.tokens[widest]:.2f} tokens "
            "(--num-speculative-tokens N decides instead)"
        )
        if self.is_below_plain:
            text += "; plain decoding is likely to be faster, and falling back will show"
        return text

    def to_json(self) -> dict[str, Any]:
        """The choice and the curve, keys with their units (profiles/result_schema.py)."""
        curve = {
            f"rows_{rows}": {"step_ms": s * 1e3, "num_assumed_tokens": self.tokens[rows]}
            for rows, s in sorted(self.step_s.items())
        }
        return {"num_draft_tokens": self.num_draft_tokens, **curve}


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupMetrics:
    """Where the time before the first request went, in seconds.

    `num_compiled` dense segments were compiled, `num_cache_hits` found on disk
    (capture/precompiled.py); 0 and 0 without compilation. `compiler_wait_s` is the part of
    `compile_s` in which the weights were there and the compilers' imports not. `buckets`: the batch
    sizes built ahead. `draft_widths`: of every bucket, where they were measured.
    """

    load_s: float
    compile_s: float
    capture_s: float
    warmup_s: float = 0.0
    compiler_wait_s: float = 0.0
    weight_bytes: int
    kv_pool_bytes: int
    num_pages: int
    num_graphs: int
    num_compiled: int = 0
    num_cache_hits: int = 0
    buckets: tuple[int, ...] = ()
    draft_widths: tuple[DraftWidth, ...] = ()
