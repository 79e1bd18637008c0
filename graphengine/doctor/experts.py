"""What a block of drafts costs on a mixture of experts: its rows read experts of their own.

Why said before anything runs: on a dense model the rows of a block are nearly free; here 16 rows of
Qwen3-30B-A3B read six times the bytes of one, so a block has to yield that many tokens to pay.
All are floors: bytes that rows which choose independently are expected to read (`MoeConfig`).
"""

from __future__ import annotations

from collections.abc import Iterator

from graphengine import names
from graphengine.config.draft import DraftSpec, NgramConfig
from graphengine.config.model import ModelConfig
from graphengine.config.moe import MoeConfig
from graphengine.doctor.findings import Finding, info
from graphengine.measure.segment_bytes import segment_bytes
from graphengine.startup.draft_width import choose, typical_tokens, widths_of

WIDTHS = (1, 8, 16)
_BF16 = 2


def verify_bytes(target: ModelConfig, num_rows: int) -> int:
    """Weights in bf16 that a forward of so many rows is expected to read."""
    return step_bytes(target, None, num_rows)


def step_bytes(target: ModelConfig, draft: DraftSpec | None, num_rows: int) -> int:
    """The same of a step, the drafter's weights with it."""
    found = segment_bytes(target, draft, _BF16, _BF16, num_rows)
    return found[names.SPECULATE if draft is not None else "decode"]


def break_even_tokens(target: ModelConfig, draft: DraftSpec | None, num_rows: int) -> float:
    """Tokens a step, the bonus included, at which drafting and plain decoding are equally fast.

    `(draft + verify(rows)) / verify(1)`, in bytes.
    """
    return step_bytes(target, draft, num_rows) / verify_bytes(target, 1)


def block_findings(
    target: ModelConfig, moe: MoeConfig, draft: DraftSpec | None, simulated: float | None
) -> Iterator[Finding]:
    """Experts, bytes and break-even of a block of 1, 8 and 16 rows, and of the drafter's own.

    Args: simulated: the mean acceptance length that is asked for.
    """
    own = {draft.num_verify_rows} if draft is not None else set()
    with_drafter = "" if draft is None else " with the drafter's own bytes"
    for width in sorted({*WIDTHS, *own}):
        value = f"{moe.num_distinct(width):.0f} of {moe.num_experts} experts a layer expected, "
        value += f"{verify_bytes(target, width) / 1e9:.1f} GB read"
        if width == 1:
            yield info("experts.rows_1", value)
            continue
        tokens = break_even_tokens(target, draft, width)
        value += f"; break-even at {tokens:.1f} tokens a step{with_drafter}"
        yield info(f"experts.rows_{width}", value, "a shorter block costs less here")
    if draft is not None:
        yield _width_finding(target, draft, simulated)


def _width_finding(target: ModelConfig, draft: DraftSpec, simulated: float | None) -> Finding:
    """What a start would choose if bytes were all that a step costs."""
    whole = draft.num_verify_rows
    cost: dict[int, float] = {w: step_bytes(target, draft, w) for w in widths_of(whole)}
    mean = simulated
    if mean is None or not 1 <= mean <= whole:  # which a run refuses
        mean = typical_tokens(whole, is_lookup=isinstance(draft, NgramConfig))
    chosen = choose(1, {1: verify_bytes(target, 1), **cost}, mean)
    value = f"by bytes {chosen.num_draft_tokens} drafts a step are best for one request, if a "
    value += f"block of {whole} yields {mean:g} tokens"
    if chosen.is_below_plain:
        value += "; plain decoding is better still"
    remedy = "a start measures steps and chooses; --num-speculative-tokens N decides instead"
    return info("experts.width", value, remedy)
