"""Causal attention of a prompt's blocks of 128 rows over the paged cache.

Why: a prefill is bound by products, not by bytes, so its attention wants what decode's does not:
tiles of 128 rows of one query head, wgmma, TMA, and a softmax that runs while the next tile is
multiplied. Lengths are read on the device and the grid depends on shapes alone, so that a prefill
can be a CUDA graph.

How: a CTA has 128 rows of one query head. One warp loads tiles of K, one those of V; two consumers
have 64 rows each. A consumer sends off S = Q K^T of a tile, then O += P V of the tile before, and
computes the softmax of S while P V is multiplied (FlashAttention-3's overlap within a warpgroup;
its turns between the two gained nothing here, profiles/LOG.md). Tiles that every row sees are not
masked. Neighbouring CTAs share a kv head, and the last blocks, which are the longest, come first.

Few blocks would leave multiprocessors idle: 256 rows of 32 heads are 64 CTAs. Given a workspace,
the tiles of a block are dealt to that many CTAs, each a run of neighbouring tiles, and what they
find is merged (`merge_splits`). The last has all tiles that a row ends in, and one before them if
there is one, so without a window every row sees a key of each split that has tiles. One without any
says so in its lse and reads nothing. A window leaves out the tiles that lie in front of the first
row's; a sink is where the last split's sums begin.

Invariant: tiles stand at multiples of `kv_tile` keys, so each lies in one page or is made of whole
pages. A row's results depend on the keys that it sees, in rising order, with splits on where its
block starts (`tiles_of`), and on nothing else. What nobody may see is read all the same: slots
behind a row's position in the tiles from `start` on, which a prompt's end, a reservation not used
up yet or the null page leave stale. Their scores are replaced by -inf, whatever K is; V there may
be NaN or infinite, and 0 * NaN is NaN, so in those tiles, one to three, and in those that a window
begins in, such elements are made 0 in shared memory before the product. All rows see the tiles in
between, which are taken as they are.

Cost: 4 * H operations for each key that a row and a head see: 8.8 TFLOP at 32k tokens of 32 heads.
L2 gives 512 * H bytes a tile, 128 * 128 * 4 * H operations: 4.7 TB/s at 600 TFLOP/s.

Legend: B blocks, G = 128 rows of a block, T = B * G rows, N query heads, K kv heads, H head dim, W
pages in a row of the page table, S page size. kv_cache: [2, num_pages, S, K, H].
Source: FlashAttention-3 (Shah et al., 2024).
"""

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F

from graphengine.kernels.block_attention import LOG2_E, check_inputs, check_reach
from graphengine.kernels.chunk_attention_kernels import (
    BAND,
    LAUNCH_REGISTERS,
    ROWS,
    chunk_attention_kernel,
    tiles_of,
)
from graphengine.kernels.launch import early_options, on_grid, on_hopper
from graphengine.kernels.merge_splits import (
    Workspace,
    merge_splits,
    merge_splits_reference,
    workspace,
)
from graphengine.kernels.wide_linear import descriptor, gluon_dtype

BLOCK = 128  # rows of a block
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)
MAX_SPLITS = 16


class LaunchConfig(NamedTuple):
    """What may be tuned without changing a result beyond rounding."""

    kv_tile: int = 128  # keys of one iteration: 64 or 128; of heads of 256 only 64 fit
    num_stages: int = 2  # tiles of K, and of V, in shared memory
    pdl: bool = True  # programmatic dependent launch


def takes(q_TNH: torch.Tensor, kv_cache: torch.Tensor) -> bool:
    """Whether the kernel can run on these: Hopper, bf16, heads of 64, 128 or 256, pages of 16 to
    128."""
    return (
        on_hopper(q_TNH)
        and q_TNH.dtype == kv_cache.dtype == torch.bfloat16
        and q_TNH.shape[2] in HEAD_DIMS
        and kv_cache.shape[2] in PAGE_SIZES
    )


def choose_num_splits(num_blocks: int, num_heads: int, num_sms: int) -> int:
    """The most splits with which every CTA has a multiprocessor to itself, at least 1: one holds
    one CTA, and a second round of them would take as long as the first."""
    return max(1, min(MAX_SPLITS, num_sms // (num_blocks * num_heads)))


def chunk_attention_reference(
    q_TNH: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table_BW: torch.Tensor,
    start_B: torch.Tensor,
    window: int | None = None,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """`chunk_attention` in plain torch, fp32 inside, block after block. Returns out."""
    T, N, H = q_TNH.shape
    partials = workspace(T, N, H, 1, q_TNH.device)
    read = q_TNH, kv_cache, page_table_BW, start_B
    _partials_reference_(*read, partials, BLOCK, window, sinks_N)
    return merge_splits_reference(partials).to(q_TNH.dtype)


def _partials_reference_(
    q_TNH: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table_BW: torch.Tensor,
    start_B: torch.Tensor,
    partials: Workspace,
    kv_tile: int,
    window: int | None,
    sinks_N: torch.Tensor | None,
) -> None:
    """What each split of each block finds. Mutates: partials, where a split has tiles, and lse."""
    max_kv = page_table_BW.shape[1] * kv_cache.shape[2]
    _, _, S, K, H = kv_cache.shape
    N, num_splits = q_TNH.shape[1], len(partials.lse_ZTN)
    row = torch.arange(BLOCK, device=q_TNH.device)
    partials.lse_ZTN.fill_(-torch.inf)
    for (b, start), z in itertools.product(enumerate(start_B.tolist()), range(num_splits)):
        num_keys, reach = min(start + BLOCK, max_kv), window or max_kv
        skipped = min(max(start + 1 - reach, 0), max_kv - 1) // kv_tile
        num_tiles, num_full = -(-num_keys // kv_tile), min(start + 1, max_kv) // kv_tile
        share = tiles_of.fn(z, num_tiles - skipped, max(num_full - skipped, 0), num_splits)
        first, behind = ((skipped + n) * kv_tile for n in share)
        if start < 0 or first == behind:
            continue
        pages = page_table_BW[b, first // S : -(-min(behind, num_keys) // S)].long()
        key = torch.arange(first, min(behind, num_keys), device=q_TNH.device)
        read = kv_cache[:, pages].reshape(2, -1, K, H)
        k, v = read[:, first % S :][:, : len(key)].float().unbind()
        rows = slice(b * BLOCK, (b + 1) * BLOCK)
        q = q_TNH[rows].float().unflatten(1, (K, N // K))
        scores = torch.einsum("gkmh,skh->gkms", q, k) * H**-0.5
        distance = start + row[:, None] - key
        seen = (distance >= 0) & (distance < reach)
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        v = v.masked_fill((~seen.all(0))[:, None, None] & ~v.isfinite(), 0.0)
        if sinks_N is not None and z == num_splits - 1:
            sinks = sinks_N.float().view(K, N // K, 1).expand(BLOCK, -1, -1, 1)
            scores, v = torch.cat([scores, sinks], -1), F.pad(v, (0, 0, 0, 0, 0, 1))
        p = scores.softmax(-1).nan_to_num(0.0)  # a row that sees none of the split's keys: 0
        out = torch.einsum("gkms,skh->gkmh", p, v)
        partials.out_ZTNH[z, rows] = out.flatten(1, 2)
        partials.lse_ZTN[z, rows] = scores.logsumexp(-1).flatten(1) * LOG2_E


def chunk_attention(
    q_TNH: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table_BW: torch.Tensor,
    start_B: torch.Tensor,
    out_TNH: torch.Tensor,
    partials: Workspace | None = None,
    config: LaunchConfig | None = None,
    window: int | None = None,
    sinks_N: torch.Tensor | None = None,
) -> None:
    """Attend from each block of 128 rows to its request's cached keys, lengths read on the device.

    out[b, i, n] = softmax_j(q[b, i, n] . k[b, j, n // (N/K)] * H^-0.5) v[b, j, n // (N/K)]
    over j <= start[b] + i;
    with a window over those of them with start[b] + i - j < window;
    with sinks over one more j, whose score is sinks[n] and whose value 0

    Rows behind the end of a prompt see whatever stands in the slots up to their own; no other row
    sees it. Programmatic dependent launch: only start is read before the wait. With partials there
    is a second launch, which waits for the first.

    Args:
        q_TNH: [B*128, N, H] bf16; rows may be strided, heads may not.
        kv_cache: [2, num_pages, S, K, H], dtype of q, each plane contiguous; the blocks' own K/V is
            already in it. On CUDA S is 16, 32, 64 or 128.
        page_table_BW: int32 [B, W], last stride 1: the pages of block b's request; stride(0) may be
            0. Pages past the block's last row are not read. Keys past W * S do not exist.
        start_B: int32 [B], position of the block's first row, of which 0 is a prompt's first; -1
            marks a padded block: zeros in out, no key is read.
        out_TNH: [B*128, N, H], dtype of q, contiguous.
        partials: `workspace(B * 128, N, H, Z, device)` for Z splits, of `choose_num_splits`; None:
            one, which writes out itself.
        config: tile size, stages, order; None takes the defaults.
        window: at least 1; None is the whole context.
        sinks_N: [N], any float dtype, dense; not a forward's results: weights.
    Mutates: out_TNH, partials.
    Raises: ValueError for shapes, dtypes or strides that the kernel cannot address, and on CUDA
        where `takes` is false.
    """
    T, N, H = q_TNH.shape
    B, W = page_table_BW.shape
    _, num_pages, S, K, _ = kv_cache.shape
    check_inputs(q_TNH, kv_cache, page_table_BW, start_B, BLOCK, out_TNH)
    if partials is not None and partials.out_ZTNH.shape[1:] != q_TNH.shape:
        raise ValueError(
            f"partials are for {tuple(partials.out_ZTNH.shape[1:])}, not {tuple(q_TNH.shape)}"
        )
    check_reach(window, sinks_N, N)
    config = config or LaunchConfig(kv_tile=64 if H > 128 else 128)
    if not q_TNH.is_cuda:
        read = q_TNH, kv_cache, page_table_BW, start_B
        if partials is None:
            out_TNH.copy_(chunk_attention_reference(*read, window, sinks_N))
            return
        _partials_reference_(*read, partials, config.kv_tile, window, sinks_N)
        out_TNH.copy_(merge_splits_reference(partials))
        return
    if not takes(q_TNH, kv_cache):
        raise ValueError(
            f"{q_TNH.dtype}, head_dim {H}, pages of {S}: the kernel needs bf16, one of "
            f"{HEAD_DIMS}, pages of {PAGE_SIZES} and a Hopper GPU; attend with another backend"
        )
    if q_TNH.stride(0) * q_TNH.element_size() % 16:
        raise ValueError(f"q has strides {q_TNH.stride()}: TMA needs rows at multiples of 16 bytes")
    num_splits = 1 if partials is None else len(partials.lse_ZTN)
    dtype, rows = gluon_dtype(q_TNH), [ROWS.value, H]
    box = [min(S, config.kv_tile), BAND.value]
    k, v = (
        descriptor(plane, (num_pages * S, K * H), (K * H, 1), box, dtype)
        for plane in (kv_cache[0], kv_cache[1])
    )
    on_grid(chunk_attention_kernel, (B * N * num_splits,))(
        descriptor(q_TNH, (T, N * H), (q_TNH.stride(0), 1), rows, dtype),
        k,
        v,
        descriptor(out_TNH, (T, N * H), (N * H, 1), rows, dtype),
        out_TNH,
        *(partials if num_splits > 1 and partials else (None, None)),
        page_table_BW,
        start_B,
        sinks_N,
        page_table_BW.stride(0),
        W * S,
        H**-0.5 * LOG2_E,
        N=N,
        GROUP=N // K,
        S=S,
        TILE=config.kv_tile,
        STAGES=config.num_stages,
        SPLITS=num_splits,
        WINDOW=window or 0,
        SINKS=sinks_N is not None,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS,
        **early_options(config.pdl),
    )
    if partials is not None and num_splits > 1:
        merge_splits(partials, out_TNH, config.pdl)
