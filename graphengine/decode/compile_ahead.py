"""Our own kernels, compiled beside Inductor, by its processes where there are some.

Triton compiles a kernel at its first launch, so a start that runs one segment after another waits
for each: 73 kernels and 29 s of the 54 s that buckets 1, 8 and 16 of an 8B pair with an FP8 drafter
took with empty caches (one H200). Here every chain runs once without Inductor, beside the caller's
thread, which compiles segments. Other processes are asked for kernels that are not compiled yet,
since Triton holds Python's lock while it reads a kernel's source. A run goes on at once, because
nothing is launched, so all processes have work from the first moment.

A step that is run waits for its kernels. So the caller's thread, too, first goes through the chains
of all buckets with shapes alone, for their segments (`make_segments`), and runs them afterwards. A
start that finds everything in its caches does neither (`run_kept`).

Invariant: such a run computes nothing. No kernel of ours is launched (`kernels.launch`), and of
torch's none that reads or writes a tensor (`_ShapesAlone`): results are memory with any contents,
which only lives as long as the run.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphengine.capture.compile import NotKeptError, kept_only, make_only
from graphengine.capture.torch_internals import (
    TorchDispatchMode,
    compile_workers,
    dispatched_to,
    schema_of,
    tree_leaves,
    tree_map,
)
from graphengine.kernels.compile_worker import (
    Ask,
    AskedError,
    asking,
    compile_job,
    compile_kernel,
)
from graphengine.kernels.launch import KernelError, compile_only, launch_nothing
from graphengine.kernels.triton_internals import bind_kernels

MAX_THREADS = 16
NUM_ASKING = 2  # threads that find out what is to be compiled: more would take the lock in turn
SPARE_WORKERS = 2  # of Inductor's processes: what it asks for itself would wait behind all of ours
WORKERS_S = 30  # until they are there, which import torch first: 8 in the first process of a host
JOB_S = 120  # of a kernel
_LOG = logging.getLogger(__name__)


def _num_threads() -> int:
    return max(1, min(MAX_THREADS, os.cpu_count() or 1))


class Workers:
    """Has Inductor's processes compile kernels, equal ones once; they are started for the first one
    if they do not run yet. Behind `with`, what nobody has begun is dropped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        num_threads = max(1, _num_threads() - SPARE_WORKERS)
        self._pool = ThreadPoolExecutor(num_threads, "compile-ahead-jobs")
        self._submit: Future[Callable[..., Future[None]] | None] | None = None
        self._jobs: dict[bytes, Future[None]] = {}

    def ask(self, job: bytes) -> Future[None]:
        """Of a kernel (`compile_job`), behind those that were asked for before."""
        with self._lock:
            if self._submit is None:
                self._submit = self._pool.submit(compile_workers, WORKERS_S)
            if job not in self._jobs:
                self._jobs[job] = self._pool.submit(self._compile, job, self._submit)
            return self._jobs[job]

    def _compile(self, job: bytes, processes: Future[Callable[..., Future[None]] | None]) -> None:
        submit = processes.result()
        if submit is None:
            raise OSError("there are no processes")
        submit(compile_job, job).result(JOB_S)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class CompileAhead:
    """Makes runs for the sake of their kernels, beside the caller, until `wait`, where a kernel of
    ours that cannot be compiled ends the start. What else fails, such as an operator of torch that
    needs contents, is logged: its kernels are compiled where they are first needed."""

    def __init__(
        self,
        runs: Iterable[Callable[[], object]],
        workers: Workers | None = None,
        later: Iterable[Callable[[], object]] = (),
    ) -> None:
        """Starts them, in their order.

        Args:
            workers: who is asked for kernels; None: this process's threads compile them.
            later: runs behind these whose kernels are asked for, and not waited for here.
        """
        num_threads = _num_threads() if workers is None else NUM_ASKING
        self._pool = ThreadPoolExecutor(num_threads, "compile-ahead")
        self._ended = threading.Event()
        self._failed: list[KernelError] = []
        self._asked: set[Future[None]] = set()
        self._runs: dict[Future[None], Callable[[], object]] = {}
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def ask(asked: set[Future[None]], job: bytes) -> None:
            assert workers is not None
            asked.add(workers.ask(job))
            raise AskedError

        try:
            if self._device is not None:
                bind_kernels(compile_kernel)
            of_runs = None if workers is None else partial(ask, self._asked)
            for run in runs:
                self._runs[self._pool.submit(self._compile, run, of_runs)] = run
            for run in later if workers is not None else ():
                self._pool.submit(self._compile, run, partial(ask, set()))
        except Exception as error:
            _LOG.warning("kernels are compiled one after another: %s", error)
        except BaseException:  # Ctrl-C, which no `with` has seen yet
            self.__exit__()
            raise

    def _compile(self, run: Callable[[], object], ask: Ask | None) -> None:
        mode = _ShapesAlone(self._ended)
        try:
            if self._device is not None:  # a thread begins with device 0
                torch.cuda.set_device(self._device)
            # All belong to a thread.
            with torch.no_grad(), compile_only(), asking(ask), dispatched_to(mode):
                run()
        except _EndedError:
            pass
        except KernelError as error:
            self._failed.append(error)
        except Exception as error:
            _LOG.warning("some kernels are compiled later: %s in %s", error, mode.last)

    def has_ended(self) -> bool:
        """Whether there is nothing to wait for."""
        return all(run.done() for run in self._runs) and all(job.done() for job in self._asked)

    def wait(self) -> None:
        """Waits for all runs and for the kernels that they have asked for. What a process failed at
        is compiled here, where the caller is told why.

        Raises:
            KernelError: of the first that cannot be compiled.
        """
        wait_for(self._runs)
        wait_for(self._asked)
        failures = [error for job in self._asked if (error := job.exception()) is not None]
        if failures:
            _LOG.info("%d kernels are compiled here: %s", len(failures), failures[0])
            self._pool.shutdown(cancel_futures=True)
            self._pool = ThreadPoolExecutor(_num_threads(), "compile-ahead")
            wait_for([self._pool.submit(self._compile, run, None) for run in self._runs.values()])
        if self._failed:
            raise self._failed[0]

    def __enter__(self) -> CompileAhead:
        return self

    def __exit__(self, *error: object) -> None:
        """Ends them, each after the kernel that it is compiling."""
        self._ended.set()
        self._pool.shutdown(cancel_futures=True)


def run_kept(work: Callable[[], object]) -> bool:
    """Calls it, up to where a segment or kernel would have to be compiled. Returns whether it has
    come to its end."""
    if torch.cuda.is_initialized():
        bind_kernels(compile_kernel)
    try:
        with kept_only(), asking(_refuse):
            work()
    except NotKeptError as missing:
        _LOG.info("compiling ahead: %s is not kept", missing)
        return False
    return True


def _refuse(job: bytes) -> None:
    raise NotKeptError("a kernel")


def make_segments(runs: Iterable[Callable[[], object]]) -> None:
    """Finds or compiles the segments that these runs call, and computes nothing. What fails here
    fails again where it is run."""
    mode = _ShapesAlone(threading.Event())
    with torch.no_grad(), launch_nothing(), make_only(), dispatched_to(mode):
        for run in runs:
            try:
                run()
            except Exception as error:
                _LOG.warning("some segments are compiled later: %s in %s", error, mode.last)


class _EndedError(Exception):
    """The start is over: a run need not go on."""


class _ShapesAlone(TorchDispatchMode):
    """torch's operators give tensors of the right kind with any contents, and write nothing.

    Our own operators are called, for their launches. Views are real, so that a matrix keeps the
    address and strides for which a kernel is compiled; so is what is made from no tensor.
    """

    def __init__(self, ended: threading.Event) -> None:
        super().__init__()
        self._ended, self.last = ended, "no operator"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._ended.is_set():
            raise _EndedError
        self.last = str(func)
        kwargs = kwargs or {}
        results = [value.alias_info for value in schema_of(func).returns]
        is_view = any(alias is not None and not alias.is_write for alias in results)
        if is_view or func.namespace == "graphengine":
            return func(*args, **kwargs)
        written = [
            args[place] if place < len(args) else kwargs[argument.name]
            for place, argument in enumerate(schema_of(func).arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if written:
            return written[0] if len(written) == 1 else tuple(written)
        devices = [x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        devices.sort(key=lambda device: device.type == "cpu")  # a scalar may be there
        if devices and kwargs.get("device") is not None:  # a copy to another device
            devices.insert(0, torch.device(kwargs["device"]))
            kwargs = kwargs | {"device": "meta"}
        found = func(*tree_map(_without_memory, args), **tree_map(_without_memory, kwargs))
        return tree_map(lambda x: _with_memory(x, devices[0]), found) if devices else found


def _without_memory(x: Any) -> Any:
    return torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x


def _with_memory(x: Any, device: torch.device) -> Any:
    return torch.empty_like(x, device=device) if isinstance(x, Tensor) and x.is_meta else x
