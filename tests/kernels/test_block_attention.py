"""block_attention against torch's scaled_dot_product_attention over gathered keys."""

from typing import Any

import pytest
import torch

from graphengine.kernels.block_attention import (
    MAX_SPLITS,
    LaunchConfig,
    Workspace,
    block_attention,
    choose_num_splits,
    workspace,
)

TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 1e-2},
}


def make(device, dtype, starts, G, N, K, H, S, W):
    """q, cache, page table and lengths; NaN in every slot that no query may read."""
    B = len(starts)
    num_pages = 1 + B * W
    cache = torch.full((2, num_pages, S, K, H), torch.nan, dtype=dtype, device=device)
    table = (torch.randperm(num_pages - 1) + 1).view(B, W).to(device, torch.int32)
    for b, start in enumerate(starts):
        length = min(start + G, W * S) if start else 0
        for page in range((length + S - 1) // S):
            rows = min(S, length - page * S)
            cache[:, table[b, page], :rows] = torch.randn(2, rows, K, H, device=device).to(dtype)
        table[b, (length + S - 1) // S :] = 0  # not allocated: the null page, which is NaN
    q = torch.randn(B * G, N, H, device=device).to(dtype)
    return q, cache, table, torch.tensor(starts, dtype=torch.int32, device=device)


def sdpa(q, cache, table, starts, G, causal):
    """Each request alone: its keys gathered, a boolean mask, torch's own attention in float64."""
    _, N, H = q.shape
    S, K = cache.shape[2:4]
    out = torch.zeros_like(q, dtype=torch.float64)
    for b, start in enumerate(starts.tolist()):
        if start == 0:
            continue
        length = min(start + G, table.shape[1] * S)
        kv = cache[:, table[b].long()].reshape(2, -1, K, H)[:, :length].double()
        k, v = kv.repeat_interleave(N // K, dim=2).transpose(1, 2)
        rows = slice(b * G, b * G + G)
        mask = torch.ones(G, length, dtype=torch.bool, device=q.device)
        if causal:
            mask = mask.tril(start)
        attended = torch.nn.functional.scaled_dot_product_attention(
            q[rows].double().transpose(0, 1), k, v, attn_mask=mask
        )
        out[rows] = attended.transpose(0, 1)
    return out


def run(q, cache, table, starts, G, causal, num_splits, config=None, buffers=None):
    B, (_, N, H) = table.shape[0], q.shape
    if buffers is None:
        buffers = workspace(B, G, N, H, num_splits, q.device)
        poison(buffers)
    out = torch.full_like(q, torch.nan)
    config = config or LaunchConfig(kv_tile=16 if q.device.type == "cpu" else 64)
    block_attention(q, cache, table, starts, G, causal, out, buffers, config)
    return out


def poison(buffers: Workspace) -> None:
    for x in buffers:
        x.fill_(torch.nan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("G", "N", "K", "H", "S", "num_splits"),
    [
        (16, 8, 2, 32, 4, 5),
        (16, 8, 1, 16, 16, 3),  # 128 packed rows: two row tiles
        (1, 4, 2, 64, 16, 4),  # plain decode: 2 rows padded to 16
        (7, 6, 2, 16, 3, 1),  # odd block, group 3, one split
        (5, 2, 2, 128, 1, 33),  # more splits than tiles, page of one token
    ],
)
def test_matches_sdpa(device, dtype, causal, G, N, K, H, S, num_splits) -> None:
    """Bug: a mask off by one, a head mapped to the wrong kv head, a page taken from another
    request, an empty split that is not neutral, NaN from stale memory."""
    starts = [1, 0, 48, 83]
    W = (max(starts) + G) // S + 2
    q, cache, table, start = make(device, dtype, starts, G, N, K, H, S, W)
    out = run(q, cache, table, start, G, causal, num_splits)
    expected = sdpa(q, cache, table, start, G, causal)
    torch.testing.assert_close(out.double(), expected, **TOLERANCE[dtype])
    assert (out.view(len(starts), -1)[1] == 0).all()


@pytest.mark.parametrize("causal", [True, False])
def test_every_length_around_the_tile(device, causal) -> None:
    """Bug: wrong only where the length crosses a tile or leaves a split empty."""
    G, N, K, H, S = 3, 2, 1, 16, 4
    tile = 16 if device == "cpu" else 64
    starts = [1, 2, *range(tile - G - 1, tile + 2), *range(2 * tile - G, 2 * tile + 1)]
    q, cache, table, start = make(
        device, torch.float32, starts, G, N, K, H, S, W=(2 * tile + 2 * G) // S + 1
    )
    expected = sdpa(q, cache, table, start, G, causal)
    for num_splits in (1, 3):
        out = run(q, cache, table, start, G, causal, num_splits)
        torch.testing.assert_close(out.double(), expected, **TOLERANCE[torch.float32])


def test_workspace_of_a_longer_call(device) -> None:
    """Bug: the merge reads what a longer earlier call left in the workspace."""
    G, N, K, H, S = 4, 4, 2, 16, 4
    buffers = workspace(1, G, N, H, 6, device)
    for starts in ([90], [3]):
        q, cache, table, start = make(device, torch.float32, starts, G, N, K, H, S, W=25)
        out = run(q, cache, table, start, G, True, 6, buffers=buffers)
        expected = sdpa(q, cache, table, start, G, True)
        torch.testing.assert_close(out.double(), expected, **TOLERANCE[torch.float32])


def test_strided_q_and_cache_planes(device) -> None:
    """Bug: q inside a packed row, or a layer of a pool with another plane stride, misread."""
    G, N, K, H, S = 3, 4, 2, 16, 4
    q, cache, table, start = make(device, torch.float32, [7, 20], G, N, K, H, S, W=8)
    expected = run(q, cache, table, start, G, True, 2)
    packed = torch.full((2 * G, N + 2, H), torch.nan, device=device)
    packed[:, :N] = q
    pool = torch.full((2, 3, *cache.shape[1:]), torch.nan, device=device)
    pool[:, 1] = cache
    strided = packed[:, :N]
    out = torch.full_like(q, torch.nan)
    buffers = workspace(2, G, N, H, 2, device)
    config = LaunchConfig(kv_tile=16 if device == "cpu" else 64)
    block_attention(strided, pool[:, 1], table, start, G, True, out, buffers, config)
    assert torch.equal(out, expected)


def test_past_the_end_of_the_table(device) -> None:
    """Bug: a block that runs over the table's end reads the null page."""
    G, N, K, H, S = 4, 2, 1, 16, 4
    q, cache, table, start = make(device, torch.float32, [6], G, N, K, H, S, W=2)
    out = run(q, cache, table, start, G, False, 2)
    expected = sdpa(q, cache, table, start, G, False)
    torch.testing.assert_close(out.double(), expected, **TOLERANCE[torch.float32])


def test_refuses(device) -> None:
    """Bug: buffers of another bucket accepted, then written out of bounds."""
    G, N, K, H, S = 4, 4, 2, 16, 4
    q, cache, table, start = make(device, torch.float32, [6, 7], G, N, K, H, S, W=4)
    good = workspace(2, G, N, H, 2, device)
    out = torch.empty_like(q)
    with pytest.raises(ValueError, match="workspace"):
        block_attention(q, cache, table, start, G, True, out, workspace(1, G, N, H, 2, device))
    with pytest.raises(ValueError, match="block_length"):
        block_attention(q, cache, table, start, G + 1, True, out, good)
    with pytest.raises(ValueError, match="start"):
        block_attention(q, cache, table, start.long(), G, True, out, good)
    with pytest.raises(ValueError, match="heads must be contiguous"):
        block_attention(q[:, ::2], cache, table, start, G, True, out[:, ::2], good)
    with pytest.raises(ValueError, match="num_splits"):
        workspace(1, G, N, H, MAX_SPLITS + 1, device)


def test_number_of_splits() -> None:
    """Bug: one split at batch 1 (most of the GPU idle), or none at a large batch."""
    assert [choose_num_splits(b, 8, 132) for b in (1, 8, 16, 64)] == [33, 4, 2, 1]
    assert choose_num_splits(1, 1, 132) == MAX_SPLITS


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("B", [1, 8])
def test_one_capture_serves_every_length(B, causal, pdl) -> None:
    """Bug: something of the length baked into the captured graph; wrong order under PDL."""
    G, N, K, H, S, W = 16, 32, 8, 128, 16, 260
    num_splits = choose_num_splits(B, K, 132)
    longest = [4000 - 7 * b for b in range(B)]
    q, cache, table, start = make("cuda", torch.bfloat16, longest, G, N, K, H, S, W)
    buffers = workspace(B, G, N, H, num_splits, "cuda")
    out = torch.empty_like(q)

    def attend() -> None:
        block_attention(q, cache, table, start, G, causal, out, buffers, LaunchConfig(pdl=pdl))

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    for length in (1, 47, 48, 49, 1000, 2047, 3999):
        start.copy_(torch.tensor([max(0, length - 13 * b) for b in range(B)], dtype=torch.int32))
        poison(buffers)
        out.fill_(torch.nan)
        graph.replay()
        expected = sdpa(q, cache, table, start, G, causal)
        torch.testing.assert_close(out.double(), expected, **TOLERANCE[torch.bfloat16])
