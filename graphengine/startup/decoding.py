"""From a loaded pair to its decode loop: how long blocks are, prefill, the buckets."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from graphengine import names
from graphengine.capture.runners import run_chain
from graphengine.config.options import Options
from graphengine.decode.buckets import BucketBuilder, prefill_attention
from graphengine.decode.chunk_sizes import PAIRED_SIZES, is_long
from graphengine.decode.compile_ahead import Workers
from graphengine.decode.fixed_chunk import FixedChunk
from graphengine.decode.lane import Lane
from graphengine.decode.loop import DecodeLoop
from graphengine.decode.metrics import DraftWidth
from graphengine.decode.prefill import Prefill
from graphengine.decode.prefix_cache import PrefixCache, StateSlots
from graphengine.decode.proposer import Pair, Proposer
from graphengine.decode.recurrence import num_slots
from graphengine.startup.draft_width import Guess, measure_widths, with_widths
from graphengine.startup.warmup import EAGER_ROWS

_LOG = logging.getLogger(__name__)


def build_loop(
    pair: Pair, options: Options, num_pages: int, progress: Callable[[str, float], None]
) -> tuple[DecodeLoop, tuple[DraftWidth, ...]]:
    """The loop over a pair, with its prefill, the buckets that are built ahead and what builds
    others; and what blocks cost, where that was measured for their lengths."""
    widths: tuple[DraftWidth, ...] = ()
    is_open = options.num_speculative_tokens is None and pair.proposer.num_draft_tokens > 0
    with Workers() as workers, names.range_("capture"), torch.no_grad():
        if pair.target.config.moe and is_open:
            progress("measuring block lengths", 0.0)
            asked = workers if pair.config.compile else None
            widths = measure_widths(pair, asked, partial(_guess, pair))
            pair = with_widths(pair, widths)
        config = pair.config
        builder = BucketBuilder(pair, progress=lambda what: progress(what, 0.0))
        sizes = config.buckets
        if options.lazy_capture:  # before the first request, its own alone
            sizes = (next((x for x in sizes if x >= options.first_batch), sizes[-1]),)
        prefill = _prefill(pair)
        ahead = builder.build_ahead(sizes, _prefill_runs(prefill), workers)
        builder.capture_chunks((*prefill.fixed, *prefill.far))

    def build_plain() -> Lane:
        """The same buckets with one row a request: the same weights and K/V, no drafter."""
        began = time.perf_counter()
        alone = replace(config, num_speculative_tokens=(), simulate_acceptance=None)
        plain = Pair(alone, pair.target, Proposer(), pair.num_positions)
        with names.range_("capture"), torch.inference_mode(False), torch.no_grad():
            own = BucketBuilder(plain, builder.workspace)
            lane = Lane(own, own.build_ahead(config.buckets))
        _LOG.info("plain decode built in %.2f s", time.perf_counter() - began)
        return lane

    slots = None if pair.target.states is None else StateSlots(num_slots(config))
    pages = PrefixCache(num_pages, config.page_size, slots)
    fallback = build_plain if pair.proposer.num_draft_tokens else None
    return DecodeLoop(Lane(builder, ahead), prefill, pages, fallback), widths


def _prefill(pair: Pair) -> Prefill:
    """With the chunks of a fixed size that its config names, not captured."""
    config, pool = pair.config, pair.target.kv_pool
    attention = prefill_attention(config, pair.target.config, pool.dtype, pool.device)
    fixed = tuple(
        FixedChunk(pair, size, is_long(size), size in PAIRED_SIZES) for size in config.prefill_sizes
    )
    far = tuple(FixedChunk(pair, size, is_long=True) for size in config.far_prefill_sizes)
    return Prefill(pair, attention, config.prefill_chunk, fixed, far)


def _guess(pair: Pair) -> Guess:
    """Of whole blocks, which most large buckets will have, since they read all experts anyway."""
    if not pair.config.compile:
        return Guess()
    builder, sizes = BucketBuilder(pair), pair.config.buckets

    def kernels() -> Iterator[Callable[[], object]]:
        yield from builder.kernel_runs(sizes)
        yield from _prefill_runs(_prefill(pair))

    return Guess(kernels(), builder.segment_runs(sizes))


def _prefill_runs(prefill: Prefill) -> list[Callable[[], object]]:
    """Forwards of few layers for the sake of their kernels."""
    config = prefill.pair.config
    runs: list[Callable[[], object]] = [
        lambda chunk=chunk: run_chain(chunk.short_chain())
        for chunk in (*prefill.fixed, *prefill.far)
    ]
    if config.prefill_attention_backend != "triton" and config.max_model_len > EAGER_ROWS:
        short = replace(prefill, pair=prefill.pair.shortened())
        runs.append(partial(short.run_padding, EAGER_ROWS))
    return runs
