"""What was captured, for people: nodes, memory and shapes of every graph, and graphs as DOT.

Nothing here runs while decoding. Node counts are asked of the driver when they are wanted.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Literal, NamedTuple

from graphengine.capture import cuda_driver
from graphengine.capture.runners import Call, EagerRunner, ReplayRunner, Runner, shapes

_KERNEL = 0  # of CUgraphNodeType
_DOT_PARAMETERS = 1 << 2 | 1 << 3 | 1 << 4  # of kernel, memcpy and memset nodes


class Entry(NamedTuple):
    """One line of the list. Counts and bytes are None where a step is called eagerly; `steps` names
    those of a chain that is one graph."""

    name: str
    launch: Literal["graph", "eager"]
    input_shapes: list[str]
    output_shapes: list[str]
    num_kernels: int | None = None
    num_nodes: int | None = None
    pool_bytes: int | None = None
    live_bytes: int | None = None
    steps: tuple[str, ...] = ()


def inventory(runner: Runner) -> list[Entry]:
    """Lists a runner's calls in order.

    An eager runner knows its shapes only while it runs, so it is run once: call this on cleared
    buffers, where every row is padding.
    """
    if isinstance(runner, ReplayRunner):
        entries = [_captured(call) for call in runner.calls]
        if len(entries) < len(runner.chain):
            entries[0] = entries[0]._replace(steps=tuple(step.name for step in runner.chain))
        return entries
    assert isinstance(runner, EagerRunner)
    entries, carry = [], runner.source()
    for step in runner.chain:
        inputs = shapes(carry)
        carry = step.run(carry)
        entries.append(Entry(step.name, "eager", inputs, shapes(carry)))
    runner.carry = carry
    return entries


def write_dot(runner: Runner, folder: Path, prefix: str) -> list[Path]:
    """Writes each of a runner's graphs as `<prefix><name>.dot`; none for an eager runner.

    Raises:
        RuntimeError: the driver refused.
    """
    written: list[Path] = []
    for call in runner.calls if isinstance(runner, ReplayRunner) else []:
        if call.graph is not None:
            written.append(folder / f"{prefix}{call.name}.dot")
            handle = ctypes.c_void_p(call.graph.handle.raw_cuda_graph())
            place, parameters = str(written[-1]).encode(), ctypes.c_uint(_DOT_PARAMETERS)
            cuda_driver.call("cuGraphDebugDotPrint", handle, place, parameters)
    return written


def _captured(call: Call) -> Entry:
    if call.graph is None:
        return Entry(call.name, "eager", call.input_shapes, call.output_shapes)
    graph, counts = call.graph, _node_counts(call.graph.handle.raw_cuda_graph())
    found = *counts, graph.pool_bytes, graph.live_bytes
    return Entry(call.name, "graph", call.input_shapes, call.output_shapes, *found)


def _node_counts(graph: int) -> tuple[int, int]:
    """(kernels, all nodes) of a cudaGraph_t, child graphs not opened."""
    handle = ctypes.c_void_p(graph)
    count, kind = ctypes.c_size_t(), ctypes.c_int()
    cuda_driver.call("cuGraphGetNodes", handle, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    if count.value:
        cuda_driver.call("cuGraphGetNodes", handle, nodes, ctypes.byref(count))
    num_kernels = 0
    for node in nodes:
        cuda_driver.call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        num_kernels += kind.value == _KERNEL
    return num_kernels, len(nodes)
