"""The kernels of skinny_linear.py, which says what they compute and why.

`skinny_tma_kernel`: Gluon, Hopper: TMA into a ring of stages, wgmma. `skinny_pointer_kernel`: plain
Triton.
Where `out` is of int64 the TMA kernel writes no products but a candidate for the argmax of each row
of x and each CTA (argmax_epilogue.py).
Invariant: before `gdc_wait` only weights are read and nothing is written.
"""

# A Gluon kernel is not Python to a type checker: its parameters are constexpr only by annotation.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.argmax_epilogue import better_ranks, lowest_ranks, store_candidates
from graphengine.kernels.interpreter import dot
from graphengine.kernels.triton_internals import async_load, prefetch_descriptor, read_once


@gluon.jit
def _next_block(
    item, k, row, col, step, num_splits, num_k, ROWS: gl.constexpr, BLOCK_K: gl.constexpr
):
    """The block after (item, k) in a CTA's order, with its first weight row and column."""
    k += 1
    col += BLOCK_K
    if k == num_k:
        item += step
        k = item * 0
        row = item // num_splits * ROWS
        col = item % num_splits * num_k * BLOCK_K
    return item, k, row, col


@gluon.jit
def _load_weights(desc, row, col, up_row, ready, smem, slot, live, SWIGLU: gl.constexpr):
    if SWIGLU:
        async_load(desc, [row, col], ready, smem.index(2 * slot), pred=live)
        async_load(desc, [up_row, col], ready, smem.index(2 * slot + 1), pred=live)
    else:
        async_load(desc, [row, col], ready, smem.index(slot), pred=live)


@gluon.jit
def _load_x(desc, col, lo_row, ready, smem, slot, live, FP8: gl.constexpr):
    if FP8:
        async_load(desc, [0, col], ready, smem.index(2 * slot), pred=live)
        async_load(desc, [lo_row, col], ready, smem.index(2 * slot + 1), pred=live)
    else:
        async_load(desc, [0, col], ready, smem.index(slot), pred=live)


@gluon.jit(do_not_specialize=["T", "num_items", "num_splits", "num_k"])
def skinny_tma_kernel(
    w_desc,
    x_desc,
    x_scale,
    w_scale,
    out,
    T,
    E,
    num_items,
    num_splits,
    num_k,
    ROWS: gl.constexpr,
    COLS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    SWIGLU: gl.constexpr,
    PDL: gl.constexpr,
    FP8: gl.constexpr,
):
    """A CTA takes items (weight tile, split) first, first + step, ...; its blocks of all items are
    one sequence through a ring of STAGES buffers, so the next item's weights are in flight during
    an epilogue. A stage's barrier counts the bytes of its weights and of its x."""
    ARGMAX: gl.constexpr = out.dtype.element_ty == gl.int64
    HALVES: gl.constexpr = 2 if SWIGLU else 1
    PARTS: gl.constexpr = 2 if FP8 else 1  # of x: hi and lo
    BYTES: gl.constexpr = w_desc.dtype.primitive_bitwidth // 8
    STAGE_BYTES: gl.constexpr = (HALVES * ROWS + PARTS * COLS) * BLOCK_K * BYTES
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, COLS, 32 // BYTES]
    )
    VEC: gl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
    ALONG: gl.constexpr = min(32, ROWS // VEC)
    LINES: gl.constexpr = gl.BlockedLayout(
        [VEC, 1], [ALONG, 32 // ALONG], [1, gl.num_warps()], [0, 1]
    )
    OUT: gl.constexpr = ACC if ARGMAX else LINES
    w_smem = gl.allocate_shared_memory(
        w_desc.dtype, [STAGES * HALVES, ROWS, BLOCK_K], w_desc.layout
    )
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES * PARTS, COLS, BLOCK_K], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    prefetch_descriptor("skinny_tma_kernel", 5)
    read_once("skinny_tma_kernel", 0)

    first = gl.program_id(0)
    step = gl.num_programs(0)
    total = (num_items - first + step - 1) // step * num_k
    row = first // num_splits * ROWS
    first_col = first % num_splits * num_k * BLOCK_K
    item, k, col = first, first * 0, first_col
    for s in gl.static_range(STAGES):
        bar = ready.index(s)
        mbarrier.expect(bar, STAGE_BYTES, pred=s < total)
        _load_weights(w_desc, row, col, row + E, bar, w_smem, s, s < total, SWIGLU)
        item, k, row, col = _next_block(item, k, row, col, step, num_splits, num_k, ROWS, BLOCK_K)
    if PDL > 0:
        gdc_wait()
    x_item, x_k, x_row, x_col = first, first * 0, first * 0, first_col
    for s in gl.static_range(STAGES):
        _load_x(x_desc, x_col, T, ready.index(s), x_smem, s, s < total, FP8)
        x_item, x_k, x_row, x_col = _next_block(
            x_item, x_k, x_row, x_col, step, num_splits, num_k, ROWS, BLOCK_K
        )
    if PDL == 2:
        gdc_launch_dependents()

    slot = first * 0
    phase = first * 0
    num_loaded = first * 0 + STAGES
    r_in_tile = gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
    t = gl.arange(0, COLS, gl.SliceLayout(0, OUT))
    if ARGMAX:
        best = lowest_ranks(ROWS, COLS, ACC)
        index = r_in_tile
    if FP8:
        of_x = gl.load(x_scale + t, mask=t < T, other=0.0)[None, :]
    for done in range(first, num_items, step):
        r = done // num_splits * ROWS + r_in_tile
        live_r = r < E
        if FP8:  # ahead of the products, because they come from memory
            of_w = gl.load(w_scale + r, mask=live_r, other=0.0)
            if SWIGLU:
                of_up = gl.load(w_scale + E + r, mask=live_r, other=0.0)
        acc = gl.zeros([ROWS, COLS], gl.float32, ACC)
        up = gl.zeros([ROWS, COLS], gl.float32, ACC)
        for _ in range(num_k):
            bar = ready.index(slot)
            mbarrier.wait(bar, phase)
            x_t = x_smem.index(slot * PARTS).permute((1, 0))
            w = w_smem.index(slot * HALVES)
            acc = warpgroup_mma(w, x_t, acc, is_async=True)
            if SWIGLU:
                w_up = w_smem.index(slot * HALVES + 1)
                up = warpgroup_mma(w_up, x_t, up, is_async=True)
            if FP8:
                lo_t = x_smem.index(slot * PARTS + 1).permute((1, 0))
                acc = warpgroup_mma(w, lo_t, acc, is_async=True)
                if SWIGLU:
                    up = warpgroup_mma(w_up, lo_t, up, is_async=True)
            if SWIGLU:
                acc, up = warpgroup_mma_wait(0, deps=[acc, up])
            else:
                acc = warpgroup_mma_wait(0, deps=[acc])
            # The slot is free: the compiler puts a barrier between wgmma's reads and these writes.
            live = num_loaded < total
            mbarrier.expect(bar, STAGE_BYTES, pred=live)
            _load_weights(w_desc, row, col, row + E, bar, w_smem, slot, live, SWIGLU)
            _load_x(x_desc, col, T, bar, x_smem, slot, live, FP8)
            item, k, row, col = _next_block(
                item, k, row, col, step, num_splits, num_k, ROWS, BLOCK_K
            )
            num_loaded += 1
            if PDL == 1:  # noqa: SIM102 (a compile-time test around one at run time)
                if num_loaded == total:
                    gdc_launch_dependents()
            slot += 1
            wrap = slot == STAGES
            phase = gl.where(wrap, phase ^ 1, phase)
            slot = gl.where(wrap, 0, slot)

        y = gl.convert_layout(acc, OUT)
        if FP8:
            y = y * of_w[:, None] * of_x
        if SWIGLU:
            u = gl.convert_layout(up, OUT)
            if FP8:
                u = u * of_up[:, None] * of_x
            y = y / (1.0 + gl.exp(-y)) * u
        if ARGMAX:
            best = better_ranks(best, y, index, live_r)
            index += ROWS
        else:
            at = (done % num_splits * T + t).to(gl.int64) * E
            gl.store(
                out + at[None, :] + r[:, None],
                y.to(out.dtype.element_ty),
                mask=live_r[:, None] & (t < T)[None, :],
            )
    if ARGMAX:
        store_candidates(best, out, first, step, 0, T, first * ROWS, step * ROWS, ROWS)


@triton.jit(do_not_specialize=["T", "num_splits", "num_k"])
def skinny_pointer_kernel(
    weight,
    x,
    out,
    T,
    E,
    D,
    num_splits,
    num_k,
    weight_row_stride,
    x_row_stride,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWIGLU: tl.constexpr,
    PDL: tl.constexpr,
    EVEN_K: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    tile = tl.program_id(0) // num_splits
    split = tl.program_id(0) % num_splits
    r = tile * ROWS + tl.arange(0, ROWS)
    t = tl.arange(0, COLS)
    live_r = r < E
    live_t = t < T
    k = split * num_k * BLOCK_K + tl.arange(0, BLOCK_K)
    w_at = weight + r.to(tl.int64)[:, None] * weight_row_stride + k[None, :]
    x_at = x + t[:, None] * x_row_stride + k[None, :]
    up_offset = E.to(tl.int64) * weight_row_stride if SWIGLU else 0
    acc = tl.zeros([ROWS, COLS], tl.float32)
    up = tl.zeros([ROWS, COLS], tl.float32)
    if PDL > 0:
        gdc_wait()
    for _ in range(num_k):
        w_mask = live_r[:, None]
        x_mask = live_t[:, None]
        if not EVEN_K:
            w_mask = w_mask & (k < D)[None, :]
            x_mask = x_mask & (k < D)[None, :]
        x_tile = tl.load(x_at, mask=x_mask, other=0.0)
        acc = dot(tl.load(w_at, mask=w_mask, other=0.0), tl.trans(x_tile), acc, DOT_FP32)
        if SWIGLU:
            w_up = tl.load(w_at + up_offset, mask=w_mask, other=0.0)
            up = dot(w_up, tl.trans(x_tile), up, DOT_FP32)
        w_at += BLOCK_K
        x_at += BLOCK_K
        k += BLOCK_K
    if PDL > 0:
        gdc_launch_dependents()
    if SWIGLU:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    at = (split * T + t).to(tl.int64) * E
    tl.store(
        out + at[None, :] + r[:, None],
        acc.to(out.dtype.element_ty),
        mask=live_r[:, None] & live_t[None, :],
    )
