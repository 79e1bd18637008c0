"""Hand-made traces with known gaps: as nsys SQLite exports and as torch.profiler Chrome traces.

One step of `scenario`, in microseconds from its begin; the host's calls first, then the device:

    verify.00        graph launch  2.5 .. 3.5     10 .. 14, 15 .. 20      gap 1 inside the graph
    verify.L0.attn   launch        4.5 .. 5.5     22 .. 26                gap 2, graph | eager
                     launch        5.55 .. 5.9    26.5 .. 27.5            gap 0.5, eager | eager
    verify.01        graph launch  6.5 .. 28.5    29 .. 39, 35 .. 41      gap 1.5, launched late
    accept (host)    copy          31.5 .. 32     43 .. 44                gap 2, graph | eager

Steps repeat every 100 us, so the gap before a step's first kernel is 66 us.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

PID = 77
THREAD = (PID << 24) + 5
STEP_NS = 100_000
DOMAIN_ID = 3

RANGES = [
    ("step", 0, 40_000),
    ("verify", 1_000, 30_000),
    ("verify.00", 2_000, 4_000),
    ("verify.L0.attn", 4_000, 6_000),
    ("verify.01", 6_000, 29_000),
    ("accept", 31_000, 33_000),
]


class Call(NamedTuple):
    """A host call and what it makes the device do: (kernel, start, end)."""

    api: str
    start: int
    end: int
    work: list[tuple[str, int, int]]


CALLS = [
    Call(
        "cudaGraphLaunch_v10000", 2_500, 3_500, [("gemm", 10_000, 14_000), ("norm", 15_000, 20_000)]
    ),
    Call("cudaLaunchKernel_v7000", 4_500, 5_500, [("BatchPrefill", 22_000, 26_000)]),
    Call("cudaLaunchKernel_v7000", 5_550, 5_900, [("MergeStates", 26_500, 27_500)]),
    Call("cuGraphLaunch", 6_500, 28_500, [("gemm", 29_000, 39_000), ("norm", 35_000, 41_000)]),
    Call("cudaMemcpyAsync_v3020", 31_500, 32_000, [("memcpy DtoH", 43_000, 44_000)]),
]


def write_export(path: Path, num_steps: int = 4, preset: str = "node", domain: bool = True) -> Path:
    """The scenario as an nsys SQLite export.

    Args:
        preset: "graph" joins a graph's kernels into one CUPTI_ACTIVITY_KIND_GRAPH_TRACE row.
        domain: whether the row that names the NVTX domain was recorded.
    """
    strings: dict[str, int] = {}

    def string(text: str) -> int:
        return strings.setdefault(text, len(strings) + 1)

    nvtx: list[tuple[Any, ...]] = []
    runtime: list[tuple[Any, ...]] = []
    kernels: list[tuple[Any, ...]] = []
    copies: list[tuple[Any, ...]] = []
    graphs: list[tuple[Any, ...]] = []
    if domain:
        nvtx.append((0, None, 75, "graphengine", None, THREAD, DOMAIN_ID))
        nvtx.append((0, None, 75, "cublasLt", None, THREAD, DOMAIN_ID + 1))
    for step in range(num_steps):
        base = 1_000_000 + step * STEP_NS
        for index, (name, start, end) in enumerate(RANGES):
            # nvtx registers its strings, so text comes through textId; accept the other way too.
            text, text_id = (name, None) if index % 2 else (None, string(name))
            nvtx.append((base + start, base + end, 59, text, text_id, THREAD, DOMAIN_ID))
        # Another library's range, innermost around the first launch; and ours on another thread.
        nvtx.append((base + 2_400, base + 3_600, 59, "cublasLtMatmul", None, THREAD, 0))
        nvtx.append((base + 2_450, base + 3_550, 59, "load", None, THREAD + 1, DOMAIN_ID))
        for index, call in enumerate(CALLS):
            correlation = 100 * step + index + 1
            runtime.append(
                (base + call.start, base + call.end, correlation, THREAD, string(call.api))
            )
            is_graph = "GraphLaunch" in call.api
            pid = PID << 24
            if is_graph and preset == "graph":
                start, end = call.work[0][1], call.work[-1][2]
                graphs.append((base + start, base + end, correlation, pid, index))
                continue
            for node, (name, start, end) in enumerate(call.work):
                times = (base + start, base + end, correlation, pid)
                if name.startswith("memcpy"):
                    copies.append((*times, 64, 2))
                else:
                    node_id = node + 1 if is_graph else None
                    kernels.append(
                        (*times, string(f"void {name}<int>(int)"), string(name), node_id)
                    )
    tables = {
        "NVTX_EVENTS": ("start end eventType text textId globalTid domainId", nvtx),
        "CUPTI_ACTIVITY_KIND_RUNTIME": ("start end correlationId globalTid nameId", runtime),
        "CUPTI_ACTIVITY_KIND_KERNEL": (
            "start end correlationId globalPid demangledName shortName graphNodeId",
            kernels,
        ),
        "CUPTI_ACTIVITY_KIND_MEMCPY": (
            "start end correlationId globalPid bytes copyKind",
            copies,
        ),
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": ("start end correlationId globalPid graphId", graphs),
        "StringIds": ("id value", [(number, text) for text, number in strings.items()]),
        "TARGET_INFO_SYSTEM_ENV": ("name value", [("Hostname", "secret-host")]),
    }
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        for table, (columns, rows) in tables.items():
            if not rows:
                continue  # nsys creates tables when they get a row
            quoted = ", ".join(f'"{name}"' for name in columns.split())
            connection.execute(f"CREATE TABLE {table} ({quoted})")
            marks = ", ".join("?" * len(columns.split()))
            connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
        connection.commit()
    return path


def write_chrome_trace(path: Path, num_steps: int = 4) -> Path:
    """The scenario as torch.profiler exports it."""
    events: list[dict[str, Any]] = []

    def add(kind: str, name: str, start: int, end: int, thread: int, **arguments: Any) -> None:
        times = {"ts": start / 1e3, "dur": (end - start) / 1e3}
        where = {"pid": PID, "tid": thread, "args": arguments}
        events.append({"ph": "X", "cat": kind, "name": name} | times | where)

    for step in range(num_steps):
        base = 1_700_000_000_000_000 + step * STEP_NS
        for name, start, end in RANGES:
            add("user_annotation", name, base + start, base + end, 5)
            add("gpu_user_annotation", name, base + start, base + end, 7)
        add("cpu_op", "aten::mm", base + 2_400, base + 3_600, 5)
        for index, call in enumerate(CALLS):
            correlation = 100 * step + index + 1
            add(
                "cuda_runtime",
                call.api,
                base + call.start,
                base + call.end,
                5,
                correlation=correlation,
            )
            for name, start, end in call.work:
                kind = "gpu_memcpy" if name.startswith("memcpy") else "kernel"
                add(kind, name, base + start, base + end, 7, correlation=correlation)
    events.append({"ph": "M", "name": "process_name", "pid": PID, "args": {"name": "python"}})
    path.write_text(json.dumps({"traceEvents": events}))
    return path
