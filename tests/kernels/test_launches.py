"""What launchers of kernels that only a GPU runs ask it for: programs, tiles and refusals, noted in
place of launches of fake CUDA tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from graphengine.kernels import (
    chunk_linear,
    launch,
    moe_mxfp4_kernels,
    moe_mxfp4_stream,
    specialized_attention,
)
from graphengine.kernels.block_attention import block_attention, workspace
from graphengine.kernels.chunk_attention import BLOCK, chunk_attention
from graphengine.kernels.head_argmax import _launch as choose
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.mxfp4 import HALF_WORDS, SCALES, Mxfp4
from graphengine.kernels.skinny_config import SkinnyConfig
from graphengine.kernels.skinny_linear import launch as multiply
from graphengine.kernels.specialized_attention import SpecializedConfig
from tests.support.fake_hopper import NUM_SMS
from tests.support.kernel_launches import BF16, FP32, attend, attend_chunk, empty, ints

pytestmark = pytest.mark.skipif(INTERPRET, reason="launchers take other ways where it interprets")


WIDE = SkinnyConfig(192, 64, 4, 2, 1, 8, cols=128)
SPECIALIZED = SkinnyConfig(64, 64, 4, 1, cols=16, consumers=1)


@pytest.mark.parametrize(
    ("T", "rows", "config", "swiglu", "kernel", "programs"),
    [
        (200, 1000, WIDE, False, "wide_linear_kernel", 2 * 6 * 2),
        (200, 2000, WIDE._replace(num_splits=1), True, "wide_linear_kernel", 2 * 11),
        (16, 640, SPECIALIZED, False, "specialized_linear_kernel", 10),
        (16, 12800, SPECIALIZED, False, "specialized_linear_kernel", NUM_SMS),  # 200 in turn
        (16, 12800, SPECIALIZED, True, "specialized_linear_kernel", 200),  # one each
        (16, 640, SkinnyConfig(num_splits=3), False, "skinny_tma_kernel", 30),
        (16, 32000, SkinnyConfig(ctas_per_sm=2), False, "skinny_tma_kernel", 2 * NUM_SMS),
        (16, 32000, SkinnyConfig(use_tma=0), False, "skinny_pointer_kernel", 500),
    ],
)
def test_every_output_of_a_gemm_has_a_program(
    launched, T: int, rows: int, config: SkinnyConfig, swiglu: bool, kernel: str, programs: int
) -> None:
    """Bug: the last outputs are nobody's, half of SwiGLU's are, or what has no loop is given fewer
    programs than tiles: memory of the call before."""
    out = empty(T, rows // 2) if swiglu else empty(config.num_splits, T, rows, dtype=FP32)
    multiply(empty(T, 512), empty(rows, 512), None, out, config, swiglu)
    assert [(found.kernel, found.grid) for found in launched] == [(kernel, (programs,))]


def test_parts_of_a_tile_of_192_rows(launched) -> None:
    """Bug: the 128 rows of a tile's first part are asked for as its second's 64; or results of half
    a pair are written in pairs."""
    x, out = empty(192, 512), empty(1, 192, 640, dtype=FP32)
    config = SPECIALIZED._replace(cols=192)
    multiply(x, empty(640, 512), None, out, config, False)
    assert [desc.block_shape for desc in launched[0].arguments[:3]] == [
        [64, 64],
        [128, 64],
        [64, 64],
    ]
    with pytest.raises(ValueError, match="I a multiple of 8"):
        multiply(x, empty(24, 512), None, empty(192, 12), config, True)
    assert len(launched) == 1


@pytest.mark.parametrize(
    ("V", "config", "candidates"),
    [
        (1000, SkinnyConfig(), 16),
        (151936, SkinnyConfig(ctas_per_sm=1), NUM_SMS),  # which go through 18 tiles each
        (1000, WIDE, 6),
        (1000, SPECIALIZED._replace(rows=192, consumers=3), 18),
    ],
)
def test_every_candidate_of_a_head_has_its_place(
    launched, V: int, config: SkinnyConfig, candidates: int
) -> None:
    """Bug: consumers of a tile write over each other's candidates, or behind the last row's; or a
    large vocabulary's logits are written after all."""
    choose(empty(16, 512), empty(V, 512), None, config._replace(num_splits=1))
    gemm, combine = launched
    assert combine.kernel == "combine_argmax_kernel" and combine.grid == (16,)
    assert combine.arguments[0].shape == (16, candidates)
    assert any(x is combine.arguments[0] for x in gemm.arguments)


def test_a_head_that_is_not_ranked(launched) -> None:
    """Bug: float16, or more weight rows than an index has bits for, are ranked as bf16's."""
    x, weight = (empty(n, 512, dtype=torch.float16) for n in (16, 1000))
    for given in ((x, weight), (empty(16, 512), empty(2 * 10**7, 512))):
        assert choose(*given, None, SkinnyConfig()).shape == (16,)
    assert not launched


@pytest.mark.parametrize(
    ("change", "kernel"),
    [
        ({}, "skinny_tma_kernel"),
        ({"address": 4104}, "skinny_pointer_kernel"),
        ({"stride": 100}, "skinny_pointer_kernel"),
        ({"stride": 104}, "skinny_tma_kernel"),
        ({"dtype": FP32}, "skinny_pointer_kernel"),
        ({"capability": (8, 0)}, "skinny_pointer_kernel"),
        ({"capability": (10, 0)}, "skinny_pointer_kernel"),
    ],
)
def test_whose_rows_tma_takes(
    launched, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], kernel: str
) -> None:
    """Bug: a weight that a checkpoint's file has at no multiple of 16 bytes is given to TMA: the
    first step ends in a fault of the device."""
    capability = change.get("capability", (9, 0))
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda self: change.get("address", 4096))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    launch.supports_pdl.cache_clear()
    dtype, stride = change.get("dtype", BF16), change.get("stride", 96)
    x, weight = (empty(n, stride, dtype=dtype).narrow(1, 0, 96) for n in (16, 640))
    multiply(x, weight, None, empty(16, 640, dtype=dtype), SkinnyConfig(), False)
    assert [found.kernel for found in launched] == [kernel]


@pytest.mark.parametrize(
    ("tiles", "shape", "swiglu", "work", "box"),
    [
        (chunk_linear.SMALL, (1100, 19456, 2560), True, (9 * 76, 9, 40), [64, 128]),
        (chunk_linear.SMALL, (130, 528, 64), True, (2 * 3, 2, 1), [64, 128]),
        (chunk_linear.WIDE, (100, 34816, 5120), True, (128, 1, 80), [64, 64]),
        (chunk_linear.LARGE, (300, 400, 72), True, (2 * 3, 2, 2), [256, 32]),
        (chunk_linear.LARGE, (300, 408, 64), False, (2 * 3, 2, 1), [128, 64]),
    ],
)
def test_every_tile_of_a_chunk_has_a_program(launched, tiles, shape, swiglu, work, box) -> None:
    """Bug: the tiles that are cut short, or the last inputs, are nobody's; a second round's CTAs
    have nothing to do; results leave in boxes of another size than they lie in."""
    T, J, D = shape
    chunk_linear._launch(empty(T, D), empty(J, D), tiles, swiglu)
    (found,) = launched
    assert (found.kernel, found.grid) == (tiles.kernel.__name__, (min(work[0], NUM_SMS),))
    first = 3 if tiles is chunk_linear.LARGE else 5  # the others have an extra weight, and out
    assert found.arguments[first : first + 3] == work
    assert found.arguments[2 if tiles is chunk_linear.LARGE else 3].block_shape == box
    assert found.options.get("SWIGLU", True) == swiglu
    assert found.options.get("EXTRA", False) == (tiles is chunk_linear.WIDE)


def test_what_a_chunk_s_gemm_cannot_address(launched) -> None:
    """Bug: gates in no eights are written in the place of others; rows of no 16 bytes end in a
    fault of the device."""
    small, large = chunk_linear.SMALL, chunk_linear.LARGE
    chunk_linear._launch(empty(8, 64), empty(24, 64), large, False)
    x, weight = empty(8, 64), empty(32, 64)
    for bad, match in (
        ((x, empty(24, 64), small, True), "24 weight rows"),
        ((x, empty(20, 64), large, False), "20 weight rows"),
        ((empty(8, 68).narrow(1, 0, 64), weight, small, True), "TMA needs rows"),
        ((x, empty(32, 68).narrow(1, 0, 64), small, True), "TMA needs rows"),
        ((x, empty(64, 32).t(), small, True), "TMA needs rows"),
        ((empty(8, 64, dtype=torch.float16), weight, small, True), "needs bf16"),
    ):
        with pytest.raises(ValueError, match=match):
            chunk_linear._launch(*bad)
    assert len(launched) == 1


@pytest.mark.parametrize(
    ("H", "splits", "tile", "merge"),
    [(64, 0, 128, 0), (128, 1, 128, 0), (256, 0, 64, 0), (128, 2, 128, 384), (256, 3, 64, 768)],
)
def test_every_split_of_a_prompt_s_keys_has_a_program(
    launched, H: int, splits: int, tile: int, merge: int
) -> None:
    """Bug: what two splits find is not merged, or has no place; heads of 256 take tiles that fit in
    no shared memory."""
    attend_chunk(16, H, splits)
    found, *others = launched
    assert found.grid == (3 * 16 * max(splits, 1),)
    assert (found.options["TILE"], found.options["SPLITS"]) == (tile, max(splits, 1))
    assert (found.arguments[5] is None) == (merge == 0)
    assert [other.grid for other in others] == [(merge,)] * bool(merge)


def test_rows_of_a_prompt_that_tma_takes(launched) -> None:
    """Bug: queries in wider rows are refused though they begin at 16 bytes, or read where they do
    not."""
    B, N, H = 2, 6, 128
    cache, out = empty(2, 9, 16, 2, H), empty(B * BLOCK, N, H)
    table = ints(1, 9, dtype=torch.int32).expand(B, -1)  # blocks of one request
    rest = cache, table, ints(B, dtype=torch.int32), out
    for more in (0, 8, 64):
        chunk_attention(
            empty(B * BLOCK, N * H + more).narrow(1, 0, N * H).unflatten(1, (N, H)), *rest
        )
    for found in launched:
        assert found.arguments[10:12] == (0, 9 * 16)  # the table's stride, keys that there are
        assert found.options["GROUP"] == 3
    strides = [found.arguments[0].strides for found in launched]
    assert strides == [[N * H + more, 1] for more in (0, 8, 64)]
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        chunk_attention(empty(B * BLOCK, N * H + 4).narrow(1, 0, N * H).unflatten(1, (N, H)), *rest)


@pytest.mark.parametrize(("dtype", "tile", "num_warps"), [(BF16, 128, 4), (FP32, 32, 8)])
def test_warps_of_a_block_s_attention(
    launched, dtype: torch.dtype, tile: int, num_warps: int
) -> None:
    """Bug: products of float32, whose operands are in registers, are given to four warps and spill
    20 kB a thread."""
    attend(dtype, 128, 16, True, None, splits=2)
    (found,) = launched
    assert (found.options["TILE"], found.options["num_warps"]) == (tile, num_warps)


@pytest.mark.parametrize(("num_pages", "is_wide"), [(2**17 - 1, False), (2**17, True)])
def test_offsets_of_a_large_pool(launched, num_pages: int, is_wide: bool) -> None:
    """Bug: a plane of 2^31 elements is addressed in 32 bits: a page at its end is another."""
    q, cache = empty(16, 32, 64), empty(2, num_pages, 16, 16, 64)
    buffers = workspace(1, 16, 32, 64, 2, "cuda")
    table, start = ints(1, 9, dtype=torch.int32), ints(1, dtype=torch.int32)
    block_attention(q, cache, table, start, 16, True, empty(16, 32, 64), buffers)
    assert [found.options["WIDE"] for found in launched] == [is_wide]


@pytest.mark.parametrize(
    ("G", "N", "row_tiles"), [(5, 64, 1), (8, 64, 1), (9, 64, 2), (16, 32, 1), (16, 40, 2)]
)
def test_every_head_of_a_block_has_a_program(launched, G: int, N: int, row_tiles: int) -> None:
    """Bug: the heads of a second tile are nobody's, or narrow blocks, of which a tile has twice as
    many, take as many tiles as wide ones."""
    B, K, S, H, Z = 2, 8, 64, 128, 3
    q, cache = empty(B * G, N, H), empty(2, 9, S, K, H)
    table, start = ints(B, 9, dtype=torch.int32), ints(B, dtype=torch.int32)
    buffers = workspace(B, G, N, H, Z, "cuda")
    assert specialized_attention._row_tiles(q, cache, G) == row_tiles
    for causal in (True, False):
        rest = G, causal, empty(B * G, N, H), buffers, SpecializedConfig(), None
        specialized_attention.launch(q, cache, table, start, *rest)
        assert launched[-1].grid == (K * row_tiles, B, Z)
        assert launched[-1].options["CAUSAL"] == causal
        assert launched[-1].options["SPLIT_TILES"] == 4


@pytest.mark.parametrize(
    ("T", "blocks", "rows", "num_warps", "programs"),
    [
        (1, 90, 8, 4, 90),
        (32, 90, 8, 4, 90),
        (33, 90, 16, 8, 45),
        (64, 3, 16, 8, 2),
        (64, 1, 16, 4, 1),
    ],
)
def test_every_block_of_an_expert_has_a_warpgroup(
    launched, T: int, blocks: int, rows: int, num_warps: int, programs: int
) -> None:
    """Bug: an odd number of blocks leaves the last one out, experts of up to eight rows take twice
    the shared memory, or fewer programs stand on a multiprocessor than its registers are for."""
    E, K, D = 32, 4, 64
    codes = empty(E, blocks, 1, HALF_WORDS, dtype=torch.int16)
    matrix = Mxfp4(codes, empty(E, blocks, 1, SCALES, dtype=torch.uint8))
    slots, pairs = ints(7, 3, dtype=torch.int32), ints(T * K, dtype=torch.int32)
    weights = empty(T, K, dtype=FP32)
    act = moe_mxfp4_stream.launch_gate_up(empty(T, D), matrix, slots, pairs, K, None, None)
    assert act.shape == (T * K, 32 * blocks)
    out = moe_mxfp4_stream.launch_down(empty(T * K, 64), matrix, weights, slots, pairs, None)
    assert out.shape == (K, T, 64 * blocks)
    for found in launched:
        assert found.grid == (programs, 7)
        assert (found.options["ROWS"], found.options["num_warps"]) == (rows, num_warps)
        assert found.options["maxnreg"] * 16 * 32 == launch.REGISTERS  # of 16 warps


def test_rows_of_an_expert_at_once(launched) -> None:
    """Bug: what has been widened is used for fewer rows than there are."""
    E, K, D = 32, 4, 64
    codes = empty(E, 2, 1, HALF_WORDS, dtype=torch.int16)
    matrix = Mxfp4(codes, empty(E, 2, 1, SCALES, dtype=torch.uint8))
    slots = ints(7, 3, dtype=torch.int32)
    for T in (64, 65, 512, 513):
        pairs = ints(T * K, dtype=torch.int32)
        moe_mxfp4_kernels.launch_gate_up(empty(T, D), matrix, slots, pairs, K, None, None)
    assert [found.options["ROWS"] for found in launched] == [16, 32, 32, 64]


def test_experts_that_a_stream_takes(launched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: rows, or what lies between an expert's matrices, wider than shared memory are launched
    all the same, and the launch fails; or a GPU that has no such instructions gets them."""
    most = moe_mxfp4_stream.MOST_COLUMNS
    takes = moe_mxfp4_stream.takes
    assert takes(empty(1, 64), 64) and takes(empty(64, most), most)
    assert not takes(empty(65, 64), 64)
    assert not takes(empty(8, most + 64), 64) and not takes(empty(8, 64), most + 64)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert not takes(empty(1, 64), 64)


@pytest.mark.parametrize(
    ("capability", "is_early"), [((8, 9), False), ((9, 0), True), ((12, 0), True)]
)
def test_where_a_launch_is_early(launched, monkeypatch, capability, is_early) -> None:
    """Bug: kernels that wait for the one in front begin behind it, in every launch of a step; or an
    older GPU is asked for what it has not."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    launch.supports_pdl.cache_clear()
    expected = {"PDL": True, "launch_pdl": True} if is_early else {"PDL": False}
    assert launch.pdl_options(torch.device("cuda")) == expected
    assert launch.pdl_options(torch.device("cpu")) == {"PDL": False}
    multiply(empty(16, 512), empty(640, 512), None, empty(16, 640), SkinnyConfig(), False)
    assert launched[0].options.get("launch_pdl", False) == is_early
    assert bool(launched[0].options["PDL"]) == is_early
    assert [launch.early_options(pdl) for pdl in (0, 1, 2)] == [
        *({"PDL": 0}, {"PDL": 1, "launch_pdl": True}, {"PDL": 2, "launch_pdl": True})
    ]


def test_registers_of_few_programs() -> None:
    """Bug: a bound above what a thread may have, which the assembler refuses, or above what a
    multiprocessor has for all of them: the first launch fails."""
    found = [launch.all_registers(num_warps) for num_warps in (1, 4, 8, 16, 32)]
    assert [options["maxnreg"] for options in found] == [255, 255, 255, 128, 64]
    assert [options["num_warps"] for options in found] == [1, 4, 8, 16, 32]
