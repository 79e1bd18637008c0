"""The gate and up projection of a prompt's chunk, 1,024 rows and more, that ends in SwiGLU.

Why: from there on products are the limit, which cuBLAS multiplies as well; but SwiGLU behind it
reads and writes 150 MB for 2,048 rows of Qwen3-8B. Here it happens in the registers that hold the
sums. What that gave, and what fewer rows lose: profiles/LOG.md, 2026-11-26.

How: one CTA a multiprocessor takes tile after tile of 128 rows of x and 256 weight rows. One warp
loads blocks of both, those of the next tile while one is finished; two consumers multiply 64 rows
of x each by all weight rows, the largest product that one warpgroup has, and store by TMA. Gate and
up rows alternate by 8 in a tile, so that a thread holds both.

Invariant: an element is summed by one CTA in rising k, so a row depends neither on the other rows
nor on the grid. A slot is refilled when both consumers have arrived at its `empty`; it is theirs
when the bytes of both operands have arrived at its `ready`. Nothing is read or written before
`gdc_wait`.

Cost: 4 T I D operations; L2 gives 3 / 128 bytes for each multiplication.

Legend: T rows, D inputs, I MLP width, J = 2 * I.
"""

# Gluon is not typed for a type checker.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

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

from graphengine.kernels.launch import on_grid, pdl_options
from graphengine.kernels.skinny_config import cdiv
from graphengine.kernels.skinny_linear import skinny_swiglu_reference
from graphengine.kernels.triton_internals import async_load, async_store, reinterpret
from graphengine.kernels.wide_linear import (
    PAIR,
    descriptor,
    gluon_dtype,
    load_weights,
    weight_descriptor,
)

MIN_T = 1024  # rows
ROWS = gl.constexpr(64)  # of x, a consumer's: what one warpgroup multiplies at least
CONSUMERS = gl.constexpr(2)
WEIGHTS = gl.constexpr(256)  # weight rows of a tile
GATES = gl.constexpr(PAIR)  # that stand together in a tile, their ups behind them
BLOCK_K = 64
STAGES = gl.constexpr(4)
LOADER_REGISTERS = gl.constexpr(24)
CONSUMER_REGISTERS = gl.constexpr(240)
LAUNCH_REGISTERS = 168  # of each of 12 warps: 8 that multiply, 4 that the compiler makes of 1
MIN_SHARE = 0.9  # of its multiprocessors' time that a grid uses


def pays(num_rows: int, num_weights: int, num_sms: int) -> bool:
    """Whether rows are enough, and tiles fill the rounds that the multiprocessors take of them.

    Args: num_weights: weight rows, J.
    """
    num_tiles = cdiv(num_rows, ROWS.value * CONSUMERS.value) * cdiv(num_weights, WEIGHTS.value)
    rounds = cdiv(num_tiles, num_sms)
    return num_rows >= MIN_T and num_tiles >= MIN_SHARE * rounds * num_sms


def chunk_swiglu(x_TD: torch.Tensor, gate_up_JD: torch.Tensor) -> torch.Tensor:
    """act[t, i] = silu(g) * u with g = x[t] . gate_up[i], u = x[t] . gate_up[i + I].

    Args:
        x_TD: [T, D] bf16, rows at multiples of 16 bytes.
        gate_up_JD: [2 * I, D] bf16, rows packed gate | up, I a multiple of 8.
    Returns: act_TI [T, I], contiguous; both sums stay in fp32, the one rounding is the product's.
    Raises: ValueError for shapes, and on CUDA for dtypes or strides that the kernel cannot address.
    """
    return torch.ops.graphengine.chunk_swiglu(x_TD, gate_up_JD)


# A custom op: dynamo does not trace a launch with launch_pdl.
@torch.library.custom_op(
    "graphengine::chunk_swiglu", mutates_args=(), schema="(Tensor x, Tensor gate_up) -> Tensor"
)
def _op(x, gate_up):
    if x.dim() != 2 or gate_up.dim() != 2 or x.shape[1] != gate_up.shape[1] or len(gate_up) % 2:
        raise ValueError(f"x {tuple(x.shape)}, gate_up {tuple(gate_up.shape)}: need [T, D], [J, D]")
    return _launch(x, gate_up) if x.is_cuda else skinny_swiglu_reference(x, gate_up)


@_op.register_fake
def _(x, gate_up):
    return x.new_empty((x.shape[0], gate_up.shape[0] // 2))


def _launch(x_TD: torch.Tensor, gate_up_JD: torch.Tensor) -> torch.Tensor:
    (T, D), J = x_TD.shape, gate_up_JD.shape[0]
    if x_TD.dtype != torch.bfloat16 or gate_up_JD.dtype != torch.bfloat16:
        raise ValueError(f"x is {x_TD.dtype}, gate_up {gate_up_JD.dtype}: the kernel needs bf16")
    if J % 16 or any(w.stride(1) != 1 or w.stride(0) % 8 for w in (x_TD, gate_up_JD)):
        raise ValueError(
            f"strides {x_TD.stride()} and {gate_up_JD.stride()}, {J} weight rows: TMA needs rows "
            "at multiples of 16 bytes, and gates in eights"
        )
    out_TI = x_TD.new_empty((T, J // 2))
    dtype = gluon_dtype(x_TD)
    x_tiles = cdiv(T, ROWS.value * CONSUMERS.value)
    num_tiles = x_tiles * cdiv(J, WEIGHTS.value)
    num_sms = torch.cuda.get_device_properties(x_TD.device).multi_processor_count
    on_grid(chunk_swiglu_kernel, (min(num_tiles, num_sms),))(
        weight_descriptor(gate_up_JD, WEIGHTS.value, BLOCK_K, True, dtype),
        descriptor(x_TD, (T, D), x_TD.stride(), [ROWS.value, BLOCK_K], dtype),
        descriptor(out_TI, (T, J // 2), (J // 2, 1), [ROWS.value, WEIGHTS.value // 2], dtype),
        num_tiles,
        x_tiles,
        cdiv(D, BLOCK_K),
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS,
        **pdl_options(x_TD.device),
    )
    return out_TI


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
