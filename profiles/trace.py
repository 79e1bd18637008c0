"""What a profiler recorded, in one form for all tools, and which step each piece of it belongs to.

A device activity (kernel, copy, or a whole graph) is placed by the host call that launched it: the
innermost named range around that call gives its name, the "step" range its step. So names survive
CUDA graphs, which replay no ranges: the range lies around the replay.

Invariant: placing never looks at device timestamps, only at the launch. Work that runs late, while
the host already queues the next step, still belongs to the step that asked for it.

A chain captured as one graph has one launch and one range, and so has a whole step. With node
tracing its kernels are told apart by their order and by the names of attention, argmax, embedding
and accept kernels: behind the target's first argmax, which ends its last segment, begins `accept`.
(A step that draws its tokens runs that argmax in `accept`; here it is the segment's there too. A
tap of the last layer, which no published drafter has, would be booked to `accept`.)
With graph tracing it is one activity.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from graphengine import names

BusyClass = Literal["dense", "attention", "chain", "other"]
"""chain: a whole chain as one graph; other: copies and whatever has no step of a chain."""

BUSY_CLASSES: tuple[BusyClass, ...] = ("dense", "attention", "chain", "other")
OUTSIDE = "outside"

# FlashInfer's kernels, and those of kernels/block_attention.py.
_ATTENTION_KERNEL = re.compile(
    r"Batch(Prefill|Decode)|MergeState|PagedKV|fmha|flash_fwd|attention", re.IGNORECASE
)
_ARGMAX_KERNEL = re.compile(r"_argmax_kernel")  # an Inductor kernel may be named after the op
_ACCEPT_KERNEL = re.compile(r"accept_and_advance")
# A forward's first kernel: Inductor's, which names what it fuses, or torch's own.
_EMBEDDING_KERNEL = re.compile(r"embedding|gather|index_?select", re.IGNORECASE)


class HostRange(NamedTuple):
    """A named range of one host thread."""

    name: str
    start_ns: int
    end_ns: int
    thread: int


class Launch(NamedTuple):
    """The host call that queued device work; a graph's activities share one."""

    correlation: int
    start_ns: int
    end_ns: int
    thread: int
    is_graph: bool


class Activity(NamedTuple):
    """Something the device did. `launch` is None when its call was not recorded."""

    name: str
    start_ns: int
    end_ns: int
    launch: Launch | None
    is_whole_graph: bool = False


class Trace(NamedTuple):
    """What a tool recorded, in any order; host and device share one clock."""

    activities: list[Activity]
    ranges: list[HostRange]


class Placed(NamedTuple):
    """An activity with its place; `step` counts "step" ranges from 0, None is outside of all."""

    activity: Activity
    name: str
    busy_class: BusyClass
    step: int | None


def place(trace: Trace) -> list[Placed]:
    """Activities in the order of their start, each with its step, name and class."""
    return list(_place(trace))


def _place(trace: Trace) -> Iterator[Placed]:
    paths = _paths(trace)
    chains: dict[Launch, _ChainNames] = {}
    for activity in sorted(trace.activities, key=lambda a: (a.start_ns, a.end_ns)):
        launch = activity.launch
        path, step = paths[launch] if launch is not None else ([], None)
        kind = busy_class(path)
        name = path[-1] if path else OUTSIDE
        if kind == "chain" and launch is not None and not activity.is_whole_graph:
            name, kind = chains.setdefault(launch, _ChainNames(name)).place(activity.name)
        elif kind == "other" and path:
            name = f"host.{name}"  # "accept" is also a step of the chain
        yield Placed(activity, name, kind, step)


def busy_class(path: Sequence[str]) -> BusyClass:
    """Class of device work launched inside these ranges (outermost first)."""
    if not path:
        return "other"
    name = path[-1]
    if name == names.ACCEPT:  # a step of the target's chain, or, in old traces, a host's phase
        return "dense" if {"verify", "decode", names.SPECULATE} & set(path) else "other"
    if name in names.CHAINS:
        return "chain"
    kind = names.step_class(name)
    return "other" if kind == "host" else kind


def _paths(trace: Trace) -> dict[Launch, tuple[list[str], int | None]]:
    """Launch -> (names of the ranges around it, outermost first; index of its step)."""
    in_order = sorted(trace.ranges, key=lambda r: (r.start_ns, -r.end_ns))
    steps = (entry for entry in in_order if entry.name == names.STEP)
    indices = {entry: index for index, entry in enumerate(steps)}
    by_thread: dict[int, list[HostRange]] = defaultdict(list)
    for entry in reversed(in_order):
        by_thread[entry.thread].append(entry)  # the next one is at the end
    stacks: dict[int, list[HostRange]] = defaultdict(list)
    launches = {a.launch for a in trace.activities if a.launch is not None}
    found: dict[Launch, tuple[list[str], int | None]] = {}
    for launch in sorted(launches, key=lambda launch: launch.start_ns):
        following, stack = by_thread[launch.thread], stacks[launch.thread]
        while following and following[-1].start_ns <= launch.start_ns:
            entry = following.pop()
            while stack and stack[-1].end_ns <= entry.start_ns:
                stack.pop()
            stack.append(entry)
        while stack and stack[-1].end_ns < launch.start_ns:
            stack.pop()
        step = next((indices[entry] for entry in stack if entry.name == names.STEP), None)
        found[launch] = ([entry.name for entry in stack], step)
    return found


class _ChainNames:
    """Tells the kernels of a chain, or of a whole step, that is one graph apart, in the order of
    execution."""

    def __init__(self, graph: str) -> None:
        self._is_step = self._is_drafting = graph == names.SPECULATE
        self._chain, self._layer = "draft" if self._is_step else graph, 0
        self._after_attention = False
        # argmax has run; something behind the target's has; accept has
        self._has_chosen = self._is_accepting = self._has_accepted = False

    def place(self, kernel: str) -> tuple[str, BusyClass]:
        """Name and class of the graph's next kernel."""
        if _ATTENTION_KERNEL.search(kernel):
            self._after_attention = True
            return names.attention_name(self._chain, self._layer), "attention"
        if self._after_attention:
            self._layer, self._after_attention = self._layer + 1, False
        if self._is_step and self._has_accepted:
            return names.DRAFT_CONTEXT, "dense"
        if _ARGMAX_KERNEL.search(kernel):
            self._has_chosen = True
        elif self._is_drafting and self._has_chosen and _EMBEDDING_KERNEL.search(kernel):
            self._chain, self._layer = "verify", 0
            self._is_drafting = self._has_chosen = False
        if _ACCEPT_KERNEL.search(kernel):
            self._has_chosen = self._has_accepted = True
        if self._has_chosen and self._chain in ("verify", "decode"):
            self._is_accepting |= not _ARGMAX_KERNEL.search(kernel)
        if self._is_accepting:
            return names.ACCEPT, "dense"
        return names.dense_name(self._chain, self._layer), "dense"
