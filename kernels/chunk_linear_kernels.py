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
from graphengine.kernels.wide_linear import PAIR, load_weights, swiglu_of

ROWS = gl.constexpr(64)  # of x, a consumer's: what one warpgroup multiplies at least
CONSUMERS = gl.constexpr(2)
WEIGHTS = gl.constexpr(256)  # weight rows of a tile
GATES = gl.constexpr(PAIR)  # that stand together in a tile, their ups behind them
BLOCK_K = 64
STAGES = gl.constexpr(4)
LOADER_REGISTERS = gl.constexpr(24)
CONSUMER_REGISTERS = gl.constexpr(240)
LAUNCH_REGISTERS = 168  # of each of 12 warps: 8 that multiply, 4 that the compiler makes of 1

LARGE_ROWS = gl.constexpr(256)  # of x, a large tile's, all of which each consumer multiplies
LARGE_CONSUMERS = gl.constexpr(3)
LARGE_WEIGHTS = gl.constexpr(64)  # weight rows of a consumer
LARGE_STAGES = gl.constexpr(3)
LARGE_REGISTERS = gl.constexpr(168)  # of each of 12 warps


@gluon.jit
def _load(w_desc, x_desc, ring, work, PDL: gl.constexpr):
    """The loading warp: block after block of tile after tile."""
    ready, empty, w_smem, x_smem = ring
    num_tiles, x_tiles, num_k = work
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    slot = num_k * 0
    phase = num_k * 0 + 1  # a slot that was never full is free
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        t = tile % x_tiles * (CONSUMERS * ROWS)
        row = tile // x_tiles * WEIGHTS
        for k in range(num_k):
            mbarrier.wait(empty.index(slot), phase)
            bar = ready.index(slot)
            mbarrier.expect(bar, (WEIGHTS + CONSUMERS * ROWS) * BLOCK_K * 2)
            load_weights(w_desc, row, k * BLOCK_K, bar, w_smem, slot, True, 1, WEIGHTS)
            for c in gl.static_range(CONSUMERS):
                at = [t + c * ROWS, k * BLOCK_K]
                async_load(x_desc, at, bar, x_smem.index(slot * CONSUMERS + c))
            slot += 1
            wrap = slot == STAGES
            phase = gl.where(wrap, phase ^ 1, phase)
            slot = gl.where(wrap, 0, slot)


@gluon.jit
def _multiply(out_desc, out_smem, ring, work, ME: gl.constexpr):
    """A consumer: rows 64 * ME .. of every tile."""
    ready, empty, w_smem, x_smem = ring
    num_tiles, x_tiles, num_k = work
    BLOCK: gl.constexpr = [WEIGHTS, x_smem.shape[2]]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WEIGHTS, 16])
    W: gl.constexpr = gl.NVMMASharedLayout.get_default_for(BLOCK, w_smem.dtype)
    mine = out_smem.index(ME)
    slot = num_k * 0
    phase = num_k * 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        sums = gl.zeros([ROWS, WEIGHTS], gl.float32, SUMS)
        before = num_k * 0  # not `slot`: the compiler would take it for one that does not change
        for k in range(num_k):
            mbarrier.wait(ready.index(slot), phase)
            w = reinterpret(w_smem.index(slot), w_smem.dtype, BLOCK, W).permute((1, 0))
            sums = warpgroup_mma(x_smem.index(slot * CONSUMERS + ME), w, sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=(sums,))
            # The block before is multiplied: the compiler has all warps meet before one says so.
            mbarrier.arrive(empty.index(before), count=1, pred=k > 0)
            before = slot
            slot += 1
            wrap = slot == STAGES
            phase = gl.where(wrap, phase ^ 1, phase)
            slot = gl.where(wrap, 0, slot)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(empty.index(before), count=1)
        pairs = sums.reshape([ROWS, WEIGHTS // (2 * GATES), 2, GATES]).permute([0, 1, 3, 2])
        gate, up = gl.split(pairs)
        act = (gate / (1.0 + gl.exp(-gate)) * up).reshape([ROWS, WEIGHTS // 2])
        tma.store_wait(0)  # the tile before has left
        mine.store(act.to(out_desc.dtype))
        fence_async_shared()
        at = [(tile % x_tiles * CONSUMERS + ME) * ROWS, tile // x_tiles * (WEIGHTS // 2)]
        async_store(out_desc, at, mine)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_tiles", "x_tiles", "num_k"])
def chunk_swiglu_kernel(w_desc, x_desc, out_desc, num_tiles, x_tiles, num_k, PDL: gl.constexpr):
    """Tiles program_id, + num_programs, ..; neighbours share weights."""
    W: gl.constexpr = [STAGES] + w_desc.block_shape
    w_smem = gl.allocate_shared_memory(w_desc.dtype, W, w_desc.layout)
    X: gl.constexpr = [STAGES * CONSUMERS] + x_desc.block_shape
    x_smem = gl.allocate_shared_memory(x_desc.dtype, X, x_desc.layout)
    OUT: gl.constexpr = [CONSUMERS] + out_desc.block_shape
    out_smem = gl.allocate_shared_memory(out_desc.dtype, OUT, out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(empty.index(s), count=CONSUMERS)
    fence_async_shared()
    ring = (ready, empty, w_smem, x_smem)
    work = (num_tiles, x_tiles, num_k)
    gl.warp_specialize(
        [
            (_multiply, (out_desc, out_smem, ring, work, 0)),
            (_multiply, (out_desc, out_smem, ring, work, 1)),
            (_load, (w_desc, x_desc, ring, work, PDL)),
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
