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

Invariant: tiles stand at multiples of `kv_tile` keys, so each lies in one page or is made of whole
pages. A row's results depend on the keys that it sees, in rising order, and on nothing else. What
nobody may see is read all the same: slots behind a row's position in the tiles from `start` on,
which a prompt's end, a reservation not used up yet or the null page leave stale. Their scores are
replaced by -inf, whatever K is; V there may be NaN or infinite, and 0 * NaN is NaN, so in those
tiles, one to three, such elements are made 0 in shared memory before the product. All rows see the
tiles before them, which are taken as they are.

Cost: 4 * H operations for each key that a row and a head see: 8.8 TFLOP at 32k tokens of 32 heads.
L2 gives 512 * H bytes a tile, 128 * 128 * 4 * H operations: 4.7 TB/s at 600 TFLOP/s.

Legend: B blocks, G = 128 rows of a block, T = B * G rows, N query heads, K kv heads, H head dim, W
pages in a row of the page table, S page size. kv_cache: [2, num_pages, S, K, H].
Source: FlashAttention-3 (Shah et al., 2024).
"""

# Gluon is not typed for a type checker.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.block_attention import LOG2_E, check_inputs
from graphengine.kernels.launch import on_grid
from graphengine.kernels.triton_internals import async_load, async_store, reinterpret
from graphengine.kernels.wide_linear import descriptor, gluon_dtype

BLOCK = 128  # rows of a block
HEAD_DIMS = (128, 256)
PAGE_SIZES = (16, 32, 64, 128)
ROWS = gl.constexpr(64)  # of a consumer: what one warpgroup multiplies at least
BAND = gl.constexpr(64)  # columns of a head that TMA lays out as one, 128 bytes
LOADER_REGISTERS = gl.constexpr(24)
CONSUMER_REGISTERS = gl.constexpr(240)
LAUNCH_REGISTERS = 168  # of each of 12 warps: 8 that multiply, 4 that the compiler makes of 2
EXPONENT = gl.constexpr(0x7F80)  # exponent of a bf16 that is NaN or infinite


class LaunchConfig(NamedTuple):
    """What may be tuned without changing a result beyond rounding."""

    kv_tile: int = 128  # keys of one iteration: 64 or 128; of heads of 256 only 64 fit
    num_stages: int = 2  # tiles of K, and of V, in shared memory
    pdl: bool = True  # programmatic dependent launch


def takes(q_TNH: torch.Tensor, kv_cache: torch.Tensor) -> bool:
    """Whether the kernel can run on these: Hopper, bf16, heads of 128 or 256, pages of 16 to
    128."""
    return (
        q_TNH.is_cuda
        and torch.cuda.get_device_capability(q_TNH.device)[0] == 9
        and q_TNH.dtype == kv_cache.dtype == torch.bfloat16
        and q_TNH.shape[2] in HEAD_DIMS
        and kv_cache.shape[2] in PAGE_SIZES
    )


def chunk_attention_reference(
    q_TNH: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table_BW: torch.Tensor,
    start_B: torch.Tensor,
) -> torch.Tensor:
    """`chunk_attention` in plain torch, fp32 inside, block after block. Returns out."""
    W = page_table_BW.shape[1]
    _, _, S, K, H = kv_cache.shape
    N = q_TNH.shape[1]
    out_TNH = torch.zeros_like(q_TNH, memory_format=torch.contiguous_format)
    row = torch.arange(BLOCK, device=q_TNH.device)
    for b, start in enumerate(start_B.tolist()):
        if start < 0:
            continue
        num_keys = min(start + BLOCK, W * S)
        pages = page_table_BW[b, : -(-num_keys // S)].long()
        k, v = kv_cache[:, pages].reshape(2, -1, K, H)[:, :num_keys].float().unbind()
        key = torch.arange(num_keys, device=q_TNH.device)
        stale = (key > start)[:, None, None] & ~v.isfinite()
        q = q_TNH[b * BLOCK : (b + 1) * BLOCK].float().unflatten(1, (K, N // K))
        scores = torch.einsum("gkmh,skh->kmgs", q, k) * H**-0.5
        p = scores.masked_fill(key > start + row[:, None], -torch.inf).softmax(-1)
        out = torch.einsum("kmgs,skh->gkmh", p, v.masked_fill(stale, 0.0))
        out_TNH[b * BLOCK : (b + 1) * BLOCK] = out.flatten(1, 2)
    return out_TNH


def chunk_attention(
    q_TNH: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table_BW: torch.Tensor,
    start_B: torch.Tensor,
    out_TNH: torch.Tensor,
    config: LaunchConfig | None = None,
) -> None:
    """Attend from each block of 128 rows to its request's cached keys, lengths read on the device.

    out[b, i, n] = softmax_j(q[b, i, n] . k[b, j, n // (N/K)] * H^-0.5) v[b, j, n // (N/K)]
    over j <= start[b] + i

    Rows behind the end of a prompt see whatever stands in the slots up to their own; no other row
    sees it. Programmatic dependent launch: only start is read before the wait.

    Args:
        q_TNH: [B*128, N, H] bf16; rows may be strided, heads may not.
        kv_cache: [2, num_pages, S, K, H], dtype of q, each plane contiguous; the blocks' own K/V is
            already in it. On CUDA S is 16, 32, 64 or 128.
        page_table_BW: int32 [B, W], last stride 1: the pages of block b's request; stride(0) may be
            0. Pages past the block's last row are not read. Keys past W * S do not exist.
        start_B: int32 [B], position of the block's first row, of which 0 is a prompt's first; -1
            marks a padded block: zeros in out, no key is read.
        out_TNH: [B*128, N, H], dtype of q, contiguous.
        config: tile size, stages, order; None takes the defaults.
    Mutates: out_TNH.
    Raises: ValueError for shapes, dtypes or strides that the kernel cannot address, and on CUDA
        where `takes` is false.
    """
    T, N, H = q_TNH.shape
    B, W = page_table_BW.shape
    _, num_pages, S, K, _ = kv_cache.shape
    check_inputs(q_TNH, kv_cache, page_table_BW, start_B, BLOCK, out_TNH)
    if not q_TNH.is_cuda:
        out_TNH.copy_(chunk_attention_reference(q_TNH, kv_cache, page_table_BW, start_B))
        return
    if not takes(q_TNH, kv_cache):
        raise ValueError(
            f"{q_TNH.dtype}, head_dim {H}, pages of {S}: the kernel needs bf16, one of "
            f"{HEAD_DIMS}, pages of {PAGE_SIZES} and a Hopper GPU; attend with another backend"
        )
    if q_TNH.stride(0) * q_TNH.element_size() % 16:
        raise ValueError(f"q has strides {q_TNH.stride()}: TMA needs rows at multiples of 16 bytes")
    config = config or LaunchConfig(kv_tile=64 if H > 128 else 128)
    dtype, rows = gluon_dtype(q_TNH), [ROWS.value, H]
    box = [min(S, config.kv_tile), BAND.value]
    k, v = (
        descriptor(plane, (num_pages * S, K * H), (K * H, 1), box, dtype)
        for plane in (kv_cache[0], kv_cache[1])
    )
    on_grid(chunk_attention_kernel, (B * N,))(
        descriptor(q_TNH, (T, N * H), (q_TNH.stride(0), 1), rows, dtype),
        k,
        v,
        descriptor(out_TNH, (T, N * H), (N * H, 1), rows, dtype),
        out_TNH,
        page_table_BW,
        start_B,
        page_table_BW.stride(0),
        W * S,
        H**-0.5 * LOG2_E,
        N=N,
        GROUP=N // K,
        S=S,
        TILE=config.kv_tile,
        STAGES=config.num_stages,
        PDL=config.pdl,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS,
        **({"launch_pdl": True} if config.pdl else {}),
    )


@gluon.jit
def _load(desc, ring, place, S: gl.constexpr):
    """A loading warp: the tiles of K, or of V, one after another."""
    ready, empty, smem = ring
    pages, num_tiles, max_kv, first_col = place
    STAGES: gl.constexpr = smem.shape[0]
    TILE: gl.constexpr = smem.shape[1]
    COLUMNS: gl.constexpr = smem.shape[2] // BAND
    BOX: gl.constexpr = desc.block_shape[0]
    BOXES: gl.constexpr = TILE // BOX
    for tile in range(num_tiles):
        rows = ()
        for i in gl.static_range(BOXES):
            key = tile * TILE + i * BOX
            page = gl.load(pages + key // S, mask=key < max_kv, other=0)
            rows = rows + (page * S + key % S,)
        slot = tile % STAGES
        mbarrier.wait(empty.index(slot), (tile // STAGES & 1) ^ 1)  # one never full is free
        mbarrier.expect(ready.index(slot), TILE * COLUMNS * BAND * 2)
        boxes = reinterpret(smem.index(slot), smem.dtype, [COLUMNS * BOXES, BOX, BAND], desc.layout)
        for i in gl.static_range(COLUMNS * BOXES):
            at = [rows[i % BOXES], first_col + i // BOXES * BAND]
            async_load(desc, at, ready.index(slot), boxes.index(i))


@gluon.jit
def _await(ring, tile, live=True):
    """Until a tile has arrived."""
    STAGES: gl.constexpr = ring[2].shape[0]
    mbarrier.wait(ring[0].index(tile % STAGES), tile // STAGES & 1, pred=live)


@gluon.jit
def _scores(q, ring, tile):
    """Sends off S = Q K^T of a tile that has arrived."""
    STAGES: gl.constexpr = ring[2].shape[0]
    TILE: gl.constexpr = ring[2].shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    zeros = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    k = ring[2].index(tile % STAGES).permute((1, 0))
    return warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _products(p, sums, ring, tile):
    """Sends off O += P V of a tile, when it has arrived."""
    _await(ring, tile)
    return warpgroup_mma(p, ring[2].index(tile % ring[2].shape[0]), sums, is_async=True)


@gluon.jit
def _free(ring, tile):
    """Says that this consumer has read a tile."""
    mbarrier.arrive(ring[1].index(tile % ring[2].shape[0]), count=1)


@gluon.jit
def _make_finite(ring, finite, tile, number, ME: gl.constexpr):
    """In a tile of V, the `number`th that not all rows see, replaces what is NaN or infinite by 0:
    each consumer half of the columns. Returns when both have."""
    smem = ring[2]
    TILE: gl.constexpr = smem.shape[1]
    BITS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, BAND], gl.int16)
    EIGHT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    _await(ring, tile)
    COLUMNS: gl.constexpr = smem.shape[2] // BAND
    all_bits = reinterpret(smem.index(tile % smem.shape[0]), gl.int16, [COLUMNS, TILE, BAND], BITS)
    for i in gl.static_range(COLUMNS // 2):
        part = all_bits.index(COLUMNS // 2 * ME + i)
        bits = part.load(EIGHT)
        part.store(gl.where((bits & EXPONENT) == EXPONENT, gl.zeros_like(bits), bits))
    fence_async_shared()
    mbarrier.arrive(finite, count=1)
    mbarrier.wait(finite, number & 1)


@gluon.jit
def _softmax(s, highest, scale_log2):
    """(exp2 of the scores less the highest, the highest so far, how what was summed shrinks)."""
    higher = gl.maximum(highest, gl.max(s, 1) * scale_log2)
    p = gl.exp2(s * scale_log2 - higher[:, None])
    return p, higher, gl.exp2(highest - higher)


@gluon.jit
def _to_bf16(x):
    """`x.to`, but by an instruction that LLVM leaves where it is: it would carry P to the next
    iteration in fp32 and round there, between the products of two tiles."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _attend(io, rings, bars, work, ME: gl.constexpr):
    """A consumer: rows 64 * ME .. of the block."""
    q_smem, out_desc, out_row, out_col = io
    k_ring, v_ring = rings
    q_ready, finite = bars
    start, num_tiles, num_full, max_kv, scale_log2 = work
    TILE: gl.constexpr = k_ring[2].shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    WIDTH: gl.constexpr = v_ring[2].shape[2]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    OF_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS)
    q = q_smem.index(ME)
    row = ME * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    limit = gl.minimum(start + row, max_kv - 1)[:, None]  # the last key that a row sees
    offset = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))[None, :]

    mbarrier.wait(q_ready, 0)
    _await(k_ring, 0)
    s = warpgroup_mma_wait(0, deps=(_scores(q, k_ring, 0),))
    _free(k_ring, 0)
    s = gl.where(offset <= limit, s, float("-inf"))  # every row sees key 0
    highest = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    p, highest, _ = _softmax(s, highest, scale_log2)
    total = gl.sum(p, 1)
    p = gl.convert_layout(_to_bf16(p), P)
    sums = gl.zeros([ROWS, WIDTH], gl.float32, SUMS)
    _await(k_ring, 1, num_tiles > 1)
    if num_full == 0:
        _make_finite(v_ring, finite, 0, 0, ME)
    for masked in gl.static_range(2):
        begin = gl.maximum(num_full, 1) if masked else 1
        for tile in range(begin, num_tiles if masked else num_full):
            s = _scores(q, k_ring, tile)
            sums = _products(p, sums, v_ring, tile - 1)
            s = warpgroup_mma_wait(1, deps=(s,))
            _free(k_ring, tile)
            if masked:
                s = gl.where(tile * TILE + offset <= limit, s, float("-inf"))
            probabilities, highest, shrink = _softmax(s, highest, scale_log2)
            total = total * shrink + gl.sum(probabilities, 1)
            # Waits here, because ptxas would wait for P V first and compute the softmax afterwards.
            _await(k_ring, tile + 1, tile + 1 < num_tiles)
            sums = warpgroup_mma_wait(0, deps=(sums,))
            _free(v_ring, tile - 1)
            sums = sums * gl.convert_layout(shrink, OF_SUMS)[:, None]
            p = gl.convert_layout(_to_bf16(probabilities), P)
            if masked:
                _make_finite(v_ring, finite, tile, tile - num_full, ME)
    sums = warpgroup_mma_wait(0, deps=(_products(p, sums, v_ring, num_tiles - 1),))
    sums = sums / gl.convert_layout(total, OF_SUMS)[:, None]
    q.store(sums.to(gl.bfloat16))  # nobody else reads these rows
    fence_async_shared()
    async_store(out_desc, [out_row + ME * ROWS, out_col], q)
    tma.store_wait(0)


@gluon.jit
def _store_zeros(out, first_row, first_col, row_stride, WIDTH: gl.constexpr):
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = first_row + gl.arange(0, 2 * ROWS, gl.SliceLayout(1, SPREAD))
    col = first_col + gl.arange(0, WIDTH, gl.SliceLayout(0, SPREAD))
    at = out + row.to(gl.int64)[:, None] * row_stride + col[None, :]
    gl.store(at, gl.zeros([2 * ROWS, WIDTH], out.dtype.element_ty, SPREAD))


@gluon.jit(do_not_specialize=["table_stride", "max_kv"])
def chunk_attention_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    out,
    page_table,
    starts,
    table_stride,
    max_kv,
    scale_log2,
    N: gl.constexpr,
    GROUP: gl.constexpr,
    S: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """One block of one query head."""
    WIDTH: gl.constexpr = q_desc.block_shape[1]
    block = (gl.num_programs(0) - 1 - gl.program_id(0)) // N  # the longest first
    head = gl.program_id(0) % N
    start = gl.load(starts + block)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first_row = block * (2 * ROWS)
    if start < 0:
        _store_zeros(out, first_row, head * WIDTH, N * WIDTH, WIDTH)
        return
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, WIDTH], q_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    finite = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    KV: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, WIDTH], k_desc.dtype)
    rings = ()
    for _ in gl.static_range(2):
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, TILE, WIDTH], KV)
        for s in gl.static_range(STAGES):
            mbarrier.init(ready.index(s), count=1)
            mbarrier.init(empty.index(s), count=2)
        rings = rings + ((ready, empty, smem),)
    mbarrier.init(q_ready, count=1)
    mbarrier.init(finite, count=2)
    fence_async_shared()
    mbarrier.expect(q_ready, 2 * ROWS * WIDTH * 2)
    for s in gl.static_range(2):
        at = [first_row + s * ROWS, head * WIDTH]
        async_load(q_desc, at, q_ready, q_smem.index(s))

    num_keys = gl.minimum(start + 2 * ROWS, max_kv)
    num_tiles = (num_keys + TILE - 1) // TILE
    num_full = gl.minimum(start + 1, max_kv) // TILE  # tiles that every row sees
    io = (q_smem, out_desc, first_row, head * WIDTH)
    bars = (q_ready, finite)
    work = (start, num_tiles, num_full, max_kv, scale_log2)
    pages = page_table + block.to(gl.int64) * table_stride
    place = (pages, num_tiles, max_kv, head // GROUP * WIDTH)
    gl.warp_specialize(
        [
            (_attend, (io, rings, bars, work, 0)),
            (_attend, (io, rings, bars, work, 1)),
            (_load, (k_desc, rings[0], place, S)),
            (_load, (v_desc, rings[1], place, S)),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS],
    )
