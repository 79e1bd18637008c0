"""Fused q/k RMSNorm, rotary embedding and paged K/V write: everything between the qkv GEMM and
attention. Models without q/k norms (Llama) pass None for their weights.

Why: as separate ops this is 6 launches a layer (two norms, two rotations, two scatters) over
tensors of a few hundred kB; fused it is one launch, and q is the only tensor that it returns.

Invariant: every row t writes exactly the K heads of slot `slots_T[t]` in both planes and nothing
else, and never reads the cache, so the shape of the work never depends on lengths. A padded row
passes slot 0: page 0 is the null page, which nobody reads. If two live rows shared a slot, or a
live row used page 0, one token's K/V would be lost without any error.

Cost: reads T*(N+2K)*H elements and writes as many; Qwen3-8B (N 32, K 8, H 128, bf16) at T = 16 is
2 * 196 kB, 0.09 us at 4.46 TB/s: bound by the launch (about 2 us), not by memory.

Legend: T rows, N query heads, K kv heads, H head dim, E = (N + 2K) * H, P positions in the table,
S page size. kv_cache: [2, num_pages, S, K, H], [0] = K, [1] = V; slot = page * S + offset.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import all_registers, on_grid, pdl_options

HEADS_PER_PROGRAM = 8
NUM_WARPS = 4
MAX_HEAD_DIM = 256


def norm_rope_reference(
    x_TXH: torch.Tensor, weight_H: torch.Tensor | None, rope_TH: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMSNorm over H unless its weight is None, then the NeoX rotation, all in fp32; rounding is
    the caller's.

    x <- x * rsqrt(mean(x^2) + eps) * weight
    out[:H/2] = x[:H/2] * cos - x[H/2:] * sin;  out[H/2:] = x[H/2:] * cos + x[:H/2] * sin

    Args: x_TXH [T, any heads, H]; weight_H broadcastable to it; rope_TH fp32 [T, H], cos | sin.
    Returns: fp32 [T, heads, H].
    """
    half = x_TXH.shape[-1] // 2
    x = x_TXH.float()
    if weight_H is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_H.float()
    cos, sin = rope_TH[:, None, :half], rope_TH[:, None, half:]
    lo, hi = x[..., :half], x[..., half:]
    return torch.cat((lo * cos - hi * sin, hi * cos + lo * sin), dim=-1)


def sum_partials(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[Z, T, E] fp32 partials -> their sum [T, E] in `dtype`; [T, E] as it is."""
    return x.sum(0).to(dtype) if x.dim() == 3 else x


def qk_norm_rope_write_reference_(
    qkv_TE: torch.Tensor,
    q_norm_H: torch.Tensor | None,
    k_norm_H: torch.Tensor | None,
    rope_PH: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    kv_cache: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """`qk_norm_rope_write_` in plain torch, for any device and head dim. Mutates: kv_cache."""
    page_size, K, H = kv_cache.shape[2:]
    qkv_TE = sum_partials(qkv_TE, kv_cache.dtype)
    T, N = qkv_TE.shape[0], qkv_TE.shape[1] // H - 2 * K
    qkv_TXH = qkv_TE.reshape(T, N + 2 * K, H)
    rope_TH = rope_PH[positions_T]
    q = norm_rope_reference(qkv_TXH[:, :N], q_norm_H, rope_TH, eps).to(qkv_TE.dtype)
    k = norm_rope_reference(qkv_TXH[:, N : N + K], k_norm_H, rope_TH, eps).to(qkv_TE.dtype)
    # One index_put_ on the whole tensor, not one on each plane's view: Inductor then mutates the
    # graph input in place instead of rebuilding the cache around a view.
    plane = torch.arange(2, device=qkv_TE.device)[:, None]
    page, offset = slots_T // page_size, slots_T % page_size
    kv = torch.stack((k, qkv_TXH[:, N + K :]))
    kv_cache.index_put_((plane, page[None], offset[None]), kv)
    return q


def qk_norm_rope_write_(
    qkv_TE: torch.Tensor,
    q_norm_H: torch.Tensor | None,
    k_norm_H: torch.Tensor | None,
    rope_PH: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    kv_cache: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Normalise and rotate q and k, write k and v into the paged cache, return q.

    q[t,n] = rope(rmsnorm(qkv[t, n]) * q_norm, positions[t])           n < N
    cache[0, slot // S, slot % S, k] = rope(rmsnorm(qkv[t, N+k]) * k_norm, positions[t])
    cache[1, slot // S, slot % S, k] = qkv[t, N+K+k]                   (v: bit for bit)
    The arithmetic is fp32 with one rounding, at the store.

    Programmatic dependent launch: positions, slots, rope and the norms' weights are read before the
    kernels in front have finished, qkv after the wait. Those that may still run then, back to one
    that had waited before it let its successor start (a GEMM, an ordinary launch), may write qkv,
    but not these.

    Args:
        qkv_TE: [T, (N+2K)*H], rows q | k | v, bf16/fp16/fp32; last stride 1, row stride free.
            Or fp32 partials [Z, T, (N+2K)*H] of a split-K GEMM, which are added up here.
        q_norm_H, k_norm_H: [H], contiguous; None, both: no norm, eps is not used.
        rope_PH: fp32 [P, H], contiguous; cos in [:, :H/2], sin in [:, H/2:].
        positions_T: int64 or int32 [T], 0 <= position < P (not checked on the device).
        slots_T: int64 or int32 [T], distinct except slot 0, which padded rows share.
        kv_cache: [2, num_pages, S, K, H], dtype of qkv; each plane contiguous. Inside
            torch.compile it must be an argument of the compiled function: Inductor copies the
            whole layer twice if `pool[l]` is taken inside (seen in torch 2.13's CPU code).
        eps: added to the mean square.
    Returns: q_TNH [T, N, H], contiguous, dtype of qkv.
    Mutates: kv_cache.
    Raises: ValueError for shapes, dtypes or strides that the kernel cannot address.
    Source: Qwen3's attention (per-head q_norm/k_norm before the rotation).
    """
    K, H = kv_cache.shape[3:]
    num_splits = qkv_TE.shape[0] if qkv_TE.dim() == 3 else 1
    rows_TE = qkv_TE[0] if qkv_TE.dim() == 3 else qkv_TE
    check_norm_rope_inputs(
        rows_TE, k_norm_H, rope_PH, positions_T, slots_T, kv_cache, partial=qkv_TE.dim() == 3
    )
    T, E = rows_TE.shape
    N = E // H - 2 * K
    if N <= 0 or E % H:
        raise ValueError(
            f"qkv has {E} columns; need (N + 2*{K}) * {H} with N >= 1: "
            "pack the projections as q | k | v"
        )
    shapes = [None if norm is None else tuple(norm.shape) for norm in (q_norm_H, k_norm_H)]
    if shapes not in ([(H,)] * 2, [None] * 2):
        raise ValueError(f"q_norm {shapes[0]} and k_norm {shapes[1]} must be [{H}], or both None")
    if not (qkv_TE.is_cuda or INTERPRET):
        return qk_norm_rope_write_reference_(
            qkv_TE, q_norm_H, k_norm_H, rope_PH, positions_T, slots_T, kv_cache, eps
        )
    check_kernel_head_dim(H)
    q_TNH = torch.empty((T, N, H), dtype=kv_cache.dtype, device=qkv_TE.device)
    if T == 0:
        return q_TNH
    num_heads = N + 2 * K
    grid = (T, (num_heads + HEADS_PER_PROGRAM - 1) // HEADS_PER_PROGRAM)
    on_grid(_qk_norm_rope_write_kernel, grid)(
        qkv_TE,
        q_norm_H,
        k_norm_H,
        rope_PH,
        positions_T,
        slots_T,
        kv_cache,
        q_TNH,
        rows_TE.stride(0),
        qkv_TE.stride(0),
        kv_cache.stride(0),
        eps,
        Z=num_splits,
        N=N,
        K=K,
        H=H,
        HEADS=HEADS_PER_PROGRAM,
        **all_registers(NUM_WARPS),
        **pdl_options(qkv_TE.device),
    )
    return q_TNH


def check_kernel_head_dim(H: int) -> None:
    """Raises: ValueError unless H is an even power of two that one program can hold."""
    if H < 2 or H > MAX_HEAD_DIM or H & (H - 1):
        raise ValueError(
            f"head_dim {H}: the Triton kernel needs a power of two from 2 to {MAX_HEAD_DIM}; "
            "run on the CPU, where the torch reference takes any even head_dim"
        )


def check_norm_rope_inputs(
    x_TX: torch.Tensor,
    k_norm: torch.Tensor | None,
    rope_PH: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    kv: torch.Tensor,
    partial: bool = False,
) -> None:
    """Raises: ValueError for what no path supports (shared with context_kv)."""
    T, H, page_size = x_TX.shape[0], kv.shape[-1], kv.shape[-3]
    if H % 2:
        raise ValueError(f"head_dim {H} is odd: the half-split rotation needs an even head_dim")
    if x_TX.stride(1) != 1:
        raise ValueError(f"rows have stride {x_TX.stride(1)} inside; make the last dim contiguous")
    wanted = torch.float32 if partial else kv.dtype
    if x_TX.dtype != wanted:
        raise ValueError(
            f"rows are {x_TX.dtype} but the cache is {kv.dtype}; use one dtype, outside of "
            "torch.autocast, or float32 partials"
        )
    if rope_PH.dtype != torch.float32 or rope_PH.shape[1] != H:
        raise ValueError(
            f"rope table is {rope_PH.dtype} {tuple(rope_PH.shape)}; need float32 [P, {H}]"
        )
    if positions_T.shape != (T,) or slots_T.shape != (T,):
        raise ValueError(
            f"positions {tuple(positions_T.shape)} and slots {tuple(slots_T.shape)}: need [{T}]"
        )
    # Pages may not be strided apart: a slot is turned into an address by one multiplication.
    token = kv.shape[-2] * H
    if kv.stride()[-4:] != (page_size * token, token, H, 1):
        raise ValueError(f"cache strides {kv.stride()}: a plane [num_pages, S, K, H] is contiguous")
    for name, tensor in (("k_norm", k_norm), ("rope", rope_PH)):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; make it contiguous")
    for name, tensor in (("positions", positions_T), ("slots", slots_T)):
        if tensor.stride(0) != 1:
            raise ValueError(f"{name} has stride {tensor.stride(0)}; make it contiguous")


@triton.jit
def norm_rope(lo, hi, w_lo, w_hi, cos, sin, eps, H: tl.constexpr):
    """RMSNorm and rotation of a tile of heads held as two fp32 halves [HEADS, H/2]."""
    rstd = tl.rsqrt((tl.sum(lo * lo, axis=1) + tl.sum(hi * hi, axis=1)) / H + eps)[:, None]
    lo = lo * rstd * w_lo
    hi = hi * rstd * w_hi
    return lo * cos - hi * sin, hi * cos + lo * sin


@triton.jit
def _qk_norm_rope_write_kernel(
    qkv,
    q_norm,
    k_norm,
    rope,
    positions,
    slots,
    kv_cache,
    q_out,
    qkv_row_stride,
    split_stride,
    cache_plane_stride,
    eps,
    Z: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        # The next kernel may start and fetch what does not depend on this one; it waits before
        # it reads q or the cache.
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, H // 2)[None, :]
    is_q = (head < N)[:, None]
    is_v = (head >= N + K)[:, None]
    live = (head < N + 2 * K)[:, None]
    # Before the wait: no kernel that may still run writes these.
    cos_sin = rope + tl.load(positions + t).to(tl.int64) * H + dim
    cos, sin = tl.load(cos_sin), tl.load(cos_sin + H // 2)
    if q_norm is not None:
        w_lo = tl.where(is_q, tl.load(q_norm + dim), tl.load(k_norm + dim)).to(tl.float32)
        w_hi = tl.where(is_q, tl.load(q_norm + dim + H // 2), tl.load(k_norm + dim + H // 2))
    slot = tl.load(slots + t).to(tl.int64)
    if PDL:
        gdc_wait()

    row = qkv + t * qkv_row_stride + head[:, None] * H + dim
    lo_in = tl.load(row, mask=live, other=0.0)
    hi_in = tl.load(row + H // 2, mask=live, other=0.0)
    for split in tl.static_range(1, Z):  # pyright: ignore[reportGeneralTypeIssues]
        lo_in += tl.load(row + split * split_stride, mask=live, other=0.0)
        hi_in += tl.load(row + split * split_stride + H // 2, mask=live, other=0.0)
    lo, hi = lo_in.to(tl.float32), hi_in.to(tl.float32)
    if q_norm is not None:
        lo, hi = norm_rope(  # pyright: ignore[reportGeneralTypeIssues]
            lo, hi, w_lo, w_hi.to(tl.float32), cos, sin, eps, H
        )
    else:
        lo, hi = lo * cos - hi * sin, hi * cos + lo * sin
    dtype = kv_cache.dtype.element_ty
    lo = tl.where(is_v, lo_in.to(dtype), lo.to(dtype))
    hi = tl.where(is_v, hi_in.to(dtype), hi.to(dtype))

    q_row = q_out + (t * N + head[:, None]) * H + dim
    tl.store(q_row, lo, mask=is_q)
    tl.store(q_row + H // 2, hi, mask=is_q)

    kv_head = tl.where(is_v, head[:, None] - N - K, head[:, None] - N)
    plane = tl.where(is_v, 1, 0).to(tl.int64) * cache_plane_stride
    kv_row = kv_cache + plane + (slot * K + kv_head) * H + dim
    tl.store(kv_row, lo, mask=live & (head >= N)[:, None])
    tl.store(kv_row + H // 2, hi, mask=live & (head >= N)[:, None])
