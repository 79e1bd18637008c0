"""block_attention as only a GPU runs it: captured, on several streams, on pools past 32 bits."""

import pytest
import torch

from graphengine.kernels.block_attention import (
    LaunchConfig,
    block_attention,
    choose_config,
    choose_num_splits,
    workspace,
)
from tests.kernels.test_block_attention import (
    MERGES,
    TOLERANCE,
    check_counts,
    make,
    poison,
    run,
    sdpa,
)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("merge", [None, *MERGES])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("B", [1, 8, 16])
def test_one_capture_serves_every_length(B, causal, merge, window) -> None:
    """Bug: something of the length baked into the captured graph; wrong order under PDL; arrivals
    of one replay counted in the next. None: the default sizes."""
    G, N, K, H, S, W = 16, 32, 8, 128, 16, 260
    num_splits = choose_num_splits(B, K, 132)
    config = None
    if merge is not None:
        num_splits = max(3, num_splits)  # of a batch of 16 as well
        config = choose_config(num_splits)._replace(**MERGES[merge])
    made = make("cuda", torch.bfloat16, [4000 - 7 * b for b in range(B)], G, N, K, H, S, W)
    lengths = (1, 47, 48, 49, 240, 241, 500, 1000, 2047, 3999, 30)
    check_replays(made, G, causal, num_splits, lengths, config, window)


def check_replays(made, G, causal, num_splits, lengths, config=None, window=None) -> None:
    """One graph of two attentions, replayed at each length of its first request."""
    q, cache, table, start = made
    B, (N, H) = len(start), q.shape[1:]
    buffers = workspace(B, G, N, H, num_splits, "cuda")
    out = torch.empty_like(q)

    def attend() -> None:
        block_attention(q, cache, table, start, G, causal, out, buffers, config, window)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
        out.clone()  # an ordinary kernel between two attentions, as in a step
        attend()
    for length in lengths:
        start.copy_(torch.tensor([max(0, length - 13 * b) for b in range(B)], dtype=torch.int32))
        poison(buffers)
        out.fill_(torch.nan)
        graph.replay()
        expected = sdpa(q, cache, table, start, G, causal, window)
        torch.testing.assert_close(out.double(), expected, **TOLERANCE[torch.bfloat16])
        check_counts(buffers)


@pytest.mark.gpu
@pytest.mark.parametrize("G", [1, 16])
@pytest.mark.parametrize("page_size", [64, 128, 256])
def test_pages_that_hold_a_tile(page_size, G) -> None:
    """Bug: with the sizes that a bucket of Qwen3 takes, a tile's page is its neighbour's."""
    N, K, H, W = 32, 8, 128, 1024 // page_size + 1
    for num_splits in (1, 2, 16):
        starts = [1, 127, 128, 129, 400, 1000]
        q, cache, table, start = make("cuda", torch.bfloat16, starts, G, N, K, H, page_size, W)
        for causal in (True, False):
            config = choose_config(num_splits, packed_rows=G * N // K)
            out = run(q, cache, table, start, G, causal, num_splits, config)
            expected = sdpa(q, cache, table, start, G, causal)
            torch.testing.assert_close(out.double(), expected, **TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
def test_a_pool_past_32_bits() -> None:
    """Bug: element offsets wrap in a pool of more than 2^31 elements a plane."""
    G, N, K, H, S = 16, 32, 8, 128, 16
    num_pages = 2**31 // (S * K * H) + 2
    cache = torch.empty(2, num_pages, S, K, H, dtype=torch.bfloat16, device="cuda")
    table = torch.tensor([[num_pages - 1, 1, num_pages - 2]], dtype=torch.int32, device="cuda")
    cache[:, table[0].long()] = torch.randn(2, 3, S, K, H, device="cuda").bfloat16()
    q = torch.randn(G, N, H, device="cuda").bfloat16()
    start = torch.tensor([30], dtype=torch.int32, device="cuda")
    out = run(q, cache, table, start, G, True, 2)
    expected = sdpa(q, cache, table, start, G, True)
    torch.testing.assert_close(out.double(), expected, **TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
def test_two_streams_at_once() -> None:
    """Bug: splits that wait for splits which cannot start, when other programs hold the
    multiprocessors: the grids of several streams together are more than the GPU takes at once."""
    G, N, K, H, S, W = 16, 32, 8, 128, 16, 520
    made = make("cuda", torch.bfloat16, [8000], G, N, K, H, S, W)
    check_streams(made, G, 32, LaunchConfig(one_split=0))


def check_streams(made, G, num_splits, config) -> None:
    """The same attention from four streams at once, twenty times each."""
    q, cache, table, start = made
    expected = sdpa(q, cache, table, start, G, True)
    N, H = q.shape[1:]
    streams = [torch.cuda.Stream() for _ in range(4)]
    buffers = [workspace(1, G, N, H, num_splits, "cuda") for _ in streams]
    outs = [torch.full_like(q, torch.nan) for _ in streams]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, own, out in zip(streams, buffers, outs, strict=True):
            with torch.cuda.stream(stream):
                block_attention(q, cache, table, start, G, True, out, own, config)
    torch.cuda.synchronize()
    for own, out in zip(buffers, outs, strict=True):
        torch.testing.assert_close(out.double(), expected, **TOLERANCE[torch.bfloat16])
        check_counts(own)


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_cache_beyond_32_bits(num_splits) -> None:
    """Bug: an offset into the cache computed in 32 bits. 16 requests of 8192 keys in two planes of
    134 million elements, each plane 2.1 billion elements into its pool: byte and element offsets
    of the last pages exceed 2^31."""
    B, G, N, K, H, S, W = 16, 16, 32, 8, 128, 16, 512
    num_pages = B * W + 1
    plane = num_pages * S * K * H
    pool = torch.empty(2, 17 * plane, dtype=torch.bfloat16, device="cuda")  # 9.1 GB
    cache = pool[:, 16 * plane :].view(2, num_pages, S, K, H)
    cache.normal_()
    table = (1 + torch.randperm(num_pages - 1, device="cuda")).view(B, W).to(torch.int32)
    start = torch.tensor([W * S - G - 100 * b for b in range(B)], dtype=torch.int32, device="cuda")
    q = torch.randn(B * G, N, H, device="cuda").to(torch.bfloat16)
    out = run(q, cache, table, start, G, True, num_splits, choose_config(num_splits))
    for b in range(B):  # one at a time: the reference copies the keys in float64
        rows = slice(b * G, b * G + G)
        expected = sdpa(q[rows], cache, table[b : b + 1], start[b : b + 1], G, True)
        torch.testing.assert_close(out[rows].double(), expected, **TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
def test_a_page_beyond_32_bits() -> None:
    """Bug: page * S * K * H computed in 32 bits: pages past 2^31 elements of one plane."""
    G, N, K, H, S, W = 16, 32, 8, 128, 16, 12
    num_pages = (1 << 31) // (S * K * H) + 40
    cache = torch.empty(2, num_pages, S, K, H, dtype=torch.bfloat16, device="cuda")  # 8.6 GB
    table = torch.arange(num_pages - W, num_pages, dtype=torch.int32, device="cuda").view(1, W)
    cache[:, num_pages - W :].normal_()
    start = torch.tensor([W * S - G], dtype=torch.int32, device="cuda")
    q = torch.randn(G, N, H, device="cuda").to(torch.bfloat16)
    out = run(q, cache, table, start, G, False, 4, LaunchConfig(one_split=0, chunk=64))
    expected = sdpa(q, cache, table, start, G, False)
    torch.testing.assert_close(out.double(), expected, **TOLERANCE[torch.bfloat16])
