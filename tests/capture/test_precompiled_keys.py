"""What compiled segments on disk are found by: a call's layout, and all code loaded for it."""

import copy
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from torch import Tensor

from graphengine.capture import compile as compiling
from graphengine.capture import precompiled, torch_internals
from graphengine.capture.precompiled import layout, loaded_code
from graphengine.decode import segments, simulate
from graphengine.kernels import skinny_config
from graphengine.models import layers
from tests.capture import test_precompiled
from tests.capture.test_precompiled import Pair, as_a_new_process, compiled, needs_compiler, scaled

folder = test_precompiled.folder


def test_all_that_a_specialisation_depends_on() -> None:
    """Bug: two calls that need different code share it, e.g. a matrix that is also the other
    argument: torch traces that as one input."""
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    memory = torch.randn(65)
    calls: dict[str, Any] = {
        "base": (Pair(x, y), 1.0),
        "shape": (Pair(x, torch.randn(4, 9)), 1.0),
        "strides": (Pair(x, torch.randn(8, 4).T), 1.0),
        "dtype": (Pair(x, y.double()), 1.0),
        "value": (Pair(x, y), 2.0),
        "kind of number": (Pair(x, y), 1),
        "same tensor": (Pair(x, x), 1.0),
        "same memory": (Pair(memory[:32].view(4, 8), memory[32:64].view(4, 8)), 1.0),
        "overlap": (Pair(memory[:32].view(4, 8), memory[16:48].view(4, 8)), 1.0),
        "alignment": (Pair(x, memory[33:].view(4, 8)), 1.0),
        "tuple": ((x, y), 1.0),
        "none": (Pair(x, y), None),
        "gradients": (Pair(x, y.clone().requires_grad_()), 1.0),
    }
    assert len({layout(call) for call in calls.values()}) == len(calls)
    assert layout((Pair(y.clone(), x.clone()), 1.0)) == layout(calls["base"])
    elsewhere = Pair(memory[32:64].view(4, 8), y)  # of a packed matrix: the next layer is the same
    assert layout((elsewhere, 1.0)) == layout(calls["base"])
    assert layout((torch.conj(x.to(torch.complex64)),)) != layout((x.to(torch.complex64),))
    for unknown in ([x], x.as_subclass(type("Other", (Tensor,), {}))):
        with pytest.raises(TypeError, match=type(unknown).__name__):
            layout((unknown,))


@pytest.mark.parametrize(
    ("owner", "name"), [(torch, "__version__"), (torch.version, "git_version")]
)
def test_another_torch(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Bug: after an upgrade, a nightly's too, what the torch before has compiled is loaded."""
    before = precompiled.compilers({})
    monkeypatch.setattr(owner, name, "2.99.0")
    assert precompiled.compilers({}) != before


def test_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: code whose grids are for all of a GPU is found on a slice of it, or on another kind."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    keys = []
    for name, count in (("H200", 132), ("H200", 60), ("H100", 132), ("H200", 132)):
        device = SimpleNamespace(name=name, multi_processor_count=count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=device: device)
        keys.append(precompiled.compilers({}))
    assert keys[0] == keys[3] and len({*keys}) == 3


def test_other_options() -> None:
    """Bug: what another version has compiled with another value of an option is run."""
    keys = [precompiled.compilers(options) for options in ({"a": 1, "b": 2}, {"b": 2, "a": 1})]
    assert keys[0] == keys[1] != precompiled.compilers({"a": 1, "b": 3})


@pytest.mark.parametrize(
    ("config", "name", "counts"),
    [
        (functorch, "error_on_custom_op_aliasing", False),
        (inductor, "cpp_cache_precompile_headers", False),
        (inductor, "max_autotune", True),
    ],
)
def test_settings_that_decide_nothing(
    config: Any, name: str, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: what a job with the variable CI has compiled is of no use outside of it, nor where
    others may write into the temporary folder; or a setting that matters is passed over."""
    real, keys = torch_internals._configs(), list[str]()
    for value in (False, True):  # whether this torch has it or not

        def read(module: Any, value: bool = value, **named: Any) -> dict[str, Any]:
            settings = module.save_config_portable(**named)
            return settings | {name: value} if module is config else settings

        fakes = [SimpleNamespace(save_config_portable=partial(read, module)) for module in real]
        monkeypatch.setattr(torch_internals, "_configs", lambda fakes=fakes: fakes)
        keys.append(precompiled.compilers({}))
    assert (keys[0] != keys[1]) == counts


def test_threads_count_on_the_cpu_alone() -> None:
    """Bug: another number of cores beside the same GPU makes an artifact useless; or code for four
    threads is found for two."""
    x, before = torch.randn(4, 8), torch.get_num_threads()
    there = torch.empty(4, 8, device="meta")
    found = []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append((layout((x,)), layout((there,)), precompiled.compilers({})))
    finally:
        torch.set_num_threads(before)
    assert found[0][0] != found[1][0]
    assert found[0][1:] == found[1][1:]


def segments_code() -> str:
    return loaded_code(segments.first_segment)


def content(x: Any) -> str:
    """What a module of this package that holds `x` is hashed by."""
    return "".join(precompiled._Reader(__name__.partition(".")[0]).content(x, in_full=True))


@dataclass(frozen=True, slots=True)
class Scale:
    factor: float

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


class Kind(Enum):
    ONE = 1
    TWO = 2


def adding(number: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x + number


def test_what_is_loaded_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a tool judges another table, or a test replaces a function, and both get the code of
    what was there before."""
    found = {"": segments_code()}
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (layers, "rms_norm", lambda x, weight, eps: x * weight),
        (layers, "SKINNY_T", 32),
        (skinny_config, "TUNED", {}),
        (layers.Fp8Matrix, "dense", lambda self, dtype: self.weight_ED.to(dtype)),
        (simulate, "force_acceptance_", lambda *_: None),
    )
    for owner, name, value in replaced:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            found[name] = segments_code()
    same = [name for name in found if list(found.values()).count(found[name]) > 1]
    assert len(found) == 6 and not same
    assert segments_code() == found[""]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (adding(1.0), adding(2.0)),
        (lambda x: x + 1.0, lambda x: x + 2.0),
        (lambda x: x.sin(), lambda x: x.cos()),
        (lambda x, *, y=1: x + y, lambda x, *, y=2: x + y),
        (lambda x, y=1: x + y, lambda x, y=2: x + y),
        (partial(scaled, factor=1.0), partial(scaled, factor=2.0)),
        (lru_cache(lambda: 1), lru_cache(lambda: 2)),
        (range(2), range(3)),
        (1j, 2j),
        (((1,), 2), ((1, 2),)),
        ({"a": {1, 2}}, {"a": {1, 3}}),
    ],
)
def test_values_that_are_not_alike(one: Any, other: Any) -> None:
    """Bug: two values of one kind are taken for one."""
    assert content(one) != content(other)
    assert content(one) == content(one)


def test_what_triton_notes_in_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the key depends on which kernels this process has compiled, or whether a start has bound
    them to what compiles them beside it: a second engine, or plain decoding, compiles anew."""
    triton = pytest.importorskip("triton")
    from graphengine.kernels.argmax import combine_argmax_kernel
    from graphengine.kernels.compile_worker import compile_kernel

    before = segments_code()
    for compile in (triton.compile, compile_kernel):
        with monkeypatch.context() as patch:
            patch.setattr(combine_argmax_kernel, "compile", compile, raising=False)
            assert segments_code() == before
    monkeypatch.setattr(combine_argmax_kernel, "fn", lambda x: x)
    assert segments_code() != before


@needs_compiler
def test_what_tracing_leaves_in_a_module(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a process's second engine has other keys than its first, since tracing has put the
    results of constant functions into the module; what it compiles no later start finds (plain
    decoding, 3 of 8 segments on an H200)."""
    (tmp_path / "asks_once.py").write_text(
        "import torch\n@torch.compiler.assume_constant_result\ndef is_large(): return True\n"
    )
    (tmp_path / "traced_module.py").write_text(
        "import asks_once\ndef f(x): return x + 1 if asks_once.is_large() else x\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("traced_module")
    before = set(vars(module))
    compiled(module.f)(torch.ones(2))
    left = {name for name in vars(module) if not name.startswith("__")} - before
    assert left, "tracing leaves nothing now: this test shows nothing"
    as_a_new_process(monkeypatch)
    assert torch.equal(compiled(module.f)(torch.ones(2)), torch.full((2,), 2.0))


def test_objects_of_the_package() -> None:
    """Bug: what a dataclass, an enum or a call operator says is not read."""
    assert content(Scale(1.0)) != content(Scale(2.0))
    assert content(Scale(1.0)) == content(Scale(1.0))
    assert content(Kind.ONE) != content(Kind.TWO)
    before = content(Scale)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scale, "__call__", lambda self, x: x)
        assert content(Scale) != before


def test_what_python_notes_in_a_class() -> None:
    """Bug: whoever copies or pickles weights, or asks what a class is annotated with, changes the
    keys of this process: its next engine compiles everything again."""

    class Plain:
        pass

    class Weights(NamedTuple):
        weight: int

    classes = Plain, Weights
    before, held = [content(kind) for kind in classes], [{*vars(kind)} for kind in classes]
    copy.copy(Weights(1))
    assert Plain.__annotations__ == {}
    for kind, names in zip(classes, held, strict=True):
        assert {*vars(kind)} > names, "Python notes nothing now: this test shows nothing"
    assert [content(kind) for kind in classes] == before


def test_where_a_class_stands() -> None:
    """Bug: a line above a class compiles everything again, since Python 3.13 notes where it is."""

    def content_behind(above: str) -> str:
        held: dict[str, Any] = {"__name__": __name__}
        exec(f"{above}class Plain:\n    size = 1\n    def set(self, x):\n        self.x = x", held)
        return content(held["Plain"])

    assert content_behind("\n\n") == content_behind("")


@pytest.mark.slow
def test_a_module_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a start hashes the same 22 modules for each of seven segments, half a second of it; or
    gets another hash for it."""
    read: list[str] = []
    real = precompiled._read_module

    def reading(module: Any, package: str) -> Any:
        read.append(module.__name__)
        return real(module, package)

    alone = [loaded_code(function) for function in segments.Segments()]
    monkeypatch.setattr(precompiled, "_read_module", reading)
    together = compiling.compile_segments(segments.Segments())
    assert "graphengine.decode.segments" in read
    assert len(set(read)) == len(read)
    for segment, code in zip(together, alone, strict=True):
        assert isinstance(segment, compiling.Segment) and code in segment._key


def test_what_is_held_elsewhere_is_read_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a table holds functions of a module that its own does not name: a name stands for them,
    and nothing is compiled anew when they change; or each table reads them in full, 0.4 s of every
    start of an 8B pair."""
    (tmp_path / "held").mkdir()
    modules = {
        "held/__init__.py": "",
        "held/far.py": "NUMBER = 1\ndef f(x): return x + NUMBER\n",
        "held/table.py": "def make():\n from held import far\n return {'f': [far.f]}\n",
        "held/near.py": "from held.table import make\nTABLE = make()\ndef g(x): return x\n",
    }
    for name, text in modules.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    near, far = (importlib.import_module(f"held.{name}") for name in ("near", "far"))
    found = [loaded_code(near.g)]
    for owner, name, value in ((far, "NUMBER", 2), (far, "f", near.g), (near, "TABLE", {})):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            found.append(loaded_code(near.g))
    assert len(set(found)) == 4
    reader = precompiled._Reader("held")
    assert far.f.__code__.co_code.hex() not in "".join(reader.content(near.TABLE))
    assert reader.homes == {"held.far"}


def test_two_closures_of_one_module() -> None:
    """Bug: functions of one name share a key."""
    assert loaded_code(adding(1.0)) != loaded_code(adding(2.0))


def test_a_decorator_s_arguments_are_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: what memory does not show, as what an operator writes to, is not in the key."""
    source = "def wrap(**names): return lambda f: f\n@wrap(mutates={!r})\ndef f(x): return x\n"
    found = set()
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "decorated_module.py").write_text(source.format(name))
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(tmp_path / name))
            found.add(loaded_code(importlib.import_module("decorated_module").f))
            del sys.modules["decorated_module"]
    assert len(found) == 2


@pytest.mark.slow
def test_every_process_finds_the_same_key() -> None:
    """Bug: the key depends on what else a command imports, or on how Python orders its sets."""
    script = """
import sys
import graphengine.decode.segments as s
from graphengine.capture.precompiled import loaded_code
print(loaded_code(s.first_segment))
assert "graphengine.cli.main" not in sys.modules
import graphengine.measure.bench, graphengine.cli.main
print(loaded_code(s.first_segment))
"""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    env = os.environ | {"PYTHONHASHSEED": seed}
    line = [sys.executable, "-c", script]
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=True)
    assert {segments_code(), *done.stdout.split()} == {segments_code()}
