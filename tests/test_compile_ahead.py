"""Compiling ahead: on threads, harmless to what a step and a request keep."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from graphengine import TINY_DRAFT, TINY_TARGET, Engine
from graphengine.artifact import compiler_files, name_compilers_
from graphengine.build import build
from graphengine.capture.compile_ahead import MAX_THREADS, CompileAhead
from graphengine.options import Options

CPU = torch.device("cpu")


def test_runs_are_waited_for_whatever_becomes_of_them() -> None:
    """Bug: a run that fails ends the start, or a capture begins while a thread still allocates."""
    began, done = threading.Event(), []

    def late(number: int) -> None:
        began.wait(10)
        done.append((number, threading.current_thread().name))

    def failing() -> None:
        raise ValueError("no kernel")

    with CompileAhead([failing, *(lambda n=n: late(n) for n in range(20))], CPU) as ahead:
        assert not done
        began.set()
        ahead.wait()
        assert sorted(number for number, _ in done) == list(range(20))
        ahead.wait()
    names = {name for _, name in done}
    assert threading.current_thread().name not in names
    assert len(names) <= MAX_THREADS


def test_what_has_not_begun_is_dropped_with_the_start() -> None:
    """Bug: Ctrl-C during a start waits for every kernel of every bucket."""
    held, release, done = threading.Event(), threading.Event(), []

    def first() -> None:
        held.set()
        release.wait(10)

    runs = [first] * MAX_THREADS + [lambda: done.append(1)] * 50
    with CompileAhead(runs, CPU):
        assert held.wait(10)
        threading.Timer(0.2, release.set).start()
    assert len(done) < 50


def test_padding_runs_touch_the_null_page_alone() -> None:
    """Bug: a run that only compiles kernels writes K/V of a page that a request gets later."""
    built = build(TINY_TARGET, TINY_DRAFT, Options(buckets=(1,), device="cpu", max_model_len=64))
    prefill = built.loop._prefill
    assert prefill.drafter is not None
    pools = [prefill.target.kv_pool, prefill.drafter.kv_pool]
    before = [pool.clone() for pool in pools]
    prefill.run_padding(17)
    for pool, kept in zip(pools, before, strict=True):
        assert torch.equal(pool[:, :, 1:], kept[:, :, 1:])
        assert pool.isfinite().all()


def test_the_python_api_names_the_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a second start through the API finds none of our kernels, because Inductor had named
    another ptxas to Triton when they were compiled (73 of 73 on an H200)."""
    for name in compiler_files():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/mine")
    name_compilers_()
    assert os.environ["TRITON_PTXAS_PATH"] == "/mine"
    assert os.environ.get("TRITON_LIBDEVICE_PATH") == compiler_files().get("TRITON_LIBDEVICE_PATH")


@pytest.mark.gpu
def test_kernels_are_compiled_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a start compiles our kernels one after another, on the thread that Inductor needs."""
    from triton import knobs

    threads: list[str] = []

    def listen(**event: object) -> None:
        threads.append(threading.current_thread().name)

    monkeypatch.setattr(knobs.compilation, "listener", listen)
    with Engine.from_pretrained(
        TINY_TARGET, TINY_DRAFT, buckets=[3], graph_mode="full", num_speculative_tokens=5
    ) as engine:
        assert engine.generate(["Count from 3 to 9."])[0].token_ids
    ahead = [name for name in threads if name.startswith("compile-ahead")]
    assert ahead, threads
