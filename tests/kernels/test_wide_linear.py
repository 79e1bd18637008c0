"""The GEMM of 65 to 256 rows against float64 products, with NaN around every input and output."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from graphengine.kernels.fp8 import Fp8Scales, quantize_rows_fp8, round_rows_fp8, widened
from graphengine.kernels.skinny_config import (
    PDL_EARLY,
    PDL_LATE,
    PDL_OFF,
    TUNED,
    SkinnyConfig,
    choose_config,
    rule_config,
    split_width,
    table_rows,
)
from graphengine.kernels.skinny_linear import (
    resolve,
    skinny_linear,
    skinny_linear_partials,
    skinny_linear_partials_reference,
    skinny_swiglu,
)
from graphengine.kernels.specialized_linear import check_tile, parts_of, registers_of
from graphengine.kernels.wide_linear import gluon_dtype, sub_tile_rows, weight_descriptor
from tests.kernels.test_skinny_linear import ROUNDING, make

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

SPECIALIZED = [
    SkinnyConfig(192, 64, 4, 1, 1, 4, PDL_LATE, cols=192, consumers=3),
    SkinnyConfig(64, 64, 6, 1, 1, 4, PDL_EARLY, cols=192, consumers=1),
    SkinnyConfig(128, 64, 6, 1, 1, 4, PDL_OFF, cols=128, consumers=2),
    SkinnyConfig(192, 128, 4, 1, 1, 4, PDL_EARLY, cols=16, consumers=3),
    SkinnyConfig(64, 64, 12, 1, 1, 4, PDL_LATE, cols=48, consumers=1),
    SkinnyConfig(224, 64, 6, 1, 1, 4, PDL_EARLY, cols=16, consumers=4),  # two share 32 weight rows
    SkinnyConfig(144, 64, 5, 1, 1, 4, PDL_LATE, cols=48, consumers=3),
    SkinnyConfig(48, 64, 5, 1, 1, 4, PDL_LATE, cols=16, consumers=1),  # with the next tile
]
CONFIGS = [
    SkinnyConfig(192, 64, 4, 1, 1, 8, PDL_LATE, cols=256),
    SkinnyConfig(192, 64, 3, 1, 1, 4, PDL_OFF, cols=128),
    SkinnyConfig(128, 64, 4, 1, 1, 8, PDL_EARLY, cols=256),
    SkinnyConfig(256, 64, 3, 1, 1, 8, cols=128),
    SkinnyConfig(192, 32, 5, 1, 1, 4, cols=128),
    SkinnyConfig(64, 64, 3, 1, 1, 4, cols=256),
]
CONFIGS += SPECIALIZED
SHAPES = [
    (65, 200, 136),  # tiles of rows, of x and of k with parts past the end
    (100, 129, 64),  # fewer blocks of k than stages; rows of outputs that no vector store takes
    (128, 1544, 192),
    (129, 77, 1000),
    (200, 392, 264),
    (240, 576, 640),
    (256, 1000, 1024),
    (16, 1000, 1000),
    (192, 20000, 200),  # several tiles a CTA, whose blocks are fewer than its stages
]


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    rtol = ROUNDING.get(got.dtype, 1e-5)
    torch.testing.assert_close(got.double(), expected, rtol=rtol, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("T", "E", "D"), SHAPES)
def test_partials(config, T, E, D) -> None:
    """Bug: a slot refilled while its block is still being multiplied, a tile that takes another
    one's rows, a split its neighbour's columns, an element left unwritten or written twice."""
    x, weight = make("cuda", T, E, D)
    for num_splits in (1, 3):
        partials = skinny_linear_partials(x, weight, num_splits, config)
        assert partials.shape == (num_splits, T, E)
        width = split_width(D, num_splits, config.block_k)
        for z in range(num_splits):
            columns = slice(z * width, (z + 1) * width)
            assert_close(partials[z], x[:, columns].double() @ weight[:, columns].double().T)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", CONFIGS)
def test_linear_and_swiglu(config, dtype) -> None:
    """Bug: a dtype read as another, gate paired with the up row of another output, the outputs of
    one sub-tile written over another's."""
    for T, E, D in SHAPES:
        x, weight = make("cuda", T, E, D, dtype)
        y = skinny_linear(x, weight, config)
        assert y.dtype == dtype
        assert_close(y, x.double() @ weight.double().T)
        x, gate_up = make("cuda", T, 2 * (E // 8 * 8), D, dtype)
        gate, up = (x.double() @ gate_up.double().T).chunk(2, dim=-1)
        assert_close(skinny_swiglu(x, gate_up, config), F.silu(gate) * up)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
def test_fp8(config) -> None:
    """Bug: the scale of another row, or of the gate for its up."""
    config = config._replace(block_k=2 * config.block_k)
    for T, E, D in [(65, 200, 144), (129, 1536, 512), (256, 400, 1024)]:
        x, weight = make("cuda", T, 2 * E, D)
        rows, x_scale = round_rows_fp8(x)
        quantized, w_scale = quantize_rows_fp8(weight)
        scales = Fp8Scales(x_scale, w_scale)
        wide_x, wide_weight = (y.double() for y in widened(rows, quantized, scales))
        exact = wide_x @ wide_weight.T
        # The tensor cores add FP8 products to 14 bits or so.
        partials = skinny_linear_partials(rows, quantized, 2, config, scales)
        torch.testing.assert_close(partials.sum(0).double(), exact, rtol=2**-7, atol=2**-7)
        y = skinny_linear(rows, quantized, config, scales)
        torch.testing.assert_close(y.double(), exact, rtol=2**-7, atol=2**-7)
        gate, up = exact.chunk(2, dim=-1)
        act = skinny_swiglu(rows, quantized, config, scales)
        torch.testing.assert_close(act.double(), F.silu(gate) * up, rtol=2**-6, atol=2**-6)


@pytest.mark.gpu
@pytest.mark.parametrize("key", [k for k, c in TUNED.items() if k[3] == 16 and c.consumers])
def test_entries_of_few_rows(key) -> None:
    """Bug: an entry that was chosen for its time alone: tiles, splits or stages that leave a part
    of its own matrix out, or an early start that reads what is not yet written."""
    E, D, _, rows = key
    for T in (1, 10, rows):
        x, weight = make("cuda", T, E, D)
        expected = x.double() @ weight.double().T
        assert_close(skinny_linear_partials(x, weight, config=TUNED[key]).sum(0), expected)
    if TUNED[key].num_splits == 1:
        gate, up = expected.chunk(2, dim=-1)
        assert_close(skinny_swiglu(x, weight, TUNED[key]), F.silu(gate) * up)


@pytest.mark.gpu
def test_swiglu_of_large_gates() -> None:
    """Bug: exp(-gate) overflows to inf / inf, NaN where silu is 0."""
    x = torch.full((65, 64), 30.0, device="cuda").bfloat16()
    gate_up = torch.ones(16, 64, device="cuda").bfloat16()
    gate_up[0] = -1
    act = skinny_swiglu(x, gate_up, CONFIGS[0])
    assert (act[:, 0] == 0).all()
    assert (act[:, 1:] > 1e6).all()


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
def test_same_bits_every_time(config) -> None:
    """Bug: a block of k that is multiplied before it has arrived, now and then; or rows that come
    out differently beside other rows."""
    x, weight = make("cuda", 256, 12288, 2048)
    first = skinny_linear_partials(x, weight, 2, config)
    for _ in range(20):
        assert torch.equal(first, skinny_linear_partials(x, weight, 2, config))
    assert torch.equal(first[:, 3:80], skinny_linear_partials(x[3:80], weight, 2, config))
    assert_close(first.sum(0), x.double() @ weight.double().T)


@pytest.mark.gpu
@pytest.mark.parametrize("configs", [CONFIGS[:5:2], SPECIALIZED[:3], SPECIALIZED[2:]])
@pytest.mark.parametrize("pdl", [PDL_OFF, PDL_LATE, PDL_EARLY])
def test_a_captured_chain_reads_this_replay(pdl, configs) -> None:
    """Bug: an activation read before the wait: a replay computes with the last replay's values."""
    torch.use_deterministic_algorithms(False)  # its fill kernels would stand between the GEMMs
    T, D = 256, 4096
    weights = [torch.randn(D, D, device="cuda").bfloat16() / 64 for _ in range(4)]
    gate_up = torch.randn(2 * D, D, device="cuda").bfloat16() / 64
    x = torch.randn(T, D, device="cuda").bfloat16()

    def chain(x: torch.Tensor) -> torch.Tensor:
        for i, weight in enumerate(weights):
            x = skinny_linear(x, weight, configs[i % 3]._replace(pdl=pdl))
        return skinny_swiglu(x, gate_up, configs[0]._replace(pdl=pdl))

    chain(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(x)
    for _ in range(20):
        x.normal_()
        expected = x
        for weight in weights:
            expected = (expected.double() @ weight.double().T).bfloat16()
        gate, up = (expected.double() @ gate_up.double().T).chunk(2, dim=-1)
        graph.replay()
        expected = (F.silu(gate) * up).bfloat16()
        torch.testing.assert_close(y, expected, rtol=5e-2, atol=5e-2)


@pytest.mark.gpu
def test_refuses_what_it_cannot_address() -> None:
    """Bug: rows of 200 bytes or in fp32 read as something else; a gate paired with a gate."""
    x, weight = make("cuda", 70, 64, 100)
    with pytest.raises(ValueError, match="16 bytes"):
        skinny_linear(x, weight, CONFIGS[0])
    x, weight = make("cuda", 70, 64, 128, torch.float32)
    with pytest.raises(ValueError, match="16 bits"):
        skinny_linear(x, weight, CONFIGS[0])
    x, weight = make("cuda", 70, 2 * 12, 128)
    with pytest.raises(ValueError, match="multiple of 8"):
        skinny_swiglu(x, weight, CONFIGS[0])


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (SPECIALIZED[0]._replace(rows=128), "of 64 weight rows each"),
        (SPECIALIZED[0]._replace(rows=136), "share sixteens"),
        (SPECIALIZED[0]._replace(rows=320, consumers=5), "1 to 4"),
        (SPECIALIZED[0]._replace(cols=112), "sum of two"),
        (SPECIALIZED[0]._replace(cols=24), "sum of two"),
        (SPECIALIZED[0]._replace(cols=256), "16 to 192"),
        (SPECIALIZED[0]._replace(cols=8), "16 to 192"),
        (SPECIALIZED[0]._replace(cols=0), "16 to 192"),
        (SPECIALIZED[0]._replace(block_k=32), "128 bytes"),
        (SPECIALIZED[0]._replace(num_stages=1), "two or more"),
        (CONFIGS[0]._replace(num_stages=1), "two or more"),
    ],
)
def test_refuses_tiles_that_it_cannot_make(config, problem) -> None:
    """Bug: results of SwiGLU written over another consumer's, a part of x left out, or a kernel
    that waits for itself."""
    x, weight = make("cpu", 70, 64, 128)
    with pytest.raises(ValueError, match=problem):
        skinny_swiglu(x, weight, config)


def test_parts_and_registers() -> None:
    """Bug: rows of x that no part has, or more registers than a multiprocessor has."""
    assert [parts_of(cols) for cols in (16, 48, 128, 160, 192)] == [
        *((16, 0), (32, 16), (128, 0), (128, 32), (128, 64))
    ]
    for consumers, cols, is_fp8 in itertools.product(
        (1, 2, 3, 4), (16, 64, 128, 192), (False, True)
    ):
        config = SkinnyConfig(64 * consumers, 64, 4, cols=cols, consumers=consumers)
        for dtype in (torch.float32, torch.int64):
            registers, later = registers_of(config, torch.empty(0, dtype=dtype), is_fp8)
            threads = 128 * (consumers + 1)
            assert registers * threads <= 65536
            assert 128 * (consumers * later + 24) <= registers * threads
            assert later > 64 * cols // 128  # a thread's sums


def test_registers_go_by_the_sums() -> None:
    """Bug: sums of FP8, which are scaled in registers, have as few as bf16's and spill; or so many
    are asked for that the next kernel's first loads wait for the end of this one."""

    def registers(cols: int, consumers: int, is_fp8: bool, dtype: torch.dtype = torch.float32):
        config = SkinnyConfig(64 * consumers, 64, 4, cols=cols, consumers=consumers)
        return registers_of(config, torch.empty(0, dtype=dtype), is_fp8)

    found = [registers(cols, 3, fp8) for cols in (64, 128, 192) for fp8 in (False, True)]
    assert found == [*((64, 72), (64, 72), (96, 120), (112, 136), (112, 136), (112, 136))]
    assert registers(192, 2, False) == (96, 128)
    assert registers(128, 4, True) == (96, 112)  # all that five warpgroups leave
    assert registers(16, 1, False, torch.int64) == (128, 232)  # a head's


def test_a_tile_of_the_table_is_for_hopper() -> None:
    """Bug: a shape of the table is refused in fp32 or on another GPU, where a kernel without TMA
    would do."""
    E, D = 24576, 4096
    x, weight = (torch.empty(n, D, device="meta") for n in (16, E))
    found = choose_config(16, E, D, swiglu=True)
    assert found and found.cols
    assert resolve(x, weight, None, swiglu=True) == rule_config(16, E, D, 4, swiglu=True)


def test_more_rows_than_a_skinny_tile() -> None:
    """Bug: 129 rows reach a kernel whose tile holds 128, or a config with cols runs a kernel on a
    machine that has none for it."""
    x, weight = make("cpu", 129, 24, 72)
    with pytest.raises(ValueError, match="cols"):
        skinny_linear(x, weight, SkinnyConfig())
    config = rule_config(129, 24, 72, 2, False)
    assert config.cols >= 129
    assert_close(skinny_linear(x, weight), x.double() @ weight.double().T)
    expected = skinny_linear_partials_reference(x, weight, config._replace(num_splits=2))
    assert torch.equal(skinny_linear_partials(x, weight, 2), expected)


def test_fp8_rows_of_a_wide_config() -> None:
    """Bug: rows rounded to one FP8 row are taken for half of a split pair, or the other way."""
    x, weight = make("cpu", 70, 40, 64)
    (rows, x_scale), (quantized, w_scale) = round_rows_fp8(x), quantize_rows_fp8(weight)
    scales = Fp8Scales(x_scale, w_scale)
    y = skinny_linear(rows, quantized, CONFIGS[0], scales)
    torch.testing.assert_close(y.float(), x.float() @ weight.float().T, rtol=0.1, atol=0.2)
    with pytest.raises(ValueError, match=r"need \[T, D\]"):
        skinny_linear(rows[None], quantized, CONFIGS[0], scales)
    with pytest.raises(ValueError, match=r"need \[2, T, D\]"):
        skinny_linear(rows, quantized, SkinnyConfig(), scales)


def test_rows_of_the_table() -> None:
    """Bug: just as many rows as a tile has run with the next larger one's config."""
    for rows, found in ((1, 16), (17, 32), (128, 128), (129, 192), (192, 192), (193, 256)):
        assert table_rows(rows) == found


def test_tall_tiles_are_a_head_s() -> None:
    """Bug: gate and up of a wide MLP, two tiles each, have twice the weight rows that stages were
    counted for, or a vocabulary's tiles are as low as a layer's."""
    rows = 512 * 132
    assert [rule_config(16, rows - 1, 4096, size, False).rows for size in (1, 2)] == [64, 64]
    assert [rule_config(16, rows, 4096, size, False).rows for size in (1, 2)] == [128, 128]
    assert [rule_config(16, 2 * rows, 4096, size, True).rows for size in (1, 2)] == [64, 64]


def test_up_rows_stand_where_the_strides_say() -> None:
    """Bug: the up rows of a matrix whose rows are not dense are read at the distance of dense
    ones."""
    weight = torch.empty(64, 80, dtype=torch.bfloat16)[:, :64]
    box = weight_descriptor(weight, 64, 32, True, gluon_dtype(weight))
    assert (box.shape, box.strides) == ([4, 2, 8, 64], [8 * 80, 32 * 80, 80, 1])


def test_sub_tiles_fill_a_tile() -> None:
    """Bug: the last weight rows of a tile of 192 are in none of its sub-tiles."""
    tiles = {c for c in (*CONFIGS, *TUNED.values()) if c.cols and not c.consumers}
    assert all(c.rows % sub_tile_rows(c) == 0 for c in tiles)
    assert {sub_tile_rows(c) for c in tiles} == {64, 128}


def test_between_two_tiles_the_larger_is_taken() -> None:
    """Bug: 150 rows of a shape whose tiles of 192 nobody has measured go to cuBLAS, though that of
    256 is faster."""
    assert (2560, 9216, 2, 192) not in TUNED
    assert choose_config(150, 2560, 9216) == TUNED[2560, 9216, 2, 256]


def test_bytes_of_a_block_are_of_its_weights() -> None:
    """Bug: a tile whose rows of 64 hold its results in bf16 is refused, or taken in FP8, where they
    do not."""
    for config in SPECIALIZED:
        check_tile(config, True, 2)
    with pytest.raises(ValueError, match="128 bytes"):
        check_tile(SPECIALIZED[0], True, 1)
    check_tile(SPECIALIZED[0]._replace(block_k=32), False, 2)  # other results are not held there
