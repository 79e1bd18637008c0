"""Our own kernels, compiled on threads beside Inductor.

Triton compiles a kernel at its first launch, so a start that runs one segment after another waits
for each: 73 kernels and 29 s of the 54 s that buckets 1, 8 and 16 of an 8B pair with an FP8 drafter
took with empty caches (one H200). Here every chain runs once without Inductor, several at a time,
while the caller's thread compiles segments. Triton holds Python's lock only while it reads a
kernel's source.

Invariant: nothing that outlives a start is written but K/V of the null page; the chains are over
buffers of their own, in which every row is padding.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

MAX_THREADS = 8


class CompileAhead:
    """Runs that compile kernels at their first launch, on threads, until `wait`.

    What fails in them is left to fail where the kernel is needed, where it has a caller.
    """

    def __init__(self, runs: Iterable[Callable[[], object]], device: torch.device) -> None:
        """Starts them, in their order."""
        waiting = list(runs)
        num_threads = max(1, min(MAX_THREADS, (os.cpu_count() or 2) // 2))
        self._pool = ThreadPoolExecutor(num_threads, "compile-ahead")
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))  # for what they read
        for run in waiting:
            self._pool.submit(self._run, run)

    def _run(self, run: Callable[[], object]) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(self._stream):  # both belong to a thread
                run()
        except Exception:
            logging.getLogger(__name__).debug("a run ahead failed", exc_info=True)

    def wait(self) -> None:
        """Until all have run; before a capture, which another thread's allocation would end."""
        self._pool.shutdown()
        if self._stream is not None:
            self._stream.synchronize()
            torch.cuda.empty_cache()  # of memory that only this stream may use again
            self._stream = None

    def __enter__(self) -> CompileAhead:
        return self

    def __exit__(self, *error: object) -> None:
        """Drops those that have not begun."""
        self._pool.shutdown(cancel_futures=True)
