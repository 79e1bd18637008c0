"""torch_internals: private names of torch still say what we take them to say."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compiler_bisector import CompilerBisector
from torch.overrides import TorchFunctionMode

from graphengine.capture import precompiled, torch_internals


def test_torch_s_own_state() -> None:
    """Bug: a start under autocast, or with another default dtype, breaks every later one: they find
    what it compiled. A state in which torch refuses to name its precision ends the start."""
    states = [torch_internals.global_state()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states.append(torch_internals.global_state())
    with torch.set_grad_enabled(not torch.is_grad_enabled()):
        states.append(torch_internals.global_state())
    products, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
    try:
        torch.set_default_dtype(torch.float64)
        states.append(torch_internals.global_state())
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(set(states)) == len(states)
    assert torch_internals.global_state() == states[0]
    try:
        products.fp32_precision = "tf32"
        assert torch_internals.global_state() != states[0]
        precompiled.compilers({})
    finally:
        products.fp32_precision = before


def test_a_constant_in_graphs() -> None:
    """Bug: Dynamo reads another mark, and a trace ends where the GPU is asked what it is. Remedy:
    set what `torch.compiler.assume_constant_result` sets now."""

    def asks() -> bool:
        return sys.getrefcount(object()) > 0  # nothing that Dynamo can trace

    marked = torch.compiler.assume_constant_result(lambda: True)
    assert vars(torch_internals.constant_in_graphs(asks)) == vars(marked)
    traced = torch.compile(lambda x: x + 1 if asks() else x, backend="eager", fullgraph=True)
    assert traced(torch.zeros(1)) == 1


def test_whether_compilation_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: torch is told to compile nothing, by its setting, its stance or the environment, and we
    do; or we run what was compiled before."""
    assert not torch_internals.is_off()
    with torch._dynamo.config.patch(disable=True):
        assert torch_internals.is_off()
    with torch.compiler.set_stance("force_eager"):
        assert torch_internals.is_off()
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert torch_internals.is_off()


@pytest.mark.parametrize(
    ("config", "switch", "value"),
    [
        (inductor, "force_disable_caches", True),
        (inductor, "fx_graph_cache", False),
        (functorch, "enable_autograd_cache", False),
        *((inductor, name, lambda graph: None) for name in ("pre_grad_custom_pass",)),
        *((inductor, name, lambda graph: None) for name in ("post_grad_custom_pre_pass",)),
    ],
)
def test_whether_caches_are_on(config: Any, switch: str, value: Any) -> None:
    """Bug: what a user's own pass has changed is kept, and found by who has none."""
    assert torch_internals.caches_are_on()
    with config.patch({switch: value}):
        assert not torch_internals.caches_are_on()


def test_nothing_is_kept_for_the_bisector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: who looks for a fault with torch's bisector is given what was compiled without it; and
    what it had compiled by another backend, slowly, is what every later start runs."""
    monkeypatch.setattr(CompilerBisector, "bisection_enabled", True)
    assert not torch_internals.caches_are_on()


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: damaged code is looked for where none is kept: headers lie in the temporary folder,
    whatever folder the rest has."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert torch_internals.cache_folder() == tmp_path
    assert torch_internals.header_folder().is_relative_to(tempfile.gettempdir())


def test_operators_are_shown_to_one_thread_s_mode() -> None:
    """Bug: the mode stays behind and sees what comes later, or sees nothing."""
    seen: list[str] = []

    class Mode(torch_internals.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(torch_internals.schema_of(func).name)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with torch_internals.dispatched_to(Mode()):
        x + x
    x * x
    assert seen == ["aten::add"]


def test_no_mode_is_asked() -> None:
    """Bug: one of several modes stays, or is asked nothing afterwards."""
    seen: list[str] = []

    class Mode(TorchFunctionMode):
        def __init__(self, name: str) -> None:
            super().__init__()
            self._name = name

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(self._name)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Mode("outer"), Mode("inner"):
        with torch_internals.without_modes():
            torch.sin(x)
            assert not seen
        torch.sin(x)
    assert seen == ["inner", "outer"]


def test_a_larger_limit_stays() -> None:
    """Bug: an engine lowers a limit that its user has raised, whose own functions then run
    uncompiled; or it leaves a lower one, and its own do."""
    dynamo: Any = torch._dynamo.config
    with dynamo.patch(recompile_limit=700, accumulated_recompile_limit=700):
        for asked, wanted in ((512, 700), (900, 900)):
            torch_internals.set_up_dynamo(asked)
            assert dynamo.recompile_limit == dynamo.accumulated_recompile_limit == wanted


def test_what_is_kept_is_read_without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a start that finds everything compiled has processes begun to read it; or a thread that
    wants some gets one, since that is what another has asked for meanwhile."""
    threads, asked = inductor.compile_threads, threading.Event()
    with torch_internals.without_workers():
        assert not AsyncCompile.use_process_pool()
        monkeypatch.setattr(AsyncCompile, "use_process_pool", asked.set)
        thread = threading.Thread(target=torch_internals.begin_workers)
        thread.start()
        assert not asked.wait(0.1)
        assert inductor.compile_threads == 1
    thread.join(20)
    assert asked.is_set() and inductor.compile_threads == threads


@pytest.mark.slow
def test_compile_workers() -> None:
    """Bug: kernels of a start are compiled by the process that everybody waits for, or by others
    though the user wants none."""
    torch_internals.begin_workers()
    submit = torch_internals.compile_workers(120)
    assert submit is not None
    assert submit(os.getppid).result(120) not in (os.getpid(), os.getppid())
    with inductor.patch(compile_threads=1):
        torch_internals.begin_workers()
        assert torch_internals.compile_workers(0) is None
