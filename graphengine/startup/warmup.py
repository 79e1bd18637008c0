"""Requests nobody made, so that the first one meets kernels and graphs that have run.

What a start has captured has run, but a process also pays at a first use for the upload of a graph,
torch's kernels that write rows, FlashInfer's, and Triton's of an eager prefill unless
`compile_ahead` has compiled them. Without this the first user waits for all that.

Invariant: the loop is idle before and after, and guards and statistics have seen nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from graphengine.config.constraint import Constraint
from graphengine.decode.grammar import Grammars
from graphengine.decode.kvcache import NULL_PAGE, copy_page_
from graphengine.decode.loop import DecodeLoop
from graphengine.decode.sampling import Sampling

# More rows than any chunk of a fixed size: an eager prefill.
EAGER_ROWS = 513
NUM_TOKENS = 3  # of a request: its prefill's, and a step or two
_DRAWN = Sampling(temperature=1.0, top_p=0.9, top_k=10, seed=0)
_ADJUSTED = Sampling(presence_penalty=1.0)
_ANYTHING = Constraint("regex", "(.|\n)*")


def settle_vector_math() -> None:
    """Calls the CPU's vectorised functions once, on one element.

    MKL's choose their kernel in their first call; where several threads make it at once, one may
    take another, which is off by 1e-4 (pytorch issue 188792; MKL 2024.2, which torch 2.13 has). In
    5 of 60 processes late positions had such cosines, and so other K/V than in the rest.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for function in (torch.cos, torch.sin, torch.exp, torch.log, torch.log1p, torch.sqrt):
            function(one)


def warm_up(loop: DecodeLoop, grammars: Grammars | None = None) -> None:
    """Runs every bucket and every chunk, with every end that is built.

    Args:
        loop: idle.
        grammars: None: no request can have one.
    """
    assert not loop.has_work
    lane, fallback, loop.fallback = loop.first, loop.fallback, None
    config = loop.config
    asked: list[dict[str, Any]] = [{}]
    asked += [{"sampling": _DRAWN}] * config.sampling
    asked += [{"sampling": _ADJUSTED}] * config.adjustments
    asked += [{"logprobs": 0}] * (config.max_logprobs > 0)
    asked += [{"matcher": _ANYTHING}] * (config.structured_outputs and grammars is not None)
    most = config.max_model_len - 1
    chunks = [min(chunk.size, most) for chunk in loop.prefill.fixed]

    def submit(prompt: list[int], num_tokens: int, options: dict[str, Any]) -> None:
        if grammars is not None and "matcher" in options:
            options = {"matcher": grammars.matcher(options["matcher"])}
        loop.submit(prompt, num_tokens, (), **options)

    copy_page_(loop.prefill.pair.kv_pools, NULL_PAGE, NULL_PAGE)
    # No short prompt gets there. First, since nobody waits for these but with the steps behind.
    for chunk in loop.prefill.far:
        for take in (None, lambda *_: None):
            chunk.run([], take)
    for options in asked:
        # None begins like another, whose pages it would take over, and run in a shorter chunk.
        for token, length in enumerate(sorted({*chunks, min(EAGER_ROWS, most)})):
            submit([token] * length, 1, options)
            loop.admit()
        for size in lane.buckets:
            lane.only_bucket = size
            submit([0], NUM_TOKENS, options)
            for _ in loop.run():
                pass
    lane.only_bucket, loop.fallback = None, fallback
    assert not loop.has_work
    if config.device == "cuda":
        torch.cuda.synchronize()  # a step ahead of the last end: no request is to wait for it
