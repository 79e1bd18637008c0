"""What tools/measure_requests.py measures of a prefix hit: the same prompt cold and behind cached
pages, its tokens, each step's drafts, and the K/V that target and drafter read.

Why drafts: random weights accept next to nothing, so equal acceptance alone would say little.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from request_parts import Bar, Measurement, Numbers
from torch import Tensor

from graphengine.decode.kvcache import pages_for
from graphengine.decode.loop import DecodeLoop


class Trace(NamedTuple):
    """One greedy generation, one step in flight at a time."""

    tokens: list[int]
    drafts: dict[int, list[int]]  # of each step, by the tokens in front of it
    num_cached: int
    kv: dict[str, Tensor]  # target and drafter: [L, 2, prompt tokens, K, H]


def hit(m: Measurement) -> Numbers:
    """The same prompt cold, behind all of its own K/V, and behind a beginning of it that another
    prompt has left."""
    count = m.sizes["answer-tokens"]
    prompt = m.random_ids(m.at_most("hit-tokens", count))
    other = prompt[: len(prompt) * 3 // 4] + m.random_ids(8)
    depth, m.loop.first.depth = m.loop.first.depth, 1  # drafts are read before the next step's
    try:
        with torch.no_grad():
            cold = traced(m.loop, prompt, count)
            again = traced(m.loop, prompt, count)
            m.loop.reset()
            traced(m.loop, other, 2)
            behind = traced(m.loop, prompt, count)
    finally:
        m.loop.reset()
        m.loop.first.depth = depth
    numbers: Numbers = {}
    for name, found in (("again", again), ("behind_another", behind)):
        numbers[name] = compare(cold, found)
        for what in ("equal_tokens", "equal_drafts"):
            m.bars[f"hit_{name}_{what}"] = Bar(numbers[name][f"{what}_fraction"], at_least=1)
    shared = again.num_cached
    changed = sum(
        not torch.equal(cold.kv[name][:, :, :shared], again.kv[name][:, :, :shared])
        for name in cold.kv
    )
    numbers["again"]["num_changed_pools"] = changed
    m.bars["hit_changed_shared_pools"] = Bar(changed, at_most=0)
    return numbers


def traced(loop: DecodeLoop, prompt: list[int], count: int) -> Trace:
    """Runs a prompt and reads what it left; the loop has nothing else to do."""
    pools = {"target": loop.prefill.pair.target.kv_pool}
    of_draft = getattr(loop.prefill.pair.proposer, "kv_pool", None)
    pools |= {} if of_draft is None else {"draft": of_draft}
    request = loop.submit(prompt, count, ())
    loop.admit()
    pages = request.pages[: pages_for(len(prompt), loop.config.page_size)]
    drafts: dict[int, list[int]] = {}
    while request.finish_reason is None:
        loop.launch()
        loop.wait()
        assert loop.first.bucket is not None
        of_step = loop.first.bucket.buffers.draft_ids_BG[0, 1:].tolist()
        drafts[len(request.output_ids)] = of_step
        loop.collect()
    kv = {
        name: pool[:, :, pages].flatten(2, 3)[:, :, : len(prompt)] for name, pool in pools.items()
    }
    return Trace(request.output_ids, drafts, request.num_cached_tokens, kv)


def compare(cold: Trace, warm: Trace) -> Numbers:
    """What a hit has changed: tokens up to the first that differs, drafts of the steps in front of
    it, and K/V over the largest value."""
    pairs = enumerate(zip(cold.tokens, warm.tokens, strict=True))
    num_equal = next((i for i, (a, b) in pairs if a != b), len(cold.tokens))
    both = [n for n in cold.drafts if n in warm.drafts and n <= num_equal]
    drafts = [pair for n in both for pair in zip(cold.drafts[n], warm.drafts[n], strict=True)]
    return {
        "num_cached_tokens": warm.num_cached,
        "num_tokens": len(cold.tokens),
        "equal_tokens_fraction": num_equal / len(cold.tokens),
        "num_drafts": len(drafts),
        "equal_drafts_fraction": sum(a == b for a, b in drafts) / max(len(drafts), 1),
        "num_cold_steps": len(cold.drafts),
        "num_warm_steps": len(warm.drafts),
        **{
            f"{name}_kv_difference_ratio": float(
                (kv.float() - warm.kv[name].float()).abs().max() / kv.float().abs().max()
            )
            for name, kv in cold.kv.items()
        },
    }
