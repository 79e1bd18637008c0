"""Attention of a step's blocks by specialised warps, on Hopper: `block_attention`'s, where a few
programs have a multiprocessor each and time is what one of them waits for.

Why: in a split's program of `block_attention` four warps do everything, one after another, so that
its tiles take several times as long as the tensor cores work (profiles/LOG-2026-11-29.md says
where the time goes).

How: one warp asks for K and V by TMA, another for q, and two consumers of a warpgroup each take
turns at the tiles, so that one multiplies while the other computes its softmax. K and V in front of
the block are asked for before the wait, into shared memory, up to `num_stages` tiles: when queries
come, most of a split is there. The second consumer gives what it has found to the first through
shared memory, and splits are merged as in `block_attention`, whose workspace and protocol these
are. Rows are packed head after head, since TMA takes 16 positions of a head at once.

Invariant: as `block_attention`'s, but that which splits exist is a function of the length in tiles
of `kv_tile`, dealt in runs of neighbours. Keys are read from memory by whole tiles; those that are
none are masked, and such rows of V become 0 before they are multiplied.

Legend as in block_attention.py. Source: flash-decoding; FlashAttention-3's warp specialisation.
"""

from typing import NamedTuple

import torch

from graphengine.kernels.block_attention_kernels import LOG2_E
from graphengine.kernels.chunk_attention_kernels import BAND, LAUNCH_REGISTERS, ROWS
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import early_options, on_grid, on_hopper
from graphengine.kernels.specialized_attention_kernels import specialized_attention_kernel
from graphengine.kernels.wide_linear import descriptor, gluon_dtype

HEAD_DIM = 128
PAGE_SIZES = (16, 32, 64, 128)
MAX_BLOCK = 16  # rows of a block


class SpecializedConfig(NamedTuple):
    """What may be tuned without changing a result beyond rounding."""

    kv_tile: int = 64  # keys of one iteration of one consumer
    num_stages: int = 5  # tiles of K and of V in shared memory, at least 3
    split_keys: int = 256  # what a split takes while there are splits left; of whole tiles
    polls: int = 4096  # how long a split waits to share the merge; 0 leaves it to the last
    pdl: bool = True  # programmatic dependent launch


def takes(q_TNH: torch.Tensor, kv_cache: torch.Tensor, block_length: int) -> bool:
    """Whether the kernel can run on these: Hopper, bf16, heads of 128, pages of 16 to 128, blocks
    of 5 to 16 rows at multiples of 16 bytes, as many tiles of rows as splits were chosen for."""
    packed_rows = block_length * (q_TNH.shape[1] // kv_cache.shape[3])
    starts = q_TNH.storage_offset(), kv_cache.storage_offset(), q_TNH.stride(0)
    return (
        on_hopper(q_TNH)
        and not INTERPRET
        and q_TNH.dtype == kv_cache.dtype == torch.bfloat16
        and q_TNH.shape[2] == HEAD_DIM
        and kv_cache.shape[2] in PAGE_SIZES
        and 4 < block_length <= MAX_BLOCK
        and _row_tiles(q_TNH, kv_cache, block_length) == -(-packed_rows // ROWS.value)
        and all(elements % 8 == 0 for elements in starts)
    )


def launch(
    q_TNH: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table_BW: torch.Tensor,
    start_B: torch.Tensor,
    block_length: int,
    causal: bool,
    out_TNH: torch.Tensor,
    workspace: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    config: SpecializedConfig,
    window: int | None,
) -> None:
    """`block_attention` with its arguments, in a step (`padded` 0), where `takes` is true.

    Before the wait start, page_table and the keys of tiles in front of start's are read: what still
    runs then may write q, out, and K/V from start on.

    Mutates: out_TNH, workspace.
    Raises: ValueError for a config that the kernel cannot run.
    """
    if config.split_keys < 1 or config.split_keys % config.kv_tile or config.num_stages < 3:
        raise ValueError(
            f"split_keys {config.split_keys}, num_stages {config.num_stages}: take a multiple of "
            f"{config.kv_tile} keys and at least 3 stages"
        )
    T, N, H = q_TNH.shape
    B, W = page_table_BW.shape
    _, num_pages, S, K, _ = kv_cache.shape
    row_tiles = _row_tiles(q_TNH, kv_cache, block_length)
    num_splits, dtype = workspace[1].shape[0], gluon_dtype(q_TNH)
    box = [min(S, config.kv_tile), BAND.value]
    k, v = (
        descriptor(plane, (num_pages * S, K * H), (K * H, 1), box, dtype)
        for plane in (kv_cache[0], kv_cache[1])
    )
    strides = q_TNH.stride(0), 1
    on_grid(specialized_attention_kernel, (K * row_tiles, B, num_splits))(
        descriptor(q_TNH, (T, N * H), strides, [_positions(block_length), BAND.value], dtype),
        k,
        v,
        page_table_BW,
        start_B,
        W * S,
        out_TNH,
        *workspace,
        page_table_BW.stride(0),
        H**-0.5 * LOG2_E,
        N=N,
        H=H,
        G=block_length,
        K=K,
        S=S,
        TILE=config.kv_tile,
        STAGES=config.num_stages,
        SPLIT_TILES=config.split_keys // config.kv_tile,
        SPLITS=num_splits,
        POLLS=config.polls,
        CAUSAL=causal,
        WINDOW=window or 0,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS,
        **early_options(config.pdl),
    )


def _positions(block_length: int) -> int:
    """Rows that a head has in a tile."""
    return MAX_BLOCK if block_length > 8 else 8


def _row_tiles(q_TNH: torch.Tensor, kv_cache: torch.Tensor, block_length: int) -> int:
    group = q_TNH.shape[1] // kv_cache.shape[3]
    return -(-group // (ROWS.value // _positions(block_length)))
