"""The kernels of gated_delta_prefill.py, which says what they compute.

    convolve   every row of every piece: its columns behind the convolution, in the model's dtype
    prepare    every chunk at once, of its keys, queries and gates alone: what solves its updates,
               what its outputs see of them, and how much is left of a state; behind the chunks
               programs that move the windows; on Hopper in 16 bits that of
               gated_delta_prepare_kernels.py
    scan       a tile [BV, K] of a head's state through the chunks of a piece, in matrix products:
               values are rows, so that a product's sums are the next one's left operand; there
               that of gated_delta_scan_kernels.py

The first two let a successor begin when they are done, not as they begin: a waiting scan takes
registers from chunks that are prepared beside it. So all before the convolution is done when
the scan waits, which reads the states in front of that; the others what no kernel writes.

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
    taps_of,
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
    piece = tl.program_id(2)
    begin, end = tl.load(begins + piece), tl.load(ends + piece)
    first = begin + tl.program_id(0) * ROWS
    is_fresh = (tl.load(positions + piece) == 0).to(tl.int32)
    window = windows + tl.load(slots + piece).to(tl.int64) * 3 * C
    dtype: tl.constexpr = out.dtype.element_ty
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    oldest, tap_1, tap_2, newest = taps_of(conv, column)  # pyright: ignore
    if PDL:
        gdc_wait()
    if first >= end:
        return
    # All rows are read once, and before any is written: no read moves in front of a write.
    rows = ()
    for i in tl.static_range(-3, ROWS):  # pyright: ignore[reportGeneralTypeIssues]
        row = first + i
        live = (column >= 0) & (row >= begin) & (row < end)
        at = row.to(tl.int64) * row_stride + column
        x = row_columns(projected, at, live, split_stride, dtype, Z)  # pyright: ignore
        if i < 0:
            live = (column >= 0) & (row < begin) & (is_fresh == 0)
            x += tl.load(window + (row - begin + 3) * C + column, mask=live, other=0.0)
        rows = rows + (x,)
    for i in tl.static_range(ROWS):  # pyright: ignore[reportGeneralTypeIssues]
        row = first + i
        total = rows[i].to(tl.float32) * oldest.to(tl.float32)
        total += rows[i + 1].to(tl.float32) * tap_1.to(tl.float32)
        total += rows[i + 2].to(tl.float32) * tap_2.to(tl.float32)
        total += rows[i + 3].to(tl.float32) * newest.to(tl.float32)
        live = (column >= 0) & (row < end)
        tl.store(out + row.to(tl.int64) * C + column, silu(total).to(dtype), mask=live)
    if PDL:
        gdc_launch_dependents()


@triton.jit
def block_of(begin, piece, chunk, head, N: tl.constexpr, CHUNK: tl.constexpr):
    """Where a head has the tiles of a piece's chunk; rows ascend, so no two pieces share one."""
    return ((begin // CHUNK + piece + chunk) * N + head).to(tl.int64)


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
    tl.debug_barrier()  # all is read before any is written: `to` may be the window, a tap a warp's
    tl.store(to + tap[:, None] * C + column[None, :], columns, mask=(tap < 3)[:, None])


@triton.jit
def move_windows(
    projected,
    windows,
    piece,
    begin,
    end,
    keeps,
    positions,
    slots,
    kept_slots,
    head,
    row_stride,
    split_stride,
    N: tl.constexpr,
    NK: tl.constexpr,
    K: tl.constexpr,
    Z: tl.constexpr,
):
    """A head's columns of the windows behind a piece and behind the rows that it keeps. The
    convolution has read the windows, and who reads them next waits for the scan, which waits for
    the end of all this."""
    GROUP: tl.constexpr = N // NK
    C: tl.constexpr = 2 * NK * K + N * K
    slot, kept_slot = tl.load(slots + piece).to(tl.int64), tl.load(kept_slots + piece)
    window, kept = windows + slot * 3 * C, windows + kept_slot.to(tl.int64) * 3 * C
    is_fresh = (tl.load(positions + piece) == 0).to(tl.int32)
    keep, dim = begin + tl.load(keeps + piece), tl.arange(0, K)
    for part in tl.static_range(3):  # pyright: ignore[reportGeneralTypeIssues]
        column = 2 * NK * K + head * K + dim
        if part > 0:
            column = (part - 1) * NK * K + head // GROUP * K + dim
        if part == 0 or head % GROUP == 0:
            if keep > begin:
                move_window(  # pyright: ignore
                    *(projected, window, kept, keep, column, begin, end, is_fresh),
                    *(row_stride, split_stride, Z, C),
                )
            move_window(  # pyright: ignore
                *(projected, window, window, end, column, begin, end, is_fresh),
                *(row_stride, split_stride, Z, C),
            )


@triton.jit
def prepare_kernel(
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
    N: tl.constexpr,
    NK: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    Z: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
    GROUP: tl.constexpr = N // NK
    C: tl.constexpr = 2 * NK * K + N * K
    dtype: tl.constexpr = convolved.dtype.element_ty
    head, piece = tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(begins + piece), tl.load(ends + piece)
    first = begin + tl.program_id(0) * CHUNK
    if tl.program_id(0) == tl.num_programs(0) - 1:
        if begin < end:
            move_windows(  # pyright: ignore
                *(projected, windows, piece, begin, end, keeps, positions, slots, kept_slots),
                *(head, row_stride, split_stride, N, NK, K, Z),
            )
        return
    if first >= end:
        return
    i = tl.arange(0, CHUNK)
    live = first + i < end
    keys = (head // GROUP * K + tl.arange(0, K))[None, :]
    at = convolved + first.to(tl.int64) * C + i[:, None] * C + keys
    q = tl.load(at, mask=live[:, None], other=0.0)
    k = tl.load(at + NK * K, mask=live[:, None], other=0.0)
    gate = (first + i).to(tl.int64) * row_stride + C + N * K + head
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
    block = block_of(begin, piece, tl.program_id(0), head, N, CHUNK)  # pyright: ignore
    to = tiles + block * (3 * CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :]
    seen = exact_dot(q, tl.trans(k)) * decay * q_norm[:, None]  # pyright: ignore
    tl.store(to + 2 * CHUNK * CHUNK, tl.where(not_after, seen, 0.0).to(dtype))
    below = exact_dot(k, tl.trans(k)) * decay * (beta * k_norm)[:, None] * k_norm[None, :]  # pyright: ignore
    below = tl.where(i[:, None] > i[None, :], below, 0.0)
    solve = k_norm[:, None] * inverse_of(below, CHUNK) * beta[None, :]  # pyright: ignore
    if dtype == tl.float32:
        tl.store(to, solve)
    else:
        high, low = halves_of(solve, dtype)  # pyright: ignore
        tl.store(to, high)
        tl.store(to + CHUNK * CHUNK, low)
    to = factors + block * (4 * CHUNK) + i
    tl.store(to, tl.exp(total) * k_norm)
    tl.store(to + CHUNK, tl.exp(whole - total))
    tl.store(to + 2 * CHUNK, tl.exp(total) * q_norm)
    tl.store(to + 3 * CHUNK, tl.exp(whole) + tl.zeros_like(total))
    if PDL:
        gdc_launch_dependents()


@triton.jit
def scan_kernel(
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
    N: tl.constexpr,
    NK: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    BV: tl.constexpr,
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
    num_chunks = (end - begin + CHUNK - 1) // CHUNK
    block = block_of(begin, piece, 0, head, N, CHUNK)  # pyright: ignore
    tile_ij, rows_q = i[:, None] * CHUNK + i[None, :], i[:, None] * C + q_at[None, :]
    row_v, row_o = i[None, :] * C + v_at[:, None], i[:, None] * (N * K) + values[None, :]
    for c in range(num_chunks):
        first = begin + c * CHUNK
        live = i < end - first
        where = convolved + first.to(tl.int64) * C
        here = block + c * N
        mine = tiles + here * (3 * CHUNK * CHUNK)
        at = factors + here * (4 * CHUNK)
        q = tl.load(where + rows_q, mask=live[:, None], other=0.0)
        k = tl.load(where + NK * K + rows_q, mask=live[:, None], other=0.0)
        v = tl.load(where + row_v, mask=live[None, :], other=0.0).to(tl.float32)
        solve = tl.load(mine + tile_ij)
        seen = tl.load(mine + 2 * CHUNK * CHUNK + tile_ij)
        k_factor = tl.load(at + i)
        left = tl.load(at + CHUNK + i)
        q_factor, fading = tl.load(at + 2 * CHUNK + i), tl.load(at + 3 * CHUNK)
        if dtype == tl.float32:
            known = exact_dot(state, tl.trans(k))  # pyright: ignore
            o = exact_dot(state, tl.trans(q))  # pyright: ignore
            update = exact_dot(v - known * k_factor[None, :], tl.trans(solve))  # pyright: ignore
            late = update * left[None, :]
            o = o * q_factor[None, :] + exact_dot(update, tl.trans(seen))  # pyright: ignore
            state = fading * state + exact_dot(late, k)  # pyright: ignore
        else:
            finer = tl.load(mine + CHUNK * CHUNK + tile_ij)
            high, low = halves_of(state, dtype)  # pyright: ignore
            known = tl.dot(high, tl.trans(k)) + tl.dot(low, tl.trans(k))
            o = tl.dot(high, tl.trans(q)) + tl.dot(low, tl.trans(q))
            high, low = halves_of(v - known * k_factor[None, :], dtype)  # pyright: ignore
            update = tl.dot(high, tl.trans(solve))
            update += tl.dot(low, tl.trans(solve), tl.dot(high, tl.trans(finer)))
            late = update * left[None, :]
            o = tl.dot(update.to(dtype), tl.trans(seen), o * q_factor[None, :])
            high, low = halves_of(late, dtype)  # pyright: ignore
            state = tl.dot(low, k, tl.dot(high, k, fading * state))
        to = out + first.to(tl.int64) * (N * K) + head * K + row_o
        tl.store(to, tl.trans(o).to(dtype), mask=live[:, None])
        if first + CHUNK == keep:
            tl.store(states + kept_slot * N * K * K + at_VK, state)
    tl.store(held, state)
