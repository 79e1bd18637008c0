"""The launch-gap report: where the device waits, and for what, step by step.

Why: a step's wall time is bytes moved plus waiting, and only the waiting can be removed by graphs,
fusion or planning ahead. The report says how much there is and at which border.

Rules. Activities are taken in the order of their start. What an activity adds to the time covered
so far is its busy time (overlap counts once); the uncovered time before it is its gap. Both belong
to the step and name of the activity. Class of a gap:

    host               the launch call had not returned when the device fell idle
    seam               else, the border of a CUDA graph: graph | eager, eager | graph, graph | graph
    dense, attention   else, by what comes after the gap

Beside them stands what the host did: the time inside the ranges of each name, once.

Invariant: busy + idle = wall, exactly, for each step and for all; neighbouring steps touch.
Otherwise a gap could be counted twice, or hide between two steps.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from graphengine import names
from graphengine.profiles.trace import (
    BUSY_CLASSES,
    BusyClass,
    HostTime,
    Placed,
    Trace,
    host_times,
    place,
)

GapClass = Literal["dense", "attention", "seam", "host"]
GAP_CLASSES: tuple[GapClass, ...] = ("dense", "attention", "seam", "host")


@dataclass(slots=True)
class Row:
    """One name's share, summed over the reported steps."""

    busy_class: BusyClass
    busy_ns: int = 0
    idle_ns: int = 0
    num_activities: int = 0


@dataclass(slots=True)
class Kernel:
    """One kernel's calls; `total_ns` adds durations, so overlap counts twice."""

    total_ns: int = 0
    num_calls: int = 0


@dataclass(slots=True)
class Report:
    """Sums over the reported steps; `walls_ns` has one entry a step."""

    walls_ns: list[int] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)
    busy_ns: dict[BusyClass, int] = field(default_factory=lambda: dict.fromkeys(BUSY_CLASSES, 0))
    idle_ns: dict[GapClass, int] = field(default_factory=lambda: dict.fromkeys(GAP_CLASSES, 0))
    kernels: dict[str, Kernel] = field(default_factory=dict)
    host: dict[str, HostTime] = field(default_factory=dict)
    outside_ns: int = 0
    timeline: list[tuple[int, int, BusyClass]] = field(default_factory=list)
    """(start, end, class) of the activities of a median step, in ns of that step's wall."""

    @property
    def num_steps(self) -> int:
        """Steps reported: all but the first of the trace, whose begin is unknown."""
        return len(self.walls_ns)

    def per_step_us(self, total_ns: int) -> float:
        """Mean per step, in microseconds."""
        return total_ns / self.num_steps / 1e3

    def numbers(
        self, segment_bytes: Mapping[str, float] | None = None, read_gbps: float = 0.0
    ) -> dict[str, Any]:
        """The report as numbers whose keys end in their unit; means per step.

        Args:
            segment_bytes: bytes of weights that a dense segment reads per step, by name.
            read_gbps: the device's read bandwidth; 0 leaves the floor out.
        """
        us = self.per_step_us
        total_busy, total_idle = sum(self.busy_ns.values()), sum(self.idle_ns.values())
        by_name: dict[str, dict[str, float]] = {}
        for name, row in self.rows.items():
            by_name[name] = {
                "busy_us": us(row.busy_ns),
                "idle_us": us(row.idle_ns),
                "num_activities": row.num_activities / self.num_steps,
            }
            num_bytes = (segment_bytes or {}).get(name, 0.0)
            if num_bytes and row.busy_ns:
                by_name[name]["read_bytes"] = num_bytes
                by_name[name]["achieved_gbps"] = num_bytes / us(row.busy_ns) / 1e3
                if read_gbps > 0:
                    by_name[name]["floor_us"] = num_bytes / read_gbps / 1e3
        kernels = {
            name: {
                "total_us": us(kernel.total_ns),
                "mean_us": kernel.total_ns / kernel.num_calls / 1e3,
                "num_calls": kernel.num_calls / self.num_steps,
            }
            for name, kernel in self.kernels.items()
        }
        return {
            "num_steps": self.num_steps,
            "wall_mean_us": us(sum(self.walls_ns)),
            "wall_p50_us": statistics.median(self.walls_ns) / 1e3,
            "busy_mean_us": us(total_busy),
            "idle_mean_us": us(total_idle),
            "idle_percent": 100 * total_idle / sum(self.walls_ns),
            "busy_by_class": {f"{kind}_us": us(ns) for kind, ns in self.busy_ns.items()},
            "idle_by_class": {f"{kind}_us": us(ns) for kind, ns in self.idle_ns.items()},
            "host_by_name": {
                name: {"host_us": us(found.ns), "num_ranges": found.num_ranges / self.num_steps}
                for name, found in self.host.items()
            },
            "outside_us": self.outside_ns / 1e3,
            "by_name": by_name,
            "kernels": kernels,
            "step_walls_us": [wall / 1e3 for wall in self.walls_ns],
            **({"read_gbps": read_gbps} if read_gbps > 0 else {}),
        }


def report(trace: Trace, unit: str = names.STEP) -> Report:
    """Adds a trace up by the rules above.

    Args:
        unit: name of the host's range that is a step.

    Raises:
        ValueError: the trace has no device activity, none inside such a range, or no time.
    """
    placed = place(trace, unit)
    if not placed:
        raise ValueError(
            "the trace has no device activity; record CUDA (nsys: -t cuda,nvtx) around decode steps"
        )
    steps = sorted({p.step for p in placed if p.step is not None})
    if not steps:
        raise ValueError(
            f'the trace has no device activity inside a "{unit}" range; turn the ranges on '
            "(--nvtx) and record them (nsys: -t cuda,nvtx); steps or, with --prefill, prefills"
        )
    # When the first step began to wait is unknown, so it is left out; where there is no other, it
    # counts from its first activity.
    result = Report()
    walls: dict[int, int] = dict.fromkeys(steps[1:] or steps, 0)
    spans: dict[int, list[tuple[int, int, BusyClass]]] = defaultdict(list)
    covered_ns, before = placed[0].activity.start_ns, None
    for p in placed:
        start_ns, end_ns = p.activity.start_ns, p.activity.end_ns
        gap_ns = max(start_ns - covered_ns, 0)
        busy_ns = max(end_ns - max(start_ns, covered_ns), 0)
        if p.step in walls:
            if gap_ns:
                result.idle_ns[_gap_class(before, p, covered_ns)] += gap_ns
            _add(result, p, gap_ns, busy_ns)
            begin_ns = covered_ns - walls[p.step]
            spans[p.step].append((start_ns - begin_ns, end_ns - begin_ns, p.busy_class))
            walls[p.step] += gap_ns + busy_ns
        elif p.step is None:
            result.outside_ns += gap_ns + busy_ns
        covered_ns, before = max(covered_ns, end_ns), p
    result.walls_ns = list(walls.values())
    if not sum(result.walls_ns):
        raise ValueError("the trace's steps take no time at all; record it again")
    median = statistics.median_low(result.walls_ns)
    result.timeline = spans[next(step for step, wall in walls.items() if wall == median)]
    for (step, name), found in host_times(trace, unit).items():
        if step in walls:
            known = result.host.get(name, HostTime(0, 0))
            total = HostTime(known.ns + found.ns, known.num_ranges + found.num_ranges)
            result.host[name] = total
    result.kernels = dict(sorted(result.kernels.items(), key=lambda item: -item[1].total_ns))
    return result


def _add(result: Report, p: Placed, gap_ns: int, busy_ns: int) -> None:
    """Books one activity under its name, class and kernel. Mutates: result."""
    result.busy_ns[p.busy_class] += busy_ns
    row = result.rows.setdefault(p.name, Row(p.busy_class))
    row.idle_ns += gap_ns
    row.busy_ns += busy_ns
    row.num_activities += 1
    kernel = result.kernels.setdefault(p.activity.name, Kernel())
    kernel.total_ns += p.activity.end_ns - p.activity.start_ns
    kernel.num_calls += 1


def _gap_class(before: Placed | None, after: Placed, idle_since_ns: int) -> GapClass:
    launch = after.activity.launch
    if launch is not None and launch.end_ns > idle_since_ns:
        return "host"
    earlier = before.activity.launch if before is not None else None
    is_graph = any(call is not None and call.is_graph for call in (launch, earlier))
    if launch != earlier and is_graph:
        return "seam"
    if after.busy_class == "other":
        return "host"
    return "attention" if after.busy_class == "attention" else "dense"
