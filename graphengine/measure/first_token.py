"""Time to the first token, from the call to the token, beside what the GPU could do.

What is timed: `Engine.generate` of fresh random ids for one new token, so everything that a user
waits for but the text's tokenising. Of a batch it is the last prompt's; `first` is the first one's,
`host` the time until everything is queued and the host begins to wait. The roofline is the larger
of two times, both from rates measured in the same process: weights over the read bandwidth, and
products (of matrices, and of attention over causal keys) over the rate of a large bf16 product.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphengine import names
from graphengine.api import Engine, GenerationResult
from graphengine.config.draft_length import draft_at
from graphengine.drafters.dflash import MAX_QUANTIZED_ROWS
from graphengine.measure.bench import check_pool
from graphengine.measure.rates import Rates
from graphengine.measure.segment_bytes import segment_bytes
from graphengine.models import decoder
from graphengine.models.weight import num_matrix_elements
from graphengine.startup.build import Built

INPUT_LENS = (16, 128, 512, 1024, 8192)
FIRST_REQUEST_TOKENS = 64


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


def run_prefills(
    engine: Engine,
    rates: Rates,
    note: Callable[[str], None],
    *,
    input_lens: Sequence[int],
    num_iters: int,
    seed: int,
    output_len: int | None,
) -> dict[str, Any]:
    """An engine's very first requests, then every length with every bucket's batch, by key.

    Args:
        note: told each case's outcome.
        output_len: of whole requests, timed too; None: of none.
    """
    for input_len in input_lens:
        for batch in engine.config.buckets:
            check_pool(engine, batch, input_len, output_len or 1)
    found: dict[str, Any] = {"first_request": first_requests(engine, input_lens[0], seed)}
    for input_len in input_lens:
        for batch in engine.config.buckets:
            case = PrefillCase(input_len=input_len, batch=batch, num_iters=num_iters, seed=seed)
            numbers = found[case.key] = run_prefill(engine, case, rates)
            if output_len is not None:
                numbers |= run_request(engine, case, output_len)
            note(
                f"batch {batch:3} input {input_len:6}  first token "
                f"{numbers['ttft_p50_ms']:.3f} ms  host {numbers['host_p50_ms']:.3f} ms"
            )
    return found


def timed_calls(
    engine: Engine, case: PrefillCase, max_new_tokens: int
) -> Iterator[tuple[float, list[GenerationResult]]]:
    """Wall milliseconds of each of `num_iters` calls, and what came of it; one goes before them,
    uncounted. Each finds the device idle: a step that was launched ahead of an answer's end, for
    which the answer did not wait, would take time from the next call.

    Raises:
        ValueError: the context or the K/V pool does not hold the prompts.
    """
    check_pool(engine, case.batch, case.input_len, max_new_tokens)
    generator = torch.Generator().manual_seed(case.seed)
    shape, vocab = (1 + case.num_iters, case.batch, case.input_len), engine.built.target.vocab_size
    calls = torch.randint(0, vocab, shape, generator=generator).tolist()
    for i, ids in enumerate(calls):
        began = time.perf_counter()
        results = engine.generate(ids, max_new_tokens=max_new_tokens, ignore_eos=True)
        wall_ms = (time.perf_counter() - began) * 1e3
        if engine.config.device == "cuda":
            torch.cuda.synchronize()
        if i:
            yield wall_ms, results


def run_prefill(engine: Engine, case: PrefillCase, rates: Rates) -> dict[str, Any]:
    """Milliseconds of each of `num_iters` calls, their median, and what they are made of."""
    parts: dict[str, list[float]] = {}
    for wall_ms, results in timed_calls(engine, case, 1):
        first, last = results[0].metrics, results[-1].metrics
        times = {
            "ttft": wall_ms,
            "first": min(result.metrics.ttft_ms for result in results),
            "tokenize": first.tokenize_ms,
            "queue": first.queue_ms,
            "prefill": last.prefill_ms,
            "host": host_ms(results),
        }
        for name, part_ms in times.items():
            parts.setdefault(name, []).append(part_ms)
    numbers: dict[str, Any] = {"ttft_ms": parts["ttft"]}
    numbers |= {f"{name}_p50_ms": statistics.median(times) for name, times in parts.items()}
    numbers["num_chunks"] = num_chunks(engine, case)
    numbers["chunk_host_us"] = numbers["host_p50_ms"] / numbers["num_chunks"] * 1e3
    if rates.read_gbps:
        numbers["roofline_ms"] = roofline_ms(engine.built, case.input_len, case.batch, rates)
        numbers["over_roofline_ratio"] = numbers["ttft_p50_ms"] / numbers["roofline_ms"]
    return numbers


def host_ms(results: Sequence[GenerationResult]) -> float:
    """From a call until everything is queued, of prompts that were admitted together."""
    metrics = results[0].metrics
    return metrics.tokenize_ms + metrics.queue_ms + metrics.launch_ms


def num_chunks(engine: Engine, case: PrefillCase) -> int:
    """Forwards that run the prompts of a call."""
    loop = engine.built.loop
    requests = [loop.submit([0] * case.input_len, 1, ()) for _ in range(case.batch)]
    found = len(list(loop.prefill.split(requests)))
    loop.reset()
    return found


def run_request(engine: Engine, case: PrefillCase, output_len: int) -> dict[str, float]:
    """A prompt to its last token: wall time of each call. Where acceptance is simulated, that is
    scaled to the steps that this acceptance takes in the bucket's own block, so that luck is not
    measured. In a batch each request has its own luck: only the last first tokens are told.

    First tokens come behind another request's steps here, as a user's do: prefills right behind
    each other heat a GPU until it lowers its clock (22.8 ms to 1,024 tokens of 8B instead of 20.8
    on an H100, 2026-11-27-h100-8b-first-token-8ec7d30.json).

    Raises:
        ValueError: the context ends before the last token.
    """
    walls, times, counts, firsts = [], [], [], []
    acceptance = simulated_length(engine, case.batch)
    wanted = round((output_len - 1) / acceptance) if acceptance else None
    for wall_ms, results in timed_calls(engine, case, output_len):
        metrics = results[-1].metrics
        firsts.append(max(result.metrics.ttft_ms for result in results))
        if metrics.num_output_tokens < output_len:
            raise ValueError(
                f"--output-len {output_len} after {case.input_len} tokens of prompt: the context "
                f"of {engine.config.max_model_len} is full before; pass less of either"
            )
        num_steps = metrics.num_steps if wanted is None else wanted
        walls.append(wall_ms + metrics.ms_per_step * (num_steps - metrics.num_steps))
        times.append(metrics.ms_per_step)
        counts.append(num_steps)
    first = {"request_first_p50_ms": statistics.median(firsts)}
    if case.batch > 1:
        return first
    return first | {
        "request_p50_ms": statistics.median(walls),
        "request_step_p50_ms": statistics.median(times),
        "num_request_steps": statistics.median(counts),
    }


def simulated_length(engine: Engine, num_requests: int) -> float | None:
    """Mean tokens a step of a bucket where acceptance is simulated: what is drawn for the drafter's
    own block, cut off at the bucket's last draft. None where it is not simulated."""
    config, built = engine.config, engine.built
    mean, simulation = config.simulate_acceptance, built.loop.first.builder.pair.simulation
    if mean is None or simulation is None or built.draft is None:
        return None
    drawn = simulation.accepted_RB
    most = draft_at(config, built.draft, built.loop.first.size_for(num_requests)).num_draft_tokens
    kept = drawn.clamp(max=most).sum().item() / max(drawn.sum().item(), 1)
    return 1 + (mean - 1) * kept


def first_requests(engine: Engine, input_len: int, seed: int) -> dict[str, float]:
    """What the first user of an engine sees: as many requests as its smallest bucket takes, with
    nothing warmed but what the start has. Times and steps are those of the last one to begin."""
    shape, vocab = (engine.config.buckets[0], input_len), engine.built.target.vocab_size
    ids = torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))
    results = engine.generate(ids.tolist(), max_new_tokens=FIRST_REQUEST_TOKENS, ignore_eos=True)
    last = max((result.metrics for result in results), key=lambda metrics: metrics.ttft_ms)
    return {
        "num_requests": len(results),
        "num_prompt_tokens": input_len,
        "ttft_ms": last.ttft_ms,
        "step_mean_ms": last.ms_per_step,
        "num_steps": last.num_steps,
    }


def roofline_ms(built: Built, input_len: int, batch: int, rates: Rates) -> float:
    """The least that such prompts can take: all layers, and the drafter's context of each row."""
    rows, target = batch * input_len, built.target
    size = getattr(torch, built.config.dtype).itemsize
    read = segment_bytes(target, None, size, size, rows)["decode"]
    of_row = segment_bytes(target, None, 1, 1, 1)["decode"]  # elements, at a byte each
    head = num_matrix_elements(decoder.outer_weights(target)["lm_head_VD"])
    context = segment_bytes(target, built.draft, 1, 1).get(names.DRAFT_CONTEXT, 0)
    num_layers = sum(mixer.write_state_ is not None for mixer, _ in decoder.layer_kinds(target))
    windows = [min(window or input_len, input_len) for window in target.windows or [0] * num_layers]
    keys = batch * sum(window * (input_len - (window - 1) / 2) for window in windows)
    of_attention = 4 * target.q_size * keys
    flops = 2 * rows * (of_row - head + context) + 2 * batch * head + of_attention
    most = MAX_QUANTIZED_ROWS[built.config.draft_quantization]
    read += context * (1 if rows <= most else size)
    bytes_ms = read / rates.read_gbps / 1e6
    return max(bytes_ms, flops / rates.matmul_tflops / 1e9)
