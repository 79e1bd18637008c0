"""What the host launches of a step: everything at once, or stages cut where attention is planned.

Where attention reads its lengths on the device a step is one chain, so in graph mode full one CUDA
graph: between two graphs a GPU stands idle for 2 to 8 us (H200, nsys), inside one it does not.

    speculate    draft.00 .. draft.05, verify.00 .. verify.36, accept, draft.context

Where the host must plan, a step has three stages. The last needs no plan: it keeps the device busy
while the host reads, commits and plans. It is of the next block, so rows that begin run it once.

    draft        plan;  draft.L0.attn .. draft.05
    verify       plan;  verify.00 .. verify.36, accept
    ahead        draft.context, draft.00

Without a drafter a step is `verify` alone, named `decode`. A stage that holds an end (`ends`) can
be run with each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from graphengine import names
from graphengine.capture.runners import EagerRunner, GraphPool, Runner, capture_ends
from graphengine.capture.steps import Carry, Step
from graphengine.config.engine import GraphMode
from graphengine.decode.attention import Attention


class Chains(NamedTuple):
    """A step's chains; those of the drafter are empty without one."""

    propose: list[Step]
    verify: list[Step]  # without its end
    ends: Mapping[str, list[Step]]
    context: list[Step]


class Planned(NamedTuple):
    """Attentions that the host plans in front of a stage, for `rows` query rows a request."""

    attentions: tuple[Attention, ...] = ()
    rows: int = 1


class Stage(NamedTuple):
    """What one call launches, in its NVTX range: a runner for every end, the same one where the
    stage holds none."""

    name: str
    runners: Mapping[str, Runner]
    planned: Planned = Planned()


class Part(NamedTuple):
    """A stage before there are runners: `head`, one of `ends` if there are any, `tail`."""

    name: str
    head: list[Step]
    ends: Mapping[str, list[Step]]
    tail: list[Step]
    planned: Planned = Planned()


def cut(chains: Chains, verify: Planned, draft: Planned | None) -> tuple[list[Part], Part | None]:
    """A step's parts, and `ahead`; one part where nothing is planned.

    Args: draft: None: attention needs no plan.
    """
    plain = not chains.propose
    if draft is None:
        name = "decode" if plain else names.SPECULATE
        return [Part(name, chains.propose + chains.verify, chains.ends, chains.context)], None
    part = Part("decode" if plain else "verify", chains.verify, chains.ends, [], verify)
    if plain:
        return [part], None
    head, *rest = chains.propose
    parts = [Part("draft", rest, {}, [], draft), part] if rest else [part]
    return parts, Part("draft", [*chains.context, head], {}, [])


def eager_stages(parts: list[Part], ahead: Part | None) -> tuple[list[Stage], Runner | None]:
    """Every step is called; on the CPU, in mode none, and to warm up before a capture."""

    def make(part: Part, source: Callable[[], Carry]) -> Mapping[str, Runner]:
        ends = part.ends or {"": []}
        return {
            name: EagerRunner([*part.head, *end, *part.tail], source) for name, end in ends.items()
        }

    return _stages(parts, ahead, make)


def captured_stages(
    parts: list[Part], ahead: Part | None, graph_mode: GraphMode, pool: GraphPool
) -> tuple[list[Stage], Runner | None]:
    """A part is one graph an end in mode full, else a graph for each of its dense steps."""

    def make(part: Part, source: Callable[[], Carry]) -> Mapping[str, Runner]:
        whole = graph_mode == "full" and part is not ahead
        return capture_ends(part.name, part.head, part.ends, part.tail, source(), pool, whole=whole)

    return _stages(parts, ahead, make)


def _stages(
    parts: list[Part],
    ahead: Part | None,
    make: Callable[[Part, Callable[[], Carry]], Mapping[str, Runner]],
) -> tuple[list[Stage], Runner | None]:
    """A part without ends, the draft, continues what `ahead` has left; the others begin anew."""
    last = make(ahead, lambda: ())[""] if ahead is not None else None
    ends = next(part.ends for part in parts if part.ends)

    def left() -> Carry:
        assert last is not None
        return last.carry

    stages = []
    for part in parts:
        runners = make(part, left if not part.ends else lambda: ())
        found = runners if part.ends else dict.fromkeys(ends, runners[""])
        stages.append(Stage(part.name, found, part.planned))
    if last is not None:
        stages.append(Stage("draft", dict.fromkeys(ends, last)))
    return stages, last
