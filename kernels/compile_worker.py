"""Kernels compiled by another process, which leaves them in Triton's cache for this one.

Triton holds Python's lock while it reads a kernel's source, a tenth of a second to more than one
each, so threads that compile wait for one another: a cold start of an 8B pair took as long with 14
of them as with 8 (33.6 s, H200). A process has a lock of its own. What crosses is what Triton's
compiler is called with, a kernel as the name that it is imported by; what comes back is a file.
"""

import importlib
import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import triton
from triton import knobs

from graphengine.kernels.triton_internals import (
    PACKAGE,
    JITFunction,
    build_launcher,
    compiled_before,
    settle_cache_keys,
)

Ask = Callable[[bytes], object]
"""Has `compile_job` run by another process: returns behind it, or raises AskedError at once."""


class AskedError(Exception):
    """Another process is compiling the kernel."""


_ASK: ContextVar[Ask | None] = ContextVar("ask", default=None)


@contextmanager
def asking(ask: Ask | None) -> Iterator[None]:
    """Inside, in this thread, kernels that are not in Triton's cache are asked for."""
    token = _ASK.set(ask)
    try:
        yield
    finally:
        _ASK.reset(token)


def cache_folder() -> str:
    """Where Triton keeps what it compiles."""
    return knobs.cache.dir


def is_cache_empty() -> bool:
    """Whether Triton has kept nothing so far."""
    folder = Path(cache_folder())
    return not folder.is_dir() or not any(folder.iterdir())


def compile_kernel(src: Any, **named: Any) -> Any:
    """`triton.compile`, behind which another process has compiled what is not in Triton's cache.
    What that has failed at is compiled here, with a caller who is told why."""
    ask = _ASK.get()
    if ask is None:
        return triton.compile(src, **named)
    found = compiled_before(src, **named)
    if found is None:
        ask(job_of(src, named))
        found = triton.compile(src, **named)
    return found


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> tuple[str, str] | None:
        return (obj.module, obj.__name__) if isinstance(obj, JITFunction) else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: tuple[str, str]) -> Any:
        module, name = pid
        return getattr(importlib.import_module(module), name)


def job_of(src: Any, named: dict[str, Any]) -> bytes:
    """What `compile_job` takes: equal for equal kernels."""
    modules = sorted(name for name in list(sys.modules) if name.startswith(f"{PACKAGE}."))
    environment = _of_triton(os.environ)
    kind = type(src), src.fn, src.signature, src.constants, src.attrs
    written = io.BytesIO()
    _Pickler(written).dump((modules, environment, kind, named))
    return written.getvalue()


def _of_triton(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: x for name, x in environment.items() if name.startswith("TRITON_")}


def compile_job(job: bytes) -> None:
    """Compiles a kernel and its launcher for whoever has made the job, with their modules, all, and
    their variables, since keys depend on them (`settle_cache_keys`). Mutates: os.environ, Triton's
    cache."""
    modules, environment, (source, *described), named = _Unpickler(io.BytesIO(job)).load()
    for name in _of_triton(os.environ).keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    for module in modules:
        importlib.import_module(module)
    settle_cache_keys()
    compiled = triton.compile(source(*described), **named)
    with suppress(Exception):  # without a driver who launches the kernel has it built
        build_launcher(compiled)
