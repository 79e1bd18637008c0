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

Where rows have grammars the host looks at the drafts and works while the verify runs. Nothing keeps
the device busy between two such steps but the next block's drafts, so these come last there:

    constrained  publish, verify.00 .. verify.36;  grammar;  accept, draft.context, draft.00 ..

and `drafting` makes them once for rows that begin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from graphengine import names
from graphengine.capture.runners import (
    EagerRunner,
    GraphPool,
    Runner,
    capture_ends,
    capture_full,
    capture_piecewise,
    whole_chains,
)
from graphengine.capture.steps import Carry, Step
from graphengine.config.engine import GraphMode
from graphengine.decode.attention import Attention
from graphengine.decode.ends import CONSTRAINED_ENDS


class Chains(NamedTuple):
    """A step's chains; those of the drafter are empty without one."""

    propose: list[Step]
    verify: list[Step]  # without its end
    ends: Mapping[str, list[Step]]
    context: list[Step]
    publish: tuple[Step, ...] = ()  # tells the host the drafts


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
    """A stage before there are runners: `head`, one of `ends` if there are any, `tail`.

    `fronts`: what an end has in front of the head; `own`: the whole chain of one that shares none.
    """

    name: str
    head: list[Step]
    ends: Mapping[str, list[Step]]
    tail: list[Step]
    planned: Planned = Planned()
    fronts: Mapping[str, list[Step]] = MappingProxyType({})
    own: Mapping[str, list[Step]] = MappingProxyType({})


class Parts(NamedTuple):
    """A step's, in order, and what runs once for rows that begin: `ahead` of any step, `drafting`
    of one that is constrained."""

    step: list[Part]
    ahead: Part | None = None
    drafting: Part | None = None


class Stages(NamedTuple):
    """The same with runners."""

    step: list[Stage]
    ahead: Runner | None
    drafting: Runner | None


def cut(chains: Chains, verify: Planned, draft: Planned | None) -> Parts:
    """One part where nothing is planned.

    Args: draft: None: attention needs no plan.
    """
    plain, context = not chains.propose, chains.context
    bound = {name: chains.ends[name] for name in CONSTRAINED_ENDS & set(chains.ends)}
    bound = bound if chains.publish else {}
    if draft is None:
        name, own, drafting = "decode" if plain else names.SPECULATE, {}, None
        if bound:
            front, back = [*chains.publish, *chains.verify], [*context, *chains.propose]
            own = {end: [*front, *steps, *back] for end, steps in bound.items()}
            drafting = Part("draft", chains.propose, {}, [])
        head = chains.propose + chains.verify
        return Parts([Part(name, head, chains.ends, context, own=own)], drafting=drafting)
    fronts = {end: [*chains.publish] for end in bound}
    name = "decode" if plain else "verify"
    part = Part(name, chains.verify, chains.ends, [], verify, fronts)
    if plain:
        return Parts([part])
    head, *rest = chains.propose
    parts = [Part("draft", rest, {}, [], draft), part] if rest else [part]
    return Parts(parts, Part("draft", [*context, head], {}, []))


def eager_stages(parts: Parts) -> Stages:
    """Every step is called; on the CPU, and in mode none."""

    def make(part: Part, source: Callable[[], Carry]) -> Mapping[str, Runner]:
        chains = {**whole_chains(part.head, part.ends, part.tail, part.fronts), **part.own}
        return {name: EagerRunner(chain, source) for name, chain in chains.items()}

    return _stages(parts, make)


def captured_stages(parts: Parts, graph_mode: GraphMode, pool: GraphPool) -> Stages:
    """A part is one graph an end in mode full, else a graph for each of its dense steps; like
    steps have run where captures are recorded."""

    def make(part: Part, source: Callable[[], Carry]) -> Mapping[str, Runner]:
        whole = graph_mode == "full" and part is not parts.ahead
        shared = {name: end for name, end in part.ends.items() if name not in part.own}
        found = capture_ends(
            part.name,
            part.head,
            shared,
            part.tail,
            source(),
            pool,
            whole=whole,
            fronts=part.fronts,
        )
        capture = partial(capture_full, part.name) if whole else capture_piecewise
        return found | {name: capture(chain, (), pool) for name, chain in part.own.items()}

    return _stages(parts, make)


def _stages(
    parts: Parts, make: Callable[[Part, Callable[[], Carry]], Mapping[str, Runner]]
) -> Stages:
    """A part without ends, the draft, continues what `ahead` has left; the others begin anew."""
    last = make(parts.ahead, lambda: ())[""] if parts.ahead is not None else None
    drafting = make(parts.drafting, lambda: ())[""] if parts.drafting is not None else None
    ends = next(part.ends for part in parts.step if part.ends)

    def left() -> Carry:
        assert last is not None
        return last.carry

    stages = []
    for part in parts.step:
        runners = make(part, left if not part.ends else lambda: ())
        found = runners if part.ends else dict.fromkeys(ends, runners[""])
        stages.append(Stage(part.name, found, part.planned))
    if last is not None:
        stages.append(Stage("draft", dict.fromkeys(ends, last)))
    return Stages(stages, last, drafting)
