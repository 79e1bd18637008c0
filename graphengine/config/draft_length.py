"""How many tokens are drafted and verified a step: a number for each bucket.

Why a choice: the last positions of a block are accepted least often, and what they cost depends on
the batch. Alone a request's rows are nearly free, since a step is bound by reading weights; at 16
requests a block of 16 makes a verify of 256 rows, which is bound by arithmetic. 8B on an H200, FP8
drafter: 7.57 ms a step with 15 drafts, 6.55 with 11, for 6 % more tokens a second
(profiles/results/2026-11-23-h200-8b-uniform-fp8-dynamic-de71c30.json, -8b-uniform-spec-11-de71c30).

A DFlash drafter drafts fewer tokens by running fewer mask rows: one trained on blocks of 16 accepts
5.09 tokens a step with blocks of 8, one trained on those 5.21 (arXiv 2602.06036, table 8).

Where nobody says, a bucket drafts all that the drafter has, or what a start measures to be fastest
where the target has experts (`startup.draft_width`).

Invariant: shapes go by a bucket's own number; whatever outlives a change of buckets (buffers,
pages, positions) goes by the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self, TypeVar

from graphengine.config.draft import DraftSpec
from graphengine.config.engine import EngineConfig
from graphengine.config.lists import is_integer


def resolve_draft_lengths(
    asked: int | Sequence[int] | None, buckets: Sequence[int], draft: DraftSpec | None
) -> tuple[int, ...]:
    """The number of each bucket, ascending by bucket; empty without a drafter.

    Args:
        asked: one number for all, or one a bucket; None: all that the drafter proposes.
        buckets: batch sizes in the user's order, which is that of `asked`.

    Raises:
        ValueError: with the value, the drafter's block and the remedy.
    """
    sizes = sorted(set(buckets))
    if asked is None:
        return (draft.num_draft_tokens,) * len(sizes) if draft else ()
    numbers: list[Any] = [asked]
    if isinstance(asked, Sequence) and not isinstance(asked, str):
        numbers = list(asked)
    option = f"--num-speculative-tokens {','.join(map(repr, numbers))}"
    if draft is None:
        raise ValueError(f"{option} needs a drafter; pass --draft")
    most = draft.num_draft_tokens
    if any(not is_integer(number) or not 1 <= number <= most for number in numbers):
        raise ValueError(
            f"{option}: integers from 1 to {most}, the drafts in this drafter's block of "
            f"{draft.block_size} rows; without the option all are drafted"
        )
    numbers = [int(number) for number in numbers]
    if len(numbers) == 1:
        return (numbers[0],) * len(sizes)
    if len(numbers) != len(buckets):
        raise ValueError(
            f"{option}: {len(numbers)} numbers for {len(buckets)} buckets; "
            "pass one for all, or one for each in the order of --bucket"
        )
    by_size: dict[int, int] = {}
    for size, number in zip(buckets, numbers, strict=True):
        if by_size.setdefault(size, number) != number:
            raise ValueError(f"{option}: two numbers for bucket {size}; name each bucket once")
    return tuple(by_size[size] for size in sizes)


class Shortens(Protocol):
    """A drafter, or what describes one."""

    @property
    def num_draft_tokens(self) -> int: ...

    def shortened(self, num_draft_tokens: int) -> Self: ...


Draft = TypeVar("Draft", bound=Shortens)


def draft_at(config: EngineConfig, draft: Draft, size: int) -> Draft:
    """The drafter as the bucket of `size` runs it."""
    numbers = config.num_speculative_tokens
    return draft.shortened(numbers[config.buckets.index(size)]) if numbers else draft


def longest_draft(config: EngineConfig, draft: Draft) -> Draft:
    """The drafter as the bucket with the longest block runs it."""
    return draft.shortened(max(config.num_speculative_tokens, default=draft.num_draft_tokens))
