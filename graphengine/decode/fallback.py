"""Leaving speculation: a second decode loop, and when a request is handed over to it.

A request leaves where speculation cannot go on (a block would reach past the models' last
position), or should not (`guards` has found that it loses against plain decoding). It then runs in
a loop of the same kind whose blocks are one row: plain decoding on the same weights and pages,
built when it is first needed. There is no way back: the drafter's context is not kept.

Why beside the engine and not in it: a step needs to know nothing of this. `FallbackLoop` adds to
what `DecodeLoop` does, at three places:

    admit      + mark prompts that are too long for a block behind them; both loops share the rows
    launch     + before a changed batch is loaded: measure plain steps, hand marked requests over
               + behind the drafted steps: queue plain ones
    collect    + after a drafted step is committed: count, judge, mark; then commit a plain step

Invariant: a marked request changes loops only while no drafted step is in flight, so that `start`,
anchor and pages are all there is to hand over. Otherwise a block in flight would be lost, or be
committed twice.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable

import torch

from graphengine.config.engine import EngineConfig
from graphengine.decode.buckets import Bucket
from graphengine.decode.buffers import StepBuffers
from graphengine.decode.guards import WINDOW, AcceptanceWarning, FallbackWarning, SpeculationGuard
from graphengine.decode.kvcache import PageAllocator
from graphengine.decode.loop import DecodeLoop, StepOutput
from graphengine.decode.prefill import Prefill
from graphengine.decode.request import Request

# Plain steps measured to judge speculation, after one that is not counted.
NUM_PROBES = 5
LAST_BLOCK = "a block would reach past the models' last position"


class PlainLoop(DecodeLoop):
    """Decodes plainly what a `FallbackLoop` hands over; nothing is submitted to it."""

    def adopt(self, requests: list[Request]) -> None:
        """Takes over prefilled requests; no step of theirs is in flight."""
        self.running += requests
        self._bucket = None

    def time_step(self, requests: list[Request]) -> float:
        """Median seconds of a step of these requests, without effect on them: what it writes lies
        behind their lengths, and nothing is committed. Waits for the device; the loop is idle."""
        assert not self.has_work
        self.running, seconds = list(requests), []
        for _ in range(1 + NUM_PROBES):
            bucket = self._load()
            began = time.perf_counter()
            self._queue_step(bucket)
            self.wait()
            seconds.append(time.perf_counter() - began)
            self._in_flight.popleft()
        self.running, self._bucket = [], None
        return statistics.median(seconds[1:])


class FallbackLoop(DecodeLoop):
    """A drafting loop that its requests can leave; driven like any `DecodeLoop`.

    `running` are the drafted requests alone; `plain` has the others.
    """

    def __init__(
        self,
        config: EngineConfig,
        buckets: dict[int, Bucket],
        buffers: StepBuffers,
        prefill: Prefill,
        allocator: PageAllocator,
        mask_token_id: int,
        build_bucket: Callable[[int], Bucket],
        build_plain: Callable[[], tuple[dict[int, Bucket], StepBuffers]],
    ) -> None:
        """
        Args:
            build_plain: builds what the requests that leave run on.
        """
        super().__init__(config, buckets, buffers, prefill, allocator, mask_token_id, build_bucket)
        self._build_plain = build_plain
        self.plain: PlainLoop | None = None
        self.guard: SpeculationGuard | None = None
        if config.acceptance_floor > 0 or config.fallback:
            self.guard = SpeculationGuard(
                acceptance_floor=config.acceptance_floor, may_fall_back=config.fallback
            )
        self._failed: list[StepOutput] = []  # ended between two steps, still to be given out
        self._is_judging = False  # a plain step is to be measured before the next step
        self._launch_s: float | None = None  # of the last step, if nothing but it was launched
        self._wait_s = 0.0

    # --- the loop, with plain decoding beside it ---

    def admit(self) -> list[StepOutput]:
        """As `DecodeLoop.admit`; prompts that no block can follow leave before their first step."""
        outputs = super().admit()
        self._leave_at_the_limit([output.request for output in outputs])
        return outputs

    @property
    def _num_free_rows(self) -> int:
        return super()._num_free_rows - (len(self.plain.running) if self.plain is not None else 0)

    def cancel(self, request: Request) -> None:
        """As `DecodeLoop.cancel`, in whichever loop the request runs."""
        super().cancel(request)
        if self.plain is not None and not self.plain._in_flight:
            self.plain._retire()

    def launch(self) -> None:
        """Queues drafted steps, then plain ones; hands requests over first, where that is due."""
        began = time.perf_counter()
        is_steady, num_before = self._bucket is not None, len(self._in_flight)
        if self.running and self._bucket is None and not self._in_flight:
            self._settle()
        super().launch()
        is_steady = is_steady and len(self._in_flight) == num_before + 1
        self._launch_s = time.perf_counter() - began if is_steady else None
        if self.plain is not None:
            self.plain.launch()

    def wait(self) -> None:
        """Waits for the oldest drafted step in flight."""
        began = time.perf_counter()
        super().wait()
        self._wait_s = time.perf_counter() - began

    def collect(self) -> list[StepOutput]:
        """Commits the oldest step in flight of each loop."""
        outputs, self._failed = self._failed + super().collect(), []
        return outputs + self.plain.collect() if self.plain is not None else outputs

    def _commit(
        self, requests: list[Request], target_ids: list[list[int]], num_accepted: list[int]
    ) -> list[StepOutput]:
        live = [row for row, request in enumerate(requests) if request.finish_reason is None]
        outputs = super()._commit(requests, target_ids, num_accepted)
        self._leave_at_the_limit(self.running)
        if self.guard is not None:
            seconds = None if self._launch_s is None else self._launch_s + self._wait_s
            if self.plain is not None and self.plain.running:
                seconds = None  # a plain step may have run in between
            self._judge(self.guard, len(requests), [num_accepted[row] for row in live], seconds)
        return outputs

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or anything is still to be collected."""
        own = super().has_work or bool(self._failed)
        return own or (self.plain is not None and self.plain.has_work)

    def reset(self) -> None:
        """As `DecodeLoop.reset`, for both loops."""
        super().reset()
        if self.plain is not None:
            self.plain.reset()
        self._is_judging, self._failed = False, []

    # --- who leaves, and why ---

    def _leave_at_the_limit(self, requests: list[Request]) -> None:
        """Marks requests whose next block would not fit the models' positions."""
        limit = self.config.speculation_limit
        if limit is not None:
            self.leave_speculation([r for r in requests if r.start > limit], LAST_BLOCK)

    def leave_speculation(self, requests: list[Request], reason: str) -> None:
        """Lets running requests go on plainly, for good, once no step of theirs is in flight."""
        for request in requests:
            if request.fallback_reason is None and request.finish_reason is None:
                request.fallback_reason = reason
                self._bucket = None  # handed over when nothing is in flight

    def _judge(
        self,
        guard: SpeculationGuard,
        num_rows: int,
        num_accepted: list[int],
        seconds: float | None,
    ) -> None:
        size = self._size_for(num_rows)
        if not guard.observe(num_accepted, size, seconds):
            return
        if (text := guard.warning()) is not None:
            warnings.warn(text, AcceptanceWarning, stacklevel=5)
        if guard.needs_plain_time(size):
            if self.plain is None or not self.plain.has_work:
                self._is_judging, self._bucket = True, None
        else:
            self._fall_back(guard, size)

    def _fall_back(self, guard: SpeculationGuard, size: int) -> None:
        reason = guard.verdict(size)
        if reason is not None:
            judged = [r for r in self.running if r.acceptance.num_steps >= WINDOW]
            self.leave_speculation(judged, reason)

    # --- the hand-over ---

    def _settle(self) -> None:
        """Between two batches, with nothing in flight: measures and hands over what is due."""
        assert not self._in_flight
        if self._is_judging and self.guard is not None:
            self._is_judging = False
            size = self._size_for(len(self.running))
            plain = self._plain_loop() if self.guard.needs_plain_time(size) else None
            if plain is not None:
                self.guard.plain_step_s[size] = plain.time_step(self.running)
            self._fall_back(self.guard, size)
        leaving = [r for r in self.running if r.fallback_reason is not None]
        if not leaving:
            return
        plain = self._plain_loop()
        if plain is not None:
            self.running = [r for r in self.running if r.fallback_reason is None]
            plain.adopt(leaving)
        else:
            for request in leaving:
                request.fail(f"{request.fallback_reason}, and memory lacks to decode plainly")
                self._failed.append(StepOutput(request, []))
            self._retire()

    def prepare_plain_decode(self) -> None:
        """Builds what decodes plainly, if it is not there yet: compiles and captures on a GPU."""
        if self.plain is None:
            buckets, buffers = self._build_plain()
            self.plain = PlainLoop(self.config, buckets, buffers, self._prefill, self.allocator, 0)

    def _plain_loop(self) -> PlainLoop | None:
        """What decodes plainly, built at its first use; None, with a warning, if memory lacks."""
        try:
            self.prepare_plain_decode()
        except (MemoryError, RuntimeError) as error:
            if not _lacks_memory(error):
                raise
            if self.guard is not None:
                self.guard.may_fall_back = False
            text = f"no memory to build plain decoding ({str(error).partition('.')[0]}); "
            text += "lower --gpu-memory-utilization, or build it at start-up (prepare_plain_decode)"
            warnings.warn(text, FallbackWarning, stacklevel=2)
        return self.plain


def _lacks_memory(error: Exception) -> bool:
    """Graphs and library handles that find no memory raise plain errors of the CUDA runtime."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return "out of memory" in str(error) or "ALLOC_FAILED" in str(error)
