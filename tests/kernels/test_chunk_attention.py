"""chunk_attention against torch's scaled_dot_product_attention over gathered keys."""

from typing import Any

import pytest
import torch

from graphengine.kernels.chunk_attention import BLOCK, LaunchConfig, chunk_attention, takes

BF16, NAN = torch.bfloat16, torch.nan
TOLERANCE: dict[str, Any] = {"rtol": 2e-2, "atol": 1e-2}
CONFIGS = {
    "default": LaunchConfig(),
    "no overlap": LaunchConfig(pdl=False),
    "three stages": LaunchConfig(num_stages=3),
    "small tiles": LaunchConfig(kv_tile=64, num_stages=4),
}


def make(device, starts, lengths, N, K, S, H=128, stale=NAN):
    """q, cache, page table, starts: block b is of a request of `lengths[b]` tokens.

    `stale` is what stands in every slot that no live row may read, on the null page as well.
    """
    W = max([-(-(start + BLOCK) // S) for start in starts])
    pages = [-(-min(length, W * S) // S) for length in lengths]
    cache = torch.full((2, 1 + sum(pages), S, K, H), stale, dtype=BF16, device=device)
    order = iter((1 + torch.randperm(sum(pages))).tolist())
    table = torch.zeros(len(starts), W, dtype=torch.int32)
    for b, (count, length) in enumerate(zip(pages, lengths, strict=True)):
        table[b, :count] = torch.tensor([next(order) for _ in range(count)])
        for page in range(count):
            rows = min(S, length - page * S)
            cache[:, table[b, page], :rows] = torch.randn(2, rows, K, H, device=device).to(BF16)
    q = torch.randn(len(starts) * BLOCK, N, H, device=device).to(BF16)
    return q, cache, table.to(device), torch.tensor(starts, dtype=torch.int32, device=device)


def check(out, q, cache, table, starts, lengths) -> None:
    """The rows of each block that are the request's, against torch's own attention in float64."""
    N, (K, H) = q.shape[1], cache.shape[3:]
    for b, (start, length) in enumerate(zip(starts.tolist(), lengths, strict=True)):
        rows = slice(b * BLOCK, b * BLOCK + (min(length - start, BLOCK) if start >= 0 else BLOCK))
        if start < 0:
            assert (out[rows] == 0).all()
            continue
        end = start + rows.stop - rows.start
        kv = cache[:, table[b].long()].reshape(2, -1, K, H)[:, :end].double()
        k, v = kv.repeat_interleave(N // K, dim=2).transpose(1, 2)
        mask = torch.ones(end - start, end, dtype=torch.bool, device=q.device).tril(start)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[rows].double().transpose(0, 1), k, v, attn_mask=mask
        )
        torch.testing.assert_close(out[rows].double(), expected.transpose(0, 1), **TOLERANCE)


def run(q, cache, table, start, config=None):
    out = torch.full_like(q, NAN)
    chunk_attention(q, cache, table, start, out, config)
    return out


@pytest.mark.parametrize("H", [128, 256])
@pytest.mark.parametrize("S", [16, 32, 64, 128])
def test_matches_sdpa(device, S, H) -> None:
    """Bug: a mask off by one, a page of another request, a head of another kv head, a tile's
    columns or pages in the wrong order in shared memory, NaN from stale slots or the null page."""
    starts = [0, -1, 1, 127, 128, 129, 1000, 896, 0]
    lengths = [128, 0, 129, 200, 256, 257, 1128, 1001, 5]
    made = make(device, starts, lengths, N=8, K=2, S=S, H=H)
    for config in CONFIGS.values() if device == "cuda" and H == 128 else [None]:
        check(run(*made, config), *made, lengths)


def test_blocks_of_one_request(device) -> None:
    """Bug: blocks that share one row of the page table (a stride of 0) read past it."""
    starts, length = [0, 128, 256, 384], 450
    q, cache, table, start = make(device, [384], [length], N=4, K=1, S=16)
    q = torch.randn(len(starts) * BLOCK, 4, 128, device=device).to(BF16)
    start = torch.tensor(starts, dtype=torch.int32, device=device)
    table = table.expand(len(starts), -1)
    check(run(q, cache, table, start), q, cache, table, start, [length] * len(starts))


def test_strided_q_and_cache_planes(device) -> None:
    """Bug: q inside a packed row, or a layer of a pool with another plane stride, misread."""
    lengths = [300, 40]
    q, cache, table, start = make(device, [200, 0], lengths, N=4, K=2, S=128)
    expected = run(q, cache, table, start)
    packed = torch.full((len(q), 6, 128), NAN, dtype=BF16, device=device)
    packed[:, :4] = q
    pool = torch.full((2, 3, *cache.shape[1:]), NAN, dtype=BF16, device=device)
    pool[:, 1] = cache
    out = torch.full_like(q, NAN)
    chunk_attention(packed[:, :4], pool[:, 1], table, start, out)
    check(out, q, cache, table, start, lengths)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("stale", [torch.inf, -torch.inf, 1e30])
def test_what_nobody_sees_is_harmless(device, stale) -> None:
    """Bug: 0 * infinity, or a large stale score as the maximum of a row that does not see it."""
    lengths = [1, 130, 383]
    made = make(device, [0, 128, 255], lengths, N=2, K=1, S=128, stale=stale)
    check(run(*made), *made, lengths)


def test_refuses(device) -> None:
    """Bug: tensors that the kernel would address wrongly accepted."""
    q, cache, table, start = make(device, [0, 128], [128, 256], N=2, K=1, S=16)
    out = torch.empty_like(q)
    with pytest.raises(ValueError, match="block_length 128"):
        chunk_attention(q[1:], cache, table, start, out[1:])
    with pytest.raises(ValueError, match="start"):
        chunk_attention(q, cache, table, start.long(), out)
    with pytest.raises(ValueError, match="page_table"):
        chunk_attention(q, cache, table[:, ::2], start, out)
    with pytest.raises(ValueError, match="heads must be contiguous"):
        chunk_attention(q[:, ::2], cache, table, start, out[:, ::2])
    with pytest.raises(ValueError, match="use one"):
        chunk_attention(q.float(), cache, table, start, out)


def test_takes_what_the_kernel_can(device) -> None:
    """Bug: a head of 64, float32, pages of 256 or a CPU sent to a kernel not made for it."""
    q, cache, _, _ = make(device, [0], [128], N=2, K=1, S=16)
    is_hopper = device == "cuda" and torch.cuda.get_device_capability()[0] == 9
    assert takes(q, cache) == is_hopper
    assert not takes(q.float(), cache.float())
    assert not takes(q[:, :, :64], cache[..., :64])
    assert not takes(q, cache.new_empty(2, 1, 256, 1, 128))


@pytest.mark.gpu
def test_the_kernel_refuses_what_it_cannot_take() -> None:
    """Bug: a launch with heads of 64, or with rows that TMA cannot address."""
    q, cache, table, start = make("cuda", [0], [128], N=2, K=1, S=16, H=64)
    with pytest.raises(ValueError, match="head_dim 64"):
        run(q, cache, table, start)
    q, cache, table, start = make("cuda", [0], [128], N=2, K=1, S=16)
    rows = torch.empty(BLOCK, 2 * 128 + 4, dtype=BF16, device="cuda")
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        chunk_attention(rows[:, :256].view(BLOCK, 2, 128), cache, table, start, q)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
def test_one_capture_serves_every_length(config) -> None:
    """Bug: something of the lengths baked into the captured graph; a race between the loading
    warps and the consumers, whose results differ from replay to replay."""
    N, K, S, longest = 32, 8, 128, [2048 + 128 * b for b in range(8)]
    lengths = [start + BLOCK for start in longest]
    q, cache, table, start = make("cuda", longest, lengths, N, K, S, stale=0.0)
    out = torch.empty_like(q)
    chunk_attention(q, cache, table, start, out, CONFIGS[config])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chunk_attention(q, cache, table, start, out, CONFIGS[config])
        first = out.clone()  # an ordinary kernel between two attentions, as in a forward
        chunk_attention(q, cache, table, start, out, CONFIGS[config])
    for begin in ([-1] * 8, [0] * 8, [1, 100, 127, 128, 129, 500, 777, -1], longest):
        start.copy_(torch.tensor(begin, dtype=torch.int32))
        for _ in range(10):
            out.fill_(NAN)
            graph.replay()
            assert torch.equal(first, out)
        check(out, q, cache, table, start, [max(b, 0) + BLOCK for b in begin])


@pytest.mark.gpu
def test_a_long_context_and_pages_beyond_32_bits() -> None:
    """Bug: an offset into the cache computed in 32 bits (a plane of 2^31 elements and more); a
    phase of a barrier lost after many tiles."""
    N, K, H, S, W = 8, 8, 128, 128, 256
    num_pages = (1 << 31) // (S * K * H) + W
    cache = torch.empty(2, num_pages, S, K, H, dtype=BF16, device="cuda")  # 8.7 GB
    cache[:, -W:].normal_()
    table = torch.arange(num_pages - W, num_pages, dtype=torch.int32, device="cuda").view(1, W)
    starts = [W * S - BLOCK, W * S - 2 * BLOCK - 1]
    q = torch.randn(2 * BLOCK, N, H, device="cuda").to(BF16)
    start = torch.tensor(starts, dtype=torch.int32, device="cuda")
    table = table.expand(2, -1)
    check(run(q, cache, table, start), q, cache, table, start, [W * S] * 2)
