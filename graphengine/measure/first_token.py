"""Time to the first token, from the call to the token, beside what the GPU could do.

What is timed: `Engine.generate` of fresh random ids for one new token, so everything that a user
waits for but tokenising. Of a batch it is the last prompt's; `first_ms` is the first one's. The
roofline is the larger of two times, both from rates measured in the same process: weights over the
read bandwidth, and products (of matrices, and of attention over causal keys) over the rate of a
large bf16 product.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from graphengine.api import Engine
from graphengine.config.draft import DraftConfig
from graphengine.config.model import ModelConfig
from graphengine.models import decoder, dflash
from graphengine.models.weight import num_matrix_elements
from graphengine.startup.build import Built

MATMUL_SIZE = 8192
REQUEST_TOKENS = 256
REQUEST_STEPS = 40  # of a whole request: what acceptance 6.35 needs for REQUEST_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCase:
    """One line of the table."""

    input_len: int
    batch: int
    num_iters: int
    seed: int

    @property
    def key(self) -> str:
        """Its place in a result."""
        suffix = f"_batch_{self.batch}" if self.batch > 1 else ""
        return f"first_token_input_{self.input_len}{suffix}"


def run_prefill(engine: Engine, case: PrefillCase, rates: Rates) -> dict[str, Any]:
    """Milliseconds of each of `num_iters` calls, their median, and what they are made of."""
    generator = torch.Generator().manual_seed(case.seed)
    vocab, shape = engine.built.target.vocab_size, (case.batch, case.input_len)
    parts: dict[str, list[float]] = {"ttft": [], "first": [], "queue": [], "prefill": []}
    for _ in range(case.num_iters):
        prompts = torch.randint(0, vocab, shape, generator=generator).tolist()
        began = time.perf_counter()
        results = engine.generate(prompts, max_new_tokens=1, ignore_eos=True)
        parts["ttft"].append((time.perf_counter() - began) * 1e3)
        metrics = [result.metrics for result in results]
        parts["first"].append(min(m.ttft_ms for m in metrics))
        parts["queue"].append(metrics[0].queue_ms)
        parts["prefill"].append(metrics[-1].prefill_ms)
    numbers: dict[str, Any] = {"ttft_ms": parts["ttft"]}
    numbers |= {f"{name}_p50_ms": statistics.median(times) for name, times in parts.items()}
    if rates.read_gbps:
        numbers["roofline_ms"] = roofline_ms(engine.built, case.input_len, case.batch, rates)
        numbers["over_roofline_ratio"] = numbers["ttft_p50_ms"] / numbers["roofline_ms"]
    return numbers


def run_request(engine: Engine, case: PrefillCase) -> dict[str, float]:
    """One prompt to its last token: wall time of each call, scaled to REQUEST_STEPS steps."""
    generator = torch.Generator().manual_seed(case.seed)
    scaled, steps = [], []
    for _ in range(case.num_iters):
        ids = torch.randint(
            0, engine.built.target.vocab_size, (case.input_len,), generator=generator
        )
        began = time.perf_counter()
        (result,) = engine.generate([ids.tolist()], max_new_tokens=REQUEST_TOKENS, ignore_eos=True)
        wall_ms, metrics = (time.perf_counter() - began) * 1e3, result.metrics
        scaled.append(wall_ms + metrics.ms_per_step * (REQUEST_STEPS - metrics.num_steps))
        steps.append(metrics.ms_per_step)
    return {
        "request_p50_ms": statistics.median(scaled),
        "request_step_p50_ms": statistics.median(steps),
        "request_steps": REQUEST_STEPS,
    }


@dataclass(frozen=True, slots=True)
class Rates:
    """What the GPU does at most, as measured; 0 without one."""

    read_gbps: float
    matmul_tflops: float


def matmul_tflops() -> float:
    """A large bf16 product, best of 5; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0.0
    x = torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device="cuda")
    best = float("inf")
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.mm(x, x)
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return 2 * MATMUL_SIZE**3 / best / 1e9


def roofline_ms(built: Built, input_len: int, batch: int, rates: Rates) -> float:
    """Of prompts of that length, all layers and the drafter's context of every row."""
    rows, target = batch * input_len, built.target
    layers = _layer_elements(target)
    head = num_matrix_elements(decoder.outer_weights(target)["lm_head_VD"])
    context = 0
    if isinstance(built.draft, DraftConfig):
        of_draft = decoder.layer_weights(built.draft.model)
        fields = [dflash.outer_weights(built.draft)["fc_DC"], *map(dflash.context_parts, of_draft)]
        context = sum(map(num_matrix_elements, fields))
    keys = batch * input_len * (input_len + 1) / 2
    of_attention = 4 * target.q_size * target.num_hidden_layers * keys
    flops = 2 * rows * (layers + context) + 2 * batch * head + of_attention
    size = getattr(torch, built.config.dtype).itemsize
    bytes_ms = (layers + head + context) * size / rates.read_gbps / 1e6
    return max(bytes_ms, flops / rates.matmul_tflops / 1e9)


def _layer_elements(model: ModelConfig) -> int:
    fields = [
        field for layer in decoder.layer_weights(model) for part in layer for field in part.values()
    ]
    return sum(map(num_matrix_elements, fields))
