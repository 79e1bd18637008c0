"""The preparation of gated_delta_prefill_kernels.py where a model has 16 bits and heads of 128, and
the GPU is Hopper's: one warp solves a chunk in its registers. Where chunks are few, two have one:
either solves it, but they share its products and what is read.

Each thread has a row of the inverse. A column is final once all behind it are; then its entries
times the matrix's row of that number are taken from the columns in front of it: 31 steps of up to
32 fused multiplications that do not wait for one another.

Why: in products of 32 by 32 the inverse is a chain of eight, each of three parts, whose operands
pass through shared memory. With it first tokens of Qwen3.5-4B come sooner
(profiles/LOG-2026-11-27.md).

Legend as there.
"""

# Gluon is not typed for a type checker.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.gated_delta_kernels import decay_of, norms_of, row_columns
from graphengine.kernels.gated_delta_prefill_kernels import block_of, halves_of, raw_columns

PART = gl.constexpr(8)  # columns of an inverse in a tensor: those behind a column are left alone


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _inverse_of(below, smem, ROWS: gl.constexpr):
    """(I + below)^-1 of a strictly lower matrix, in parts of PART columns."""
    BY_ROW: gl.constexpr = gl.BlockedLayout([1, PART], [32, 1], [gl.num_warps(), 1], [1, 0])
    smem.store(below)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, BY_ROW))[:, None]
    column = gl.arange(0, PART, gl.SliceLayout(0, BY_ROW))[None, :]
    solve = ()
    for part in gl.static_range(ROWS // PART):
        solve = solve + (gl.where(row == part * PART + column, 1.0, 0.0),)
    for j in gl.static_range(ROWS - 1, 0, -1):
        # One of a thread's own registers, whose number the compiler knows: nothing is added up.
        bits = gl.where(column == j % PART, solve[j // PART].to(gl.int32, bitcast=True), 0)
        done = gl.reduce_or(bits, 1).to(gl.float32, bitcast=True)
        left = ()
        for part in gl.static_range(ROWS // PART):
            x = solve[part]
            if part * PART < j:
                x -= done[:, None] * smem.slice(j, 1).slice(part * PART, PART, 1).load(BY_ROW)
            left = left + (x,)
        solve = left
    return solve


@gluon.jit
def _move_window(
    projected,
    window,
    to,
    last,
    channels,
    begin,
    end,
    is_fresh,
    row_stride,
    split_stride,
    TAPS: gl.constexpr,
    Z: gl.constexpr,
    C: gl.constexpr,
):
    """As move_window. A thread has all taps of its channels, so it reads them before it writes."""
    tap = gl.arange(0, 4, gl.SliceLayout(1, TAPS))
    columns = raw_columns(
        *(projected, window, last - 3 + tap, channels, begin, end, is_fresh),
        *(row_stride, split_stride, Z, C),
    )
    gl.store(to + tap[:, None] * C + channels[None, :], columns, mask=(tap < 3)[:, None])


@gluon.jit
def _move_windows(
    projected,
    window,
    kept,
    rows,
    head,
    N: gl.constexpr,
    NK: gl.constexpr,
    K: gl.constexpr,
    Z: gl.constexpr,
):
    """As move_windows."""
    begin, end, keep, is_fresh, row_stride, split_stride = rows
    GROUP: gl.constexpr = N // NK
    C: gl.constexpr = 2 * NK * K + N * K
    WARPS: gl.constexpr = gl.num_warps()
    TAPS: gl.constexpr = gl.BlockedLayout([4, 4 // WARPS], [1, 32], [1, WARPS], [1, 0])
    key = gl.arange(0, K, gl.SliceLayout(0, TAPS))
    for part in gl.static_range(3):
        channels = 2 * NK * K + head * K + key
        if part > 0:
            channels = (part - 1) * NK * K + head // GROUP * K + key
        if part == 0 or head % GROUP == 0:
            if keep > begin:
                _move_window(
                    *(projected, window, kept, keep, channels, begin, end, is_fresh),
                    *(row_stride, split_stride, TAPS, Z, C),
                )
            _move_window(
                *(projected, window, window, end, channels, begin, end, is_fresh),
                *(row_stride, split_stride, TAPS, Z, C),
            )


@gluon.jit
def delta_prepare_kernel(
    projected,
    a_log,
    dt_bias,
    windows,
    begins,
    ends,
    positions,
    slots,
    keeps,
    kept_slots,
    convolved,
    tiles,
    factors,
    row_stride,
    split_stride,
    scale,
    N: gl.constexpr,
    NK: gl.constexpr,
    K: gl.constexpr,
    CHUNK: gl.constexpr,
    Z: gl.constexpr,
    PDL: gl.constexpr,
):
    GROUP: gl.constexpr = N // NK
    C: gl.constexpr = 2 * NK * K + N * K
    WARPS: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = convolved.dtype.element_ty
    head, piece = gl.program_id(1), gl.program_id(2)
    begin, end = gl.load(begins + piece), gl.load(ends + piece)
    first = begin + gl.program_id(0) * CHUNK
    a_log, dt_bias = gl.load(a_log + head), gl.load(dt_bias + head)
    slot, kept_slot = gl.load(slots + piece), gl.load(kept_slots + piece)
    is_fresh, keep = gl.load(positions + piece) == 0, begin + gl.load(keeps + piece)
    if PDL:
        gdc_wait()
    if gl.program_id(0) == gl.num_programs(0) - 1:
        if begin < end:
            window = windows + slot.to(gl.int64) * (3 * C)
            kept = windows + kept_slot.to(gl.int64) * (3 * C)
            rows = (begin, end, keep, is_fresh.to(gl.int32), row_stride, split_stride)
            _move_windows(projected, window, kept, rows, head, N, NK, K, Z)
        return
    if first >= end:
        return
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, WIDE))[:, None]
    dim = gl.arange(0, K, gl.SliceLayout(0, WIDE))[None, :]
    at = convolved + first.to(gl.int64) * C + head // GROUP * K + row * C + dim
    live = (first + row < end) & (dim >= 0)
    q = gl.load(at, mask=live, other=0.0)
    k = gl.load(at + NK * K, mask=live, other=0.0)

    BY_ROW: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    i = gl.arange(0, CHUNK, BY_ROW)
    live = first + i < end
    gate = (first + i).to(gl.int64) * row_stride + C + N * K + head
    beta = row_columns(projected, gate, live, split_stride, dtype, Z).to(gl.float32)
    g = row_columns(projected, gate + N, live, split_stride, dtype, Z)
    beta = gl.where(live, 1.0 / (1.0 + gl.exp(-beta)), 0.0)
    # Behind the last row nothing fades any more, and nothing is learnt.
    g = gl.where(live, decay_of(g, a_log, dt_bias), 0.0)
    total, whole = gl.associative_scan(g, 0, _add), gl.sum(g, axis=0)
    q_norm = gl.convert_layout(norms_of(q) * scale, BY_ROW)
    k_norm = gl.convert_layout(norms_of(k), BY_ROW)

    SIDE: gl.constexpr = 1 if WARPS == 1 else 2
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SIDE, WARPS // SIDE], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    OF_ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    OF_COLUMN: gl.constexpr = gl.SliceLayout(0, SUMS)
    KEYS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    q_smem = gl.allocate_shared_memory(dtype, [CHUNK, K], KEYS, q)
    k_smem = gl.allocate_shared_memory(dtype, [CHUNK, K], KEYS, k)
    k_t = k_smem.permute((1, 0)).load(gl.DotOperandLayout(1, SUMS, 2))
    row, column = gl.arange(0, CHUNK, OF_ROW)[:, None], gl.arange(0, CHUNK, OF_COLUMN)[None, :]
    fades = gl.convert_layout(total, OF_ROW)[:, None] - gl.convert_layout(total, OF_COLUMN)[None, :]
    decay = gl.exp(gl.where(row >= column, fades, 0.0))
    block = block_of(begin, piece, gl.program_id(0), head, N, CHUNK)
    to = tiles + block * (3 * CHUNK * CHUNK)
    zeros = gl.zeros([CHUNK, CHUNK], gl.float32, SUMS)
    seen = mma_v2(q_smem.load(LEFT), k_t, zeros) * decay
    seen *= gl.convert_layout(q_norm, OF_ROW)[:, None]
    seen = gl.where(row >= column, seen, 0.0)
    gl.store(to + 2 * CHUNK * CHUNK + row * CHUNK + column, seen.to(dtype))
    below = mma_v2(k_smem.load(LEFT), k_t, zeros) * decay
    below *= gl.convert_layout(beta * k_norm, OF_ROW)[:, None]
    below *= gl.convert_layout(k_norm, OF_COLUMN)[None, :]
    below = gl.where(row > column, below, 0.0)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    below_smem = gl.allocate_shared_memory(gl.float32, [CHUNK, CHUNK], FLAT)
    ALL: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    beta_smem = gl.allocate_shared_memory(gl.float32, [CHUNK], ALL, beta)
    solve = _inverse_of(below, below_smem, CHUNK)
    OF_ROW_S: gl.constexpr = gl.SliceLayout(1, solve[0].type.layout)
    OF_COLUMN_S: gl.constexpr = gl.SliceLayout(0, solve[0].type.layout)
    norms = gl.convert_layout(k_norm, OF_ROW_S)[:, None]
    row = gl.arange(0, CHUNK, OF_ROW_S)[:, None]
    for part in gl.static_range(CHUNK // PART):
        column = part * PART + gl.arange(0, PART, OF_COLUMN_S)[None, :]
        factor = beta_smem.slice(part * PART, PART).load(OF_COLUMN_S)[None, :]
        high, low = halves_of(solve[part] * norms * factor, dtype)
        gl.store(to + row * CHUNK + column, high)
        gl.store(to + CHUNK * CHUNK + row * CHUNK + column, low)
    to = factors + block * (4 * CHUNK) + i
    gl.store(to, gl.exp(total) * k_norm)
    gl.store(to + CHUNK, gl.exp(whole - total))
    gl.store(to + 2 * CHUNK, gl.exp(total) * q_norm)
    gl.store(to + 3 * CHUNK, gl.exp(whole) + gl.zeros_like(total))
    if PDL:
        gdc_launch_dependents()
