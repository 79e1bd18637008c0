"""The kernel of gated_delta.py for blocks of one row, which is never rejected: its state advances
at once, and the columns of its convolution are recorded, which a commit makes the next window of.

Legend: as in gated_delta_kernels.py.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.gated_delta_kernels import EPS, decay_of, row_columns, silu


@triton.jit
def row_before(window, conv, column, C: tl.constexpr):
    """What a row's columns are convolved with: the window's three, and the taps of all four."""
    x, tap = window + column, conv + column * 4
    x0, x1, x2 = tl.load(x), tl.load(x + C), tl.load(x + 2 * C)
    return x0, x1, x2, tl.load(tap), tl.load(tap + 1), tl.load(tap + 2), tl.load(tap + 3)


@triton.jit
def row_convolved(x, before, record, column, is_written, C: tl.constexpr):
    """`convolved` of one row's columns, float32; records them where is_written."""
    x0, x1, x2, w0, w1, w2, w3 = before
    mask = (column >= 0) & is_written
    tl.store(record + column, x0, mask=mask)
    tl.store(record + C + column, x1, mask=mask)
    tl.store(record + 2 * C + column, x2, mask=mask)
    tl.store(record + 3 * C + column, x, mask=mask)
    total = x0.to(tl.float32) * w0.to(tl.float32) + x1.to(tl.float32) * w1.to(tl.float32)
    total += x2.to(tl.float32) * w2.to(tl.float32)
    total += x.to(tl.float32) * w3.to(tl.float32)
    return silu(total).to(x.dtype).to(tl.float32)


@triton.jit
def step_kernel(
    projected,
    conv,
    a_log,
    dt_bias,
    windows,
    states,
    slots,
    norm,
    raw,
    out,
    row_stride,
    split_stride,
    scale,
    eps,
    N: tl.constexpr,
    NK: tl.constexpr,
    K: tl.constexpr,
    BV: tl.constexpr,
    Z: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile [BV, K] of a value head's state and one row; its output is gated where BV is K."""
    if PDL:
        gdc_launch_dependents()
    TILES: tl.constexpr = K // BV
    GROUP: tl.constexpr = N // NK
    KEYS: tl.constexpr = NK * K
    C: tl.constexpr = 2 * KEYS + N * K
    dtype: tl.constexpr = out.dtype.element_ty
    head, tile, b = tl.program_id(0) // TILES, tl.program_id(0) % TILES, tl.program_id(1)
    dim, values, row = tl.arange(0, K), tile * BV + tl.arange(0, BV), b.to(tl.int64)
    of_head = head * K + values
    q_at, v_at = head // GROUP * K + dim, 2 * KEYS + of_head
    slot = tl.load(slots + b).to(tl.int64)
    window, record = windows + slot * 3 * C, raw + row * 4 * C
    # Only the projection is the work of the launch before this one: the rest is read meanwhile.
    states += (slot * N * K + of_head[:, None]) * K + dim[None, :]
    state_VK = tl.load(states)
    q_before = row_before(window, conv, q_at, C)  # pyright: ignore
    k_before = row_before(window, conv, KEYS + q_at, C)  # pyright: ignore
    v_before = row_before(window, conv, v_at, C)  # pyright: ignore
    a, bias = tl.load(a_log + head), tl.load(dt_bias + head)
    if PDL:
        gdc_wait()
    projected += row * row_stride
    of_dim, of_value, of_one = dim >= 0, values >= 0, C + N * K + head + tl.arange(0, 1)
    q = row_columns(projected, q_at, of_dim, split_stride, dtype, Z)  # pyright: ignore
    k = row_columns(projected, KEYS + q_at, of_dim, split_stride, dtype, Z)  # pyright: ignore
    v = row_columns(projected, v_at, of_value, split_stride, dtype, Z)  # pyright: ignore
    beta = row_columns(projected, of_one, of_one >= 0, split_stride, dtype, Z)  # pyright: ignore
    g = row_columns(projected, of_one + N, of_one >= 0, split_stride, dtype, Z)  # pyright: ignore
    has_keys = (tile == 0) & (head % GROUP == 0)  # of several programs that have them, one writes
    q = row_convolved(q, q_before, record, q_at, has_keys, C)  # pyright: ignore
    k = row_convolved(k, k_before, record, KEYS + q_at, has_keys, C)  # pyright: ignore
    v = row_convolved(v, v_before, record, v_at, True, C)  # pyright: ignore
    beta = 1.0 / (1.0 + tl.exp(-beta.to(tl.float32)))
    fading = tl.exp(decay_of(g, a, bias))  # pyright: ignore
    q *= tl.rsqrt(tl.sum(q * q) + EPS) * scale
    k *= tl.rsqrt(tl.sum(k * k) + EPS)
    delta = beta * (v - fading * tl.sum(state_VK * k[None, :], axis=1))
    o = fading * tl.sum(state_VK * q[None, :], axis=1) + delta * tl.sum(q * k)
    if TILES == 1:
        o = o.to(dtype).to(tl.float32)
        z = row_columns(projected, C + of_head, of_value, split_stride, dtype, Z).to(tl.float32)  # pyright: ignore
        o *= tl.rsqrt(tl.sum(o * o) / K + eps) * tl.load(norm + values).to(tl.float32) * silu(z)
    tl.store(out + row * N * K + of_head, o.to(dtype))
    state_VK = fading[:, None] * state_VK + delta[:, None] * k[None, :]
    tl.store(states, state_VK, mask=of_value[:, None] & (slot > 0))
