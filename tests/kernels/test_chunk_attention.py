"""chunk_attention against torch's scaled_dot_product_attention over gathered keys."""

import random
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from graphengine.kernels.chunk_attention import (
    BLOCK,
    LaunchConfig,
    choose_num_splits,
    chunk_attention,
    takes,
    tiles_of,
)
from graphengine.kernels.merge_splits import Workspace, workspace

BF16, NAN = torch.bfloat16, torch.nan
TOLERANCE: dict[str, Any] = {"rtol": 2e-2, "atol": 1e-2}
CONFIGS = {
    "default": LaunchConfig(),
    "no overlap": LaunchConfig(pdl=False),
    "three stages": LaunchConfig(num_stages=3),
    "small tiles": LaunchConfig(kv_tile=64, num_stages=4),
}


def make(device, starts, lengths, N, K, S, H=128, stale=NAN, dtype=BF16):
    """q, cache, page table, starts: block b is of a request of `lengths[b]` tokens.

    `stale` is what stands in every slot that no live row may read, on the null page as well.
    """
    W = max([-(-(start + BLOCK) // S) for start in starts])
    pages = [-(-min(length, W * S) // S) for length in lengths]
    cache = torch.full((2, 1 + sum(pages), S, K, H), stale, dtype=dtype, device=device)
    order = iter((1 + torch.randperm(sum(pages))).tolist())
    table = torch.zeros(len(starts), W, dtype=torch.int32)
    for b, (count, length) in enumerate(zip(pages, lengths, strict=True)):
        table[b, :count] = torch.tensor([next(order) for _ in range(count)])
        for page in range(count):
            rows = min(S, length - page * S)
            cache[:, table[b, page], :rows] = torch.randn(2, rows, K, H, device=device).to(dtype)
    q = torch.randn(len(starts) * BLOCK, N, H, device=device).to(dtype)
    return q, cache, table.to(device), torch.tensor(starts, dtype=torch.int32, device=device)


def check(out, q, cache, table, starts, lengths, window=None, sinks=None) -> None:
    """The rows of each block that are the request's, against torch's own attention in float64. A
    sink is a key of its own: zeros but for a column that the queries have a one in."""
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
        mask &= ~mask.tril(start - (window or end))
        asking = q[rows].double().transpose(0, 1)
        if sinks is not None:
            asking, k, v = (F.pad(x, (0, 1, 0, more)) for x, more in ((asking, 0), (k, 1), (v, 1)))
            asking[..., -1], k[:, -1, -1] = H**0.5, sinks.double()
            mask = F.pad(mask, (0, 1), value=True)
        expected = F.scaled_dot_product_attention(asking, k, v, attn_mask=mask, scale=H**-0.5)
        found = out[rows].double().transpose(0, 1)
        torch.testing.assert_close(found, expected[..., :H], **TOLERANCE)


def poisoned(q, num_splits) -> Workspace | None:
    """Partial results whose every element is NaN."""
    if not num_splits:
        return None
    T, N, H = q.shape
    made = workspace(T, N, H, num_splits, q.device)
    for part in made:
        part.fill_(NAN)
    return made


def run(q, cache, table, start, config=None, num_splits=0, window=None, sinks=None):
    out = torch.full_like(q, NAN)
    partials = poisoned(q, num_splits)
    chunk_attention(q, cache, table, start, out, partials, config, window, sinks)
    return out


@pytest.mark.parametrize("H", [64, 128, 256])
@pytest.mark.parametrize("S", [16, 32, 64, 128])
def test_matches_sdpa(device, S, H) -> None:
    """Bug: a mask off by one, a page of another request, a head of another kv head, a tile's
    columns or pages in the wrong order in shared memory, NaN from stale slots or the null page."""
    starts = [0, -1, 1, 127, 128, 129, 1000, 896, 0]
    lengths = [128, 0, 129, 200, 256, 257, 1128, 1001, 5]
    made = make(device, starts, lengths, N=8, K=2, S=S, H=H)
    configs = CONFIGS.values() if device == "cuda" and H == S == 128 else [None]
    for config, num_splits in product(configs, (0, 3) if device == "cuda" else [0]):
        check(run(*made, config, num_splits), *made, lengths)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 40, 64, 65, 127, 128, 129, 300, 1 << 20])
@pytest.mark.parametrize("H", [64, 128])
def test_windows_and_sinks_match_sdpa(device, H, window, has_sinks) -> None:
    """Bug: a window one key too long or short; tiles left out that a row sees; NaN where a row sees
    nothing of the first tile or of a split; a sink in every split, or in one that has no tiles; the
    count of the tiles with stale values wrong, upon which consumers wait for ever."""
    starts = [0, -1, 1, 127, 128, 129, 255, 1000, 2816]
    lengths = [128, 0, 129, 200, 256, 257, 300, 1128, 2900]
    made = make(device, starts, lengths, N=8, K=2, S=32, H=H)
    sinks = torch.linspace(-30, 30, 8, device=device) if has_sinks else None
    tiles, splits = [LaunchConfig(kv_tile=64), LaunchConfig()], (0, 1, 3, 16)
    if device == "cpu":  # the reference, which has neither
        tiles, splits = [None], (0,)
    for config, num_splits in product(tiles, splits):
        out = run(*made, config, num_splits, window, sinks)
        check(out, *made, lengths, window, sinks)


def test_keys_in_front_of_every_window_are_not_read(device) -> None:
    """Bug: 0 * NaN of a key that no row sees any more, in a tile that a row's window begins in."""
    start, window, S = 1000, 200, 16
    q, cache, table, starts = make(device, [start], [start + BLOCK], N=4, K=2, S=S)
    gone = table[0, : (start - window + 1) // S].long()
    for stale in (NAN, torch.inf, 1e30):
        cache[:, gone] = stale
        for num_splits in (0, 4):
            out = run(q, cache, table, starts, None, num_splits, window)
            clean = cache.clone()
            clean[:, gone] = 0
            check(out, q, clean, table, starts, [start + BLOCK], window)


def test_a_block_has_the_same_result_in_company(device) -> None:
    """Bug: where keys are split depends on another block, so a prompt's K/V does on its pieces."""
    lengths = [3000, 1500, 200]
    q, cache, table, start = make(device, [2872, 1372, 72], lengths, N=4, K=2, S=32)
    together = run(q, cache, table, start, num_splits=5).unflatten(0, (3, BLOCK))
    for b, rows in enumerate(q.split(BLOCK)):
        alone = run(rows, cache, table[b : b + 1], start[b : b + 1], num_splits=5)
        assert torch.equal(alone, together[b])


@pytest.mark.parametrize("seed", range(12))
def test_splits_find_what_one_finds(seed) -> None:
    """Bug: a tile read twice or by nobody, a page of another tile, a split without tiles that adds
    what an earlier call left, a stale slot's score or value in a split's sums."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    starts = [rng.choice([-1, rng.randrange(300), rng.randrange(3000)]) for _ in range(3)]
    lengths = [start + rng.randrange(1, BLOCK + 1) if start >= 0 else 0 for start in starts]
    S, H, stale = rng.choice([16, 32, 64, 128]), rng.choice([64, 128]), rng.choice([NAN, 1e4])
    made = make("cpu", starts, lengths, 2, 1, S, H, stale, dtype=torch.float32)
    window = rng.choice([None, rng.randrange(1, 400)])
    sinks = rng.choice([None, torch.randn(2)])
    expected = run(*made, window=window, sinks=sinks)
    tile = LaunchConfig(kv_tile=rng.choice([64, 128]))
    for num_splits in (1, 2, rng.randrange(3, 9), 16):
        found = run(*made, tile, num_splits, window, sinks)
        for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            rows = slice(b * BLOCK, b * BLOCK + (length - start if start >= 0 else BLOCK))
            assert found[rows].isfinite().all()
            torch.testing.assert_close(found[rows], expected[rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("num_splits", [1, 2, 4, 5, 16])
def test_every_tile_is_one_split_s(tile, num_splits) -> None:
    """Bug: a row without a key in a split that has tiles, whose largest score is then -inf and its
    sums NaN; or tiles that must be masked in a split that counts them from another."""
    for start in [*range(300), 1023, 1024, 4000, 32640]:
        num_tiles, num_full = -(-(start + BLOCK) // tile), (start + 1) // tile
        shares = [tiles_of.fn(z, num_tiles, num_full, num_splits) for z in range(num_splits)]
        assert [n for share in shares for n in range(*share)] == list(range(num_tiles))
        for z, (first, behind) in enumerate(shares):
            assert first == behind or first == 0 or first < num_full
            assert behind <= num_full or z == num_splits - 1
        if num_tiles >= 8 * num_splits:  # nobody has much more than others
            assert max(b - a for a, b in shares) - min(b - a for a, b in shares) <= 3


def test_how_many_splits() -> None:
    """Bug: more CTAs than multiprocessors, of which each holds one: a second round that takes as
    long as the first."""
    found = [choose_num_splits(blocks, 32, 132) for blocks in (1, 2, 4, 16)]
    assert found == [4, 2, 1, 1]
    assert choose_num_splits(2, 24, 132) == 2
    assert choose_num_splits(1, 4, 132) == 16
    assert choose_num_splits(8, 32, 1) == 1


@pytest.mark.parametrize("H", [64, 128, 256])
@pytest.mark.parametrize("every", [1, 7, 8, 64])
def test_rows_that_find_a_higher_score_in_every_tile(device, every, H) -> None:
    """Bug: what a row has summed does not shrink where the other row of its thread, or another
    thread's, finds no higher score, or shrinks where only that one does."""
    start, N, K, S = 512, 4, 2, 128
    q, cache, table, starts = make(device, [start], [start + BLOCK], N, K, S, H)
    cache[0, table[0].long()] = 0
    q[:] = 0
    q[every - 1 :: every, :, 0] = 1
    for tile in range(start // 64 + 2):
        page, slot = divmod(tile * 64, S)
        cache[0, table[0, page], slot, :, 0] = 3 * (tile + 1) * H**0.5
    check(run(q, cache, table, starts), q, cache, table, starts, [start + BLOCK])


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
    for num_splits in (0, 2, 7):
        check(run(*made, num_splits=num_splits), *made, lengths)


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
    with pytest.raises(ValueError, match="partials are for"):
        chunk_attention(q, cache, table, start, out, workspace(BLOCK, 2, 128, 2, device))
    with pytest.raises(ValueError, match="window 0"):
        run(q, cache, table, start, window=0)
    with pytest.raises(ValueError, match=r"sinks \(3,\)"):
        run(q, cache, table, start, sinks=torch.zeros(3, device=device))


def test_takes_what_the_kernel_can(device) -> None:
    """Bug: a head of 96, float32, pages of 256 or a CPU sent to a kernel not made for it."""
    q, cache, _, _ = make(device, [0], [128], N=2, K=1, S=16)
    is_hopper = device == "cuda" and torch.cuda.get_device_capability()[0] == 9
    assert takes(q, cache) == is_hopper
    assert not takes(q.float(), cache.float())
    assert not takes(q[:, :, :96], cache[..., :96])
    assert not takes(q, cache.new_empty(2, 1, 256, 1, 128))


@pytest.mark.gpu
def test_the_kernel_refuses_what_it_cannot_take() -> None:
    """Bug: a launch with heads of 96, or with rows that TMA cannot address."""
    q, cache, table, start = make("cuda", [0], [128], N=2, K=1, S=16, H=96)
    with pytest.raises(ValueError, match="head_dim 96"):
        run(q, cache, table, start)
    q, cache, table, start = make("cuda", [0], [128], N=2, K=1, S=16)
    rows = torch.empty(BLOCK, 2 * 128 + 4, dtype=BF16, device="cuda")
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        chunk_attention(rows[:, :256].view(BLOCK, 2, 128), cache, table, start, q)


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [0, 2, 7])
@pytest.mark.parametrize("config", CONFIGS)
def test_one_capture_serves_every_length(config, num_splits) -> None:
    """Bug: something of the lengths baked into the captured graph; a race between the loading
    warps and the consumers, whose results differ from replay to replay."""
    N, K, S, longest = 32, 8, 128, [2048 + 128 * b for b in range(8)]
    lengths = [start + BLOCK for start in longest]
    q, cache, table, start = make("cuda", longest, lengths, N, K, S, stale=0.0)
    out = torch.empty_like(q)
    where = q, cache, table, start, out, poisoned(q, num_splits), CONFIGS[config]
    chunk_attention(*where)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chunk_attention(*where)
        first = out.clone()  # an ordinary kernel between two attentions, as in a forward
        chunk_attention(*where)
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
    for num_splits in (0, 8):
        out = run(q, cache, table, start, num_splits=num_splits)
        check(out, q, cache, table, start, [W * S] * 2)


def test_keys_behind_the_table_do_not_exist(device) -> None:
    """Bug: rows of a block that reaches past the page table's end read pages of other memory."""
    q, cache, table, start = make(device, [1000], [1128], N=8, K=2, S=64)
    table = table[:, :16]
    for num_splits in (0, 3):
        out = run(q, cache, table, start, num_splits=num_splits)
        check(out, q, cache, table, start, [1024])
        assert out.isfinite().all()
