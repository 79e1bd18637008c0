"""How long the device works on one step, measured with events, without its waiting for the host.

Events see when the stream reaches them, so a gap between two launches is only visible where an
event lies in it, and hundreds of events would slow down what they measure. Here the host is taken
out instead: a kernel that spins holds the stream until the host has queued a whole step, then
`start .. end` spans the step's device work and nothing else. Idle is the wall time of an ordinary
step less this: the time in which the device had nothing queued and waited for the host. Gaps
between kernels that are already queued count as busy; `graphengine profile` splits those.

Invariant: these steps are never among the timed ones, and a hold that ended before the host was
done gives no number instead of a wrong one.
"""

from __future__ import annotations

import statistics

import torch

from graphengine.engine import DecodeLoop
from graphengine.request import Request

NUM_STEPS = 12
NUM_SKIPPED = 3  # the first steps upload the rows and fill the pipeline
# Cycles of the spinning kernel per millisecond: above the highest clock, so holds are never short.
_CYCLES_PER_MS = 2_100_000


def busy_ms(loop: DecodeLoop, requests: list[Request], host_ms: float) -> float | None:
    """Median device time of one step, queued whole before it starts.

    Runs a few steps of `requests`, which are submitted and not yet admitted.

    Args:
        host_ms: host time of a step, about; the hold is several times that.

    Returns:
        Milliseconds; None on the CPU, or where the host was never done before the hold ended.
    """
    if not torch.cuda.is_available() or loop.config.device != "cuda":
        return None
    found: list[float] = []
    loop.admit()
    for index in range(NUM_SKIPPED + NUM_STEPS):
        if any(request.finish_reason is not None for request in requests):
            break
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(int((4 * host_ms + 2) * _CYCLES_PER_MS))
        start.record()
        loop.launch()
        end.record()
        was_held = not start.query()
        loop.collect()
        end.synchronize()
        if index >= NUM_SKIPPED and was_held:
            found.append(start.elapsed_time(end))
    return statistics.median(found) if found else None
