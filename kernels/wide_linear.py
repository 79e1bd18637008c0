"""The GEMM of 65 to 256 rows: tiles of up to 192 weight rows in one balanced wave.

Why: at batches 8 and 16 a decode step has 128 and 256 rows, where weights and tensor cores take
about as long as each other (gate_up of Qwen3-8B at 256 rows: 45 us of reading, 54 of products; one
H200). Tiles of 128 weight rows are 192 there, for which 132 multiprocessors take two waves. Here a
tile is SUB sub-tiles of 64 or 128 weight rows, each an accumulator of its own because a tensor's
side is a power of two: 192 rows make it 128 tiles. SwiGLU is done in the registers that hold the
sums, and partials of a split K are left to the consumer.

FP8 is multiplied as FP8 and scaled at the end; x is one rounded row here, not two that keep bf16's
mantissa, because tensor cores are the limit and two cost as much as bf16.

The ring of stages is as in skinny_kernels.py, but a block's products stay in flight while the slot
of the block before is refilled, so that the tensor cores do not wait for a barrier. One tile is one
CTA; a CTA takes most of the shared memory, and its epilogue reuses the ring.

Where `out` is of int64 no products are written but, of each tile, a candidate for the argmax of
each row of x (argmax_epilogue.py).

Invariant: as skinny_linear.py's: one output element of one split is summed by one CTA in rising k,
and before `gdc_wait` only weights are read and nothing is written.

Cost: weights once from HBM, x once per tile of weight rows and weights once per tile of rows of x
from L2: (rows + cols) * 2 bytes of L2 per 2 * rows * cols operations and column of k.
Measured beside cuBLAS and a SwiGLU kernel, H200, gate_up of Qwen3-8B: 81.6 us, 89.5 there; a layer
at 256 rows 175.6, 185.7 (profiles/results/2026-11-22-h200-skinny-8b-256.json); at 128 rows 124.3,
135.4 (-skinny-8b-128-wide.json).
"""

# Gluon is not typed for a type checker.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.argmax_epilogue import better_ranks, lowest_ranks, store_candidates
from graphengine.kernels.fp8 import FP8, Fp8Scales
from graphengine.kernels.launch import early_options, on_grid
from graphengine.kernels.skinny_config import SkinnyConfig, cdiv, split_width
from graphengine.kernels.triton_internals import (
    async_load,
    prefetch_descriptor,
    read_once,
    reinterpret,
)

PAIR = 8  # SwiGLU: gate and up rows alternate by this many, what one warp's registers pair up


def launch_wide(
    x_TD: torch.Tensor,
    weight_ED: torch.Tensor,
    scales: Fp8Scales | None,
    out: torch.Tensor,
    config: SkinnyConfig,
    swiglu: bool,
) -> torch.Tensor:
    """Runs the kernel of a config with `cols` into out [Z, T, E], [T, E], [T, tiles] in int64 or
    (SwiGLU) [T, I]; I is a multiple of 8."""
    (T, D), E = x_TD.shape, weight_ED.shape[0] // (1 + swiglu)
    height = sub_tile_rows(config)
    outputs = config.rows // 2 if swiglu else config.rows
    num_k = split_width(D, config.num_splits, config.block_k) // config.block_k
    dtype = gluon_dtype(x_TD)
    on_grid(wide_linear_kernel, (cdiv(T, config.cols) * cdiv(E, outputs) * config.num_splits,))(
        weight_descriptor(weight_ED, height, config.block_k, swiglu, dtype),
        descriptor(x_TD, x_TD.shape, x_TD.stride(), [config.cols, config.block_k], dtype),
        *(scales or (out, out)),  # pointers that are not read
        out,
        *(T, E, config.num_splits, num_k),
        SUB=config.rows // height,
        ROWS=height,
        COLS=config.cols,
        BLOCK_K=config.block_k,
        STAGES=config.num_stages,
        SWIGLU=swiglu,
        FP8=scales is not None,
        num_warps=config.num_warps,
        **early_options(config.pdl),
    )
    return out


def gluon_dtype(x: torch.Tensor) -> gl.dtype:
    """What a descriptor of x holds."""
    return {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, FP8: gl.float8e4nv}[x.dtype]


def sub_tile_rows(config: SkinnyConfig) -> int:
    """128 where two warpgroups can take 64 rows each, so that both read x once; else 64."""
    return 128 if config.num_warps == 8 and config.rows % 128 == 0 else 64


def weight_descriptor(
    weight_ED: torch.Tensor, height: int, block_k: int, swiglu: bool, dtype: gl.dtype
) -> TensorDescriptor:
    """A TMA view of sub-tiles [height, block_k]; SwiGLU: of 8 gate rows, their 8 up rows, ..

    A thread of a warp that has 16 rows of products holds rows r and r + 8: a gate and its up.
    """
    (E, D), stride = weight_ED.shape, weight_ED.stride(0)
    if not swiglu:
        return descriptor(weight_ED, (E, D), (stride, 1), [height, block_k], dtype)
    shape, strides = (E // 2 // PAIR, 2, PAIR, D), (PAIR * stride, E // 2 * stride, stride, 1)
    box = [height // (2 * PAIR), 2, PAIR, block_k]
    return descriptor(weight_ED, shape, strides, box, dtype)


def descriptor(tensor: torch.Tensor, shape: Any, strides: Any, box: list[int], dtype: gl.dtype):
    """A TMA view of a tensor in boxes, swizzled as wgmma reads them."""
    layout = gl.NVMMASharedLayout.get_default_for(box, dtype)
    return TensorDescriptor(tensor, list(shape), list(strides), box, layout)


@gluon.constexpr_function
def sub_tile_offset(s, ROWS, TILE):
    """The first weight row of a sub-tile in a tile of TILE rows, or of whole sub-tiles (None)."""
    return s * ROWS if TILE is None else max(0, min(s * ROWS, TILE - ROWS))


@gluon.jit
def load_weights(
    desc,
    row,
    col,
    ready,
    smem,
    slot,
    live,
    SUB: gl.constexpr,
    ROWS: gl.constexpr,
    TILE: gl.constexpr = None,
):
    """Asks for a block of SUB sub-tiles of ROWS weight rows, of which the last begins earlier where
    all together have TILE rows."""
    for s in gl.static_range(SUB):
        first = row + sub_tile_offset(s, ROWS, TILE)
        at = [first // 16, 0, 0, col] if len(desc.block_shape) == 4 else [first, col]
        async_load(desc, at, ready, smem.index(slot * SUB + s), pred=live)


@gluon.jit
def wait_products(accs, NUM_PENDING: gl.constexpr):
    """Until at most so many products are in flight; a tuple as it was given."""
    done = warpgroup_mma_wait(NUM_PENDING, deps=accs)
    if len(accs) == 1:
        done = (done,)
    return done


@gluon.jit
def scaled(acc, x_scale, w_scale, row, t, T, E, ACC: gl.constexpr, SWIGLU: gl.constexpr):
    """Sums of FP8 products times the scales of their rows; E of up rows stand behind the gates'."""
    r = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, ACC))
    t = t + gl.arange(0, acc.shape[1], gl.SliceLayout(0, ACC))
    live = r < E
    if SWIGLU:
        m = r - row
        r = row + m // 16 * 8 + m % 8
        live = r < E
        r += m // 8 % 2 * E
    of_w = gl.load(w_scale + r, mask=live, other=0.0)
    return acc * of_w[:, None] * gl.load(x_scale + t, mask=t < T, other=0.0)[None, :]


@gluon.jit
def swiglu_of(acc):
    """silu(gate) * up [ROWS / 2, COLS] of sums [ROWS, COLS] in `weight_descriptor`'s order."""
    ROWS: gl.constexpr = acc.shape[0] // 2
    COLS: gl.constexpr = acc.shape[1]
    pairs = acc.reshape([ROWS // 8, 2, 8, COLS]).permute([0, 2, 3, 1])
    gate, up = gl.split(pairs)
    return (gate / (1.0 + gl.exp(-gate)) * up).reshape([ROWS, COLS])


@gluon.jit
def _store(acc, out, row, t, split, T, E, SWIGLU: gl.constexpr):
    """A sub-tile's results; each warp writes runs of consecutive outputs of one row of x."""
    ROWS: gl.constexpr = acc.shape[0] // 2 if SWIGLU else acc.shape[0]
    COLS: gl.constexpr = acc.shape[1]
    VEC: gl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
    ALONG: gl.constexpr = min(32, ROWS // VEC)
    OUT: gl.constexpr = gl.BlockedLayout(
        [VEC, 1], [ALONG, 32 // ALONG], [1, gl.num_warps()], [0, 1]
    )
    if SWIGLU:
        acc = swiglu_of(acc)
    y = gl.convert_layout(acc.to(out.dtype.element_ty), OUT)
    r = row + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
    t = t + gl.arange(0, COLS, gl.SliceLayout(0, OUT))
    at = (split * T + t).to(gl.int64) * E
    gl.store(out + at[None, :] + r[:, None], y, mask=(r < E)[:, None] & (t < T)[None, :])


@gluon.jit(do_not_specialize=["T", "num_splits", "num_k"])
def wide_linear_kernel(
    w_desc,
    x_desc,
    x_scale,
    w_scale,
    out,
    T,
    E,
    num_splits,
    num_k,
    SUB: gl.constexpr,
    ROWS: gl.constexpr,
    COLS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    SWIGLU: gl.constexpr,
    PDL: gl.constexpr,
    FP8: gl.constexpr,
):
    """One tile of SUB * ROWS weight rows and COLS rows of x, over one split of k. Neighbouring CTAs
    share weights. ROWS are 64 per warpgroup along the rows; the other warpgroups divide COLS."""
    TALL: gl.constexpr = ROWS // 16
    BYTES: gl.constexpr = w_desc.dtype.primitive_bitwidth // 8
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [TALL, gl.num_warps() // TALL], [16, COLS * TALL // gl.num_warps(), 32 // BYTES]
    )
    STAGE_BYTES: gl.constexpr = (SUB * ROWS + COLS) * BLOCK_K * BYTES
    W: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_K], w_desc.dtype)
    w_smem = gl.allocate_shared_memory(
        w_desc.dtype, [STAGES * SUB] + w_desc.block_shape, w_desc.layout
    )
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES, COLS, BLOCK_K], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    prefetch_descriptor("wide_linear_kernel", 1 + 2 * len(w_desc.block_shape))
    read_once("wide_linear_kernel", 0)

    x_tiles = (T + COLS - 1) // COLS
    t = gl.program_id(0) % x_tiles * COLS
    split = gl.program_id(0) // x_tiles % num_splits
    tile = gl.program_id(0) // x_tiles // num_splits
    row = tile * (SUB * ROWS)
    col = split * num_k * BLOCK_K
    for s in gl.static_range(STAGES):
        bar = ready.index(s)
        mbarrier.expect(bar, STAGE_BYTES, pred=s < num_k)
        load_weights(w_desc, row, col + s * BLOCK_K, bar, w_smem, s, s < num_k, SUB, ROWS)
    if PDL > 0:
        gdc_wait()
    for s in gl.static_range(STAGES):
        at = [t, col + s * BLOCK_K]
        async_load(x_desc, at, ready.index(s), x_smem.index(s), s < num_k)
    if PDL == 2:
        gdc_launch_dependents()

    accs = (gl.zeros([ROWS, COLS], gl.float32, ACC),) * SUB
    slot = row * 0
    phase = row * 0
    before = row * 0 + STAGES - 1
    for k in range(num_k):
        mbarrier.wait(ready.index(slot), phase)
        x_t = x_smem.index(slot).permute((1, 0))
        sums = ()
        for s in gl.static_range(SUB):
            w = reinterpret(w_smem.index(slot * SUB + s), w_desc.dtype, [ROWS, BLOCK_K], W)
            sums = sums + (warpgroup_mma(w, x_t, accs[s], is_async=True),)
        accs = wait_products(sums, SUB)
        # The block before is multiplied, so its slot is free: the compiler puts a barrier between
        # wgmma's reads and these writes.
        refill = k + STAGES - 1
        live = (k > 0) & (refill < num_k)
        bar = ready.index(before)
        mbarrier.expect(bar, STAGE_BYTES, pred=live)
        next_col = col + refill * BLOCK_K
        load_weights(w_desc, row, next_col, bar, w_smem, before, live, SUB, ROWS)
        async_load(x_desc, [t, next_col], bar, x_smem.index(before), live)
        if PDL == 1:  # noqa: SIM102 (a compile-time test around one at run time)
            if refill + 1 >= num_k:
                gdc_launch_dependents()
        before = slot
        slot += 1
        wrap = slot == STAGES
        phase = gl.where(wrap, phase ^ 1, phase)
        slot = gl.where(wrap, 0, slot)

    accs = wait_products(accs, 0)
    OUTPUTS: gl.constexpr = ROWS // 2 if SWIGLU else ROWS
    ARGMAX: gl.constexpr = out.dtype.element_ty == gl.int64
    if ARGMAX:
        best = lowest_ranks(ROWS, COLS, ACC)
    for s in gl.static_range(SUB):
        y = accs[s]
        out_row = (tile * SUB + s) * OUTPUTS
        if FP8:
            y = scaled(y, x_scale, w_scale, out_row, t, T, E, ACC, SWIGLU)
        if ARGMAX:
            r = s * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, ACC))
            best = better_ranks(best, y, r, row + r < E)
        else:
            _store(y, out, out_row, t, split, T, E, SWIGLU)
    if ARGMAX:
        num_tiles = gl.num_programs(0) // x_tiles
        store_candidates(best, out, tile, num_tiles, t, T, row, ROWS, ROWS)
