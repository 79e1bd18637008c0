"""tools/bench_kernels.py: what a sweep would try, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from graphengine.kernels.block_attention import choose_config
from tools import bench_kernels


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)


@pytest.mark.parametrize("batch", [1, 8, 16, 64])
def test_a_sweep_tries_what_a_launch_accepts(batch: int) -> None:
    """Bug: the default that a sweep varies has other tiles at this batch, so that half of the
    candidates are refused and silently count as too large, or a change changes nothing."""
    tiles = bench_kernels.tile_candidates(batch)
    assert len(set(tiles)) == len(tiles)
    num_splits = bench_kernels.default_splits(batch)
    assert tiles[0] == (num_splits, choose_config(num_splits))
    launches = bench_kernels.launch_candidates(*tiles[0])
    assert {config.prefetch for _, config in launches} == {True, False}
    for _, config in [*tiles, *launches]:
        assert config.chunk % config.kv_tile == 0, config
