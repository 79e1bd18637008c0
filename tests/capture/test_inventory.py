"""inventory: what an eager runner's steps take and give, and what has no graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from graphengine.capture import cuda_driver
from graphengine.capture.inventory import Entry, inventory, write_dot
from graphengine.capture.runners import Call, EagerRunner, Graph, ReplayRunner
from graphengine.capture.steps import AttentionStep, Dense


def test_an_eager_runner_is_run_once() -> None:
    """Bug: shapes are those of the step before, a step is missing, or what the run has left is not
    what a following runner continues."""
    dense = Dense("d", lambda carry: (carry[0][:1], torch.ones(2, 2)))
    runner = EagerRunner(
        [dense, AttentionStep("a", lambda carry: carry[1:])], lambda: (torch.ones(3),)
    )
    assert inventory(runner) == [
        Entry("d", "eager", ["3 float32"], ["1 float32", "2x2 float32"]),
        Entry("a", "eager", ["1 float32", "2x2 float32"], ["2x2 float32"]),
    ]
    assert runner.carry[0].shape == (2, 2)


class Handle:
    """As far as an inventory asks a graph."""

    def raw_cuda_graph(self) -> int:
        return 7


def test_one_graph_names_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a chain that is one graph is shown without its steps; kernels are counted as nodes or
    the other way round; bytes change places; an eager attention gets a picture, or a picture
    does not say what a kernel or a copy is given."""
    handle: Any = Handle()
    graph = Graph(handle, 100, 60)
    drawn: list[bytes] = []

    class Driver:
        """Of a graph of five kernels and two copies."""

        def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> int:
            assert graph.value == 7
            count._obj.value = 7
            if nodes is not None:
                nodes[:] = range(11, 18)
            return 0

        def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
            kind._obj.value = 0 if node.value < 16 else 1
            return 0

        def cuGraphDebugDotPrint(self, raw: Any, place: bytes, parameters: Any) -> int:
            assert (raw.value, parameters.value) == (7, 0b11100)  # of kernels, copies and fills
            drawn.append(place)
            return 0 if len(drawn) == 1 else 1

    monkeypatch.setattr(cuda_driver, "_driver", Driver)
    steps = [Dense("d", lambda carry: carry), AttentionStep("a", lambda carry: carry)]
    whole = ReplayRunner(steps, [Call("verify", print, graph, ["1 int64"], [])], ())
    (entry,) = inventory(whole)
    assert entry == Entry("verify", "graph", ["1 int64"], [], 5, 7, 100, 60, ("d", "a"))
    parts = ReplayRunner(
        steps, [Call("d", print, graph, [], []), Call("a", print, None, [], [])], ()
    )
    assert [(e.name, e.launch, e.num_nodes, e.steps) for e in inventory(parts)] == [
        ("d", "graph", 7, ()),
        ("a", "eager", None, ()),
    ]
    assert write_dot(parts, tmp_path, "b1-") == [tmp_path / "b1-d.dot"]
    assert drawn == [str(tmp_path / "b1-d.dot").encode()]
    with pytest.raises(RuntimeError, match="refused cuGraphDebugDotPrint"):
        write_dot(parts, tmp_path, "")
