"""The same report where there is no device: the host's clock around each named range.

On the CPU a step of a chain runs inside its range, so the range itself is the activity, and what
lies between two of them (planning, committing, Python) is idle of class `host`.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from graphengine import names
from graphengine.profiles.trace import Activity, HostRange, Launch, Trace, busy_class


class HostRecorder:
    """Takes the time of every range of the calling thread; pass it to `names.enable`."""

    def __init__(self) -> None:
        self._open: list[tuple[str, int]] = []
        self._trace = Trace([], [])

    def get_event_attributes(self, message: str, color: str) -> str:
        """The name is all that is kept."""
        return message

    def push_range(self, attributes: str) -> None:
        """Opens a range. Mutates: self."""
        self._open.append((attributes, time.perf_counter_ns()))

    def pop_range(self) -> None:
        """Closes the innermost range; a chain's step becomes an activity. Mutates: self."""
        end_ns = time.perf_counter_ns()
        is_work = busy_class([name for name, _ in self._open]) in ("dense", "attention")
        name, start_ns = self._open.pop()
        self._trace.ranges.append(HostRange(name, start_ns, end_ns, 0))
        if is_work:
            launch = Launch(len(self._trace.activities), start_ns, start_ns, 0, False)
            self._trace.activities.append(Activity(name, start_ns, end_ns, launch))

    def trace(self) -> Trace:
        """What was recorded so far."""
        return self._trace


@contextmanager
def record(recorder: HostRecorder) -> Iterator[None]:
    """Records the ranges of what runs inside. Mutates: recorder."""
    names.enable(recorder)
    try:
        yield
    finally:
        names.disable()
