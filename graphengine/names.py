"""The one naming rule: names of chain steps and host phases, and the NVTX ranges that carry them.

Why one file: a step's name is its NVTX range, its row in a profile, its place in an error message
and its test id. If two files spelled names, a profile could not be joined to the step it measures.

Invariant: this file imports nothing of graphengine (a leaf), and a range costs next to nothing
while NVTX is off: `range_` then returns one shared no-op object. Every push has its pop, also when
the body raises; otherwise nsys would nest all later ranges under the failed one.

Names, for a chain of two attention layers:

    verify.00 (dense), verify.L0.attn, verify.01, verify.L1.attn, verify.02

Names outside of that alternation:

    draft.context   writes the drafter's K/V of a verified block
    publish         tells the host the drafts
    grammar         the host's work on the drafts' masks, meanwhile
    first_token     from a prompt's logits to the host, before the drafter's context of its rows
    accept          the accept kernel
    advance         applies the accepted rows to recurrent states, which verify.L2.delta reads
    speculate       a whole step, launched at once; without a drafter it is `decode`
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any, Literal

DOMAIN = "graphengine"

StepClass = Literal["dense", "attention", "host"]

SPECULATE = "speculate"
"""Draft, verify, accept and the drafter's context as one; its steps keep their chains' names."""

CHAINS = ("prefill", "decode", "draft", "verify", SPECULATE)

# The host queues one decode step; every phase of it lies inside.
STEP = "step"

# What the host is doing; never inside a chain's replay. Older traces call "wait" "accept".
GRAMMAR, FIRST_TOKEN = "grammar", "first_token"
HOST_PHASES = (
    *(STEP, *CHAINS, GRAMMAR, FIRST_TOKEN),
    *"load capture warmup plan wait accept commit detokenize".split(),
)

# Device steps outside the dense/attention alternation.
DRAFT_CONTEXT = "draft.context"
PREFILL_CONTEXT = "prefill.context"
PUBLISH = "publish"
ACCEPT = "accept"
ADVANCE = "advance"

COLORS: dict[StepClass, str] = {"dense": "green", "attention": "orange", "host": "gray"}


def dense_name(chain: str, index: int) -> str:
    """Name of a chain's dense segment: `dense_name("verify", 3) == "verify.03"`.

    Args:
        chain: the chain, one of CHAINS.
        index: number of attention steps before it, so 0..num_layers.
    """
    return f"{chain}.{index:02d}"


def attention_name(chain: str, layer: int) -> str:
    """Name of a chain's attention step: `attention_name("verify", 3) == "verify.L3.attn"`."""
    return f"{chain}.L{layer}.attn"


def delta_name(chain: str, layer: int) -> str:
    """Name of a recurrent layer's step: `delta_name("verify", 2) == "verify.L2.delta"`."""
    return f"{chain}.L{layer}.delta"


def chunk_name(num_rows: int, is_paired: bool = False) -> str:
    """Name of a whole prefill chunk: `chunk_name(128) == "prefill.T128"`; of one whose halves run
    beside each other `prefill.T2x2048`."""
    return f"prefill.T2x{num_rows // 2}" if is_paired else f"prefill.T{num_rows}"


def is_chain(name: str) -> bool:
    """Whether a name is a whole chain's, `verify`, or a chunk's, `prefill.T128`."""
    return name in CHAINS or re.fullmatch(r"prefill\.T(2x)?\d+", name) is not None


def step_class(name: str) -> StepClass:
    """Class of a name: attention (`*.L<i>.attn`), host (a phase alone), else dense."""
    if name.endswith(".attn"):
        return "attention"
    if name in HOST_PHASES:
        return "host"
    return "dense"


def is_name(text: str) -> bool:
    """Whether a text follows the rule above; for traces that have lost the domain."""
    if text in HOST_PHASES or text in (DRAFT_CONTEXT, PREFILL_CONTEXT, PUBLISH, ACCEPT, ADVANCE):
        return True
    chain, _, step = text.partition(".")
    return (
        chain in CHAINS and re.fullmatch(r"\d{2,}|L\d+\.(attn|delta)|T(2x)?\d+", step) is not None
    )


class _On:
    """A range while NVTX is on: made once per name, entered as often as needed, also nested."""

    __slots__ = ("attributes", "domain")

    def __init__(self, domain: Any, attributes: Any) -> None:
        self.domain, self.attributes = domain, attributes

    def __enter__(self) -> None:
        self.domain.push_range(self.attributes)

    def __exit__(self, *error: object) -> None:
        self.domain.pop_range()


_OFF = nullcontext()
_domain: Any = None
_ranges: dict[str, _On] = {}


def enable(domain: Any = None) -> bool:
    """Turns the ranges on for this process.

    Args:
        domain: an object like `nvtx.Domain`; default: the nvtx package's domain "graphengine".

    Returns:
        True when ranges are on; False when the nvtx package is missing, and ranges stay off.

    Mutates: the module's switch. It is a switch because a profile is of a whole process.
    """
    global _domain
    if domain is None:
        try:
            import nvtx
        except ImportError:
            return False
        domain = nvtx.get_domain(DOMAIN)
    _ranges.clear()
    _domain = domain
    return True


def disable() -> None:
    """Turns the ranges off; ranges that are open still pop. Mutates: the module's switch."""
    global _domain
    _domain = None
    _ranges.clear()


def is_enabled() -> bool:
    """True between `enable()` and `disable()`."""
    return _domain is not None


def range_(name: str) -> nullcontext[None] | _On:
    """The NVTX range of a name, as a context manager: `with range_("verify.L3.attn"): ...`.

    Args:
        name: from the functions above, the constants or HOST_PHASES. Build it outside the hot
            loop: the name is the cost, not the range.

    Returns:
        While off, one shared no-op, which tests/house/test_names.py holds to three calls; while on,
        one object per name, coloured by `step_class`.
    """
    if _domain is None:
        return _OFF
    found = _ranges.get(name)
    if found is None:
        attributes = _domain.get_event_attributes(message=name, color=COLORS[step_class(name)])
        found = _ranges[name] = _On(_domain, attributes)
    return found
