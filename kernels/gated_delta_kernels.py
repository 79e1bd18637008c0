"""The kernels of gated_delta.py, which says what they compute and what they may read.

    verify    a tile [BV, K] of a value head's state and a whole block of rows, in matrix products:
              the rows' updates solve (I + A) delta = beta (v - e^G S k), A below its diagonal
              beta_i e^(G_i - G_j) k_i.k_j, G the running sum of g; outputs are of S and delta
    commit    S_n = e^G_n S + sum over i < n of e^(G_n - G_i) delta_i k_i^T, and the windows; behind
              a step (gated_delta_step_kernels.py) the windows alone

delta_i does not depend on how many rows are accepted behind it: so it is recorded, and a commit
applies what the verify has used, in one product.

Invariant: what enters a state is a sum of products of three TF32 parts each ("tf32x3", float32 to
its last bits); outputs, which are rounded to the model's dtype, take one where that is not float32.

Legend: B requests, G rows of a block, N value heads, NK key heads, K head dim, C channels,
Z partial sums, L layers; ROWS: G padded to what a matrix product takes.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.interpreter import INTERPRET

EPS = tl.constexpr(1e-6)
INTERPRETED = tl.constexpr(INTERPRET)


@triton.jit
def silu(x):
    """x * sigmoid(x), float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + e^x); x itself above 20, as torch has it. A small e^x would be cut off beside 1,
    and a head that forgets slowly lives there."""
    small = tl.exp(tl.minimum(x, 20.0))
    series = small * (1.0 - small * (0.5 - small * (1.0 / 3.0)))
    return tl.where(x > 20.0, x, tl.where(small < 0.004, series, tl.log(1.0 + small)))


@triton.jit
def tf32_parts(x):
    high = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def exact_dot(a, b):
    """a @ b: of float32 three products of TF32, as "tf32x3" without its guard against infinity."""
    if a.dtype == tl.float32:
        a_high, a_low = tf32_parts(a)  # pyright: ignore
        b_high, b_low = tf32_parts(b)  # pyright: ignore
        small = tl.dot(a_low, b_high, input_precision="tf32")
        small = tl.dot(a_high, b_low, small, input_precision="tf32")
        out = tl.dot(a_high, b_high, small, input_precision="tf32")
    else:
        out = tl.dot(a, b)
    return out


@triton.jit
def row_columns(projected, at, mask, split_stride, dtype: tl.constexpr, Z: tl.constexpr):
    """Of projected rows, summed over their partial sums and rounded as the model rounds."""
    x = tl.load(projected + at, mask=mask, other=0.0)
    for z in tl.static_range(1, Z):  # pyright: ignore[reportGeneralTypeIssues]
        x += tl.load(projected + z * split_stride + at, mask=mask, other=0.0)
    return x.to(dtype)


@triton.jit
def arrived(x):
    """x as it is. What is loaded in front of this is asked for before anything that follows uses
    it: else the compiler moves each load through shared memory before it asks for the next."""
    if not INTERPRETED:
        PACKED: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;",
            "=r,r",
            [x],
            dtype=x.dtype,
            is_pure=False,
            pack=PACKED,  # pyright: ignore[reportArgumentType] (a constexpr of it)
        )
    return x


@triton.jit
def window_columns(window, column, C: tl.constexpr, ROWS: tl.constexpr):
    """The window's three columns, as the first rows of a matrix product's operand."""
    i = tl.arange(0, ROWS)[:, None]
    return tl.load(window + i * C + column[None, :], mask=i < 3, other=0.0)


@triton.jit
def taps_of(conv, column):
    """What columns are multiplied with, the oldest row's first."""
    tap = conv + column * 4
    return tl.load(tap), tl.load(tap + 1), tl.load(tap + 2), tl.load(tap + 3)


@triton.jit
def convolved(x, before, taps, ROWS: tl.constexpr):
    """silu of the convolution of rows x [ROWS, n] behind those of a window, rounded to their dtype.

    A shift by rows is a product with ones and zeros, which is exact: the rows are read once.
    """
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    total = x.to(tl.float32) * taps[3].to(tl.float32)[None, :]
    for tap in tl.static_range(3):  # pyright: ignore[reportGeneralTypeIssues]
        inside = tl.where(j == i - 3 + tap, 1.0, 0.0).to(x.dtype)
        held = tl.where((j == i + tap) & (j < 3), 1.0, 0.0).to(x.dtype)
        shifted = tl.dot(inside, x, input_precision="ieee")
        shifted = tl.dot(held, before, shifted, input_precision="ieee")
        total += shifted * taps[tap].to(tl.float32)[None, :]
    return silu(total).to(x.dtype)


@triton.jit
def store_columns(record, x, before, column, is_written, G: tl.constexpr, C: tl.constexpr):
    """What a commit makes the next window of: this one's columns, then the block's."""
    i = tl.arange(0, x.shape[0])[:, None]
    at = record + i * C + column[None, :]
    tl.store(at, before, mask=(i < 3) & is_written)
    tl.store(at + 3 * C, x, mask=(i < G) & is_written)


@triton.jit
def inverse_of(below, ROWS: tl.constexpr):
    """(I + below)^-1 of a strictly lower matrix, of ever larger blocks on its diagonal: of four
    that are solved, (I - N)(I + N^2) with N^4 = 0, which is exact and whose terms stay small."""
    i = tl.arange(0, ROWS)
    row, column = i[:, None], i[None, :]
    identity = tl.where(row == column, 1.0, 0.0)
    solve, is_solved = identity, row == column
    for level in tl.static_range(1, 4):  # pyright: ignore[reportGeneralTypeIssues]
        if 4 ** (level - 1) < ROWS:
            is_next = row // 4**level == column // 4**level
            power = tl.where(is_next & ~is_solved, below, 0.0)
            if level > 1:
                power = exact_dot(solve, power)  # pyright: ignore
            inverse = identity - power
            if 2 * 4 ** (level - 1) < ROWS:  # of two blocks N^2 = 0
                power = exact_dot(power, power)  # pyright: ignore
                inverse += exact_dot(inverse, power)  # pyright: ignore
            solve = exact_dot(inverse, solve) if level > 1 else inverse  # pyright: ignore
            is_solved = is_next
    return solve


@triton.jit
def parts_of(x, dtype: tl.constexpr):
    """float32 as a sum of three numbers of 16 bits (or x and zeros, where dtype is float32)."""
    high = x.to(dtype)
    x -= high.to(tl.float32)
    middle = x.to(dtype)
    return high, middle, (x - middle.to(tl.float32)).to(dtype)


@triton.jit
def norms_of(x):
    """1 / |x| of each row, float32."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=1) + EPS)


@triton.jit
def decay_of(a, a_log, dt_bias):
    """g, the logarithm of what a row leaves of the state, float32."""
    g = softplus(a.to(tl.float32) + dt_bias.to(tl.float32))  # pyright: ignore
    return -tl.exp(a_log.to(tl.float32)) * g


@triton.jit
def verify_kernel(
    projected,
    conv,
    a_log,
    dt_bias,
    windows,
    states,
    slots,
    raw,
    keys,
    deltas,
    gates,
    out,
    row_stride,
    split_stride,
    scale,
    G: tl.constexpr,
    N: tl.constexpr,
    NK: tl.constexpr,
    K: tl.constexpr,
    BV: tl.constexpr,
    ROWS: tl.constexpr,
    Z: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    TILES: tl.constexpr = K // BV
    GROUP: tl.constexpr = N // NK
    C: tl.constexpr = 2 * NK * K + N * K
    KEYS: tl.constexpr = NK * K
    dtype: tl.constexpr = out.dtype.element_ty
    head, tile, b = tl.program_id(0) // TILES, tl.program_id(0) % TILES, tl.program_id(1)
    dim, values, i = tl.arange(0, K), tile * BV + tl.arange(0, BV), tl.arange(0, ROWS)
    q_at, v_at = head // GROUP * K + dim, 2 * KEYS + head * K + values
    k_at = KEYS + q_at
    # Only the projection is the work of the launch before this one: the rest is read meanwhile.
    slot = tl.load(slots + b).to(tl.int64)
    window, record = windows + slot * 3 * C, raw + b.to(tl.int64) * (3 + G) * C
    state_KV = tl.load(states + ((slot * N + head) * K + values[None, :]) * K + dim[:, None])
    q_before = window_columns(window, q_at, C, ROWS)  # pyright: ignore
    k_before = window_columns(window, k_at, C, ROWS)  # pyright: ignore
    v_before = window_columns(window, v_at, C, ROWS)  # pyright: ignore
    q_taps, k_taps, v_taps = taps_of(conv, q_at), taps_of(conv, k_at), taps_of(conv, v_at)  # pyright: ignore
    a, bias = tl.load(a_log + head), tl.load(dt_bias + head)
    state_KV = arrived(state_KV)  # pyright: ignore
    q_before, k_before, v_before = arrived(q_before), arrived(k_before), arrived(v_before)  # pyright: ignore
    if PDL:
        gdc_wait()
    first = (b * G).to(tl.int64)
    projected += first * row_stride
    live = i < G
    at, rows = i * row_stride, live[:, None]
    gate = at + C + N * K + head
    q_in = row_columns(projected, at[:, None] + q_at[None, :], rows, split_stride, dtype, Z)  # pyright: ignore
    k_in = row_columns(projected, at[:, None] + k_at[None, :], rows, split_stride, dtype, Z)  # pyright: ignore
    v_in = row_columns(projected, at[:, None] + v_at[None, :], rows, split_stride, dtype, Z)  # pyright: ignore
    beta = row_columns(projected, gate, live, split_stride, dtype, Z).to(tl.float32)  # pyright: ignore
    g = row_columns(projected, gate + N, live, split_stride, dtype, Z)  # pyright: ignore
    q_in, k_in, v_in = arrived(q_in), arrived(k_in), arrived(v_in)  # pyright: ignore
    beta = tl.where(live, 1.0 / (1.0 + tl.exp(-beta)), 0.0)
    g = tl.where(live, decay_of(g, a, bias), 0.0)  # pyright: ignore
    # Each is recorded before the next one is convolved: fewer registers are held.
    has_keys = (tile == 0) & (head % GROUP == 0)  # of several programs that have them, one writes
    store_columns(record, q_in, q_before, q_at, has_keys, G, C)  # pyright: ignore
    q = convolved(q_in, q_before, q_taps, ROWS)  # pyright: ignore
    store_columns(record, k_in, k_before, k_at, has_keys, G, C)  # pyright: ignore
    k = convolved(k_in, k_before, k_taps, ROWS)  # pyright: ignore
    store_columns(record, v_in, v_before, v_at, True, G, C)  # pyright: ignore
    v = convolved(v_in, v_before, v_taps, ROWS).to(tl.float32)  # pyright: ignore
    q_norm, k_norm = norms_of(q) * scale, norms_of(k)  # pyright: ignore
    if dtype == tl.float32:
        held = exact_dot(k, state_KV)  # pyright: ignore
        o = exact_dot(q, state_KV)  # pyright: ignore
    else:
        high, middle, low = parts_of(state_KV, dtype)  # pyright: ignore
        held = tl.dot(k, low, tl.dot(k, middle, tl.dot(k, high)))
        o = tl.dot(q, middle, tl.dot(q, high))
    total = tl.cumsum(g, axis=0)
    fading = tl.exp(total)
    delta = beta[:, None] * (v - held * (fading * k_norm)[:, None])
    not_after = i[:, None] >= i[None, :]
    decay = tl.exp(tl.where(not_after, total[:, None] - total[None, :], 0.0)) * k_norm[None, :]
    below = exact_dot(k, tl.trans(k)) * decay * (beta * k_norm)[:, None]  # pyright: ignore
    below = tl.where(i[:, None] > i[None, :], below, 0.0)
    delta = exact_dot(inverse_of(below, ROWS), delta)  # pyright: ignore
    seen = tl.where(not_after, exact_dot(q, tl.trans(k)) * decay, 0.0)  # pyright: ignore
    if dtype == tl.float32:
        o = o * fading[:, None] + exact_dot(seen, delta)  # pyright: ignore
    else:
        o = o * fading[:, None] + tl.dot(seen, delta, input_precision="tf32")
    row = first + i
    to = (row[:, None] * N + head) * K + values[None, :]
    tl.store(deltas + to, delta, mask=rows)
    tl.store(out + to, (o * q_norm[:, None]).to(dtype), mask=rows)
    to = keys + row[:, None] * KEYS + q_at[None, :]
    tl.store(to, k.to(tl.float32) * k_norm[:, None], mask=rows & has_keys)
    tl.store(gates + row * N + head, g, mask=live & (tile == 0))


@triton.jit
def copy_columns(window, record, column, C: tl.constexpr):
    """Three rows' columns; all are read first, since no read moves in front of a write."""
    x, to = record + column, window + column
    x0, x1, x2 = tl.load(x), tl.load(x + C), tl.load(x + 2 * C)
    tl.store(to, x0)
    tl.store(to + C, x1)
    tl.store(to + 2 * C, x2)


@triton.jit
def commit_kernel(
    raw,
    keys,
    deltas,
    gates,
    windows,
    states,
    slots,
    first_positions,
    starts,
    kept_slots,
    first_stride,
    num_requests,
    num_slots,
    SPACING: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    NK: tl.constexpr,
    K: tl.constexpr,
    BV: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:  # and no early launch: what reads states before its own wait relies on that
        gdc_wait()
    TILES: tl.constexpr = K // BV
    GROUP: tl.constexpr = N // NK
    C: tl.constexpr = 2 * NK * K + N * K
    KEYS: tl.constexpr = NK * K
    tile, b = tl.program_id(0) % TILES, tl.program_id(1)
    head, layer = tl.program_id(0) // TILES % N, tl.program_id(0) // (TILES * N)
    start = tl.load(starts + b).to(tl.int64)
    first = tl.load(first_positions + b * first_stride)
    count = tl.minimum(tl.maximum(start - first, 0), G).to(tl.int32)
    if count == 0:
        return
    pool = layer.to(tl.int64) * num_slots
    slot = pool + tl.load(slots + b)
    request = layer.to(tl.int64) * num_requests + b
    dim, values, i = tl.arange(0, K), tile * BV + tl.arange(0, BV), tl.arange(0, ROWS)
    part = (head * K + values[:, None]) * K + dim[None, :]
    key_at, row = head // GROUP * K + dim, request * G + i
    k_at = keys + row[:, None] * KEYS + key_at[None, :]
    delta_at = deltas + (row[None, :] * N + head) * K + values[:, None]
    q_at, v_at = key_at, 2 * KEYS + head * K + values
    to, num_rows = slot, count
    if SPACING > 0:
        number = start // SPACING
        kept = tl.load(kept_slots + 2 * b + number % 2)
        to, num_rows = pool + kept, (number * SPACING - first).to(tl.int32)
        if (kept <= 0) | (num_rows <= 0) | (num_rows > count):
            return
    if G > 1 or SPACING > 0:
        state = tl.load(states + slot * N * K * K + part)
        if G > 1:
            accepted = i < num_rows  # a row that was rejected is never read
            k = tl.load(k_at, mask=accepted[:, None], other=0.0)
            delta = tl.load(delta_at, mask=accepted[None, :], other=0.0)
            g = tl.load(gates + row * N + head, mask=accepted, other=0.0)
            whole = tl.sum(g, axis=0)
            delta *= tl.exp(whole - tl.cumsum(g, axis=0))[None, :]
            state = tl.exp(whole) * state + exact_dot(delta, k)  # pyright: ignore
        tl.store(states + to * N * K * K + part, state)
    window, record = windows + to * 3 * C, raw + (request * (3 + G) + num_rows) * C
    copy_columns(window, record, v_at, C)  # pyright: ignore
    if (tile == 0) & (head % GROUP == 0):
        copy_columns(window, record, q_at, C)  # pyright: ignore
        copy_columns(window, record, KEYS + q_at, C)  # pyright: ignore
