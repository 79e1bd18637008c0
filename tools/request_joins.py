"""The part of tools/measure_requests.py in which requests join: a stream's gaps beside a newcomer.

Gaps are timed where the stream's reader sees its chunks, first tokens from the call.
"""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import replace

from request_parts import PROMPT_LEN, WARMUP, Bar, Measurement, Numbers, percentiles

from graphengine.handles import Handle

NUM_QUIET, NUM_BESIDE = 50, 32  # chunks in front of a newcomer, tokens of its own
STREAM_TOKENS = 4096


def join(m: Measurement) -> Numbers:
    """A stream's gaps beside a newcomer, by the rows of prompts that a step is followed by."""
    length = m.at_most("newcomer-tokens", NUM_BESIDE)
    alone = []
    for _ in range(m.sizes["repeats"]):
        handle = m.engine.submit(m.random_ids(length), max_new_tokens=1, ignore_eos=True)
        alone.append(handle.result().metrics.ttft_ms)
    alone_ms = statistics.median(alone)
    numbers: Numbers = {"alone": {"num_prompt_tokens": length, "first_token_ms": alone_ms}}
    asked, default = m.loop.config, m.loop.config.max_num_batched_tokens
    try:
        for rows in dict.fromkeys([default, *m.budgets]):
            m.settle()
            m.loop.config = replace(asked, max_num_batched_tokens=rows)
            found = numbers[f"budget_{rows}"] = join_beside(m, length)
            found["over_alone_ratio"] = found["first_token_ms"] / alone_ms
    finally:
        m.settle()
        m.loop.config = asked
    found = numbers[f"budget_{default}"]
    gap_ms = max(found["gap_joining_max_ms"], found["gap_beside_max_ms"])
    m.bars["join_gap_ms"] = Bar(gap_ms, at_most=20)
    m.bars["join_first_token_over_alone"] = Bar(found["over_alone_ratio"], at_most=2)
    return numbers


def join_beside(m: Measurement, length: int) -> Numbers:
    """Gaps between a stream's chunks as its reader sees them: before the newcomer, until its first
    token (`joining`), and while it decodes (`beside`)."""
    gaps_ms: dict[str, list[float]] = {"quiet": [], "joining": [], "beside": []}
    firsts_ms = []
    for _ in range(m.sizes["repeats"]):
        ids = m.random_ids(length)
        stream = m.engine.submit(
            m.random_ids(PROMPT_LEN), max_new_tokens=STREAM_TOKENS, ignore_eos=True
        )
        times: list[float] = []
        is_steady = threading.Event()
        reader = threading.Thread(target=note_times, args=(stream, times, is_steady))
        reader.start()
        try:
            is_steady.wait()
            began = time.perf_counter()
            newcomer = m.engine.submit(ids, max_new_tokens=NUM_BESIDE, ignore_eos=True)
            first_ms = newcomer.result().metrics.ttft_ms
            is_short = stream.done
        finally:
            stream.cancel()
            reader.join()
        if is_short:
            raise ValueError("the stream ended before its newcomer; pass fewer --newcomer-tokens")
        firsts_ms.append(first_ms)
        first_s = began + first_ms / 1e3
        for before, now in zip(times[WARMUP:], times[WARMUP + 1 :], strict=False):
            name = "quiet" if now < began else "joining" if before < first_s else "beside"
            gaps_ms[name].append((now - before) * 1e3)
    numbers: Numbers = {"first_token_ms": statistics.median(firsts_ms)}
    for name, gaps in gaps_ms.items():
        numbers |= {f"num_{name}_gaps": len(gaps)} | percentiles(f"gap_{name}", gaps)
    return numbers


def note_times(stream: Handle, times: list[float], is_steady: threading.Event) -> None:
    """When each chunk came. Mutates: times."""
    try:
        for _ in stream:
            times.append(time.perf_counter())
            if len(times) == NUM_QUIET:
                is_steady.set()
    finally:
        is_steady.set()
