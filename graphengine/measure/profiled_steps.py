"""The steps that a profile looks at: the same as `graphengine bench`, once without the profiler.

Why twice: every profiler slows what it looks at; the unprofiled time beside the report says by how
much. Both runs are full-bucket decode steps of one batch of random prompts, prefill excluded; or
calls for first tokens alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from itertools import islice
from typing import Any, NamedTuple

import torch

from graphengine import names
from graphengine.api import Engine
from graphengine.measure.bench import TimedStep, dense_bytes, submit_random, timed_steps
from graphengine.measure.first_token import PrefillCase, host_ms, num_chunks, timed_calls
from graphengine.startup.build import Built


class Workload(NamedTuple):
    """What is decoded: `bucket` random prompts of `input_len` tokens."""

    bucket: int
    input_len: int
    num_steps: int
    warmup: int
    seed: int

    def output_len(self, block: int) -> int:
        """Tokens per request that all steps can write, when every draft is accepted."""
        return (self.warmup + 2 * self.num_steps + 4) * block


def run_steps(
    engine: Engine, workload: Workload, profiler: AbstractContextManager[Any]
) -> dict[str, Any]:
    """Warms up, times `num_steps` steps, and runs `num_steps + 1` more inside `profiler`.

    One more, since a trace says nothing about how long its first step has waited.

    Returns:
        Facts about the run, fit for JSON: times, context, segment bytes, configuration.

    Raises:
        ValueError: the context is full before all steps are done.
    """
    built, loop = engine.built, engine.built.loop
    full = ValueError(
        f"the context of {built.config.max_model_len} tokens is full before all steps are done; "
        "lower --num-steps, --warmup or --input-len"
    )
    if workload.input_len + workload.output_len(1) > built.config.max_model_len:
        raise full
    generator = torch.Generator().manual_seed(workload.seed)
    shape = workload.bucket, workload.input_len
    requests = submit_random(built, shape, workload.output_len(loop.block), generator)
    steps = timed_steps(loop, requests)

    def take(count: int) -> list[TimedStep]:
        taken = list(islice(steps, count))
        if len(taken) < count:  # more tokens a step than the one that is certain
            raise full
        return taken

    has_gpu = built.config.device == "cuda"
    wait = torch.cuda.synchronize if has_gpu else lambda: None
    try:
        with torch.no_grad():
            take(workload.warmup)
            unprofiled = take(workload.num_steps)
            context_len = requests[0].start
            wait()
            with profiler:
                profiled = take(workload.num_steps + 1)
                wait()
    finally:
        loop.reset()
    num_tokens = sum(step.num_tokens for step in unprofiled)
    return _facts(built, workload) | {
        "context_len": context_len,
        "mean_acceptance_length": num_tokens / len(unprofiled) / workload.bucket,
        "unprofiled_step_ms": statistics.median(step.wall_ms for step in unprofiled),
        "unprofiled_host_ms": statistics.median(step.host_ms for step in unprofiled),
        "profiled_step_ms": statistics.median(step.wall_ms for step in profiled),
        "segment_bytes": dense_bytes(built, workload.bucket),
    }


def run_prefills(
    engine: Engine, workload: Workload, profiler: AbstractContextManager[Any]
) -> dict[str, Any]:
    """`run_steps` of first tokens: a step is a call for those of fresh prompts.

    Raises:
        ValueError: the context or the K/V pool does not hold the prompts.
    """
    built, num_steps = engine.built, workload.num_steps
    if workload.input_len >= built.config.max_model_len:
        raise ValueError(
            f"--input-len {workload.input_len}: prompts of {workload.input_len} tokens do not fit, "
            f"these models have a context of {built.config.max_model_len}; pass less"
        )
    case = PrefillCase(
        input_len=workload.input_len,
        batch=workload.bucket,
        num_iters=workload.warmup + 2 * num_steps,
        seed=workload.seed,
    )
    calls = timed_calls(engine, case, 1)
    list(islice(calls, workload.warmup - 1))  # it has run one
    unprofiled = list(islice(calls, num_steps))
    wait = torch.cuda.synchronize if built.config.device == "cuda" else lambda: None
    wait()
    with profiler:
        profiled = list(calls)
        wait()
    return _facts(built, workload) | {
        "prefill": True,
        "num_chunks": num_chunks(engine, case),
        "unprofiled_step_ms": statistics.median(wall_ms for wall_ms, _ in unprofiled),
        "unprofiled_host_ms": statistics.median(host_ms(results) for _, results in unprofiled),
        "profiled_step_ms": statistics.median(wall_ms for wall_ms, _ in profiled),
    }


def _facts(built: Built, workload: Workload) -> dict[str, Any]:
    return {
        "workload": workload._asdict(),
        "config": asdict(built.config),
        "gpu_name": torch.cuda.get_device_name() if built.config.device == "cuda" else None,
    }


@contextmanager
def cuda_profiler_range() -> Iterator[None]:
    """Ranges on, between cudaProfilerStart and cudaProfilerStop: what nsys waits for.

    Raises:
        ValueError: the nvtx package is missing.
    """
    if not names.enable():
        raise ValueError("the nvtx package is missing, so steps have no names; install nvtx")
    torch.cuda.profiler.start()
    try:
        yield
    finally:
        torch.cuda.profiler.stop()
        names.disable()
