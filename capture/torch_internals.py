"""Every private name of torch, Dynamo and Inductor that we use, one small function each.

These names carry no promise: a new torch breaks them without notice. Here the break is one line,
and tests/house/test_private_names.py says what to do about it. All were seen in torch 2.11 to 2.15;
each says what is public instead, if anything is. It imports nothing of ours, so that every room may
use it.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["TorchDispatchMode", "tree_leaves", "tree_map"]  # torch names no public ones


def has_function_modes() -> bool:
    """Whether torch's functions are changed in this thread, as by a default device of its own.
    Public: `torch.get_default_device`, 0.1 ms of code where no request has run for a while (2-core
    cloud CPU)."""
    return torch._C._len_torch_function_stack() > 0


# --- Dynamo ---


def constant_in_graphs(function: Callable[[], bool]) -> Callable[[], bool]:
    """A function whose result Dynamo may take for a constant. Public:
    `torch.compiler.assume_constant_result`, which imports the compiler: a second of every start,
    also of those that compile nothing."""
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def set_up_dynamo(recompile_limit: int) -> None:
    """Allows so many specialisations of a function, and compilation ahead of time (off in 2.11).
    Public: none, `torch._dynamo.config`. Mutates: torch's settings for the process."""
    dynamo: Any = torch._dynamo.config
    dynamo.enable_aot_compile = True
    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(dynamo, limit, max(getattr(dynamo, limit), recompile_limit))


def is_off() -> bool:
    """Whether torch was told to compile nothing, by its setting, its stance or the environment.
    Public: none; `torch.compiler.set_stance` only sets."""
    is_eager = torch._dynamo.eval_frame._stance.stance == "force_eager"
    is_disabled = os.environ.get("TORCHDYNAMO_DISABLE") == "1"  # in no setting
    return torch._dynamo.config.disable or is_eager or is_disabled


def global_state() -> str:
    """What torch guards every compiled function with: autocast, default dtype, gradients,
    deterministic algorithms, precision of products; not the number of threads. Public: none."""
    guards: Any = torch._C._dynamo.guards  # pyright: ignore[reportAttributeAccessIssue]
    state = json.loads(guards.GlobalStateGuard().__getstate__())
    del state["num_threads"]
    return repr(sorted(state.items()))


def compile_ahead_of_time(compiled: Any, arguments: tuple[Any, ...]) -> Any:
    """What `torch.compile` has returned, compiled for these arguments. Public: none yet;
    `torch.compiler.precompile` of 2.15, not tried yet."""
    return compiled.aot_compile((arguments, {}))


def callable_of(ahead: Any) -> Callable[..., Any]:
    """The function to call of what was compiled ahead of time: without torch's guards."""
    return ahead.fn


def serialized(ahead: Any) -> bytes:
    """What was compiled ahead of time, as `torch.compiler.load_compiled_function` reads it.
    Public: its method `save_compiled_function`, which writes to a path alone."""
    return type(ahead).serialize(ahead).serialized_data


# --- Inductor ---

_WORKERS = Lock()  # how many Inductor begins: up to 2.11 a setting of the process
# The user's own passes, which are in no key that Inductor makes of its settings.
_PASSES = (
    "pre_grad_custom_pass joint_custom_pre_pass joint_custom_post_pass joint_custom_pass "
    "post_grad_custom_pre_pass post_grad_custom_post_pass _pre_fusion_custom_pass"
).split()


# Settings that decide nothing of the code: the first is on where the variable CI is set, the second
# off where others may write to `header_folder`.
_NO_MATTER = {"error_on_custom_op_aliasing", "cpp_cache_precompile_headers"}


def _configs() -> tuple[Any, Any]:
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    return inductor, functorch


def caches_are_on() -> bool:
    """Whether the user lets torch keep what it compiles, and changes nothing on the way of which no
    key would tell, as torch's bisector does. Public: none; the settings' names are in their
    documentation."""
    from torch._inductor.compiler_bisector import CompilerBisector

    inductor, functorch = _configs()
    switches = inductor.fx_graph_cache, functorch.enable_autograd_cache
    passes = (getattr(config, name, None) for config in (inductor, functorch) for name in _PASSES)
    is_changed = CompilerBisector.bisection_enabled or any(passes)
    return all(switches) and not inductor.force_disable_caches and not is_changed


def compiler_settings() -> list[Any]:
    """The settings of Inductor and AOTAutograd that may decide what is compiled. Public: none."""
    portable = [c.save_config_portable(ignore_private_configs=False) for c in _configs()]
    return [
        sorted(((k, v) for k, v in settings.items() if k not in _NO_MATTER), key=str)
        for settings in portable
    ]


def cache_folder() -> Path:
    """Where Inductor keeps what it compiles. Public: none; TORCHINDUCTOR_CACHE_DIR sets it."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def header_folder() -> Path:
    """Where Inductor precompiles C++ headers, for every cache folder alike: in the temporary one.
    Public: none."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return Path(default_cache_dir()) / "precompiled_headers"


def forget_failures() -> None:
    """What failed to compile in this process may be tried again. Public: none."""
    from torch._inductor.utils import clear_caches

    clear_caches()


def precompile_no_headers() -> None:
    """Public: TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS=0, before torch is imported. Mutates:
    torch's settings for the process."""
    import torch._inductor.config as inductor

    inductor.cpp_cache_precompile_headers = False


def import_dynamo() -> None:
    """Imports what a trace, the first call of an op and arithmetic on shapes would, in whichever
    thread comes first. Public: none."""
    importlib.import_module("torch._dynamo")


def import_inductor() -> None:
    """Imports and reads what the first compilation would. Public: none.

    Two seconds and a half of it are imports. The rest are thousands of short reads of files, 0.2 to
    0.4 s alone; beside eight threads that compile kernels each read waits for Python's lock, 13 s
    of the 42 of a cold start (8B pair with FP8 drafter, buckets 1,8,16; H200).
    """
    importlib.import_module("torch._inductor.compile_fx")
    # Read once per process, with warnings off for the whole process: by two threads at a time it
    # prints eight of torch's own deprecations.
    torch.overrides.get_overridable_functions()
    if torch.distributed.is_available():  # Dynamo compares functions with one that lies there
        importlib.import_module("torch.distributed.tensor.experimental._func_map")
    # A hash of torch's own sources.
    importlib.import_module("torch._inductor.codecache").torch_key()


def begin_workers() -> None:
    """Begins Inductor's processes that compile, and waits for nothing. Public: none."""
    from torch._inductor.async_compile import AsyncCompile

    with _WORKERS:
        AsyncCompile.use_process_pool()


def compile_workers(seconds: int) -> Callable[..., Future[Any]] | None:
    """These processes, begun if they are not, as what takes a function and its arguments; None:
    there are none within that time, or none are wanted (TORCHINDUCTOR_COMPILE_THREADS=1). Public:
    none."""
    from torch._inductor.async_compile import AsyncCompile

    begin_workers()
    AsyncCompile.wait_pool_ready(seconds)
    with _WORKERS:
        return AsyncCompile.process_pool().submit if AsyncCompile.use_process_pool() else None


@contextmanager
def without_workers() -> Iterator[None]:
    """Inside, Inductor reads its kernels itself. Its processes, which it begins for the first one,
    import torch for seconds and keep half a GB of the host for a minute; that a kept kernel is read
    by one of them was waited for (0.8 of the 17 s of a warm start of 35B-A3B, H200). Public: none.
    """
    import torch._inductor.config as inductor

    with _WORKERS, inductor.patch(compile_threads=1):
        yield


# --- operators ---


@contextmanager
def dispatched_to(mode: TorchDispatchMode) -> Iterator[None]:
    """Inside, in this thread alone, the mode is asked about every operator. Public: `with mode`,
    which also sets flags that belong to the process."""
    _push_mode(mode)
    try:
        yield
    finally:
        _pop_mode()


@contextmanager
def without_modes() -> Iterator[None]:
    """Inside, in this thread, no mode is asked, neither of operators nor of functions: what a mode
    makes of a function would be compiled with it. Public: none."""
    with ExitStack() as stack:
        while has_function_modes():
            stack.enter_context(_pop_mode_temporarily())
        stack.enter_context(_disable_current_modes())
        yield


def schema_of(operator: Any) -> Any:
    """An operator's arguments and returns, and which of them share memory. Public: none."""
    return operator._schema


def scaled_mm(
    x_TD: Tensor, weight_ED: Tensor, scale_T: Tensor, scale_E: Tensor, dtype: torch.dtype
) -> Tensor:
    """`x @ weight^T` of FP8 rows, each row with its scale, in cuBLAS. Public:
    `torch.nn.functional.scaled_mm` (2.11 on), another operator: measure it on a GPU first."""
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        x_TD,
        weight_ED.t(),
        scale_a=scale_T[:, None],
        scale_b=scale_E[None, :],
        out_dtype=dtype,
        use_fast_accum=True,
    )


def keep_gpu_busy(cycles: int) -> None:
    """A kernel on the current stream that does nothing for so many cycles. Public: none."""
    torch.cuda._sleep(cycles)
