"""Kernels that other processes compile: asked for once, waited for where a start needs them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from graphengine.decode import compile_ahead
from graphengine.decode.compile_ahead import CompileAhead, Workers
from graphengine.kernels import compile_worker, launch
from graphengine.kernels.compile_worker import compile_job
from graphengine.kernels.launch import on_grid


class Source(NamedTuple):
    """As Triton's of a kernel."""

    fn: str
    signature: dict[str, str]
    constants: dict[str, int]
    attrs: dict[str, int]


class Asked(NamedTuple):
    """Kernels that are not there, and who compiles them."""

    submitted: list[bytes]
    here: list[bytes]  # compiled by this process
    ended: list[bytes]  # runs that came behind their kernel

    def run(self, job: bytes) -> None:
        def warmup(*arguments: object, **options: object) -> object:
            ask = compile_worker._ASK.get()
            self.here.append(job) if ask is None else ask(job)
            return warmup

        on_grid(SimpleNamespace(warmup=warmup, __name__="kernel"), (1,))()
        self.ended.append(job)

    def runs(self, jobs: str) -> list[Callable[[], None]]:
        return [partial(self.run, job.encode()) for job in jobs]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Processes that take jobs: "x" is not done before it is waited for, of "f" there is no end."""
    found = Asked([], [], [])

    def submit(function: object, job: bytes) -> Future[None]:
        assert function is compile_job
        found.submitted.append(job)
        future = Future[None]()
        if job == b"f":
            future.set_exception(OSError("no room"))
        elif job != b"x":
            future.set_result(None)
        return future

    monkeypatch.setattr(compile_ahead, "compile_workers", lambda seconds: submit)
    monkeypatch.setattr(compile_ahead, "JOB_S", 2)
    monkeypatch.setattr(launch, "build_launcher", lambda compiled: None)
    return found


def test_equal_kernels_are_asked_for_once(asked: Asked) -> None:
    """Bug: chains that meet one kernel have it compiled by each process; or a thread waits for a
    kernel before it looks for the next, and 16 processes have work for six (35B-A3B, H200)."""
    with Workers() as workers:
        for _ in range(2):
            with CompileAhead(asked.runs("abababab"), workers) as ahead:
                ahead.wait()
                assert ahead.has_ended()
    assert sorted(asked.submitted) == [b"a", b"b"]
    assert len(asked.ended) == 16 and not asked.here


@pytest.mark.parametrize("has_processes", [False, True])
def test_what_a_process_fails_at_is_compiled_here(
    asked: Asked,
    has_processes: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Bug: a process that fails, or none at all, ends the start, or leaves a kernel to the thread
    that launches it, one after another, without a caller who is told why it cannot be compiled; or
    the log counts kernels that are there among those that failed."""
    caplog.set_level("INFO")
    if not has_processes:
        monkeypatch.setattr(compile_ahead, "compile_workers", lambda seconds: None)
    with Workers() as workers, CompileAhead(asked.runs("af"), workers) as ahead:
        ahead.wait()
    assert sorted(asked.here) == [b"a", b"f"]
    told = "1 kernels are compiled here: no room"
    told = told if has_processes else "2 kernels are compiled here: there are no processes"
    assert told in caplog.messages


def test_kernels_of_later_runs_are_not_waited_for(asked: Asked) -> None:
    """Bug: a start measures blocks behind kernels that only its steps need; or these are asked for
    again, or first, or not before the measurement."""
    with Workers() as workers:
        with CompileAhead(asked.runs("a"), workers, asked.runs("x")) as ahead:
            ahead.wait()
            assert ahead.has_ended() and not workers.ask(b"x").done()
        with CompileAhead(asked.runs("xa"), workers) as ahead:
            assert not ahead.has_ended()
            ahead.wait()  # its time is over, so both runs compile here
    assert sorted(asked.submitted) == sorted(asked.here) == [b"a", b"x"]


@pytest.mark.parametrize(
    ("cores", "jobs", "here"), [(None, 1, 1), (2, 1, 2), (8, 6, 8), (64, 14, 16)]
)
def test_how_many_threads(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, cores: int | None, jobs: int, here: int
) -> None:
    """Bug: what Inductor asks its processes for waits behind all of our kernels; or as many threads
    as cores look for these and take the lock in turn, or two compile what 16 could."""
    made: list[tuple[str, int]] = []

    def pool(num_threads: int, name: str) -> ThreadPoolExecutor:
        made.append((name, num_threads))
        return ThreadPoolExecutor(num_threads, name)

    monkeypatch.setattr(compile_ahead, "ThreadPoolExecutor", pool)
    monkeypatch.setattr(compile_ahead.os, "cpu_count", lambda: cores)
    with Workers() as workers, CompileAhead(asked.runs("f"), workers) as ahead:
        ahead.wait()
    with CompileAhead([]) as ahead:
        ahead.wait()
    ours = "compile-ahead"
    assert made == [("compile-ahead-jobs", jobs), (ours, 2), (ours, here), (ours, here)]


def test_kernels_under_way_are_no_end(asked: Asked) -> None:
    """Bug: what is guessed ahead ends as soon as all kernels are asked for, while the start waits
    for them with nothing to do."""
    with Workers() as workers, CompileAhead(asked.runs("x"), workers) as ahead:
        wait_for(ahead._runs)
        assert asked.ended == [b"x"] and not ahead.has_ended()
        ahead.wait()
        assert ahead.has_ended()


def test_a_start_that_ends_waits_for_no_process(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a start that fails, or has measured its blocks, waits for a kernel that is still under
    way, up to two minutes."""
    begun, under_way = threading.Event(), Future[None]()

    def submit(function: object, job: bytes) -> Future[None]:
        begun.set()
        return under_way

    monkeypatch.setattr(compile_ahead, "compile_workers", lambda seconds: submit)
    with Workers() as workers:
        kernel = workers.ask(b"x")
        assert begun.wait(10)
    assert not kernel.done()
    under_way.set_result(None)


def test_without_processes_threads_compile(asked: Asked) -> None:
    """Bug: who compiles nothing with Inductor has its processes begun; or kernels wait for them."""
    with CompileAhead(asked.runs("ab"), None, asked.runs("x")) as ahead:
        ahead.wait()
    assert sorted(asked.here) == [b"a", b"b"] and not asked.submitted


@pytest.mark.parametrize("has_driver", [False, True])
def test_a_job_builds_the_launcher_too(monkeypatch: pytest.MonkeyPatch, has_driver: bool) -> None:
    """Bug: a start launches 79 kernels whose launchers the C compiler then builds one after
    another, 7 of 22 s (Triton 3.6, H200); or a process that has no driver fails at its kernel."""
    built: list[object] = []

    def build(compiled: object) -> None:
        if not has_driver:
            raise RuntimeError("0 active drivers")
        built.append(compiled)

    job = compile_worker.job_of(Source("kernel", {}, {}, {}), {})
    monkeypatch.setattr(compile_worker.triton, "compile", lambda src, **_: src.fn)
    monkeypatch.setattr(compile_worker, "build_launcher", build)
    compile_job(job)
    assert built == ["kernel"] * has_driver


def test_the_first_kernel_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: of several kernels that cannot be compiled the last one is named, where the others may
    fail for want of the first."""
    monkeypatch.setattr(compile_ahead, "_num_threads", lambda: 1)  # in the order of runs

    def fail(name: str) -> None:
        raise launch.KernelError(f"{name} cannot be compiled")

    runs = [partial(fail, name) for name in ("first", "second", "third")]
    with CompileAhead(runs) as ahead, pytest.raises(launch.KernelError, match=r"^first "):
        ahead.wait()
