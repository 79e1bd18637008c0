"""A bucket: one batch size, its buffers, its attentions and what runs a step of it.

Invariant: everything a graph holds (addresses, shapes, the block's length) belongs to the bucket
that captured it, and buffers are sized for the largest bucket and the longest block from the start:
building one later moves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from graphengine.capture.compile import compile_segments
from graphengine.capture.runners import GraphPool, Runner, run_chain
from graphengine.config.draft import AttentionRule
from graphengine.config.draft_length import draft_at
from graphengine.config.engine import EngineConfig
from graphengine.config.model import ModelConfig
from graphengine.decode.attention import (
    Attention,
    BlockAttention,
    FlashInferAttention,
    Layout,
    TorchAttention,
    make_workspace,
)
from graphengine.decode.buffers import Arena, StepBuffers
from graphengine.decode.chains import step_chains
from graphengine.decode.compile_ahead import CompileAhead, shortened
from graphengine.decode.fixed_chunk import FixedChunk
from graphengine.decode.kvcache import NULL_PAGE, pages_for
from graphengine.decode.proposer import Proposer, step_buffers
from graphengine.decode.segments import Segments
from graphengine.decode.simulate import Simulation
from graphengine.decode.stack import Target
from graphengine.decode.stages import Planned, Stage, captured_stages, cut, eager_stages


@dataclass(frozen=True, slots=True)
class Bucket:
    """Everything that runs a step of up to `size` requests."""

    size: int
    buffers: StepBuffers
    attentions: tuple[Attention, ...]  # the verify's, then one a kind of the drafter's layers
    stages: tuple[Stage, ...]  # in the order in which a step launches them
    ahead: Runner | None
    """The last stage, which is of the next block; rows that begin run it once."""

    @property
    def runners(self) -> list[Runner]:
        """Of the stages with their first end, each behind those whose carry it continues; for
        tools."""
        runners = [next(iter(stage.runners.values())) for stage in self.stages]
        return runners[-1:] + runners[:-1] if self.ahead is not None else runners


@dataclass(slots=True)
class BuildTimes:
    """Seconds spent compiling (first calls) and capturing."""

    compile_s: float = 0.0
    capture_s: float = 0.0


class BucketBuilder:
    """Compiles, warms and captures buckets of one proposer, over memory that they share.

    Every segment runs once here, so that no request pays for a compilation; on the CPU without
    compilation there is nothing to run ahead. A larger bucket captured after smaller ones extends
    the shared pool; the other order reuses it.
    """

    def __init__(
        self,
        config: EngineConfig,
        target: Target,
        proposer: Proposer,
        num_positions: int,
        simulation: Simulation | None = None,
        workspace: Tensor | None = None,
        progress: Callable[[str], None] = lambda what: None,
    ) -> None:
        """
        Args:
            proposer: with the longest block of any bucket.
            num_positions: that a request's pages hold.
            workspace: FlashInfer's scratch, to share it with other buckets on the same stream.
            progress: told what is being built.
        """
        self.config, self.target, self.proposer = config, target, proposer
        self.simulation, self.progress = simulation, progress
        self.device, self.dtype = target.kv_pool.device, target.kv_pool.dtype
        self.width = pages_for(num_positions, config.page_size)
        self.times = BuildTimes()
        self.pool = GraphPool() if config.graph_mode != "none" else None
        self.segments = Segments(*compile_segments(Segments())) if config.compile else Segments()
        self.workspace = workspace
        if workspace is None and config.attention_backend == "flashinfer":
            self.workspace = make_workspace(self.device)
        self.arena = Arena(self.device, self.dtype)
        step_buffers(self.arena, target.config, proposer, max(config.buckets), self.width)

    def proposing(self, proposer: Proposer) -> BucketBuilder:
        """The same with another proposer, over memory of its own."""
        num_positions = self.width * self.config.page_size
        return BucketBuilder(
            *(self.config, self.target, proposer, num_positions, self.simulation, self.workspace)
        )

    def clear_results_(self) -> None:
        """Forgets results that were not read. Mutates: the buffers."""
        self.arena.clear_("results")

    def build_ahead(
        self, sizes: Collection[int], prefills: Iterable[Callable[[], object]] = ()
    ) -> dict[int, Bucket]:
        """These buckets, the largest first, their kernels compiled beside them.

        Args:
            prefills: what else has kernels to compile.
        """
        first = sorted(sizes, reverse=True)
        runs = chain(self._runs_of(first), prefills) if self.device.type == "cuda" else ()
        with CompileAhead(runs) as kernels:
            return {size: self.build(size, kernels) for size in first}

    @torch.inference_mode(False)
    @torch.no_grad()
    def capture_chunks(self, chunks: Sequence[FixedChunk]) -> None:
        """Captures prefills like the buckets' steps, the largest first. Mutates: the chunks."""
        if self.pool is None:
            return
        began = time.perf_counter()
        for chunk in sorted(chunks, key=lambda chunk: -chunk.size):
            self.progress(f"capturing prefill {chunk.size}")
            chunk.capture_(self.pool, self.config.graph_mode == "full")
        torch.cuda.synchronize()
        self.times.capture_s += time.perf_counter() - began

    @torch.inference_mode(False)
    @torch.no_grad()
    def build(self, size: int, kernels: CompileAhead | None = None) -> Bucket:
        """The bucket of a size, between steps. Mutates: the buffers, cleared before and after."""
        config, simulation = self.config, self.simulation
        self.arena.clear_()
        drawn = simulation.step_1.clone() if simulation is not None else None
        proposer = draft_at(config, self.proposer, size)
        views = step_buffers(self.arena, self.target.config, proposer, size, self.width)
        verify = self._attention(views, self.target.config, AttentionRule(causal=True), views.block)
        drafts = self._draft_attentions(views, proposer)
        chains = step_chains(
            *(config, self.target, proposer, views, verify, drafts, self.segments, simulation)
        )
        rows = {attends.rows for attends in proposer.attends}
        assert len(rows) <= 1  # a plan is for one number of rows
        before_draft = Planned(tuple(drafts.values()), *rows)
        plans = (Planned((verify,), views.block), before_draft)
        parts = cut(chains, plans[0], before_draft if config.plans_attention else None)

        stages, ahead = eager_stages(*parts)
        began = time.perf_counter()
        runs_ahead = self.device.type == "cuda" or config.compile

        def warm() -> None:
            for stage in stages:
                for runner in dict.fromkeys(stage.runners.values()):
                    runner.run()

        if runs_ahead:
            what = "compiling" if config.compile else "warming"
            self.progress(f"{what} bucket {size}")
            if ahead is not None:
                ahead.run()
        if config.compile and self.workspace is not None:
            # FlashInfer's own compiler may still be at work, and to plan is to wait for it. So
            # Inductor comes first, over attentions that do nothing yet.
            warm()
        for attentions, block in plans:
            for attention in attentions:
                attention.plan(_dummy_layout(size, block, config.page_size))
        if runs_ahead:
            warm()
            if kernels is not None:
                kernels.wait()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            self.times.compile_s += time.perf_counter() - began
        if self.pool is not None:
            self.progress(f"capturing bucket {size}")
            began = time.perf_counter()
            stages, ahead = captured_stages(*parts, config.graph_mode, self.pool)
            torch.cuda.synchronize()
            self.times.capture_s += time.perf_counter() - began
        self.arena.clear_()
        if simulation is not None and drawn is not None:
            simulation.step_1.copy_(drawn)
        return Bucket(size, views, (verify, *drafts.values()), tuple(stages), ahead)

    def _runs_of(self, sizes: Collection[int]) -> Iterator[Callable[[], object]]:
        """The chains of these buckets, neither compiled nor planned, over buffers of their own."""
        config, short = self.config, shortened(self.target, self.proposer)
        apart = Arena(self.device, self.dtype)
        step_buffers(apart, self.target.config, self.proposer, max(sizes), self.width)
        for size in sizes:
            own = draft_at(config, self.proposer, size)
            views = step_buffers(apart, self.target.config, own, size, self.width)
            verify = self._attention(
                views, self.target.config, AttentionRule(causal=True), views.block, planned=False
            )
            drafts = self._draft_attentions(views, own, planned=False)
            segments = Segments()
            chains = step_chains(
                *(config, short, own, views, verify, drafts, segments, self.simulation)
            )
            for steps in (chains.propose, chains.context):
                yield partial(run_chain, steps)
            for end in chains.ends.values():
                yield partial(run_chain, [*chains.verify, *end])

    def _draft_attentions(
        self, views: StepBuffers, proposer: Proposer, planned: bool = True
    ) -> dict[AttentionRule, Attention]:
        return {
            kind.rule: self._attention(views, kind.model, kind.rule, kind.rows, planned)
            for kind in proposer.attends
        }

    def _attention(
        self,
        views: StepBuffers,
        model: ModelConfig,
        rule: AttentionRule,
        block: int,
        planned: bool = True,
    ) -> Attention:
        """A bucket's attention of `block` rows a request, its metadata at fixed addresses."""
        causal, window, size = rule.causal, rule.window, self.config.page_size
        if self.config.attention_backend == "triton":
            return BlockAttention(
                *(model, causal, views.page_table_BW, views.start_B, block, window)
            )
        if self.workspace is None or not planned:
            return TorchAttention(model, size, causal, self.device, window)
        num_requests, num_pages = views.start_B.shape[0], views.page_table_BW.numel()
        return FlashInferAttention(
            *(model, size, causal, self.workspace, self.dtype, num_requests, num_pages, window)
        )


def prefill_attention(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Attention:
    """The causal attention of prefills, any lengths."""
    if config.prefill_attention_backend == "flashinfer":
        return FlashInferAttention(model, config.page_size, True, make_workspace(device), dtype)
    return TorchAttention(model, config.page_size, True, device)


def _dummy_layout(num_requests: int, block: int, page_size: int) -> Layout:
    """A full bucket that reads the null page: the largest row count a plan will ever see."""
    pages = [[NULL_PAGE] * pages_for(block, page_size)] * num_requests
    lens = [block] * num_requests
    return Layout.build(lens, lens, pages, page_size)
