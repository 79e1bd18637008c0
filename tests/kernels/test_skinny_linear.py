"""skinny_linear and its relatives against float64 products, with NaN around every input."""

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from graphengine.kernels.fp8 import (
    FP8,
    Fp8Scales,
    quantize_rows_fp8,
    round_rows_fp8,
    split_rows_fp8,
    widened,
)
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.skinny_config import (
    MAX_SPLITS,
    NARROW_T,
    PDL_EARLY,
    PDL_LATE,
    PDL_OFF,
    SKINNY_T,
    TUNED,
    SkinnyConfig,
    choose_config,
    num_columns,
    rule_config,
    split_width,
)
from graphengine.kernels.skinny_linear import skinny_linear, skinny_linear_partials, skinny_swiglu

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

# Half an ulp of the result plus the fp32 sum; the interpreter truncates to bf16: one ulp.
ROUNDING = {torch.bfloat16: 2**-7 if INTERPRET else 2**-8, torch.float16: 2**-10}
SHARED_MEMORY_BYTES = 227 * 1024
SMALL = SkinnyConfig(rows=64, block_k=64, num_stages=3, ctas_per_sm=1)
SHAPES = [
    (1, 64, 256),
    (7, 200, 136),  # the last tile of rows and the last block of k are partial
    (16, 129, 512),
    (17, 77, 100),  # rows of 200 bytes: TMA cannot address them
    (64, 300, 192),
    (100, 136, 128),
]


def inside_nan(x: torch.Tensor) -> torch.Tensor:
    """The same values as a window of a larger NaN matrix: rows and columns past the end are NaN."""
    wide = x.new_full((x.shape[0] + 3, x.shape[1] + 16), torch.nan)
    wide[: x.shape[0], : x.shape[1]] = x
    return wide[: x.shape[0], : x.shape[1]]


def make(device: str, T: int, E: int, D: int, dtype: torch.dtype = torch.bfloat16):
    x = torch.randn(T, D, device=device, dtype=dtype)
    weight = torch.randn(E, D, device=device, dtype=dtype).div_(math.sqrt(D))
    return inside_nan(x), inside_nan(weight)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(
        got.double(), expected, rtol=ROUNDING.get(got.dtype, 1e-5), atol=2e-5
    )


@pytest.mark.parametrize("use_tma", [0, 1])
@pytest.mark.parametrize("num_splits", [1, 2, 3])
@pytest.mark.parametrize(("T", "E", "D"), SHAPES)
def test_partials(device, T, E, D, num_splits, use_tma) -> None:
    """Bug: a split that takes its neighbour's columns, a tail of rows or of k read past the end,
    padded rows written, a split without columns left unwritten."""
    x, weight = make(device, T, E, D)
    config = SMALL._replace(use_tma=use_tma)
    partials = skinny_linear_partials(x, weight, num_splits, config)
    assert partials.shape == (num_splits, T, E)
    assert partials.dtype == torch.float32
    assert partials.is_contiguous()
    width = split_width(D, num_splits, config.block_k)
    for z in range(num_splits):
        columns = slice(z * width, (z + 1) * width)
        assert_close(partials[z], x[:, columns].double() @ weight[:, columns].double().T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("T", "E", "D"), SHAPES)
def test_linear(device, T, E, D, dtype) -> None:
    """Bug: an accumulator rounded on the way, a dtype read as another."""
    x, weight = make(device, T, E, D, dtype)
    y = skinny_linear(x, weight, SMALL._replace(num_splits=2))
    assert y.dtype == dtype
    assert y.is_contiguous()
    assert_close(y, x.double() @ weight.double().T)


@pytest.mark.parametrize("use_tma", [0, 1])
@pytest.mark.parametrize(("T", "E", "D"), SHAPES)
def test_swiglu(device, T, E, D, use_tma) -> None:
    """Bug: gate and up exchanged, up rows taken at the tile's and not at I's distance."""
    x, gate_up = make(device, T, 2 * E, D)
    act = skinny_swiglu(x, gate_up, SMALL._replace(use_tma=use_tma))
    gate, up = (x.double() @ gate_up.double().T).chunk(2, dim=-1)
    assert act.shape == (T, E)
    assert_close(act, torch.nn.functional.silu(gate) * up)


def test_swiglu_of_large_gates(device) -> None:
    """Bug: exp(-gate) overflows to inf / inf, NaN where silu is 0."""
    x = torch.full((2, 64), 30.0, device=device).bfloat16()
    gate_up = torch.ones(4, 64, device=device).bfloat16()
    gate_up[0] = -1
    act = skinny_swiglu(x, gate_up, SMALL)
    assert act[:, 0].tolist() == [0, 0]
    assert (act[:, 1] > 1e6).all()


def configs() -> list[SkinnyConfig]:
    base = SkinnyConfig(rows=64, block_k=64, num_stages=2, ctas_per_sm=1)
    return [
        base._replace(num_stages=8),  # more stages than blocks
        base._replace(block_k=128, num_stages=3),
        base._replace(block_k=256, num_stages=2, rows=128),
        base._replace(rows=128, num_warps=8),
        base._replace(pdl=PDL_OFF),
        base._replace(pdl=PDL_EARLY),
    ]


@pytest.mark.parametrize("config", configs())
def test_every_config(device, config) -> None:
    """Bug: a ring of stages whose phase is wrong after a wrap, or from one item to the next."""
    E = 128 * 150 * 2 + 24 if device == "cuda" else 328  # more items than multiprocessors
    x, weight = make(device, 16, E, 576)
    expected = x.double() @ weight.double().T
    assert_close(skinny_linear(x, weight, config), expected)
    assert_close(skinny_linear_partials(x, weight, 4, config).sum(0), expected)
    gate, up = expected.chunk(2, dim=-1)
    got = skinny_swiglu(x, weight, config._replace(block_k=64))
    assert_close(got, torch.nn.functional.silu(gate) * up)


def test_same_bits_every_time(device) -> None:
    """Bug: a sum whose order depends on the schedule: greedy output changes between runs."""
    x, weight = make(device, 16, 520, 1024)
    first = skinny_linear_partials(x, weight, 3)
    for _ in range(3):
        assert torch.equal(first, skinny_linear_partials(x, weight, 3))
    alone = skinny_linear_partials(x[:1], weight, 3)
    torch.testing.assert_close(alone[:, 0], first[:, 0], rtol=1e-5, atol=1e-5)


def test_quantize_rows() -> None:
    """Bug: one scale for the matrix (small rows vanish), overflow to NaN at 448, a zero row."""
    weight = torch.randn(5, 300).bfloat16() * torch.tensor([[1e-3], [1.0], [900.0], [0.0], [1e-12]])
    quantized, scale = quantize_rows_fp8(weight)
    assert quantized.dtype == FP8
    back = quantized.float() * scale[:, None]
    assert back.isfinite().all()
    assert (back[3] == 0).all()
    error = (back - weight).abs()
    assert (error <= torch.maximum(weight.abs() * 2**-4, scale[:, None] * 2**-10)).all()


def test_split_rows() -> None:
    """Bug: hi alone (3 bits of mantissa) where hi + lo were meant; overflow to NaN at 448."""
    x = torch.randn(5, 300).bfloat16() * torch.tensor([[1e-3], [1.0], [900.0], [0.0], [1e-12]])
    split, scale = split_rows_fp8(x)
    assert split.shape == (2, 5, 300)
    assert split.dtype == FP8
    back = split.float().sum(0) * scale[:, None]
    assert back.isfinite().all()
    error = (back - x.float()).abs()
    assert (error <= torch.maximum(x.float().abs() * 2**-8, scale[:, None] * 2**-10)).all()


@pytest.mark.parametrize("config", [SMALL, SMALL._replace(block_k=128)])
@pytest.mark.parametrize(("T", "E", "D"), [(7, 200, 144), (16, 129, 512), (64, 300, 256)])
def test_fp8(device, T, E, D, config) -> None:
    """Bug: the scale of another row (or of the gate for up), lo rows taken from another request,
    or x of the padded columns."""
    x, weight = make(device, T, 2 * E, D)
    quantized, scale_E = quantize_rows_fp8(weight)
    split, scale_T = split_rows_fp8(x)
    scales = Fp8Scales(scale_T, scale_E)
    exact = x.double() @ (quantized.double() * scale_E.double()[:, None]).T
    # The tensor cores add FP8 products to 14 bits or so; x itself is exact to bf16.
    y = skinny_linear(split, quantized, config, scales)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), exact, rtol=2**-7, atol=2**-7)
    partials = skinny_linear_partials(split, quantized, 2, config, scales)
    assert partials.shape == (2, T, 2 * E)
    torch.testing.assert_close(partials.sum(0).double(), exact, rtol=2**-7, atol=2**-7)
    gate, up = exact.chunk(2, dim=-1)
    act = skinny_swiglu(split, quantized, config, scales)
    torch.testing.assert_close(
        act.double(), torch.nn.functional.silu(gate) * up, rtol=2**-6, atol=2**-6
    )


def shapes_of(hidden: int, width: int) -> list[tuple[int, int, bool]]:
    """(E, D, swiglu) of qkv, o, gate_up, down, fc and lm_head with 32 / 8 heads of 128."""
    return [
        (6144, hidden, False),
        (hidden, 4096, False),
        (2 * width, hidden, True),
        (hidden, width, False),
        (hidden, 5 * hidden, False),
        (151936, hidden, False),
    ]


@pytest.mark.parametrize("weight_bytes", [1, 2])
@pytest.mark.parametrize(("hidden", "width"), [(4096, 12288), (2560, 9728), (1024, 3072)])
def test_chosen_configs_fit(hidden, width, weight_bytes) -> None:
    """Bug: a rule or a table entry that asks for more shared memory than there is, found at the
    first launch on the GPU; or a split count that Inductor does not unroll."""
    for E, D, swiglu in shapes_of(hidden, width):
        for T in (1, 16, 17, 64, 128, 192, 256):
            shape = (T, E, D, weight_bytes, swiglu)
            config = choose_config(*shape) or rule_config(*shape)
            assert 1 <= config.num_splits < MAX_SPLITS
            assert not (swiglu and config.num_splits > 1)
            if config.cols:  # the epilogue reuses the stages
                tile = (config.rows + config.cols) * weight_bytes
                stages = tile * config.block_k * config.num_stages
                assert stages + 1024 <= SHARED_MEMORY_BYTES
                num_threads = 128 * config.consumers or config.num_warps * 32
                limit = 96 if config.consumers else 192  # of sums a thread
                assert config.rows * config.cols <= limit * num_threads
                continue
            cols = num_columns(T)
            # FP8 activations are two rows of one byte: as many bytes as bf16.
            tile = config.rows * (2 if swiglu else 1) * weight_bytes + cols * 2
            stages = tile * config.block_k * config.num_stages
            epilogue = min(config.rows * cols * 4, 16384)  # the layout is turned in parts
            resident = config.ctas_per_sm if T <= 64 else 1
            assert (stages + epilogue + 2048) * resident <= SHARED_MEMORY_BYTES
    # With `cols` an FP8 x is rounded, which "fp8" does not allow up to SKINNY_T rows.
    assert not [k for k, c in TUNED.items() if k[3] <= SKINNY_T and k[2] == 1 and c.cols]
    assert choose_config(65, 4096, 4096) == TUNED[4096, 4096, 2, 128]
    assert choose_config(64, 4096, 4112) == rule_config(64, 4096, 4112, 2, False)
    assert choose_config(65, 4096, 4112) is None
    assert choose_config(129, 4096, 4096) == TUNED[4096, 4096, 2, 192]
    assert choose_config(192, 4096, 4096) == TUNED[4096, 4096, 2, 192]
    assert choose_config(193, 4096, 4096) == TUNED[4096, 4096, 2, 256]
    assert choose_config(129, 4096, 4112) is None
    assert choose_config(257, 4096, 4096) is None
    assert choose_config(0, 4096, 4096) is None


def in_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    num: int = 2,
):
    return torch.stack([x] * num).to(FP8), weight.to(FP8), SMALL, Fp8Scales(x_scale, w_scale)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: skinny_linear(x[:0], w, SMALL), "0 rows"),
        (lambda x, w: skinny_linear(x.repeat(300, 1), w, SMALL), "F.linear"),
        (lambda x, w: skinny_linear(x[:, :-1], w, SMALL), "need"),
        (lambda x, w: skinny_linear(x, w.T.contiguous().T, SMALL), "contiguous"),
        (lambda x, w: skinny_linear(x, w.float(), SMALL), "cast one"),
        (lambda x, w: skinny_linear(x, w.to(FP8), SMALL), "scales belong to"),
        (lambda x, w: skinny_linear(x.to(FP8), w.to(FP8), SMALL), "with scales"),
        (lambda x, w: skinny_linear(*in_fp8(x, w, torch.ones(3), torch.ones(19))), "weight's"),
        (lambda x, w: skinny_linear(*in_fp8(x, w, torch.ones(3), torch.ones(20), 3)), "2, T, D"),
        (lambda x, w: skinny_linear(*in_fp8(x, w, torch.ones(4), torch.ones(20))), "x's scale"),
        (lambda x, w: skinny_linear(x, w, SMALL._replace(cols=128, num_stages=1)), "num_stages"),
        (lambda x, w: skinny_swiglu(x, w[:-1], SMALL), "as many gate rows"),
        (lambda x, w: skinny_linear_partials(x, w, 0, SMALL), "num_splits 0"),
    ],
)
def test_refuses(device, call: Callable[..., torch.Tensor], message) -> None:
    """Bug: a wrong stride, dtype or shape read as if it were right."""
    x = torch.randn(3, 64, device=device).bfloat16()
    weight = torch.randn(20, 64, device=device).bfloat16()
    with pytest.raises(ValueError, match=message):
        call(x, weight)


def test_the_most_rows_without_cols(device) -> None:
    """Bug: as many rows as a tile holds are refused, or of one more the last is left out."""
    x, weight = make(device, NARROW_T + 1, 64, 128)
    rows = x[:NARROW_T]
    assert_close(skinny_linear(rows, weight, SMALL), rows.double() @ weight.double().T)
    with pytest.raises(ValueError, match="129 rows: more than 128 need a config with cols"):
        skinny_linear(x, weight, SMALL)


@pytest.mark.skipif(INTERPRET, reason="the interpreter is not traced by dynamo")
def test_compiled_consumer_adds_the_partials(device) -> None:
    """Bug: a graph break, an input copied before the op, or a kernel of its own for the sum over
    the splits, which would cost what split-K saves."""
    T, D, E, eps = 16, 256, 512, 1e-6

    def segment(h, x, down, gate_up, norm):
        h = (h.float() + skinny_linear_partials(x, down, 3, SMALL).sum(0)).to(h.dtype)
        h32 = h.float()
        normed = h32 * torch.rsqrt(h32.square().mean(-1, keepdim=True) + eps) * norm.float()
        return h, skinny_swiglu(normed.to(h.dtype), gate_up)  # the config is chosen while traced

    torch.use_deterministic_algorithms(False)
    h, norm = (torch.randn(*shape, device=device).bfloat16() for shape in ((T, D), (D,)))
    x = torch.randn(T, E, device=device).bfloat16()
    down = torch.randn(D, E, device=device).bfloat16() / 20
    gate_up = torch.randn(2 * E, D, device=device).bfloat16() / 16
    arguments = (h, x, down, gate_up, norm)
    compiled = torch.compile(segment, fullgraph=True, dynamic=False)
    (got_h, got_act), sources = run_and_get_code(compiled, *arguments)
    expected_h, expected_act = segment(*arguments)
    torch.testing.assert_close(got_h, expected_h, rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(got_act, expected_act, rtol=2e-2, atol=2e-2)
    code = "\n".join(sources)
    assert code.count("torch.ops.graphengine.skinny_linear_partials.default(") == 1
    calls = re.findall(r"^ +(?:cpp_fused\w+\(|triton_\w+\.run\()", code, re.MULTILINE)
    assert len(calls) == 1, f"one kernel between the two ops, not {calls}"


@pytest.mark.skipif(INTERPRET, reason="the interpreter is not traced by dynamo")
def test_a_config_of_the_table_is_chosen_while_traced(device, monkeypatch) -> None:
    """Bug: choosing one asks for an address, which nothing has while it is traced."""
    torch.use_deterministic_algorithms(False)
    config = SkinnyConfig(64, 64, 4, 1, 1, 4, cols=16, consumers=1)
    monkeypatch.setitem(TUNED, (256, 128, 2, 16), config)
    x, gate_up = make(device, 16, 256, 128)
    compiled = torch.compile(skinny_swiglu, fullgraph=True, dynamic=False)
    got, expected = compiled(x, gate_up), skinny_swiglu(x, gate_up)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [PDL_OFF, PDL_LATE, PDL_EARLY])
def test_a_captured_chain_reads_this_replay(pdl) -> None:
    """Bug: an activation read before the wait: a replay computes with the last replay's values."""
    torch.use_deterministic_algorithms(False)  # its fill kernels would stand between the GEMMs
    T, D = 16, 4096
    config = SkinnyConfig(pdl=pdl)
    weights = [torch.randn(D, D, device="cuda").bfloat16() / 64 for _ in range(8)]
    x = torch.randn(T, D, device="cuda").bfloat16()

    def chain(x: torch.Tensor) -> torch.Tensor:
        for i, weight in enumerate(weights):
            x = skinny_linear(x, weight, config._replace(rows=128 if i % 2 else 64))
        return x

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
        graph.replay()
        torch.testing.assert_close(y, expected, rtol=5e-2, atol=5e-2)


def test_no_config_takes_x_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: rows split in two are refused where the table's entry of the shape takes one."""
    E, D, T = 96, 64, 100
    monkeypatch.setitem(TUNED, (E, D, 1, 128), SkinnyConfig(64, 64, cols=128))
    x, weight = make("cpu", T, E, D, torch.float32)
    quantized, w_scale = quantize_rows_fp8(weight)
    for rows, x_scale in (split_rows_fp8(x), round_rows_fp8(x)):
        scales = Fp8Scales(x_scale, w_scale)
        y = skinny_linear(rows, quantized, scales=scales)
        wide_x, wide_weight = widened(rows, quantized, scales)
        torch.testing.assert_close(y.float(), wide_x @ wide_weight.T, rtol=1e-2, atol=1e-2)


def test_a_split_is_worth_its_partial_sums() -> None:
    """Bug: few columns are cut into splits of one block, whose sums cost more than their weights;
    or into none at all."""
    for D in (64, 100, 512, 1024, 2048, 4096):
        config = rule_config(16, 256, D, 2, False)
        num_blocks = -(-D // config.block_k)
        assert config.num_splits == max(1, min(MAX_SPLITS - 1, num_blocks // 4)), D
