"""Compiling ahead: on threads, and nothing is computed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _python_dispatch

from graphengine import TINY_DRAFT, TINY_TARGET, Engine
from graphengine.capture import compile as compiling
from graphengine.capture.torch_internals import tree_leaves
from graphengine.config.options import Options
from graphengine.decode import compile_ahead
from graphengine.decode.compile_ahead import MAX_THREADS, CompileAhead
from graphengine.decode.proposer import Pair, Proposer
from graphengine.decode.stack import Target
from graphengine.drafters.dflash import DFlash
from graphengine.kernels import compile_worker
from graphengine.kernels.launch import KernelError, compile_only, on_grid
from graphengine.startup import build as building
from graphengine.startup import compilers
from graphengine.startup.build import build, read_configs


def test_runs_are_waited_for_whatever_becomes_of_them() -> None:
    """Bug: a run that fails ends the start, or a capture begins while a thread still allocates."""
    began, done = threading.Event(), []

    def late(number: int) -> None:
        began.wait(10)
        done.append((number, threading.current_thread().name))

    def failing() -> None:
        raise ValueError("no kernel")

    with CompileAhead([failing, *(lambda n=n: late(n) for n in range(20))]) as ahead:
        assert not done
        began.set()
        ahead.wait()
        assert sorted(number for number, _ in done) == list(range(20))
        ahead.wait()
    names = {name for _, name in done}
    assert threading.current_thread().name not in names
    assert len(names) <= MAX_THREADS


def test_kernels_are_compiled_for_the_caller_s_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a thread begins with device 0, and compiles for that one; or several make a kernel ready
    for it at once."""
    seen: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    monkeypatch.setattr(compile_ahead, "bind_kernels", lambda compile: seen.append("bound"))
    with CompileAhead([lambda: None] * 2) as ahead:
        ahead.wait()
    assert seen == ["bound", 3, 3]


def test_a_start_that_ends_takes_its_runs_with_it() -> None:
    """Bug: Ctrl-C during a start waits for every kernel of every chain that has begun."""
    held, done = threading.Event(), []

    def chain() -> None:
        for number in range(200):
            torch.zeros(1)
            held.set()
            time.sleep(0.02)
            done.append(number)

    with CompileAhead([chain] * 50):
        assert held.wait(30)  # the first operator on such a thread imports for seconds
        began = time.perf_counter()
    assert time.perf_counter() - began < 2
    assert 199 not in done


def test_ctrl_c_while_runs_are_made() -> None:
    """Bug: it comes before `with` is entered, and the process ends when every run has."""
    done = []

    def runs() -> Iterator[Callable[[], object]]:
        for number in range(50):
            yield lambda number=number: time.sleep(0.2) or done.append(number)
        raise KeyboardInterrupt

    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        CompileAhead(runs())
    assert time.perf_counter() - began < 2
    assert len(done) <= MAX_THREADS
    assert not any("compile-ahead" in thread.name for thread in threading.enumerate())


def test_what_is_left_for_later_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Bug: the log has the last operator for the error, and the error for where it was."""

    def run() -> None:
        torch.zeros(2).add(1)
        raise ValueError("no memory")

    with CompileAhead([run]) as ahead:
        ahead.wait()
    compile_ahead.make_segments([run])
    assert caplog.messages == [
        f"some {what} are compiled later: no memory in aten.add.Tensor"
        for what in ("kernels", "segments")
    ]


def test_what_cannot_be_prepared_ends_no_start(caplog: pytest.LogCaptureFixture) -> None:
    """Bug: memory that a run ahead cannot have, or a bug in it, ends a start that would do."""
    done = []

    def runs() -> Iterator[Callable[[], object]]:
        yield lambda: done.append(1)
        raise MemoryError("no room for buffers")

    with CompileAhead(runs()) as ahead:
        ahead.wait()
    assert done == [1]
    assert "no room for buffers" in caplog.text


def test_a_kernel_that_cannot_be_compiled_ends_a_start() -> None:
    """Bug: an error in a kernel of ours is a note among others, and the start fails much later in a
    capture, or not at all."""

    class Kernel:
        __name__ = "specialized_linear_kernel"

        def warmup(self, *arguments: object, **options: object) -> None:
            raise ValueError("source and result must have the same logical storage size")

    done = []
    with compile_only():
        launch = on_grid(Kernel(), (1,))
    runs = [launch, lambda: done.append(1)]
    with CompileAhead(runs) as ahead, pytest.raises(KernelError, match=r"specialized.*storage"):
        ahead.wait()
    assert done == [1]


def test_a_run_ahead_computes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Bug: a run that is to compile kernels writes K/V, looks up an embedding by an id that nobody
    has computed, or multiplies matrices beside the thread that compiles segments; or what is made
    of a scalar of the host's and a tensor of the device's is the host's."""
    built = build(TINY_TARGET, TINY_DRAFT, Options(buckets=(1,), device="cpu", max_model_len=64))
    prefill = built.loop.prefill
    assert isinstance(prefill.pair.proposer, DFlash)
    bucket = built.loop.first._buckets[1]
    kept = [
        prefill.pair.target.kv_pool,
        prefill.pair.proposer.kv_pool,
        *(x for x in tree_leaves(bucket.buffers[:-1]) if isinstance(x, torch.Tensor)),
    ]
    before = [tensor.clone() for tensor in kept]
    found: list[object] = []
    flags: list[bool] = []

    def decode() -> None:
        bucket.buffers.block_ids_BG.fill_(1 << 40)
        assert bucket.ahead is not None
        bucket.ahead.run()
        for stage in bucket.stages:
            stage.runners["greedy"].run()
            found.append(stage.name)

    def refused() -> None:
        torch.dot(torch.zeros(3), torch.zeros(4))

    def shapes() -> None:
        x = torch.zeros(3, 4, dtype=torch.bfloat16)
        y = F.embedding(torch.full((2,), 99), x) @ x.t() + 1
        y = y.to("cpu", torch.float64)  # a hybrid's chain does: there is nothing to copy
        found.append((y.shape, y.dtype, y.device.type, x.t().data_ptr() == x.data_ptr()))
        found.append((torch.tensor(2.0) * torch.empty(3, device="meta")).device)

    def flag() -> None:
        torch.zeros(3).clone()
        flags.append(_python_dispatch.is_in_torch_dispatch_mode())

    runs = [lambda: prefill.run_padding(17), decode, refused, shapes, flag]
    with CompileAhead(runs) as ahead:
        ahead.wait()
    assert "aten.dot" in caplog.text  # whose run was cut short
    assert flags == [False]  # it is the whole process's, and would stay set
    assert ((2, 3), torch.float64, "cpu", True) in found and torch.device("meta") in found
    assert [stage.name for stage in bucket.stages] == [x for x in found if isinstance(x, str)]
    for tensor, old in zip(kept, before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), old.view(torch.uint8))


def test_the_first_layers_stand_for_all() -> None:
    """Bug: a start runs 36 layers for the kernels of two; or no layer that is tapped; or fewer
    layers have the kinds of all."""
    built = build(TINY_TARGET, TINY_DRAFT, Options(buckets=(1,), device="cpu", max_model_len=64))
    prefill = built.loop.prefill
    assert isinstance(prefill.pair.proposer, DFlash)
    tapped = min(prefill.pair.proposer.config.target_layer_ids)
    short = prefill.pair.shortened()
    num_layers = short.target.config.num_hidden_layers
    assert tapped < len(short.target.weights.layers) == num_layers
    assert num_layers < prefill.pair.target.config.num_hidden_layers
    config = replace(prefill.pair.proposer.config, target_layer_ids=(num_layers,))
    deep = replace(prefill.pair, proposer=replace(prefill.pair.proposer, config=config))
    assert len(deep.shortened().target.weights.layers) == num_layers + 1
    plain = replace(prefill.pair, proposer=Proposer()).shortened()
    assert len(plain.target.weights.layers) == 2
    replace(prefill, pair=short).run_padding(3)


@pytest.mark.parametrize(
    ("kinds", "tap", "count"),
    [
        ("DDDADDDADDDA", 0, 8),
        ("DDDADDDADDDA", 8, 12),
        ("DADADDADD", 0, 6),
        ("DDDADDDAD", 1, 5),
        ("AAAA", 2, 3),
        ("A", 0, 1),
    ],
)
def test_the_first_layers_have_all_neighbours(kinds: str, tap: int, count: int) -> None:
    """Bug: no layer stands behind an attention, or another kind comes last: such segments of a
    hybrid are compiled one by one as its steps run, behind the kernels that these wait for."""
    preset, _ = read_configs("qwen3.5-4b", None)
    mixers = tuple({"D": "gated_delta", "A": "gated_attention"}[kind] for kind in kinds)
    config = replace(preset, num_hidden_layers=len(kinds), mixers=mixers, windows=())
    weights: Any = SimpleNamespace(layers=kinds, _replace=lambda layers: layers)
    proposer: Any = SimpleNamespace(taps=(tap,))
    engine: Any = None
    target = Target(config=config, weights=weights, kv_pool=torch.zeros(0))
    short = Pair(engine, target, proposer, 1).shortened()
    assert cast(Any, short.target.weights) == kinds[:count]
    assert short.target.config.mixers == mixers[:count]


def test_the_first_layers_have_all_windows() -> None:
    """Bug: only late layers slide; their attention, a kernel of its own, is first compiled within
    a capture, which cannot load it."""
    preset, _ = read_configs("qwen3-8b", None)
    config = replace(preset, num_hidden_layers=5, windows=(None, None, None, 8, 8))
    weights: Any = SimpleNamespace(layers="AAAAA", _replace=lambda layers: layers)
    engine: Any = None
    target = Target(config=config, weights=weights, kv_pool=torch.zeros(0))
    short = Pair(engine, target, Proposer(), 1).shortened()
    assert short.target.config.windows == (None, None, None, 8)


def test_the_python_api_names_the_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a second start through the API finds none of our kernels, because Inductor had named
    another ptxas to Triton when they were compiled (73 of 73 on an H200), or not all, because it
    had named another folder when some of them were (114 of 131)."""
    found = {"TRITON_PTXAS_PATH": "/theirs/ptxas", "TRITON_LIBDEVICE_PATH": "/theirs/libdevice"}
    monkeypatch.setattr(compilers, "compiler_files", lambda: found)
    monkeypatch.setattr(compilers.os, "environ", {"TRITON_PTXAS_PATH": "/mine"})
    compilers.name_compilers_()
    named = found | {"TRITON_PTXAS_PATH": "/mine", "TRITON_DEFAULT_FP_FUSION": "1"}
    assert compilers.os.environ == named | {"TRITON_CACHE_DIR": compile_worker.cache_folder()}


def test_waiting_for_compilers_is_no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: what is left of Inductor's import when the weights are there counts as loading them, and
    a start after weights looks shorter than it is."""

    class Slow(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            time.sleep(0.5)
            super().join(timeout)

    began = time.perf_counter()
    monkeypatch.setattr(building, "threading", SimpleNamespace(Thread=Slow))
    built = build(TINY_TARGET, None, Options(buckets=(1,), device="cpu", max_model_len=64))
    assert built.startup.compile_s >= built.startup.compiler_wait_s >= 0.5
    assert built.startup.load_s <= time.perf_counter() - began - 0.5


@pytest.mark.parametrize("fails", [False, True])
def test_threads_take_turns_while_a_start_lasts(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Bug: loading waits 5 ms behind every short call while another thread imports; or a start,
    perhaps one that is refused, leaves the process switching threads all the time."""
    seen = []
    before = sys.getswitchinterval()
    plan = building.plan_memory

    def planned(*args: Any, **options: Any) -> Any:
        seen.append(sys.getswitchinterval())
        if fails:
            raise ValueError("no memory")
        return plan(*args, **options)

    monkeypatch.setattr(building, "plan_memory", planned)
    refused = pytest.raises(ValueError, match="no memory") if fails else nullcontext()
    with refused:
        build(TINY_TARGET, None, Options(buckets=(1,), device="cpu", max_model_len=64))
    assert seen[0] < before / 10
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize("missing", ["nothing", "segment", "kernel"])
def test_what_is_kept_is_run_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    missing: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Bug: a start that finds all in its caches runs everything once more to find out; or one that
    does not compiles on, one segment and kernel after another; or what it refused counts as
    compiled, or is refused for ever, or is not named in the log."""
    caplog.set_level("INFO", logger=compile_ahead.__name__)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "_MADE", {})
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(compiling.precompiled, "are_kept", lambda: False)

    def add_one(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    (segment,), done = compiling.compile_segments([add_one]), list[object]()
    before, named = compiling.cache_counts(), {"target": "sm_90"}
    monkeypatch.setattr(compile_worker, "compiled_before", lambda src, **_: None)
    monkeypatch.setattr(compile_worker, "job_of", lambda src, named: b"job")
    monkeypatch.setattr(compile_worker.triton, "compile", lambda src, **_: done.append(src))

    def work() -> None:
        done.append("begun")
        if missing == "segment":
            segment(torch.ones(2))
        if missing == "kernel":
            compile_worker.compile_kernel("a kernel", **named)
        done.append("ended")

    assert compile_ahead.run_kept(work) is (missing == "nothing")
    assert done == ["begun", "ended"][: 1 + (missing == "nothing")]
    told = {"nothing": None, "segment": add_one.__qualname__, "kernel": "a kernel"}[missing]
    assert caplog.messages == [f"compiling ahead: {told} is not kept"] * (told is not None)
    assert compiling.cache_counts() == before
    assert segment(torch.ones(2)).tolist() == [2, 2]
    assert compiling.cache_counts().since(before) == (0, 1)
    compile_worker.compile_kernel("another", **named)
    assert done[-1] == "another"


@pytest.mark.gpu
def test_kernels_are_compiled_on_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bug: a start compiles our kernels one after another, on the thread that Inductor needs; or
    ahead for arguments that no launch has."""
    from triton import knobs

    found: list[tuple[str, str, bool]] = []
    start = CompileAhead.__init__

    def listen(src: Any, cache_hit: bool, **event: object) -> None:
        found.append((threading.current_thread().name, src.fn.__name__, cache_hit))

    def start_and_wait(self: CompileAhead, *given: Any) -> None:
        start(self, *given)
        self.wait()  # so that whatever is compiled later was not compiled ahead

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(knobs.compilation, "listener", listen)
    monkeypatch.setattr(CompileAhead, "__init__", start_and_wait)
    with Engine.from_pretrained(
        *(TINY_TARGET, TINY_DRAFT),
        buckets=[3],
        graph_mode="full",
        num_speculative_tokens=5,
        sampling=True,
    ) as engine:
        assert engine.generate(["Count from 3 to 9."])[0].token_ids
    ours = [each for each in found if not each[1].startswith("triton_")]
    late = [each for each in ours if not (each[0].startswith("compile-ahead") or each[2])]
    assert ours and not late, (late, ours)  # other processes, where they are there, tell nothing


def test_a_run_ahead_knows_what_an_operator_writes_by_name() -> None:
    """Bug: a tensor that is passed as `out=` behind all others is looked for among these, and what
    runs it is not compiled ahead."""
    out = torch.full((2, 2), 7.0)
    with compile_ahead._ShapesAlone(threading.Event()):
        torch.mm(torch.ones(2, 3), torch.ones(3, 2), out=out)
    assert (out == 7).all(), "computed none the less"
