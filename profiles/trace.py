"""What a profiler recorded, in one form for all tools, and which step each piece of it belongs to.

A device activity (kernel, copy, or a whole graph) is placed by the host call that launched it: the
innermost named range around that call gives its name, the "step" range its step; of prefills the
"prefill" range. So names survive CUDA graphs, which replay no ranges: the range lies around the
replay.

Invariant: placing never looks at device timestamps, only at the launch. Work that runs late, while
the host already queues the next step, still belongs to the step that asked for it.

A chain captured as one graph has one launch and one range, and so have a whole step and a whole
chunk of a prefill. With node tracing its kernels are told apart by their order and by the names of
attention, recurrence, argmax, embedding and accept kernels: behind the target's first argmax, which
ends its last segment, begins `accept`, of a chunk `prefill.context`. (A step that draws its tokens
runs that argmax in `accept`; here it is the segment's there too. A tap of the last layer, which no
published drafter has, would be booked to `accept`. A chunk whose prompt goes on has no argmax: its
context is booked to its last segment.)
With graph tracing it is one activity.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from graphengine import names

BusyClass = Literal["dense", "attention", "chain", "other"]
"""chain: a whole chain as one graph; other: copies and whatever has no step of a chain."""

BUSY_CLASSES: tuple[BusyClass, ...] = ("dense", "attention", "chain", "other")
OUTSIDE = "outside"
NO_END = 1 << 62  # of a range that was open when the recording ended

# FlashInfer's kernels, and those of kernels/block_attention.py.
_ATTENTION_KERNEL = re.compile(
    r"Batch(Prefill|Decode)|MergeState|PagedKV|fmha|flash_fwd|attention", re.IGNORECASE
)
# Those of kernels/gated_delta.py and gated_delta_prefill.py, and the gate that may stand behind
# them or behind an attention.
_DELTA_KERNEL = re.compile(r"^(verify|step|convolve|(delta_)?(prepare|scan))_kernel")
_GATE_KERNEL = re.compile(r"^_output_gate_kernel")
_ARGMAX_KERNEL = re.compile(r"_argmax_kernel")  # an Inductor kernel may be named after the op
_COPY_KERNEL = re.compile(r"copy", re.IGNORECASE)
_ACCEPT_KERNEL = re.compile(r"accept_and_advance")
# A forward's first kernel: Inductor's, which names what it fuses, or torch's own.
_EMBEDDING_KERNEL = re.compile(r"embedding|gather|index_?select", re.IGNORECASE)


class HostRange(NamedTuple):
    """A named range of one host thread."""

    name: str
    start_ns: int
    end_ns: int
    thread: int


class HostTime(NamedTuple):
    """The host's time in ranges of one name in one step."""

    ns: int
    num_ranges: int


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
    """An activity with its place; `step` counts steps' ranges from 0, None is outside of all."""

    activity: Activity
    name: str
    busy_class: BusyClass
    step: int | None


def place(trace: Trace, unit: str = names.STEP) -> list[Placed]:
    """Activities in the order of their start, each with its step, name and class.

    Args:
        unit: name of the range that is a step.
    """
    placed: list[Placed] = []
    paths = {item: ([r.name for r in stack], step) for item, stack, step in _nested(trace, unit)}
    chains: dict[Launch, _ChainNames] = {}
    for activity in sorted(trace.activities, key=lambda a: (a.start_ns, a.end_ns)):
        launch = activity.launch
        path, step = paths[launch] if launch is not None else ([], None)
        kind = busy_class(path)
        name = path[-1] if path else OUTSIDE
        if kind == "chain" and launch is not None and not activity.is_whole_graph:
            if launch.is_graph:
                name, kind = chains.setdefault(launch, _ChainNames(name)).place(activity.name)
            else:  # a copy beside it
                name, kind = f"host.{name}", "other"
        elif kind == "other" and path:
            name = f"host.{name}"  # "accept" is also a step of the chain
        placed.append(Placed(activity, name, kind, step))
    return placed


def busy_class(path: Sequence[str]) -> BusyClass:
    """Class of device work launched inside these ranges (outermost first)."""
    if not path:
        return "other"
    name = path[-1]
    if name == names.ACCEPT:  # a step of the target's chain, or, in old traces, a host's phase
        return "dense" if {"verify", "decode", names.SPECULATE} & set(path) else "other"
    if names.is_chain(name):
        return "chain"
    kind = names.step_class(name)
    return "other" if kind == "host" else kind


def host_times(trace: Trace, unit: str = names.STEP) -> dict[tuple[int, str], HostTime]:
    """(step, name) -> the host in ranges of that name and in no other within, by the rules above;
    ranges outside of all steps are left out."""
    calls = [a.launch.end_ns for a in trace.activities if a.launch is not None]
    last_ns = max([*calls, *(entry.start_ns for entry in trace.ranges)], default=0)
    ns, counts = Counter[tuple[int, str]](), Counter[tuple[int, str]]()
    for entry, stack, step in _nested(trace, unit):
        if step is None or isinstance(entry, Launch):
            continue
        # One that never ended, as the recording did, lasts to the last thing that is known.
        lasted_ns = (entry.end_ns if entry.end_ns < NO_END else last_ns) - entry.start_ns
        ns[step, entry.name] += lasted_ns
        counts[step, entry.name] += 1
        if any(outer.name == unit for outer in stack[:-1]):
            ns[step, stack[-2].name] -= lasted_ns
    return {key: HostTime(ns[key], count) for key, count in counts.items()}


def _nested(
    trace: Trace, unit: str
) -> Iterator[tuple[HostRange | Launch, list[HostRange], int | None]]:
    """Ranges and launches by their begin, outer ranges first; each with the ranges around it, a
    range itself at their end, and the index of its step, if it is in one."""
    launches = {a.launch for a in trace.activities if a.launch is not None}
    in_order = sorted(
        [*trace.ranges, *launches],
        key=lambda item: (item.start_ns, isinstance(item, Launch), -item.end_ns),
    )
    stacks: dict[int, list[HostRange]] = defaultdict(list)
    indices: dict[HostRange, int] = {}
    for item in in_order:
        stack = stacks[item.thread]
        # A launch at the very end of a range is of that range; one range begins behind another.
        while stack and stack[-1].end_ns < item.start_ns + isinstance(item, HostRange):
            stack.pop()
        if isinstance(item, HostRange):
            stack.append(item)
            if item.name == unit:
                indices[item] = len(indices)
        yield item, stack, next((indices[r] for r in stack if r.name == unit), None)


class _ChainNames:
    """Tells the kernels of a chain, of a chunk, or of a whole step, that is one graph apart, in the
    order of execution. Halves of a chunk that run beside each other do not tell which is which:
    there a layer is as many attentions as halves, and a kernel beside its end may be the next
    one's."""

    def __init__(self, graph: str) -> None:
        self._is_step = self._is_drafting = graph == names.SPECULATE
        self._chain, self._mixings = "draft" if self._is_step else graph.partition(".")[0], 0
        self._num_halves = 2 if ".T2x" in graph else 1
        self._is_context = False
        self._after_mixing = self._after_delta = False
        self._has_chosen = False  # the chain's argmax has run
        self._is_accepting = False  # so has a kernel behind the target's argmax
        self._has_accepted = False  # so has the accept kernel

    @property
    def _layer(self) -> int:
        return self._mixings // self._num_halves

    def place(self, kernel: str) -> tuple[str, BusyClass]:
        """Name and class of the graph's next kernel."""
        if _ATTENTION_KERNEL.search(kernel):
            name = names.attention_name(self._chain, self._layer)
            self._after_mixing = self._num_halves == 1
            self._mixings += not self._after_mixing  # the other half's may come next
            return name, "attention"
        is_gate = bool(_GATE_KERNEL.search(kernel))
        if is_gate and self._after_mixing and not self._after_delta:
            return names.attention_name(self._chain, self._layer), "attention"
        is_gate &= self._after_delta
        self._after_delta = bool(_DELTA_KERNEL.search(kernel))
        if self._after_delta or is_gate:
            self._after_mixing = True
            return names.delta_name(self._chain, self._layer), "dense"
        if self._after_mixing:
            self._mixings, self._after_mixing = self._mixings + 1, False
        if self._is_step and self._has_accepted:
            return names.DRAFT_CONTEXT, "dense"
        if _ARGMAX_KERNEL.search(kernel):
            self._has_chosen = True
        elif self._is_drafting and self._has_chosen and _EMBEDDING_KERNEL.search(kernel):
            self._chain, self._mixings = "verify", 0
            self._is_drafting = self._has_chosen = False
        if _ACCEPT_KERNEL.search(kernel):
            self._has_chosen = self._has_accepted = True
        if self._has_chosen and self._chain in ("verify", "decode"):
            self._is_accepting |= not _ARGMAX_KERNEL.search(kernel)
        if self._is_accepting:
            return names.ACCEPT, "dense"
        if self._chain == "prefill" and self._has_chosen:
            is_last_segment = _ARGMAX_KERNEL.search(kernel) or _COPY_KERNEL.search(kernel)
            self._is_context |= not is_last_segment
            if self._is_context:
                return names.PREFILL_CONTEXT, "dense"
        return names.dense_name(self._chain, self._layer), "dense"
