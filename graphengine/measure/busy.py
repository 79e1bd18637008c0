"""How long the device works on one step, measured with events, without its waiting for the host.

Hundreds of events, one for each gap between launches, would slow down what they measure. Here the
host is taken out instead: a kernel that spins holds the stream until the host has queued a whole
step, then `start .. end` spans the step's device work and nothing else. Idle is the wall time of an
ordinary step less this: the device had nothing queued and waited for the host. Gaps between kernels
that are already queued count as busy; `graphengine profile` splits those.

Only every fourth step is held, and the wall time that busy is compared with is that of free steps
between them: a hold cools the GPU, which at its power limit then clocks higher. (Held every step,
an H200 at batch 16 showed 13 % idle where there was under 1:
profiles/results/2026-11-22-h200-8b-full-cold.json, -8b-batches.json.)

Invariant: these steps are never among the timed ones, and a hold that ended before the host was
done gives no number instead of a wrong one.
"""

from __future__ import annotations

import statistics
import time

import torch

from graphengine.capture.torch_internals import keep_gpu_busy
from graphengine.decode.loop import DecodeLoop, StepOutput, Watch
from graphengine.decode.request import Request

NUM_STEPS = 48
NUM_SKIPPED = 4  # the first steps upload the rows and fill the pipeline
PERIOD = 4  # a hold delays its own step's results, or the next one's; the two after it are free
# Cycles of the spinning kernel per millisecond: above the highest clock, so holds are never short.
_CYCLES_PER_MS = 2_100_000


def busy_fraction(loop: DecodeLoop, requests: list[Request], host_ms: float) -> float | None:
    """Device time of a step, queued whole before it starts, over the wall time of a step.

    Args:
        requests: submitted and not yet admitted; some steps of them are run.
        host_ms: host time of a step, about; the hold is several times that.

    Returns:
        Ratio of the medians; None on the CPU, where the host was never done before the hold
        ended, or where the requests end too soon.
    """
    if not torch.cuda.is_available() or loop.config.device != "cuda":
        return None
    held = _Held(host_ms)
    for _ in loop.run(held):
        is_over = any(request.finish_reason is not None for request in requests)
        if is_over or held.index >= NUM_SKIPPED + NUM_STEPS:
            break
    if not held.busy_ms or not held.wall_ms:
        return None
    return statistics.median(held.busy_ms) / statistics.median(held.wall_ms)


class _Held(Watch):
    """Holds every PERIOD-th step and times its device work; times the free ones between."""

    def __init__(self, host_ms: float) -> None:
        self.busy_ms, self.wall_ms, self.index = list[float](), list[float](), 0
        self._hold_cycles = int((4 * host_ms + 2) * _CYCLES_PER_MS)
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._was_held = False
        self._before = time.perf_counter()

    def launching(self) -> None:
        if self.index % PERIOD == 0:
            keep_gpu_busy(self._hold_cycles)
        self._start.record()

    def launched(self) -> None:
        self._end.record()
        self._was_held = self.index % PERIOD == 0 and not self._start.query()

    def collected(self, outputs: list[StepOutput]) -> None:
        now = time.perf_counter()
        if self.index >= NUM_SKIPPED:
            if self._was_held:
                self._end.synchronize()
                self.busy_ms.append(self._start.elapsed_time(self._end))
            elif self.index % PERIOD >= 2:
                self.wall_ms.append((now - self._before) * 1e3)
        self._before, self.index = now, self.index + 1
