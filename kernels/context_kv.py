"""Norm, rotate and page the drafter's context K/V of every drafter layer in one launch.

Why: the drafter attends to target hidden states ("taps") projected to K/V by each of its layers.
The projections of all layers are one GEMM; this kernel is its epilogue, one launch instead of
4 * L small ones.

Invariant: all rows are written, accepted or not. A rejected row's K/V is garbage at a position
that the next block rewrites before any attention length reaches it, so the shapes never depend
on the number accepted. Rows of an inactive request carry slot 0 (null page). Nothing is read or
written before `gdc_wait`.

Cost: reads and writes T * L*2*K*H elements; DFlash 8B (L 5, K 8, H 128, bf16) at T = 16 is
2 * 328 kB, 0.15 us at 4.46 TB/s: bound by the launch (about 2 us).

Legend: T rows, L drafter layers, K kv heads, H head dim, X = L * 2 * K * H, P positions in the
table, S page size. kv_pool: [L, 2, num_pages, S, K, H]; slot = page * S + offset.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import all_registers, on_grid, pdl_options
from graphengine.kernels.qk_norm_rope import (
    check_kernel_head_dim,
    check_norm_rope_inputs,
    norm_rope,
    norm_rope_reference,
)

HEADS_PER_PROGRAM = 8
NUM_WARPS = 4


def context_kv_write_reference_(
    kv_TX: torch.Tensor,
    k_norm_LH: torch.Tensor,
    rope_PH: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    kv_pool: torch.Tensor,
    eps: float,
) -> None:
    """`context_kv_write_` in plain torch, for any device and head dim. Mutates: kv_pool."""
    L, _, _, page_size, K, H = kv_pool.shape
    T = kv_TX.shape[0]
    kv = kv_TX.reshape(T, L, 2, K, H)
    k = norm_rope_reference(
        kv[:, :, 0].reshape(T, L * K, H),
        k_norm_LH.repeat_interleave(K, dim=0),
        rope_PH[positions_T],
        eps,
    )
    k = k.to(kv_TX.dtype).reshape(T, L, K, H)
    values = torch.stack((k.transpose(0, 1), kv[:, :, 1].transpose(0, 1)), dim=1)  # [L, 2, T, K, H]
    layer = torch.arange(L, device=kv_TX.device)[:, None, None]
    plane = torch.arange(2, device=kv_TX.device)[None, :, None]
    page, offset = (slots_T // page_size)[None, None], (slots_T % page_size)[None, None]
    kv_pool.index_put_((layer, plane, page, offset), values)


def context_kv_write_(
    kv_TX: torch.Tensor,
    k_norm_LH: torch.Tensor,
    rope_PH: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    kv_pool: torch.Tensor,
    eps: float,
) -> None:
    """Write the context K/V of all drafter layers into the drafter's paged pool.

    pool[l, 0, slot // S, slot % S, k] = rope(rmsnorm(kv[t, l, 0, k]) * k_norm[l], positions[t])
    pool[l, 1, slot // S, slot % S, k] = kv[t, l, 1, k]                (v: bit for bit)
    The arithmetic is fp32 with one rounding, at the store.

    Args:
        kv_TX: [T, L*2*K*H], row layout [L, 2, K, H], bf16/fp16/fp32; last stride 1.
        k_norm_LH: [L, H], contiguous.
        rope_PH: fp32 [P, H], contiguous; cos in [:, :H/2], sin in [:, H/2:].
        positions_T, slots_T: int64 or int32 [T]; slot 0 for rows of no request.
        kv_pool: [L, 2, num_pages, S, K, H], dtype of kv; each plane contiguous.
        eps: added to the mean square.
    Mutates: kv_pool.
    Raises: ValueError for shapes, dtypes or strides that the kernel cannot address.
    Source: DFlash's drafter: K/V of the context come from target hidden states.
    """
    L, _, _, _, K, H = kv_pool.shape
    check_norm_rope_inputs(kv_TX, k_norm_LH, rope_PH, positions_T, slots_T, kv_pool)
    if kv_TX.shape[1] != L * 2 * K * H or k_norm_LH.shape != (L, H):
        raise ValueError(
            f"context rows {tuple(kv_TX.shape)} and k_norm {tuple(k_norm_LH.shape)} do not fit a "
            f"pool of {L} layers: need [T, {L * 2 * K * H}] and [{L}, {H}]"
        )
    if not (kv_TX.is_cuda or INTERPRET):
        context_kv_write_reference_(kv_TX, k_norm_LH, rope_PH, positions_T, slots_T, kv_pool, eps)
        return
    check_kernel_head_dim(H)
    T = kv_TX.shape[0]
    if T == 0:
        return
    num_blocks = (L * 2 * K + HEADS_PER_PROGRAM - 1) // HEADS_PER_PROGRAM
    on_grid(_context_kv_write_kernel, (T, num_blocks))(
        kv_TX,
        k_norm_LH,
        rope_PH,
        positions_T,
        slots_T,
        kv_pool,
        kv_TX.stride(0),
        kv_pool.stride(0),
        kv_pool.stride(1),
        eps,
        L=L,
        K=K,
        H=H,
        HEADS=HEADS_PER_PROGRAM,
        **all_registers(NUM_WARPS),
        **pdl_options(kv_TX.device),
    )


@triton.jit
def _context_kv_write_kernel(
    kv,
    k_norm,
    rope,
    positions,
    slots,
    kv_pool,
    kv_row_stride,
    pool_layer_stride,
    pool_plane_stride,
    eps,
    L: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]  # index into [L, 2, K]
    dim = tl.arange(0, H // 2)[None, :]
    live = head < L * 2 * K
    layer = head // (2 * K)
    plane = (head // K) % 2

    row = kv + t * kv_row_stride + head * H + dim
    lo_in = tl.load(row, mask=live, other=0.0)
    hi_in = tl.load(row + H // 2, mask=live, other=0.0)
    cos_sin = rope + tl.load(positions + t).to(tl.int64) * H + dim
    weight = k_norm + layer * H + dim
    lo, hi = norm_rope(  # pyright: ignore[reportGeneralTypeIssues]
        lo_in.to(tl.float32),
        hi_in.to(tl.float32),
        tl.load(weight, mask=live, other=0.0).to(tl.float32),
        tl.load(weight + H // 2, mask=live, other=0.0).to(tl.float32),
        tl.load(cos_sin),
        tl.load(cos_sin + H // 2),
        eps,
        H,
    )
    lo = tl.where(plane == 1, lo_in, lo.to(lo_in.dtype))
    hi = tl.where(plane == 1, hi_in, hi.to(hi_in.dtype))

    slot = tl.load(slots + t).to(tl.int64)
    base = layer.to(tl.int64) * pool_layer_stride + plane.to(tl.int64) * pool_plane_stride
    kv_row = kv_pool + base + (slot * K + head % K) * H + dim
    tl.store(kv_row, lo, mask=live)
    tl.store(kv_row + H // 2, hi, mask=live)
