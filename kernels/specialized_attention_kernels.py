"""The kernel of specialized_attention.py, which says what it computes, in what order, and why.

Legend as in block_attention_kernels.py. A tile is TILE keys; WIDTH is a head's. Packed rows stand
head after head: row h * POSITIONS + t is position t of head h.
"""

# Gluon is not typed for a type checker.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.chunk_attention_kernels import BAND, ROWS, shrunk, to_bf16
from graphengine.kernels.specialized_merge_kernels import merge_together, place_of, store_zeros
from graphengine.kernels.triton_internals import async_load, reinterpret

CONSUMERS = gl.constexpr(2)
LOADER_REGISTERS = gl.constexpr(24)
CONSUMER_REGISTERS = gl.constexpr(240)


@gluon.jit
def share_of(
    start,
    max_kv,
    split,
    G: gl.constexpr,
    TILE: gl.constexpr,
    SPLIT_TILES: gl.constexpr,
    SPLITS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """(keys of a request, splits with work, a split's first tile, how many it has, the first tile
    that is not in front of the end of what every row sees). Runs in Python too, as `share_of.fn`.

    No split has fewer tiles than the last one, whose last keys come late and are masked.
    """
    kv_len = min(start + G, max_kv) if start > 0 else start * 0
    skipped = start * 0
    if WINDOW:
        skipped = min(max(start + 1 - WINDOW, 0), kv_len) // TILE
    read = (kv_len + TILE - 1) // TILE - skipped
    live = min(max((read + SPLIT_TILES - 1) // SPLIT_TILES, 1), SPLITS)
    first_tile = skipped + (split * read + live - 1) // live
    num_tiles = skipped + ((split + 1) * read + live - 1) // live - first_tile
    seen = 1 if CAUSAL else G  # the first row's keys, counted from start
    if WINDOW:
        seen = min(seen, WINDOW)
    return kv_len, live, first_tile, num_tiles, min(start + seen, kv_len) // TILE


@gluon.jit
def _load(kv, ring, place, early, S: gl.constexpr, PDL: gl.constexpr):
    """A loading warp: tiles of K and V, each when its slot is free; those without a key of the
    block as soon as it lives, the others behind the wait, their pages looked up before it."""
    ready, empty, k_smem, v_smem = ring
    pages, first_tile, num_tiles, max_kv, first_col = place
    TILE: gl.constexpr = k_smem.shape[1]
    BANDS: gl.constexpr = k_smem.shape[2] // BAND
    STAGES: gl.constexpr = k_smem.shape[0]
    BOX: gl.constexpr = kv[0].block_shape[0]
    BOXES: gl.constexpr = TILE // BOX
    PARTS: gl.constexpr = BANDS * BOXES
    for tile in range(num_tiles):
        slot = tile % STAGES
        rows = ()
        for i in gl.static_range(BOXES):
            key = (first_tile + tile) * TILE + i * BOX
            page = gl.load(pages + key // S, mask=key < max_kv, other=0)
            rows = rows + (page * S + key % S,)
        if PDL:  # noqa: SIM102 (known at compile time)
            if tile == early:
                gdc_wait()
        mbarrier.wait(empty.index(slot), (tile // STAGES & 1) ^ 1)
        for n in gl.static_range(2):
            whole = k_smem if n == 0 else v_smem
            parts = reinterpret(whole, whole.dtype, [STAGES * PARTS, BOX, BAND], kv[n].layout)
            bar = ready.index(2 * slot + n)
            mbarrier.expect(bar, TILE * BANDS * BAND * 2)
            for i in gl.static_range(PARTS):
                at = [rows[i % BOXES], first_col + i // BOXES * BAND]
                async_load(kv[n], at, bar, parts.index(slot * PARTS + i))


@gluon.jit
def _load_queries(q_desc, q_smem, q_ready, first_row, first_col, PDL: gl.constexpr):
    """A warp of its own, so that queries do not wait for the lookup of keys' pages."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    BANDS: gl.constexpr = q_smem.shape[1] // BAND
    POSITIONS: gl.constexpr = q_desc.block_shape[0]
    HEADS: gl.constexpr = ROWS // POSITIONS
    parts = reinterpret(q_smem, q_smem.dtype, [BANDS * HEADS, POSITIONS, BAND], q_desc.layout)
    mbarrier.expect(q_ready, ROWS * BANDS * BAND * 2)
    for i in gl.static_range(BANDS * HEADS):
        column = first_col + i % HEADS * (BANDS * BAND) + i // HEADS * BAND
        async_load(q_desc, [first_row, column], q_ready, parts.index(i))


@gluon.jit
def _await(ring, tile, N: gl.constexpr, live=True):
    """Until a tile of K (N 0) or V (1) has arrived."""
    STAGES: gl.constexpr = ring[2].shape[0]
    mbarrier.wait(ring[0].index(tile % STAGES * 2 + N), tile // STAGES & 1, pred=live)


@gluon.jit
def _scores(q, ring, tile):
    """Sends off S = Q K^T."""
    TILE: gl.constexpr = ring[2].shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    zeros = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    k = ring[2].index(tile % ring[2].shape[0]).permute((1, 0))
    return warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _forget(ring, tile, num_keys):
    """Makes the rows of a tile of V 0 that are no keys: what is stale may be NaN, and 0 * NaN is
    NaN."""
    v_smem = ring[3].index(tile % ring[3].shape[0])
    EIGHT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    key = gl.arange(0, v_smem.shape[0], gl.SliceLayout(1, EIGHT))[:, None]
    v = v_smem.load(EIGHT)
    v_smem.store(gl.where(key < num_keys, v, gl.zeros_like(v)))
    fence_async_shared()


@gluon.jit
def _attend(q, q_ready, ring, work, ME: gl.constexpr, PACKING: gl.constexpr, WINDOW: gl.constexpr):
    """(sums, highest, total) of a consumer's tiles: every other one of the split's."""
    start, kv_len, first_tile, num_tiles, num_seen, scale_log2 = work
    POSITIONS: gl.constexpr = PACKING[0]
    CAUSAL: gl.constexpr = PACKING[1]
    STAGES: gl.constexpr = ring[2].shape[0]
    TILE: gl.constexpr = ring[2].shape[1]
    WIDTH: gl.constexpr = ring[2].shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    OF_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS)
    position = start + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES)) % POSITIONS
    limit = gl.minimum(position, kv_len - 1) if CAUSAL else position * 0 + (kv_len - 1)
    if WINDOW:
        limit = gl.minimum(limit, position + (WINDOW - 1))
    offset = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))[None, :]
    highest = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    sums = gl.zeros([ROWS, WIDTH], gl.float32, SUMS)
    mbarrier.wait(q_ready, 0)
    _await(ring, ME, 0, num_tiles > ME)
    s = warpgroup_mma_wait(0, deps=(_scores(q, ring, ME),))
    for tile in range(ME, num_tiles, CONSUMERS):
        key = (first_tile + tile) * TILE + offset
        if first_tile + tile >= num_seen:
            s = gl.where(key <= limit[:, None], s, float("-inf"))
        if WINDOW:
            s = gl.where(key > position[:, None] - WINDOW, s, float("-inf"))
        higher = gl.maximum(highest, gl.max(s, 1) * scale_log2)
        # A row may have seen nothing so far: subtract 0 then, not -inf (NaN).
        shift = gl.where(higher == float("-inf"), 0.0, higher)
        p = gl.exp2(s * scale_log2 - shift[:, None])
        shrink = gl.exp2(highest - shift)
        total = total * shrink + gl.sum(p, 1)
        highest = higher
        # Of the next one; behind the last one of whatever is there, for nobody. First until its
        # slot was free: the tile there before may be the other consumer's, and while that one has
        # not arrived, the phase looks as if this one had.
        ahead = tile + CONSUMERS
        phase = (ahead // STAGES & 1) ^ 1
        mbarrier.wait(ring[1].index(ahead % STAGES), phase, pred=ahead < num_tiles)
        _await(ring, ahead, 0, ahead < num_tiles)
        s = _scores(q, ring, ahead)
        p = gl.convert_layout(to_bf16(p), P)
        sums = shrunk(sums, gl.convert_layout(shrink, OF_SUMS)[:, None])
        _await(ring, tile, 1)
        if first_tile + tile >= num_seen:
            _forget(ring, tile, kv_len - (first_tile + tile) * TILE)
        sums = warpgroup_mma(p, ring[3].index(tile % STAGES), sums, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        sums = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(ring[1].index(tile % STAGES), count=1)
    return sums, gl.convert_layout(highest, OF_SUMS), gl.convert_layout(total, OF_SUMS)


@gluon.jit
def _help(q, bars, ring, work, given, PACKING: gl.constexpr, WINDOW: gl.constexpr):
    """The second consumer, which gives the first one what it has found."""
    sums, highest, total = _attend(q, bars[0], ring, work, 1, PACKING, WINDOW)
    given[0].store(sums)
    given[1].index(0).store(highest)
    given[1].index(1).store(total)
    mbarrier.arrive(bars[1], count=1)


@gluon.jit
def _lead(
    q,
    bars,
    ring,
    work,
    given,
    ends,
    PACKING: gl.constexpr,
    WINDOW: gl.constexpr,
    SPLITS: gl.constexpr,
    POLLS: gl.constexpr,
):
    """The first consumer, which puts together what both have found, and what splits have."""
    io, target, split, live = ends
    out, partial_out, partial_lse, _, T, N = io
    WIDTH: gl.constexpr = ring[2].shape[2]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    OF_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS)
    sums, highest, total = _attend(q, bars[0], ring, work, 0, PACKING, WINDOW)
    t, head, exists = place_of(gl.arange(0, ROWS, OF_SUMS), target, PACKING[0])
    row = t * N + head
    mbarrier.wait(bars[1], 0)
    other = given[1].index(0).load(OF_SUMS)
    both = gl.maximum(highest, other)
    shift = gl.where(both == float("-inf"), 0.0, both)
    mine, theirs = gl.exp2(highest - shift), gl.exp2(other - shift)
    total = total * mine + given[1].index(1).load(OF_SUMS) * theirs
    empty = total == 0.0
    total = gl.where(empty, 1.0, total)
    sums = sums * (mine / total)[:, None] + given[0].load(SUMS) * (theirs / total)[:, None]
    at = row[:, None] * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, SUMS))[None, :]
    if live == 1:
        gl.store(out + at, sums.to(gl.bfloat16), mask=exists[:, None])
    else:
        plane = split * T * N
        gl.store(partial_out + plane * WIDTH + at, sums, mask=exists[:, None])
        lse = gl.where(empty, float("-inf"), shift + gl.log2(total))
        gl.store(partial_lse + plane + row, lse, mask=exists)
        merge_together(io, target, split, live, WIDTH, PACKING[0], SPLITS, POLLS)


@gluon.jit(do_not_specialize=["table_stride", "max_kv"])
def specialized_attention_kernel(
    q_desc,
    k_desc,
    v_desc,
    page_table,
    starts,
    max_kv,
    out,
    partial_out,
    partial_lse,
    arrived,
    table_stride,
    scale_log2,
    N: gl.constexpr,
    H: gl.constexpr,
    G: gl.constexpr,
    K: gl.constexpr,
    S: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT_TILES: gl.constexpr,
    SPLITS: gl.constexpr,
    POLLS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    PDL: gl.constexpr,
):
    """A split of the keys that ROWS queries of a kv head and a request see."""
    POSITIONS: gl.constexpr = q_desc.block_shape[0]
    HEADS: gl.constexpr = ROWS // POSITIONS
    GROUP: gl.constexpr = N // K
    ROW_TILES: gl.constexpr = (GROUP + HEADS - 1) // HEADS
    PACKING: gl.constexpr = (POSITIONS, CAUSAL)
    kv_head, b, split = gl.program_id(0) // ROW_TILES, gl.program_id(1), gl.program_id(2)
    start = gl.load(starts + b)
    kv_len, live, first_tile, num_tiles, num_seen = share_of(
        *(start, max_kv, split, G, TILE, SPLIT_TILES, SPLITS, CAUSAL, WINDOW)
    )
    first_head = kv_head * GROUP + gl.program_id(0) % ROW_TILES * HEADS
    target = (b * G, first_head, kv_head * GROUP + GROUP, G)
    if (split >= live) | (kv_len == 0):
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        if split < live:
            store_zeros(out, target, N, H, POSITIONS)
        return
    early = gl.minimum(gl.maximum(start // TILE - first_tile, 0), num_tiles)
    KV: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, H], k_desc.dtype)
    Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, H], k_desc.dtype)
    GIVEN: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    OF_ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [ROWS, H], Q)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, TILE, H], KV)
    v_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, TILE, H], KV)
    given_sums = gl.allocate_shared_memory(gl.float32, [ROWS, H], GIVEN)
    given_rows = gl.allocate_shared_memory(gl.float32, [2, ROWS], OF_ROW)
    ready = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    others = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(2 * i), count=1)
        mbarrier.init(ready.index(2 * i + 1), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(others.index(i), count=1)
    fence_async_shared()
    bars = (others.index(0), others.index(1))
    ring = (ready, empty, k_smem, v_smem)
    work = (start, kv_len, first_tile, num_tiles, num_seen, scale_log2)
    given = (given_sums, given_rows)
    io = (out, partial_out, partial_lse, arrived, gl.num_programs(1) * G, N)
    place = (page_table + b.to(gl.int64) * table_stride, first_tile, num_tiles, max_kv, kv_head * H)
    both = (k_desc, v_desc)
    ends = (io, target, split, live)
    gl.warp_specialize(
        [
            (_lead, (q_smem, bars, ring, work, given, ends, PACKING, WINDOW, SPLITS, POLLS)),
            (_help, (q_smem, bars, ring, work, given, PACKING, WINDOW)),
            (_load, (both, ring, place, early, S, PDL)),
            (_load_queries, (q_desc, q_smem, bars[0], b * G, first_head * H, PDL)),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS],
    )
