"""Which chunks a prefill has (`fixed_chunk`), and how a prompt is cut into them.

A forward reads all weights, however few its rows are: below some 200 rows that is what it takes,
above it goes by its rows, also by those that are padding. So sizes are close where padding costs,
and a prompt is cut where that is less than what another forward costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from graphengine.kernels import chunk_attention

BLOCK = 16
SIZES = (16, 32, 48, 128, 192, 256, 384, 512)  # rows; in blocks of 16, which prompts share
LONG_SIZES = (640, 768, 1024, 2048)  # in blocks of `chunk_attention`, each of one prompt
PAIRED_SIZES = (4096,)  # the same in halves beside each other
# The same for fewer rows of one prompt, a far piece, that has FAR others in front. There blocks of
# 16, which each read all keys, take longer: on an H200 128 rows of 8B shapes took 22 us a layer
# against 20 at 2,048 keys and 244 against 113 at 32,768 (2026-11-25-h200-pieces-3b387a2.json).
FAR_SIZES, FAR = (128, 256), 2048
HYBRID_FAR_SIZES = (384, 512)  # where few layers have keys, more rows take little longer there
FAR_LEAST = chunk_attention.BLOCK // 2  # no more rows than that are as fast in blocks of 16
EXPERT_SIZES = (1536, 3072)  # also long ones, where experts make another forward dear
# What a forward takes, in what the products of a row do: to read the weights, which hides all but a
# share of them, or its rows and what it adds, less from LARGE on, where `chunk_linear` multiplies.
# Of experts it reads the more, and hides nothing. Chosen by first tokens of 8B, 4B's hybrid, 27B
# and 35B-A3B on an H200 (profiles/LOG.md, 2026-11-29).
WEIGHTS, SHARE = 240, 1 / 3
ADDED, ADDED_TO_LARGE, LARGE = 100, 60, 1024
OF_EXPERTS = 1.5  # of a row that goes through them


def sizes_for(
    max_model_len: int, *, are_long: bool, are_paired: bool = False, has_experts: bool = False
) -> tuple[int, ...]:
    """Sizes that some prompt fills more than the size before.

    Args:
        are_long: whether `chunk_attention` runs here.
        are_paired: whether halves may run beside each other.
    """
    sizes = sorted(SIZES + (LONG_SIZES + EXPERT_SIZES * has_experts) * are_long)
    fitting = [n for before, n in zip((0, *sizes), sizes, strict=False) if before < max_model_len]
    paired = [
        n
        for n in PAIRED_SIZES
        if are_paired and first_rows(min(n, max_model_len - 1), (*fitting, n)) == n
    ]
    return *fitting, *paired


def far_sizes_for(max_model_len: int, *, are_long: bool, keyed_in: int = 1) -> tuple[int, ...]:
    """Sizes of far chunks that some prompt gets to.

    Args: keyed_in: one layer in so many has keys.
    """
    sizes = FAR_SIZES + HYBRID_FAR_SIZES * (keyed_in > 1)
    return sizes if are_long and max_model_len > FAR + FAR_LEAST else ()


def first_rows(left: int, sizes: Sequence[int], over_read: float = 1) -> int:
    """The size of the first of the chunks in which so many rows take the least time.

    Args:
        sizes: ascending, multiples of BLOCK.
        over_read: all weights over those that a row reads, 1 without experts.
    """
    if left > 2 * sizes[-1]:
        return sizes[-1]
    return _firsts(tuple(sizes), over_read)[-(-left // BLOCK)]


@lru_cache
def _firsts(sizes: tuple[int, ...], over_read: float) -> list[int]:
    """`first_rows` by number of blocks that are left, up to twice the largest size: of more rows
    the first chunk is the largest."""
    times, firsts = [0.0], [0]
    own = [(size, forward_time(size, over_read)) for size in sizes]
    for blocks in range(1, 2 * sizes[-1] // BLOCK + 1):
        ways = [(time + times[max(0, blocks - size // BLOCK)], -size) for size, time in own]
        least, negative = min(ways)
        times.append(least)
        firsts.append(-negative)
    return firsts


def forward_time(num_rows: int, over_read: float = 1) -> float:
    """Of a forward of so many rows; the unit is what the products of one take."""
    if over_read > 1:
        return WEIGHTS * over_read + OF_EXPERTS * num_rows
    added = ADDED_TO_LARGE if num_rows >= LARGE else ADDED
    return max(WEIGHTS + SHARE * num_rows, num_rows + added)
