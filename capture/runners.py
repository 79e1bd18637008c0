"""Three ways to run one chain: eagerly, as CUDA graphs between eager attentions, or as one graph,
which a step of the host cuts in two.

Invariant: capture shape equals replay shape by construction (a runner belongs to one bucket and
its buffers), and a graph-owned tensor is valid from its replay to the next one only: a later
segment of the same chain may read it, anything later must be copied to a step buffer.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from graphengine import names
from graphengine.capture import cuda_driver
from graphengine.capture.steps import AttentionStep, Carry, Chain, Host, Step


class Runner(Protocol):
    """Runs a chain on the current stream."""

    carry: Carry
    """What the last run left; static addresses once captured."""

    def run(self) -> None:
        """Queues the whole chain; never waits."""
        ...


def run_chain(chain: Chain, carry: Carry = ()) -> Carry:
    """Calls every step, compiled or not, each in its NVTX range."""
    for step in chain:
        with names.range_(step.name):
            carry = step.run(carry)
    return carry


class EagerRunner:
    """`run_chain` on the carry that another runner left: mode none, and the CPU."""

    def __init__(self, chain: Chain, source: Callable[[], Carry]) -> None:
        self.chain, self.source = chain, source
        self.carry: Carry = ()

    def run(self) -> None:
        self.carry = run_chain(self.chain, self.source())


class Graph(NamedTuple):
    """A captured graph and what it took. `pool_bytes` is what it added to the shared pool, 0 where
    it fitted into memory that earlier graphs had left; `live_bytes` of it stay in use."""

    handle: torch.cuda.CUDAGraph
    pool_bytes: int
    live_bytes: int


class Call(NamedTuple):
    """One call of a captured chain: a graph's replay, or an eager step (`graph` is None)."""

    name: str
    run: Callable[[], Any]
    graph: Graph | None
    input_shapes: list[str]
    output_shapes: list[str]


class ReplayRunner:
    """A list of calls without arguments: graph replays, and eager steps bound to static tensors.

    It keeps the chain it was captured from: a graph holds addresses, not tensors, so what only a
    step's closure owns would be freed, and its memory reused, while replays still read it.
    """

    def __init__(self, chain: Chain, calls: list[Call], carry: Carry) -> None:
        self.chain, self.calls, self.carry = chain, calls, carry
        self._runs = [call.run for call in calls]

    def run(self) -> None:
        if not names.is_enabled():
            for run in self._runs:
                run()
            return
        for call in self.calls:
            with names.range_(call.name):
                call.run()


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One a device: cuBLAS keeps 32 MB of scratch for each stream that it has worked on."""
    return torch.cuda.Stream(device)


class GraphPool:
    """One memory pool for every capture of an engine, and the process's side stream.

    Sharing is right because replays follow capture order within a bucket and one bucket is in
    flight at a time. Capture the largest bucket first: the smaller ones then fit into its memory. A
    larger one that is captured later extends the pool and moves nothing.
    """

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = _side_stream(torch.cuda.current_device())
        self.num_graphs = 0

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Inside, work is queued where captures are recorded, on a stream whose library handles are
        its own; what comes behind waits for it. All of it is done, so buffers must be in a state
        where that is harmless."""
        self.stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            torch.cuda.current_stream().wait_stream(self.stream)

    def capture(self, steps: Chain, carry: Carry) -> tuple[Graph, Carry]:
        """Records the steps. The like of them have run inside `warming`: what only a first run does
        (it compiles, loads modules, makes cuBLAS handles) cannot be recorded."""
        # Kept beside its executable, so that `inventory` can look into it later.
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        alone = "thread_local"  # other threads may allocate meanwhile: it is the user's process
        with (
            _no_collection(),
            torch.cuda.graph(graph, self.handle, self.stream, capture_error_mode=alone),
        ):
            before = torch.cuda.memory_stats()
            carry = run_chain(steps, carry)
            after = torch.cuda.memory_stats()
        graph.instantiate()
        _upload(graph)
        self.num_graphs += 1
        pool_bytes, live_bytes = (
            after.get(key, 0) - before.get(key, 0)
            for key in ("reserved_bytes.all.current", "allocated_bytes.all.current")
        )
        return Graph(graph, pool_bytes, live_bytes), carry


def _upload(graph: torch.cuda.CUDAGraph) -> None:
    """Puts on the device what its launches need, on the stream that will replay it. Its first
    replay would do so else, but then every step of Qwen3-8B takes 0.8 % longer, one of 35B-A3B
    0.4 % less (H200, profiles/results/2026-11-30-h200-8b-by-turns-84c287c.json, so of 35b-; why is
    not known, profiles/LOG.md)."""
    stream = torch.cuda.current_stream().cuda_stream
    handles = ctypes.c_void_p(graph.raw_cuda_graph_exec()), ctypes.c_void_p(stream)
    cuda_driver.call("cuGraphUpload", *handles)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps Python's collector from destroying what an earlier engine left, its graphs among it: a
    call that CUDA forbids while a stream is captured ends the capture, whoever makes it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def capture_piecewise(chain: Chain, carry: Carry, pool: GraphPool) -> ReplayRunner:
    """One graph per run of dense steps, attention eager between them."""
    calls: list[Call] = []
    for step in chain:
        static = carry
        if isinstance(step, AttentionStep | Host):
            call, carry = _eager_call(step, static)
        else:
            graph, carry = pool.capture([step], static)
            call = Call(step.name, graph.handle.replay, graph, shapes(static), shapes(carry))
            call.run()
        calls.append(call)
    return ReplayRunner(chain, calls, carry)


def _eager_call(step: Step, static: Carry) -> tuple[Call, Carry]:
    carry = step.run(static)
    return Call(step.name, partial(step.run, static), None, shapes(static), shapes(carry)), carry


def capture_ends(
    name: str,
    head: Chain,
    ends: Mapping[str, Chain],
    tail: Chain,
    carry: Carry,
    pool: GraphPool,
    *,
    whole: bool,
    fronts: Mapping[str, Chain] = MappingProxyType({}),
) -> dict[str, ReplayRunner]:
    """A runner for each end of a chain `head, end, tail`; under "" where there are no ends.

    An end hands nothing on to the tail; one without steps drops what the head has left.

    Args:
        whole: one graph for each end, attention included, or two around a step of the host; else
            one for each dense step, of which those of head and tail are shared.
        fronts: what some ends have in front of the head, which does not continue it.
    """
    known, chains = ends or {"": ()}, whole_chains(head, ends, tail, fronts)
    if whole:
        return {end: capture_full(name, chain, carry, pool) for end, chain in chains.items()}
    begun = {end: capture_piecewise(front, (), pool).calls for end, front in fronts.items()}
    before = capture_piecewise(head, carry, pool)
    middles = {
        end: capture_piecewise(steps, before.carry if steps or not ends else (), pool)
        for end, steps in known.items()
    }
    assert not tail or not any(middle.carry for middle in middles.values())
    after = capture_piecewise(tail, (), pool)
    return {
        end: ReplayRunner(
            chains[end],
            begun.get(end, []) + before.calls + middle.calls + after.calls,
            after.carry if tail else middle.carry,
        )
        for end, middle in middles.items()
    }


def whole_chains(
    head: Chain, ends: Mapping[str, Chain], tail: Chain, fronts: Mapping[str, Chain]
) -> dict[str, Chain]:
    """`front, head, end, tail` for each end; for "" where there are none."""
    known = ends or {"": ()}
    return {end: [*fronts.get(end, ()), *head, *steps, *tail] for end, steps in known.items()}


def capture_full(name: str, chain: Chain, carry: Carry, pool: GraphPool) -> ReplayRunner:
    """The whole chain, attention included, as one graph; cut where the host works. It keeps the
    chain's name, but for a part of one step, which has its own, and where there are several more.
    """
    parts = [list(part) for _, part in groupby(chain, lambda step: isinstance(step, Host))]
    graphs = [part for part in parts if not isinstance(part[0], Host)]
    is_one = len([part for part in graphs if len(part) > 1] or graphs) == 1
    calls: list[Call] = []
    for part in parts:
        if isinstance(part[0], Host):
            for step in part:
                call, carry = _eager_call(step, carry)
                calls.append(call)
            continue
        own = name if is_one else names.dense_name(name, len(calls))
        own = part[0].name if len(part) == 1 < len(graphs) else own
        inputs = shapes(carry)
        graph, carry = pool.capture(part, carry)
        calls.append(Call(own, graph.handle.replay, graph, inputs, shapes(carry)))
    return ReplayRunner(chain, calls, carry)


def shapes(carry: Carry) -> list[str]:
    """Shape and dtype of each tensor, as `16x4096 bfloat16`."""
    return [
        f"{'x'.join(map(str, tensor.shape))} {str(tensor.dtype).removeprefix('torch.')}"
        for tensor in carry
    ]
