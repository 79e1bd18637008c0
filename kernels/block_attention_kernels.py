"""The kernels of block_attention.py, which says what they compute, in what order, and why.

Legend: B requests, G block length, T = B * G rows, N query heads, K kv heads, H head dim, W pages
in a row of the page table, S page size, Z splits.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.arrival_kernels import meet
from graphengine.kernels.interpreter import dot
from graphengine.kernels.output_gate import gated

LOG2_E = 1.4426950408889634  # scores are exponents of 2
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def _live_splits(
    start,
    max_kv,
    one_split,
    G: tl.constexpr,
    CHUNK: tl.constexpr,
    Z: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDED: tl.constexpr,
):
    """(kv length, splits with work, chunks before the window); a padded request, whose start is
    PADDED, has length 0 and one split, for zeros."""
    kv_len = tl.where(start > PADDED, tl.minimum(start + G, max_kv), 0)
    skipped = 0
    if WINDOW:
        skipped = tl.minimum(tl.maximum(start + 1 - WINDOW, 0), kv_len) // CHUNK
    read = kv_len - skipped * CHUNK
    live = tl.minimum(tl.maximum((read + CHUNK - 1) // CHUNK, 1), Z)
    return kv_len, tl.where(read <= one_split, 1, live), skipped


@triton.jit
def _unpack(row, b, kv_head, G: tl.constexpr, GROUP: tl.constexpr):
    """Packed rows of a kv head -> (row index of q and out, query head, whether it exists)."""
    i = row // GROUP
    return (b * G + i).to(tl.int64), kv_head * GROUP + row % GROUP, i < G


@triton.jit
def _merge_rows(
    out,
    gate,
    partial_out,
    partial_lse,
    first_row,
    b,
    kv_head,
    live,
    T,
    N: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    POW2: tl.constexpr,
    GATE: tl.constexpr,
):
    """Rows [first_row, first_row + ROWS) of a packed tile, from POW2/2 < live <= POW2 partials."""
    t, head, exists = _unpack(  # pyright: ignore[reportGeneralTypeIssues]
        first_row + tl.arange(0, ROWS), b, kv_head, G, GROUP
    )
    dim = tl.arange(0, H)
    split = tl.arange(0, POW2)
    # Rows before splits: the compiler deals the first dimension to warps, so that a thread holds
    # all splits of its elements and adds them without shared memory.
    index = (split.to(tl.int64)[None, :] * T + t[:, None]) * N + head[:, None]
    written = (split < live)[None, :] & exists[:, None]
    # .cg: from L2, because another multiprocessor has just written it.
    lse = tl.load(partial_lse + index, mask=written, other=float("-inf"), cache_modifier=".cg")
    tile = tl.load(
        partial_out + index[:, :, None] * H + dim[None, None, :],
        mask=written[:, :, None],
        other=0.0,
        cache_modifier=".cg",
    )
    highest = tl.max(lse, axis=1)
    weight = tl.exp2(lse - tl.where(highest == float("-inf"), 0.0, highest)[:, None])
    total = tl.sum(weight, axis=1)
    weight = weight / tl.where(total == 0.0, 1.0, total)[:, None]
    acc = tl.sum(tile * weight[:, :, None], axis=1)
    column, live = head[:, None] * H + dim[None, :], exists[:, None]
    merged = gated(acc, gate, t[:, None], column, live, out.dtype.element_ty, GATE)
    tl.store(out + (t * N)[:, None] * H + column, merged, mask=live)


@triton.jit
def block_attention_kernel(
    q,
    k_cache,
    v_cache,
    page_table,
    starts,
    max_kv,
    one_split,
    out,
    gate,
    gate_row_stride,
    gate_split_stride,
    partial_out,
    partial_lse,
    arrived,
    sinks,
    q_row_stride,
    table_stride,
    scale_log2,
    N: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDED: tl.constexpr,
    GATE: tl.constexpr,
    SINKS: tl.constexpr,
    TILE: tl.constexpr,
    S: tl.constexpr,
    CAUSAL: tl.constexpr,
    DOT_FP32: tl.constexpr,
    POLLS: tl.constexpr,
    PREFETCH: tl.constexpr,
    WIDE: tl.constexpr,
):
    gate = (gate, gate_row_stride, gate_split_stride)
    kv_head = tl.program_id(0) // ROW_TILES
    b = tl.program_id(1)
    split = tl.program_id(2)  # slowest: the splits that are always alive are started first
    GROUP: tl.constexpr = N // K
    TILES_PER_CHUNK: tl.constexpr = CHUNK // TILE
    ONE_PAGE: tl.constexpr = S % TILE == 0  # of a tile: one number to look up
    dim = tl.arange(0, H)
    offset = tl.arange(0, TILE)
    pages = page_table + b.to(tl.int64) * table_stride
    # A split begins with chunk `split` whatever the length, so that its first pages are on their
    # way together with the length. (Everything is latency at short lengths.)
    first = split * CHUNK
    lookup = first if ONE_PAGE else first + offset
    if not WINDOW:
        page = tl.load(pages + lookup // S, mask=lookup < max_kv, other=0)
    start = tl.load(starts + b)
    kv_len, live, skipped = _live_splits(  # pyright: ignore[reportGeneralTypeIssues]
        start, max_kv, one_split, G, CHUNK, SPLITS, WINDOW, PADDED
    )
    if WINDOW:
        first += skipped * CHUNK
        lookup += skipped * CHUNK
        page = tl.load(pages + lookup // S, mask=lookup < kv_len, other=0)
    if PREFETCH:
        LINE: tl.constexpr = 1024 // k_cache.dtype.element_ty.primitive_bitwidth  # 128 bytes
        LINES: tl.constexpr = (H + LINE - 1) // LINE
        for tile in tl.static_range(0, CHUNK, TILE):
            ahead = first + tile + offset
            wanted = (split < live) & (ahead < kv_len)
            slot = tl.load(pages + ahead // S, mask=wanted, other=0).to(tl.int64) * S + ahead % S
            line = (slot * K + kv_head)[:, None] * H + tl.arange(0, LINES)[None, :] * LINE
            wanted_lines = tl.broadcast_to(wanted[:, None], [TILE, LINES])
            _prefetch_l2(k_cache + line, wanted_lines)
            _prefetch_l2(v_cache + line, wanted_lines)
    if PDL:
        # Every program waits, those without work as well: when this grid has finished, so has
        # the one before it, and a later kernel that waits for this one may rely on both.
        gdc_wait()
        gdc_launch_dependents()
    if split >= live:
        return

    row = (tl.program_id(0) % ROW_TILES) * ROWS + tl.arange(0, ROWS)
    t, head, exists = _unpack(  # pyright: ignore[reportGeneralTypeIssues]
        row, b, kv_head, G, GROUP
    )
    limit = tl.zeros_like(row) + kv_len
    if CAUSAL:
        limit = tl.minimum(limit, start + row // GROUP + 1)
    if WINDOW:
        limit = tl.minimum(limit, start + row // GROUP + WINDOW)
        lowest = start + row // GROUP - WINDOW + 1
    q_tile = tl.load(
        q + t[:, None] * q_row_stride + head[:, None] * H + dim[None, :],
        mask=exists[:, None],
        other=0.0,
    )
    read = kv_len - skipped * CHUNK
    chunks = (read + CHUNK - 1) // CHUNK
    num_tiles = (chunks - split + live - 1) // live * TILES_PER_CHUNK
    if (chunks - 1) % live == split:  # the last chunk may be cut short
        num_tiles -= (chunks * CHUNK - read) // TILE
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:  # the first split's rows begin as if a key without a value had been seen
        sink = tl.load(sinks + head, mask=exists, other=0.0).to(tl.float32) * _LOG2_E
        highest = tl.where(split == 0, sink, highest)
        total = tl.where(split == 0, 1.0, total)
    acc = tl.zeros([ROWS, H], tl.float32)
    for n in range(num_tiles):
        key = first + offset
        cached = key < kv_len
        in_page = offset % S if TILE % S == 0 else key % S
        if ONE_PAGE:
            in_page = first % S + offset
        token = (page.to(tl.int64 if WIDE else tl.int32) * S + in_page) * K + kv_head
        k = tl.load(k_cache + dim[None, :] + (token * H)[:, None], mask=cached[:, None], other=0.0)
        # Masked, because a probability of 0 times a stale NaN is NaN.
        v = tl.load(v_cache + dim[None, :] + (token * H)[:, None], mask=cached[:, None], other=0.0)
        seen = key[None, :] < limit[:, None]
        if WINDOW:
            seen &= key[None, :] >= lowest[:, None]
        chunk = skipped + split + (n + 1) // TILES_PER_CHUNK * live
        first = chunk * CHUNK + (n + 1) % TILES_PER_CHUNK * TILE
        lookup = first if ONE_PAGE else first + offset
        page = tl.load(pages + lookup // S, mask=lookup < kv_len, other=0)
        scores = dot(q_tile, tl.trans(k), tl.zeros([ROWS, TILE], tl.float32), DOT_FP32)
        scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1) * scale_log2)
        # A row may see nothing of this split: subtract 0 there, not -inf (NaN).
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        p = tl.exp2(scores * scale_log2 - shift[:, None])
        alpha = tl.exp2(highest - shift)
        total = total * alpha + tl.sum(p, axis=1)
        acc = dot(p.to(v.dtype), v, acc * alpha[:, None], DOT_FP32)
        highest = new_highest

    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    target = (t * N + head)[:, None] * H + dim[None, :]
    if live == 1:
        column = head[:, None] * H + dim[None, :]
        whole = gated(acc, gate, t[:, None], column, exists[:, None], out.dtype.element_ty, GATE)
        tl.store(out + target, whole, mask=exists[:, None])
        return
    if SPLITS > 1:
        T = tl.num_programs(1) * G
        plane = split.to(tl.int64) * T * N
        row_lse = tl.where(empty, float("-inf"), highest + tl.log2(tl.where(empty, 1.0, total)))
        tl.store(partial_lse + plane + t * N + head, row_lse, mask=exists)
        tl.store(partial_out + plane * H + target, acc, mask=exists[:, None])
        _merge_together(
            *(out, gate, partial_out, partial_lse, arrived, b, kv_head, split, live, T),
            *(N, H, G, GROUP, ROWS, ROW_TILES, SPLITS, POLLS, GATE),
        )


@triton.jit
def _prefetch_l2(address, wanted):
    """Sends for the cache lines of a tile of pointers; changes nothing that anyone can see."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [address.to(tl.int64), wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _merge_shares(
    out,
    gate,
    partial_out,
    partial_lse,
    row_tile,
    b,
    kv_head,
    live,
    T,
    mine,
    N: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SHARE: tl.constexpr,
    POW2: tl.constexpr,
    GATE: tl.constexpr,
):
    """The shares of SHARE rows that belong to the splits in the bit set `mine`."""
    for share in range(ROWS // SHARE):
        if (mine >> (share % live)) & 1:
            _merge_rows(
                *(out, gate, partial_out, partial_lse, row_tile + share * SHARE),
                *(b, kv_head, live, T),
                *(N, H, G, GROUP, SHARE, POW2, GATE),
            )


@triton.jit
def _merge_together(
    out,
    gate,
    partial_out,
    partial_lse,
    arrived,
    b,
    kv_head,
    split,
    live,
    T,
    N: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    POLLS: tl.constexpr,
    GATE: tl.constexpr,
):
    """Merge a tile's rows inside the splits that made the partials, each a share of the rows."""
    word = arrived + b * tl.num_programs(0) + tl.program_id(0)
    tl.debug_barrier()  # every thread's partial is stored before one thread says so
    has_all, mine = meet(word, split, live, POLLS)  # pyright: ignore[reportGeneralTypeIssues]
    if has_all:
        row_tile = tl.program_id(0) % ROW_TILES * ROWS
        for log2 in tl.static_range(1, 6):  # pyright: ignore[reportGeneralTypeIssues]
            if (1 << log2) < 2 * SPLITS:  # noqa: SIM102 (known at compile time)
                if (live > (1 << log2) // 2) & (live <= 1 << log2):
                    _merge_shares(
                        *(out, gate, partial_out, partial_lse, row_tile, b, kv_head, live, T),
                        *(mine, N, H, G, GROUP, ROWS),
                        *(ROWS >> log2 if ROWS >> log2 else 1, 1 << log2, GATE),
                    )
