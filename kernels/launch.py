"""How kernels are launched here: on a grid, or compiled for their arguments and no more.

Triton's launch is not for several threads: a kernel object that one thread is loading looks loaded
to another (triton 3.6 and 3.7, `CompiledKernel._init_handles`). Its compiler is, so threads that
prepare a start compile only, and one thread alone launches. They have its launcher built as well.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any
from weakref import WeakSet

import torch

from graphengine.kernels.compile_worker import AskedError
from graphengine.kernels.triton_internals import build_launcher

REGISTERS = 65536  # of a multiprocessor
MOST_REGISTERS = 255  # of a thread

Launch = Callable[..., object]
"""Called with a kernel, a grid, and what the kernel takes."""

_INSTEAD: ContextVar[Launch | None] = ContextVar("instead", default=None)
_WITH_LAUNCHER: WeakSet[Any] = WeakSet()  # compiled kernels


@contextmanager
def _instead(launch: Launch) -> Iterator[None]:
    token = _INSTEAD.set(launch)
    try:
        yield
    finally:
        _INSTEAD.reset(token)


def compile_only() -> AbstractContextManager[None]:
    """Inside, in this thread, kernels are compiled and not run: their outputs stay as they are."""
    return _instead(_compile)


def launch_nothing() -> AbstractContextManager[None]:
    """Inside, in this thread, kernels are neither compiled nor run."""
    return _instead(lambda *arguments, **options: None)


def on_grid(kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """`kernel[grid]`; inside `compile_only` what compiles it for the arguments it is called with.

    Args: kernel: of `triton.jit` or `gluon.jit`. grid: programs along up to three axes.
    """
    instead = _INSTEAD.get()
    return kernel[grid] if instead is None else partial(instead, kernel, grid)


@cache
def supports_pdl(device: torch.device) -> bool:
    """Whether kernels may be launched before their predecessor ends (Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def early_options(pdl: int) -> dict[str, Any]:
    """Options of a kernel that is launched so unless its own PDL is 0."""
    return {"PDL": pdl} | ({"launch_pdl": True} if pdl else {})


def pdl_options(device: torch.device) -> dict[str, Any]:
    """Options of a kernel that is launched so where it can be."""
    return early_options(supports_pdl(device))


def on_hopper(x: torch.Tensor) -> bool:
    """Whether x is on a GPU whose tensor cores and copies our Gluon kernels are written for."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9


def all_registers(num_warps: int) -> dict[str, int]:
    """Options of a kernel that has few programs, each of which sums what it loads.

    Its time is the time of waiting for memory. Without a bound ptxas keeps registers free for
    programs that are not there, and asks for a part of a row only when others have come: the ten
    loads of a norm in Qwen3-8B's step went out in four goes, the eight of a rotation of q and k in
    six. A bound, even this highest one, says that so many registers are the program's
    (profiles/LOG-2026-11-28.md).
    """
    return {"num_warps": num_warps, "maxnreg": min(MOST_REGISTERS, REGISTERS // (32 * num_warps))}


class KernelError(RuntimeError):
    """A kernel of ours that this Triton does not compile; the message has its name."""


def _compile(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    try:
        compiled = kernel.warmup(*arguments, grid=grid, **options)
    except AskedError:
        return
    except Exception as error:
        raise KernelError(f"{kernel.__name__} cannot be compiled: {error}") from error
    if compiled not in _WITH_LAUNCHER:
        _WITH_LAUNCHER.add(compiled)
        build_launcher(compiled)
