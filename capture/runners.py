"""Three ways to run one chain: eagerly, as CUDA graphs between eager attentions, as one graph.

Invariant: capture shape equals replay shape by construction (a runner belongs to one bucket and
its buffers), and a graph-owned tensor is valid from its replay to the next one only: a later
segment of the same chain may read it, anything later must be copied to a step buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from graphengine.capture.steps import Attention, Carry, Chain, Step
from graphengine.profiles import ranges

NUM_WARMUPS = 3


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
        with ranges.range_(step.name):
            carry = step.run(carry)
    return carry


class EagerRunner:
    """`run_chain` on the carry that another runner left: mode none, and the CPU."""

    def __init__(self, chain: Chain, source: Callable[[], Carry]) -> None:
        self._chain, self._source = chain, source
        self.carry: Carry = ()

    def run(self) -> None:
        self.carry = run_chain(self._chain, self._source())


class ReplayRunner:
    """A list of calls without arguments: graph replays and attentions bound to static tensors.

    It keeps the chain it was captured from: a graph holds addresses, not tensors, so what only a
    step's closure owns would be freed, and its memory reused, while replays still read it.
    """

    def __init__(
        self, chain: Chain, names: list[str], calls: list[Callable[[], Any]], carry: Carry
    ) -> None:
        self._chain, self._names, self._calls, self.carry = chain, names, calls, carry

    def run(self) -> None:
        if not ranges.is_enabled():
            for call in self._calls:
                call()
            return
        for name, call in zip(self._names, self._calls, strict=True):
            with ranges.range_(name):
                call()


class GraphPool:
    """One memory pool and one side stream for every capture of an engine.

    Sharing is right because replays follow capture order within a bucket and one bucket is in
    flight at a time. Capture the largest bucket first: the smaller ones then fit into its memory.
    """

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()
        self.num_graphs = 0

    def capture(self, steps: Chain, carry: Carry) -> tuple[torch.cuda.CUDAGraph, Carry]:
        """Warms the steps up on the side stream, then records them.

        Warming runs everything for real (compilation, cuBLAS handles, lazy modules), several
        times, so the buffers must be in a state where running is harmless.
        """
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(NUM_WARMUPS):
                run_chain(steps, carry)
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.handle, stream=self.stream):
            carry = run_chain(steps, carry)
        self.num_graphs += 1
        return graph, carry


def capture_piecewise(chain: Chain, carry: Carry, pool: GraphPool) -> ReplayRunner:
    """One graph per run of dense steps, attention eager between them."""
    names: list[str] = []
    calls: list[Callable[[], Any]] = []
    for step in chain:
        if isinstance(step, Attention):
            static = carry
            carry = step.run(static)
            calls.append(_bind(step, static))
        else:
            graph, carry = pool.capture([step], carry)
            graph.replay()
            calls.append(graph.replay)
        names.append(step.name)
    return ReplayRunner(chain, names, calls, carry)


def capture_full(name: str, chain: Chain, carry: Carry, pool: GraphPool) -> ReplayRunner:
    """The whole chain, attention included, as one graph."""
    graph, carry = pool.capture(chain, carry)
    return ReplayRunner(chain, [name], [graph.replay], carry)


def _bind(step: Step, static: Carry) -> Callable[[], Any]:
    run = step.run
    return lambda: run(static)
