"""Every private or renamed name of Triton and Gluon that we use, one function each.

Why one file: these names carry no promise, so a new Triton breaks them without notice; here the
break is one line, and tests/kernels/test_triton_internals.py says what to do about it. Each says in
which of the versions 3.6 to 3.9 it was seen, and what is public instead.
"""

# Gluon is not typed for a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from threading import Lock
from types import ModuleType
from typing import Any

import triton
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.runtime import build
from triton.runtime.cache import triton_key
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

PACKAGE = __name__.rpartition(".")[0]

# TMA's copies. Public: async_load and async_store, from 3.8 on; 3.6 and 3.7 have the other names.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
# Of a partition's threads. Public: barrier, from 3.7 on; thread_barrier in 3.6.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
# Copies of a thread's own. Public: async_copy.async_load, from 3.8 on; 3.9 has no other.
async_read = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """Shared memory as another type, shape and layout of the same size (3.8 refuses another size).

    Public: its method `reinterpret`, from 3.9 on; `_reinterpret` in 3.6 to 3.8.
    """
    method = getattr(memory, "reinterpret", None) or memory._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


@triton.constexpr_function
def _prefetch_asm(kernel: str, place: int) -> str:
    return (
        "{ .reg .b64 at; "
        f"mov.b64 at, {kernel}_param_{place}; "
        "cvta.param.u64 at, at; prefetch.tensormap [at]; mov.b32 $0, 0; }"
    )


@gluon.jit
def prefetch_descriptor(KERNEL: gl.constexpr, PLACE: gl.constexpr):
    """Sends for the TMA descriptor that is parameter PLACE of KERNEL; one of rank r is 1 + 2 r.

    A descriptor is 128 bytes that every multiprocessor fetches from memory at its first copy; that
    of the activations is first used behind the wait for the kernel in front, where everybody waits
    for it. What it gains was not measured by itself. No public name, so the parameter is named as
    in the compiler's PTX (3.6 to 3.9).
    """
    asm: gl.constexpr = _prefetch_asm(KERNEL, PLACE)
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def _read_once_asm(kernel: str, place: int) -> str:
    return f"// read once, leaves L2 first: {kernel}_param_{place}\n mov.b32 $0, 0;"


@gluon.jit
def read_once(KERNEL: gl.constexpr, PLACE: gl.constexpr):
    """Says that what the TMA descriptor at parameter PLACE of KERNEL loads is read once: its lines
    leave L2 before all others (evict_first).

    A step reads weights of hundreds of times the size of L2, each once; as ordinary lines they push
    out what the next kernels read. A step of 8B takes 2.8 % less with it at batch 1
    (profiles/results/2026-12-01-h200-8b-by-turns-c5450c9.json). Gluon's loads have no name for it,
    so this is a mark in the compiler's PTX, which `hint_loads_` acts on. Public: none (3.6 to 3.9).
    """
    asm: gl.constexpr = _read_once_asm(KERNEL, PLACE)
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


_MARK = re.compile(r"// read once, leaves L2 first: (\w+)")
_COPY = re.compile(r"^\s*(?:mov|cvt|cvta)\.\S+\s+(%\w+), ([%\w]+);", re.MULTILINE)
_LOAD = re.compile(
    r"((?:@%p\d+ )?cp\.async\.bulk\.tensor\.\dd\.shared::\w+\.global\.mbarrier::complete_tx::bytes)"
    r"( \[%r\d+\], \[(%rd\d+), [^;]+);"
)
# What createpolicy.fractional.L2::evict_first gives for all lines. Source: CUTLASS, CacheHintSm90.
_POLICY = 0x12F0_0000_0000_0000


def hinted(ptx: str) -> str:
    """PTX in which the loads that `read_once` speaks of have their cache hint. A compiler that
    writes them otherwise has its text left alone, which costs speed alone and fails a test."""
    once = set(_MARK.findall(ptx))  # parameters, and the registers that have come of them
    if not once:
        return ptx
    copies = _COPY.findall(ptx)
    while found := {register for register, source in copies if source in once} - once:
        once |= found

    def hint(load: re.Match[str]) -> str:
        if load[3] not in once:
            return load[0]
        policy = f".reg .b64 policy; mov.b64 policy, {_POLICY:#x};"
        return f"{{ {policy} {load[1]}.L2::cache_hint{load[2]}, policy; }}"

    return _LOAD.sub(hint, ptx)


def hint_loads_() -> None:
    """Has the compiler's PTX pass through `hinted`. Triton's keys do not know of it: who changes
    what it does changes the mark, which is in the keys. Mutates: Triton.

    Public: the knob `add_stages_inspection_hook` (3.6 to 3.9), which is in the keys of everybody's
    kernels.
    """
    make_ptx = CUDABackend.make_ptx
    CUDABackend.make_ptx = lambda *given: hinted(make_ptx(*given))


hint_loads_()  # whoever compiles a kernel has imported this


def load_driver() -> None:
    """Loads Triton's driver of the current GPU, which threads that begin together would each do,
    and from now on each launcher as its own. Public: none (3.6 to 3.9)."""
    separate_launchers_()
    driver.active.get_current_target()


_LOADING = Lock()


def separate_launchers_() -> None:
    """Has Triton get a module of its own for each C file that it loads.

    Triton 3.6 compiles a launcher for every signature, all of one module's name. Python gives a
    file that was loaded before back as what `sys.modules` has under that name, filled with the
    file's functions (import.c, `import_find_extension`): one object for all launchers. Between the
    load and Triton's look at its `launch`, another thread may fill it anew, and a kernel is
    launched with another signature's launcher. Delete with 3.6: since 3.7 there is one launcher.
    Mutates: Triton.
    """
    load = build._load_module_from_path
    if getattr(load, "is_ours", False):
        return

    def load_own(name: str, path: str) -> ModuleType:
        with _LOADING:
            own = ModuleType(name)
            own.__dict__.update(vars(load(name, path)))
            return own

    load_own.is_ours = True
    build._load_module_from_path = load_own


def build_launcher(compiled: Any) -> None:
    """Has the launcher of a compiled kernel's signature built, for which 3.6 asks the C compiler, a
    quarter of a second each; who launches finds it on disk. One thread a signature: the others find
    what the first has built. Public: none (3.6 to 3.9)."""
    gpu: Any = driver.active
    with _LOADING:
        building = _building(repr(compiled.src.signature))
    with building:
        gpu.launcher_cls(compiled.src, compiled.metadata)


@cache
def _building(signature: str) -> Lock:
    """Held by who builds this signature's launcher. Not in a table of this module, whose contents
    would be in the keys of segments that are compiled later (capture/precompiled.py)."""
    return Lock()


def settle_cache_keys() -> None:
    """Makes Triton's cache keys of our kernels the same in every process.

    A key covers the constants of the functions that a kernel calls, but in 3.6 and 3.7 only of
    those whose own key was asked for before (`DependenciesFinder._update_hash`): a start with
    kernels on threads missed 35 of 76 that the one before had compiled (one H200). So all are asked
    for, in the order of their names, before the first is compiled. Delete the loop with 3.7.
    Also reads Triton's own files for the part of the key that is theirs, half a second to one and a
    half, which threads that begin together would each do. Mutates: Triton's memory of keys.
    """
    triton_key()
    for kernel in _kernels():
        kernel.cache_key  # noqa: B018 (a property that remembers)


def bind_kernels(compile_kernel: Callable[..., Any]) -> None:
    """Makes our kernels ready for the current GPU, before several threads compile them.

    Triton does that at a kernel's first use. One of Gluon's is Triton's own for a moment of it
    (`GluonJITFunction.create_binder`, 3.6 to 3.9): a thread that looks then compiles it as such,
    and the start ends with "Could not determine the number of warps per CTA". Public: none.

    Args: compile_kernel: what they are compiled by, called as `triton.compile`.

    Mutates: the kernels.
    """
    device = driver.active.get_current_device()
    for kernel in _kernels():
        kernel.device_caches[device]
        kernel.compile = compile_kernel


class _MissingError(Exception):
    """A kernel is not in Triton's cache."""


def compiled_before(src: Any, **named: Any) -> Any:
    """What `triton.compile` finds in its cache; None: nothing, and nothing is compiled. The
    compiler asks a source for its first form only when it has found nothing. Public: none."""

    def missing(*_: object) -> None:
        raise _MissingError

    src.make_ir = missing
    try:
        return triton.compile(src, **named)
    except _MissingError:
        return None
    finally:
        del src.make_ir


def _kernels() -> Iterator[Any]:
    """Those imported so far, in the order of their names."""
    imported = list(sys.modules)  # a copy, because other threads may be importing
    for module in sorted(name for name in imported if name.startswith(f"{PACKAGE}.")):
        for _, value in sorted(vars(sys.modules[module]).items()):
            if isinstance(value, JITFunction):
                yield value
