"""Latency of decode steps: real shapes, real steps, prefill excluded.

What is timed: the wall time between the moments at which the host holds two consecutive steps'
tokens, over full buckets only. `host_ms` of it the host worked (planning, launching, committing),
else it waited for the device; close to `step_ms`, the host is the bottleneck. On a GPU a few more
steps tell how long the device works on one (busy.py); the rest of the wall time it was idle. The
floor is the bytes of weights (once per forward), of K/V (once) and of states (read and written),
counted from the configs, over the read bandwidth measured in the same process.

Every case draws random prompts from its seed, the same in every mode, so that the modes' tokens can
be compared.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from graphengine import names
from graphengine.api import Engine
from graphengine.checkpoints.hub import preset_names
from graphengine.config.draft_length import draft_at
from graphengine.decode.kvcache import page_bytes, pages_for
from graphengine.decode.loop import DecodeLoop, StepOutput, Watch
from graphengine.decode.recurrence import state_bytes
from graphengine.decode.request import Request
from graphengine.measure.busy import busy_fraction
from graphengine.measure.segment_bytes import bucket_bytes
from graphengine.startup.build import Built

NUM_DIGEST_TOKENS = 64
MAX_EMPTY_ROUNDS = 20  # a round's steps may all be lost by luck, never this many in a row


class Case(NamedTuple):
    """One line of the table."""

    bucket: int
    input_len: int
    output_len: int
    num_iters: int
    warmup: int
    seed: int


class TimedStep(NamedTuple):
    """What is known of one timed step: wall time, host time, tokens of all requests."""

    wall_ms: float
    host_ms: float
    num_tokens: int


@dataclass(slots=True, kw_only=True)
class CaseResult:
    """What one case measured. Times in milliseconds per step, one entry a step."""

    case: Case
    step_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    num_tokens: int = 0
    step_bytes: float = 0.0
    context_tokens: int = 0
    busy_fraction: float | None = None
    digest: str = ""

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per request and step, bonus included."""
        return self.num_tokens / (len(self.step_ms) * self.case.bucket)

    @property
    def mean_context_tokens(self) -> float:
        """Tokens of context per request at the start of a step, over the timed steps."""
        return self.context_tokens / (len(self.step_ms) * self.case.bucket)

    def numbers(self, read_gbps: float) -> dict[str, float]:
        """The row as numbers with units; keys follow vLLM's bench where they mean the same."""
        median, p95, p99 = np.percentile(self.step_ms, (50, 95, 99)).tolist()
        mean, length = statistics.fmean(self.step_ms), self.mean_acceptance_length
        achieved = self.step_bytes / median / 1e6
        numbers: dict[str, float] = {
            "num_steps": len(self.step_ms),
            "mean_acceptance_length": length,
            "step_p50_ms": median,
            "step_p95_ms": p95,
            "step_p99_ms": p99,
            "step_mean_ms": mean,
            "host_p50_ms": statistics.median(self.host_ms),
            "mean_tpot_ms": mean / length,
            "median_tpot_ms": median / length,
            "output_throughput": self.num_tokens / sum(self.step_ms) * 1e3,
            "median_tokens_per_s": length * self.case.bucket / median * 1e3,
            "mean_context_tokens": self.mean_context_tokens,
            "step_read_gb": self.step_bytes / 1e9,
            "achieved_gbps": achieved,
        }
        if read_gbps > 0:
            floor = self.step_bytes / read_gbps / 1e6
            numbers |= {
                "floor_ms": floor,
                "over_floor_ratio": median / floor,
                "bandwidth_percent": achieved / read_gbps * 100,
            }
        if self.busy_fraction is not None:
            busy = min(self.busy_fraction, 1.0)
            numbers |= {
                "gpu_busy_ms": median * busy,
                "gpu_idle_ms": median * (1 - busy),
                "gpu_idle_percent": (1 - busy) * 100,
                "gpu_busy_fraction": self.busy_fraction,  # as measured: above 1 is noise
            }
        return numbers


def check_pool(engine: Engine, num_requests: int, input_len: int, output_len: int) -> None:
    """Refuses a case that cannot run, before others are measured whose results would be lost.

    Raises:
        ValueError: the K/V pool does not hold so many requests at once.
    """
    config, loop = engine.config, engine.built.loop
    longest = min(input_len + output_len, config.max_model_len)
    num_held = loop.allocator.num_usable // pages_for(longest + loop.block, config.page_size)
    if num_held < num_requests:
        raise ValueError(
            f"K/V for {num_held} of {num_requests} prompts of {input_len} tokens; raise "
            "--kv-cache-memory or lower --bucket, --input-len or --output-len"
        )


def run_case(engine: Engine, case: Case) -> CaseResult:
    """Decodes random prompts until `num_iters` full-bucket steps are timed.

    A round runs `bucket` requests of `output_len` tokens; rounds repeat as needed. The first
    `warmup` steps of the case are not counted.

    Raises:
        ValueError: the prompt leaves no room, the K/V pool does not hold a full bucket, or rounds
            are too short to hold a step that counts.
    """
    built, loop = engine.built, engine.built.loop
    result = CaseResult(case=case)
    generator = torch.Generator().manual_seed(case.seed)
    shape = case.bucket, case.input_len
    skipped = empty_rounds = 0
    while len(result.step_ms) < case.num_iters:
        requests = submit_random(built, shape, case.output_len, generator)
        empty_rounds += 1
        with torch.no_grad():
            for step in timed_steps(loop, requests):
                empty_rounds = 0
                if skipped < case.warmup:
                    skipped += 1
                    continue
                result.step_ms.append(step.wall_ms)
                result.host_ms.append(step.host_ms)
                result.num_tokens += step.num_tokens
                # Where the step began: since then each has moved on by what it committed.
                result.context_tokens += sum(r.start for r in requests) - step.num_tokens
                if len(result.step_ms) >= case.num_iters:
                    break
            if not result.digest:
                result.digest = _digest(loop, requests)
        loop.reset()
        if empty_rounds >= MAX_EMPTY_ROUNDS:
            raise ValueError(
                f"--output-len {case.output_len} after {case.input_len} tokens of prompt: a round "
                "ends before a step between two others can be timed; pass a larger --output-len or "
                "shorter prompts"
            )
    requests = submit_random(built, shape, case.output_len, generator)
    with torch.no_grad():
        result.busy_fraction = busy_fraction(loop, requests, statistics.median(result.host_ms))
    loop.reset()
    context = case.bucket * context_bytes(built, result.mean_context_tokens)
    result.step_bytes = weight_bytes(built, case.bucket) + context
    return result


def timed_options(model: str, load_format: str | None) -> dict[str, Any]:
    """Options of an engine whose steps are timed: nothing may end speculation early, and no prompt
    begins with cached pages. A preset has random weights unless asked for otherwise."""
    return {
        "load_format": load_format or ("dummy" if model in preset_names() else "auto"),
        "acceptance_floor": 0.0,
        "fallback": False,
        "enable_prefix_caching": False,
    }


def submit_random(
    built: Built, shape: tuple[int, int], output_len: int, generator: torch.Generator
) -> list[Request]:
    """Requests of random prompts. `shape`: how many, and the tokens of each."""
    prompts = torch.randint(0, built.target.vocab_size, shape, generator=generator).tolist()
    return [built.loop.submit(prompt, output_len, ()) for prompt in prompts]


def timed_steps(loop: DecodeLoop, requests: list[Request]) -> Iterator[TimedStep]:
    """Each step in which every request still runs.

    Raises:
        ValueError: the K/V pool does not hold them all, so that no step would be a full bucket's.
    """
    loop.admit()
    if loop.waiting:
        num_running = len(requests) - len(loop.waiting)
        loop.reset()
        raise ValueError(
            f"K/V for {num_running} of {len(requests)} requests of this length: the bucket is not "
            "full; raise --kv-cache-memory or lower --bucket, --input-len or --output-len"
        )
    clock = _Clock()
    for _ in loop.run(clock):
        if any(request.finish_reason is not None for request in requests):
            return
        if clock.step is not None:
            yield clock.step


class _Clock(Watch):
    """Times the last step; its first has none before it."""

    step: TimedStep | None = None
    _began = _launched = _waited = 0.0
    _before: float | None = None

    def launching(self) -> None:
        self._began = time.perf_counter()

    def launched(self) -> None:
        self._launched = time.perf_counter()

    def waited(self) -> None:
        self._waited = time.perf_counter()

    def collected(self, outputs: list[StepOutput]) -> None:
        now = time.perf_counter()
        host_s = (self._launched - self._began) + (now - self._waited)
        if self._before is not None:
            num_tokens = sum(len(output.token_ids) for output in outputs)
            self.step = TimedStep((now - self._before) * 1e3, host_s * 1e3, num_tokens)
        self._before = now


def _digest(loop: DecodeLoop, requests: list[Request]) -> str:
    """Hash of every request's first tokens: equal digests mean equal tokens. Decodes on until each
    has said so many."""
    for _ in loop.run():
        if all(r.finish_reason or len(r.output_ids) >= NUM_DIGEST_TOKENS for r in requests):
            break
    ids = [request.output_ids[:NUM_DIGEST_TOKENS] for request in requests]
    return hashlib.sha256(repr(ids).encode()).hexdigest()[:16]


def dense_bytes(built: Built, num_requests: int) -> dict[str, int]:
    """`segment_bytes` of a step of a bucket."""
    config, draft = built.config, built.draft
    own = draft_at(config, draft, num_requests) if draft is not None else None
    size = getattr(torch, config.dtype).itemsize
    return bucket_bytes(built.target, own, size, config.draft_quantization, num_requests)


def weight_bytes(built: Built, num_requests: int) -> float:
    """Bytes of weights that one step of a bucket reads: each forward reads its matrices once."""
    return float(dense_bytes(built, num_requests)[names.SPECULATE if built.draft else "decode"])


def token_bytes(built: Built) -> float:
    """Bytes of K/V per context token that one step reads, both models."""
    size = getattr(torch, built.config.dtype).itemsize
    models = [built.target, *(built.draft.models if built.draft else ())]
    return float(sum(page_bytes(model, 1, size) for model in models))


def context_bytes(built: Built, num_tokens: float) -> float:
    """Bytes of a request's context that one step reads: K/V, where a layer has a window no more
    than that; and the target's states, which it writes as well."""
    size, draft = getattr(torch, built.config.dtype).itemsize, built.draft
    found = num_tokens * token_bytes(built) + 2 * state_bytes(built.target, size)
    windows = [(built.target, window) for window in built.target.windows if window]
    if draft is not None and draft.models:
        (model,) = draft.models
        windows += [(model, rule.window) for rule in draft.attention_rules if rule.window]
    for model, window in windows:
        of_layer = page_bytes(model, 1, size) / model.num_hidden_layers
        found -= of_layer * max(num_tokens - window, 0)
    return found


def gpu_memory() -> dict[str, Any]:
    """Bytes of the GPU in use by this process now and at most; empty without a GPU."""
    if not torch.cuda.is_available():
        return {}
    return {
        "allocated_bytes": torch.cuda.memory_allocated(),
        "max_allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
    }
