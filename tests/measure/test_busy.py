"""measure/busy.py on a made-up GPU: a clock, a queue, and a loop that fills it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphengine.decode.loop import Watch
from graphengine.measure import busy as bench_busy

COMMIT_MS = 0.2
CYCLES_PER_MS = 1_500_000  # below what the hold is computed with: it takes longer than asked


class Device:
    """Times in milliseconds: `now` of the host, `free` when the stream has run all it was given."""

    now = free = 0.0

    def queue(self, milliseconds: float) -> float:
        self.free = max(self.now, self.free) + milliseconds
        return self.free

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)


class Loop:
    """Steps of `host_ms`, then `device_ms`, with up to `depth` in flight."""

    config = SimpleNamespace(device="cuda")

    def __init__(self, device: Device, depth: int, host_ms: float, device_ms: float) -> None:
        self.device, self.depth = device, depth
        self.host_ms, self.device_ms = host_ms, device_ms
        self.in_flight: list[float] = []
        self.num_steps = 0

    def run(self, watch: Watch) -> Iterator[list[Any]]:
        while True:
            watch.launching()
            self.launch()
            watch.launched()
            yield []
            self.collect()
            watch.collected([])

    def launch(self) -> None:
        while len(self.in_flight) < self.depth:
            self.device.now += self.host_ms
            self.in_flight.append(self.device.queue(self.device_ms))

    def collect(self) -> None:
        self.device.wait(self.in_flight.pop(0))
        self.device.now += COMMIT_MS
        self.num_steps += 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = made.queue(0.0)

        def query(self) -> bool:
            return made.now >= self.at

        def synchronize(self) -> None:
            made.wait(self.at)

        def elapsed_time(self, end: Event) -> float:
            assert made.now >= end.at, "read before it was recorded"
            return end.at - self.at

    def hold(cycles: int) -> None:
        made.queue(cycles / CYCLES_PER_MS)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", hold)
    monkeypatch.setattr(bench_busy.time, "perf_counter", lambda: made.now / 1e3)
    return made


@pytest.mark.parametrize(
    ("depth", "host_ms", "device_ms", "wall_ms"),
    [
        (1, 0.5, 5.0, 5.7),  # the device waits for launch and commit
        (2, 0.5, 5.0, 5.0),  # it never waits
        (2, 4.0, 1.0, 4.2),  # the host is slower
    ],
)
def test_busy_over_wall(
    device: Device, depth: int, host_ms: float, device_ms: float, wall_ms: float
) -> None:
    """Bug: the hold is part of busy or of wall, or the steps that fill the pipeline are."""
    loop: Any = Loop(device, depth, host_ms, device_ms)
    found = bench_busy.busy_fraction(loop, [], host_ms + COMMIT_MS)
    assert found == pytest.approx(device_ms / wall_ms, rel=1e-6)
    assert loop.num_steps == bench_busy.NUM_SKIPPED + bench_busy.NUM_STEPS


def test_a_step_that_a_hold_delays_is_not_free(device: Device) -> None:
    """Bug: the wall time of the step behind a hold counts, so busy is compared with too much and
    idle is reported where there is none."""

    class Uneven(Loop):
        """Two steps behind each hold there is a short one, then a long one."""

        def launch(self) -> None:
            number = (self.num_steps + len(self.in_flight)) % bench_busy.PERIOD
            self.device_ms = {2: 4.0, 3: 6.0}.get(number, 5.0)
            super().launch()

    loop: Any = Uneven(device, 2, 0.5, 5.0)
    found = bench_busy.busy_fraction(loop, [], 0.5 + COMMIT_MS)
    assert found == pytest.approx(1.0, rel=1e-6)


def test_a_hold_that_was_too_short_gives_nothing(device: Device) -> None:
    """Bug: the gaps of a step that began before it was queued whole are called busy."""
    loop: Any = Loop(device, 2, 100.0, 5.0)
    assert bench_busy.busy_fraction(loop, [], 1.0) is None


def test_requests_that_end_early(device: Device) -> None:
    """Bug: steps of a batch that is no longer full are counted, or the first held steps, which
    fill the pipeline, are."""
    loop: Any = Loop(device, 2, 0.5, 5.0)

    class Short:
        @property
        def finish_reason(self) -> str | None:
            return "length" if loop.num_steps >= bench_busy.NUM_SKIPPED else None

    requests: Any = [Short()]
    assert bench_busy.busy_fraction(loop, requests, 1.0) is None
    assert loop.num_steps == bench_busy.NUM_SKIPPED
