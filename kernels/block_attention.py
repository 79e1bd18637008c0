"""Attention of one block of G query rows per request over the paged cache, split over the keys.

Why: a planned attention needs the lengths on the host before every launch. Here the lengths are
read on the device and the grid depends on shapes alone, so a whole decode step (draft, verify,
accept) can be one CUDA graph with nothing to plan. At batch 1 a kv head's 16 * 4 packed rows are
one tile, so the parallelism comes from splitting the keys (flash-decoding).

How: keys come in chunks of `config.chunk`; chunk c belongs to split c % live, where `live` is
computed from the length on the device. A split past `live` exits at once. With one live split
(a short request, or SPLITS 1) the split writes the output itself. Otherwise the splits count their
arrivals, and each then merges its share of the partials' rows.

With a window (WINDOW, a constexpr; 0 is none) chunks before the first row's window are left out:
chunk 0 is the one that holds the first key that any row sees.

Invariant: which keys a split reads, and which splits exist, is a function of the device length
alone (`_live_splits`). A split without keys writes nothing and nothing of it is read, so neither
stale workspace nor a cache poisoned past the length can reach the output.
Partials are added in the order of their splits by whoever merges: results do not depend on timing.

No deadlock: a split waits for the others at most `config.polls` times. One that gives up says so
in the word that counts the arrivals, and the last to arrive, which never waits, merges its rows.

Cost: 2 * kv_len * K * H elements are read per request: 4.2 MB at 1k for K 8, H 128, bf16, 0.95 us
at 4.4 TB/s; 33.5 MB and 7.6 us at 8k. Partials (fp32, live splits * T * N * H) stay in L2.
Measured on an H200 at ~380 keys, inside a full step: 9.5 us at batch 1, by four warps
(profiles/results/2026-11-21-h200-8b-profile-full.json). At batch 16 one split has all keys of a
request: alone 14.2 us at 400 keys (`choose_config`).

Legend: B requests, G block length, T = B * G rows, N query heads, K kv heads, H head dim, W pages
in a row of the page table, S page size, Z splits. kv_cache: [2, num_pages, S, K, H].
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from graphengine.kernels.arrival_kernels import MAX_SPLITS
from graphengine.kernels.block_attention_kernels import LOG2_E, block_attention_kernel
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import all_registers, early_options, on_grid, supports_pdl
from graphengine.kernels.output_gate import check_gate, output_gate_reference
from graphengine.kernels.specialized_attention import SpecializedConfig, launch, takes

MAX_ROWS = 64  # packed rows (G * N/K) in one tile; more become more programs
HEAD_DIMS = (16, 32, 64, 128, 256)
FEW_SPLITS = 4  # of a kv head; with more, programs are few and wait
MIN_ROWS = 16  # the least that a tensor-core dot takes
HOPPER_SMEM_BYTES = 227 * 1024


class LaunchConfig(NamedTuple):
    """What may be tuned without changing a result beyond rounding."""

    kv_tile: int = 64  # keys of one iteration; halved for fp32
    chunk: int = 128  # keys dealt to a split at a time; a multiple of kv_tile, a power of two
    one_split: int = 256  # up to this length one split takes all keys and nothing is merged
    num_warps: int = 4  # 8 for fp32
    num_stages: int = 3
    polls: int = 4096  # how long a split waits to share the merge; 0 leaves it to the last
    pdl: bool = True  # programmatic dependent launch; Hopper and later, ignored elsewhere
    prefetch: bool = True  # send for the first chunk (to L2) before the wait and the load of q


class Workspace(NamedTuple):
    """Partial results of the splits; of the contents only the counts outlive a call.

    Calls that may overlap (on several streams) need workspaces of their own.
    """

    out_ZTNH: torch.Tensor  # fp32, normalised within the split
    lse_ZTN: torch.Tensor  # fp32, log2 of the split's sum of exponentials
    arrived_TN: torch.Tensor  # int64, first zeros; B * K * row tiles of them are arrival words


def workspace(
    num_requests: int,
    block_length: int,
    num_heads: int,
    head_dim: int,
    num_splits: int,
    device: torch.device | str,
) -> Workspace:
    """Buffers for `block_attention`: fp32 out [Z, B*G, N, H], fp32 lse [Z, B*G, N], counters."""
    if not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits {num_splits}: choose 1 to {MAX_SPLITS}")
    rows = (num_requests * block_length, num_heads)
    return Workspace(
        out_ZTNH=torch.empty((num_splits, *rows, head_dim), dtype=torch.float32, device=device),
        lse_ZTN=torch.empty((num_splits, *rows), dtype=torch.float32, device=device),
        arrived_TN=torch.zeros(rows, dtype=torch.int64, device=device),
    )


def choose_num_splits(
    num_requests: int, num_kv_heads: int, num_sms: int, packed_rows: int = MAX_ROWS
) -> int:
    """The most splits with which every program has a multiprocessor to itself, at least 1.

    Then all programs run at once, none shares its bandwidth, and the merge reads no more partials
    than it must. More would pay only beyond ~8k keys at batch 1. Fewer are alive for short
    requests: that is decided on the device.

    Args: packed_rows: block_length * N/K, which decides the row tiles of a (request, kv head).
    """
    _, row_tiles = _row_tiling(packed_rows)
    return max(1, min(MAX_SPLITS, num_sms // (num_requests * num_kv_heads * row_tiles)))


def choose_config(
    num_splits: int,
    row_bytes: int = 256,
    smem_bytes: int = HOPPER_SMEM_BYTES,
    packed_rows: int = MAX_ROWS,
    of_prompt: bool = False,
) -> LaunchConfig:
    """The default sizes for Z splits (`tools/bench_kernels.py --sweep block_attention`).

    Tiles are large where they fit. Against tiles of 64 keys in three stages, microseconds at 400 /
    1k / 8k keys, H200, pages of 16: batch 8 12.8 / 23.4 / 98.4 -> 12.2 / 17.4 / 76.0, batch 16
    13.9 / 28.0 / 179.8 -> 14.2 / 24.9 / 137.3
    (profiles/results/2026-11-22-h200-attention-sweep.json). With many splits, where the programs
    are few and a split has one or two tiles, what counts is that all of its loads are under way at
    once, and that few partials have to be merged: six stages of 64 keys there and chunks of 256,
    for a block of one row three stages of 128 keys, and eight warps and chunks of a tile where
    heads are too wide for either (profiles/LOG.md); eight too in prompts whose blocks are more than
    a tile. There the prefetch sends for all that a split of a short request reads, and one split
    for up to 512 keys instead of 256 costs 3 us a layer, up to 64 gains nothing.

    Args: row_bytes: of one key, H * element size. smem_bytes: shared memory that a program may use.
        packed_rows: block_length * N/K. of_prompt: most have few keys in front.
    """
    many = num_splits > FEW_SPLITS
    one_split = 256 if many else 512
    wide = LaunchConfig(kv_tile=128, one_split=one_split, prefetch=num_splits > 2)
    if (2 * wide.kv_tile * wide.num_stages + MAX_ROWS) * row_bytes > smem_bytes:
        is_wide = row_bytes > 256
        alone = is_wide and many and packed_rows > MIN_ROWS
        num_warps = 8 if alone or (is_wide and of_prompt and packed_rows > MAX_ROWS) else 4
        one_split = one_split if num_splits > 2 else 1024
        return LaunchConfig(64, 64 if alone else 128, one_split=one_split, num_warps=num_warps)
    if many and packed_rows > MIN_ROWS:
        return wide._replace(kv_tile=64, num_stages=6, chunk=256)
    return wide._replace(chunk=256) if num_splits == 1 else wide


def block_attention_reference(
    q_TNH: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table_BW: torch.Tensor,
    start_B: torch.Tensor,
    block_length: int,
    causal: bool,
    window: int | None = None,
    padded: int = 0,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """`block_attention` in plain torch, fp32 inside, over the whole page table. Returns out."""
    B, W = page_table_BW.shape
    _, _, S, K, H = kv_cache.shape
    N = q_TNH.shape[1]
    kv = kv_cache[:, page_table_BW.long()].reshape(2, B, W * S, K, H)
    key = torch.arange(W * S, device=q_TNH.device)
    row = torch.arange(block_length, device=q_TNH.device)
    length = start_B.long()[:, None] + (row + 1 if causal else torch.full_like(row, block_length))
    length = torch.where(start_B[:, None] > padded, length, 0)  # [B, G]
    live = key < length.amax(1)[:, None]  # [B, W*S]; where() because NaN * 0 is NaN
    k, v = torch.where(live[None, :, :, None, None], kv.float(), 0.0).unbind(0)
    q = q_TNH.float().reshape(B, block_length, K, N // K, H)
    scores = torch.einsum("bgkmh,bskh->bkmgs", q, k) * H**-0.5
    seen = key < length[:, None, None, :, None]
    if window is not None:
        position = start_B.long()[:, None] + row  # [B, G]
        seen = seen & ((position[:, :, None] - key).abs() < window)[:, None, None]
    scores = torch.where(seen, scores, -torch.inf)
    if sinks_N is not None:
        sinks = sinks_N.float().view(K, N // K, 1, 1).expand(*scores.shape[:-1], 1)
        scores, v = torch.cat([scores, sinks], -1), F.pad(v, (0, 0, 0, 0, 0, 1))
    p = scores.softmax(-1).nan_to_num(0.0)  # padded rows: 0
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
    config: LaunchConfig | SpecializedConfig | None = None,
    window: int | None = None,
    padded: int = 0,
    gate_TE: torch.Tensor | None = None,
    sinks_N: torch.Tensor | None = None,
) -> None:
    """Attend from each request's block to its cached keys, with lengths read on the device.

    out[b, i, n] = softmax_j(q[b, i, n] . k[b, j, n // (N/K)] * H^-0.5) v[b, j, n // (N/K)]
    over j < start[b] + i + 1 if causal, j < start[b] + G otherwise;
    with a window over those of them with |start[b] + i - j| < window;
    with sinks over one more j, whose score is sinks[n] and whose value 0;
    with a gate out[b, i, n] *= sigmoid(gate[b, i, n])

    Programmatic dependent launch: start and page_table are read before the kernels in front have
    finished, everything else after the wait. Those that may still run then, back to one that had
    waited before it let its successor start (a GEMM, an ordinary launch), may write q, K/V and out,
    but not these two. What is sent for before the wait goes to L2, where all writes arrive. In a
    step (`padded` 0) specialised warps read K/V of positions in front of start before it, too: what
    wrote those must have finished, the block's own rows may still be on their way.

    Args:
        q_TNH: [B*G, N, H] bf16, fp16 or fp32; rows may be strided, heads may not.
        kv_cache: [2, num_pages, S, K, H], dtype of q, each plane contiguous; the block's own
            K/V is already in it.
        page_table_BW: int32 [B, W], last stride 1; pages past the length are not read. Keys past
            W * S do not exist.
        start_B: int32 [B], position of the block's first row; `padded` marks a padded request,
            whose rows become zeros.
        block_length: G; G = 1 is plain decode.
        out_TNH: [B*G, N, H], dtype of q, contiguous.
        workspace: from `workspace(B, G, N, H, num_splits, device)`; unused by the reference.
        config: tile sizes, warps, stages, merge; a SpecializedConfig is `specialized_attention`'s.
            None takes the one that is faster, by `takes` and the number of splits, as it chooses.
        window: at least 1; None is the whole context.
        padded: 0 in a step, where every request has a token behind it; -1 in a prompt.
        gate_TE: [B*G, E] in the dtype of q, or fp32 partial sums [Z, B*G, E], dense rows, of which
            the last N * H columns are the gate (`output_gate`, whose results these are).
        sinks_N: [N], any float dtype, dense; not a step's results: weights. Not with a gate.
    Mutates: out_TNH, workspace.
    Raises: ValueError for shapes, dtypes or strides that the kernel cannot address.
    Source: flash-decoding (split keys, merge by log-sum-exp); exp2 softmax as in FlashAttention.
    """
    _, N, H = q_TNH.shape
    B, W = page_table_BW.shape
    S, K = kv_cache.shape[2:4]
    check_inputs(q_TNH, kv_cache, page_table_BW, start_B, block_length, out_TNH)
    if workspace.out_ZTNH.shape[1:] != q_TNH.shape:
        raise ValueError(
            f"workspace is for {tuple(workspace.out_ZTNH.shape[1:])}, not {tuple(q_TNH.shape)}"
        )
    if gate_TE is not None:
        check_gate(out_TNH, gate_TE, gate_TE.shape[-1] - N * H)
    check_reach(window, sinks_N, N)
    if sinks_N is not None and gate_TE is not None:
        raise ValueError("sinks and a gate: no kernel takes both")
    if not (q_TNH.is_cuda or INTERPRET):
        attended_TNH = block_attention_reference(
            *(q_TNH, kv_cache, page_table_BW, start_B, block_length, causal, window, padded),
            sinks_N=sinks_N,
        )
        if gate_TE is not None:
            begin = gate_TE.shape[-1] - N * H
            gated = output_gate_reference(attended_TNH, gate_TE, begin, None, 0.0)
            attended_TNH = gated.view_as(attended_TNH)
        out_TNH.copy_(attended_TNH)
        return
    if H not in HEAD_DIMS:
        raise ValueError(f"head_dim {H}: the Triton kernel takes {HEAD_DIMS}")
    num_splits = workspace.lse_ZTN.shape[0]
    is_plain = padded == 0 and gate_TE is None and sinks_N is None
    specialised = takes(q_TNH, kv_cache, block_length) and is_plain
    if config is None and specialised and num_splits > FEW_SPLITS:
        config = SpecializedConfig()
    if isinstance(config, SpecializedConfig):
        if not specialised:
            raise ValueError(
                f"{q_TNH.dtype}, blocks of {block_length} rows, padded {padded}: specialised warps "
                "take what `takes` says, in a step, without gate or sinks; use a LaunchConfig"
            )
        launch(
            *(q_TNH, kv_cache, page_table_BW, start_B, block_length, causal, out_TNH),
            *(workspace, config, window),
        )
        return
    if config is None:
        row_bytes = H * q_TNH.element_size()
        packed_rows = block_length * (N // K)
        smem_bytes = _smem_bytes(q_TNH.device)
        config = choose_config(num_splits, row_bytes, smem_bytes, packed_rows, padded < 0)
    kv_tile, num_warps = config.kv_tile, config.num_warps
    if q_TNH.dtype == torch.float32:
        # An fp32 product keeps its operands in registers: with 4 warps a thread of a 64 x 128 tile
        # spilled 20 kB (ptxas for sm_90a, triton 3.6), for which the driver reserves gigabytes.
        kv_tile, num_warps = kv_tile // 2, 8
    if config.chunk % kv_tile or config.chunk & (config.chunk - 1):
        raise ValueError(f"chunk {config.chunk}: a power of two and a multiple of {kv_tile} keys")
    rows, row_tiles = _row_tiling(block_length * (N // K))
    lengths = (start_B, W * S, config.one_split)
    shape = {"N": N, "H": H, "G": block_length, "K": K, "ROWS": rows, "ROW_TILES": row_tiles}
    shape |= {"CHUNK": config.chunk, "SPLITS": num_splits}
    shape |= {"WINDOW": window or 0, "PADDED": padded, "GATE": 0}
    shape["SINKS"] = sinks_N is not None
    gate: tuple[torch.Tensor, int, int] = out_TNH, 0, 0
    if gate_TE is not None:
        gate_ZTE = gate_TE if gate_TE.dim() == 3 else gate_TE.unsqueeze(0)
        columns = gate_ZTE.narrow(-1, gate_ZTE.shape[-1] - N * H, N * H)
        gate = columns, gate_ZTE.stride(1), gate_ZTE.stride(0)
        shape["GATE"] = len(gate_ZTE)
    on_grid(block_attention_kernel, (K * row_tiles, B, num_splits))(
        q_TNH,
        kv_cache[0],  # two pointers: no plane offset enters the address arithmetic
        kv_cache[1],
        page_table_BW,
        *lengths,
        out_TNH,
        *gate,
        *workspace,
        sinks_N,
        q_TNH.stride(0),
        page_table_BW.stride(0),
        H**-0.5 * LOG2_E,
        **shape,
        TILE=kv_tile,
        S=S,
        CAUSAL=causal,
        DOT_FP32=INTERPRET,
        POLLS=0 if INTERPRET else config.polls,  # interpreted programs run one after another
        PREFETCH=q_TNH.is_cuda and config.prefetch,
        WIDE=kv_cache[0].numel() >= 2**31,
        num_stages=config.num_stages,
        **all_registers(num_warps),
        **early_options(config.pdl and supports_pdl(q_TNH.device)),
    )


def _row_tiling(packed_rows: int) -> tuple[int, int]:
    """(rows of a tile, tiles) for G * N/K packed rows."""
    rows = min(MAX_ROWS, max(MIN_ROWS, 1 << (packed_rows - 1).bit_length()))
    return rows, (packed_rows + rows - 1) // rows


def _smem_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return HOPPER_SMEM_BYTES  # interpreted: as there
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def check_reach(window: int | None, sinks_N: torch.Tensor | None, num_heads: int) -> None:
    """Raises: ValueError for a window or sinks that there cannot be."""
    if sinks_N is not None and sinks_N.shape != (num_heads,):
        raise ValueError(f"sinks {tuple(sinks_N.shape)}: need {num_heads}, a head each")
    if window is not None and window < 1:
        raise ValueError(
            f"window {window}: a row sees at least its own key; use 1 or more, or None"
        )


def check_inputs(
    q_TNH: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table_BW: torch.Tensor,
    start_B: torch.Tensor,
    block_length: int,
    out_TNH: torch.Tensor,
) -> None:
    """Raises: ValueError for what no attention of blocks over pages addresses."""
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
