"""skinny_argmax is argmax_rows of skinny_linear's logits: equal, not close."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from graphengine.kernels import argmax
from graphengine.kernels.argmax import NOT_FINITE, argmax_rows
from graphengine.kernels.fp8 import Fp8Scales, quantize_rows_fp8, round_rows_fp8, split_rows_fp8
from graphengine.kernels.head_argmax import skinny_argmax
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.skinny_config import (
    PDL_EARLY,
    PDL_LATE,
    PDL_OFF,
    SkinnyConfig,
    choose_config,
)
from graphengine.kernels.skinny_linear import skinny_linear
from graphengine.models import layers
from tests.kernels.test_skinny_linear import make
from tests.kernels.test_wide_linear import CONFIGS, SPECIALIZED

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

SKINNY = [
    SkinnyConfig(64, 128, 3, 1, 3, 4, PDL_LATE),
    SkinnyConfig(128, 64, 5, 1, 1, 4, PDL_EARLY),
    SkinnyConfig(128, 128, 2, 1, 1, 8, PDL_OFF),
    SkinnyConfig(64, 64, 8, 1, 4, 4),
]
CASES = [(config, T) for config in SKINNY for T in (1, 15, 16, 33, 120, 128)]
CASES += [(config, T) for config in CONFIGS for T in (16, 120, 128, 192, 240, 256)]
WHOLE = [(config, 16) for config in SKINNY] + [(config, 192) for config in SPECIALIZED]
WHOLE += [(config, 256) for config in CONFIGS if not config.consumers]
# Less than a tile; tiles with rows past the end, of some consumers all; several tiles a CTA, the
# last of them partial.
VOCABULARIES = (40, 1000, 64 * 132 * 5 + 24)


def operands(x: torch.Tensor, weight: torch.Tensor, config: SkinnyConfig, fp8: bool):
    """(x, weight, config, scales), in FP8 as `layers.operands` would have them."""
    if not fp8:
        return x, weight, config, None
    rows, x_scale = (round_rows_fp8 if config.cols else split_rows_fp8)(x)
    quantized, w_scale = quantize_rows_fp8(weight)
    config = config._replace(block_k=max(64, config.block_k))
    return rows, quantized, config, Fp8Scales(x_scale, w_scale)


def check(x: torch.Tensor, weight: torch.Tensor, config: SkinnyConfig, fp8: bool = False):
    given = operands(x, weight, config, fp8)
    logits = skinny_linear(*given)
    got = skinny_argmax(*given)
    assert got.dtype == torch.int64 and got.shape == x.shape[:1]
    assert got.tolist() == argmax_rows(logits).tolist()
    return got.tolist(), logits


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("config", "T"), CASES)
def test_equals_the_argmax_of_logits(config, T, fp8) -> None:
    """Bug: a row's candidate of another column or tile, a weight row past the end that wins with
    its 0, a candidate left unwritten, sums compared before they are rounded or scaled."""
    torch.manual_seed(T)
    for V in VOCABULARIES:
        x, weight = make("cuda", T, V, 272)
        check(x, weight, config, fp8)
        check(x.abs(), -weight.abs(), config, fp8)  # no logit reaches 0


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("config", "T"), CASES[::3])
def test_ties_go_to_the_lowest_index(config, T, fp8) -> None:
    """Bug: among equal logits, within a thread's rows, a tile or across tiles, one that depends on
    the layout or on which CTA ends last: greedy and sampled chains then differ."""
    for num_distinct in (1, 3, 40):
        x, rows = make("cuda", T, num_distinct, 128)
        choice = torch.randint(num_distinct, (9001,), device="cuda")
        first = torch.stack([(choice == i).nonzero()[0, 0] for i in range(num_distinct)])
        found, logits = check(x, rows[choice], config, fp8)
        by_row = logits[:, first].float()
        tied = by_row == by_row.amax(1, keepdim=True)
        assert found == torch.where(tied, first, 1 << 30).amin(1).tolist()
    zeros = torch.zeros(T, 128, device="cuda").bfloat16()
    signs = torch.ones(9001, 128, device="cuda").bfloat16()
    signs[::2] *= -1
    assert check(zeros, signs, config, fp8)[0] == [0] * T  # -0.0 and 0.0


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("config", [*SKINNY, *CONFIGS])
def test_what_is_not_finite_has_no_answer(config, fp8) -> None:
    """Bug: a NaN below every number, so that a broken model looks healthy; or a healthy row that is
    given up with its neighbour."""
    x, weight = (y.contiguous() for y in make("cuda", 16, 1000, 128))
    weight[:, 0] = weight[:, 0].abs() + 0.1
    healthy = check(x, weight, config, fp8)[0]
    x, weight, config, scales = operands(x, weight, config, fp8)
    if scales is not None:
        scales.x_T[3], scales.x_T[7] = torch.nan, torch.inf
    else:
        x[3, 5] = torch.nan
        x[7], x[9] = 0, 0
        x[7, 0], x[9, 0] = torch.inf, -torch.inf
    got = skinny_argmax(x, weight, config, scales)
    assert got.tolist() == argmax_rows(skinny_linear(x, weight, config, scales)).tolist()
    bad = (3, 7) if fp8 else (3, 7, 9)
    assert got.tolist() == [NOT_FINITE if t in bad else v for t, v in enumerate(healthy)]


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("config", "T"), WHOLE)
def test_a_whole_vocabulary(config, T, fp8) -> None:
    """Bug: an index or a count of candidates that overflows only at the real size."""
    torch.use_deterministic_algorithms(False)
    x, weight = make("cuda", T, 151936, 1024)
    check(x, weight, config, fp8)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("D", [2560, 4096])
@pytest.mark.parametrize("T", [1, 15, 16, 120, 128, 176, 192, 240, 256])
def test_heads_of_the_table(T, D, fp8) -> None:
    """Bug: the head that the engine runs is the one that nobody has tried."""
    torch.use_deterministic_algorithms(False)
    x, weight = make("cuda", T, 151936, D)
    config = choose_config(T, 151936, D, 1 if fp8 else 2)
    assert config is not None
    check(x, weight, config, fp8)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [SKINNY[0], CONFIGS[0], SPECIALIZED[1], SPECIALIZED[3]])
@pytest.mark.parametrize("pdl", [PDL_OFF, PDL_LATE, PDL_EARLY])
def test_a_captured_head_reads_this_replay(config, pdl) -> None:
    """Bug: candidates combined before the GEMM of this replay has written them, or x read before
    the kernel in front has: the last replay's tokens."""
    torch.use_deterministic_algorithms(False)  # its fill kernels would stand between the launches
    config, T = config._replace(pdl=pdl), 16
    _, weight = make("cuda", 1, 20000, 512)
    front = torch.randn(512, 512, device="cuda").bfloat16() / 20
    source = torch.randn(T, 512, device="cuda").bfloat16()

    def chain() -> list[torch.Tensor]:
        x = skinny_linear(source, front, config)
        return [skinny_argmax(x, weight, config) for _ in range(3)]

    chain()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(20):
        source.normal_()
        torch.cuda.synchronize()
        logits = skinny_linear(skinny_linear(source, front, config), weight, config)
        expected = argmax_rows(logits).tolist()
        graph.replay()
        assert [ids.tolist() for ids in found] == [expected] * 3


@triton.jit
def _rank_kernel(bits, index, rank, key, back):
    at = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    ranks = argmax.ranked(tl.load(bits + at), tl.load(index + at))
    tl.store(rank + at, ranks)
    tl.store(key + at, argmax.key_of_rank(ranks))
    tl.store(back + at, argmax.index_of_rank(ranks))


def test_ranks(device) -> None:
    """Bug: an order of 32 bits that is not (value, lower index): negatives turned round, -0.0 below
    0.0, NaN or an infinity that ranks as a number, an index that reaches into the value."""
    if device == "cpu" and not INTERPRET:
        pytest.skip("a kernel: interpreted, or on a GPU")
    generator = torch.Generator().manual_seed(0)
    patterns = torch.arange(1 << 16, dtype=torch.int32) << 16
    value = patterns.view(torch.float32)
    value = value[~(value.isnan() & (patterns < 0))].repeat(2)  # arithmetic leaves NaN no sign
    value = value[torch.randperm(len(value), generator=generator)]
    value = torch.cat([value, torch.zeros(2 * (1 << 16) - len(value))])
    index = torch.randint(1 << 16, (len(value),), generator=generator).int()
    index[:4] = torch.tensor([0, 1, 0xFFFE, 0xFFFF])
    rank, key, back = (torch.empty_like(index, device=device) for _ in range(3))
    bits = value.view(torch.int32).to(device)
    _rank_kernel[(len(value) // 4096,)](bits, index.to(device), rank, key, back)
    assert torch.equal(back.cpu(), index)
    magnitude = value.view(torch.int32) & 0x7FFFFFFF
    expected = torch.where(value < 0, -1 - magnitude, magnitude)
    assert torch.equal(key.cpu(), expected.int())
    order = rank.cpu().argsort(descending=True)
    ranked = list(zip((-expected[order]).tolist(), index[order].tolist(), strict=True))
    assert ranked == sorted(ranked)


@pytest.mark.parametrize("T", [1, 15, 100])
def test_elsewhere_it_goes_through_logits(device, T) -> None:
    """Bug: dtypes or strides that the kernels do not take are ranked as bf16, or refused."""
    for dtype, D in ((torch.bfloat16, 128), (torch.float16, 128), (torch.float32, 96)):
        x, weight = make(device, T, 300, D, dtype)
        assert torch.equal(skinny_argmax(x, weight), argmax_rows(skinny_linear(x, weight)))
    with pytest.raises(ValueError, match="need"):
        skinny_argmax(x, weight[:, :-1])


@pytest.mark.parametrize("config", [None, SkinnyConfig(num_splits=1), SkinnyConfig(num_splits=3)])
@pytest.mark.parametrize("fp8", [False, True])
def test_takes_the_gemm_of_the_logits(fp8, config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: another config or another rounding of x than the logits have, so that a greedy request's
    tokens depend on whether its neighbour is sampled."""
    calls: dict[str, Any] = {}

    def spied(name: str) -> None:
        real = getattr(layers, name)

        def call(x: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
            calls[name] = (x, weight, options["config"], options["scales"])
            return real(x, weight, **options)

        monkeypatch.setattr(layers, name, call)

    monkeypatch.setattr(layers, "skinny_config", lambda x, matrix: config)
    for name in ("skinny_argmax", "skinny_linear"):
        spied(name)
    x, weight = (y.contiguous() for y in make("cpu", 33, 500, 128, torch.bfloat16))
    matrix = layers.quantize_fp8(weight) if fp8 else weight
    found = layers.linear_argmax(x, matrix)
    fused = calls.pop("skinny_argmax", None)
    calls.clear()  # on the CPU the fused op goes through logits
    assert torch.equal(found, argmax_rows(layers.linear(x, matrix)))
    logits = calls.pop("skinny_linear", None)
    assert (fused is None) == (logits is None) == (config is None or config.num_splits > 1)
    if fused is not None and logits is not None:
        assert fused[2] == logits[2]
        scales = [(call[3] or ()) for call in (fused, logits)]
        for one, other in zip((*fused[:2], *scales[0]), (*logits[:2], *scales[1]), strict=True):
            assert one.dtype == other.dtype and torch.equal(one.float(), other.float())


@pytest.mark.skipif(INTERPRET, reason="the interpreter is not traced by dynamo")
@pytest.mark.parametrize("config", [None, SkinnyConfig()])
def test_compiles_into_a_segment(config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a launch that dynamo does not trace, in a segment that must be one graph."""
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(layers, "skinny_config", lambda x, matrix: config)
    x, weight = make("cpu", 16, 300, 64)

    def segment(x, weight):
        return layers.linear_argmax(x * 2, weight)

    compiled = torch.compile(segment, fullgraph=True, dynamic=False)
    assert torch.equal(compiled(x, weight), segment(x, weight))
