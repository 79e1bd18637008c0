"""The kernels of gated_delta_prefill.py, which says what they compute.

    convolve   every row of every piece: its columns behind the convolution, in the model's dtype
    prepare    every chunk at once, of its keys, queries and gates alone: what solves its updates,
               what its outputs see of them, and how much is left of a state
    scan       a tile [BV, K] of a head's state through the chunks of a piece, in matrix products:
               values are rows, so that a product's sums are the next one's left operand

Keys and queries stay as they were convolved: their norms, beta and what fades are factors of the
matrices and vectors that `prepare` leaves.

Invariant: a state is float32 and is never rounded. What is added to it and what is read of it are
products of two 16-bit parts each (1.1e-5 of its norm after 2,048 rows, where a key has 8 bits:
profiles/results/2026-11-25-h200-delta-scan-6447a8a.json), or, in a float32 model, of three of TF32.

Legend: T rows, R pieces, N value heads, NK key heads, K head dim, C channels, Z partial sums.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.gated_delta_kernels import (
    decay_of,
    exact_dot,
    inverse_of,
    norms_of,
    row_columns,
    silu,
)


@triton.jit
def halves_of(x, dtype: tl.constexpr):
    """float32 as a sum of two numbers of 16 bits; the first is cut by a mask, not rounded."""
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(dtype), (x - high).to(dtype)


@triton.jit
def raw_columns(
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
):
    """Columns [n, k] of the rows, those before the piece from its window or zero."""
    dtype: tl.constexpr = window.dtype.element_ty
    inside = (rows >= begin) & (rows < end)
    at = rows.to(tl.int64)[:, None] * row_stride + column[None, :]
    x = row_columns(projected, at, inside[:, None], split_stride, dtype, Z)  # pyright: ignore
    before = (rows < begin) & (rows >= begin - 3) & (is_fresh == 0)
    at = (rows - begin + 3)[:, None] * C + column[None, :]
    return x + tl.load(window + at, mask=before[:, None], other=0.0)  # one of them is zero


@triton.jit
def convolve_kernel(
    projected,
    conv,
    windows,
    begins,
    ends,
    positions,
    slots,
    out,
    row_stride,
    split_stride,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    Z: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    piece = tl.program_id(2)
    begin, end = tl.load(begins + piece), tl.load(ends + piece)
    first = begin + tl.program_id(0) * ROWS
    if first >= end:
        return
    is_fresh = (tl.load(positions + piece) == 0).to(tl.int32)
    window = windows + tl.load(slots + piece).to(tl.int64) * 3 * C
    rows = first + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tap in tl.static_range(4):  # pyright: ignore[reportGeneralTypeIssues]
        x = raw_columns(  # pyright: ignore
            *(projected, window, rows - 3 + tap, column, begin, end, is_fresh),
            *(row_stride, split_stride, Z, C),
        ).to(tl.float32)
        total += x * tl.load(conv + column * 4 + tap).to(tl.float32)[None, :]
    to = out + rows.to(tl.int64)[:, None] * C + column[None, :]
    tl.store(to, silu(total).to(out.dtype.element_ty), mask=(rows < end)[:, None])


@triton.jit
def prepare_kernel(
    projected,
    a_log,
    dt_bias,
    begins,
    ends,
    convolved,
    solves,
    seens,
    factors,
    row_stride,
    split_stride,
    num_rows,
    scale,
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
    dtype: tl.constexpr = convolved.dtype.element_ty
    head, piece = tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(begins + piece), tl.load(ends + piece)
    first = begin + tl.program_id(0) * CHUNK
    if first >= end:
        return
    i = tl.arange(0, CHUNK)
    rows = (first + i).to(tl.int64)
    live = first + i < end
    at = convolved + rows[:, None] * C + (head // GROUP * K + tl.arange(0, K))[None, :]
    q = tl.load(at, mask=live[:, None], other=0.0)
    k = tl.load(at + NK * K, mask=live[:, None], other=0.0)
    gate = rows * row_stride + C + N * K + head
    beta = row_columns(projected, gate, live, split_stride, dtype, Z).to(tl.float32)  # pyright: ignore
    g = row_columns(projected, gate + N, live, split_stride, dtype, Z)  # pyright: ignore
    beta = tl.where(live, 1.0 / (1.0 + tl.exp(-beta)), 0.0)
    # Behind the last row nothing fades any more, and nothing is learnt.
    g = tl.where(live, decay_of(g, tl.load(a_log + head), tl.load(dt_bias + head)), 0.0)  # pyright: ignore
    total, whole = tl.cumsum(g, axis=0), tl.sum(g, axis=0)
    q_norm = norms_of(q) * scale  # pyright: ignore
    k_norm = norms_of(k)  # pyright: ignore
    not_after = i[:, None] >= i[None, :]
    decay = tl.exp(tl.where(not_after, total[:, None] - total[None, :], 0.0))
    at, mine = rows * N + head, live[:, None]
    to = at[:, None] * CHUNK + i[None, :]
    seen = exact_dot(q, tl.trans(k)) * decay * q_norm[:, None]  # pyright: ignore
    tl.store(seens + to, tl.where(not_after, seen, 0.0).to(dtype), mask=mine)
    below = exact_dot(k, tl.trans(k)) * decay * (beta * k_norm)[:, None] * k_norm[None, :]  # pyright: ignore
    below = tl.where(i[:, None] > i[None, :], below, 0.0)
    solve = k_norm[:, None] * inverse_of(below, CHUNK) * beta[None, :]  # pyright: ignore
    stride = num_rows * N
    if dtype == tl.float32:
        tl.store(solves + to, solve, mask=mine)
    else:
        high, low = halves_of(solve, dtype)  # pyright: ignore
        tl.store(solves + to, high, mask=mine)
        tl.store(solves + stride * CHUNK + to, low, mask=mine)
    tl.store(factors + at, tl.exp(total) * k_norm, mask=live)
    tl.store(factors + stride + at, tl.exp(total) * q_norm, mask=live)
    tl.store(factors + 2 * stride + at, tl.exp(whole - total), mask=live)
    tl.store(factors + 3 * stride + at, tl.exp(whole) + tl.zeros_like(total), mask=live)


@triton.jit
def move_window(
    projected,
    window,
    to,
    last,
    column,
    begin,
    end,
    is_fresh,
    row_stride,
    split_stride,
    Z: tl.constexpr,
    C: tl.constexpr,
):
    """Writes the three columns in front of row `last`; a short piece keeps some of its window."""
    tap = tl.arange(0, 4)
    columns = raw_columns(  # pyright: ignore
        *(projected, window, last - 3 + tap, column, begin, end, is_fresh),
        *(row_stride, split_stride, Z, C),
    )
    tl.store(to + tap[:, None] * C + column[None, :], columns, mask=(tap < 3)[:, None])


@triton.jit
def scan_kernel(
    projected,
    windows,
    states,
    begins,
    ends,
    positions,
    slots,
    keeps,
    kept_slots,
    convolved,
    solves,
    seens,
    factors,
    out,
    row_stride,
    split_stride,
    num_rows,
    N: tl.constexpr,
    NK: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    BV: tl.constexpr,
    Z: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:  # and no early launch: a verify reads states and windows before its own wait
        gdc_wait()
    GROUP: tl.constexpr = N // NK
    TILES: tl.constexpr = K // BV
    C: tl.constexpr = 2 * NK * K + N * K
    dtype: tl.constexpr = out.dtype.element_ty
    head, tile, piece = tl.program_id(0) // TILES, tl.program_id(0) % TILES, tl.program_id(1)
    begin, end = tl.load(begins + piece), tl.load(ends + piece)
    if begin >= end:
        return
    is_fresh = (tl.load(positions + piece) == 0).to(tl.int32)
    keep = begin + tl.load(keeps + piece)
    slot, kept_slot = tl.load(slots + piece).to(tl.int64), tl.load(kept_slots + piece).to(tl.int64)
    dim, values, i = tl.arange(0, K), tile * BV + tl.arange(0, BV), tl.arange(0, CHUNK)
    q_at, v_at = head // GROUP * K + dim, 2 * NK * K + head * K + values
    at_VK = head * K * K + values[:, None] * K + dim[None, :]
    held = states + slot * N * K * K + at_VK
    state = tl.load(held, mask=(is_fresh == 0) & (dim[None, :] >= 0), other=0.0)
    stride = num_rows * N
    for first in range(begin, end, CHUNK):
        rows = (first + i).to(tl.int64)
        live = first + i < end
        mine = live[:, None]
        where = convolved + rows[:, None] * C
        q = tl.load(where + q_at[None, :], mask=mine, other=0.0)
        k = tl.load(where + (NK * K + q_at)[None, :], mask=mine, other=0.0)
        v_to = convolved + rows[None, :] * C + v_at[:, None]
        v = tl.load(v_to, mask=live[None, :], other=0.0).to(tl.float32)
        at = rows * N + head
        to_row = at[:, None] * CHUNK + i[None, :]
        solve = tl.load(solves + to_row, mask=mine, other=0.0)
        seen = tl.load(seens + to_row, mask=mine, other=0.0)
        k_factor = tl.load(factors + at, mask=live, other=0.0)
        q_factor = tl.load(factors + stride + at, mask=live, other=0.0)
        left = tl.load(factors + 2 * stride + at, mask=live, other=0.0)
        fading = tl.load(factors + 3 * stride + first * N + head)
        if dtype == tl.float32:
            known = exact_dot(state, tl.trans(k))  # pyright: ignore
            o = exact_dot(state, tl.trans(q))  # pyright: ignore
            update = exact_dot(v - known * k_factor[None, :], tl.trans(solve))  # pyright: ignore
            late = update * left[None, :]
            o = o * q_factor[None, :] + exact_dot(update, tl.trans(seen))  # pyright: ignore
            state = fading * state + exact_dot(late, k)  # pyright: ignore
        else:
            finer = tl.load(solves + num_rows * N * CHUNK + to_row, mask=mine, other=0.0)
            high, low = halves_of(state, dtype)  # pyright: ignore
            # Sums of their own: what a state waits for is one product long, not two.
            known = tl.dot(high, tl.trans(k)) + tl.dot(low, tl.trans(k))
            o = tl.dot(high, tl.trans(q)) + tl.dot(low, tl.trans(q))
            high, low = halves_of(v - known * k_factor[None, :], dtype)  # pyright: ignore
            update = tl.dot(high, tl.trans(solve))
            update += tl.dot(low, tl.trans(solve), tl.dot(high, tl.trans(finer)))
            late = update * left[None, :]
            o = tl.dot(update.to(dtype), tl.trans(seen), o * q_factor[None, :])
            high, low = halves_of(late, dtype)  # pyright: ignore
            state = tl.dot(low, k, tl.dot(high, k, fading * state))
        to = out + (rows[:, None] * N + head) * K + values[None, :]
        tl.store(to, tl.trans(o).to(dtype), mask=mine)
        if first + CHUNK == keep:
            tl.store(states + kept_slot * N * K * K + at_VK, state)
    tl.store(held, state)
    window, kept = windows + slot * 3 * C, windows + kept_slot * 3 * C
    for part in tl.static_range(3):  # pyright: ignore[reportGeneralTypeIssues]
        column = v_at if part == 0 else tl.arange(0, K) + head // GROUP * K + (part - 1) * NK * K
        if part == 0 or ((tile == 0) & (head % GROUP == 0)):
            if keep > begin:
                move_window(  # pyright: ignore
                    *(projected, window, kept, keep, column, begin, end, is_fresh),
                    *(row_stride, split_stride, Z, C),
                )
            move_window(  # pyright: ignore
                *(projected, window, window, end, column, begin, end, is_fresh),
                *(row_stride, split_stride, Z, C),
            )
