"""The scan of gated_delta_prefill_kernels.py where a model has 16 bits and the GPU is Hopper's.

A warpgroup carries 64 rows of a head's state through all chunks of a piece in its accumulators: a
product's sums are the next one's left operand as they lie, so that between threads nothing passes
but what is read, through a ring of stages, and each chunk's outputs. Three products wait for one
another in a chunk (what is known of its values, their updates, the state); the queries' run beside
them, and the outputs of a chunk are written while the next one's products begin.

Why: tiles of 16 rows by `mma` exchange a chunk's sums through shared memory four times. With what
came beside it long prompts of Qwen3.5-4B come sooner (profiles/LOG-2026-11-27.md).

Invariant: as there, a state is float32; what it is made of and read by is two numbers of 16 bits.

Legend: N value heads, NK key heads, K head dim, C channels.
"""

# Gluon is not typed for a type checker.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from graphengine.kernels.triton_internals import async_read

STATE_ROWS = gl.constexpr(64)  # of a state: what a warpgroup multiplies at least
STAGES = gl.constexpr(4)


@gluon.jit
def _halves(x, LAYOUT: gl.constexpr, dtype: gl.constexpr):
    """float32 as a sum of two left operands of 16 bits; the first is cut by a mask, not rounded."""
    high = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    low = (x - high).to(dtype)
    return gl.convert_layout(high.to(dtype), LAYOUT), gl.convert_layout(low, LAYOUT)


@gluon.jit
def _fetch(ring, io, work, c, CHUNK: gl.constexpr, K: gl.constexpr):
    """Begins to read what a chunk needs into its stage: zeros for rows behind the piece's end, and
    for all of a chunk behind the last. Of the factors the last, one number, is not read there."""
    q_smem, k_smem, v_smem, tile_smem, factor_smem = ring
    q_at, k_at, v_at, C, tiles, factors, N = io
    begin, end, num_chunks, block = work
    slot = c % STAGES
    first = begin + c * CHUNK
    left = gl.where(c < num_chunks, end - first, 0)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, WIDE))[:, None]
    at = row * C + gl.arange(0, K, gl.SliceLayout(0, WIDE))[None, :]
    base = first.to(gl.int64) * C
    async_read(k_smem.index(slot), k_at + base + at, mask=row < left)
    async_read(q_smem.index(slot), q_at + base + at, mask=row < left)
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, NARROW))[:, None]
    at = row * C + gl.arange(0, STATE_ROWS, gl.SliceLayout(0, NARROW))[None, :]
    async_read(v_smem.index(slot), v_at + base + at, mask=row < left)
    SQUARE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, SQUARE))[:, None]
    at = row * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, SQUARE))[None, :]
    here = (block + c * N).to(gl.int64)
    tile = tiles + here * (3 * CHUNK * CHUNK)
    for part in gl.static_range(3):
        async_read(
            tile_smem.index(slot * 3 + part), tile + part * CHUNK * CHUNK + at, mask=row < left
        )
    i = gl.arange(0, 4 * CHUNK, gl.BlockedLayout([1], [32], [4], [0]))
    factor = factors + here * (4 * CHUNK)
    async_read(factor_smem.index(slot), factor + i, mask=i < left * 4 * CHUNK)
    async_copy.commit_group()


@gluon.jit
def _store_outputs(o_smem, to, left, N: gl.constexpr, K: gl.constexpr):
    """Writes a chunk's outputs, of which so many rows are there."""
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, o_smem.shape[0], gl.SliceLayout(1, OUT))[:, None]
    col = gl.arange(0, STATE_ROWS, gl.SliceLayout(0, OUT))[None, :]
    gl.store(to + (row * (N * K) + col), o_smem.load(OUT), mask=row < left)


@gluon.jit
def delta_scan_kernel(
    states,
    begins,
    ends,
    positions,
    slots,
    keeps,
    kept_slots,
    convolved,
    tiles,
    factors,
    out,
    N: gl.constexpr,
    NK: gl.constexpr,
    K: gl.constexpr,
    CHUNK: gl.constexpr,
    PDL: gl.constexpr,
):
    GROUP: gl.constexpr = N // NK
    TILES: gl.constexpr = K // STATE_ROWS
    C: gl.constexpr = 2 * NK * K + N * K
    dtype: gl.constexpr = out.dtype.element_ty
    head, tile, piece = gl.program_id(0) // TILES, gl.program_id(0) % TILES, gl.program_id(1)
    begin, end = gl.load(begins + piece), gl.load(ends + piece)
    is_old = gl.load(positions + piece) != 0
    keep = begin + gl.load(keeps + piece)
    slot, kept_slot = gl.load(slots + piece).to(gl.int64), gl.load(kept_slots + piece).to(gl.int64)
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    OF_STATE: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    OF_VALUES: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    OF_CHUNK: gl.constexpr = gl.SliceLayout(0, VALUES)
    value = gl.arange(0, STATE_ROWS, gl.SliceLayout(1, STATE))[:, None]
    at_VK = value * K + gl.arange(0, K, gl.SliceLayout(0, STATE))[None, :]
    states += (head * K + tile * STATE_ROWS) * K
    held = states + slot * (N * K * K)
    state = gl.load(held + at_VK, mask=is_old & (value >= 0), other=0.0)
    if PDL:  # and no early launch: a verify reads states before its own wait
        gdc_wait()
    if begin >= end:
        return
    num_chunks = (end - begin + CHUNK - 1) // CHUNK
    block = (begin // CHUNK + piece) * N + head

    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, K], dtype)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], dtype)
    ROWWISE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, K], KEYS)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, K], KEYS)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, STATE_ROWS], ROWWISE)
    tile_smem = gl.allocate_shared_memory(dtype, [STAGES * 3, CHUNK, CHUNK], TILE)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    factor_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * CHUNK], FLAT)
    o_smem = gl.allocate_shared_memory(dtype, [CHUNK, STATE_ROWS], ROWWISE)
    ring = q_smem, k_smem, v_smem, tile_smem, factor_smem
    q_at = convolved + head // GROUP * K
    v_at = convolved + 2 * NK * K + head * K + tile * STATE_ROWS
    io = q_at, q_at + NK * K, v_at, C, tiles, factors, N
    work = begin, end, num_chunks, block
    for c in gl.static_range(STAGES - 1):
        _fetch(ring, io, work, c, CHUNK, K)

    to = out + head * K + tile * STATE_ROWS
    zeros = gl.zeros([STATE_ROWS, CHUNK], gl.float32, VALUES)
    for c in range(num_chunks):
        stage = c % STAGES
        first = begin + c * CHUNK
        fading = gl.load(factors + (block + c * N).to(gl.int64) * (4 * CHUNK) + 3 * CHUNK)
        high, low = _halves(state, OF_STATE, dtype)
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        k = k_smem.index(stage)
        k_t, q_t = k.permute((1, 0)), q_smem.index(stage).permute((1, 0))
        known = warpgroup_mma(high, k_t, zeros, use_acc=False, is_async=True)
        known = warpgroup_mma(low, k_t, known, is_async=True)
        o = warpgroup_mma(high, q_t, zeros, use_acc=False, is_async=True)
        o = warpgroup_mma(low, q_t, o, is_async=True)
        v = v_smem.index(stage).permute((1, 0)).load(VALUES).to(gl.float32)
        factor = factor_smem.index(stage)
        k_factor = factor.slice(0, CHUNK).load(OF_CHUNK)
        if c > 0:  # while the tensor cores work
            _store_outputs(o_smem, to + (first - CHUNK).to(gl.int64) * (N * K), CHUNK, N, K)
        known = warpgroup_mma_wait(2, deps=(known,))
        high, low = _halves(v - known * k_factor[None, :], OF_VALUES, dtype)
        solve = tile_smem.index(stage * 3).permute((1, 0))
        finer = tile_smem.index(stage * 3 + 1).permute((1, 0))
        seen = tile_smem.index(stage * 3 + 2).permute((1, 0))
        update = warpgroup_mma(high, solve, zeros, use_acc=False, is_async=True)
        update = warpgroup_mma(high, finer, update, is_async=True)
        update = warpgroup_mma(low, solve, update, is_async=True)
        update, o = warpgroup_mma_wait(0, deps=(update, o))
        state = state * fading
        left = factor.slice(CHUNK, CHUNK).load(OF_CHUNK)
        high, low = _halves(update * left[None, :], OF_VALUES, dtype)
        state = warpgroup_mma(high, k, state, is_async=True)
        state = warpgroup_mma(low, k, state, is_async=True)
        late = gl.convert_layout(update.to(dtype), OF_VALUES)
        q_factor = factor.slice(2 * CHUNK, CHUNK).load(OF_CHUNK)
        o = warpgroup_mma(late, seen, o * q_factor[None, :], is_async=True)
        _fetch(ring, io, work, c + STAGES - 1, CHUNK, K)
        state, o = warpgroup_mma_wait(0, deps=(state, o))
        o_smem.permute((1, 0)).store(o.to(dtype))
        if first + CHUNK == keep:
            gl.store(states + kept_slot * (N * K * K) + at_VK, state)
    async_copy.wait_group(0)
    first = (num_chunks - 1) * CHUNK + begin
    _store_outputs(o_smem, to + first.to(gl.int64) * (N * K), end - first, N, K)
    gl.store(held + at_VK, state)
