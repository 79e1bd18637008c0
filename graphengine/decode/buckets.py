"""A bucket: one batch size, its buffers, its attentions and what runs a step of it.

Invariant: everything a graph holds (addresses, shapes, the block's length) belongs to the bucket
that captured it, and buffers are sized for the largest bucket and the longest block from the start:
building one later moves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.capture.compile import compile_segments
from graphengine.capture.runners import GraphPool, Runner, run_chain
from graphengine.capture.steps import Step
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
from graphengine.decode.buffers import StepBuffers
from graphengine.decode.chains import (
    Drafter,
    context_chain,
    draft_chain,
    sampled_accept_step,
    sampled_last_step,
    verify_chain,
)
from graphengine.decode.compile_ahead import CompileAhead, shortened
from graphengine.decode.kvcache import NULL_PAGE, pages_for
from graphengine.decode.segments import Segments
from graphengine.decode.simulate import Simulation
from graphengine.decode.stack import Target
from graphengine.decode.stages import (
    Chains,
    Stage,
    captured_stages,
    eager_stages,
    planned,
    whole,
)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Everything that runs a step of up to `size` requests."""

    size: int
    buffers: StepBuffers
    verify_attention: Attention
    draft_attentions: tuple[Attention, ...]  # one a kind of layer
    stages: tuple[Stage, ...]  # in the order in which a step launches them
    ahead: Runner | None
    """The last stage, which is of the next block; a freshly loaded batch runs it once."""

    @property
    def runners(self) -> list[Runner]:
        """Of the stages, each behind those whose carry it continues; for tools."""
        ahead = [] if self.ahead is None else [self.ahead]
        return ahead + [stage.runner for stage in self.stages if stage.runner is not self.ahead]


@dataclass(slots=True)
class BuildTimes:
    """Seconds spent compiling (first calls) and capturing."""

    compile_s: float = 0.0
    capture_s: float = 0.0


class Buckets(NamedTuple):
    """The buckets built ahead, and what builds one more, between steps."""

    ready: dict[int, Bucket]
    build: Callable[[int], Bucket]
    """Size -> its bucket. Mutates: the buffers, cleared before and after."""
    pool: GraphPool | None
    times: BuildTimes


def build_buckets(
    config: EngineConfig,
    target: Target,
    drafter: Drafter | None,
    buffers: StepBuffers,
    dtype: torch.dtype,
    device: torch.device,
    simulation: Simulation | None = None,
    progress: Callable[[str], None] = lambda what: None,
    ahead: Collection[int] | None = None,
    workspace: Tensor | None = None,
    prefills: Sequence[Callable[[], object]] = (),
) -> Buckets:
    """Compiles, warms and captures buckets, the largest first.

    Every segment runs once here, so that no request pays for a compilation; on the CPU without
    compilation there is nothing to run ahead. A larger bucket captured after smaller ones extends
    the shared pool; the other order reuses it.

    Args:
        buffers: cleared while building, so that warming up touches nothing but the null page.
        progress: told what is being built.
        ahead: sizes to build now; default all.
        workspace: FlashInfer's scratch, to share it with other buckets on the same stream.
        prefills: what else has kernels to compile beside those of the buckets.
    """
    times = BuildTimes()
    segments = Segments(*compile_segments(Segments())) if config.compile else Segments()
    pool = GraphPool() if config.graph_mode != "none" else None
    if workspace is None and config.attention_backend == "flashinfer":
        workspace = make_workspace(device)

    def drafter_at(size: int) -> Drafter | None:
        return replace(drafter, config=draft_at(config, drafter.config, size)) if drafter else None

    def runs_of(sizes: Collection[int]) -> Iterator[Callable[[], object]]:
        """The chains of these buckets, neither compiled nor planned, over buffers of their own."""
        draft, short = drafter.config if drafter else None, shortened(target, drafter)
        width = buffers.page_table_BW.shape[1]
        apart = StepBuffers.make(target.config, draft, max(sizes), width, dtype, device)
        for size in sizes:
            own = drafter_at(size)
            views = apart.bucket(size, own.config if own else None)
            chains = _assemble(config, short, own, views, dtype, None, Segments(), None).chains
            sampled = [*chains.verify[:-2], *chains.sampled_end] if chains.sampled_end else []
            for steps in (chains.draft, chains.verify, chains.context, sampled):
                yield partial(run_chain, steps)

    @torch.inference_mode(False)
    @torch.no_grad()
    def build(size: int, kernels: CompileAhead | None = None) -> Bucket:
        buffers.clear_()
        drawn = simulation.step_1.clone() if simulation is not None else None
        own = drafter_at(size)
        views = buffers.bucket(size, own.config if own else None)
        verify_attention, draft_attentions, chains = _assemble(
            config, target, own, views, dtype, workspace, segments, simulation
        )
        attentions = (verify_attention, *draft_attentions)
        cut = whole(chains)
        if config.plans_attention:
            blocks = (views.block, views.draft_block)
            cut = planned(chains, verify_attention, draft_attentions, *blocks)

        built = eager_stages(cut)
        began = time.perf_counter()
        runs_ahead = device.type == "cuda" or config.compile

        def warm() -> None:
            for stage in built.stages:
                stage.runner.run()
                if stage.sampled is not stage.runner:
                    stage.sampled.run()

        if runs_ahead:
            progress(f"compiling bucket {size}" if config.compile else f"warming bucket {size}")
            if built.ahead is not None:
                built.ahead.run()
        if config.compile and workspace is not None:
            # FlashInfer's own compiler may still be at work, and to plan is to wait for it. So
            # Inductor comes first, over attentions that do nothing yet.
            warm()
        for unplanned in attentions:
            block = views.block if unplanned is verify_attention else views.draft_block
            unplanned.plan(_dummy_layout(size, block, config.page_size))
        if runs_ahead:
            warm()
            if kernels is not None:
                kernels.wait()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.compile_s += time.perf_counter() - began
        if pool is not None:
            progress(f"capturing bucket {size}")
            began = time.perf_counter()
            built = captured_stages(cut, config.graph_mode, pool)
            torch.cuda.synchronize()
            times.capture_s += time.perf_counter() - began
        buffers.clear_()
        if simulation is not None and drawn is not None:
            simulation.step_1.copy_(drawn)
        return Bucket(size, views, verify_attention, draft_attentions, *built)

    first = sorted(config.buckets if ahead is None else ahead, reverse=True)
    runs = chain(runs_of(first), prefills) if device.type == "cuda" else ()
    with CompileAhead(runs) as kernels:
        ready = {size: build(size, kernels) for size in first}
    return Buckets(ready, build, pool, times)


def prefill_attention(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Attention:
    """The causal attention of prefills, any lengths."""
    if config.prefill_attention_backend == "flashinfer":
        return FlashInferAttention(model, config.page_size, True, make_workspace(device), dtype)
    return TorchAttention(model, config.page_size, True, device)


def _attention(
    config: EngineConfig,
    model: ModelConfig,
    rule: AttentionRule,
    dtype: torch.dtype,
    workspace: Tensor | None,
    block: int,
    buffers: StepBuffers,
) -> Attention:
    """A bucket's attention of `block` rows a request, its metadata at fixed addresses."""
    causal, window = rule.causal, rule.window
    if config.attention_backend == "triton":
        return BlockAttention(model, causal, buffers, block, window)
    if workspace is None:
        return TorchAttention(model, config.page_size, causal, buffers.start_B.device, window)
    num_requests, max_pages = buffers.start_B.shape[0], buffers.page_table_BW.numel()
    return FlashInferAttention(
        model, config.page_size, causal, workspace, dtype, num_requests, max_pages, window
    )


class _Assembled(NamedTuple):
    """A bucket's attentions, one a kind of the drafter's layers, and the chains over them."""

    verify_attention: Attention
    draft_attentions: tuple[Attention, ...]
    chains: Chains


def _assemble(
    config: EngineConfig,
    target: Target,
    drafter: Drafter | None,
    views: StepBuffers,
    dtype: torch.dtype,
    workspace: Tensor | None,
    segments: Segments,
    simulation: Simulation | None,
) -> _Assembled:
    """A bucket's parts over its views of the buffers."""

    def attention(model: ModelConfig, rule: AttentionRule, block: int) -> Attention:
        return _attention(config, model, rule, dtype, workspace, block, views)

    page_size = config.page_size
    verify_attention = attention(target.config, AttentionRule(causal=True), views.block)
    of_rule: dict[AttentionRule, Attention] = {}
    draft, context = [], []
    if drafter is not None:
        for rule in dict.fromkeys(drafter.config.attention_rules):
            of_rule[rule] = attention(drafter.config.model, rule, views.draft_block)
        by_layer = [of_rule[rule] for rule in drafter.config.attention_rules]
        draft = draft_chain(drafter, views, by_layer, segments)
        context = context_chain(
            drafter, views.taps_TC, views.context_positions_T, views.context_slots_T, segments
        )
    verify = verify_chain(target, drafter, views, verify_attention, page_size, segments, simulation)
    sampled_end: list[Step] = []
    if config.sampling:
        sampled_end.append(sampled_last_step(target, drafter, views, segments))
        sampled_end.append(sampled_accept_step(drafter, views, page_size))
    chains = Chains(draft, verify, context, sampled_end)
    return _Assembled(verify_attention, tuple(of_rule.values()), chains)


def _dummy_layout(num_requests: int, block: int, page_size: int) -> Layout:
    """A full bucket that reads the null page: the largest row count a plan will ever see."""
    pages = [[NULL_PAGE] * pages_for(block, page_size)] * num_requests
    lens = [block] * num_requests
    return Layout.build(lens, lens, pages, page_size)
