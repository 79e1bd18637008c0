"""What work of a trace is called, and whose it is."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from graphengine.kernels import gated_delta, gated_delta_prefill
from graphengine.profiles import torch_trace
from graphengine.profiles.launch_gaps import report
from graphengine.profiles.trace import (
    Activity,
    HostRange,
    Launch,
    Trace,
    busy_class,
    host_times,
    place,
)


def test_late_work_belongs_to_the_step_that_launched_it() -> None:
    """Bug: with a step in flight, device work is booked to the step the host is in meanwhile."""
    host = [HostRange("step", i * 10, i * 10 + 9, 0) for i in range(3)]
    host += [HostRange("decode.00", i * 10 + 1, i * 10 + 8, 0) for i in range(3)]
    work = [
        Activity("gemm", 100 + i * 50, 140 + i * 50, Launch(i, i * 10 + 2, i * 10 + 3, 0, True))
        for i in range(3)
    ]
    assert [p.step for p in place(Trace(work, host))] == [0, 1, 2]
    assert report(Trace(work, host)).walls_ns == [50, 50]
    assert report(Trace(work, host)).idle_ns["seam"] == 20


@pytest.mark.parametrize("order", [1, -1])
def test_ranges_that_begin_together(order: int) -> None:
    """Bug: where a clock counts microseconds, a step's first range is taken for the one around it,
    and the work is the host's."""
    host = [HostRange("step", 0, 50, 0), HostRange("decode.00", 0, 20, 0)][::order]
    trace = Trace([Activity("gemm", 100, 140, Launch(1, 5, 6, 0, False))], host)
    assert [(p.name, p.step) for p in place(trace)] == [("decode.00", 0)]
    assert {name: time.ns for (_, name), time in host_times(trace).items()} == {
        "step": 30,
        "decode.00": 20,
    }


@pytest.mark.parametrize("chain", ["verify", "decode"])
def test_a_chain_that_is_one_graph_is_told_apart_by_its_kernels(chain: str) -> None:
    """Bug: in graph mode full a node trace has one row for all layers, or accepting without a
    drafter is a part of the last segment."""
    host = [HostRange("step", 0, 100, 0), HostRange(chain, 1, 50, 0)]
    host.append(HostRange(chain, 2, 40, 0))  # the runner's range has the host phase's name
    launch = Launch(1, 3, 4, 0, True)
    names = [
        "gemm",
        "BatchPrefillWithPagedKVCache",
        "MergeStates",
        "gemm",
        "block_attention_kernel",
        "gemm",
        "_chunk_argmax_kernel",
        "copy",
        "_accept_and_advance_kernel",
    ]
    work = [Activity(name, i * 10, i * 10 + 8, launch) for i, name in enumerate(names)]
    assert [p.name for p in place(Trace(work, host))] == [
        *(f"{chain}.{step}" for step in "00 L0.attn L0.attn 01 L1.attn 02 02".split()),
        *("accept", "accept"),
    ]
    whole = [Activity("graph", 0, 100, launch, is_whole_graph=True)]
    assert [(p.name, p.busy_class) for p in place(Trace(whole, host))] == [(chain, "chain")]


@pytest.mark.parametrize(
    "argmax",
    [["_chunk_argmax_kernel", "combine_argmax_kernel"], ["combine_argmax_kernel"]],
    ids=["of_logits", "of_the_head"],
)
def test_a_step_that_is_one_graph_is_told_apart_by_its_kernels(argmax: list[str]) -> None:
    """Bug: a node trace of a whole step has one row, books the target's layers as the drafter's, or
    the context as a part of accept; or waits for an argmax of logits that the head has taken."""
    host = [HostRange("step", 0, 100, 0), HostRange("speculate", 1, 50, 0)]
    host.append(HostRange("speculate", 2, 40, 0))
    launch = Launch(1, 3, 4, 0, True)
    first = "triton_red_fused__to_copy_add_embedding_mean_mul_pow_rsqrt_skinny_linear_partials_0"
    names = [
        *(first, "gemm", "block_attention_kernel", "gemm", *argmax, "memcpy DtoD", "clamp"),
        *(first, "gemm", "block_attention_kernel", "gemm", "block_attention_kernel", "gemm"),
        *(*argmax, "triton_poi_fused_cat_index_select_0", "_accept_and_advance_kernel"),
        *("gemm", "_context_kv_write_kernel"),
    ]
    work = [Activity(name, i * 10, i * 10 + 8, launch) for i, name in enumerate(names)]
    assert [p.name for p in place(Trace(work, host))] == [
        *("draft.00", "draft.00", "draft.L0.attn", *["draft.01"] * (3 + len(argmax))),
        *("verify.00", "verify.00", "verify.L0.attn", "verify.01", "verify.L1.attn"),
        *["verify.02"] * (1 + len(argmax)),
        *("accept", "accept", "draft.context", "draft.context"),
    ]
    whole = [Activity("graph", 0, 100, launch, is_whole_graph=True)]
    assert [(p.name, p.busy_class) for p in place(Trace(whole, host))] == [("speculate", "chain")]


def test_a_chunk_that_is_one_graph_is_told_apart_by_its_kernels() -> None:
    """Bug: a node trace of a prefill has one row a chunk, books the drafter's context to the head,
    or the copy of the prompt to the first segment; two chunks of a prompt are two prefills."""
    host = [HostRange("prefill", 0, 100, 0)]
    host += [HostRange("prefill.T128", i, i + 39, 0) for i in (1, 41)]
    host += [HostRange("prefill.T128", i, i + 19, 0) for i in (15, 55)]  # the replay's
    copies = [Launch(i, i + 2, i + 3, 0, False) for i in (0, 40)]
    graphs = [Launch(i, i + 17, i + 18, 0, True) for i in (0, 40)]
    names = ["index", "gemm", "chunk_attention_kernel", "gemm", "block_attention_kernel", "gemm"]
    names += ["memcpy DtoD", "_chunk_argmax_kernel", "combine_argmax_kernel", "direct_copy_kernel"]
    names += ["gemm", "_context_kv_write_kernel"]
    work = [Activity("memcpy HtoD", 1000 * i, 1000 * i + 8, c) for i, c in enumerate(copies)]
    work += [
        Activity(name, 1000 * i + 10 * k, 1000 * i + 10 * k + 8, graph)
        for i, graph in enumerate(graphs)
        for k, name in enumerate(names, 1)
    ]
    placed = place(Trace(work, host), "prefill")
    assert [p.name for p in placed] == 2 * [
        *("host.prefill.T128", "prefill.00", "prefill.00", "prefill.L0.attn", "prefill.01"),
        *("prefill.L1.attn", *["prefill.02"] * 5, "prefill.context", "prefill.context"),
    ]
    assert {p.step for p in placed} == {0}
    whole = [Activity("graph", 0, 100, graphs[0], is_whole_graph=True)]
    (found,) = place(Trace(whole, host), "prefill")
    assert (found.name, found.busy_class) == ("prefill.T128", "chain")


def test_halves_beside_each_other_have_one_models_layers() -> None:
    """Bug: a chunk of two halves seems to have twice as many layers."""
    host = [HostRange("prefill", 0, 100, 0), HostRange("prefill.T2x2048", 1, 40, 0)]
    graph = Launch(0, 17, 18, 0, True)
    names = ["index", "gemm", "index", "gemm", *["chunk_attention_kernel"] * 2, "gemm"]
    names += ["chunk_attention_kernel", "gemm", "gemm", "chunk_attention_kernel", "gemm"]
    work = [Activity(name, 10 * k, 10 * k + 8, graph) for k, name in enumerate(names, 5)]
    placed = [p.name for p in place(Trace(work, host), "prefill")]
    assert placed[:4] == ["prefill.00"] * 4 and placed[4:7] == ["prefill.L0.attn"] * 2 + [
        "prefill.01"
    ]
    assert placed[7:] == ["prefill.L1.attn", *["prefill.01"] * 2, "prefill.L1.attn", "prefill.02"]


def test_recurrent_layers_have_names_in_one_graph() -> None:
    """Bug: only attention counts as a layer, so that three recurrent ones and their weights are one
    segment, whose bytes are another's; or the gate behind attention is taken for the next
    segment's, or for the one behind a recurrence."""
    kernels = [
        *("embedding", "gemm", "verify_kernel", "_output_gate_kernel", "gemm"),
        *("block_attention_kernel", "_output_gate_kernel", "gemm"),
    ]
    launch = Launch(1, 2, 3, 0, True)
    work = [Activity(name, 10 * i, 10 * i + 8, launch) for i, name in enumerate(kernels)]
    placed = place(Trace(work, [HostRange("step", 0, 9, 0), HostRange("verify", 1, 8, 0)]))
    found = [(p.name, p.busy_class) for p in placed]
    assert found == [
        *[("verify.00", "dense")] * 2,
        *[("verify.L0.delta", "dense")] * 2,
        ("verify.01", "dense"),
        *[("verify.L1.attn", "attention")] * 2,
        ("verify.02", "dense"),
    ]


@pytest.mark.parametrize("module", [gated_delta, gated_delta_prefill])
def test_every_kernel_of_a_recurrence_is_known(module: ModuleType) -> None:
    """Bug: a kernel is renamed, or a new one comes, and its time is counted to the next segment."""
    kernels = [name for name in vars(module) if name.endswith("_kernel")]
    assert kernels
    for kernel in kernels:
        work = [Activity(kernel, 10, 18, Launch(1, 2, 3, 0, True))]
        (placed,) = place(Trace(work, [HostRange("step", 0, 9, 0), HostRange("verify", 1, 8, 0)]))
        is_mixing = kernel != "commit_kernel"  # which is a step of its own
        assert (placed.name == "verify.L0.delta") == is_mixing, kernel


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (["step", "verify", "verify.03"], "dense"),
        (["step", "verify", "verify.L3.attn"], "attention"),
        (["step", "verify", "accept"], "dense"),
        (["step", "decode", "accept"], "dense"),
        (["step", "accept"], "other"),
        (["step", "speculate", "accept"], "dense"),
        (["step", "speculate", "speculate"], "chain"),
        (["wait"], "other"),
        (["step", "draft", "draft.context"], "dense"),
        (["step", "plan"], "other"),
        (["step", "draft", "draft"], "chain"),
        (["prefill", "prefill.T128"], "chain"),
        (["prefill", "prefill.T128", "prefill.L3.attn"], "attention"),
        ([], "other"),
    ],
)
def test_classes(path: list[str], expected: str) -> None:
    """Bug: the host's copy of the results, in old traces, and the accept kernels share a name and
    are mixed."""
    assert busy_class(path) == expected


@pytest.mark.parametrize("order", [1, -1])
def test_work_was_launched_by_the_first_of_its_calls(order: int) -> None:
    """Bug: the runtime's call and the driver's within it have one number, and the one that the file
    names first is the launch."""
    calls = [("cudaLaunchKernel", "cuda_runtime", 3), ("cuLaunchKernel", "cuda_driver", 4)]
    events: list[dict[str, Any]] = [
        {"name": name, "cat": kind, "ts": ts, "dur": 2} for name, kind, ts in calls[::order]
    ]
    events.append({"name": "gemm", "cat": "kernel", "ts": 9, "dur": 5})
    shared = {"ph": "X", "pid": 1, "tid": 1, "args": {"correlation": 7}}
    (activity,) = torch_trace._trace([event | shared for event in events]).activities
    assert activity.launch is not None and activity.launch.start_ns == 3000


@pytest.mark.parametrize("kind", ["cuda_runtime", "cuda_driver"])
def test_calls_of_both_interfaces(kind: str) -> None:
    """Bug: what the driver's own calls launch, as Triton makes them, is outside of all steps."""
    where = {"ph": "X", "pid": 1, "tid": 1, "args": {"correlation": 7}}
    call = {"name": "cuLaunchKernelEx", "cat": kind, "ts": 2, "dur": 2}
    work = {"name": "_gemm_kernel", "cat": "kernel", "ts": 9, "dur": 5}
    step = {"name": "step", "cat": "user_annotation", "ts": 1, "dur": 4}
    (placed,) = place(torch_trace._trace([event | where for event in (step, call, work)]))
    assert (placed.name, placed.step) == ("host.step", 0)


def test_a_user_s_own_annotations_are_not_ours() -> None:
    """Bug: torch's annotation of an iteration, or a user's, takes the place of a step's name."""
    shared = {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 1}
    events = [
        shared | {"name": name, "ts": ts, "dur": 1}
        for ts, name in enumerate(("ProfilerStep#3", "step", "forward.00"))
    ]
    assert [entry.name for entry in torch_trace._trace(events).ranges] == ["step"]
