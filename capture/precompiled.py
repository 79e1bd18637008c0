"""Compiled functions on disk, found without tracing them.

Why: torch finds a compiled graph by tracing the function again. With everything in its caches, 24
segments took 4.3 s of a start of 8.7 that way (8B pair with FP8 drafter, buckets 1,8,16; H200).
Here a file's name is a hash of what tracing would have read: the functions and tables that are
loaded, the arguments' layout, torch's state, and what compiles them.

Trust: the files hold machine code and pickles, as Inductor's own cache beside them does. None is
read that another user may have written.
"""

from __future__ import annotations

import enum
import hashlib
import io
import logging
import platform
import stat
import sys
import types
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from graphengine.capture import torch_internals
from graphengine.capture.cache_folder import others_can_write

FOLDER = "segments"  # below Inductor's
_DIGEST_BYTES = hashlib.sha256().digest_size  # in front of a file's content
_LOG = logging.getLogger(__name__)


def find(key: str, namespace: dict[str, Any]) -> Callable[..., Any] | None:
    """The compiled function of a key; None if there is none that can be used.

    Args: namespace: the function's globals.
    """
    if not are_kept():
        return None
    path = None
    try:
        path = _path(key)
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would never end
            raise ValueError("it is no file")
        if why := others_can_write(path):
            raise ValueError(f"it {why}")
        kept = path.read_bytes()
        digest, content = kept[:_DIGEST_BYTES], kept[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:  # torch aborts on some damage
            raise ValueError("it is damaged")
        load: Any = torch.compiler.load_compiled_function
        with torch_internals.without_workers():
            return torch_internals.callable_of(load(io.BytesIO(content), f_globals=namespace))
    except FileNotFoundError:
        return None
    except Exception as error:  # damaged, or not to be loaded here
        _LOG.warning("%s cannot be used, so it is compiled again: %s", path or FOLDER, _line(error))
        return None


def keep(key: str, compiled: Any) -> None:
    """Writes what `aot_compile` has returned; where that fails, later starts compile again.
    Mutates: the folder; a file is there whole or not at all."""
    path = part = None
    try:
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = torch_internals.serialized(compiled)
        part = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        with part.open("xb") as file:  # for whom the umask says, as Inductor's own files
            file.write(hashlib.sha256(content).digest() + content)
        part.replace(path)
    except Exception as error:
        where = path or FOLDER
        _LOG.warning("%s is not kept, so later starts compile it again: %s", where, _line(error))
    finally:  # also after Ctrl-C
        if part is not None:
            with suppress(OSError):
                part.unlink(missing_ok=True)


def are_kept() -> bool:
    """Whether the user lets torch keep what it compiles, changes nothing on the way of which no key
    would tell, and nobody else can write what would be read."""
    folder = torch_internals.cache_folder()
    places = (folder, folder / FOLDER)
    return torch_internals.caches_are_on() and not any(map(others_can_write, places))


def _line(error: Exception) -> str:
    """Without what a compiler has printed."""
    return str(error).partition("\n")[0]


def _path(key: str) -> Path:
    return torch_internals.cache_folder() / FOLDER / f"{_hash(key)}.bin"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# --- what a key is made of ---


def layout(arguments: Any) -> str:
    """What a specialisation for static shapes depends on: of tensors everything but their contents,
    and how they share memory; the values of the rest; for the CPU also the threads and instructions
    that its code is made for.

    Raises:
        TypeError: an argument is neither tensor, tuple, number, string nor None.
    """
    tensors: list[Tensor] = []
    text = ",".join(_layout(arguments, tensors))
    # Two that share memory may be traced as one input.
    memories = [x.untyped_storage().data_ptr() for x in tensors]
    places = [
        f"{place} in {memories.index(memory)} at {tensors[place].storage_offset()}"
        for place, memory in enumerate(memories)
        if memories.count(memory) > 1
    ]
    processor = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    return f"{text} {places} {processor if any(x.is_cpu for x in tensors) else ()}"


def _layout(x: Any, tensors: list[Tensor]) -> Iterator[str]:
    if type(x) in (Tensor, torch.nn.Parameter):
        tensors.append(x)
        flags = (x.data_ptr() % 16 == 0, x.requires_grad, x.is_conj(), x.is_neg())
        yield f"{x.dtype} {x.device} {(tuple(x.shape), x.stride(), flags)}"
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
    """A hash of versions, settings and GPU that compiled code is made by and for."""
    parts: list[Any] = [platform.python_version(), torch.__version__, torch.version.git_version]
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties()
        parts += [torch.version.cuda, device.name, device.multi_processor_count]
        with suppress(metadata.PackageNotFoundError):
            parts.append(metadata.version("triton"))
    parts += torch_internals.compiler_settings()
    return _hash(repr((parts, sorted(options.items()))))


Read = dict[str, tuple[bytes, list[str]]]
"""Module -> a hash of it, and the modules that it holds something of."""


def loaded_code(function: Callable[..., Any], read: Read | None = None) -> str:
    """A hash of the package's modules that a function's module reaches through what it holds (a
    module, function or class): their files, and what they hold in memory, so that what a test or a
    tool has replaced counts. The same in every process, whatever else it has imported.

    Args: read: modules read for other functions at the same moment. Mutates: `read`.
    """
    package = function.__module__.partition(".")[0]
    read = {} if read is None else read
    found: Read = {}
    waiting = [function.__module__]
    while waiting:
        name = waiting.pop()
        if name in found or name.partition(".")[0] != package:
            continue
        if name not in read:
            read[name] = _read_module(sys.modules[name], package)
        found[name] = read[name]
        waiting += read[name][1]
    digest = hashlib.sha256(b"".join(of_module for _, (of_module, _) in sorted(found.items())))
    # A closure differs from its like in its cells.
    digest.update("".join(_Reader(package).content(function)).encode())
    return digest.hexdigest()


# Module -> its names when it was first read: later ones are what tracing leaves there, compiled
# functions and constant results under the names of their functions.
_NAMES: WeakKeyDictionary[types.ModuleType, frozenset[str]] = WeakKeyDictionary()


def _read_module(module: types.ModuleType, package: str) -> tuple[bytes, list[str]]:
    digest = hashlib.sha256(module.__name__.encode())
    file = getattr(module, "__file__", None)  # of `python -c` there is none
    if file is not None:
        with suppress(OSError):  # no file, as in an archive
            digest.update(Path(file).read_bytes())
    known = _NAMES.setdefault(module, frozenset(vars(module)))
    held = list(vars(module).items())
    names = {k: v for k, v in held if k in known and not k.startswith("__")}
    homes = [
        value.__name__ if isinstance(value, types.ModuleType) else _home(value)
        for value in names.values()
    ]
    reader = _Reader(package)
    for name, value in names.items():
        digest.update(f"{name}=".encode())
        is_own = _home(value) == module.__name__
        digest.update("".join(reader.content(value, in_full=is_own)).encode())
    return digest.digest(), [home for home in {*homes, *reader.homes} if home in sys.modules]


def _home(x: Any) -> str:
    name = getattr(x, "__module__", None)
    return name if isinstance(name, str) else ""


# Of a class: what does not decide what it does.
_UNREAD = {"__dict__", "__doc__", "__module__", "__qualname__", "__weakref__"}
_UNREAD |= {"__firstlineno__", "__static_attributes__"}  # from Python 3.13 on
# What Python adds when somebody asks for annotations, those with a second name from 3.14 on; names
# of slots when an instance is copied or pickled.
_UNREAD |= {"__annotations__", "__annotations_cache__", "__annotate_func__", "__slotnames__"}
_PLAIN = (bool, int, float, complex, str, bytes, range, type(...), torch.dtype, torch.device)


class _Reader:
    """What values say to whoever traces them, as text that is the same in every process.

    A function or class that its own module holds is read there and is a name elsewhere, or a start
    would read the largest configuration once for each of 20 modules; `homes` are the modules that
    have to be read for that.
    """

    def __init__(self, package: str) -> None:
        self.homes: set[str] = set()
        self._package = package

    def content(
        self, x: Any, inside: tuple[int, ...] = (), *, in_full: bool = False
    ) -> Iterator[str]:
        """Args: inside: ids of what x is a part of. in_full: x is what its module is read for."""
        if id(x) in inside:
            return
        if isinstance(x, type | types.FunctionType) and not in_full and self._is_held(x):
            self.homes.add(x.__module__)
            yield f"{x.__module__}.{x.__qualname__}"
            return
        inside = (*inside, id(x))

        def parts(*values: Any) -> Iterator[str]:
            yield "("
            for value in values:
                yield from self.content(value, inside)
            yield ")"

        yield type(x).__qualname__
        if x is None or isinstance(x, _PLAIN):
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
            yield from parts(*(pair for pair in list(x.items()) if pair[0] not in _UNREAD))
        elif isinstance(x, type):
            yield f"{x.__module__}.{x.__qualname__}"
            if _is_of(x, self._package):
                yield from parts(*x.__bases__, dict(vars(x)))
        elif isinstance(x, types.ModuleType):
            yield x.__name__
        elif isinstance(x, enum.Enum):
            yield x.name
        elif _is_of(type(x), self._package):
            names = [name for kind in type(x).__mro__ for name in getattr(kind, "__slots__", ())]
            slots = [getattr(x, name, None) for name in names if name not in _UNREAD]
            yield from parts(type(x), getattr(x, "__dict__", None), slots)
        else:  # what wraps functions: a method, a property, functools.partial, a custom operator
            wrapped = ("__wrapped__", "__func__", "fget", "func", "args", "keywords")
            static = [getattr(x, name, None) for name in wrapped if hasattr(type(x), name)]
            # Without what Triton puts into a kernel at its first launch, and a start before it.
            held = [v for name, v in getattr(x, "__dict__", {}).items() if name != "compile"]
            functions = [v for v in held if isinstance(v, types.FunctionType)]
            yield from parts(static, [v for v in functions if not _is_of(v, "triton")])

    def _is_held(self, x: type | types.FunctionType) -> bool:
        home = sys.modules.get(_home(x)) if _is_of(x, self._package) else None
        return getattr(home, x.__name__, None) is x


def _is_of(x: type | types.FunctionType, package: str) -> bool:
    return _home(x).partition(".")[0] == package
