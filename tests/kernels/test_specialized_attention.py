"""specialized_attention against torch's scaled_dot_product_attention over gathered keys."""

import pytest
import torch

from graphengine.kernels.block_attention import block_attention, workspace
from graphengine.kernels.specialized_attention import SpecializedConfig
from tests.kernels.test_block_attention import (
    TOLERANCE,
    check_counts,
    make,
    poison,
    run,
    sdpa,
)

# Of 64 packed rows, of 44, of two row tiles whose second is half empty, of narrow blocks.
SHAPES = [(32, 8, 16, 128), (32, 8, 11, 16), (24, 4, 16, 64), (64, 8, 7, 32)]
H = 128


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("N", "K", "G", "S"), SHAPES)
def test_matches_sdpa(N, K, G, S, causal, window) -> None:
    """Bug: a tile taken from its neighbour's slot, a consumer without tiles that is not neutral, a
    key of the block read before it is written, NaN from stale memory, a head of another group."""
    for num_splits, starts in (
        (1, [1, 0, 63, 64, 400, 1500]),
        (16, [48]),
        (16, [3000]),
        (3, [1000, 0, 513, 2047]),
    ):
        W = (max(starts) + G) // S + 2
        made = make("cuda", torch.bfloat16, starts, G, N, K, H, S, W)
        expected = sdpa(*made, G, causal, window)
        for changes in ({}, {"split_keys": 64}, {"split_keys": 64, "polls": 0}):
            config = SpecializedConfig()._replace(**changes)
            found = run(*made, G, causal, num_splits, config, window=window)
            torch.testing.assert_close(found.double(), expected, **TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_one_capture_serves_every_length(causal) -> None:
    """Bug: something of the length baked into the captured graph; arrivals of one replay counted
    in the next."""
    G, N, K, S, W = 16, 32, 8, 128, 33
    q, cache, table, start = make("cuda", torch.bfloat16, [4000], G, N, K, H, S, W)
    buffers = workspace(1, G, N, H, 16, "cuda")
    out = torch.empty_like(q)

    def attend() -> None:
        block_attention(q, cache, table, start, G, causal, out, buffers)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
        out.clone()  # an ordinary kernel between two attentions, as in a step
        attend()
    for length in (1, 47, 48, 49, 240, 241, 500, 1000, 1008, 1009, 2047, 3999, 30):
        start.fill_(length)
        poison(buffers)
        out.fill_(torch.nan)
        graph.replay()
        expected = sdpa(q, cache, table, start, G, causal)
        torch.testing.assert_close(out.double(), expected, **TOLERANCE[torch.bfloat16])
        check_counts(buffers)
