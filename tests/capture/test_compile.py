"""compile: a segment is compiled once for each layout, state and moment, if it may be."""

import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor
from torch import Tensor

from graphengine.capture import compile as compiling
from graphengine.capture import torch_internals
from tests.capture import test_precompiled
from tests.capture.test_precompiled import (
    Pair,
    as_a_new_process,
    compiled,
    files,
    needs_compiler,
    scaled,
)

folder = test_precompiled.folder
FACTOR = 2.0


@needs_compiler
@pytest.mark.slow
def test_settings_of_the_moment_of_compilation(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a bucket built late, after a setting of Inductor's was changed, is kept as compiled with
    the old one, and every later start gets it."""
    pair = Pair(torch.randn(4, 32), torch.randn(4, 32))
    late = compiled(scaled)
    with inductor.patch(emulate_precision_casts=True):
        late(pair, 7.0)
    as_a_new_process(monkeypatch, may_compile=True)
    before = compiling.cache_counts()
    compiled(scaled)(pair, 7.0)
    assert compiling.cache_counts().since(before) == (0, 1)
    assert len(files(folder)) == 2


def scaled_by_a_table(x: Tensor) -> Tensor:
    return x * FACTOR


@pytest.mark.slow
@needs_compiler
def test_a_tool_replaces_a_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a tool that judges tables in one engine times the first of them every time."""
    function, x = compiled(scaled_by_a_table), torch.randn(64)
    for factor in (2.0, 3.0, 2.0):
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", factor)
        compiling.forget()
        torch.testing.assert_close(function(x), x * factor)
    assert len(files(folder)) == 2


def keys_asked_for(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on segments are not compiled: the keys under which they would be."""
    asked: list[str] = []

    def make(self: object, key: str, arguments: object) -> Callable[[Tensor], Tensor]:
        asked.append(key)
        return lambda x: x

    monkeypatch.setattr(compiling.Segment, "_make", make)
    monkeypatch.setattr(compiling, "_MADE", {})
    return asked


def test_code_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: as above, seen without a compiler."""
    asked = keys_asked_for(monkeypatch)
    (function,), x = compiling.compile_segments([scaled_by_a_table]), torch.ones(8)
    for factor in (2.0, 3.0, 2.0):
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", factor)
        compiling.forget()
        function(x)
        function(x)
    two, three, again = asked
    assert two == again != three


def test_another_state_is_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: as below, seen without a compiler."""
    asked = keys_asked_for(monkeypatch)
    (product,) = compiling.compile_segments([lambda x: x @ x])
    x = torch.ones(8, 8)
    for moment in (torch.autocast("cpu", dtype=torch.bfloat16), nullcontext(), torch.no_grad()):
        for _ in range(2):
            with moment:
                product(x)
    assert len(set(asked)) == len(asked) == 3


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("folder")
def test_code_of_another_state_is_not_called() -> None:
    """Bug: what was compiled under autocast is called without it, in the same process: a product in
    bfloat16."""
    (product,) = compiling.compile_segments([lambda x: x @ x])
    x = torch.full((8, 8), 1.001)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert product(x).dtype == torch.bfloat16
    torch.testing.assert_close(product(x), x @ x)


def test_without_dynamo(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: TORCH_COMPILE_DISABLE=1 does not disable anything, or torch's stance to run eagerly."""
    as_a_new_process(monkeypatch)
    pair = Pair(torch.randn(4, 32), torch.randn(4, 32))
    with torch._dynamo.config.patch(disable=True):
        torch.testing.assert_close(compiled(scaled)(pair, 6.0), scaled(pair, 6.0))
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(compiled(scaled)(pair, 6.0), scaled(pair, 6.0))
    assert not files(folder)


def test_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a start is said to be warm since an earlier engine of the process was, or since what it
    has compiled is counted as found."""
    before, after = compiling.CacheCounts(3, 5), compiling.CacheCounts(4, 5)
    assert after.since(before) == (1, 0)
    monkeypatch.setattr(compiling, "_COUNTS", Counter(hits=3, misses=5))
    assert compiling.cache_counts() == compiling.CacheCounts(num_hits=3, num_misses=5)


@pytest.mark.parametrize("num_damaged", [0, 1])
def test_what_cannot_be_compiled_ahead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_damaged: int
) -> None:
    """Bug: a segment that torch cannot compile ahead of time ends the start, or the log has all of
    a compiler's output but the reason; or what failed of a damaged file is not tried again."""
    failures = ["out of registers\nsource: 900 lines"]

    def compile_ahead_of_time(ahead: object, arguments: object) -> str:
        if failures:
            raise RuntimeError(failures.pop())
        return "compiled"

    monkeypatch.setattr(compiling, "_MADE", {})
    # Of the headers, whose folder is the second.
    monkeypatch.setattr(compiling, "drop_damaged", lambda *of: num_damaged if of[1:] else 0)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(compiling.precompiled, "are_kept", lambda: True)
    monkeypatch.setattr(compiling.precompiled, "find", lambda key, namespace: None)
    kept: list[object] = []
    monkeypatch.setattr(compiling.precompiled, "keep", lambda key, made: kept.append(made))
    monkeypatch.setattr(torch_internals, "compile_ahead_of_time", compile_ahead_of_time)
    monkeypatch.setattr(torch_internals, "callable_of", lambda made: lambda x: x * 20)
    monkeypatch.setattr(torch_internals, "forget_failures", lambda: None)
    (segment,) = compiling.compile_segments([scaled_by_a_table])
    if num_damaged:
        assert segment(torch.ones(1)).item() == 20 and kept == ["compiled"]
        assert not caplog.messages
        return
    assert segment(torch.ones(1)).item() == FACTOR and not kept
    assert caplog.messages == [
        "scaled_by_a_table cannot be compiled for later starts as well: out of registers"
    ]


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("folder")
def test_one_compilation_for_each_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a second engine of the same shapes compiles again; or another shape gets its code."""
    before = compiling.cache_counts()
    first, second = compiled(scaled), compiled(scaled)
    pair = Pair(torch.randn(2, 8), torch.randn(2, 8))
    for function in (first, first, second):
        torch.testing.assert_close(function(pair, 2.0), scaled(pair, 2.0))
    assert compiling.cache_counts().since(before) == (0, 1)
    longer = Pair(torch.randn(3, 8), torch.randn(3, 8))
    torch.testing.assert_close(first(longer, 2.0), scaled(longer, 2.0))
    assert compiling.cache_counts().since(before) == (0, 2)


@pytest.mark.parametrize(("opened", "is_off"), [("headers", True), (".", True), (None, False)])
def test_headers_that_others_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: str | None, is_off: bool
) -> None:
    """Bug: code is compiled with headers that another user has precompiled, in their folder or in
    one that was put in its place."""
    headers, told = tmp_path / "headers", []
    headers.mkdir(mode=0o700)
    if opened is not None:
        (tmp_path / opened).chmod(0o777)
    monkeypatch.setattr(torch_internals, "header_folder", lambda: headers)
    monkeypatch.setattr(torch_internals, "precompile_no_headers", lambda: told.append("off"))
    compiling.compile_segments([])
    assert told == ["off"] * is_off


@pytest.mark.parametrize("are_kept", [True, False])
def test_two_engines_compile_in_turn(monkeypatch: pytest.MonkeyPatch, are_kept: bool) -> None:
    """Bug: of two engines that two threads build at a time both fail, torch's compiler being one
    for the process; or one that answers meets the compilation of another, where nothing is kept;
    or both compile the same."""
    busy, most, calls = [0], [0], Counter[str]()

    def alone(what: str) -> None:
        busy[0] += 1
        most[0] = max(most[0], busy[0])
        calls[what] += 1
        time.sleep(0.02)
        busy[0] -= 1

    def compile_ahead_of_time(ahead: object, arguments: object) -> str:
        alone("compiles")
        return "compiled"

    def jit(function: object, **options: object) -> Callable[[Tensor], Tensor]:
        return lambda x: (alone("calls"), x)[1]

    monkeypatch.setattr(compiling, "_MADE", {})
    monkeypatch.setattr(torch, "compile", jit)
    monkeypatch.setattr(compiling.precompiled, "are_kept", lambda: are_kept)
    monkeypatch.setattr(compiling.precompiled, "find", lambda key, namespace: None)
    monkeypatch.setattr(compiling.precompiled, "keep", lambda key, made: None)
    monkeypatch.setattr(torch_internals, "compile_ahead_of_time", compile_ahead_of_time)
    monkeypatch.setattr(torch_internals, "callable_of", lambda made: lambda x: x)
    (segment,) = compiling.compile_segments([scaled_by_a_table])
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(segment, [torch.ones(1 + i % 2) for i in range(8)]))
    assert most == [1]
    assert calls == ({"compiles": 2} if are_kept else {"calls": 8})


def test_a_folder_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a start ends where the folder of compiled code is another user's, though nothing of it
    would be used."""

    def refuse(folder: Path) -> int:
        raise PermissionError(folder)

    monkeypatch.setattr(compiling, "drop_damaged", refuse)
    assert compiling.compile_segments([]) == []
