"""The GEMM of 65 to 256 rows for tiles whose weight rows are no multiple of 64.

Why: in wide_linear.py the weights are the side of wgmma that comes in 64s. 19,456 rows of `gate_up`
(Qwen3-4B) are then 102 tiles of 192, and 30 of 132 multiprocessors stand idle. Here x is that side,
and a tile has BIG + REST weight rows, both powers of two: 160 make it 122 tiles.

All else is wide_linear.py's: the ring, a block's products in flight while the slot of the one
before is refilled, SwiGLU in the registers that hold the sums, the order of a sum. A thread holds
the sums of neighbouring weight rows, so a gate and its up are 8 columns apart in one thread.

Legend: T rows, D inputs, E outputs (SwiGLU: I), Z splits.
"""

# Gluon is not typed for a type checker.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

import torch
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

from graphengine.kernels.fp8 import Fp8Scales
from graphengine.kernels.skinny_config import SkinnyConfig, cdiv, split_width
from graphengine.kernels.tensormap import prefetch_descriptor
from graphengine.kernels.wide_linear import describe, describe_weights, gluon_dtype


def launch_tall(
    x_TD: torch.Tensor,
    weight_ED: torch.Tensor,
    scales: Fp8Scales | None,
    out: torch.Tensor,
    config: SkinnyConfig,
    swiglu: bool,
) -> torch.Tensor:
    """Runs the kernel into out [Z, T, E], [T, E] or (SwiGLU) [T, I]; I is a multiple of 8.

    config.rows is the sum of two powers of two, both multiples of 16.
    """
    (T, D), E = x_TD.shape, weight_ED.shape[0] // (1 + swiglu)
    big = 1 << (config.rows.bit_length() - 1)
    outputs = config.rows // 2 if swiglu else config.rows
    num_k = split_width(D, config.num_splits, config.block_k) // config.block_k
    dtype = gluon_dtype(x_TD)
    tall_linear_kernel[(cdiv(T, config.cols) * cdiv(E, outputs) * config.num_splits,)](
        describe_weights(weight_ED, big, config.block_k, swiglu, dtype),
        describe_weights(weight_ED, config.rows - big, config.block_k, swiglu, dtype),
        describe(x_TD, x_TD.shape, x_TD.stride(), [config.cols, config.block_k], dtype),
        *(scales or (out, out)),  # pointers that are not read
        out,
        *(T, E, config.num_splits, num_k),
        BIG=big,
        REST=config.rows - big,
        COLS=config.cols,
        BLOCK_K=config.block_k,
        STAGES=config.num_stages,
        SWIGLU=swiglu,
        PDL=config.pdl,
        FP8=scales is not None,
        num_warps=config.num_warps,
        **({"launch_pdl": True} if config.pdl else {}),
    )
    return out


@gluon.jit
def _load_weights(desc, row, col, ready, to, live):
    if len(desc.block_shape) == 4:
        tma.async_copy_global_to_shared(desc, [row // 16, 0, 0, col], ready, to, pred=live)
    else:
        tma.async_copy_global_to_shared(desc, [row, col], ready, to, pred=live)


@gluon.jit
def _store(
    acc, x_scale, w_scale, out, row, t, split, T, E, SWIGLU: gl.constexpr, FP8: gl.constexpr
):
    """The outputs of weight rows from `row` on (SwiGLU: of gates and ups in turn)."""
    ROWS: gl.constexpr = acc.shape[1]
    COLS: gl.constexpr = acc.shape[0]
    OUTPUTS: gl.constexpr = ROWS // 2 if SWIGLU else ROWS
    if FP8:
        ACC: gl.constexpr = acc.type.layout
        m = gl.arange(0, ROWS, gl.SliceLayout(0, ACC))
        r = row + m
        live = r < E
        if SWIGLU:
            r = row // 2 + m // 16 * 8 + m % 8
            live = r < E
            r += m // 8 % 2 * E
        of_w = gl.load(w_scale + r, mask=live, other=0.0)
        of_t = t + gl.arange(0, COLS, gl.SliceLayout(1, ACC))
        of_x = gl.load(x_scale + of_t, mask=of_t < T, other=0.0)
        acc = acc * of_w[None, :] * of_x[:, None]
    if SWIGLU:
        pairs = acc.reshape([COLS, ROWS // 16, 2, 8]).permute([0, 1, 3, 2])
        gate, up = gl.split(pairs)
        acc = (gate / (1.0 + gl.exp(-gate)) * up).reshape([COLS, OUTPUTS])
        row = row // 2
    VEC: gl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
    ALONG: gl.constexpr = min(32, OUTPUTS // VEC)
    OUT: gl.constexpr = gl.BlockedLayout(
        [1, VEC], [32 // ALONG, ALONG], [gl.num_warps(), 1], [1, 0]
    )
    y = gl.convert_layout(acc.to(out.dtype.element_ty), OUT)
    r = row + gl.arange(0, OUTPUTS, gl.SliceLayout(0, OUT))
    t = t + gl.arange(0, COLS, gl.SliceLayout(1, OUT))
    at = (split * T + t).to(gl.int64) * E
    gl.store(out + at[:, None] + r[None, :], y, mask=(t < T)[:, None] & (r < E)[None, :])


@gluon.jit(do_not_specialize=["T", "num_splits", "num_k"])
def tall_linear_kernel(
    big_desc,
    rest_desc,
    x_desc,
    x_scale,
    w_scale,
    out,
    T,
    E,
    num_splits,
    num_k,
    BIG: gl.constexpr,
    REST: gl.constexpr,
    COLS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    SWIGLU: gl.constexpr,
    PDL: gl.constexpr,
    FP8: gl.constexpr,
):
    """One tile of BIG + REST weight rows and COLS rows of x, over one split of k."""
    DTYPE: gl.constexpr = x_desc.dtype
    BYTES: gl.constexpr = x_desc.dtype.primitive_bitwidth // 8
    BIG_ACC: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, BIG, 32 // BYTES]
    )
    REST_ACC: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, REST, 32 // BYTES]
    )
    STAGE_BYTES: gl.constexpr = (BIG + REST + COLS) * BLOCK_K * BYTES
    BIG_W: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BIG, BLOCK_K], DTYPE)
    REST_W: gl.constexpr = gl.NVMMASharedLayout.get_default_for([REST, BLOCK_K], DTYPE)
    big_smem = gl.allocate_shared_memory(DTYPE, [STAGES] + big_desc.block_shape, big_desc.layout)
    rest_smem = gl.allocate_shared_memory(DTYPE, [STAGES] + rest_desc.block_shape, rest_desc.layout)
    x_smem = gl.allocate_shared_memory(DTYPE, [STAGES, COLS, BLOCK_K], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    prefetch_descriptor("tall_linear_kernel", 2 + 4 * len(big_desc.block_shape))

    x_tiles = (T + COLS - 1) // COLS
    t = gl.program_id(0) % x_tiles * COLS
    split = gl.program_id(0) // x_tiles % num_splits
    row = gl.program_id(0) // x_tiles // num_splits * (BIG + REST)
    col = split * num_k * BLOCK_K
    for s in gl.static_range(STAGES):
        bar = ready.index(s)
        mbarrier.expect(bar, STAGE_BYTES, pred=s < num_k)
        at = col + s * BLOCK_K
        _load_weights(big_desc, row, at, bar, big_smem.index(s), s < num_k)
        _load_weights(rest_desc, row + BIG, at, bar, rest_smem.index(s), s < num_k)
    if PDL > 0:
        gdc_wait()
    for s in gl.static_range(STAGES):
        at = col + s * BLOCK_K
        tma.async_copy_global_to_shared(x_desc, [t, at], ready.index(s), x_smem.index(s), s < num_k)
    if PDL == 2:
        gdc_launch_dependents()

    big = gl.zeros([COLS, BIG], gl.float32, BIG_ACC)
    rest = gl.zeros([COLS, REST], gl.float32, REST_ACC)
    slot = row * 0
    phase = row * 0
    before = row * 0 + STAGES - 1
    for k in range(num_k):
        mbarrier.wait(ready.index(slot), phase)
        x = x_smem.index(slot)
        big_w = big_smem.index(slot)._reinterpret(DTYPE, [BIG, BLOCK_K], BIG_W)
        big_sums = warpgroup_mma(x, big_w.permute((1, 0)), big, is_async=True)
        rest_w = rest_smem.index(slot)._reinterpret(DTYPE, [REST, BLOCK_K], REST_W)
        rest_sums = warpgroup_mma(x, rest_w.permute((1, 0)), rest, is_async=True)
        big, rest = warpgroup_mma_wait(2, deps=[big_sums, rest_sums])
        # The block before is multiplied, so its slot is free: the compiler puts a barrier between
        # wgmma's reads and these writes.
        refill = k + STAGES - 1
        live = (k > 0) & (refill < num_k)
        bar = ready.index(before)
        at = col + refill * BLOCK_K
        mbarrier.expect(bar, STAGE_BYTES, pred=live)
        _load_weights(big_desc, row, at, bar, big_smem.index(before), live)
        _load_weights(rest_desc, row + BIG, at, bar, rest_smem.index(before), live)
        tma.async_copy_global_to_shared(x_desc, [t, at], bar, x_smem.index(before), live)
        if PDL == 1:  # noqa: SIM102 (a compile-time test around one at run time)
            if refill + 1 >= num_k:
                gdc_launch_dependents()
        before = slot
        slot += 1
        wrap = slot == STAGES
        phase = gl.where(wrap, phase ^ 1, phase)
        slot = gl.where(wrap, 0, slot)

    big, rest = warpgroup_mma_wait(0, deps=[big, rest])
    _store(big, x_scale, w_scale, out, row, t, split, T, E, SWIGLU, FP8)
    _store(rest, x_scale, w_scale, out, row + BIG, t, split, T, E, SWIGLU, FP8)
