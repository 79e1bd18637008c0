"""The kernels of gated_delta_prefill.py, which says what they compute.

    prepare    every chunk of every piece at once: the convolution, the gates' running sums and
               (I + A)^-1 by forward substitution
    scan       a tile [BV, K] of a head's state through the chunks of a piece, in matrix products

Invariant: what is written into a state is a sum of products of three TF32 parts each ("tf32x3",
float32 to its last bits); outputs, which are rounded to the model's dtype, take one where that is
not float32.

Legend: T rows, R pieces, N value heads, NK key heads, K head dim, C channels, Z partial sums.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.gated_delta_kernels import EPS, silu, softplus


@triton.jit
def exact_dot(a, b):
    """a @ b of float32."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def column_tile(
    projected,
    window,
    rows,
    column,
    begin,
    end,
    is_fresh,
    row_stride,
    split_stride,
    Z: tl.constexpr,
    C: tl.constexpr,
    dtype: tl.constexpr,
):
    """Columns [n, K] of the rows, those before the piece from its window or zero."""
    inside = (rows >= begin) & (rows < end)
    at = projected + rows.to(tl.int64)[:, None] * row_stride + column[None, :]
    x = tl.load(at, mask=inside[:, None], other=0.0)
    for z in tl.static_range(1, Z):  # pyright: ignore[reportGeneralTypeIssues]
        x += tl.load(at + z * split_stride, mask=inside[:, None], other=0.0)
    before = (rows < begin) & (rows >= begin - 3) & (is_fresh == 0)
    held = tl.load(
        window + (rows - begin + 3)[:, None] * C + column[None, :],
        mask=before[:, None],
        other=0.0,
    )
    return tl.where(inside[:, None], x.to(dtype).to(tl.float32), held.to(tl.float32))


@triton.jit
def convolved(
    projected,
    conv,
    window,
    rows,
    column,
    begin,
    end,
    is_fresh,
    row_stride,
    split_stride,
    Z: tl.constexpr,
    C: tl.constexpr,
    dtype: tl.constexpr,
):
    """silu of the convolution [n, K], rounded to the model's dtype."""
    total = tl.zeros([rows.shape[0], column.shape[0]], tl.float32)
    for tap in tl.static_range(4):  # pyright: ignore[reportGeneralTypeIssues]
        x = column_tile(  # pyright: ignore
            *(projected, window, rows - 3 + tap, column, begin, end, is_fresh),
            *(row_stride, split_stride, Z, C, dtype),
        )
        total += x * tl.load(conv + column * 4 + tap).to(tl.float32)[None, :]
    return silu(total).to(dtype)


@triton.jit
def normed_rows(x):
    """Each row x / |x|, float32."""
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + EPS)[:, None]


@triton.jit
def prepare_kernel(
    projected,
    conv,
    a_log,
    dt_bias,
    windows,
    begins,
    ends,
    positions,
    slots,
    convolved_out,
    totals,
    betas,
    solves,
    row_stride,
    split_stride,
    N: tl.constexpr,
    NK: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    Z: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    GROUP: tl.constexpr = N // NK
    C: tl.constexpr = 2 * NK * K + N * K
    dtype: tl.constexpr = convolved_out.dtype.element_ty
    head, piece = tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(begins + piece), tl.load(ends + piece)
    first = begin + tl.program_id(0) * CHUNK
    if first >= end:
        return
    is_fresh = (tl.load(positions + piece) == 0).to(tl.int32)
    window = windows + tl.load(slots + piece).to(tl.int64) * 3 * C
    rows = first + tl.arange(0, CHUNK)
    live = rows < end
    dim = tl.arange(0, K)
    q_at = head // GROUP * K + dim
    k_at, v_at = NK * K + q_at, 2 * NK * K + head * K + dim
    where = convolved_out + rows.to(tl.int64)[:, None] * C
    k = convolved(  # pyright: ignore
        *(projected, conv, window, rows, k_at, begin, end, is_fresh),
        *(row_stride, split_stride, Z, C, dtype),
    )
    v = convolved(  # pyright: ignore
        *(projected, conv, window, rows, v_at, begin, end, is_fresh),
        *(row_stride, split_stride, Z, C, dtype),
    )
    tl.store(where + v_at[None, :], v, mask=live[:, None])
    if head % GROUP == 0:
        q = convolved(  # pyright: ignore
            *(projected, conv, window, rows, q_at, begin, end, is_fresh),
            *(row_stride, split_stride, Z, C, dtype),
        )
        tl.store(where + q_at[None, :], q, mask=live[:, None])
        tl.store(where + k_at[None, :], k, mask=live[:, None])
    gate = projected + rows.to(tl.int64) * row_stride + C + N * K + head
    b, a = tl.load(gate, mask=live, other=0.0), tl.load(gate + N, mask=live, other=0.0)
    for z in tl.static_range(1, Z):  # pyright: ignore[reportGeneralTypeIssues]
        b += tl.load(gate + z * split_stride, mask=live, other=0.0)
        a += tl.load(gate + z * split_stride + N, mask=live, other=0.0)
    b, a = b.to(dtype).to(tl.float32), a.to(dtype).to(tl.float32)
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    g = -rate * softplus(a + tl.load(dt_bias + head).to(tl.float32))
    total = tl.cumsum(tl.where(live, g, 0.0), axis=0)
    beta = tl.where(live, 1.0 / (1.0 + tl.exp(-b)), 0.0)
    at = rows.to(tl.int64) * N + head
    tl.store(totals + at, total, mask=live)
    tl.store(betas + at, beta, mask=live)
    k = normed_rows(k)  # pyright: ignore
    i = tl.arange(0, CHUNK)
    below = i[:, None] > i[None, :]
    apart = tl.where(below, total[:, None] - total[None, :], 0.0)
    behind = exact_dot(k, tl.trans(k)) * tl.exp(apart) * beta[:, None]  # pyright: ignore
    behind = tl.where(below, behind, 0.0)
    # Row i of (I + A)^-1 is e_i less A's row i times the rows above it.
    solve = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for row in range(1, CHUNK):
        mine = tl.sum(tl.where(i[:, None] == row, behind, 0.0), axis=0)
        change = tl.sum(mine[:, None] * solve, axis=0)
        solve = tl.where(i[:, None] == row, solve - change[None, :], solve)
    tl.store(solves + at[:, None] * CHUNK + i[None, :], solve, mask=live[:, None])


@triton.jit
def window_kernel(
    projected,
    windows,
    begins,
    ends,
    positions,
    slots,
    row_stride,
    split_stride,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    Z: tl.constexpr,
    PDL: tl.constexpr,
):
    """The last three columns of every piece; a short one keeps some of its window."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    piece = tl.program_id(1)
    begin, end = tl.load(begins + piece), tl.load(ends + piece)
    if begin >= end:
        return
    is_fresh = (tl.load(positions + piece) == 0).to(tl.int32)
    window = windows + tl.load(slots + piece).to(tl.int64) * 3 * C
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tap = tl.arange(0, 4)
    columns = column_tile(  # pyright: ignore
        *(projected, window, end - 3 + tap, column, begin, end, is_fresh),
        *(row_stride, split_stride, Z, C, windows.dtype.element_ty),
    )
    to = window + tap[:, None] * C + column[None, :]
    tl.store(to, columns.to(windows.dtype.element_ty), mask=(tap < 3)[:, None])


@triton.jit
def scan_kernel(
    states,
    begins,
    ends,
    positions,
    slots,
    convolved_in,
    totals,
    betas,
    solves,
    out,
    scale,
    N: tl.constexpr,
    NK: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
    BV: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    GROUP: tl.constexpr = N // NK
    TILES: tl.constexpr = K // BV
    C: tl.constexpr = 2 * NK * K + N * K
    dtype: tl.constexpr = out.dtype.element_ty
    ROUNDED: tl.constexpr = "tf32x3" if dtype == tl.float32 else "tf32"
    head, tile, piece = tl.program_id(0) // TILES, tl.program_id(0) % TILES, tl.program_id(1)
    begin, end = tl.load(begins + piece), tl.load(ends + piece)
    if begin >= end:
        return
    slot = tl.load(slots + piece).to(tl.int64)
    is_fresh = (tl.load(positions + piece) == 0).to(tl.int32)
    dim, values, i = tl.arange(0, K), tile * BV + tl.arange(0, BV), tl.arange(0, CHUNK)
    q_at = head // GROUP * K + dim
    k_at, v_at = NK * K + q_at, 2 * NK * K + head * K + values
    held = states + ((slot * N + head) * K + values[:, None]) * K + dim[None, :]
    state = tl.load(held, mask=(is_fresh == 0) & (dim[None, :] >= 0), other=0.0)
    not_after = i[:, None] >= i[None, :]
    for first in range(begin, end, CHUNK):
        rows = first + i
        live = rows < end
        row = rows.to(tl.int64)
        where = convolved_in + row[:, None] * C
        q = tl.load(where + q_at[None, :], mask=live[:, None], other=0.0)
        k = tl.load(where + k_at[None, :], mask=live[:, None], other=0.0)
        v = tl.load(where + v_at[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        at = row * N + head
        # Behind the last row nothing fades any more, and nothing is learnt.
        total = tl.load(totals + at, mask=live, other=0.0)
        last = tl.sum(tl.where(rows == tl.minimum(first + CHUNK, end) - 1, total, 0.0), axis=0)
        total = tl.where(live, total, last)
        beta = tl.load(betas + at, mask=live, other=0.0)
        solve = tl.load(solves + at[:, None] * CHUNK + i[None, :], mask=live[:, None], other=0.0)
        q, k = normed_rows(q) * scale, normed_rows(k)  # pyright: ignore
        fading = tl.exp(total)
        wanted = beta[:, None] * (v - fading[:, None] * exact_dot(k, tl.trans(state)))  # pyright: ignore
        update = exact_dot(solve, wanted)  # pyright: ignore
        decay = tl.exp(tl.where(not_after, total[:, None] - total[None, :], 0.0))
        pairs = tl.dot(q, tl.trans(k), input_precision=ROUNDED)
        seen = tl.where(not_after, pairs * decay, 0.0)
        held_q = tl.dot(q, tl.trans(state), input_precision=ROUNDED)
        o = fading[:, None] * held_q + tl.dot(seen, update, input_precision=ROUNDED)
        to = out + (row[:, None] * N + head) * K + values[None, :]
        tl.store(to, o.to(dtype), mask=live[:, None])
        left = update * tl.exp(last - total)[:, None]
        state = tl.exp(last) * state + exact_dot(tl.trans(left), k)  # pyright: ignore
    tl.store(held, state)
