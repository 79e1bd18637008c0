"""All that launches of kernels in Gluon are told, argument by argument: no interpreter runs them,
and a descriptor of another tensor, or a number in another's place, ends in wrong text on a GPU.

Each is launched once with rows that are wider than what is used of them. A row of what is expected
is an argument, in the kernel's order, or a constant; a change of a launch changes its rows here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from graphengine.kernels import (
    chunk_linear,
    gated_delta_prefill,
    merge_splits,
    moe_mxfp4_stream,
    specialized_attention,
)
from graphengine.kernels.block_attention import LaunchConfig, block_attention, workspace
from graphengine.kernels.chunk_attention import BLOCK, chunk_attention
from graphengine.kernels.fp8 import FP8, Fp8Scales
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.mxfp4 import HALF_WORDS, SCALES, Mxfp4
from graphengine.kernels.skinny_config import SkinnyConfig
from graphengine.kernels.skinny_linear import launch as multiply
from tests.support.fake_hopper import Launched
from tests.support.kernel_launches import BF16, FP32, I16, U8, empty, ints

pytestmark = pytest.mark.skipif(INTERPRET, reason="launchers take other ways where it interprets")

I32 = torch.int32


def told(found: Launched, **given: torch.Tensor) -> tuple[list[Any], str]:
    """(Arguments, as text where they are tensors: those of `given` by their names; constants)."""
    names = {id(tensor): name for name, tensor in given.items()}

    def text(x: Any) -> Any:
        if isinstance(x, TensorDescriptor):
            begin = x.base.storage_offset()
            return f"{list(x.shape)} by {list(x.strides)} in {x.block_shape} from {begin}"
        if isinstance(x, torch.Tensor):
            return names.get(id(x)) or f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
        return round(x, 6) if isinstance(x, float) else x

    constants = dict(sorted(found.options.items()))
    pdl = int(constants.pop("PDL"))
    assert constants.pop("launch_pdl") == (pdl > 0)
    constants = ", ".join(f"{name} {value}" for name, value in constants.items())
    return [text(x) for x in found.arguments], f"{constants}; PDL {pdl}"


def wide(num_rows: int, width: int, more: int = 8, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Rows with so many columns behind those that are used."""
    return empty(num_rows, width + more, dtype=dtype).narrow(1, 0, width)


B, N, K, H, S, W = 2, 6, 3, 128, 16, 9  # requests, heads of q and k, their width, a page, pages
PLANE = 40 * S * K * H
KEYS = f"[640, {K * H}] by [{K * H}, 1] in "


def blocks(length: int) -> dict[str, torch.Tensor]:
    """What an attention of blocks of so many rows is given."""
    return {
        "q": wide(B * length, N * H).unflatten(1, (N, H)),
        "kv_cache": empty(2, 40, S, K, H),
        "table": ints(B, W + 3, dtype=I32).narrow(1, 0, W),
        "start": ints(B, dtype=I32),
        "out": empty(B * length, N, H),
    }


def test_attention_of_a_prompt(launched: list[Launched]) -> None:
    """Bug: values are keys, scores lack a factor, a window is forgotten: text that means nothing
    behind a long prompt."""
    given, sinks = blocks(BLOCK), empty(N)
    q, kv_cache, table, start, out = given.values()
    partials = merge_splits.workspace(B * BLOCK, N, H, 2, "cuda")
    chunk_attention(q, kv_cache, table, start, out, partials, None, 300, sinks)
    attend, merge = launched
    own = {"partial": partials.out_ZTNH, "lse": partials.lse_ZTN, "sinks": sinks, **given}
    assert attend.grid == (B * N * 2,) and merge.grid == (B * BLOCK * N // 16,)
    assert told(attend, **own) == (
        [
            "[256, 768] by [776, 1] in [64, 128] from 0",
            f"{KEYS}[16, 64] from 0",
            f"{KEYS}[16, 64] from {PLANE}",
            "[256, 768] by [768, 1] in [64, 128] from 0",
            *("out", "partial", "lse", "table", "start", "sinks"),
            *(W + 3, W * S, 0.127517),
        ],
        "GROUP 2, N 6, S 16, SINKS True, SPLITS 2, STAGES 2, TILE 128, WINDOW 300, "
        "maxnreg 168, num_warps 4; PDL 1",
    )
    expected = ["partial", "lse", "out", B * BLOCK * N]
    assert told(merge, **own) == (expected, "H 128, ROWS 16, SPLITS 2; PDL 1")


def test_attention_of_a_step(launched: list[Launched]) -> None:
    """Bug: the same of a step by specialised warps; or all of its splits wait for the last."""
    given, buffers = blocks(16), workspace(B, 16, N, H, 3, "cuda")
    q, kv_cache, table, start, out = given.values()
    config = specialized_attention.SpecializedConfig()
    rest = table, start, 16, True, out, buffers, config, 300
    specialized_attention.launch(q, kv_cache, *rest)
    (found,) = launched
    own = dict(zip(("partial", "lse", "arrived"), buffers, strict=True))
    assert found.grid == (K, B, 3)
    assert told(found, **own, **given) == (
        [
            "[32, 768] by [776, 1] in [16, 64] from 0",
            f"{KEYS}[16, 64] from 0",
            f"{KEYS}[16, 64] from {PLANE}",
            *("table", "start", W * S, "out", "partial", "lse", "arrived"),
            *(W + 3, 0.127517),
        ],
        "CAUSAL True, G 16, H 128, K 3, N 6, POLLS 4096, S 16, SPLITS 3, "
        "SPLIT_TILES 4, STAGES 5, TILE 64, WINDOW 300, maxnreg 168, num_warps 4; PDL 1",
    )


def test_attention_of_a_block(launched: list[Launched]) -> None:
    """Bug: values are keys, a gate's columns begin elsewhere; or a config's stages, or how long a
    split waits for the others, are not taken."""
    given, buffers = blocks(16), workspace(B, 16, N, H, 3, "cuda")
    q, kv_cache, table, start, out = given.values()
    gate, config = empty(2, 32, 1000, dtype=FP32), LaunchConfig(num_stages=2, polls=99)
    rest = table, start, 16, True, out, buffers, config, 300, 0, gate
    block_attention(q, kv_cache, *rest)
    (found,) = launched
    own = dict(zip(("partial", "lse", "arrived"), buffers, strict=True))
    assert found.grid == (K, B, 3)
    assert found.arguments[2].storage_offset() == PLANE
    assert found.arguments[8].storage_offset() == 1000 - N * H
    assert told(found, **own, **given) == (
        [
            *("q", "bfloat16 [40, 16, 3, 128]", "bfloat16 [40, 16, 3, 128]", "table", "start"),
            *(W * S, 256, "out", f"float32 [2, 32, {N * H}]", 1000, 32 * 1000),
            *("partial", "lse", "arrived", None, N * H + 8, W + 3, 0.127517),
        ],
        "CAUSAL True, CHUNK 128, DOT_FP32 False, G 16, GATE 2, H 128, K 3, N 6, "
        "PADDED 0, POLLS 99, PREFETCH True, ROWS 32, ROW_TILES 1, S 16, SINKS False, "
        "SPLITS 3, TILE 64, WIDE False, WINDOW 300, maxnreg 255, num_stages 2, "
        "num_warps 4; PDL 1",
    )


D = 512
ROWS_OF_X = f"[200, {D}] by [{D + 8}, 1] in "


def test_wide_tiles(launched: list[Launched]) -> None:
    """Bug: sub-tiles that a tile does not have, or SwiGLU's results in rows as long as its
    inputs."""
    x, out = wide(200, D), empty(2, 200, 1000, dtype=FP32)
    multiply(x, wide(1000, D, 16), None, out, SkinnyConfig(128, 64, 4, 2, 1, 8, cols=128), False)
    assert launched[0].grid == (2 * 8 * 2,)
    assert told(launched[0], out=out) == (
        [
            f"[1000, {D}] by [{D + 16}, 1] in [128, 64] from 0",
            f"{ROWS_OF_X}[128, 64] from 0",
            *("out", "out", "out", 200, 1000, 2, 4),
        ],
        "BLOCK_K 64, COLS 128, FP8 False, ROWS 128, STAGES 4, "
        "SUB 1, SWIGLU False, num_warps 8; PDL 1",
    )
    out = empty(200, 504)
    multiply(x, wide(1008, D, 16), None, out, SkinnyConfig(256, 64, 4, 1, 1, 8, 2, cols=256), True)
    up = 504 * (D + 16)
    assert launched[1].grid == (4,)
    assert told(launched[1], out=out) == (
        [
            f"[63, 2, 8, {D}] by [{8 * (D + 16)}, {up}, {D + 16}, 1] in [8, 2, 8, 64] from 0",
            f"{ROWS_OF_X}[256, 64] from 0",
            *("out", "out", "out", 200, 504, 1, 8),
        ],
        "BLOCK_K 64, COLS 256, FP8 False, ROWS 128, STAGES 4, "
        "SUB 2, SWIGLU True, num_warps 8; PDL 2",
    )


def test_tiles_of_specialised_warps(launched: list[Launched]) -> None:
    """Bug: the tiles of a second round are nobody's; scales of x are those of weights; results
    leave in boxes of another size, or the parts of a tile are two where there is one."""
    x, weight, out = empty(16, D, dtype=FP8), empty(1008, D, dtype=FP8), empty(16, 504)
    scales = Fp8Scales(empty(16, dtype=FP32), empty(1008, dtype=FP32))
    config = SkinnyConfig(128, 128, 4, 1, 1, 4, cols=16, consumers=2)
    multiply(x, weight, scales, out, config, True)
    assert launched[0].grid == (8,)
    assert told(launched[0], out=out, x_scale=scales[0], w_scale=scales[1]) == (
        [
            f"[63, 2, 8, {D}] by [{8 * D}, {504 * D}, {D}, 1] in [4, 2, 8, 128] from 0",
            *[f"[16, {D}] by [{D}, 1] in [16, 128] from 0"] * 2,
            *["[16, 504] by [504, 1] in [16, 32] from 0"] * 2,
            *("x_scale", "w_scale", "out", 16, 504, 8, 1, 4),
        ],
        "CONSUMERS 2, PARTS 1, REGISTERS 80, STAGES 4, TILE 128, maxnreg 64, num_warps 4; PDL 1",
    )
    config = SkinnyConfig(112, 64, 4, 2, 1, 4, 2, cols=160, consumers=2)
    out = empty(2, 200, 20000, dtype=FP32)
    multiply(wide(200, D), wide(20000, D, 16), None, out, config, False)
    assert launched[1].grid == (132,)
    assert told(launched[1], out=out) == (
        [
            f"[20000, {D}] by [{D + 16}, 1] in [64, 64] from 0",
            *[f"{ROWS_OF_X}[{rows}, 64] from 0" for rows in (128, 32, 128, 128)],
            *("out", "out", "out", 200, 20000, 2 * 179 * 2, 2, 4),
        ],
        "CONSUMERS 2, PARTS 2, REGISTERS 128, STAGES 4, TILE 112, maxnreg 96, num_warps 4; PDL 2",
    )


def test_tiles_of_a_few_rows(launched: list[Launched]) -> None:
    """Bug: each split sums what is behind it as well."""
    x, weight, out = wide(16, 500, 12), wide(640, 500, 20), empty(3, 16, 640, dtype=FP32)
    multiply(x, weight, None, out, SkinnyConfig(num_splits=3, num_stages=6, pdl=2), False)
    (found,) = launched
    assert found.grid == (30,)
    assert told(found, out=out) == (
        [
            "[640, 500] by [520, 1] in [64, 128] from 0",
            "[16, 500] by [512, 1] in [16, 128] from 0",
            *("out", "out", "out", 16, 640, 30, 3, 2),
        ],
        "BLOCK_K 128, COLS 16, FP8 False, ROWS 64, STAGES 6, SWIGLU False, num_warps 4; PDL 2",
    )


@pytest.mark.parametrize(
    ("tiles", "size", "boxes", "work"),
    [
        (chunk_linear.WIDE, "EXTRA True", [16, 1, [64, 64], [64, 64]], (4, 2, 1, 130, 264)),
        (chunk_linear.SMALL, "EXTRA False", [16, 1, [64, 64], [64, 128]], (6, 2, 1, 130, 264)),
        (chunk_linear.LARGE, "SWIGLU True", [4, None, [256, 64], [256, 32]], (3, 1, 1)),
    ],
)
def test_tiles_of_a_chunk(launched: list[Launched], tiles, size, boxes, work) -> None:
    """Bug: the weight rows that a wide tile has more are copied as a whole tile's, over what lies
    behind; or its results are written in rows of another length."""
    out = chunk_linear._launch(wide(130, 64), wide(528, 64, 16), tiles, True)
    (found,) = launched
    *of_weights, x_box, out_box = boxes
    assert told(found, out=out) == (
        [
            *(
                f"[33, 2, 8, 64] by [640, {264 * 80}, 80, 1] in [{eights}, 2, 8, 64] from 0"
                for eights in of_weights
                if eights is not None
            ),
            f"[130, 64] by [72, 1] in {x_box} from 0",
            f"[130, 264] by [264, 1] in {out_box} from 0",
            *(["out"] if tiles is not chunk_linear.LARGE else []),
            *work,
        ],
        f"{size}, maxnreg 168, num_warps 4; PDL 1",
    )


def test_streams_of_experts(launched: list[Launched]) -> None:
    """Bug: rows are taken for blocks of outputs, or an expert's width for a row's."""

    def matrix(rows: int, columns: int) -> Mxfp4:
        codes = empty(32, rows, columns, HALF_WORDS, dtype=I16)
        return Mxfp4(codes, empty(32, rows, columns, SCALES, dtype=U8))

    x, slots, pairs = empty(40, 128), ints(7, 3, dtype=I32), ints(160, dtype=I32)
    weights, biases = empty(40, 4, dtype=FP32), (empty(32, 384), empty(32, 128))
    plan, stream = (slots, pairs), moe_mxfp4_stream
    act = stream.launch_gate_up(x, matrix(6, 2), *plan, 4, biases[0], (1.5, 7.0))
    out = stream.launch_down(act, matrix(2, 3), weights, *plan, biases[1])
    own = {"x": x, "slots": slots, "pairs": pairs, "weights": weights, "act": act, "out": out}
    own |= {"gate_up_bias": biases[0], "down_bias": biases[1]}
    gate_up, down = launched
    assert (gate_up.grid, down.grid) == ((3, 7), (1, 7))
    assert told(gate_up, **own) == (
        [
            *("x", "int32 [32, 6, 2, 512]", "int32 [32, 6, 2, 32]", "gate_up_bias"),
            *("slots", "pairs", "act", 6),
        ],
        "ALPHA 1.5, D 128, K 4, LIMIT 7.0, ROWS 16, maxnreg 128, num_warps 8; PDL 1",
    )
    assert told(down, **own) == (
        [
            *("act", "int32 [32, 2, 3, 512]", "int32 [32, 2, 3, 32]", "down_bias"),
            *("weights", "slots", "pairs", "out", 40, 2),
        ],
        "I 192, K 4, ROWS 16, maxnreg 128, num_warps 8; PDL 1",
    )


def test_a_recurrence_s_prompt(launched: list[Launched]) -> None:
    """Bug: pieces' slots are taken for their positions, chunks that are prepared for others, or a
    scan has programs for rows of a state that there are not."""
    T, R, heads, key_heads = 100, 2, 6, 2
    C = (2 * key_heads + heads) * H
    E = C + heads * H + 2 * heads
    projected = empty(2, T, E + 4, dtype=FP32).narrow(2, 0, E)
    own = {"projected": projected, "conv": empty(C, 4)}
    own |= {name: empty(heads, dtype=FP32) for name in ("a_log", "dt_bias")}
    own |= {"windows": empty(3, 3, C), "states": empty(3, heads, H, H, dtype=FP32)}
    names = gated_delta_prefill.Pieces._fields
    pieces = gated_delta_prefill.Pieces(*(ints(R, dtype=I32) for _ in names))
    out = empty(T, heads, H)
    rest: Any = *own.values(), pieces, out
    gated_delta_prefill.gated_delta_prefill_(*rest)
    own |= {"out": out, **pieces._asdict()}
    convolve, prepare, scan = launched
    strides = E + 4, T * (E + 4)
    convolved = f"bfloat16 [{T}, {C}]"
    chunked = convolved, "bfloat16 [5, 6, 3, 32, 32]", "float32 [5, 6, 4, 32]"
    assert (convolve.grid, prepare.grid, scan.grid) == ((13, 5, R), (5, heads, R), (2 * heads, R))
    assert told(convolve, **own) == (
        ["projected", "conv", "windows", *names[:4], convolved, *strides],
        "C 1280, COLUMNS 256, ROWS 8, Z 2, num_warps 4; PDL 1",
    )
    assert told(prepare, **own) == (
        ["projected", "a_log", "dt_bias", "windows", *names, *chunked, *strides, 0.088388],
        "CHUNK 32, K 128, N 6, NK 2, Z 2, num_warps 2; PDL 1",
    )
    assert told(scan, **own) == (
        ["states", *names, *chunked, "out"],
        "CHUNK 32, K 128, N 6, NK 2, num_warps 4; PDL 1",
    )
    shared = prepare.arguments[10:13], scan.arguments[7:10]
    assert all(made is read for made, read in zip(*shared, strict=True))
