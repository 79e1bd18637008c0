"""The kernel of specialized_linear.py, which says what it computes, which warps load, and why."""

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
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.argmax_epilogue import better_ranks, lowest_ranks, store_best
from graphengine.kernels.triton_internals import (
    async_load,
    async_store,
    prefetch_descriptor,
    read_once,
    reinterpret,
)
from graphengine.kernels.wide_linear import (
    load_weights,
    scaled,
    sub_tile_offset,
    swiglu_of,
    wait_products,
)

ROWS = gl.constexpr(64)  # weight rows of a consumer: what one warpgroup multiplies at least
LOADER_REGISTERS = gl.constexpr(24)


@gluon.jit
def _place(item, x_tiles, num_splits, COLS: gl.constexpr):
    """(first row of x, split, tile of weight rows) of an item; neighbours share weights."""
    return item % x_tiles * COLS, item // x_tiles % num_splits, item // x_tiles // num_splits


@gluon.jit
def _load_x(descs, ring, slot, t, col, live):
    bar = ring[0].index(slot)
    async_load(descs[1], [t, col], bar, ring[3].index(slot), live)
    if len(ring) == 5:
        t += descs[1].block_shape[0]
        async_load(descs[2], [t, col], bar, ring[4].index(slot), live)


@gluon.jit
def _load(
    descs,
    ring,
    work,
    STAGE_BYTES: gl.constexpr,
    TILE: gl.constexpr,
    COLS: gl.constexpr,
    PDL: gl.constexpr,
):
    """The loading warp: x of the blocks whose weights are on their way, then block after block.

    A ring is (ready, empty, weights, x's high part) and, where there is one, x's low part.
    """
    ready = ring[0]
    empty = ring[1]
    num_items, x_tiles, num_splits, num_k, _, _ = work
    STAGES: gl.constexpr = ready.shape[0]
    CONSUMERS: gl.constexpr = ring[2].shape[0] // STAGES
    BLOCK_K: gl.constexpr = descs[1].block_shape[1]
    step = gl.num_programs(0)
    num_blocks = (num_items - gl.program_id(0) + step - 1) // step * num_k
    item = gl.program_id(0)
    t, split, tile = _place(item, x_tiles, num_splits, COLS)
    if PDL > 0:
        gdc_wait()
    for s in gl.static_range(STAGES):
        at = (split * num_k + s) * BLOCK_K
        _load_x(descs, ring, s, t, at, s < num_k)
    if PDL == 2:
        gdc_launch_dependents()
    k = gl.minimum(num_k, STAGES)
    slot = k % STAGES
    phase = gl.where(k < STAGES, 1, 0)  # a slot that was never full is free
    for _ in range(k, num_blocks):
        if k == num_k:
            k = num_k * 0
            item += step
            t, split, tile = _place(item, x_tiles, num_splits, COLS)
        mbarrier.wait(empty.index(slot), phase)
        bar = ready.index(slot)
        mbarrier.expect(bar, STAGE_BYTES)
        at = (split * num_k + k) * BLOCK_K
        load_weights(descs[0], tile * TILE, at, bar, ring[2], slot, True, CONSUMERS, ROWS, TILE)
        _load_x(descs, ring, slot, t, at, True)
        k += 1
        slot += 1
        wrap = slot == STAGES
        phase = gl.where(wrap, phase ^ 1, phase)
        slot = gl.where(wrap, 0, slot)
    if PDL == 1:
        gdc_launch_dependents()


@gluon.jit
def _finish(acc, io, out_desc, free, place, SWIGLU: gl.constexpr, FP8: gl.constexpr):
    """What becomes of a consumer's sums [64, rows of a part of x], from output `first` on; `tile`
    is one of 64 weight rows."""
    _, _, out, x_scale, w_scale = io
    t, split, tile, first, num_tiles, T, E = place
    ARGMAX: gl.constexpr = out.dtype.element_ty == gl.int64
    OUTPUTS: gl.constexpr = ROWS // 2 if SWIGLU else ROWS
    SUMS: gl.constexpr = acc.type.layout
    if FP8:
        acc = scaled(acc, x_scale, w_scale, first, t, T, E, SUMS, SWIGLU)
    if ARGMAX:
        r = gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
        best = better_ranks(lowest_ranks(ROWS, acc.shape[1], SUMS), acc, r, first + r < E)
        store_best(best, out, tile, num_tiles, t, T, first)
    elif SWIGLU:
        # All of the slot, so that both are of one size, then as many rows as there are.
        BITS: gl.constexpr = OUTPUTS * out.dtype.element_ty.primitive_bitwidth
        LINES: gl.constexpr = ROWS * free.shape[3] * free.dtype.primitive_bitwidth // BITS
        view = reinterpret(free, out.dtype.element_ty, [LINES, OUTPUTS], out_desc.layout)
        view = view.slice(0, acc.shape[1])
        view.permute((1, 0)).store(swiglu_of(acc).to(out.dtype.element_ty))
        fence_async_shared()
        async_store(out_desc, [t, first], view)
    else:
        r = first + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
        c = t + gl.arange(0, acc.shape[1], gl.SliceLayout(0, SUMS))
        at = out + (split * T + c).to(gl.int64)[None, :] * E + r[:, None]
        gl.store(at, acc.to(out.dtype.element_ty), mask=(r < E)[:, None] & (c < T)[None, :])


@gluon.jit
def _multiply(io, ring, work, CONSUMER: gl.constexpr, TILE: gl.constexpr):
    """A consumer: 64 weight rows of every tile, from 64 * CONSUMER on if that many are left,
    against all its rows of x."""
    ready = ring[0]
    empty = ring[1]
    w_smem = ring[2]
    num_items, x_tiles, num_splits, num_k, T, E = work
    SWIGLU: gl.constexpr = len(w_smem.shape) == 5  # gates beside their ups
    FP8: gl.constexpr = w_smem.dtype == gl.float8e4nv
    STAGES: gl.constexpr = ready.shape[0]
    CONSUMERS: gl.constexpr = w_smem.shape[0] // STAGES
    PARTS: gl.constexpr = len(ring) - 3
    HIGH: gl.constexpr = ring[3].shape[1]
    LOW: gl.constexpr = ring[2 + PARTS].shape[1]
    COLS: gl.constexpr = HIGH + LOW if PARTS == 2 else HIGH
    DEPTH: gl.constexpr = 256 // w_smem.dtype.primitive_bitwidth  # of one instruction, in k
    OF_HIGH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HIGH, DEPTH])
    OF_LOW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LOW, DEPTH])
    BLOCK: gl.constexpr = [ROWS, ring[3].shape[2]]
    W: gl.constexpr = gl.NVMMASharedLayout.get_default_for(BLOCK, w_smem.dtype)
    num_tiles = num_items // x_tiles // num_splits * CONSUMERS
    slot = num_k * 0
    phase = num_k * 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        accs = (gl.zeros([ROWS, HIGH], gl.float32, OF_HIGH),)
        if PARTS == 2:
            accs = accs + (gl.zeros([ROWS, LOW], gl.float32, OF_LOW),)
        before = num_k * 0  # not `slot`: the compiler would take it for one that does not change
        for k in range(num_k):
            mbarrier.wait(ready.index(slot), phase)
            w = w_smem.index(slot * CONSUMERS + CONSUMER)
            w = reinterpret(w, w_smem.dtype, BLOCK, W)
            x = ring[3].index(slot).permute((1, 0))
            sums = (warpgroup_mma(w, x, accs[0], is_async=True),)
            if PARTS == 2:
                x = ring[4].index(slot).permute((1, 0))
                sums = sums + (warpgroup_mma(w, x, accs[1], is_async=True),)
            accs = wait_products(sums, len(sums))
            # The block before is multiplied: the compiler has all warps meet before one says so.
            mbarrier.arrive(empty.index(before), count=1, pred=k > 0)
            before = slot
            slot += 1
            wrap = slot == STAGES
            phase = gl.where(wrap, phase ^ 1, phase)
            slot = gl.where(wrap, 0, slot)
        accs = wait_products(accs, 0)
        mbarrier.arrive(empty.index(before), count=1)
        t, split, tile = _place(item, x_tiles, num_splits, COLS)
        first = (tile * TILE + sub_tile_offset(CONSUMER, ROWS, TILE)) // (1 + SWIGLU)
        mine = tile * CONSUMERS + CONSUMER
        place = (t, split, mine, first, num_tiles, T, E)
        # SwiGLU has one item a CTA: nothing more arrives here, and nobody else reads these rows.
        free = w_smem.index(CONSUMER)
        _finish(accs[0], io, io[0], free, place, SWIGLU, FP8)
        if PARTS == 2:
            place = (t + HIGH, split, mine, first, num_tiles, T, E)
            free = w_smem.index(CONSUMERS + CONSUMER)
            _finish(accs[1], io, io[1], free, place, SWIGLU, FP8)
    if SWIGLU:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["T", "num_items", "num_splits", "num_k"])
def specialized_linear_kernel(
    w_desc,
    x_high,
    x_low,
    out_high,
    out_low,
    x_scale,
    w_scale,
    out,
    T,
    E,
    num_items,
    num_splits,
    num_k,
    TILE: gl.constexpr,
    CONSUMERS: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """An item is a tile of TILE weight rows and HIGH + LOW rows of x over one split of k; a CTA
    takes every num_programs-th."""
    BLOCK_K: gl.constexpr = x_high.block_shape[1]
    COLS: gl.constexpr = x_high.block_shape[0] + (x_low.block_shape[0] if PARTS == 2 else 0)
    BYTES: gl.constexpr = w_desc.dtype.primitive_bitwidth // 8
    STAGE_BYTES: gl.constexpr = (CONSUMERS * ROWS + COLS) * BLOCK_K * BYTES
    WEIGHTS: gl.constexpr = [STAGES * CONSUMERS] + w_desc.block_shape
    w_smem = gl.allocate_shared_memory(w_desc.dtype, WEIGHTS, w_desc.layout)
    OF_HIGH: gl.constexpr = [STAGES] + x_high.block_shape
    x_smem = (gl.allocate_shared_memory(x_high.dtype, OF_HIGH, x_high.layout),)
    if PARTS == 2:
        OF_LOW: gl.constexpr = [STAGES] + x_low.block_shape
        x_smem = x_smem + (gl.allocate_shared_memory(x_low.dtype, OF_LOW, x_low.layout),)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ring = (ready, empty, w_smem) + x_smem
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(empty.index(s), count=CONSUMERS)
    fence_async_shared()
    prefetch_descriptor("specialized_linear_kernel", 1 + 2 * len(w_desc.block_shape))
    read_once("specialized_linear_kernel", 0)

    # Of the first item, as many blocks as there are slots, before the warps part.
    x_tiles = (T + COLS - 1) // COLS
    _, split, tile = _place(gl.program_id(0), x_tiles, num_splits, COLS)
    for s in gl.static_range(STAGES):
        mbarrier.expect(ready.index(s), STAGE_BYTES, pred=s < num_k)
    for s in gl.static_range(STAGES):
        col = (split * num_k + s) * BLOCK_K
        bar = ready.index(s)
        live = s < num_k
        load_weights(w_desc, tile * TILE, col, bar, w_smem, s, live, CONSUMERS, ROWS, TILE)

    descs = (w_desc, x_high, x_low)
    io = (out_high, out_low, out, x_scale, w_scale)
    work = (num_items, x_tiles, num_splits, num_k, T, E)
    # Without names: a tuple that has one loses what is constexpr in it.
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_multiply, (io, ring, work, 0, TILE)),
                (_load, (descs, ring, work, STAGE_BYTES, TILE, COLS, PDL)),
            ],
            [1],
            [LOADER_REGISTERS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_multiply, (io, ring, work, 0, TILE)),
                (_multiply, (io, ring, work, 1, TILE)),
                (_load, (descs, ring, work, STAGE_BYTES, TILE, COLS, PDL)),
            ],
            [4, 1],
            [REGISTERS, LOADER_REGISTERS],
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_multiply, (io, ring, work, 0, TILE)),
                (_multiply, (io, ring, work, 1, TILE)),
                (_multiply, (io, ring, work, 2, TILE)),
                (_load, (descs, ring, work, STAGE_BYTES, TILE, COLS, PDL)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (io, ring, work, 0, TILE)),
                (_multiply, (io, ring, work, 1, TILE)),
                (_multiply, (io, ring, work, 2, TILE)),
                (_multiply, (io, ring, work, 3, TILE)),
                (_load, (descs, ring, work, STAGE_BYTES, TILE, COLS, PDL)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, LOADER_REGISTERS],
        )
