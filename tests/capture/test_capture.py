"""Captures among what earlier engines have left behind."""

from __future__ import annotations

import gc

import pytest
import torch

from graphengine.capture.runners import NUM_WARMUPS, GraphPool
from graphengine.capture.steps import Carry, Dense


@pytest.mark.gpu
def test_garbage_is_not_collected_in_a_capture() -> None:
    """Bug: while a graph is captured the collector destroys the graphs of an earlier engine, which
    CUDA answers by ending the capture."""
    x = torch.zeros(8, device="cuda")

    def leave_behind() -> None:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            left = x + 1
        graph.instantiate()
        graph.replay()
        pinned = torch.zeros(1 << 20, pin_memory=True)
        cycle = [graph, left, pinned, pinned.to("cuda", non_blocking=True)]
        cycle.append(cycle)  # pyright: ignore[reportArgumentType]

    calls: list[object] = []

    def step(carry: Carry) -> Carry:
        calls.append(x)
        if len(calls) > NUM_WARMUPS:
            gc.set_threshold(1, 1, 1)
            calls.append([[] for _ in range(1000)])
        return (x + len(calls),)

    threshold = gc.get_threshold()
    try:
        gc.set_threshold(10**9)
        leave_behind()
        graph, (y,) = GraphPool().capture([Dense("step", step)], ())
    finally:
        gc.set_threshold(*threshold)
    graph.handle.replay()
    assert (y == NUM_WARMUPS + 2).all()
