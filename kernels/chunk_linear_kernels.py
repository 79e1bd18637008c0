"""The kernels of chunk_linear.py, which says what they compute and when each is taken."""

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

from graphengine.kernels.triton_internals import async_load, async_store, reinterpret
from graphengine.kernels.wide_linear import PAIR, load_weights, swiglu_of, wait_products

ROWS = gl.constexpr(64)  # of x, a consumer's: what one warpgroup multiplies at least
CONSUMERS = gl.constexpr(2)
WEIGHTS = gl.constexpr(256)  # weight rows of a tile
GATES = gl.constexpr(PAIR)  # that stand together in a tile, their ups behind them
BLOCK_K = 64
STAGES = gl.constexpr(4)
EXTRA_WEIGHTS = gl.constexpr(16)  # of a wider tile, beside them
LOADER_REGISTERS = gl.constexpr(24)
CONSUMER_REGISTERS = gl.constexpr(240)
LAUNCH_REGISTERS = 168  # of each of 12 warps: 8 that multiply, 4 that the compiler makes of 1

LARGE_ROWS = gl.constexpr(256)  # of x, a large tile's, all of which each consumer multiplies
LARGE_CONSUMERS = gl.constexpr(3)
LARGE_WEIGHTS = gl.constexpr(64)  # weight rows of a consumer
LARGE_STAGES = gl.constexpr(3)
LARGE_REGISTERS = gl.constexpr(168)  # of each of 12 warps


@gluon.jit
def _ask_weights(descs, ring, slot, row, col, live):
    """Asks for a block of a tile's weights, and says how much is to come with that of x."""
    w_desc, extra_desc, x_desc = descs
    bar = ring[0].index(slot)
    EXTRA: gl.constexpr = EXTRA_WEIGHTS if len(ring) == 5 else 0
    BYTES: gl.constexpr = (WEIGHTS + EXTRA + CONSUMERS * ROWS) * x_desc.block_shape[1] * 2
    mbarrier.expect(bar, BYTES, pred=live)
    load_weights(w_desc, row, col, bar, ring[2], slot, live, 1, WEIGHTS)
    if EXTRA:
        load_weights(extra_desc, row + WEIGHTS, col, bar, ring[4], slot, live, 1, EXTRA)


@gluon.jit
def _ask_x(descs, ring, slot, t, col, live):
    """Asks for a block of a tile's rows of x, each consumer's into slots of its own."""
    x_desc = descs[2]
    for c in gl.static_range(CONSUMERS):
        smem = ring[3].index(c * STAGES + slot)
        async_load(x_desc, [t + c * ROWS, col], ring[0].index(slot), smem, live)


@gluon.jit
def _load(descs, ring, work, PDL: gl.constexpr):
    """The loading warp: weights of the first blocks, x of them, then block after block."""
    num_tiles, x_tiles, num_k = work
    BLOCK_K: gl.constexpr = descs[2].block_shape[1]
    TILE: gl.constexpr = WEIGHTS + EXTRA_WEIGHTS if len(ring) == 5 else WEIGHTS
    step = gl.num_programs(0)
    tile = gl.program_id(0)
    num_blocks = (num_tiles - tile + step - 1) // step * num_k
    row = tile // x_tiles * TILE
    t = tile % x_tiles * (CONSUMERS * ROWS)
    for s in gl.static_range(STAGES):
        _ask_weights(descs, ring, s, row, s * BLOCK_K, s < num_k)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for s in gl.static_range(STAGES):
        _ask_x(descs, ring, s, t, s * BLOCK_K, s < num_k)
    k = gl.minimum(num_k, STAGES)
    slot = k % STAGES
    phase = gl.where(k < STAGES, 1, 0)  # a slot that was never full is free
    for _ in range(k, num_blocks):
        if k == num_k:
            k = num_k * 0
            tile += step
            row = tile // x_tiles * TILE
            t = tile % x_tiles * (CONSUMERS * ROWS)
        mbarrier.wait(ring[1].index(slot), phase)
        _ask_weights(descs, ring, slot, row, k * BLOCK_K, True)
        _ask_x(descs, ring, slot, t, k * BLOCK_K, True)
        k += 1
        slot += 1
        wrap = slot == STAGES
        phase = gl.where(wrap, phase ^ 1, phase)
        slot = gl.where(wrap, 0, slot)


@gluon.jit
def _act(sums, dtype: gl.constexpr):
    """silu(gate) * up of sums whose columns are 8 gates, their ups, .."""
    PAIRS: gl.constexpr = sums.shape[1] // (2 * GATES)
    pairs = sums.reshape([ROWS, PAIRS, 2, GATES]).permute([0, 1, 3, 2])
    gate, up = gl.split(pairs)
    return (gate / (1.0 + gl.exp(-gate)) * up).reshape([ROWS, PAIRS * GATES]).to(dtype)


@gluon.jit
def _multiply(outs, ring, work, ME: gl.constexpr):
    """A consumer: rows 64 * ME .. of every tile."""
    ready, empty, w_smem, x_smem = ring[:4]
    out_desc, out, num_rows, num_outputs = outs[:4]
    num_tiles, x_tiles, num_k = work
    EXTRA: gl.constexpr = EXTRA_WEIGHTS if len(ring) == 5 else 0
    BLOCK_K: gl.constexpr = x_smem.shape[2]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WEIGHTS, 16])
    W: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WEIGHTS, BLOCK_K], w_smem.dtype)
    slot = num_k * 0
    phase = num_k * 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        sums = (gl.zeros([ROWS, WEIGHTS], gl.float32, SUMS),)
        if EXTRA:
            OF_EXTRA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, EXTRA, 16])
            sums = sums + (gl.zeros([ROWS, EXTRA], gl.float32, OF_EXTRA),)
        before = num_k * 0  # not `slot`: the compiler would take it for one that does not change
        for k in range(num_k):
            mbarrier.wait(ready.index(slot), phase)
            x = x_smem.index(ME * STAGES + slot)
            w = reinterpret(w_smem.index(slot), w_smem.dtype, [WEIGHTS, BLOCK_K], W)
            asked = (warpgroup_mma(x, w.permute((1, 0)), sums[0], is_async=True),)
            if EXTRA:
                w = reinterpret(ring[4].index(slot), w_smem.dtype, [EXTRA, BLOCK_K], W)
                asked = asked + (warpgroup_mma(x, w.permute((1, 0)), sums[1], is_async=True),)
            sums = wait_products(asked, len(asked))
            # The block before is multiplied: the compiler has all warps meet before one says so.
            mbarrier.arrive(empty.index(before), count=1, pred=k > 0)
            before = slot
            slot += 1
            wrap = slot == STAGES
            phase = gl.where(wrap, phase ^ 1, phase)
            slot = gl.where(wrap, 0, slot)
        sums = wait_products(sums, 0)
        mbarrier.arrive(empty.index(before), count=1)
        t = (tile % x_tiles * CONSUMERS + ME) * ROWS
        output = tile // x_tiles * ((WEIGHTS + EXTRA) // 2)
        act = _act(sums[0], out_desc.dtype)
        if EXTRA:  # the only tile: x that this consumer has multiplied makes room
            halves = act.reshape([ROWS, 2, WEIGHTS // 4]).permute([0, 2, 1])
            first, second = gl.split(halves)
            x_smem.index(ME * STAGES).store(first)
            x_smem.index(ME * STAGES + 1).store(second)
            fence_async_shared()
            async_store(out_desc, [t, output], x_smem.index(ME * STAGES))
            async_store(out_desc, [t, output + WEIGHTS // 4], x_smem.index(ME * STAGES + 1))
            act = _act(sums[1], out_desc.dtype)
            t += gl.arange(0, ROWS, gl.SliceLayout(1, act.type.layout))
            output += WEIGHTS // 2 + gl.arange(0, EXTRA // 2, gl.SliceLayout(0, act.type.layout))
            at = out + t[:, None] * num_outputs + output[None, :]
            gl.store(at, act, mask=(t < num_rows)[:, None] & (output < num_outputs)[None, :])
        else:
            mine = outs[4].index(ME)
            tma.store_wait(0)  # the tile before has left
            mine.store(act)
            fence_async_shared()
            async_store(out_desc, [t, output], mine)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_tiles", "x_tiles", "num_k", "num_rows", "num_outputs"])
def chunk_swiglu_kernel(
    w_desc,
    extra_desc,
    x_desc,
    out_desc,
    out,
    num_tiles,
    x_tiles,
    num_k,
    num_rows,
    num_outputs,
    EXTRA: gl.constexpr,
    PDL: gl.constexpr,
):
    """Tiles program_id, + num_programs, ..; neighbours share weights. EXTRA: tiles have extra
    weights, and a program has one."""
    W: gl.constexpr = [STAGES] + w_desc.block_shape
    w_smem = gl.allocate_shared_memory(w_desc.dtype, W, w_desc.layout)
    X: gl.constexpr = [CONSUMERS * STAGES] + x_desc.block_shape
    x_smem = gl.allocate_shared_memory(x_desc.dtype, X, x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(empty.index(s), count=CONSUMERS)
    fence_async_shared()
    ring = (ready, empty, w_smem, x_smem)
    outs = (out_desc, out, num_rows, num_outputs)
    if EXTRA:
        E: gl.constexpr = [STAGES] + extra_desc.block_shape
        ring = ring + (gl.allocate_shared_memory(extra_desc.dtype, E, extra_desc.layout),)
    else:
        OUT: gl.constexpr = [CONSUMERS] + out_desc.block_shape
        outs = outs + (gl.allocate_shared_memory(out_desc.dtype, OUT, out_desc.layout),)
    work = (num_tiles, x_tiles, num_k)
    gl.warp_specialize(
        [
            (_multiply, (outs, ring, work, 0)),
            (_multiply, (outs, ring, work, 1)),
            (_load, ((w_desc, extra_desc, x_desc), ring, work, PDL)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, LOADER_REGISTERS],
    )


@gluon.jit
def _ask(descs, ring, slot, tile, k, x_tiles, live):
    """Asks for block k of a large tile."""
    w_desc, x_desc = descs
    ready, _, w_smem, x_smem = ring
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    ALL_WEIGHTS: gl.constexpr = LARGE_WEIGHTS * LARGE_CONSUMERS
    bar = ready.index(slot)
    mbarrier.expect(bar, (ALL_WEIGHTS + LARGE_ROWS) * BLOCK_K * 2, pred=live)
    row = tile // x_tiles * ALL_WEIGHTS
    load_weights(w_desc, row, k * BLOCK_K, bar, w_smem, slot, live, LARGE_CONSUMERS, LARGE_WEIGHTS)
    at = [tile % x_tiles * LARGE_ROWS, k * BLOCK_K]
    async_load(x_desc, at, bar, x_smem.index(slot), live)


@gluon.jit
def _refill(descs, ring, slot, phase, tile, k, x_tiles, live):
    """The same into a slot once every consumer is done with it."""
    if live:
        mbarrier.wait(ring[1].index(slot), phase)
    _ask(descs, ring, slot, tile, k, x_tiles, live)


@gluon.jit
def _behind(tile, k, num_k):
    """(tile, block) behind block k of a tile."""
    over = k + 1 == num_k
    return gl.where(over, tile + gl.num_programs(0), tile), gl.where(over, 0, k + 1)


@gluon.jit
def _leave(y, out_desc, smem, t, row):
    """Sends results [outputs, rows of x] off, once those before them have left."""
    tma.store_wait(0)
    smem.permute((1, 0)).store(y.to(out_desc.dtype))
    fence_async_shared()
    async_store(out_desc, [t, row], smem)


@gluon.jit
def _multiply_large(
    descs, out, ring, work, ME: gl.constexpr, SWIGLU: gl.constexpr, PDL: gl.constexpr
):
    """A consumer: weight rows 64 * ME .. of every large tile; the first one loads as well, while
    what it has asked the tensor cores for is multiplied."""
    ready, empty, w_smem, x_smem = ring
    num_tiles, x_tiles, num_k = work
    out_desc, out_smem = out
    BLOCK: gl.constexpr = [LARGE_WEIGHTS, x_smem.shape[2]]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LARGE_ROWS, 16])
    W: gl.constexpr = gl.NVMMASharedLayout.get_default_for(BLOCK, w_smem.dtype)
    mine = out_smem.index(ME)
    slot = num_k * 0
    phase = num_k * 0
    next_tile = gl.program_id(0)
    next_k = num_k * 0
    if ME == 0:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        for s in gl.static_range(LARGE_STAGES):
            _ask(descs, ring, s, next_tile, next_k, x_tiles, next_tile < num_tiles)
            next_tile, next_k = _behind(next_tile, next_k, num_k)
    before = num_k * 0
    before_phase = num_k * 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        sums = gl.zeros([LARGE_WEIGHTS, LARGE_ROWS], gl.float32, SUMS)
        for k in range(num_k):
            mbarrier.wait(ready.index(slot), phase)
            w = reinterpret(w_smem.index(slot * LARGE_CONSUMERS + ME), w_smem.dtype, BLOCK, W)
            sums = warpgroup_mma(w, x_smem.index(slot).permute((1, 0)), sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=(sums,))
            # The block before is multiplied, unless it was another tile's.
            done = k > 0
            mbarrier.arrive(empty.index(before), count=1, pred=done)
            if ME == 0:
                live = done & (next_tile < num_tiles)
                _refill(descs, ring, before, before_phase, next_tile, next_k, x_tiles, live)
                behind_tile, behind_k = _behind(next_tile, next_k, num_k)
                next_tile = gl.where(done, behind_tile, next_tile)
                next_k = gl.where(done, behind_k, next_k)
            before = slot
            before_phase = phase
            slot += 1
            wrap = slot == LARGE_STAGES
            phase = gl.where(wrap, phase ^ 1, phase)
            slot = gl.where(wrap, 0, slot)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(empty.index(before), count=1)
        if ME == 0:
            live = next_tile < num_tiles
            _refill(descs, ring, before, before_phase, next_tile, next_k, x_tiles, live)
            next_tile, next_k = _behind(next_tile, next_k, num_k)
        t = tile % x_tiles * LARGE_ROWS
        row = (tile // x_tiles * LARGE_CONSUMERS + ME) * mine.shape[1]
        if SWIGLU:
            _leave(swiglu_of(sums), out_desc, mine, t, row)
        else:  # twice as many: half of the rows find room
            halves = sums.reshape([LARGE_WEIGHTS, 2, LARGE_ROWS // 2]).permute([0, 2, 1])
            first, second = gl.split(halves)
            _leave(first, out_desc, mine, t, row)
            _leave(second, out_desc, mine, t + LARGE_ROWS // 2, row)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_tiles", "x_tiles", "num_k"])
def large_chunk_linear_kernel(
    w_desc, x_desc, out_desc, num_tiles, x_tiles, num_k, SWIGLU: gl.constexpr, PDL: gl.constexpr
):
    """Large tiles program_id, + num_programs, ..; neighbours share weights."""
    W: gl.constexpr = [LARGE_STAGES * LARGE_CONSUMERS] + w_desc.block_shape
    w_smem = gl.allocate_shared_memory(w_desc.dtype, W, w_desc.layout)
    X: gl.constexpr = [LARGE_STAGES] + x_desc.block_shape
    x_smem = gl.allocate_shared_memory(x_desc.dtype, X, x_desc.layout)
    OUT: gl.constexpr = [LARGE_CONSUMERS] + out_desc.block_shape
    out_smem = gl.allocate_shared_memory(out_desc.dtype, OUT, out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [LARGE_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [LARGE_STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(LARGE_STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(empty.index(s), count=LARGE_CONSUMERS)
    fence_async_shared()
    descs = (w_desc, x_desc)
    out = (out_desc, out_smem)
    ring = (ready, empty, w_smem, x_smem)
    work = (num_tiles, x_tiles, num_k)
    gl.warp_specialize(
        [
            (_multiply_large, (descs, out, ring, work, 0, SWIGLU, PDL)),
            (_multiply_large, (descs, out, ring, work, 1, SWIGLU, PDL)),
            (_multiply_large, (descs, out, ring, work, 2, SWIGLU, PDL)),
        ],
        [4, 4],
        [LARGE_REGISTERS, LARGE_REGISTERS],
    )
