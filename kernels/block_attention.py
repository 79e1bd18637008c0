"""Attention of one block of G query rows per request over the paged cache, split over the keys.

Why: a planned attention needs the lengths on the host before every launch. Here the lengths are
read on the device and the grid depends on shapes alone, so a whole decode step (draft, verify,
accept) can be one CUDA graph with nothing to plan. At batch 1 a kv head's 16 * 4 packed rows are
one tile, so the parallelism comes from splitting the keys (flash-decoding).

Invariant: which keys a split reads is a function of the device length, the tile and the number
of splits; both kernels compute it with the same `_split_range`. A split without keys writes
nothing and the merge reads nothing of it, so neither stale workspace nor a cache poisoned past
the length can reach the output. If the two disagreed, the merge would read another step's partial.

Cost: 2 * kv_len * K * H elements are read per request: 4.2 MB at 1k for K 8, H 128, bf16, 0.9 us
at 4.46 TB/s; 33.5 MB and 7.5 us at 8k. Partials (fp32, live splits * T * N * H) stay in L2. Two
small kernels inside a CUDA graph cost about 6-8 us before any byte: predicted, batch 1, 7-9 us at
1k, 9-11 us at 4k, 14-17 us at 8k.

Legend: B requests, G block length, T = B * G rows, N query heads, K kv heads, H head dim, W pages
in a row of the page table, S page size, Z splits. kv_cache: [2, num_pages, S, K, H].
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = 1.4426950408889634
MAX_SPLITS = 64
CTAS_PER_SM = 2
MAX_ROWS = 64  # packed rows (G * N/K) in one tile; more become more programs
MIN_ROWS = 16  # the least that a tensor-core dot takes
INTERPRET = bool(knobs.runtime.interpret)


class LaunchConfig(NamedTuple):
    """What may be tuned without changing a result beyond rounding."""

    kv_tile: int = 64  # keys of one iteration; halved for fp32
    num_warps: int = 4
    num_stages: int = 3
    merge_warps: int = 4
    pdl: bool = False  # programmatic dependent launch of the merge (Hopper and later)


DEFAULT_CONFIG = LaunchConfig()


class Workspace(NamedTuple):
    """Partial results of the splits; contents never outlive one call."""

    out_ZTNH: torch.Tensor  # fp32, normalised within the split
    lse_ZTN: torch.Tensor  # fp32, log2 of the split's sum of exponentials


def workspace(
    num_requests: int,
    block_length: int,
    num_heads: int,
    head_dim: int,
    num_splits: int,
    device: torch.device | str,
) -> Workspace:
    """Buffers for `block_attention`: out [Z, B*G, N, H] and lse [Z, B*G, N], both fp32."""
    if not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits {num_splits}: choose 1 to {MAX_SPLITS}")
    shape = (num_splits, num_requests * block_length, num_heads)
    return Workspace(
        out_ZTNH=torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
        lse_ZTN=torch.empty(shape, dtype=torch.float32, device=device),
    )


def choose_num_splits(num_requests: int, num_kv_heads: int, num_sms: int) -> int:
    """Splits that give each of `num_sms` multiprocessors about CTAS_PER_SM programs."""
    return max(1, min(MAX_SPLITS, CTAS_PER_SM * num_sms // (num_requests * num_kv_heads)))


def block_attention_reference(
    q_TNH: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table_BW: torch.Tensor,
    start_B: torch.Tensor,
    block_length: int,
    causal: bool,
) -> torch.Tensor:
    """`block_attention` in plain torch, fp32 inside, over the whole page table. Returns out."""
    B, W = page_table_BW.shape
    _, _, S, K, H = kv_cache.shape
    N = q_TNH.shape[1]
    kv = kv_cache[:, page_table_BW.long()].reshape(2, B, W * S, K, H)
    key = torch.arange(W * S, device=q_TNH.device)
    row = torch.arange(block_length, device=q_TNH.device)
    length = start_B.long()[:, None] + (row + 1 if causal else torch.full_like(row, block_length))
    length = torch.where(start_B[:, None] > 0, length, 0)  # [B, G]
    live = key < length.amax(1)[:, None]  # [B, W*S]; where() because NaN * 0 is NaN
    k, v = torch.where(live[None, :, :, None, None], kv.float(), 0.0).unbind(0)
    q = q_TNH.float().reshape(B, block_length, K, N // K, H)
    scores = torch.einsum("bgkmh,bskh->bkmgs", q, k) * H**-0.5
    seen = key < length[:, None, None, :, None]
    p = torch.where(seen, scores, -torch.inf).softmax(-1).nan_to_num(0.0)  # padded rows: 0
    return torch.einsum("bkmgs,bskh->bgkmh", p, v).reshape(-1, N, H).to(q_TNH.dtype)


def block_attention(
    q_TNH: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table_BW: torch.Tensor,
    start_B: torch.Tensor,
    block_length: int,
    causal: bool,
    out_TNH: torch.Tensor,
    workspace: Workspace,
    config: LaunchConfig = DEFAULT_CONFIG,
) -> None:
    """Attend from each request's block to its cached keys, with lengths read on the device.

    out[b, i, n] = softmax_j(q[b, i, n] . k[b, j, n // (N/K)] * H^-0.5) v[b, j, n // (N/K)]
    over j < start[b] + i + 1 if causal, j < start[b] + G otherwise

    Args:
        q_TNH: [B*G, N, H] bf16, fp16 or fp32; rows may be strided, heads may not.
        kv_cache: [2, num_pages, S, K, H], dtype of q, each plane contiguous; the block's own
            K/V is already in it.
        page_table_BW: int32 [B, W], last stride 1. Keys past W * S do not exist.
        start_B: int32 [B], position of the block's first row; 0 marks a padded request, whose
            rows become zeros.
        block_length: G; G = 1 is plain decode.
        out_TNH: [B*G, N, H], dtype of q, contiguous.
        workspace: from `workspace(B, G, N, H, num_splits, device)`; unused by the reference.
        config: tile sizes, warps, stages.
    Mutates: out_TNH, workspace.
    Raises: ValueError for shapes, dtypes or strides that the kernel cannot address.
    Source: flash-decoding (split keys, merge by log-sum-exp); exp2 softmax as in FlashAttention.
    """
    T, N, H = q_TNH.shape
    B, W = page_table_BW.shape
    K = kv_cache.shape[3]
    _check_inputs(q_TNH, kv_cache, page_table_BW, start_B, block_length, out_TNH, workspace)
    if not (q_TNH.is_cuda or INTERPRET):
        out_TNH.copy_(
            block_attention_reference(q_TNH, kv_cache, page_table_BW, start_B, block_length, causal)
        )
        return
    if H < 16 or H > 256 or H & (H - 1):
        raise ValueError(f"head_dim {H}: the Triton kernel needs a power of two from 16 to 256")
    num_splits = workspace.lse_ZTN.shape[0]
    kv_tile = config.kv_tile // 2 if q_TNH.dtype == torch.float32 else config.kv_tile
    packed_rows = block_length * (N // K)
    rows = min(MAX_ROWS, max(MIN_ROWS, 1 << (packed_rows - 1).bit_length()))
    row_tiles = (packed_rows + rows - 1) // rows
    lengths = (start_B, W * kv_cache.shape[2])
    shape = {"N": N, "H": H, "G": block_length, "TILE": kv_tile, "SPLITS": num_splits}
    _partial_kernel[(num_splits, K * row_tiles, B)](
        q_TNH,
        kv_cache,
        page_table_BW,
        *lengths,
        workspace.out_ZTNH,
        workspace.lse_ZTN,
        q_TNH.stride(0),
        kv_cache.stride(0),
        page_table_BW.stride(0),
        H**-0.5 * LOG2_E,
        **shape,
        K=K,
        S=kv_cache.shape[2],
        CAUSAL=causal,
        ROWS=rows,
        ROW_TILES=row_tiles,
        DOT_FP32=INTERPRET,
        PDL=config.pdl,
        num_warps=config.num_warps,  # pyright: ignore[reportCallIssue]
        num_stages=config.num_stages,  # pyright: ignore[reportCallIssue]
    )
    merge_launch = {"launch_pdl": True} if config.pdl else {}
    _merge_kernel[(T, N)](
        workspace.out_ZTNH,
        workspace.lse_ZTN,
        *lengths,
        out_TNH,
        T,
        **shape,
        SPLITS_POW2=1 << (num_splits - 1).bit_length(),
        PDL=config.pdl,
        num_warps=config.merge_warps,  # pyright: ignore[reportCallIssue]
        **merge_launch,
    )


def _check_inputs(
    q_TNH: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table_BW: torch.Tensor,
    start_B: torch.Tensor,
    block_length: int,
    out_TNH: torch.Tensor,
    workspace: Workspace,
) -> None:
    T, N, H = q_TNH.shape
    B = page_table_BW.shape[0]
    S, K = kv_cache.shape[2:4]
    if block_length < 1 or B * block_length != T:
        raise ValueError(f"q has {T} rows; need {B} requests * block_length {block_length}")
    if N % K or kv_cache.shape[4] != H:
        raise ValueError(
            f"{N} query heads of {H} do not group over a cache of {K} heads of {kv_cache.shape[4]}"
        )
    if kv_cache.dtype != q_TNH.dtype or out_TNH.dtype != q_TNH.dtype:
        raise ValueError(f"q {q_TNH.dtype}, cache {kv_cache.dtype}, out {out_TNH.dtype}: use one")
    if q_TNH.stride()[1:] != (H, 1):
        raise ValueError(f"q has strides {q_TNH.stride()}; heads must be contiguous in a row")
    if kv_cache.stride()[1:] != (S * K * H, K * H, H, 1):
        raise ValueError(f"cache strides {kv_cache.stride()}: each plane must be contiguous")
    if out_TNH.shape != q_TNH.shape or not out_TNH.is_contiguous():
        raise ValueError(f"out {tuple(out_TNH.shape)} must be contiguous {tuple(q_TNH.shape)}")
    for name, x, shape in (("page_table", page_table_BW, None), ("start", start_B, (B,))):
        if x.dtype != torch.int32 or x.stride(-1) != 1 or (shape and x.shape != shape):
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}; need int32, last stride 1")
    if workspace.out_ZTNH.shape[1:] != (T, N, H):
        raise ValueError(f"workspace is for {tuple(workspace.out_ZTNH.shape[1:])}, not {(T, N, H)}")


@triton.jit
def _split_range(start, split, max_kv, G: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr):
    """(kv length, first tile, end tile) of a split; a padded request has length 0."""
    kv_len = tl.where(start > 0, tl.minimum(start + G, max_kv), 0)
    num_tiles = (kv_len + TILE - 1) // TILE
    return kv_len, split * num_tiles // SPLITS, (split + 1) * num_tiles // SPLITS


@triton.jit
def _dot(a, b, acc, DOT_FP32: tl.constexpr):
    """a @ b + acc. The interpreter multiplies bf16 as raw uint16 (triton 3.6, 3.7: create_dot in
    runtime/interpreter.py), so it is given the same values in fp32; delete when it is fixed."""
    if DOT_FP32:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _partial_kernel(
    q,
    kv_cache,
    page_table,
    starts,
    max_kv,
    out,
    lse,
    q_row_stride,
    plane_stride,
    table_stride,
    scale_log2,
    N: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    DOT_FP32: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    split = tl.program_id(0)
    kv_head = tl.program_id(1) // ROW_TILES
    b = tl.program_id(2)
    start = tl.load(starts + b)
    kv_len, first, end = _split_range(  # pyright: ignore[reportGeneralTypeIssues]
        start, split, max_kv, G, TILE, SPLITS
    )
    if first >= end:
        return

    GROUP: tl.constexpr = N // K
    row = (tl.program_id(1) % ROW_TILES) * ROWS + tl.arange(0, ROWS)
    i = row // GROUP
    t = (b * G + i).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    live = i < G
    dim = tl.arange(0, H)
    limit = start + i + 1 if CAUSAL else tl.zeros_like(i) + kv_len
    q_tile = tl.load(
        q + t[:, None] * q_row_stride + head[:, None] * H + dim[None, :],
        mask=live[:, None],
        other=0.0,
    )
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, H], tl.float32)
    for tile in range(first, end):
        key = tile * TILE + tl.arange(0, TILE)
        cached = key < kv_len
        page = tl.load(page_table + b * table_stride + key // S, mask=cached, other=0)
        token = (page.to(tl.int64) * S + key % S) * (K * H) + kv_head * H
        address = kv_cache + token[:, None] + dim[None, :]
        k = tl.load(address, mask=cached[:, None], other=0.0)
        scores = (
            _dot(q_tile, tl.trans(k), tl.zeros([ROWS, TILE], tl.float32), DOT_FP32) * scale_log2
        )
        seen = (key[None, :] < limit[:, None]) & cached[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        # A causal row may see nothing of this split: subtract 0 there, not -inf (NaN).
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        p = tl.exp2(scores - shift[:, None])
        alpha = tl.exp2(highest - shift)
        total = total * alpha + tl.sum(p, axis=1)
        # Masked, because a probability of 0 times a stale NaN is NaN.
        v = tl.load(address + plane_stride, mask=cached[:, None], other=0.0)
        acc = _dot(p.to(v.dtype), v, acc * alpha[:, None], DOT_FP32)
        highest = new_highest

    empty = total == 0.0
    partial = (split * tl.num_programs(2) * G + t) * N + head
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    tl.store(out + partial[:, None] * H + dim[None, :], acc, mask=live[:, None])
    row_lse = tl.where(empty, float("-inf"), highest + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(lse + partial, row_lse, mask=live)


@triton.jit
def _merge_kernel(
    partial_out,
    partial_lse,
    starts,
    max_kv,
    out,
    T,
    N: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_POW2: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, H)
    split = tl.arange(0, SPLITS_POW2)
    start = tl.load(starts + t // G)
    _, first, end = _split_range(  # pyright: ignore[reportGeneralTypeIssues]
        start, split, max_kv, G, TILE, SPLITS
    )
    written = (split < SPLITS) & (first < end)
    if PDL:
        gdc_wait()
    partial = (split * T + t) * N + head
    row_lse = tl.load(partial_lse + partial, mask=written, other=float("-inf"))
    weight = tl.exp2(row_lse - tl.where(start > 0, tl.max(row_lse, axis=0), 0.0))
    tile = tl.load(
        partial_out + partial[:, None] * H + dim[None, :], mask=written[:, None], other=0.0
    )
    total = tl.where(start > 0, tl.sum(weight, axis=0), 1.0)
    merged = tl.sum(tile * weight[:, None], axis=0) / total
    tl.store(out + (t * N + head) * H + dim, merged.to(out.dtype.element_ty))
