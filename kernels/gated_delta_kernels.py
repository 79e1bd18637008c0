"""The kernels of gated_delta.py, which says what they compute and what they may read.

A program holds a tile [BV, K] of one value head's state and goes through the rows one by one, in
float32 without tensor cores: verify and commit take the same steps of the same tile, so a replay is
equal to the bit. The next row is on its way while one is worked on.

Legend: B requests, G rows of a block, N value heads, NK key heads, K head dim, C channels,
Z partial sums, L layers.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

EPS = tl.constexpr(1e-6)


@triton.jit
def row_of(projected, column, split_stride, dtype: tl.constexpr, Z: tl.constexpr):
    """Columns of a projected row, summed over its partial sums and rounded as the model rounds."""
    x = tl.load(projected + column)
    for z in tl.static_range(1, Z):  # pyright: ignore[reportGeneralTypeIssues]
        x += tl.load(projected + z * split_stride + column)
    return x.to(dtype).to(tl.float32)


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
def advanced(state, k, v, g, beta):
    """The state [BV, K] behind a row, and what it was predicted to hold of v."""
    fading = tl.exp(g)
    predicted = fading * tl.sum(state * k[None, :], axis=1)
    delta = beta * (v - predicted)
    return fading * state + delta[:, None] * k[None, :], delta, fading


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
    kv,
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
    keys, values = tl.arange(0, K), tile * BV + tl.arange(0, BV)
    q_at = head // GROUP * K + keys
    k_at, v_at = KEYS + q_at, 2 * KEYS + head * K + values
    writes_keys = (tile == 0) & (head % GROUP == 0)
    # Weights alone before the wait: the commit of the step before has written states and windows.
    wq0, wk0, wv0 = taps(conv, q_at, k_at, v_at, 0)  # pyright: ignore
    wq1, wk1, wv1 = taps(conv, q_at, k_at, v_at, 1)  # pyright: ignore
    wq2, wk2, wv2 = taps(conv, q_at, k_at, v_at, 2)  # pyright: ignore
    wq3, wk3, wv3 = taps(conv, q_at, k_at, v_at, 3)  # pyright: ignore
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    slot = tl.load(slots + b).to(tl.int64)
    if PDL:
        gdc_wait()
    state = tl.load(states + ((slot * N + head) * K + values[:, None]) * K + keys[None, :])
    window, record = windows + slot * 3 * C, raw + b.to(tl.int64) * (3 + G) * C
    q0, k0, v0 = columns_of(window, record, q_at, k_at, v_at, writes_keys)  # pyright: ignore
    q1, k1, v1 = columns_of(window + C, record + C, q_at, k_at, v_at, writes_keys)  # pyright: ignore
    q2, k2, v2 = columns_of(  # pyright: ignore
        window + 2 * C, record + 2 * C, q_at, k_at, v_at, writes_keys
    )
    record += 3 * C
    first = (b * G).to(tl.int64)
    row = projected + first * row_stride
    q_in = row_of(row, q_at, split_stride, dtype, Z)  # pyright: ignore
    k_in = row_of(row, k_at, split_stride, dtype, Z)  # pyright: ignore
    v_in = row_of(row, v_at, split_stride, dtype, Z)  # pyright: ignore
    b_in = row_of(row, C + N * K + head, split_stride, dtype, Z)  # pyright: ignore
    a_in = row_of(row, C + N * K + N + head, split_stride, dtype, Z)  # pyright: ignore
    for i in range(G):
        q3, k3, v3, b3, a3 = q_in, k_in, v_in, b_in, a_in
        row = projected + (first + tl.minimum(i + 1, G - 1)) * row_stride
        q_in = row_of(row, q_at, split_stride, dtype, Z)  # pyright: ignore
        k_in = row_of(row, k_at, split_stride, dtype, Z)  # pyright: ignore
        v_in = row_of(row, v_at, split_stride, dtype, Z)  # pyright: ignore
        b_in = row_of(row, C + N * K + head, split_stride, dtype, Z)  # pyright: ignore
        a_in = row_of(row, C + N * K + N + head, split_stride, dtype, Z)  # pyright: ignore
        q = silu(wq0 * q0 + wq1 * q1 + wq2 * q2 + wq3 * q3).to(dtype)
        k = silu(wk0 * k0 + wk1 * k1 + wk2 * k2 + wk3 * k3).to(dtype)
        v = silu(wv0 * v0 + wv1 * v1 + wv2 * v2 + wv3 * v3).to(dtype)
        beta = 1.0 / (1.0 + tl.exp(-b3))
        g = -rate * softplus(a3 + bias)
        J: tl.constexpr = KEYS + N * K
        kept = kv + (first + i) * J
        tl.store(record + i * C + v_at, v3.to(dtype))
        tl.store(kept + v_at - KEYS, v)
        if writes_keys:
            tl.store(record + i * C + q_at, q3.to(dtype))
            tl.store(record + i * C + k_at, k3.to(dtype))
            tl.store(kept + k_at - KEYS, k)
        if tile == 0:
            tl.store(gates + (first + i) * 2 * N + head, g)
            tl.store(gates + (first + i) * 2 * N + N + head, beta)
        q0, q1, q2, k0, k1, k2, v0, v1, v2 = q1, q2, q3, k1, k2, k3, v1, v2, v3
        q, k, v = normed(q) * scale, normed(k), v.to(tl.float32)  # pyright: ignore
        seen = tl.sum(state * q[None, :], axis=1)  # of the state before: it need not wait for it
        state, delta, fading = advanced(state, k, v, g, beta)  # pyright: ignore
        o = fading * seen + delta * tl.sum(k * q, axis=0)
        tl.store(out + ((first + i) * N + head) * K + values, o.to(dtype))


@triton.jit
def taps(conv, q_at, k_at, v_at, tap):
    """One tap of the convolution, of a program's channels."""
    q, k, v = (
        tl.load(conv + q_at * 4 + tap),
        tl.load(conv + k_at * 4 + tap),
        tl.load(conv + v_at * 4 + tap),
    )
    return q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)


@triton.jit
def columns_of(window, record, q_at, k_at, v_at, writes_keys):
    """A column of the window, copied to the records."""
    q, k, v = tl.load(window + q_at), tl.load(window + k_at), tl.load(window + v_at)
    tl.store(record + v_at, v)
    if writes_keys:
        tl.store(record + q_at, q)
        tl.store(record + k_at, k)
    return q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)


@triton.jit
def normed(x):
    """x / |x| [K], float32."""
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + EPS)


@triton.jit
def commit_kernel(
    raw,
    kv,
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
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    TILES: tl.constexpr = K // BV
    GROUP: tl.constexpr = N // NK
    C: tl.constexpr = 2 * NK * K + N * K
    KEYS: tl.constexpr = NK * K
    J: tl.constexpr = KEYS + N * K
    tile, b = tl.program_id(0) % TILES, tl.program_id(1)
    head, layer = tl.program_id(0) // TILES % N, tl.program_id(0) // (TILES * N)
    count = tl.load(starts + b).to(tl.int64) - tl.load(first_positions + b * first_stride)
    count = tl.minimum(tl.maximum(count, 0), G).to(tl.int32)
    if count == 0:
        return
    slot = layer.to(tl.int64) * num_slots + tl.load(slots + b)
    request = layer.to(tl.int64) * num_requests + b
    keys, values = tl.arange(0, K), tile * BV + tl.arange(0, BV)
    q_at = head // GROUP * K + keys
    k_at, v_at = KEYS + q_at, 2 * KEYS + head * K + values
    held = states + ((slot * N + head) * K + values[:, None]) * K + keys[None, :]
    state = tl.load(held)
    kept, gate = kv + request * G * J, gates + request * G * 2 * N + head
    k_in, v_in = tl.load(kept + k_at - KEYS), tl.load(kept + v_at - KEYS)
    g_in, beta_in = tl.load(gate), tl.load(gate + N)
    for i in range(count):
        k, v, g, beta = k_in, v_in, g_in, beta_in
        after = tl.minimum(i + 1, count - 1)  # never a row that was rejected
        k_in = tl.load(kept + after * J + k_at - KEYS)
        v_in = tl.load(kept + after * J + v_at - KEYS)
        g_in, beta_in = tl.load(gate + after * 2 * N), tl.load(gate + after * 2 * N + N)
        state, _, _ = advanced(  # pyright: ignore
            state,
            normed(k),  # pyright: ignore
            v.to(tl.float32),
            g,
            beta,
        )
    tl.store(held, state)
    window, record = windows + slot * 3 * C, raw + (request * (3 + G) + count) * C
    for column in tl.static_range(3):  # pyright: ignore[reportGeneralTypeIssues]
        tl.store(window + column * C + v_at, tl.load(record + column * C + v_at))
        if (tile == 0) & (head % GROUP == 0):
            tl.store(window + column * C + q_at, tl.load(record + column * C + q_at))
            tl.store(window + column * C + k_at, tl.load(record + column * C + k_at))
