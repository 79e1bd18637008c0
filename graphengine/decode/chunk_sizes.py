"""Which chunks a prefill has (`fixed_chunk`), and how a prompt is cut into them.

A forward reads all weights, however few its rows are: below some 200 rows that is what it takes,
above it goes by its rows, also by those that are padding. So sizes are close where padding costs,
and a prompt is cut where that is less than what another forward costs.
"""

from __future__ import annotations

from functools import lru_cache

from graphengine.kernels import chunk_attention

BLOCK = 16
# The same in every mode, or ties fall otherwise. In mode piecewise a row of one keeps what passes
# between all segments, 0.6 MB of 8B.
SIZES = (16, 32, 128, 256, 384, 512)  # rows; in blocks of 16, which prompts share
DENSE_SIZES = (192,)  # more of SIZES, where no layer is recurrent or has experts
LONG_SIZES = (640, 768, 1024, 2048)  # in blocks of `chunk_attention`, each of one prompt
EXPERT_SIZES = (1536, 3072)  # more of LONG_SIZES, where experts make another forward dear
PAIRED_SIZES = (4096,)  # long ones in halves beside each other
# The same for fewer rows of one prompt, a far piece, that has FAR others in front. There blocks of
# 16, which each read all keys, take longer: on an H200 128 rows of 8B shapes took 22 us a layer
# against 20 at 2,048 keys and 244 against 113 at 32,768 (2026-11-25-h200-pieces-3b387a2.json).
FAR_SIZES, FAR = (128, 256), 2048
HYBRID_FAR_SIZES = (384, 512)  # where few layers have keys, more rows take little longer there
FAR_LEAST = chunk_attention.BLOCK // 2  # no more rows than that are as fast in blocks of 16
# What a forward takes, where the products of one row take 1: WEIGHTS to read the weights, and SHARE
# of each row that this does not hide; or, if that is more, its rows and what it adds, which is less
# from LARGE on, where `chunk_linear` multiplies. To read experts hides no row, and from LARGE on a
# row costs more. Chosen by first tokens of 8B, 4B's hybrid, 27B and 35B-A3B on an H200
# (LOG-2026-11-29.md).
WEIGHTS, SHARE = 240, 1 / 3
ADDED, ADDED_TO_LARGE, LARGE = 100, 60, 1024
OF_EXPERTS, ABOVE_LARGE = 1.6, 1.2


def is_long(size: int) -> bool:
    """Whether a chunk of so many rows is in blocks of `chunk_attention`, if it is no far one."""
    return size > SIZES[-1]


def sizes_for(
    max_model_len: int,
    *,
    are_long: bool,
    are_paired: bool = False,
    keyed_in: int = 1,
    has_experts: bool = False,
) -> tuple[int, ...]:
    """Sizes that some prompt fills more than the size before.

    Args:
        are_long: whether `chunk_attention` runs here.
        are_paired: whether halves may run beside each other.
        keyed_in: one layer in so many has keys.
    """
    sizes = SIZES + DENSE_SIZES * (keyed_in == 1 and not has_experts)
    sizes = sorted(sizes + (LONG_SIZES + EXPERT_SIZES * has_experts) * are_long)
    fitting = [n for before, n in zip((0, *sizes), sizes, strict=False) if before < max_model_len]
    most = max_model_len - 1
    if are_paired:
        times = tuple((n, forward_time(n)) for n in (*fitting, *PAIRED_SIZES))
        fitting += [n for n in PAIRED_SIZES if first_rows(min(n, most), times) == n]
    return tuple(fitting)


def far_sizes_for(max_model_len: int, *, are_long: bool, keyed_in: int = 1) -> tuple[int, ...]:
    """Sizes of far chunks that some prompt gets to.

    Args: as `sizes_for`.
    """
    sizes = FAR_SIZES + HYBRID_FAR_SIZES * (keyed_in > 1)
    return sizes if are_long and max_model_len > FAR + FAR_LEAST else ()


def first_rows(left: int, times: tuple[tuple[int, float], ...]) -> int:
    """The size of the first of the chunks in which so many rows take the least time.

    Args: times: sizes, ascending multiples of BLOCK, each with its `forward_time`.
    """
    largest, _ = times[-1]
    return largest if left > 2 * largest else _firsts(times)[-(-left // BLOCK)]


@lru_cache
def _firsts(times: tuple[tuple[int, float], ...]) -> list[int]:
    """`first_rows` by number of blocks that are left, up to twice the largest size: of more rows
    the first chunk is the largest."""
    least, firsts = [0.0], [0]
    for blocks in range(1, 2 * times[-1][0] // BLOCK + 1):
        ways = [(time + least[max(0, blocks - size // BLOCK)], -size) for size, time in times]
        time, negative = min(ways)
        least.append(time)
        firsts.append(-negative)
    return firsts


def forward_time(num_rows: int, over_one_row: float = 1) -> float:
    """Of a forward of so many rows, in units of what the products of one row take.

    Args: over_one_row: the weights that they read over those that one does, 1 without experts.
    """
    if over_one_row > 1:
        beyond = ABOVE_LARGE * max(0, num_rows - LARGE)
        return WEIGHTS * over_one_row + OF_EXPERTS * num_rows + beyond
    added = ADDED_TO_LARGE if num_rows >= LARGE else ADDED
    return max(WEIGHTS + SHARE * num_rows, num_rows + added)
