"""The products of moe_mxfp4_kernels.py for a few rows on Hopper, in Gluon: a stream of codes.

Why: eight rows of gpt-oss-20b read 280 MB of codes a layer for some 1.5 rows an expert, and Triton
passes what is widened through shared memory, with barriers. Here a thread loads its 16 bytes of a
block (mxfp4.py), widens them in registers and gives them to a wgmma as they are; nobody waits for
anybody but at the begin, where an expert's rows of x are brought to shared memory, all columns of
them. One, eight and 32 rows of a layer on an H200: 34, 114 and 167 us instead of 56, 132 and 186;
the bytes take 12, 63 and 92 (printed lines, profiles/LOG.md, 2026-11-30).

How: each warpgroup has a block of 64 rows, and two steps of columns under way. Codes stay words as
long as they are, since bytes would be taken apart, and so waited for, as soon as they are loaded.
Rows of x that are none are zeros.

Invariants: those of moe_kernels.py. `down` asks for its expert and its first codes in front of its
wait: it may, because `gate_up` lets it start behind its own wait only, when the choice is complete.

Legend: as in moe_mxfp4_kernels.py; ROWS of x at once, 8 or 16.
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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.clamped_swiglu import Clamp, activate, clamp_options
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import early_options, on_grid, on_hopper
from graphengine.kernels.mxfp4 import HALF_WORDS, SCALES, WIDEN, WIDEN_REGISTERS, Mxfp4
from graphengine.kernels.triton_internals import barrier

MOST_ROWS = 64  # of a forward, past which an expert has more rows than a few
FEW_ROWS = 32  # of a forward, of which an expert has up to 8
MOST_COLUMNS = 6144  # of 16 rows in shared memory
REGISTERS = 128  # of a thread, so that a multiprocessor has four programs of four warps
STEP = 2  # blocks of columns that are loaded, and multiplied, at once
PART = 2  # steps of columns of x that lie together

_WORDS, _SCALES = gl.constexpr(HALF_WORDS // 2), gl.constexpr(SCALES // 4)  # of a block, int32
_WIDEN, _WIDEN_REGISTERS = gl.constexpr(WIDEN), gl.constexpr(WIDEN_REGISTERS)
_STEP, _PART = gl.constexpr(STEP), gl.constexpr(PART)


def takes(x_TD: torch.Tensor, inter: int) -> bool:
    """Whether the kernels can run on these rows and experts of that width: few and no wider than
    shared memory, on Hopper."""
    fits = len(x_TD) <= MOST_ROWS and max(x_TD.shape[1], inter) <= MOST_COLUMNS
    return fits and not INTERPRET and on_hopper(x_TD)


def launch_gate_up(
    x_TD: torch.Tensor,
    gate_up: Mxfp4,
    slots_S3: torch.Tensor,
    pairs_P: torch.Tensor,
    top_k: int,
    bias_EJ: torch.Tensor | None,
    clamp: Clamp | None,
) -> torch.Tensor:
    """`moe_mxfp4_kernels.launch_gate_up`, where `takes` is true."""
    (T, D), blocks = x_TD.shape, gate_up.codes.shape[1]
    out_PI = x_TD.new_empty((T * top_k, blocks * 32))
    how = _options(T, blocks)
    on_grid(_gate_up_kernel, (-(-blocks * 4 // how["num_warps"]), len(slots_S3)))(
        x_TD,
        *gate_up.words,
        bias_EJ,
        slots_S3,
        pairs_P,
        out_PI,
        blocks,
        D=D,
        K=top_k,
        **clamp_options(clamp),
        **how,
    )
    return out_PI


def launch_down(
    act_PI: torch.Tensor,
    down: Mxfp4,
    weight_TK: torch.Tensor,
    slots_S3: torch.Tensor,
    pairs_P: torch.Tensor,
    bias_ED: torch.Tensor | None,
) -> torch.Tensor:
    """`moe_mxfp4_kernels.launch_down`, where `takes` is true of the rows."""
    (T, K), blocks, I = weight_TK.shape, down.codes.shape[1], act_PI.shape[1]  # noqa: E741 (moe.py's width)
    out_KTD = torch.empty((K, T, blocks * 64), dtype=torch.float32, device=act_PI.device)
    how = _options(T, blocks)
    on_grid(_down_kernel, (-(-blocks * 4 // how["num_warps"]), len(slots_S3)))(
        act_PI,
        *down.words,
        bias_ED,
        weight_TK,
        slots_S3,
        pairs_P,
        out_KTD,
        T,
        blocks,
        I=I,
        K=K,
        **how,
    )
    return out_KTD


def _options(num_rows: int, blocks: int) -> dict[str, Any]:
    rows = 8 if num_rows <= FEW_ROWS else 16
    num_warps = 8 if rows == 16 and blocks > 1 else 4  # a block each four
    return {"ROWS": rows, "num_warps": num_warps, "maxnreg": REGISTERS, **early_options(True)}


@gluon.constexpr_function
def _words(warps):
    """How a block's words lie: four a thread."""
    return gl.BlockedLayout([STEP, 1, 4], [1, 32, 1], [1, warps, 1], [2, 1, 0])


@gluon.jit
def _ask(codes, scales, first, BLOCKS: gl.constexpr):
    """(codes, scales) of STEP blocks of columns from `first` on, zeros past the end."""
    WARPS: gl.constexpr = gl.num_warps()
    WORDS: gl.constexpr = _words(WARPS)
    OF_THREAD: gl.constexpr = gl.SliceLayout(2, WORDS)
    block = first + gl.arange(0, _STEP, gl.SliceLayout(1, OF_THREAD))[:, None]
    thread = gl.arange(0, 32 * WARPS, gl.SliceLayout(0, OF_THREAD))[None, :]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))[None, None, :]
    at = thread // 128 * BLOCKS + block
    code_at = (at * _WORDS + thread % 128 * 4)[:, :, None] + word
    live = block < BLOCKS
    own = gl.load(codes + code_at, mask=live[:, :, None], other=0, eviction_policy="evict_first")
    return own, gl.load(scales + at * _SCALES + thread % 128 // 4, mask=live, other=0)


@gluon.jit
def _widened(codes, scales, LEFT: gl.constexpr):
    """A thread's words and scales -> the left side of a product, 16 rows a warp."""
    WARPS: gl.constexpr = gl.num_warps()
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, _words(WARPS))))[None, None, :]
    scales, word = gl.broadcast(scales[:, :, None], word)
    factor = (((scales >> (8 * word)) & 255) + 126) << 7
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        _WIDEN,
        _WIDEN_REGISTERS,
        [codes, factor | (factor << 16)],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )
    low = gl.join(gl.join(a, b), gl.join(c, d))
    x = gl.join(low, gl.join(gl.join(e, f), gl.join(g, h)))
    # (step, warp, group, quad, half, 32s, last, 8s, 16s) -> rows, columns
    x = x.reshape([_STEP, WARPS, 8, 4, 2, 2, 2, 2, 2]).permute((1, 4, 2, 0, 5, 8, 7, 3, 6))
    return gl.convert_layout(x.reshape([16 * WARPS, 64 * _STEP]), LEFT)


@gluon.jit
def _bring(x, pairs, start, end, smem, K: gl.constexpr, D: gl.constexpr):
    """The rows of pairs start .. end - 1 to shared memory: row pair // K of x."""
    ROWS: gl.constexpr = smem.shape[1]
    WIDTH: gl.constexpr = smem.shape[2]
    PARTS: gl.constexpr = smem.shape[0]
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    at = start + gl.arange(0, ROWS, gl.SliceLayout(1, SPREAD))
    pair = gl.load(pairs + at, mask=at < end, other=0).to(gl.int64)
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, SPREAD))[None, :]
    row = x + (pair // K * D)[:, None] + column
    SOME: gl.constexpr = (PARTS + 2) // 3  # asked for at once, for registers
    for some in gl.static_range(0, PARTS, SOME):
        parts = ()
        for i in gl.static_range(some, min(some + SOME, PARTS)):
            live = (at < end)[:, None] & (column + i * WIDTH < D)
            parts = parts + (gl.load(row + i * WIDTH, mask=live, other=0.0),)
        for i in gl.static_range(some, min(some + SOME, PARTS)):
            smem.index(i).store(parts[i - some])
    fence_async_shared()
    barrier()


@gluon.jit
def _multiply(asked, codes, scales, smem, BLOCKS: gl.constexpr):
    """[16 rows a warp, ROWS] of all columns; `asked` are the first ones' codes."""
    ROWS: gl.constexpr = smem.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    sums = gl.zeros([16 * WARPS, ROWS], gl.float32, SUMS)
    own_codes, own_scales = asked[0]
    next_codes, next_scales = asked[1]
    WIDTH: gl.constexpr = 64 * _STEP
    for i in range(smem.shape[0]):
        for j in gl.static_range(_PART):
            left = _widened(own_codes, own_scales, LEFT)
            # Behind what used up its registers: moved to others it would be waited for.
            last_codes, last_scales = _ask(codes, scales, (i * _PART + j + 2) * _STEP, BLOCKS)
            right = smem.index(i).slice(j * WIDTH, WIDTH, dim=1).permute((1, 0))
            sums = warpgroup_mma(left, right, sums, is_async=True)
            sums = warpgroup_mma_wait(0, deps=(sums,))
            own_codes, own_scales = next_codes, next_scales
            next_codes, next_scales = last_codes, last_scales
    return sums


@gluon.jit
def _room(x, ROWS: gl.constexpr, BLOCKS: gl.constexpr):
    """Shared memory for all columns of ROWS rows of x."""
    WIDTH: gl.constexpr = 64 * _STEP * _PART
    OF_X: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], x.dtype.element_ty)
    PARTS: gl.constexpr = (BLOCKS * 64 + WIDTH - 1) // WIDTH
    return gl.allocate_shared_memory(x.dtype.element_ty, [PARTS, ROWS, WIDTH], OF_X)


@gluon.jit(do_not_specialize=["blocks"])
def _gate_up_kernel(
    x,
    codes,
    scales,
    bias,
    slots,
    pairs,
    out,
    blocks,
    D: gl.constexpr,
    K: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    ROWS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Blocks of rows `in_turn` of a slot's expert."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = slots + gl.program_id(1) * 3
    e, begin, end = gl.load(slot).to(gl.int64), gl.load(slot + 1), gl.load(slot + 2)
    WARPS: gl.constexpr = gl.num_warps()
    BLOCKS: gl.constexpr = D // 64
    first = gl.program_id(0) * (WARPS // 4)
    # of an odd number of blocks the last program's second warpgroup does the last one again
    first = gl.minimum(first, blocks - WARPS // 4)
    codes += (e * blocks + first) * (BLOCKS * _WORDS)
    scales += (e * blocks + first) * (BLOCKS * _SCALES)
    smem = _room(x, ROWS, BLOCKS)
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [WARPS, 1], [0, 1])
    I = blocks * 32  # noqa: E741 (moe.py's width)
    i = first * 32 + gl.arange(0, 8 * WARPS, gl.SliceLayout(1, OUT))
    for start in range(begin, end, ROWS):
        asked = _ask(codes, scales, 0, BLOCKS), _ask(codes, scales, _STEP, BLOCKS)
        _bring(x, pairs, start, end, smem, K, D)
        sums = _multiply(asked, codes, scales, smem, BLOCKS)
        both = sums.reshape([WARPS, 2, 8, ROWS]).permute((0, 2, 3, 1))
        gate, up = gl.split(both)
        gate = gl.convert_layout(gate.reshape([8 * WARPS, ROWS]), OUT)
        up = gl.convert_layout(up.reshape([8 * WARPS, ROWS]), OUT)
        if bias is not None:
            of_gate = bias + e * 2 * I + i
            gate += gl.load(of_gate).to(gl.float32)[:, None]
            up += gl.load(of_gate + I).to(gl.float32)[:, None]
        y = activate(gate, up, ALPHA, LIMIT)
        at = start + gl.arange(0, ROWS, gl.SliceLayout(0, OUT))
        pair = gl.load(pairs + at, mask=at < end, other=0).to(gl.int64)
        to = out + pair[None, :] * I + i[:, None]
        gl.store(to, y.to(out.dtype.element_ty), mask=(at < end)[None, :])
        barrier()  # nobody writes rows of x that another still multiplies


@gluon.jit(do_not_specialize=["num_rows", "blocks"])
def _down_kernel(
    act,
    codes,
    scales,
    bias,
    weights,
    slots,
    pairs,
    out,
    num_rows,
    blocks,
    I: gl.constexpr,  # noqa: E741 (moe.py's width)
    K: gl.constexpr,
    ROWS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Blocks of rows of a slot's expert."""
    slot = slots + gl.program_id(1) * 3
    e, begin, end = gl.load(slot).to(gl.int64), gl.load(slot + 1), gl.load(slot + 2)
    WARPS: gl.constexpr = gl.num_warps()
    BLOCKS: gl.constexpr = I // 64
    first = gl.minimum(gl.program_id(0) * (WARPS // 4), blocks - WARPS // 4)
    codes += (e * blocks + first) * (BLOCKS * _WORDS)
    scales += (e * blocks + first) * (BLOCKS * _SCALES)
    smem = _room(act, ROWS, BLOCKS)
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [WARPS, 1], [0, 1])
    D = blocks * 64
    n = first * 64 + gl.arange(0, 16 * WARPS, gl.SliceLayout(1, OUT))
    for start in range(begin, end, ROWS):
        asked = _ask(codes, scales, 0, BLOCKS), _ask(codes, scales, _STEP, BLOCKS)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        _bring(act, pairs, start, end, smem, 1, I)
        y = gl.convert_layout(_multiply(asked, codes, scales, smem, BLOCKS), OUT)
        if bias is not None:
            y += gl.load(bias + e * D + n).to(gl.float32)[:, None]
        at = start + gl.arange(0, ROWS, gl.SliceLayout(0, OUT))
        pair = gl.load(pairs + at, mask=at < end, other=0).to(gl.int64)
        y *= gl.load(weights + pair, mask=at < end, other=0.0)[None, :]
        to = out + ((pair % K) * num_rows + pair // K)[None, :] * D + n[:, None]
        gl.store(to, y, mask=(at < end)[None, :])
        barrier()
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
