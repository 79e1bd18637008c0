"""Leaving speculation: who changes from the drafting lane to a plain one, when and why.

A request leaves where speculation cannot go on (a block would reach past the models' last
position), or should not (`guards` has found that it loses against plain decoding). It goes on in a
lane whose blocks are one row: plain decoding on the same weights and pages, built when it is first
needed. There is no way back: the drafter's context is not kept.

Invariant: a marked request changes lanes only while no drafted step is in flight, so that `start`,
anchor and pages are all there is to hand over. Otherwise a block in flight would be lost, or be
committed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from graphengine.decode.guards import (
    WINDOW,
    AcceptanceWarning,
    FallbackWarning,
    SpeculationGuard,
    warn_caller,
)
from graphengine.decode.lane import Lane, Verified
from graphengine.decode.request import Request

LAST_BLOCK = "a block would reach past the models' last position"


class Fallback:
    """Marks requests of the drafting lane and hands them over."""

    def __init__(self, drafting: Lane, build_plain: Callable[[], Lane]) -> None:
        """Args: build_plain: builds what the requests that leave run on."""
        self._drafting, self._build_plain, config = drafting, build_plain, drafting.config
        self.plain: Lane | None = None
        self.guard: SpeculationGuard | None = None
        if config.acceptance_floor > 0 or config.fallback:
            self.guard = SpeculationGuard(
                acceptance_floor=config.acceptance_floor, may_fall_back=config.fallback
            )
        self._is_judging = False  # a plain step is to be measured before the next step
        self.warn: Callable[[str, type[Warning]], None] = warn_caller
        """Replaced where a thread of its own runs the loop, which a raised warning would end."""

    def reset(self) -> None:
        """Forgets what was due."""
        self._is_judging = False

    # --- who leaves, and why ---

    def leave(self, requests: Collection[Request], reason: str) -> None:
        """Lets running requests go on plainly, for good, once no step of theirs is in flight."""
        for request in requests:
            if request.fallback_reason is None and request.finish_reason is None:
                request.fallback_reason = reason
                self._drafting.must_drain = True

    def leave_at_the_limit(self) -> None:
        """Marks requests whose next block would not fit the models' positions."""
        limit = self._drafting.config.speculation_limit
        if limit is not None:
            self.leave([r for r in self._drafting.running if r.start > limit], LAST_BLOCK)

    def judge(self, verified: list[Verified], num_rows: int, is_alone: bool) -> None:
        """Counts a drafted step that was committed, and from time to time judges.

        Args:
            num_rows: requests that the step ran.
            is_alone: no prompt's rows stood in front of it on the device.
        """
        self.leave_at_the_limit()
        if self.guard is None:
            return
        size = self._drafting.size_for(num_rows)
        if self.plain is not None and self.plain.rows:
            is_alone = False  # a plain step ran in between
        seconds = self._drafting.step_s if is_alone else None
        if not self.guard.observe([v.num_accepted for v in verified], size, seconds):
            return
        if (text := self.guard.warning()) is not None:
            self.warn(text, AcceptanceWarning)
        if not self.guard.needs_plain_time(size):
            self._leave_if_lost(size)
        elif self.plain is None or not self.plain.has_work:
            self._is_judging = self._drafting.must_drain = True

    def _leave_if_lost(self, size: int) -> None:
        reason = self.guard.verdict(size) if self.guard is not None else None
        if reason is not None:
            running = self._drafting.running
            self.leave([r for r in running if r.acceptance.num_steps >= WINDOW], reason)

    # --- the hand-over ---

    def hand_over(self) -> list[Request]:
        """Between two steps, with none in flight: measures and hands over what is due. Returns
        requests that could not go on and have failed."""
        drafting = self._drafting
        assert not drafting.in_flight
        if self._is_judging and self.guard is not None and drafting.rows:
            size = drafting.size_for(len(drafting.running))
            plain = self.plain_lane() if self.guard.needs_plain_time(size) else None
            if plain is not None:
                self.guard.plain_step_s[size] = plain.time_step(drafting.running)
            self._leave_if_lost(size)
        self._is_judging = drafting.must_drain = False
        leaving = [r for r in drafting.running if r.fallback_reason is not None]
        if not leaving:
            return []
        plain = self.plain_lane()
        drafting.leave(leaving)
        if plain is not None:
            plain.join(leaving)
            return []
        for request in leaving:
            request.fail(f"{request.fallback_reason}, and memory lacks to decode plainly")
        return leaving

    def prepare(self) -> Lane:
        """Builds what decodes plainly, if it is not there yet: compiles and captures on a GPU."""
        if self.plain is None:
            self.plain = self._build_plain()
        return self.plain

    def plain_lane(self) -> Lane | None:
        """What decodes plainly, built at its first use; None, with a warning, if memory lacks."""
        try:
            return self.prepare()
        except (MemoryError, RuntimeError) as error:
            if not _lacks_memory(error):
                raise
            if self.guard is not None:
                self.guard.may_fall_back = False
            text = f"no memory to build plain decoding ({str(error).partition('.')[0]}); "
            text += "lower --gpu-memory-utilization, or build it at start-up (prepare_plain_decode)"
            self.warn(text, FallbackWarning)
            return None


def _lacks_memory(error: Exception) -> bool:
    """Graphs and library handles that find no memory raise plain errors of the CUDA runtime."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return "out of memory" in str(error) or "ALLOC_FAILED" in str(error)
