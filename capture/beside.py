"""Two chains of equal steps as one, on two streams of the device.

Where every kernel of a chain fills the device, what is left to gain is their ends and the launches
between them: the last programs of a product leave multiprocessors empty, and norms leave their
arithmetic idle. The other chain's kernels stand there.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, partial

import torch

from graphengine.capture.steps import AttentionStep, Carry, Chain, Step


@cache
def other_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream of the chain in front, one a device; None where there are no streams."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def beside(front: Chain, back: Chain, stream: torch.cuda.Stream | None) -> list[Step]:
    """A step of each at a time: `front` on `stream`, `back` on the current one.

    An attention of `back` reads what `front` had written in front of its own; nothing else passes
    between them. Both begin without a carry. A step's carry is that of `front` and then that of
    `back`, the last one's of `back` alone: what comes next waits for both.
    """
    assert [type(step) for step in front] == [type(step) for step in back]
    last = len(back) - 1
    pairs = enumerate(zip(front, back, strict=True))
    return [
        type(own)(own.name, partial(_run_both, other, own, stream, i == 0, i == last))
        for i, (other, own) in pairs
    ]


def _run_both(
    other: Step,
    own: Step,
    stream: torch.cuda.Stream | None,
    is_first: bool,
    is_last: bool,
    carry: Carry,
) -> Carry:
    half = len(carry) // 2
    if stream is not None and is_first:
        stream.wait_stream(torch.cuda.current_stream())
    if stream is not None and isinstance(own, AttentionStep):
        torch.cuda.current_stream().wait_stream(stream)
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        others = other.run(carry[:half])
    owns = own.run(carry[half:])
    if not is_last:
        return *others, *owns
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
    return owns
