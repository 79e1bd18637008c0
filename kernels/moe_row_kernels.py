"""The kernels of moe_row.py, which says what they compute, what each may read when, and why.

Legend: E experts, K of them the row's, D hidden, I expert width; .._PAD: the next power of two.
I is the width of moe.py's legend, which lint takes for a 1 (E741).
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.clamped_swiglu import activate

# An expert's weights are read once a step; what waits in L2 for the next kernel shall outlive them.
ONCE = tl.constexpr("evict_first")


@triton.jit
def _rows_of(
    matrix, n, N: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, EVICTION: tl.constexpr
):
    """Rows n of a matrix [N, D], to registers."""
    d = tl.arange(0, D_PAD)[None, :]
    live = (n < N)[:, None] & (d < D)
    at = matrix + n.to(tl.int64)[:, None] * D + d
    return tl.load(at, mask=live, other=0.0, eviction_policy=EVICTION)


@triton.jit
def _times(rows, vector, D: tl.constexpr, D_PAD: tl.constexpr):
    """rows @ vector, in float32."""
    d = tl.arange(0, D_PAD)
    x = tl.load(vector + d, mask=d < D, other=0.0).to(tl.float32)
    return tl.sum(rows.to(tl.float32) * x[None, :], axis=1)


@triton.jit
def _logits(logits, E: tl.constexpr, E_PAD: tl.constexpr, COPIES: tl.constexpr):
    """[COPIES, E_PAD] float32: with one for each warp, their largest is found without the others.
    Read past L1: the kernel that wrote them may just have ended."""
    e = tl.zeros([COPIES, 1], tl.int32) + tl.arange(0, E_PAD)[None, :]
    return tl.load(logits + e, mask=e < E, other=float("-inf"), cache_modifier=".cg").to(tl.float32)


@triton.jit
def _sort_keys(x, E_PAD: tl.constexpr):
    """Integers in the order of the logits, which have 16 bits, NaN as -inf and -0 as 0; of equal
    ones the lower expert's is larger."""
    x = tl.where(x == 0.0, 0.0, tl.where(x != x, float("-inf"), x))
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits & -E_PAD) | (E_PAD - 1 - tl.arange(0, E_PAD))[None, :]


@triton.jit
def _best(keys, num):
    """(The num-th largest of a row's distinct keys, 1 is the largest; keys without it and those
    above.)"""
    best = tl.max(keys, axis=1, keep_dims=True)
    for _ in range(1, num):
        keys = tl.where(keys == best, -0x80000000, keys)
        best = tl.max(keys, axis=1, keep_dims=True)
    return best, tl.where(keys == best, -0x80000000, keys)


@triton.jit
def _expert(best, E_PAD: tl.constexpr):
    """The expert of a key, of which there may be copies."""
    return (E_PAD - 1 - (tl.max(best) & (E_PAD - 1))).to(tl.int64)


@triton.jit
def router_kernel(
    x,
    router,
    gate,
    bias,
    logits,
    gates,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    t = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0) * ROWS < E:
        rows = _rows_of(router, n, E, D, D_PAD, "")
        if bias is not None:
            added = tl.load(bias + n, mask=n < E, other=0.0).to(tl.float32)
        if PDL:
            gdc_wait()
        y = _times(rows, x + t * D, D, D_PAD)
        if bias is not None:
            y += added
        tl.store(logits + t * E + n, y.to(x.dtype.element_ty), mask=n < E)
    else:
        n = tl.arange(0, ROWS)
        rows = _rows_of(gate, n, 1, D, D_PAD, "")
        if PDL:
            gdc_wait()
        y = _times(rows, x + t * D, D, D_PAD)
        tl.store(gates + t + n, y.to(x.dtype.element_ty), mask=n < 1)


@triton.jit
def norm_router_kernel(
    h,
    update,
    norm,
    router,
    gate,
    bias,
    h_out,
    x_out,
    logits,
    gates,
    eps,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    Z: tl.constexpr,
    PDL: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    n = first + tl.arange(0, ROWS)
    if first < E:
        rows = _rows_of(router, n, E, D, D_PAD, "")
    else:
        rows = _rows_of(gate, n - first, 1, D, D_PAD, "")
    d = tl.arange(0, D_PAD)
    live = d < D
    w = tl.load(norm + d, mask=live, other=0.0).to(tl.float32)
    if bias is not None:
        added = tl.load(bias + n, mask=n < E, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    y = tl.load(update + d, mask=live, other=0.0).to(tl.float32)
    for z in tl.static_range(1, Z):
        y += tl.load(update + z * D + d, mask=live, other=0.0)
    y = (tl.load(h + d, mask=live, other=0.0).to(tl.float32) + y).to(h.dtype.element_ty)
    if first == 0:
        tl.store(h_out + d, y, mask=live)
    y = y.to(tl.float32)
    x = (y * tl.rsqrt(tl.sum(y * y, axis=0) / D + eps) * w).to(h.dtype.element_ty)
    if first == 0:
        tl.store(x_out + d, x, mask=live)
    z = tl.sum(rows.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
    if bias is not None:
        z += added
    z = z.to(h.dtype.element_ty)
    if first < E:
        tl.store(logits + n, z, mask=n < E)
    else:
        tl.store(gates + n - first, z, mask=n == first)


@triton.jit
def gate_up_row_kernel(
    x,
    logits,
    gate_up,
    shared,
    bias,
    out,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    K: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    ROWS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    COPIES: tl.constexpr,
    PDL: tl.constexpr,
):
    slot = tl.program_id(1)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if slot == K:
        gate = _rows_of(shared, i, I, D, D_PAD, ONCE)
        up = _rows_of(shared + I * D, i, I, D, D_PAD, ONCE)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        g, u = _times(gate, x, D, D_PAD), _times(up, x, D, D_PAD)
        y = (g / (1.0 + tl.exp(-g)) * u).to(out.dtype.element_ty)
        tl.store(out + slot * I + i, y, mask=i < I)
    else:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        keys = _sort_keys(_logits(logits, E, E_PAD, COPIES), E_PAD)
        e = _expert(_best(keys, slot + 1)[0], E_PAD)
        gate = _rows_of(gate_up + e * (2 * I * D), i, I, D, D_PAD, ONCE)
        up = _rows_of(gate_up + e * (2 * I * D) + I * D, i, I, D, D_PAD, ONCE)
        if bias is not None:
            gate_bias = tl.load(bias + e * (2 * I) + i, mask=i < I, other=0.0).to(tl.float32)
            up_bias = tl.load(bias + e * (2 * I) + I + i, mask=i < I, other=0.0).to(tl.float32)
        g, u = _times(gate, x, D, D_PAD), _times(up, x, D, D_PAD)
        if bias is not None:
            g += gate_bias
            u += up_bias
        y = activate(g, u, ALPHA, LIMIT).to(out.dtype.element_ty)
        tl.store(out + slot * I + i, y, mask=i < I)


@triton.jit
def down_row_kernel(
    act,
    logits,
    gate,
    down,
    shared,
    bias,
    out,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    I_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    NORMALISE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    slot = tl.program_id(1)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if slot == K:
        rows = _rows_of(shared, n, D, I, I_PAD, ONCE)
        g = tl.load(gate, cache_modifier=".cg").to(tl.float32)
        if PDL:
            gdc_wait()
        y = _times(rows, act + slot * I, I, I_PAD) / (1.0 + tl.exp(-g))
        tl.store(out + slot * D + n, y, mask=n < D)
    else:
        x = _logits(logits, E, E_PAD, 1)
        keys = _sort_keys(x, E_PAD)
        best, others = _best(keys, slot + 1)
        e = _expert(best, E_PAD)
        rows = _rows_of(down + e * (D * I), n, D, I, I_PAD, ONCE)
        if bias is not None:
            added = tl.load(bias + e * D + n, mask=n < D, other=0.0).to(tl.float32)
        p = tl.exp(x - tl.max(x, axis=1, keep_dims=True))
        p = p / tl.sum(p, axis=1, keep_dims=True)
        weights = tl.sum(tl.where(keys == best, p, 0.0), axis=1)
        if NORMALISE:
            last = best
            if slot < K - 1:
                last, _ = _best(others, K - 1 - slot)
            weights = weights / tl.sum(tl.where(keys >= last, p, 0.0), axis=1)
        weight = tl.max(weights)
        weight = weight.to(act.dtype.element_ty).to(tl.float32)
        if PDL:
            gdc_wait()
        y = _times(rows, act + slot * I, I, I_PAD)
        if bias is not None:
            y += added
        y *= weight
        tl.store(out + slot * D + n, y, mask=n < D)
