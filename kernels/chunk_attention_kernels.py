"""The kernel of chunk_attention.py, which says what it computes, in what order, and why.

Legend: N query heads, S page size. WIDTH is a head's, TILE keys of an iteration.
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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.block_attention_kernels import LOG2_E
from graphengine.kernels.triton_internals import async_load, async_store, reinterpret

ROWS = gl.constexpr(64)  # of a consumer: what one warpgroup multiplies at least
BAND = gl.constexpr(64)  # columns of a head that TMA lays out as one, 128 bytes
LOADER_REGISTERS = gl.constexpr(24)
CONSUMER_REGISTERS = gl.constexpr(240)
LAUNCH_REGISTERS = 168  # of each of 12 warps: 8 that multiply, 4 that the compiler makes of 2
PACK = gl.constexpr(64)  # sums of a thread that are multiplied, or not, together, at most
NO_SCORE = gl.constexpr(-1e30)  # a highest score of none, of which no difference is NaN
_LOG2_E = gl.constexpr(LOG2_E)
EXPONENT = gl.constexpr(0x7F80)  # exponent of a bf16 that is NaN or infinite


@gluon.jit
def tiles_of(split, num_tiles, num_full, SPLITS: gl.constexpr):
    """(first, behind the last) of a split's tiles, maybe none. All of those that not every row
    sees, and one in front of them, are the last split's. Runs in Python too, as `tiles_of.fn`."""
    shared = max(num_full - 1, 0)
    first = min(split * num_tiles // SPLITS, shared)
    behind = min((split + 1) * num_tiles // SPLITS, shared)
    return first, num_tiles if split == SPLITS - 1 else behind


@gluon.jit
def _load(desc, ring, place, S: gl.constexpr):
    """A loading warp: the tiles of K, or of V, one after another."""
    ready, empty, smem = ring
    pages, first_tile, num_tiles, max_kv, first_col = place
    STAGES: gl.constexpr = smem.shape[0]
    TILE: gl.constexpr = smem.shape[1]
    COLUMNS: gl.constexpr = smem.shape[2] // BAND
    BOX: gl.constexpr = desc.block_shape[0]
    BOXES: gl.constexpr = TILE // BOX
    for tile in range(num_tiles):
        rows = ()
        for i in gl.static_range(BOXES):
            key = (first_tile + tile) * TILE + i * BOX
            page = gl.load(pages + key // S, mask=key < max_kv, other=0)
            rows = rows + (page * S + key % S,)
        slot = tile % STAGES
        mbarrier.wait(empty.index(slot), (tile // STAGES & 1) ^ 1)  # one never full is free
        mbarrier.expect(ready.index(slot), TILE * COLUMNS * BAND * 2)
        boxes = reinterpret(smem.index(slot), smem.dtype, [COLUMNS * BOXES, BOX, BAND], desc.layout)
        for i in gl.static_range(COLUMNS * BOXES):
            at = [rows[i % BOXES], first_col + i // BOXES * BAND]
            async_load(desc, at, ready.index(slot), boxes.index(i))


@gluon.jit
def _await(ring, tile, live=True):
    """Until a tile has arrived."""
    STAGES: gl.constexpr = ring[2].shape[0]
    mbarrier.wait(ring[0].index(tile % STAGES), tile // STAGES & 1, pred=live)


@gluon.jit
def _scores(q, ring, tile):
    """Sends off S = Q K^T of a tile that has arrived."""
    STAGES: gl.constexpr = ring[2].shape[0]
    TILE: gl.constexpr = ring[2].shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    zeros = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    k = ring[2].index(tile % STAGES).permute((1, 0))
    return warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _products(p, sums, ring, tile):
    """Sends off O += P V of a tile, when it has arrived."""
    _await(ring, tile)
    return warpgroup_mma(p, ring[2].index(tile % ring[2].shape[0]), sums, is_async=True)


@gluon.jit
def _free(ring, tile):
    """Says that this consumer has read a tile."""
    mbarrier.arrive(ring[1].index(tile % ring[2].shape[0]), count=1)


@gluon.jit
def _make_finite(ring, finite, tile, number, ME: gl.constexpr):
    """In a tile of V, the `number`th that not all rows see, replaces what is NaN or infinite by 0:
    each consumer half of the keys. Returns when both have."""
    smem = ring[2]
    HALF: gl.constexpr = smem.shape[1] // 2
    BITS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, BAND], gl.int16)
    EIGHT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    _await(ring, tile)
    COLUMNS: gl.constexpr = smem.shape[2] // BAND
    v = smem.index(tile % smem.shape[0])
    halves = reinterpret(v, gl.int16, [2 * COLUMNS, HALF, BAND], BITS)
    for i in gl.static_range(COLUMNS):
        part = halves.index(2 * i + ME)
        bits = part.load(EIGHT)
        part.store(gl.where((bits & EXPONENT) == EXPONENT, gl.zeros_like(bits), bits))
    fence_async_shared()
    mbarrier.arrive(finite, count=1)
    mbarrier.wait(finite, number & 1)


@gluon.jit
def _softmax(s, highest, scale_log2):
    """(exp2 of the scores less the highest, the highest so far, how what was summed shrinks)."""
    higher = gl.maximum(highest, gl.max(s, 1) * scale_log2)
    p = gl.exp2(s * scale_log2 - higher[:, None])
    return p, higher, gl.exp2(highest - higher)


@gluon.constexpr_function
def _shrink_asm(n: int) -> str:
    """n sums in place times a factor each, unless those of both rows are 1."""
    return (
        "{ .reg .pred a, b; "
        f"setp.neu.f32 a, ${2 * n}, 0f3F800000; setp.neu.f32 b, ${2 * n + 2}, 0f3F800000; "
        "or.pred a, a, b; @!a bra SAME; "
        + "".join(f"mul.f32 ${i}, ${i}, ${2 * n + i}; " for i in range(n))
        + "SAME: }"
    )


@gluon.constexpr_function
def _shrink_constraints(n: int) -> str:
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def shrunk(sums, shrink):
    """sums * shrink [ROWS, 1], bit for bit. A thread has two rows, the second from its third sum on
    (no promise of Triton's; a test holds it), and leaves its sums alone where neither has found a
    higher score, which becomes rare soon: their products were a sixth of what is computed beside
    the tensor cores, and cost power."""
    MOST: gl.constexpr = sums.shape[1] // 2  # of a thread: a warp has 16 rows
    N: gl.constexpr = PACK if PACK < MOST else MOST
    asm: gl.constexpr = _shrink_asm(N)
    constraints: gl.constexpr = _shrink_constraints(N)
    sums, shrink = gl.broadcast(sums, shrink)
    return gl.inline_asm_elementwise(
        asm, constraints, [sums, shrink], dtype=gl.float32, is_pure=True, pack=N
    )


@gluon.jit
def to_bf16(x):
    """`x.to`, but by an instruction that LLVM leaves where it is: it would carry P to the next
    iteration in fp32 and round there, between the products of two tiles."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _masked(s, key, limit, lowest, WINDOW: gl.constexpr):
    """Scores of the keys that a row sees; of all others -inf."""
    s = gl.where(key <= limit, s, float("-inf"))
    if WINDOW:
        s = gl.where(key >= lowest, s, float("-inf"))
    return s


@gluon.jit
def _attend(
    io,
    rings,
    bars,
    work,
    at_first,
    ME: gl.constexpr,
    SPLITS: gl.constexpr,
    WINDOW: gl.constexpr,
    SINKS: gl.constexpr,
):
    """A consumer: rows 64 * ME .. of the block. Keys and tiles count from the split's first."""
    q_smem, target, out_row, out_col = io
    k_ring, v_ring = rings
    q_ready, finite = bars
    start, num_tiles, num_low, num_full, max_kv, scale_log2 = work
    TILE: gl.constexpr = k_ring[2].shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    OF_SCORES: gl.constexpr = gl.SliceLayout(1, SCORES)
    WIDTH: gl.constexpr = v_ring[2].shape[2]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    OF_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS)
    q = q_smem.index(ME)
    row = ME * ROWS + gl.arange(0, ROWS, OF_SCORES)
    limit = gl.minimum(start + row, max_kv - 1)[:, None]  # the last key that a row sees
    lowest = (start + row - (WINDOW - 1))[:, None]  # the first one, with a window
    offset = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))[None, :]

    mbarrier.wait(q_ready, 0)
    _await(k_ring, 0)
    s = warpgroup_mma_wait(0, deps=(_scores(q, k_ring, 0),))
    _free(k_ring, 0)
    s = _masked(s, offset, limit, lowest, WINDOW)
    highest = gl.full([ROWS], at_first[0], gl.float32, OF_SCORES)
    p, highest, shrink = _softmax(s, highest, scale_log2)
    total = gl.sum(p, 1)
    if SINKS:
        total += at_first[1] * shrink
    p = gl.convert_layout(to_bf16(p), P)
    sums = gl.zeros([ROWS, WIDTH], gl.float32, SUMS)
    _await(k_ring, 1, num_tiles > 1)
    if (num_low > 0) | (num_full == 0):
        _make_finite(v_ring, finite, 0, 0, ME)
    for kind in gl.static_range(0 if WINDOW else 1, 3):  # those too low for some, full, too high
        begin = gl.maximum(num_low if kind == 1 else num_full, 1) if kind else 1
        end = num_low if kind == 0 else (num_full if kind == 1 else num_tiles)
        for tile in range(begin, end):
            s = _scores(q, k_ring, tile)
            sums = _products(p, sums, v_ring, tile - 1)
            s = warpgroup_mma_wait(1, deps=(s,))
            _free(k_ring, tile)
            if kind != 1:
                s = _masked(s, tile * TILE + offset, limit, lowest, WINDOW)
            probabilities, highest, shrink = _softmax(s, highest, scale_log2)
            total = total * shrink + gl.sum(probabilities, 1)
            # Waits here, because ptxas would wait for P V first and compute the softmax afterwards.
            _await(k_ring, tile + 1, tile + 1 < num_tiles)
            sums = warpgroup_mma_wait(0, deps=(sums,))
            _free(v_ring, tile - 1)
            sums = shrunk(sums, gl.convert_layout(shrink, OF_SUMS)[:, None])
            p = gl.convert_layout(to_bf16(probabilities), P)
            if kind != 1:
                number = tile - num_full + num_low if kind else tile
                _make_finite(v_ring, finite, tile, number, ME)
    sums = warpgroup_mma_wait(0, deps=(_products(p, sums, v_ring, num_tiles - 1),))
    if WINDOW:
        total = gl.maximum(total, 1.0)  # it is 0 where a row sees no key of the split
    sums = sums / gl.convert_layout(total, OF_SUMS)[:, None]
    if SPLITS == 1:
        q.store(sums.to(gl.bfloat16))  # nobody else reads these rows
        fence_async_shared()
        async_store(target, [out_row + ME * ROWS, out_col], q)
        tma.store_wait(0)
    else:
        partial_out, partial_lse, N = target
        gl.store(partial_lse + row * N, highest + gl.log2(total))
        row = ME * ROWS + gl.arange(0, ROWS, OF_SUMS)
        col = gl.arange(0, WIDTH, gl.SliceLayout(0, SUMS))
        gl.store(partial_out + row[:, None] * (N * WIDTH) + col[None, :], sums)


@gluon.jit
def _store_zeros(out, first_row, first_col, row_stride, WIDTH: gl.constexpr):
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = first_row + gl.arange(0, 2 * ROWS, gl.SliceLayout(1, SPREAD))
    col = first_col + gl.arange(0, WIDTH, gl.SliceLayout(0, SPREAD))
    at = out + row.to(gl.int64)[:, None] * row_stride + col[None, :]
    gl.store(at, gl.zeros([2 * ROWS, WIDTH], out.dtype.element_ty, SPREAD))


@gluon.jit
def _store_nothing(lse, N: gl.constexpr):
    """The lse of a split without tiles."""
    SPREAD: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row = gl.arange(0, 2 * ROWS, SPREAD)
    gl.store(lse + row * N, gl.full([2 * ROWS], float("-inf"), gl.float32, SPREAD))


@gluon.jit(do_not_specialize=["table_stride", "max_kv"])
def chunk_attention_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    out,
    partial_out,
    partial_lse,
    page_table,
    starts,
    sinks,
    table_stride,
    max_kv,
    scale_log2,
    N: gl.constexpr,
    GROUP: gl.constexpr,
    S: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    WINDOW: gl.constexpr,
    SINKS: gl.constexpr,
    PDL: gl.constexpr,
):
    """One block of one query head, or a split of it."""
    WIDTH: gl.constexpr = q_desc.block_shape[1]
    block = (gl.num_programs(0) - 1 - gl.program_id(0)) // (N * SPLITS)  # the longest first
    head = gl.program_id(0) % N
    start = gl.load(starts + block)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first_row = block * (2 * ROWS)
    num_keys = gl.minimum(start + 2 * ROWS, max_kv)
    num_tiles = (num_keys + TILE - 1) // TILE
    num_full = gl.minimum(start + 1, max_kv) // TILE  # tiles that no row's end is in
    num_low = 0  # tiles that a row's first key is in
    first_tile, skipped = 0, 0
    if WINDOW:
        skipped = gl.minimum(gl.maximum(start + 1 - WINDOW, 0), max_kv - 1) // TILE
        lowest = gl.maximum(start + 2 * ROWS - WINDOW, 0)  # of the last row
        num_low = (lowest + TILE - 1) // TILE - skipped
        num_tiles, num_full = num_tiles - skipped, gl.maximum(num_full - skipped, 0)
    # The highest score and the sum that a row begins with.
    at_first = NO_SCORE if WINDOW or SINKS else float("-inf"), 0.0
    if SINKS:
        sink = gl.maximum(gl.load(sinks + head).to(gl.float32) * _LOG2_E, NO_SCORE)
        at_first = sink, 1.0
    target = out_desc
    if SPLITS == 1:
        if start < 0:
            _store_zeros(out, first_row, head * WIDTH, N * WIDTH, WIDTH)
            return
    else:
        split = gl.program_id(0) // N % SPLITS
        first_tile, behind = tiles_of(split, num_tiles, num_full, SPLITS)
        num_rows = gl.num_programs(0) // (N * SPLITS) * (2 * ROWS)
        at = (split * num_rows + first_row).to(gl.int64) * N + head
        target = (partial_out + at * WIDTH, partial_lse + at, N)
        if (start < 0) | (first_tile == behind):
            _store_nothing(partial_lse + at, N)
            return
        if SINKS:  # the last split has tiles
            is_last = split == SPLITS - 1
            at_first = gl.where(is_last, sink, NO_SCORE), gl.where(is_last, 1.0, 0.0)
        num_tiles = behind - first_tile
        num_full = gl.minimum(num_full, behind) - first_tile
    if WINDOW:
        num_low = gl.minimum(gl.maximum(num_low - first_tile, 0), num_tiles)
        num_full = gl.maximum(num_full, num_low)
    first_tile += skipped
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, WIDTH], q_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    finite = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    KV: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, WIDTH], k_desc.dtype)
    rings = ()
    for _ in gl.static_range(2):
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, TILE, WIDTH], KV)
        for s in gl.static_range(STAGES):
            mbarrier.init(ready.index(s), count=1)
            mbarrier.init(empty.index(s), count=2)
        rings = rings + ((ready, empty, smem),)
    mbarrier.init(q_ready, count=1)
    mbarrier.init(finite, count=2)
    fence_async_shared()
    mbarrier.expect(q_ready, 2 * ROWS * WIDTH * 2)
    for s in gl.static_range(2):
        at = [first_row + s * ROWS, head * WIDTH]
        async_load(q_desc, at, q_ready, q_smem.index(s))

    io = (q_smem, target, first_row, head * WIDTH)
    bars = (q_ready, finite)
    before = first_tile * TILE
    work = (start - before, num_tiles, num_low, num_full, max_kv - before, scale_log2)
    pages = page_table + block.to(gl.int64) * table_stride
    place = (pages, first_tile, num_tiles, max_kv, head // GROUP * WIDTH)
    gl.warp_specialize(
        [
            (_attend, (io, rings, bars, work, at_first, 0, SPLITS, WINDOW, SINKS)),
            (_attend, (io, rings, bars, work, at_first, 1, SPLITS, WINDOW, SINKS)),
            (_load, (k_desc, rings[0], place, S)),
            (_load, (v_desc, rings[1], place, S)),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS],
    )
