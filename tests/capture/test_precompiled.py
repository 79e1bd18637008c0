"""Compiled segments on disk: found for what they were compiled for, and for nothing else."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphengine.capture import compile as compiling
from graphengine.capture import precompiled, torch_internals
from graphengine.decode.simulate import Simulation, force_acceptance_

ROOT = Path(__file__).resolve().parents[2]
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="Inductor's C++ backend needs g++"
)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def scaled(pair: Pair, factor: float) -> tuple[Tensor, Tensor]:
    return pair.first * factor + pair.second, pair.second.sum(-1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of compiled code, and a process that remembers none."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "_MADE", {})
    with torch.no_grad():
        yield tmp_path / precompiled.FOLDER


def as_a_new_process(monkeypatch: pytest.MonkeyPatch, *, may_compile: bool = False) -> None:
    """Forgets what this one has compiled; a compilation fails unless it is expected."""
    monkeypatch.setattr(compiling, "_MADE", {})
    if not may_compile:
        monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("it is compiled again"))


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return compiling.compile_segments([function])[0]


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


@needs_compiler
def test_found_without_tracing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a later start traces again, which is most of what a warm start took; or what it finds
    computes something else."""
    pair = Pair(torch.randn(4, 32), torch.randn(4, 32))
    other = Pair(torch.randn(4, 32), torch.randn(4, 32))
    before = compiling.cache_counts()
    compiled(scaled)(pair, 2.0)
    assert compiling.cache_counts().since(before) == (0, 1)
    assert len(files(folder)) == 1
    as_a_new_process(monkeypatch)
    load, threads = torch.compiler.load_compiled_function, list[int | None]()

    def recorded(file: Any, **named: Any) -> Any:
        threads.append(inductor.compile_threads)
        return load(file, **named)

    monkeypatch.setattr(torch.compiler, "load_compiled_function", recorded)
    again = compiled(scaled)
    for inputs in (pair, other):
        torch.testing.assert_close(again(inputs, 2.0), scaled(inputs, 2.0))
    assert compiling.cache_counts().since(before) == (1, 1) and threads == [1]


@needs_compiler
@pytest.mark.slow
def test_what_a_first_compilation_reads_is_read_before_it(tmp_path: Path) -> None:
    """Bug: the first compilation reads thousands of torch's files, behind each of which it waits
    for Python's lock while other threads compile kernels (13 s of a start on an H200)."""
    script = """
import sys, torch
from torch._inductor import codecache
from graphengine.capture import compile as compiling, torch_internals
torch_internals.import_inductor()
late, before = [], set(sys.modules)
codecache.build_code_hash = lambda roots, *_: late.append(roots)
def double(x): return x * 2
with torch.no_grad():
    compiling.compile_segments([lambda x: double(x) + 1])[0](torch.ones(2, 3))
assert compiling.cache_counts() == (0, 1)
late += [name for name in set(sys.modules) - before if name.startswith("torch.distributed")]
print(late)
"""
    env = os.environ | {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    line = [sys.executable, "-c", script]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
    assert "cannot be compiled" not in done.stderr


class Tripled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        found = func(*args, **(kwargs or {}))
        return found * 3 if func is Tensor.sum else found


@needs_compiler
def test_a_mode_is_not_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: what the mode of the caller makes of torch's functions is kept, and every later start
    computes that, without the mode."""
    pair = Pair(torch.randn(4, 32), torch.randn(4, 32))
    with Tripled():
        compiled(scaled)(pair, 2.0)
    as_a_new_process(monkeypatch)
    torch.testing.assert_close(compiled(scaled)(pair, 2.0), scaled(pair, 2.0))


@needs_compiler
def test_writes_to_arguments_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a function that is found writes into a copy of its argument."""
    simulation = Simulation(torch.tensor([[3, 1]] * 5), torch.zeros(1, dtype=torch.int64))
    draft = torch.arange(1, 9).view(2, 4)
    target = torch.full((2, 4), 7)
    expected = target.clone()
    force_acceptance_(Simulation(simulation.accepted_RB, torch.zeros(1).long()), draft, expected)
    compiled(force_acceptance_)(simulation, draft, target.clone())
    as_a_new_process(monkeypatch)
    simulation.step_1.zero_()
    compiled(force_acceptance_)(simulation, draft, target)
    assert torch.equal(target, expected)
    assert simulation.step_1.item() == 1
    assert len(files(folder)) == 1


@needs_compiler
@pytest.mark.parametrize("content", [b"", b"no pickle", None, "a bit"])
def test_a_file_that_cannot_be_used_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | str | None
) -> None:
    """Bug: a start dies of a file that a crash has cut short, or compiles at every start; of one
    wrong bit in torch's guards it dies by SIGABRT."""
    pair = Pair(torch.randn(4, 32), torch.randn(4, 32))
    compiled(scaled)(pair, 3.0)
    (file,) = files(folder)
    good = file.read_bytes()
    bad = content if isinstance(content, bytes) else good[: len(good) // 2]
    if content == "a bit":
        bad = bytearray(good)
        bad[good.index(b'"autocast_state"')] ^= 1
    file.write_bytes(bad)
    as_a_new_process(monkeypatch, may_compile=True)
    torch.testing.assert_close(compiled(scaled)(pair, 3.0), scaled(pair, 3.0))
    assert files(folder) == [file]
    as_a_new_process(monkeypatch)
    torch.testing.assert_close(compiled(scaled)(pair, 3.0), scaled(pair, 3.0))


@needs_compiler
def test_others_may_read_it(folder: Path) -> None:
    """Bug: an image is filled by one user and run by another, who compiles everything again."""
    before = os.umask(0o022)
    try:
        compiled(scaled)(Pair(torch.randn(4, 8), torch.randn(4, 8)), 2.0)
    finally:
        os.umask(before)
    assert [file.stat().st_mode & 0o777 for file in files(folder)] == [0o644]


@needs_compiler
def test_without_a_place_to_keep_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: a folder that cannot be written ends a start, or is not told; a full disk leaves part of
    a file."""
    pair = Pair(torch.randn(4, 32), torch.randn(4, 32))
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file where the folder should be")
    torch.testing.assert_close(compiled(scaled)(pair, 4.0), scaled(pair, 4.0))
    assert "later starts compile it again" in caplog.text
    folder.unlink()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    as_a_new_process(monkeypatch, may_compile=True)
    monkeypatch.setattr(Path, "replace", full)
    torch.testing.assert_close(compiled(scaled)(pair, 4.0), scaled(pair, 4.0))
    assert not files(folder)


def test_an_interrupted_write_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: Ctrl-C while a segment is written leaves a part of it, which nobody ever removes."""

    def interrupted(part: Path, target: Path) -> None:
        assert files(folder) == [part]
        raise KeyboardInterrupt

    monkeypatch.setattr(torch_internals, "serialized", lambda compiled: b"code")
    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        precompiled.keep("a key", None)
    assert not files(folder)


@needs_compiler
@pytest.mark.parametrize(
    ("config", "switch", "off"),
    [
        (inductor, "force_disable_caches", True),
        (inductor, "fx_graph_cache", False),
        (functorch, "enable_autograd_cache", False),
        (inductor, "post_grad_custom_post_pass", lambda graph: None),  # in no key of ours
    ],
)
def test_caches_can_be_switched_off(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    config: Any,
    switch: str,
    off: Any,
) -> None:
    """Bug: who looks for a fault in compiled code switches caches off and still gets the old; or is
    warned at each segment that it is not kept."""
    pair = Pair(torch.randn(4, 32), torch.randn(4, 32))
    compiled(scaled)(pair, 5.0)
    (file,) = files(folder)
    as_a_new_process(monkeypatch, may_compile=True)
    before = compiling.cache_counts()
    with config.patch({switch: off}):
        torch.testing.assert_close(compiled(scaled)(pair, 5.0), scaled(pair, 5.0))
    assert compiling.cache_counts().since(before) == (0, 1)
    assert files(folder) == [file]
    assert "later starts" not in caplog.text
