"""The kernels of gated_delta.py, which says what they compute and what they may read.

    verify    a tile [BV, K] of a value head's state and a whole block of rows, in matrix products:
              the rows' updates solve (I + A) delta = beta (v - e^G S k), A below its diagonal
              beta_i e^(G_i - G_j) k_i.k_j, G the running sum of g; outputs are of S and delta
    commit    S_n = e^G_n S + sum over i < n of e^(G_n - G_i) delta_i k_i^T

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

EPS = tl.constexpr(1e-6)


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
def exact_dot(a, b):
    """a @ b of float32."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def row_columns(projected, at, mask, split_stride, dtype: tl.constexpr, Z: tl.constexpr):
    """Of projected rows, summed over their partial sums and rounded as the model rounds."""
    x = tl.load(projected + at, mask=mask, other=0.0)
    for z in tl.static_range(1, Z):  # pyright: ignore[reportGeneralTypeIssues]
        x += tl.load(projected + z * split_stride + at, mask=mask, other=0.0)
    return x.to(dtype).to(tl.float32)


@triton.jit
def convolved(
    projected,
    conv,
    window,
    record,
    row,
    column,
    is_written,
    row_stride,
    split_stride,
    G: tl.constexpr,
    C: tl.constexpr,
    Z: tl.constexpr,
    dtype: tl.constexpr,
):
    """silu of the convolution, rounded to the model's dtype, of rows x columns (or columns x rows:
    two index tensors that broadcast). Mutates: the record, where it is written."""
    live = (row < G) & (column >= 0)
    total = tl.zeros(live.shape, tl.float32)
    for tap in tl.static_range(4):  # pyright: ignore[reportGeneralTypeIssues]
        source = row + (tap - 3)
        x = row_columns(  # pyright: ignore
            projected, source * row_stride + column, live & (source >= 0), split_stride, dtype, Z
        )
        held = tl.load(window + (source + 3) * C + column, mask=live & (source < 0), other=0.0)
        x = tl.where(source < 0, held.to(tl.float32), x)
        total += x * tl.load(conv + column * 4 + tap).to(tl.float32)
        is_first = row == 0 if tap < 3 else live  # row 0 has the window before it
        at = record + (row + tap) * C + column
        tl.store(at, x.to(dtype), mask=live & is_first & is_written)
    return silu(total).to(dtype)


@triton.jit
def inverse_of(below, ROWS: tl.constexpr):
    """(I + below)^-1 of a strictly lower matrix: rows of blocks of four one by one, then the blocks
    by the product (I - N)(I + N^2)(I + N^4).., which is exact and whose terms stay small."""
    i = tl.arange(0, ROWS)
    row, column = i[:, None], i[None, :]
    is_near = row // 4 == column // 4
    near = tl.where(is_near, below, 0.0)
    identity = tl.where(row == column, 1.0, 0.0)
    solve = identity
    for k in tl.static_range(1, 4):  # pyright: ignore[reportGeneralTypeIssues]
        mine = tl.sum(tl.where(row % 4 == k, near, 0.0), axis=0)
        change = tl.sum(mine[:, None] * solve, axis=0)
        solve = tl.where((row % 4 == k) & is_near, solve - change[None, :], solve)
    power = exact_dot(solve, below - near)  # pyright: ignore
    inverse = identity - power
    for k in tl.static_range(3, 6):  # pyright: ignore[reportGeneralTypeIssues]
        if 2**k < ROWS:
            power = exact_dot(power, power)  # pyright: ignore
            inverse += exact_dot(inverse, power)  # pyright: ignore
    return exact_dot(inverse, solve)  # pyright: ignore


@triton.jit
def normed_rows(x):
    """Each row x / |x|, float32."""
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + EPS)[:, None]


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
        gdc_wait()
    TILES: tl.constexpr = K // BV
    GROUP: tl.constexpr = N // NK
    C: tl.constexpr = 2 * NK * K + N * K
    KEYS: tl.constexpr = NK * K
    dtype: tl.constexpr = out.dtype.element_ty
    ROUNDED: tl.constexpr = "tf32x3" if dtype == tl.float32 else "tf32"
    head, tile, b = tl.program_id(0) // TILES, tl.program_id(0) % TILES, tl.program_id(1)
    dim, values, i = tl.arange(0, K), tile * BV + tl.arange(0, BV), tl.arange(0, ROWS)
    slot = tl.load(slots + b).to(tl.int64)
    state = tl.load(states + ((slot * N + head) * K + values[:, None]) * K + dim[None, :])
    first = (b * G).to(tl.int64)
    projected += first * row_stride
    window, record = windows + slot * 3 * C, raw + b.to(tl.int64) * (3 + G) * C
    q_at, v_at = head // GROUP * K + dim, 2 * KEYS + head * K + values
    has_keys = (tile == 0) & (head % GROUP == 0)  # of several programs that have them, one writes
    q = convolved(  # pyright: ignore
        *(projected, conv, window, record, i[:, None], q_at[None, :], has_keys),
        *(row_stride, split_stride, G, C, Z, dtype),
    )
    k = convolved(  # pyright: ignore
        *(projected, conv, window, record, i[:, None], KEYS + q_at[None, :], has_keys),
        *(row_stride, split_stride, G, C, Z, dtype),
    )
    v = convolved(  # pyright: ignore
        *(projected, conv, window, record, i[None, :], v_at[:, None], True),
        *(row_stride, split_stride, G, C, Z, dtype),
    )
    q, k = normed_rows(q) * scale, normed_rows(k)  # pyright: ignore
    live = i < G
    at = i * row_stride + C + N * K + head
    beta = row_columns(projected, at, live, split_stride, dtype, Z)  # pyright: ignore
    beta = tl.where(live, 1.0 / (1.0 + tl.exp(-beta)), 0.0)
    g = row_columns(projected, at + N, live, split_stride, dtype, Z)  # pyright: ignore
    g = softplus(g + tl.load(dt_bias + head).to(tl.float32))
    g = tl.where(live, -tl.exp(tl.load(a_log + head).to(tl.float32)) * g, 0.0)
    total = tl.cumsum(g, axis=0)
    row = first + i
    if has_keys:
        to = keys + row[:, None] * KEYS + q_at[None, :]
        tl.store(to, k, mask=live[:, None])
    if tile == 0:
        tl.store(gates + row * N + head, g, mask=live)
    fading = tl.exp(total)[None, :]
    wanted = beta[None, :] * (v.to(tl.float32) - fading * exact_dot(state, tl.trans(k)))  # pyright: ignore
    not_after = i[:, None] >= i[None, :]
    decay = tl.exp(tl.where(not_after, total[:, None] - total[None, :], 0.0))
    if G > 1:
        below = exact_dot(k, tl.trans(k)) * decay * beta[:, None]  # pyright: ignore
        below = tl.where(i[:, None] > i[None, :], below, 0.0)
        delta = exact_dot(wanted, tl.trans(inverse_of(below, ROWS)))  # pyright: ignore
    else:
        delta = wanted
    pairs = tl.dot(q, tl.trans(k), input_precision=ROUNDED)
    seen = tl.where(not_after, pairs * decay, 0.0)
    o = fading * tl.dot(state, tl.trans(q), input_precision=ROUNDED)
    o += tl.dot(delta, tl.trans(seen), input_precision=ROUNDED)
    to = (row[None, :] * N + head) * K + values[:, None]
    tl.store(deltas + to, delta, mask=live[None, :])
    tl.store(out + to, o.to(dtype), mask=live[None, :])


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
    first_stride,
    num_requests,
    num_slots,
    G: tl.constexpr,
    N: tl.constexpr,
    NK: tl.constexpr,
    K: tl.constexpr,
    BV: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    TILES: tl.constexpr = K // BV
    GROUP: tl.constexpr = N // NK
    C: tl.constexpr = 2 * NK * K + N * K
    KEYS: tl.constexpr = NK * K
    tile, b = tl.program_id(0) % TILES, tl.program_id(1)
    head, layer = tl.program_id(0) // TILES % N, tl.program_id(0) // (TILES * N)
    count = tl.load(starts + b).to(tl.int64) - tl.load(first_positions + b * first_stride)
    count = tl.minimum(tl.maximum(count, 0), G).to(tl.int32)
    if count == 0:
        return
    slot = layer.to(tl.int64) * num_slots + tl.load(slots + b)
    request = layer.to(tl.int64) * num_requests + b
    dim, values, i = tl.arange(0, K), tile * BV + tl.arange(0, BV), tl.arange(0, ROWS)
    held = states + ((slot * N + head) * K + values[:, None]) * K + dim[None, :]
    state = tl.load(held)
    row, accepted = request * G + i, i < count  # a row that was rejected is never read
    key_at = head // GROUP * K + dim
    k_at = keys + row[:, None] * KEYS + key_at[None, :]
    k = tl.load(k_at, mask=accepted[:, None], other=0.0)
    delta_at = deltas + (row[None, :] * N + head) * K + values[:, None]
    delta = tl.load(delta_at, mask=accepted[None, :], other=0.0)
    g = tl.load(gates + row * N + head, mask=accepted, other=0.0)
    whole = tl.sum(g, axis=0)
    delta *= tl.exp(whole - tl.cumsum(g, axis=0))[None, :]
    tl.store(held, tl.exp(whole) * state + exact_dot(delta, k))  # pyright: ignore
    window, record = windows + slot * 3 * C, raw + (request * (3 + G) + count) * C
    q_at, v_at = key_at, 2 * KEYS + head * K + values
    for column in tl.static_range(3):  # pyright: ignore[reportGeneralTypeIssues]
        tl.store(window + column * C + v_at, tl.load(record + column * C + v_at))
        if (tile == 0) & (head % GROUP == 0):
            tl.store(window + column * C + q_at, tl.load(record + column * C + q_at))
            key = KEYS + q_at
            tl.store(window + column * C + key, tl.load(record + column * C + key))
