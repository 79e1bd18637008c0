"""torch.compile for segments, and nothing else from torch.compile.

Weights are inputs, so one compiled artifact serves every layer of the same shape. Shapes are
static: automatic dynamic ones would make the second bucket's kernels slower. Mode "default", not
max-autotune: a graph of 36 dense layers at 16 rows on an H200 took 4.55 ms against 4.59 (autotuning
times with a warm L2 and picks worse GEMMs). Inductor's own CUDA graphs stay off: segments are
captured by hand, so looking up the code of a call (over 100 us) is not on the path of a step.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from graphengine.capture import precompiled, torch_internals
from graphengine.capture.cache_folder import drop_damaged, others_can_write

# Specialisations of one function: (buckets + plain decode) x (target, drafter) x engines.
RECOMPILE_LIMIT = 512
# Inductor's own kernels take part in programmatic dependent launch (Hopper and later; no effect
# elsewhere): our GEMMs then fetch their first weights while what is before them still runs.
OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"triton.enable_pdl": True}

_MADE: dict[str, Callable[..., Any]] = {}  # key -> what this process has found or compiled
_ALIVE: WeakSet[Segment] = WeakSet()
_COUNTS: Counter[str] = Counter()
_LOG = logging.getLogger(__name__)
# torch's compiler is one for the process: what two threads compile at a time, for two engines, is
# mixed up or refused, and so is a call of what `torch.compile` returns while another is traced.
_COMPILER = threading.RLock()
_MAKES_ONLY: ContextVar[bool] = ContextVar("makes_only", default=False)
_KEPT_ONLY: ContextVar[bool] = ContextVar("kept_only", default=False)


class NotKeptError(Exception):
    """Something would have to be compiled."""


@contextmanager
def kept_only() -> Iterator[None]:
    """Inside, in this thread, a segment that would have to be compiled raises NotKeptError."""
    token = _KEPT_ONLY.set(True)
    try:
        yield
    finally:
        _KEPT_ONLY.reset(token)


@contextmanager
def make_only() -> Iterator[None]:
    """Inside, in this thread, a segment that is called is found or compiled, and its function is
    called as it is: for whoever shows it shapes alone."""
    token = _MAKES_ONLY.set(True)
    try:
        yield
    finally:
        _MAKES_ONLY.reset(token)


class Segment:
    """A pure function that is found on disk or compiled at its first call with new shapes."""

    def __init__(self, function: Callable[..., Any], compilers: str) -> None:
        """Args: compilers: `precompiled.compilers`."""
        self._function, self._compilers = function, compilers
        _ALIVE.add(self)

    def read_code_(self, read: precompiled.Read) -> None:
        """From now on, what is compiled is compiled of what is loaded now."""
        code = precompiled.loaded_code(self._function, read)
        self._key = f"{self._function.__qualname__} {code} {self._compilers}"

    def __call__(self, *arguments: Any) -> Any:
        if torch_internals.is_off():
            return self._function(*arguments)
        key = f"{self._key} {precompiled.layout(arguments)} {torch_internals.global_state()}"
        compiled = _MADE.get(key)
        if compiled is None:
            with _COMPILER, torch_internals.without_modes():
                compiled = _MADE.get(key) or self._make(key, arguments)
                _MADE[key] = compiled
        return (self._function if _MAKES_ONLY.get() else compiled)(*arguments)

    def _make(self, key: str, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        # A bucket that is built late is compiled with the settings of then.
        key = f"{key} {precompiled.compilers(OPTIONS)}"
        found = precompiled.find(key, self._function.__globals__)
        if found is None and _KEPT_ONLY.get():
            raise NotKeptError(self._function.__qualname__)
        _COUNTS["misses" if found is None else "hits"] += 1
        if found is not None:
            return found
        jit = torch.compile(self._function, fullgraph=True, dynamic=False, options=OPTIONS)
        if not precompiled.are_kept():
            return _in_turn(jit)
        options = dict(OPTIONS)  # torch takes the next one out of what it is given
        # Of what guards would look at, the key has what can differ between calls of a segment.
        options["guard_filter_fn"] = torch.compiler.skip_all_guards_unsafe
        ahead: Any = torch.compile(self._function, fullgraph=True, dynamic=False, options=options)
        try:
            compiled = _compile_ahead(ahead, arguments)
        except Exception as error:  # torch cannot, or a fault that it tells better when called
            name = self._function.__qualname__
            reason = str(error).partition("\n")[0]
            _LOG.warning("%s cannot be compiled for later starts as well: %s", name, reason)
            return _in_turn(jit)
        precompiled.keep(key, compiled)
        return torch_internals.callable_of(compiled)


def _in_turn(jit: Callable[..., Any]) -> Callable[..., Any]:
    """What `torch.compile` has returned, called by one thread at a time."""

    def call(*arguments: Any) -> Any:
        with _COMPILER:
            return jit(*arguments)

    return call


def _compile_ahead(ahead: Any, arguments: tuple[Any, ...]) -> Any:
    """What `torch.compile` has returned, compiled for these arguments; once more where what an
    interrupted compiler had left was in the way."""
    try:
        return torch_internals.compile_ahead_of_time(ahead, arguments)
    except Exception:
        if not drop_damaged(torch_internals.cache_folder(), torch_internals.header_folder()):
            raise
        torch_internals.forget_failures()
        return torch_internals.compile_ahead_of_time(ahead, arguments)


def compile_segments(functions: Iterable[Callable[..., Any]]) -> list[Callable[..., Any]]:
    """Compiles pure segments with Inductor, whole (fullgraph) and for static shapes.

    Compilation happens at the first call with new shapes; a second engine of the same shapes, and
    a later process, finds what was compiled.
    Mutates: torch's settings for the process: eight recompilations, the default, are fewer than the
    buckets of two models; compilation ahead of time is switched on where it is not (torch 2.11).
    """
    torch_internals.set_up_dynamo(RECOMPILE_LIMIT)
    headers = torch_internals.header_folder()
    if others_can_write(headers) or others_can_write(headers.parent):
        torch_internals.precompile_no_headers()
    compilers = precompiled.compilers(OPTIONS)
    with suppress(OSError):  # before one is loaded: of some damage a process dies
        drop_damaged(torch_internals.cache_folder())
    return _read([Segment(function, compilers) for function in functions])


def forget() -> None:
    """For tools that replace functions or tables while an engine lives: what is called next is
    compiled of what is loaded now. Mutates: what this process remembers of its compilations."""
    _MADE.clear()
    torch.compiler.reset()
    _read(list(_ALIVE))


def _read(segments: list[Segment]) -> list[Segment]:
    read: precompiled.Read = {}  # of a module that several reach, once
    for segment in segments:
        segment.read_code_(read)
    return segments


class CacheCounts(NamedTuple):
    """How many segments this process has found on disk, and how many it has compiled."""

    num_hits: int = 0
    num_misses: int = 0

    def since(self, before: CacheCounts) -> CacheCounts:
        """What was added."""
        return CacheCounts(self.num_hits - before.num_hits, self.num_misses - before.num_misses)


def cache_counts() -> CacheCounts:
    """This process's counts so far."""
    return CacheCounts(_COUNTS["hits"], _COUNTS["misses"])
