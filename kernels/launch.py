"""How kernels are launched here: on a grid, or compiled for their arguments and no more.

Triton's launch is not for several threads: a kernel object that one thread is loading looks loaded
to another (triton 3.6 and 3.7, `CompiledKernel._init_handles`). Its compiler is, so threads that
prepare a start compile only, and one thread alone launches. What they can do as well is to have the
launcher of a kernel's signature built, for which Triton 3.6 asks the C compiler, a quarter of a
second each; the thread that launches finds it on disk.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakSet

from triton.runtime.driver import driver

_COMPILE_ONLY: ContextVar[bool] = ContextVar("compile_only", default=False)
_WITH_LAUNCHER: WeakSet[Any] = WeakSet()  # compiled kernels


def load_driver() -> None:
    """Loads Triton's driver of the current GPU, which threads that begin together would each do."""
    driver.active.get_current_target()


@contextmanager
def compile_only() -> Iterator[None]:
    """Inside, in this thread, kernels are compiled and not run: their outputs stay as they are."""
    token = _COMPILE_ONLY.set(True)
    try:
        yield
    finally:
        _COMPILE_ONLY.reset(token)


def on_grid(kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """`kernel[grid]`; inside `compile_only` what compiles it for the arguments it is called with.

    Args: kernel: of `triton.jit` or `gluon.jit`. grid: programs along up to three axes.
    """
    if _COMPILE_ONLY.get():
        return partial(_compile, kernel, grid)
    return kernel[grid]


def _compile(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    compiled = kernel.warmup(*arguments, grid=grid, **options)
    if compiled not in _WITH_LAUNCHER:
        _WITH_LAUNCHER.add(compiled)
        gpu: Any = driver.active
        gpu.launcher_cls(compiled.src, compiled.metadata)
