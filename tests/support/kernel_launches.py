"""Launches of every kernel with fake CUDA tensors, for who compiles them without a GPU."""

from collections.abc import Callable
from typing import Any

import torch

from graphengine.kernels import (
    accept,
    add_rms_norm,
    adjust_logits,
    argmax,
    block_attention,
    chunk_attention,
    chunk_linear,
    context_kv,
    filter_threshold,
    fp8_rows,
    gated_delta,
    gated_delta_prefill,
    gumbel_argmax,
    head_argmax,
    mask_logits,
    merge_splits,
    moe_kernels,
    moe_mxfp4_kernels,
    moe_mxfp4_stream,
    moe_row,
    mxfp4,
    output_gate,
    place_rows,
    publish_drafts,
    qk_norm_rope,
    skinny_linear,
    swiglu,
    write_tap,
)
from graphengine.kernels.fp8 import FP8, Fp8Scales
from graphengine.kernels.skinny_config import TUNED, SkinnyConfig, choose_config
from tools.skinny_layer import Case
from tools.skinny_variants import variants

BF16, FP32 = torch.bfloat16, torch.float32
I16, U8 = torch.int16, torch.uint8


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def ints(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return empty(*shape, dtype=dtype)


def attend(dtype: torch.dtype, H: int, G: int, causal: bool, window: int | None, **options: Any):
    B, N, K, S, W, Z = 2, 32, 8, options.pop("page_size", 16), 260, options.pop("splits", 8)
    padded, gate = options.pop("padded", 0), options.pop("gate", None)
    sinks = options.pop("sinks", None)
    config = block_attention.choose_config(Z, H * dtype.itemsize, packed_rows=G * N // K)
    if "config" in options:
        config = options["config"]
    elif options:
        config = config._replace(**options)
    block_attention.block_attention(
        empty(B * G, N, H, dtype=dtype),
        empty(2, 9, S, K, H, dtype=dtype),
        ints(B, W, dtype=torch.int32),
        ints(B, dtype=torch.int32),
        G,
        causal,
        empty(B * G, N, H, dtype=dtype),
        block_attention.workspace(B, G, N, H, Z, "cuda"),
        config,
        window,
        padded,
        gate,
        sinks,
    )


def gate(x: torch.Tensor, projected: torch.Tensor, begin: int, weight: torch.Tensor | None) -> None:
    out_TX = empty(len(x), x[0].numel())
    output_gate._launch(x, projected, begin, weight, 1e-6, out_TX)


def attend_chunk(
    page_size: int,
    head_dim: int = 128,
    splits: int = 0,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    **options: Any,
) -> None:
    B, N, K, S, W, H = 3, 16, 4, page_size, 9, head_dim
    chunk_attention.chunk_attention(
        empty(B * chunk_attention.BLOCK, N, H),
        empty(2, 9, S, K, H),
        ints(B, W, dtype=torch.int32),
        ints(B, dtype=torch.int32),
        empty(B * chunk_attention.BLOCK, N, H),
        merge_splits.workspace(B * chunk_attention.BLOCK, N, H, splits, "cuda") if splits else None,
        chunk_attention.LaunchConfig(**options) if options else None,
        window,
        sinks,
    )


def multiply(T: int, config: SkinnyConfig, swiglu: bool = False, dtype: torch.dtype = BF16):
    E, D = 4096, 4096
    x, weight, scales = empty(T, D, dtype=dtype), empty(E, D, dtype=dtype), None
    if dtype == FP8:
        x, scales = empty(2, T, D, dtype=FP8), Fp8Scales(empty(T, dtype=FP32), empty(E, dtype=FP32))
    out = empty(T, E // 2) if swiglu else empty(config.num_splits, T, E, dtype=FP32)
    skinny_linear.launch(x, weight, scales, out, config, swiglu)


def multiply_wide(T: int, kind: str, dtype: torch.dtype = BF16, is_tried: bool = True) -> None:
    """What the table has, and with `is_tried` every tile that the tuner tries."""
    E, D = (24576, 4096) if kind == "swiglu" else (4096, 4096)
    tried = variants(Case("8b", "", kind, E, D, T, dtype.itemsize))
    tuned = [
        c
        for (rows, _, size, t), c in TUNED.items()
        if (t, size) == (T, dtype.itemsize) and (rows == E or T == 16)
        if kind != "swiglu" or c.num_splits == 1
    ]
    for config in [c for c in {*tried * is_tried, *tuned} if c.cols]:
        x, weight = empty(T, D, dtype=dtype), empty(E, D, dtype=dtype)
        scales = Fp8Scales(empty(T, dtype=FP32), empty(E, dtype=FP32)) if dtype == FP8 else None
        out = empty(T, E // 2 if kind == "swiglu" else E)
        out = empty(config.num_splits, T, E, dtype=FP32) if kind == "partials" else out
        skinny_linear.launch(x, weight, scales, out, config, kind == "swiglu")


def choose(T: int, dtype: torch.dtype = BF16, is_tried: bool = True) -> None:
    """A head's argmax, by what the table has, and with `is_tried` by every config that the tuner
    tries."""
    for V, D in ((151936, 4096), (151936, 2560)):
        case = Case("8b", "lm_head", "argmax", V, D, T, dtype.itemsize)
        now = choose_config(T, V, D, dtype.itemsize)
        for config in {*variants(case) * is_tried, *([now] if now else [])}:
            in_two = dtype == FP8 and not config.cols
            x, weight = empty(*(2,) * in_two, T, D, dtype=dtype), empty(V, D, dtype=dtype)
            scales = Fp8Scales(empty(T, dtype=FP32), empty(V, dtype=FP32)) if dtype == FP8 else None
            head_argmax._launch(x, weight, scales, config)


def project(T: int, N: int, K: int, H: int) -> None:
    rope, at, norm = empty(99, H, dtype=FP32), (ints(T), ints(T)), empty(H)
    pool = empty(3, 2, 9, 16, K, H)
    partials = empty(3, T, (N + 2 * K) * H, dtype=FP32)
    for weight in (norm, None):
        cache = pool.select(0, 1)
        qk_norm_rope.qk_norm_rope_write_(partials, weight, weight, rope, *at, cache, 1e-6)
    kv, norms = empty(T, 3 * 2 * K * H), empty(3, H)
    context_kv.context_kv_write_(kv, norms, rope, *at, pool, 1e-6)


def normalise(T: int, D: int, Z: int) -> None:
    h, partials, norm = empty(T, D), empty(Z, T, D, dtype=FP32), empty(D)
    for early, num_fp8 in ((False, 0), (True, 0), (False, 1), (False, 2)):
        add_rms_norm._launch(h, partials, norm, 1e-6, early, num_fp8)
    add_rms_norm._launch(None, h, norm, 1e-6, False, 0)
    for num_fp8 in (1, 2):
        fp8_rows._rows_to_fp8(empty(T, D), num_fp8)


def advance(B: int, G: int) -> None:
    rows, start = [ints(B * G) for _ in range(4)], ints(B, dtype=torch.int32)
    table, results = ints(B, 9, dtype=torch.int32), ints(B, accept.NUM_RESULTS * (G + 1))
    state = [start, table, ints(B, G), *rows, ints(B), results]
    accept.accept_and_advance_(ints(B, G), ints(B, G), *state, mask_token_id=7, page_size=16)


def recur(B: int, G: int, N: int, splits: int = 0) -> None:
    K, NK, S, L = 128, 16, 3, 2
    C = (2 * NK + N) * K
    shape = (B * G, C + N * K + 2 * N)
    projected = empty(splits, *shape, dtype=FP32) if splits else empty(*shape)
    sizes = (NK * K,), (N, K), (N,)
    rows = G if G > 1 else 0
    one = (empty(B, 3 + G, C), *(empty(B, rows, *size, dtype=FP32) for size in sizes))
    pools = empty(S, 3, C), empty(S, N, K, K, dtype=FP32)
    weights = empty(C, 4), empty(N, dtype=FP32), empty(N, dtype=FP32)
    slots, start = ints(B, dtype=torch.int32), ints(B, dtype=torch.int32)
    records = gated_delta.Records(*one)
    norm = empty(K, dtype=FP32)
    gated_delta.gated_delta_verify_(projected, *weights, *pools, slots, norm, 1e-6, records)
    layers = gated_delta.Records(*(torch.stack([x] * L) for x in one))
    pools = torch.stack([pools[0]] * L), torch.stack([pools[1]] * L)
    first, kept = ints(B, G).select(1, 0), ints(B, 2, dtype=torch.int32)
    gated_delta.gated_delta_commit_(layers, *pools, slots, first, start, kept, 16)


def recur_chunks(T: int, R: int, N: int) -> None:
    K, NK, S = 128, 16, 3
    C = (2 * NK + N) * K
    weights = empty(C, 4), empty(N, dtype=FP32), empty(N, dtype=FP32)
    pools = empty(S, 3, C), empty(S, N, K, K, dtype=FP32)
    pieces = gated_delta_prefill.Pieces(*(ints(R, dtype=torch.int32) for _ in range(6)))
    projected, out = empty(T, C + N * K + 2 * N), empty(T, N, K)
    gated_delta_prefill.gated_delta_prefill_(projected, *weights, *pools, pieces, out)


def draw(T: int, B: int, dtype: torch.dtype) -> None:
    logits, best, row = empty(T, 151936, dtype=dtype), ints(T), empty(B, dtype=FP32)
    threshold = filter_threshold.filter_threshold(
        logits, best, row, row, ints(B, dtype=torch.int32), row
    )
    gumbel_argmax.gumbel_argmax(logits, best, threshold, ints(T), row, ints(B))


def adjust(B: int, G: int, dtype: torch.dtype) -> None:
    V, K, L = 151936, adjust_logits.MAX_WORDS, adjust_logits.MAX_WORD_TOKENS
    i32, column = torch.int32, empty(B, dtype=FP32)
    seen, words, recent = (ints(*s, dtype=i32) for s in ((B, V), (B, K, L), (B, L - 1)))
    tables = adjust_logits.Tables(
        *(ints(B, dtype=i32), column, column, column, ints(B)),
        *(seen, empty(B, V, dtype=FP32), words, recent),
    )
    adjust_logits.adjust_logits(empty(B * G, V, dtype=dtype), ints(B, G), ints(B * G), tables)
    adjust_logits.advance_tables_(ints(B, G), ints(B, G), ints(B, dtype=i32), tables)


def constrain(B: int, G: int, dtype: torch.dtype) -> None:
    V, i32 = 151936, torch.int32
    mask = ints(B * G, (V + 31) // 32, dtype=i32)
    mask_logits.mask_logits_(empty(B * G, V, dtype=dtype), mask, ints(B, dtype=i32))
    words = ints(B), ints(B, G)
    publish_drafts.publish_drafts_(ints(B, G), ints(B, G), ints(B, dtype=i32), *words)


def place(rows: int, block: int) -> None:
    B, R, W = rows // block, 4, 260
    ids, each, last = (ints(n, dtype=torch.int32) for n in (rows, B, R))
    pages, table = (ints(n, W, dtype=torch.int32) for n in (R, B))
    placed = place_rows.Placed(ints(rows), ints(rows), ints(rows), table, ints(R))
    place_rows.place_rows_(ids, each, each, each, last, pages, 16, placed)


def mix(T: int, E: int, I: int, D: int = 2048, K: int = 8) -> None:  # noqa: E741
    """A layer of experts, with a shared one where there are 256; of 32 they are gpt-oss's, in four
    bits too."""
    biases, clamp = moe_row.NO_BIASES, None
    if E == 32:
        biases, clamp = moe_row.Biases(empty(E), empty(E, 2 * I), empty(E, D)), (1.702, 7.0)
        moe_row.launch_router(empty(T, D), empty(E, D), None, biases.router_E)
    if T == 1:
        row = (empty(2 * I, D), empty(D, I), empty(1, D)) if E == 256 else None
        matrices = (empty(E, D), empty(E, 2 * I, D), empty(E, D, I))
        normed = (empty(T, D), empty(4, T, D, dtype=FP32), empty(D), 1e-6)
        how = row and moe_row.Shared(*row), K, True, biases, clamp
        moe_row.launch_row(*normed, *matrices, *how)
    weight, slots, pairs = moe_kernels.launch_route(empty(T, E), K, True)[1:]
    plan, gate_up = (slots, pairs), empty(E, 2 * I, D)
    act = moe_kernels.launch_gate_up(empty(T, D), gate_up, *plan, K, biases.gate_up_EJ, clamp)
    if E == 32:
        blocks = (E, 2 * I // 64, D // 64), (E, D // 64, I // 64)
        both = [
            mxfp4.Mxfp4(empty(*n, mxfp4.HALF_WORDS, dtype=I16), empty(*n, mxfp4.SCALES, dtype=U8))
            for n in blocks
        ]
        four = both[0], *plan, K, biases.gate_up_EJ, clamp
        streams = T <= moe_mxfp4_stream.MOST_ROWS
        for kernels in (moe_mxfp4_kernels, moe_mxfp4_stream)[: 1 + streams]:
            kernels.launch_gate_up(empty(T, D), *four)
        four = both[1], weight, *plan, biases.down_ED
        for kernels in (moe_mxfp4_kernels, moe_mxfp4_stream)[: 1 + streams]:
            kernels.launch_down(act, *four)
    shared = (empty(T, D), empty(T, 1)) if E == 256 else (None, None)
    moe_kernels.launch_down(act, empty(E, D, I), weight, *plan, *shared, biases.down_ED)


TALL = SkinnyConfig(rows=256, block_k=128, num_stages=2, num_warps=8)
LAUNCHES: dict[str, Callable[[], Any]] = {
    "argmax": lambda: (argmax._launch(empty(16, 151936)), argmax._launch(empty(1, 512))),
    "sampled tail": lambda: (draw(16, 1, BF16), draw(256, 16, FP32)),
    "adjusted logits": lambda: (adjust(1, 16, BF16), adjust(8, 1, FP32), adjust(16, 16, BF16)),
    "masked logits": lambda: (constrain(1, 16, BF16), constrain(8, 1, FP32)),
    "placed rows": lambda: (place(16, 16), place(512, 16), place(2048, 128)),
    "accept": lambda: (advance(3, 16), advance(1, 1)),
    # 8B's and 4B's hidden size, what their MLP's down reads, and their five taps.
    **{
        f"residual and norm, {D} columns": lambda D=D: (normalise(256, D, 2), normalise(16, D, 4))
        for D in (2560, 4096, 9728, 12288, 12800, 20480)
    },
    "norm, rope and writes": lambda: project(16, 32, 8, 128),
    "attention": lambda: attend(BF16, 128, 16, True, None),
    "attention, pages of 128": lambda: [
        attend(BF16, 128, G, True, None, page_size=128) for G in (1, 16)
    ],
    "attention, specialised": lambda: [
        attend(BF16, 128, G, G == 16, window, page_size=64, splits=16, config=None)
        for G, window in ((16, None), (7, 300))
    ],
    "attention of a prompt": lambda: attend(
        BF16, 128, 16, True, None, page_size=128, splits=1, padded=-1
    ),
    # Qwen3.5-4B and 27B at batch 1 and 16, partial sums too.
    "recurrence": lambda: (recur(1, 16, 32), recur(16, 8, 48)),
    "recurrence, one row": lambda: (recur(1, 1, 32, splits=2), recur(8, 1, 48)),
    "recurrence of a prompt": lambda: (recur_chunks(2048, 1, 32), recur_chunks(128, 8, 48)),
    "tap": lambda: write_tap.write_tap_(empty(16, 4096), empty(16, 20480), 4096),
    "SwiGLU": lambda: swiglu._launch(empty(512, 24576)),
    "SwiGLU of a chunk": lambda: (
        chunk_linear._launch(empty(2048, 4096), empty(24576, 4096), chunk_linear.LARGE, True),
        chunk_linear._launch(empty(1100, 2560), empty(19456, 2560), chunk_linear.SMALL, True),
        chunk_linear._launch(empty(128, 5120), empty(34816, 5120), chunk_linear.WIDE, True),
    ),
    "chunk, linear": lambda: (
        chunk_linear._launch(empty(2048, 4096), empty(6144, 4096), chunk_linear.LARGE, False),
    ),
    "gates of outputs": lambda: (
        gate(empty(16, 32, 128), empty(16, 12352), 8192, empty(128)),
        gate(empty(2, 16, 256), empty(3, 2, 10240, dtype=FP32), 0, None),
    ),
    "experts, 30B-A3B": lambda: mix(16, 128, 768),
    "experts, 35B-A3B": lambda: mix(16, 256, 512),
    "experts, other numbers of rows": lambda: (mix(1, 128, 768), mix(64, 256, 512)),
    "experts, gpt-oss": lambda: mix(16, 32, 2880, 2880, 4),
    "experts, gpt-oss, other numbers of rows": lambda: (
        mix(1, 32, 2880, 2880, 4),
        mix(512, 32, 2880, 2880, 4),
    ),
    "experts of a prompt": lambda: (mix(512, 128, 768), mix(2048, 256, 512)),
    "attention, two splits": lambda: attend(BF16, 128, 16, True, None, splits=2),
    "attention, one split": lambda: attend(BF16, 128, 16, False, None, splits=1),
    "attention, one split, float32": lambda: attend(FP32, 64, 16, True, 300, splits=1),
    "attention, wide heads": lambda: attend(BF16, 256, 16, True, None, splits=1),
    "attention with a gate": lambda: (
        attend(BF16, 256, 16, True, None, gate=empty(32, 8192)),
        attend(BF16, 256, 1, True, None, gate=empty(3, 2, 8192, dtype=FP32)),
    ),
    "attention, window": lambda: attend(BF16, 64, 16, False, 300),
    "attention, sinks and a window": lambda: attend(BF16, 64, 8, True, 128, sinks=empty(32)),
    "attention of a prompt, sinks": lambda: attend(
        BF16, 64, 16, True, 128, padded=-1, splits=1, sinks=empty(32)
    ),
    "attention, two row tiles, window": lambda: attend(BF16, 128, 32, True, 300),
    "attention in float32": lambda: attend(FP32, 128, 16, True, None),
    "attention of chunks": lambda: (attend_chunk(128), attend_chunk(16, pdl=False)),
    "attention of chunks, wide heads": lambda: (attend_chunk(128, 256), attend_chunk(16, 256)),
    "attention of chunks, narrow heads": lambda: (
        attend_chunk(128, 64),
        attend_chunk(16, 64, 4, window=128, sinks=empty(16)),
        attend_chunk(128, 64, sinks=empty(16)),
    ),
    "attention of chunks, window": lambda: (
        attend_chunk(128, 128, window=4096),
        attend_chunk(16, 256, 2, window=300),
    ),
    "attention of chunks, split": lambda: (attend_chunk(128, 128, 4), attend_chunk(16, 256, 2)),
    "attention of chunks, other tiles": lambda: (
        attend_chunk(128, num_stages=3, pdl=False),
        attend_chunk(128, kv_tile=64, num_stages=4),
        attend_chunk(16, 128, 16),
        attend_chunk(128, 256, 16),
    ),
    "GEMM": lambda: multiply(16, SkinnyConfig(64, 256, 5, 4, 1, 4, 2, 1)),
    "GEMM, 128 rows": lambda: multiply(128, TALL),
    "GEMM, 128 rows, of the table": lambda: [
        multiply(128, config, swiglu=E > 6144)
        for (E, _, _, T), config in TUNED.items()
        if T == 128 and not config.cols
    ],
    "GEMM, wide, 16 rows": lambda: [multiply_wide(16, kind) for kind in ("swiglu", "partials")],
    "GEMM, wide, 192 rows": lambda: [multiply_wide(192, kind) for kind in ("swiglu", "partials")],
    "GEMM, wide, 192 rows, FP8": lambda: [
        multiply_wide(192, kind, FP8) for kind in ("swiglu", "partials")
    ],
    "GEMM, wide, 128 rows, SwiGLU": lambda: multiply_wide(128, "swiglu"),
    "GEMM, wide, 256 rows, SwiGLU": lambda: multiply_wide(256, "swiglu"),
    "GEMM, wide, 128 rows, partials": lambda: multiply_wide(128, "partials"),
    "GEMM, wide, 256 rows, partials": lambda: multiply_wide(256, "partials"),
    "GEMM, wide, 256 rows": lambda: multiply_wide(256, "linear"),
    "GEMM, wide, 128 rows, FP8": lambda: multiply_wide(128, "partials", FP8),
    "GEMM, wide, 256 rows, FP8, SwiGLU": lambda: multiply_wide(256, "swiglu", FP8),
    "GEMM, wide, of the table": lambda: (
        multiply_wide(16, "swiglu", is_tried=False),
        multiply_wide(128, "partials", is_tried=False),
    ),
    "GEMM, wide, of the table, FP8": lambda: multiply_wide(256, "swiglu", FP8, is_tried=False),
    "heads of the table": lambda: [
        choose(T, dtype, is_tried=False) for T in (16, 256) for dtype in (BF16, FP8)
    ],
    "head, 16 rows": lambda: choose(16),
    "head, 64 rows": lambda: choose(64),
    "head, 128 rows": lambda: choose(128),
    "head, 192 rows": lambda: choose(192),
    "head, 256 rows": lambda: choose(256),
    "head, 16 rows, FP8": lambda: choose(16, FP8),
    "head, 128 rows, FP8": lambda: choose(128, FP8),
    "head, 256 rows, FP8": lambda: choose(256, FP8),
    "GEMM, SwiGLU": lambda: multiply(64, SkinnyConfig(block_k=64), swiglu=True),
    "GEMM, FP8, SwiGLU": lambda: multiply(16, SkinnyConfig(num_stages=2), True, FP8),
    "GEMM without TMA": lambda: multiply(7, SkinnyConfig(block_k=64, use_tma=0)),
}
