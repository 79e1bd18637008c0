"""What the host launches of a step: everything at once, or stages cut where attention is planned.

Where attention reads its lengths on the device a step is one chain, so in graph mode full one CUDA
graph: between two graphs a GPU stands idle for 2 to 8 us (H200, nsys), inside one it does not.

    speculate    draft.00 .. draft.05, verify.00 .. verify.36, accept, draft.context

Where the host must plan, a step has three stages. The last needs no plan: it keeps the device busy
while the host reads, commits and plans. It is of the next block, so a loaded batch runs it once.

    draft        plan;  draft.L0.attn .. draft.05
    verify       plan;  verify.00 .. verify.36, accept
    ahead        draft.context, draft.00

Without a drafter a step is `verify` alone, named `decode`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from graphengine import names
from graphengine.capture.runners import (
    EagerRunner,
    GraphPool,
    Runner,
    capture_full,
    capture_piecewise,
    capture_piecewise_pair,
)
from graphengine.capture.steps import Carry, Step
from graphengine.config.engine import GraphMode
from graphengine.decode.attention import Attention


class Chains(NamedTuple):
    """A step's chains; those of the drafter are empty without one."""

    draft: list[Step]
    verify: list[Step]  # its last two steps choose and accept
    context: list[Step]
    sampled_end: list[Step]
    """Takes the place of those two where a request draws its tokens; empty if none may."""


class Part(NamedTuple):
    """A stage before there are runners: its steps, and what is planned in front of them."""

    name: str
    steps: list[Step]
    sampled: list[Step]  # `steps` itself where nothing is sampled
    attentions: tuple[Attention, ...] = ()
    block: int = 1  # rows of a request in those attentions


class Cut(NamedTuple):
    """A step as parts, and the steps of its stage `ahead`, if it has one."""

    parts: list[Part]
    ahead: list[Step]


class Stage(NamedTuple):
    """What one call launches, in its NVTX range."""

    name: str
    runner: Runner
    sampled: Runner
    attentions: tuple[Attention, ...] = ()
    block: int = 1


class Stages(NamedTuple):
    """A bucket's stages in the order of a step; `ahead` is the runner of the last, if there is."""

    stages: tuple[Stage, ...]
    ahead: Runner | None


def whole(chains: Chains) -> Cut:
    """A step in one part."""
    name = names.SPECULATE if chains.draft else "decode"
    return Cut([_part(chains, name, [*chains.draft, *chains.verify, *chains.context])], [])


def planned(
    chains: Chains,
    verify_attention: Attention,
    draft_attentions: Sequence[Attention],
    block: int,
    draft_block: int,
) -> Cut:
    """A step cut in front of everything that must be planned."""
    verify = _part(chains, "verify" if chains.draft else "decode", chains.verify)
    verify = verify._replace(attentions=(verify_attention,), block=block)
    if not chains.draft:
        return Cut([verify], [])
    head, *rest = chains.draft
    draft = Part("draft", rest, rest, tuple(draft_attentions), draft_block)
    return Cut([draft, verify], [*chains.context, head])


def _part(chains: Chains, name: str, steps: list[Step]) -> Part:
    if not chains.sampled_end:
        return Part(name, steps, steps)
    others = dict(zip(chains.verify[-2:], chains.sampled_end, strict=True))
    return Part(name, steps, [others.get(step, step) for step in steps])


def eager_stages(cut: Cut) -> Stages:
    """Every step is called; on the CPU, in mode none, and to warm up before a capture."""
    ahead = EagerRunner(cut.ahead, lambda: ()) if cut.ahead else None

    def make(part: Part, continues: bool) -> tuple[Runner, Runner]:
        def source() -> Carry:
            return ahead.carry if continues and ahead is not None else ()

        runner = EagerRunner(part.steps, source)
        is_same = part.sampled is part.steps
        return runner, runner if is_same else EagerRunner(part.sampled, source)

    return _stages(cut, ahead, make)


def captured_stages(cut: Cut, graph_mode: GraphMode, pool: GraphPool) -> Stages:
    """A part is one graph in mode full, else a graph for each of its dense steps."""
    ahead = capture_piecewise(cut.ahead, (), pool) if cut.ahead else None

    def make(part: Part, continues: bool) -> tuple[Runner, Runner]:
        carry = ahead.carry if continues and ahead is not None else ()
        if graph_mode == "piecewise":
            return capture_piecewise_pair(part.steps, part.sampled, carry, pool)
        runner = capture_full(part.name, part.steps, carry, pool)
        is_same = part.sampled is part.steps
        return runner, runner if is_same else capture_full(part.name, part.sampled, carry, pool)

    return _stages(cut, ahead, make)


def _stages(
    cut: Cut, ahead: Runner | None, make: Callable[[Part, bool], tuple[Runner, Runner]]
) -> Stages:
    """`make` is told whether a part continues what `ahead` has left; the others begin anew."""
    stages = []
    for place, part in enumerate(cut.parts):
        runners = make(part, ahead is not None and place == 0)
        stages.append(Stage(part.name, *runners, part.attentions, part.block))
    if ahead is not None:
        stages.append(Stage("draft", ahead, ahead))
    return Stages(tuple(stages), ahead)
