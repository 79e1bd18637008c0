"""Which chunks there are, and how a prompt is cut into them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphengine.config.model import ModelConfig
from graphengine.decode import chunk_sizes
from graphengine.decode.chunk_sizes import (
    BLOCK,
    DENSE_SIZES,
    EXPERT_SIZES,
    FAR_SIZES,
    HYBRID_FAR_SIZES,
    LONG_SIZES,
    PAIRED_SIZES,
    SIZES,
    far_sizes_for,
    first_rows,
    forward_time,
    is_long,
    sizes_for,
)
from graphengine.models.decoder import read_over_one_row
from graphengine.startup.build import read_configs

SHORT = tuple(sorted(SIZES + DENSE_SIZES))
ALL = (*SHORT, *LONG_SIZES, *PAIRED_SIZES)


def cut(num_rows: int, sizes: Sequence[int] = ALL, config: ModelConfig | None = None) -> list[int]:
    """The chunks that so many rows run in."""
    read = [1.0 if config is None else read_over_one_row(config, size) for size in sizes]
    times = tuple((n, forward_time(n, over)) for n, over in zip(sizes, read, strict=True))
    chunks: list[int] = []
    while num_rows > 0:
        chunks.append(first_rows(num_rows, times))
        assert chunks[-1] > 0
        num_rows -= chunks[-1]
    return chunks


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [
        (11, [16]),
        (24, [32]),
        (43, [128]),
        (139, [192]),
        (300, [384]),
        (600, [640]),
        (700, [768]),
        (1000, [1024]),
        (1035, [1024, 16]),
        (1300, [1024, 384]),
        (1600, [1024, 640]),
        (2000, [2048]),
        (3000, [2048, 1024]),
        (4000, [4096]),
    ],
)
def test_the_chunks_of_a_prompt(num_rows: int, expected: list[int]) -> None:
    """Bug: a prompt of 600 tokens runs 1,024 rows, or in chunks of 512 and 128, each of which reads
    all weights (8B on an H200: 18.0 ms; 16.1 in one of 640)."""
    assert cut(num_rows) == expected


@given(st.data(), st.lists(st.sampled_from(ALL), min_size=1, unique=True))
def test_no_other_chunks_take_less_time(data: st.DataObject, sizes: list[int]) -> None:
    """Bug: the largest chunk that is full is taken first, although the rest then needs two; or a
    size that holds the rest is not looked at."""
    sizes = sorted(sizes)
    num_rows = data.draw(st.integers(1, 2 * sizes[-1]))
    chunks = cut(num_rows, sizes)
    assert sum(chunks) >= num_rows and sum(chunks[:-1]) < num_rows
    time = sum(map(forward_time, chunks))
    for count in range(1, 4):
        for others in combinations_with_replacement(sizes, count):
            if sum(others) >= num_rows:
                assert time <= sum(map(forward_time, others)) + 1e-9


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [(600, [640]), (1035, [1024, 16]), (1300, [1536]), (1800, [2048]), (2500, [3072])],
)
def test_the_chunks_of_a_prompt_through_experts(num_rows: int, expected: list[int]) -> None:
    """Bug: a prompt is cut as if its second forward read what a dense model's does: it reads nearly
    all experts again, 25 of 58 ms at 1,300 tokens of Qwen3.6-35B-A3B on an H200."""
    sizes = sizes_for(8192, are_long=True, keyed_in=4, has_experts=True)
    config, _ = read_configs("qwen3.6-35b-a3b", None)
    assert cut(num_rows, sizes, config) == expected


def test_what_a_forward_takes() -> None:
    """Bug: prompts are cut by other times than were measured: first tokens come later, and nothing
    else tells."""
    sizes = (0, 48, 192, 210, 256, 1023, 1024, 2048)
    dense = [240, 256, 304, 310, 356, 1123, 1084, 2108]
    assert [forward_time(n) for n in sizes] == pytest.approx(dense)
    experts = [1200, 1276.8, 1507.2, 1536, 1609.6, 2836.8, 2838.4, 5705.6]
    assert [forward_time(n, 5) for n in sizes] == pytest.approx(experts)


def test_which_sizes_a_model_has() -> None:
    """Bug: experts or a recurrence have a chunk that is of dense models; or the largest that
    prompts share is in blocks of one prompt."""
    assert sizes_for(8192, are_long=False) == SHORT
    assert sizes_for(8192, are_long=False, has_experts=True) == SIZES
    assert sizes_for(8192, are_long=False, keyed_in=4) == SIZES
    assert [size for size in ALL if is_long(size)] == [*LONG_SIZES, *PAIRED_SIZES]


def test_more_rows_than_the_largest_are_looked_at_together() -> None:
    """Bug: beside a stream, where chunks are small, a prompt begins with the largest, and the few
    rows that are left read all weights again."""
    assert cut(420, (16, 32, 128, 192, 256, 384)) == [256, 192]


def test_a_longer_prompt_begins_with_the_largest() -> None:
    """Bug: what is longer than any chunk is looked for behind the end of the table."""
    assert cut(100_000)[0] == ALL[-1] == cut(8192)[1]


def test_sizes_are_whole_blocks() -> None:
    """Bug: a size that is no multiple of a block: its last rows are nobody's."""
    assert not [size for size in SHORT if size % BLOCK]
    of_chunks = *FAR_SIZES, *HYBRID_FAR_SIZES, *LONG_SIZES, *EXPERT_SIZES
    assert not [n for n in of_chunks if n % chunk_sizes.chunk_attention.BLOCK]
    assert not [n for n in PAIRED_SIZES if n // 2 % chunk_sizes.chunk_attention.BLOCK]


def test_a_small_context_needs_no_large_chunk() -> None:
    """Bug: chunks are captured that no prompt can fill."""
    assert sizes_for(2, are_long=True) == sizes_for(16, are_long=True) == (16,)
    assert sizes_for(17, are_long=True) == (16, 32)
    assert sizes_for(4096, are_long=False) == sizes_for(512, are_long=True) == SHORT
    assert sizes_for(1024, are_long=True) == (*SHORT, 640, 768, 1024)
    assert sizes_for(3841, are_long=True, are_paired=True)[-1] == 2048
    assert sizes_for(3842, are_long=True, are_paired=True)[-2:] == (2048, 4096)
    assert sizes_for(9999, are_long=True)[-1] == 2048
    assert far_sizes_for(2112, are_long=True) == far_sizes_for(4096, are_long=False) == ()
    assert far_sizes_for(4096, are_long=True) == (128, 256)
    for keyed_in in (2, 4):
        assert far_sizes_for(4096, are_long=True, keyed_in=keyed_in) == (128, 256, 384, 512)
