"""block_attention against torch's scaled_dot_product_attention over gathered keys."""

from typing import Any

import pytest
import torch

from graphengine.kernels.arrival_kernels import MAX_SPLITS
from graphengine.kernels.block_attention import (
    LaunchConfig,
    Workspace,
    block_attention,
    choose_config,
    workspace,
)
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.output_gate import gate_

TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 1e-2},
}


def make(device, dtype, starts, G, N, K, H, S, W, padded=0):
    """q, cache, page table and lengths; NaN in every slot that no query may read."""
    B = len(starts)
    num_pages = 1 + B * W
    cache = torch.full((2, num_pages, S, K, H), torch.nan, dtype=dtype, device=device)
    table = (torch.randperm(num_pages - 1) + 1).view(B, W).to(device, torch.int32)
    for b, start in enumerate(starts):
        length = min(start + G, W * S) if start > padded else 0
        for page in range((length + S - 1) // S):
            rows = min(S, length - page * S)
            cache[:, table[b, page], :rows] = torch.randn(2, rows, K, H, device=device).to(dtype)
        table[b, (length + S - 1) // S :] = 0  # not allocated: the null page, which is NaN
    q = torch.randn(B * G, N, H, device=device).to(dtype)
    return q, cache, table, torch.tensor(starts, dtype=torch.int32, device=device)


def sdpa(q, cache, table, starts, G, causal, window=None, padded=0):
    """Each request alone: its keys gathered, a boolean mask, torch's own attention in float64."""
    _, N, H = q.shape
    S, K = cache.shape[2:4]
    out = torch.zeros_like(q, dtype=torch.float64)
    for b, start in enumerate(starts.tolist()):
        if start == padded:
            continue
        length = min(start + G, table.shape[1] * S)
        kv = cache[:, table[b].long()].reshape(2, -1, K, H)[:, :length].double()
        k, v = kv.repeat_interleave(N // K, dim=2).transpose(1, 2)
        rows = slice(b * G, b * G + G)
        mask = torch.ones(G, length, dtype=torch.bool, device=q.device)
        if causal:
            mask = mask.tril(start)
        if window is not None:
            ahead = torch.arange(length) - torch.arange(start, start + G)[:, None]
            mask &= (ahead.abs() < window).to(q.device)
        attended = torch.nn.functional.scaled_dot_product_attention(
            q[rows].double().transpose(0, 1), k, v, attn_mask=mask
        )
        out[rows] = attended.transpose(0, 1)
    return out


def run(
    q, cache, table, starts, G, causal, num_splits, config=None, buffers=None, window=None, padded=0
):
    B, (_, N, H) = table.shape[0], q.shape
    if buffers is None:
        buffers = workspace(B, G, N, H, num_splits, q.device)
        poison(buffers)
    out = torch.full_like(q, torch.nan)
    config = config or small(q.device.type)
    block_attention(q, cache, table, starts, G, causal, out, buffers, config, window, padded)
    check_counts(buffers)
    return out


def check_counts(buffers: Workspace) -> None:
    counts, given_up = buffers.arrived_TN >> 32, buffers.arrived_TN & 0xFFFFFFFF
    assert not (counts % MAX_SPLITS).any(), "the next call would begin in the middle"
    assert not given_up.any(), "the next call would merge rows twice"


def small(device: str, **changes: Any) -> LaunchConfig:
    """Every length is split; on the CPU with tiles that keep the interpreter quick."""
    sizes = {"kv_tile": 16, "chunk": 16} if device == "cpu" else {"kv_tile": 64, "chunk": 64}
    return LaunchConfig(one_split=0)._replace(**sizes)._replace(**changes)


def poison(buffers: Workspace) -> None:
    buffers.out_ZTNH.fill_(torch.nan)
    buffers.lse_ZTN.fill_(torch.nan)


MERGES = {
    "shared": {},
    "last": {"polls": 0},
    "launched plainly": {"pdl": False},
}
INTERPRETED = "last"  # nothing waits and nothing overlaps there: others would be the same again


@pytest.mark.parametrize("num_splits", [1, 3])
def test_the_first_block_of_a_prompt(device, num_splits) -> None:
    """Bug: a prompt's first block, which begins at 0, is taken for a padded request, and its rows
    get zeros; or one without a prompt reads the null page."""
    G, sizes = 16, (4, 2, 32, 4, 20)
    made = make(device, torch.float32, [0, -1, 16, 33], G, *sizes, padded=-1)
    found = run(*made, G, True, num_splits, small(device, polls=0), padded=-1)
    expected = sdpa(*made, G, True, padded=-1)
    torch.testing.assert_close(found.double(), expected, **TOLERANCE[torch.float32])
    assert not found[G : 2 * G].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("G", "N", "K", "H", "S", "num_splits"),
    [
        (16, 8, 2, 32, 4, 5),
        (16, 8, 1, 16, 16, 3),  # 128 packed rows: two row tiles
        (1, 4, 2, 64, 16, 4),  # plain decode: 2 rows padded to 16
        (7, 6, 2, 16, 3, 1),  # odd block, group 3, one split
        (5, 2, 2, 128, 1, 32),  # more splits than tiles, page of one token
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


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("G", [1, 6])
def test_every_number_of_live_splits(device, G, merge) -> None:
    """Bug: a share of the rows merged twice or by nobody, a bucket of splits left out, a chunk
    dealt to no split or to two, a counter that survives the call; at each chunk's edges."""
    if device == "cpu" and (merge != INTERPRETED or G == 1):
        pytest.skip("covered by the others in the interpreter, which is slow")
    N, K, H, S, num_splits = 4, 2, 16, 8, 4 if device == "cpu" else 6
    tile, edge = (16, (0, 1)) if device == "cpu" else (64, (-1, 0, 1))
    chunk = 2 * tile
    edges = [n * chunk + d - G for n in range(1, num_splits + 2) for d in edge]
    starts = [1, 0, *edges]
    W = (max(edges) + G) // S + 1
    q, cache, table, start = make(device, torch.float32, starts, G, N, K, H, S, W)
    expected = sdpa(q, cache, table, start, G, True)
    for one_split in (0, 3 * chunk):
        sizes = {"kv_tile": 2 * tile, "chunk": chunk, "one_split": one_split}  # fp32 halves a tile
        out = run(
            q, cache, table, start, G, True, num_splits, LaunchConfig(**sizes, **MERGES[merge])
        )
        torch.testing.assert_close(out.double(), expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize("G", [1, 6])
@pytest.mark.parametrize("merge", MERGES)
def test_a_gate_as_if_behind_it(device, merge, G, splits) -> None:
    """Bug: a head is gated by another's columns or a row by another's, a partial instead of the
    sum; rows of one split, or of a padded request, go without; other bits than those of the kernel
    behind attention that does the same in piecewise mode."""
    if device == "cpu" and merge != INTERPRETED:
        pytest.skip("covered by the others in the interpreter, which is slow")
    dtype = torch.float16 if device == "cpu" else torch.bfloat16
    N, K, H, S, num_splits = 4, 2, 16, 8, 3
    made = make(device, dtype, [1, 0, 20, 200], G, N, K, H, S, 230 // S + 1)
    parts = torch.randn(max(splits, 1), 4 * G, N * H + 24, device=device)
    gate = parts if splits else parts[0].to(dtype)
    config = small(device, **MERGES[merge])
    expected = run(*made, G, True, num_splits, config)
    found = torch.full_like(expected, torch.nan)
    buffers = workspace(4, G, N, H, num_splits, device)
    block_attention(*made, G, True, found, buffers, config, gate_TE=gate)
    gate_(expected, gate)
    assert torch.equal(found, expected)
    check_counts(buffers)


@pytest.mark.parametrize("merge", MERGES)
def test_many_splits_of_few_rows(device, merge) -> None:
    """Bug: more splits than rows to share (16 packed rows, up to 32 splits); a sum in the order
    of arrival, which differs from call to call."""
    if device == "cpu" and merge != INTERPRETED:
        pytest.skip("covered by the others in the interpreter, which is slow")
    G, N, K, H, S = 1, 2, 1, 16, 8
    tile = 16 if device == "cpu" else 64
    starts = [tile * live - 1 for live in (32, 31, 17, 16, 9)]
    W = 32 * tile // S
    q, cache, table, start = make(device, torch.bfloat16, starts, G, N, K, H, S, W)
    config = small(device, **MERGES[merge])
    out = run(q, cache, table, start, G, True, 32, config)
    expected = sdpa(q, cache, table, start, G, True)
    torch.testing.assert_close(out.double(), expected, **TOLERANCE[torch.bfloat16])
    if device == "cuda":
        for _ in range(20):
            assert torch.equal(out, run(q, cache, table, start, G, True, 32, config))


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


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 4, 40])
def test_windows_match_sdpa(device, causal, window) -> None:
    """Bug T22, T24: a window of W + 1 or W - 1 keys, no limit to the right in a block longer than
    the window, chunks before the window dealt to splits or the first one skipped."""
    G, N, K, H, S = 6, 4, 2, 16, 4
    starts = [1, 0, 3, 16, 17, 48, 83]
    W = (max(starts) + G) // S + 2
    q, cache, table, start = make(device, torch.float32, starts, G, N, K, H, S, W)
    expected = sdpa(q, cache, table, start, G, causal, window)
    for num_splits in (1, 4):
        out = run(q, cache, table, start, G, causal, num_splits, window=window)
        torch.testing.assert_close(out.double(), expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("merge", MERGES)
def test_windows_merge(device, merge) -> None:
    """Bug: a split's chunks and their number count those before the window differently; a row that
    sees nothing of a split is not neutral (bf16, and the null page is NaN)."""
    if device == "cpu" and merge != INTERPRETED:
        pytest.skip("covered by the others in the interpreter, which is slow")
    G, N, K, H, S = 3, 4, 1, 32, 4
    tile = 16 if device == "cpu" else 64
    starts = [n * tile + d for n, d in ((1, 0), (4, -2), (4, 0), (9, 1))]
    q, cache, table, start = make(
        device, torch.bfloat16, starts, G, N, K, H, S, W=10 * tile // S + 2
    )
    for window, one_split in ((tile + 1, 0), (3 * tile, 0), (3 * tile, 2 * tile)):
        config = small(device, one_split=one_split, **MERGES[merge])
        out = run(q, cache, table, start, G, True, 5, config, window=window)
        expected = sdpa(q, cache, table, start, G, True, window)
        torch.testing.assert_close(out.double(), expected, **TOLERANCE[torch.bfloat16])


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
    block_attention(strided, pool[:, 1], table, start, G, True, out, buffers, small(device))
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
    with pytest.raises(ValueError, match=r"workspace is for \(8, 8, 16\)"):
        block_attention(q, cache, table, start, G, True, out, workspace(2, G, 8, H, 2, device))
    with pytest.raises(ValueError, match="block_length 0"):
        block_attention(
            q[:0], cache, table, start, 0, True, out[:0], workspace(2, 0, N, H, 2, device)
        )
    with pytest.raises(ValueError, match="over a cache of 2 heads of 8"):
        block_attention(q, cache[..., :8].contiguous(), table, start, G, True, out, good)
    with pytest.raises(ValueError, match="start"):
        block_attention(q, cache, table, start.long(), G, True, out, good)
    with pytest.raises(ValueError, match="do not group"):
        block_attention(q[:, :3], cache, table, start, G, True, out[:, :3].contiguous(), good)
    with pytest.raises(ValueError, match="heads must be contiguous"):
        block_attention(q[:, ::2], cache, table, start, G, True, out[:, ::2], good)
    with pytest.raises(ValueError, match="window 0"):
        block_attention(q, cache, table, start, G, True, out, good, window=0)
    with pytest.raises(ValueError, match="gate"):
        block_attention(q, cache, table, start, G, True, out, good, gate_TE=q.flatten(1)[:, 1:])
    with pytest.raises(ValueError, match="num_splits"):
        workspace(1, G, N, H, MAX_SPLITS + 1, device)


def test_chunks_of_a_block_alone(device) -> None:
    """Bug: with the sizes for one request, whose chunks hold four tiles, a split goes on with the
    tile behind its own chunk, or leaves out the last one that is cut short."""
    G, N, K, H, W = 5, 8, 2, 16, 7
    starts = [251, 508, 760]
    q, cache, table, start = make(device, torch.float32, starts, G, N, K, H, 128, W)
    config = choose_config(5, packed_rows=G * N // K)
    assert config.chunk == 4 * config.kv_tile
    out = run(q, cache, table, start, G, True, 5, config)
    expected = sdpa(q, cache, table, start, G, True)
    torch.testing.assert_close(out.double(), expected, **TOLERANCE[torch.float32])


def test_refuses_a_chunk_of_broken_tiles(device) -> None:
    """Bug: the end of a chunk that is no multiple of the tile attended twice."""
    if device == "cpu" and not INTERPRET:
        pytest.skip("the torch reference has no chunks")
    q, cache, table, start = make(device, torch.float32, [6], 4, 4, 2, 16, 4, W=4)
    with pytest.raises(ValueError, match=r"chunk 48: .* multiple of 32 keys"):
        run(q, cache, table, start, 4, True, 2, LaunchConfig(kv_tile=64, chunk=48))
    with pytest.raises(ValueError, match="chunk 96"):
        run(q, cache, table, start, 4, True, 2, LaunchConfig(kv_tile=64, chunk=96))


def test_rows_of_a_wider_table(device) -> None:
    """Bug: where tables of fewer pages are the first columns of wider ones, a request's keys are
    another one's."""
    G, N, K, H, S = 3, 2, 1, 16, 4
    q, cache, table, start = make(device, torch.float32, [9, 30, 17], G, N, K, H, S, W=9)
    wide = torch.cat([table, table.flip(0, 1)], 1)[:, :9]
    for num_splits in (1, 2):
        out = run(q, cache, wide, start, G, True, num_splits)
        expected = sdpa(q, cache, table, start, G, True)
        torch.testing.assert_close(out.double(), expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("page_size", [3, 24, 32, 64, 128])
def test_page_sizes(device, page_size, window) -> None:
    """Bug: a key's place in its page is taken from its place in the tile, which is right only where
    pages divide tiles; or one page is looked up for a tile that reaches into the next."""
    G, N, K, H, W = 4, 4, 2, 16, -(-150 // page_size)
    starts = [1, 31, 32, 63, 64, 127, 128, 130]
    q, cache, table, start = make(device, torch.float32, starts, G, N, K, H, page_size, W)
    config = LaunchConfig(one_split=0, chunk=64)
    out = run(q, cache, table, start, G, True, 2, config, window=window)
    expected = sdpa(q, cache, table, start, G, True, window)
    torch.testing.assert_close(out.double(), expected, **TOLERANCE[torch.float32])
