"""Compiled functions on disk, found without tracing them.

Why: torch finds a compiled graph by tracing the function again. With everything in its caches, 24
segments took 4.3 s of a start of 8.7 that way (8B pair with FP8 drafter, buckets 1,8,16; H200).
Here a file's name is a hash of what tracing would have read: the functions and tables that are
loaded, the arguments' layout, and what compiles them.

Trust: the files hold machine code and pickles, as Inductor's own cache beside them does.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = "segments"  # below Inductor's
_LOG = logging.getLogger(__name__)


def find(key: str, namespace: dict[str, Any]) -> Callable[..., Any] | None:
    """The compiled function of a key; None if there is none that can be used.

    Args: namespace: the function's globals.
    """
    path = _path(key)
    try:
        with path.open("rb") as file:
            found: Any = torch.compiler.load_compiled_function(file, f_globals=namespace)
    except FileNotFoundError:
        return None
    except Exception as error:  # damaged, or not to be loaded here
        _LOG.info("%s is compiled again: %s", path, error)
        return None
    return found.fn


def keep(key: str, compiled: Any) -> None:
    """Writes what `aot_compile` has returned; a place that cannot be written costs later starts
    time, no more. Mutates: the folder."""
    path = _path(key)
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        compiled.save_compiled_function(str(part))
        part.replace(path)
    except Exception as error:
        _LOG.info("%s is not kept: %s", path, error)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _path(key: str) -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / FOLDER / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.bin"


def layout(arguments: Any) -> str:
    """What a specialisation for static shapes depends on: of tensors everything but their contents,
    and how they share memory; the values of the rest.

    Raises:
        TypeError: an argument is neither tensor, tuple, number, string nor None.
    """
    tensors: list[Tensor] = []
    text = ",".join(_layout(arguments, tensors))
    # Two that share memory may be traced as one input.
    memories = [x.untyped_storage().data_ptr() for x in tensors]
    shared = {memory: place for place, memory in enumerate(memories) if memories.count(memory) > 1}
    places = [
        f"{place} in {shared[memory]} at {tensors[place].storage_offset()}"
        for place, memory in enumerate(memories)
        if memory in shared
    ]
    return f"{text} {places}"


def _layout(x: Any, tensors: list[Tensor]) -> Iterator[str]:
    if isinstance(x, Tensor):
        tensors.append(x)
        is_aligned = x.data_ptr() % 16 == 0
        yield f"{x.dtype} {x.device} {(tuple(x.shape), x.stride(), is_aligned, x.requires_grad)}"
    elif isinstance(x, tuple):
        yield f"{type(x).__qualname__}("
        for part in x:
            yield from _layout(part, tensors)
        yield ")"
    elif x is None or isinstance(x, bool | int | float | str):
        yield repr(x)
    else:
        raise TypeError(f"{type(x).__qualname__} has no layout")


def compilers(options: Mapping[str, Any]) -> str:
    """Versions, settings and processor that compiled code is made by and for."""
    import torch._inductor.config as inductor

    parts: list[Any] = [platform.python_version(), torch.__version__, torch.version.git_version]
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties()
        parts += [torch.version.cuda, device.name, device.multi_processor_count]
        with suppress(metadata.PackageNotFoundError):
            parts.append(metadata.version("triton"))
    parts += [torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    parts += [torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()]
    parts += [sorted(options.items())]
    return repr((parts, sorted(inductor.save_config_portable().items(), key=str)))


def loaded_code(module_name: str) -> str:
    """A hash of everything that can be reached from a module in its package: code, constants and
    tables, as they are in memory, so that what a test or a tool has replaced counts.

    Two processes get the same hash for the same sources, whatever else they have imported.
    """
    package = module_name.partition(".")[0]
    found: dict[str, types.ModuleType] = {}
    waiting = [module_name]
    while waiting:
        name = waiting.pop()
        if name in found or name.partition(".")[0] != package:
            continue
        found[name] = sys.modules[name]
        for value in list(vars(found[name]).values()):
            home = value if isinstance(value, types.ModuleType) else sys.modules.get(_home(value))
            if home is not None:
                waiting.append(home.__name__)
    digest = hashlib.sha256()
    for name, module in sorted(found.items()):
        digest.update(name.encode())
        for text in _content(vars(module), package, ()):
            digest.update(text.encode())
    return digest.hexdigest()


def _home(x: Any) -> str:
    name = getattr(x, "__module__", None)
    return name if isinstance(name, str) else ""


def _content(x: Any, package: str, inside: tuple[int, ...]) -> Iterator[str]:
    """What decides how `x` behaves when traced, as text that is the same in every process."""
    if id(x) in inside:
        return
    inside = (*inside, id(x))

    def parts(*values: Any) -> Iterator[str]:
        for value in values:
            yield from _content(value, package, inside)

    yield type(x).__qualname__
    if x is None or isinstance(x, bool | int | float | str | bytes | torch.dtype):
        yield repr(x)
    elif isinstance(x, types.CodeType):
        yield x.co_code.hex()
        yield from parts(x.co_names, x.co_varnames, x.co_freevars, x.co_consts)
    elif isinstance(x, types.FunctionType):
        closure = [cell.cell_contents for cell in x.__closure__ or ()]
        yield from parts(x.__code__, x.__defaults__, x.__kwdefaults__, closure)
    elif isinstance(x, tuple | list):
        yield from parts(*x)
    elif isinstance(x, set | frozenset):
        yield from sorted("".join(parts(value)) for value in x)
    elif isinstance(x, Mapping):
        for name, value in x.items():
            if not (isinstance(name, str) and name.startswith("__")):
                yield from parts(name, value)
    elif isinstance(x, type):
        yield x.__qualname__
        if x.__module__.partition(".")[0] == package:
            yield from parts(*x.__bases__, dict(vars(x)))
    elif isinstance(x, types.ModuleType):
        yield x.__name__
    elif is_dataclass(x):
        yield from parts(*(getattr(x, field.name) for field in fields(x)))
    else:  # what wraps functions: a property, a custom operator, functools.partial
        wrapped = [getattr(x, name, None) for name in ("__wrapped__", "__func__", "fget", "func")]
        held = getattr(x, "__dict__", {}).values()
        yield from parts(wrapped, [v for v in held if isinstance(v, types.FunctionType)])
