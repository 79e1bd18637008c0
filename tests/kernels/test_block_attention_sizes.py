"""The sizes that block_attention's launches take: what is chosen for how many splits and rows."""

import pytest

from graphengine.kernels.arrival_kernels import MAX_SPLITS
from graphengine.kernels.block_attention import (
    HOPPER_SMEM_BYTES,
    MAX_ROWS,
    choose_config,
    choose_num_splits,
)


def test_number_of_splits() -> None:
    """Bug: one split at batch 1 (most of the GPU idle), more programs than multiprocessors (their
    partials cost a merge and buy no bandwidth), row tiles not counted."""
    assert [choose_num_splits(b, 8, 132) for b in (1, 2, 4, 8, 16, 64)] == [16, 8, 4, 2, 1, 1]
    assert choose_num_splits(1, 1, 132) == MAX_SPLITS
    assert choose_num_splits(1, 8, 132, packed_rows=65) == 8


@pytest.mark.parametrize("packed_rows", [1, 16, 17, 64, 96])
@pytest.mark.parametrize("row_bytes", [32, 128, 256, 512])
def test_chosen_sizes_fit(row_bytes, packed_rows) -> None:
    """Bug: stages that are more than a multiprocessor's shared memory, so that no launch succeeds
    for some head width or batch; or, alone, fewer than a split's first loads: 1 to 4 us a layer."""
    for num_splits in range(1, MAX_SPLITS + 1):
        config = choose_config(num_splits, row_bytes, packed_rows=packed_rows)
        assert config.chunk % config.kv_tile == 0
        rows = 2 * config.kv_tile * config.num_stages + MAX_ROWS
        assert rows * row_bytes <= HOPPER_SMEM_BYTES
        if num_splits > 4:
            assert config.kv_tile * config.num_stages > config.chunk


def test_sizes_by_splits_and_rows() -> None:
    """Bug: a block of one row, or few splits, has the sizes of others, which nothing but the time
    of a step tells."""
    found = [choose_config(n) for n in (1, 2, 4, 16)] + [choose_config(16, packed_rows=16)]
    assert [(c.kv_tile, c.num_stages, c.chunk) for c in found] == [
        *((128, 3, 256), (128, 3, 128), (128, 3, 128), (64, 6, 256), (128, 3, 128))
    ]
    wide = [choose_config(n, 512) for n in (4, 5)] + [choose_config(16, 512, packed_rows=16)]
    assert [(c.num_warps, c.chunk) for c in wide] == [(4, 128), (8, 64), (4, 128)]
    of_prompts = [choose_config(2, size, packed_rows=96, of_prompt=True) for size in (256, 512)]
    assert [config.num_warps for config in of_prompts] == [4, 8]
    assert choose_config(2, 512, packed_rows=96).num_warps == 4  # behind long texts 8 are slower
    assert choose_config(16, 256, smem_bytes=100 * 1024).num_warps == 4  # another GPU


def test_lengths_that_one_split_takes() -> None:
    """Bug: a short request's keys are dealt to splits whose merge takes longer than they save, or a
    long one's are not."""
    found = [choose_config(n) for n in (1, 2, 3, 4, 5)]
    assert [(c.one_split, c.prefetch) for c in found] == [
        *((512, False), (512, False), (512, True), (512, True), (256, True))
    ]
    wide = [choose_config(n, 512) for n in (1, 2, 3, 4, 5)]
    assert [(c.one_split, c.prefetch) for c in wide] == [
        *((1024, True), (1024, True), (512, True), (512, True), (256, True))
    ]
