"""A bucket: one batch size, its buffers, its attentions and what runs a step of it.

Invariant: everything a graph holds (addresses, shapes, the block's length) belongs to the bucket
that captured it, and buffers are sized for the largest bucket and the longest block from the start:
building one later moves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.capture.compile import compile_segments
from graphengine.capture.runners import GraphPool, Runner, run_chain
from graphengine.config.draft import AttentionRule
from graphengine.config.engine import EngineConfig
from graphengine.config.model import ModelConfig
from graphengine.decode.attention import (
    Attention,
    BlockAttention,
    LayerAttentions,
    Layout,
    TorchAttention,
)
from graphengine.decode.buffers import Arena, StepBuffers
from graphengine.decode.chains import step_chains
from graphengine.decode.compile_ahead import CompileAhead, Workers, make_segments, run_kept
from graphengine.decode.fixed_chunk import FixedChunk
from graphengine.decode.flashinfer_attention import FlashInferAttention, make_workspace
from graphengine.decode.kvcache import NULL_PAGE, pages_for
from graphengine.decode.proposer import Attends, Pair, step_buffers
from graphengine.decode.segments import Segments
from graphengine.decode.stages import Chains, Planned, Stage, captured_stages, cut, eager_stages


@dataclass(frozen=True, slots=True)
class Bucket:
    """Everything that runs a step of up to `size` requests."""

    size: int
    buffers: StepBuffers
    attentions: tuple[Attention, ...]  # one a kind of the target's layers, then of the drafter's
    stages: tuple[Stage, ...]  # in the order in which a step launches them
    ahead: Runner | None
    """The last stage, which is of the next block; rows that begin run it once."""
    drafting: Runner | None = None
    """Makes the drafts that a constrained step begins with, where no such step was before it."""

    @property
    def runners(self) -> list[Runner]:
        """Of the stages, with their first end, each behind the one that it continues; for tools."""
        runners = [next(iter(stage.runners.values())) for stage in self.stages]
        return runners[-1:] + runners[:-1] if self.ahead is not None else runners


class Wired(NamedTuple):
    """A bucket's chains, over its buffers and attentions."""

    buffers: StepBuffers
    verify: LayerAttentions
    drafts: dict[AttentionRule, Attention]
    chains: Chains


class BucketBuilder:
    """Compiles, warms and captures buckets of one pair, over memory that they share.

    Every segment runs once here, so that no request pays for a compilation. A larger bucket
    captured after smaller ones extends the shared pool; the other order reuses it.
    """

    def __init__(
        self,
        pair: Pair,
        workspace: Tensor | None = None,
        progress: Callable[[str], None] = lambda what: None,
    ) -> None:
        """Args: workspace: FlashInfer's scratch, of other buckets on the same stream, to share it.
        progress: told what is being built."""
        self.pair, self.progress, config = pair, progress, pair.config
        self.device, self.dtype = pair.target.kv_pool.device, pair.target.kv_pool.dtype
        self.compile_s = self.capture_s = 0.0  # seconds of first calls, and of captures
        self.pool = GraphPool() if config.graph_mode != "none" else None
        self.segments = Segments(*compile_segments(Segments())) if config.compile else Segments()
        self.workspace = workspace
        if workspace is None and config.attention_backend == "flashinfer":
            self.workspace = make_workspace(self.device)
        self.arena = self._arena(max(config.buckets))

    def clear_results_(self) -> None:
        """Forgets results that were not read. Mutates: the buffers."""
        words = ("results", "draft_words") if self.pair.config.structured_outputs else ("results",)
        self.arena.clear_(*words)

    def build_ahead(
        self,
        sizes: Collection[int],
        prefills: Iterable[Callable[[], object]] = (),
        workers: Workers | None = None,
    ) -> dict[int, Bucket]:
        """These buckets, the largest first. On a GPU, what is not in its caches is compiled before
        the first is run, kernels beside segments; FlashInfer's own compiler is waited for last, by
        the first plan.

        Args:
            prefills: what else has kernels to compile and warms up.
            workers: who has been asked for kernels; None: nobody so far.
        """
        first, began = sorted(sizes, reverse=True), time.perf_counter()
        warm_up = partial(self._warm_up, first, prefills)
        if self.device.type != "cuda":
            warm_up()
        elif not run_kept(warm_up):
            with Workers() if workers is None else nullcontext(workers) as asked:
                self._compile(first, prefills, asked)
            warm_up()
        self.compile_s += time.perf_counter() - began
        return {size: self.build(size, is_warm=True) for size in first}

    def _compile(
        self,
        sizes: Collection[int],
        prefills: Iterable[Callable[[], object]],
        workers: Workers,
    ) -> None:
        """The kernels of these, and the segments beside them."""
        compiles, runs = self.pair.config.compile, chain(self.kernel_runs(sizes), prefills)
        with CompileAhead(runs, workers if compiles else None) as kernels:
            if compiles:
                self.progress("compiling")
                make_segments(self.segment_runs(sizes))
            kernels.wait()

    @torch.inference_mode(False)
    @torch.no_grad()
    def capture_chunks(self, chunks: Sequence[FixedChunk]) -> None:
        """Captures prefills like the buckets' steps, the largest first. Mutates: the chunks."""
        if self.pool is None:
            return
        began = time.perf_counter()
        for chunk in sorted(chunks, key=lambda chunk: -chunk.size):
            self.progress(f"capturing prefill {chunk.size}")
            chunk.capture_(self.pool, self.pair.config.graph_mode == "full")
        torch.cuda.synchronize()
        self.capture_s += time.perf_counter() - began

    @torch.inference_mode(False)
    @torch.no_grad()
    def build(self, size: int, *, is_warm: bool = False) -> Bucket:
        """The bucket of a size, between steps. Mutates: the buffers, cleared before and after."""
        config, pair = self.pair.config, self.pair.at(size)
        if not is_warm:
            began = time.perf_counter()
            self._warm_up([size])
            self.compile_s += time.perf_counter() - began
        self.arena.clear_()
        views, verify, drafts, chains = self._wire(pair, self.arena, size, self.segments)
        rows = {attends.rows for attends in pair.proposer.attends}
        assert len(rows) <= 1  # a plan is for one number of rows
        before_draft = Planned(tuple(drafts.values()), *rows)
        plans = (Planned(verify.distinct, views.block), before_draft)
        parts = cut(chains, plans[0], before_draft if config.plans_attention else None)

        for attentions, block in plans:
            for attention in attentions:
                attention.plan(_dummy_layout(size, block, config.page_size))
        if self.pool is None:
            stages, ahead, drafting = eager_stages(parts)
        else:
            self.progress(f"capturing bucket {size}")
            began = time.perf_counter()
            with self._undrawn():
                stages, ahead, drafting = captured_stages(parts, config.graph_mode, self.pool)
                torch.cuda.synchronize()
            self.capture_s += time.perf_counter() - began
        self.arena.clear_()
        attentions = (*verify.distinct, *drafts.values())
        return Bucket(size, views, attentions, tuple(stages), ahead, drafting)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _warm_up(
        self, sizes: Collection[int], prefills: Iterable[Callable[[], object]] = ()
    ) -> None:
        """Runs the chains of these buckets, of few layers, where captures are recorded, so that
        all that is captured is compiled and loaded. On the CPU without compilation there is nothing
        to do. Mutates: the buffers, cleared before, and null pages."""
        if self.device.type != "cuda" and not self.pair.config.compile:
            return
        self.progress("warming up")
        self.arena.clear_()
        with self._undrawn(), nullcontext() if self.pool is None else self.pool.warming():
            for run in chain(self.segment_runs(sizes), prefills):
                run()

    @contextmanager
    def _undrawn(self) -> Iterator[None]:
        """Afterwards the table of simulated draws stands where it stood before."""
        step_1 = None if self.pair.simulation is None else self.pair.simulation.step_1
        before_1 = None if step_1 is None else step_1.clone()
        try:
            yield
        finally:
            if step_1 is not None and before_1 is not None:
                step_1.copy_(before_1)

    def _arena(self, size: int) -> Arena:
        """Memory of buckets up to that size, and of the longest block."""
        arena = Arena(self.device, self.dtype)
        _buffers(self.pair, arena, size)
        return arena

    def segment_runs(self, sizes: Collection[int]) -> Iterator[Callable[[], object]]:
        """Runs that call all segments of these buckets, the largest's first (`make_segments`)."""
        return self._runs_of(sorted(sizes, reverse=True), self.segments, self.arena)

    def kernel_runs(self, sizes: Collection[int]) -> Iterator[Callable[[], object]]:
        """Runs that call all kernels of ours (`CompileAhead`), in buffers of their own."""
        return self._runs_of(sorted(sizes, reverse=True))

    def _runs_of(
        self, sizes: Collection[int], segments: Segments | None = None, arena: Arena | None = None
    ) -> Iterator[Callable[[], object]]:
        """The chains of these buckets, of few layers and not planned.

        Args: segments: None: not compiled. arena: None: buffers of their own.
        """
        short, arena = self.pair.shortened(), arena or self._arena(max(sizes))
        segments = segments or Segments()
        for size in sizes:
            chains = self._wire(short.at(size), arena, size, segments, planned=False).chains
            for steps in (chains.propose, chains.context, chains.publish):
                yield partial(run_chain, steps)
            yield partial(_run_ends, chains)

    def _wire(
        self, pair: Pair, arena: Arena, size: int, segments: Segments, planned: bool = True
    ) -> Wired:
        """Args: planned: whether attention will be; else it is the reference, or our kernel."""
        views, config = _buffers(pair, arena, size), pair.config

        def attention(kind: Attends) -> Attention:
            """Attention of `kind.rows` rows a request, its metadata at fixed addresses."""
            (model, rule, rows), table_BW = kind, views.page_table_BW
            if config.attention_backend == "triton":
                return BlockAttention(model, rule, table_BW, views.start_B, rows)
            if self.workspace is None or not planned:
                return TorchAttention(model, config.page_size, rule, self.device)
            return FlashInferAttention(
                model, config.page_size, rule, self.workspace, self.dtype, size, table_BW.numel()
            )

        model, rows = pair.target.config, views.block
        verify = LayerAttentions.of(model, lambda rule: attention(Attends(model, rule, rows)))
        drafts = {kind.rule: attention(kind) for kind in pair.proposer.attends}
        return Wired(views, verify, drafts, step_chains(pair, views, verify, drafts, segments))


def _buffers(pair: Pair, arena: Arena, num_requests: int) -> StepBuffers:
    target, proposer = pair.target.config, pair.proposer
    return step_buffers(arena, target, proposer, num_requests, pair.width, pair.config)


def prefill_attention(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> LayerAttentions:
    """The causal attention of prefills, any lengths."""
    size = config.page_size
    if config.prefill_attention_backend == "flashinfer":
        space = make_workspace(device)
        return LayerAttentions.of(
            model, lambda rule: FlashInferAttention(model, size, rule, space, dtype)
        )
    return LayerAttentions.of(model, lambda rule: TorchAttention(model, size, rule, device))


def _run_ends(chains: Chains) -> None:
    """A verify, and each of its ends behind it."""
    carry = run_chain(chains.verify)
    for steps in chains.ends.values():
        run_chain(steps, carry)


def _dummy_layout(num_requests: int, block: int, page_size: int) -> Layout:
    """A full bucket that reads the null page: the largest row count a plan will ever see."""
    pages = [[NULL_PAGE] * pages_for(block, page_size)] * num_requests
    lens = [block] * num_requests
    return Layout.build(lens, lens, pages, page_size)
