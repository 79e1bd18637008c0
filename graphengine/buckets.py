"""A bucket: one batch size, its buffers, its attention plans and its four runners.

A decode step of a bucket is `draft_head, draft, verify, context`. The head (embed + pre(0)) and the
drafter's context need no plan, so the engine queues them before it waits for the previous result:
they keep the GPU busy while the host reads, commits and plans.

Invariant: everything a graph holds (addresses, shapes, the block's length) belongs to the bucket
that captured it, and buffers are sized for the largest bucket and the longest block from the start:
building one later moves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.attention import (
    Attention,
    BlockAttention,
    FlashInferAttention,
    Layout,
    TorchAttention,
    make_workspace,
)
from graphengine.buffers import StepBuffers
from graphengine.capture.compile import compile_segment
from graphengine.capture.runners import (
    EagerRunner,
    GraphPool,
    Runner,
    capture_full,
    capture_piecewise,
    capture_piecewise_ends,
)
from graphengine.capture.steps import Carry, Step
from graphengine.config import AttentionRule, EngineConfig, ModelConfig
from graphengine.draft_length import draft_at
from graphengine.forward import (
    Drafter,
    Segments,
    Target,
    context_chain,
    draft_chain,
    sampled_accept_step,
    verify_chain,
)
from graphengine.kvcache import NULL_PAGE, pages_for
from graphengine.profiles import ranges
from graphengine.simulate import Simulation


@dataclass(frozen=True, slots=True)
class Bucket:
    """Everything that runs a step of up to `size` requests."""

    size: int
    buffers: StepBuffers
    verify_attention: Attention
    verify: Runner
    draft_attentions: tuple[Attention, ...] = ()  # one a kind of layer
    draft_head: Runner | None = None
    draft: Runner | None = None
    context: Runner | None = None
    verify_sampled: Runner | None = None
    """`verify` with tokens drawn at `StepBuffers.temperature_B`; runs if a request wants it."""


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
    """
    times = BuildTimes()
    segments = Segments(*map(compile_segment, Segments())) if config.compile else Segments()
    pool = GraphPool() if config.graph_mode != "none" else None
    if workspace is None and config.attention_backend == "flashinfer":
        workspace = make_workspace(device)

    @torch.no_grad()
    def build(size: int) -> Bucket:
        buffers.clear_()
        drawn = simulation.step_1.clone() if simulation is not None else None
        own = replace(drafter, config=draft_at(config, drafter.config, size)) if drafter else None
        views = buffers.bucket(size, own.config if own else None)

        def attention(model: ModelConfig, rule: AttentionRule, block: int) -> Attention:
            return _attention(config, model, rule, dtype, workspace, block, views)

        layout = _dummy_layout(size, views.block, config.page_size)
        verify_attention = attention(target.config, AttentionRule(causal=True), views.block)
        to_plan = [(verify_attention, layout)]
        draft_attentions: dict[AttentionRule, Attention] = {}
        chains: list[tuple[str, list[Step], bool]] = []  # name, steps, continues the last one
        if own:
            rules = own.config.attention_rules
            layout = _dummy_layout(size, views.draft_block, config.page_size)
            for rule in dict.fromkeys(rules):
                draft_attentions[rule] = attention(own.config.model, rule, views.draft_block)
                to_plan.append((draft_attentions[rule], layout))
            by_layer = [draft_attentions[rule] for rule in rules]
            draft = draft_chain(own, views, by_layer, segments)
            chains += [(draft[0].name, draft[:1], False), ("draft", draft[1:], True)]
        verify = verify_chain(
            target, own, views, verify_attention, config.page_size, segments, simulation
        )
        sampled: Runner | None = None
        sampled_end = None
        if config.sampling:
            sampled_end = sampled_accept_step(own, views, config.page_size)
            sampled = EagerRunner([*verify[:-1], sampled_end], _source(None))
        chains.append(("verify" if own else "decode", verify, False))
        if own:
            context = context_chain(
                own,
                views.taps_TC,
                views.context_positions_T,
                views.context_slots_T,
                segments,
            )
            chains.append((ranges.DRAFT_CONTEXT, context, False))

        eager: list[Runner] = []
        for _, steps, continues in chains:
            eager.append(EagerRunner(steps, _source(eager[-1] if continues else None)))
        warmed = [*eager, *([sampled] if sampled else [])]
        began = time.perf_counter()
        runs_ahead = device.type == "cuda" or config.compile
        if runs_ahead:
            progress(f"compiling bucket {size}" if config.compile else f"warming bucket {size}")
        if config.compile and workspace is not None:
            # FlashInfer's own compiler may still be at work, and to plan is to wait for it. So
            # Inductor comes first, over attentions that do nothing yet.
            for runner in warmed:
                runner.run()
        for unplanned, layout in to_plan:
            unplanned.plan(layout)
        if runs_ahead:
            for runner in warmed:
                runner.run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.compile_s += time.perf_counter() - began
        runners = eager
        if pool is not None:
            progress(f"capturing bucket {size}")
            began = time.perf_counter()
            runners = []
            for name, steps, continues in chains:
                carry = runners[-1].carry if continues else ()
                if config.graph_mode == "full":
                    runners.append(capture_full(name, steps, carry, pool))
                    if steps is verify and sampled_end is not None:
                        sampled = capture_full(name, [*verify[:-1], sampled_end], carry, pool)
                elif steps is verify and sampled_end is not None:
                    runner, sampled = capture_piecewise_ends(steps, sampled_end, carry, pool)
                    runners.append(runner)
                else:
                    runners.append(capture_piecewise(steps, carry, pool))
            torch.cuda.synchronize()
            times.capture_s += time.perf_counter() - began
        buffers.clear_()
        if simulation is not None and drawn is not None:
            simulation.step_1.copy_(drawn)
        if own:
            planned = tuple(draft_attentions.values())
            head, draft_runner, verify_runner, context_runner = runners
            return Bucket(
                size,
                views,
                verify_attention,
                verify_runner,
                planned,
                head,
                draft_runner,
                context_runner,
                sampled,
            )
        return Bucket(size, views, verify_attention, runners[0], verify_sampled=sampled)

    first = config.buckets if ahead is None else ahead
    return Buckets({size: build(size) for size in sorted(first, reverse=True)}, build, pool, times)


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


def _source(before: Runner | None) -> Callable[[], Carry]:
    if before is None:
        return lambda: ()
    return lambda: before.carry


def _dummy_layout(num_requests: int, block: int, page_size: int) -> Layout:
    """A full bucket that reads the null page: the largest row count a plan will ever see."""
    pages = [[NULL_PAGE] * pages_for(block, page_size)] * num_requests
    lens = [block] * num_requests
    return Layout.build(lens, lens, pages, page_size)
