"""Products with an FP8 matrix, beyond the rows of our own GEMM, against float64."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from graphengine.kernels.add_rms_norm import add_rms_norm_reference
from graphengine.kernels.fp8 import FP8, Fp8Rows, round_rows_fp8
from graphengine.kernels.skinny_config import SKINNY_T, TUNED, SkinnyConfig
from graphengine.models import layers
from graphengine.models.layers import (
    Fp8Matrix,
    add_rms_norm,
    library_linear,
    linear,
    linear_partials,
    linear_swiglu,
    quantize_fp8,
    swiglu,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def product(x: torch.Tensor, matrix: Fp8Matrix) -> torch.Tensor:
    return x.double() @ (matrix.weight_ED.double() * matrix.scale_E.double()[:, None]).T


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def test_rounded_rows() -> None:
    """Bug: the scale is the tensor's, so that one large row rounds the others to nothing."""
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    x *= torch.tensor([1e-6, 1.0, 1e6, 0.0, 3.0])[:, None]
    rounded, scale_T = round_rows_fp8(x)
    again = rounded.float() * scale_T[:, None]
    assert rounded.dtype == torch.float8_e4m3fn
    largest = x.abs().amax(dim=1, keepdim=True)
    assert bool(((again - x).abs() <= torch.maximum(x.abs() * 2**-4, largest * 2**-15)).all())
    torch.testing.assert_close(again.abs().amax(dim=1), largest[:, 0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("E", "D"), [(96, 64), (4096, 2560), (100, 72)])
def test_many_rows(device: str, E: int, D: int) -> None:
    """Bug: rows and columns exchange their scales; the last rows of a tile are not written; or
    shapes that the library's FP8 product does not take raise instead of going another way."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    for T in (SKINNY_T + 1, 128, 250):
        spread = torch.logspace(-2, 2, T, device=device)[:, None]
        x = (torch.randn(T, D, generator=generator, device=device) * spread).to(dtype)
        weight = torch.randn(E, D, generator=generator, device=device)
        weight *= torch.logspace(-3, 1, E, device=device)[:, None]
        matrix = quantize_fp8(weight.to(dtype))
        # On the CPU: on a GPU torch divides by a reciprocal, which rounds a few elements elsewhere.
        rounded, scale_T = round_rows_fp8(x.cpu())
        expected = product((rounded.float() * scale_T[:, None]).to(device), matrix)
        got = library_linear(x, matrix)
        assert got.dtype == dtype
        # Row by row: the largest rows must not hide what happens to the smallest.
        for row in range(T):
            assert relative(got[row], expected[row]) < 2e-2
        assert relative(got, product(x, matrix)) < 5e-2
        bias = torch.randn(E, generator=generator, device=device).to(dtype)
        assert relative(library_linear(x, matrix, bias), got.double() + bias.double()) < 1e-2


@pytest.mark.parametrize("device", DEVICES)
def test_few_rows_stay_exact(device: str) -> None:
    """Bug: activations are rounded where nothing is gained by it."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(SKINNY_T, 64, generator=generator, device=device)
    matrix = quantize_fp8(torch.randn(96, 64, generator=generator, device=device))
    assert relative(library_linear(x, matrix), product(x, matrix)) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_are_not_finite(device: str) -> None:
    """Bug: a row with NaN or infinity spoils others, through a scale or a tile that they share; or
    it becomes finite, and nobody learns of it. A row of zeros is divided by zero."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(80, 64, generator=generator, device=device).to(dtype)
    matrix = quantize_fp8(torch.randn(96, 64, generator=generator, device=device))
    expected = library_linear(x, matrix)
    x[3, 5], x[40, 1], x[41, 2], x[79] = torch.nan, torch.inf, -torch.inf, 0.0
    got = library_linear(x, matrix)
    assert got[[3, 40, 41]].isnan().all() and not got[79].any()
    others = [row for row in range(79) if row not in (3, 40, 41)]
    assert torch.equal(got[others], expected[others])


def test_the_library_takes_our_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a stride, a scale's shape or a dimension that torch._scaled_mm refuses on a GPU, at rows
    that are no multiple of a tile; or shapes that it takes go the slow way."""
    widths: list[int] = []
    real: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]

    def record(x: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        widths.append(weight.shape[1])
        return real(x, weight, **options)

    def with_axis(x: torch.Tensor, index: tuple[slice | None, ...]) -> torch.Tensor:
        return x.unsqueeze(index.index(None))

    # CPU builds of torch refuse to index what claims to be on a GPU.
    monkeypatch.setattr(FakeTensor, "__getitem__", with_axis)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch, "_scaled_mm", record)
    with FakeTensorMode():
        for T in (65, 75, 128, 250, 2048):
            for E, D in ((10240, 4096), (4096, 20480), (151936, 2560), (100, 64)):
                weight = torch.empty(E, D, dtype=FP8, device="cuda")
                matrix = Fp8Matrix(weight, torch.empty(E, device="cuda"))
                for width in (D, 2 * D):  # of the tensor that x is a part of
                    x = torch.empty(T, width, dtype=torch.bfloat16, device="cuda")
                    y = library_linear(x.narrow(1, 0, D), matrix)
                    assert (y.shape, y.dtype, y.stride()) == ((T, E), torch.bfloat16, (E, 1))
    assert widths == [E for _ in range(5) for E in (10240, 4096, 151936) for _ in range(2)]


def test_swiglu_of_many_rows() -> None:
    """Bug: the gate's half is rounded by the up half's scale."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 64, generator=generator)
    gate_up = quantize_fp8(torch.randn(96, 64, generator=generator))
    expected = swiglu(product(x, gate_up).float())
    assert relative(linear_swiglu(x, gate_up), expected.double()) < 8e-2


# --- the norm in front rounds for whoever multiplies ---

E, D = 192, 128
EPS = 1e-6


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers take the ways of the GPU, whose kernels run as their references; one shape has a
    tile of its own above 128 rows, another none."""
    monkeypatch.setattr(layers, "_takes_skinny", lambda x: x.dtype == torch.bfloat16)
    config = SkinnyConfig(rows=64, num_splits=2, cols=256)
    monkeypatch.setitem(TUNED, (E, D, 1, 256), config)


def normed(num_rows: int, partials: int, matrix: Fp8Matrix, bias: torch.Tensor | None) -> Any:
    """(x as the matrix takes it, x in bf16)."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(num_rows, D, generator=generator).bfloat16()
    update = torch.randn(partials, num_rows, D, generator=generator)
    norm = (1 + 0.3 * torch.randn(D, generator=generator)).bfloat16()
    h_out, x = add_rms_norm(h, update, norm, EPS, matrix, bias)
    wanted_h, wanted_x = add_rms_norm_reference(h, update, norm, EPS)
    assert torch.equal(h_out, wanted_h)
    return x, wanted_x


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("num_rows", [7, 64, 65, 128, 129, 250, 300])
def test_norm_and_product_agree(num_rows: int, biased: bool) -> None:
    """Bug: the norm rounds where the product expects two rows, or none, or the other way about: at
    the last row count of a tile, with a bias, beyond the table. Or x is rounded twice."""
    generator = torch.Generator().manual_seed(1)
    matrix = quantize_fp8(torch.randn(E, D, generator=generator))
    bias = torch.randn(E, generator=generator).bfloat16() if biased else None
    x, plain = normed(num_rows, 3, matrix, bias)
    if num_rows > SKINNY_T:
        assert isinstance(x, Fp8Rows) and x.rows.shape == (num_rows, D)
        exact = product(x.rows.float() * x.scale_T[:, None], matrix)
    else:
        assert torch.equal(x, plain) if bias is not None else x.rows.shape == (2, num_rows, D)
        exact = product(plain, matrix)
    assert relative(exact, product(plain, matrix)) < 5e-2
    exact = exact if bias is None else exact + bias.double()
    for rows in (x, plain):
        y = linear(rows, matrix, bias)
        partials = linear_partials(rows, matrix, bias)
        assert y.dtype == torch.bfloat16
        assert relative(y, exact) < 5e-3
        assert relative(partials if partials.dim() == 2 else partials.sum(0), exact) < 5e-3
    if bias is None:
        gate, up = exact.chunk(2, dim=-1)
        wanted = torch.nn.functional.silu(gate) * up
        assert relative(linear_swiglu(x, matrix), wanted) < 1e-2


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("num_rows", [64, 128, 250])
def test_traced_segments(num_rows: int) -> None:
    """Bug: a segment with rounded rows breaks the graph, or what is traced has other shapes than
    what runs."""
    matrix = quantize_fp8(torch.randn(E, D, generator=torch.Generator().manual_seed(1)))

    def segment(h: torch.Tensor, update: torch.Tensor, norm: torch.Tensor) -> list[torch.Tensor]:
        h, x = add_rms_norm(h, update, norm, EPS, matrix)
        act = linear_swiglu(x, matrix)
        return [h, linear(x, matrix), linear_partials(act.repeat(1, 2)[:, :D], matrix)]

    given = (torch.randn(num_rows, D).bfloat16(), torch.randn(2, num_rows, D), torch.ones(D))
    given = (*given[:2], given[2].bfloat16())
    compiled = torch.compile(segment, fullgraph=True, dynamic=False, backend="aot_eager")
    for got, wanted in zip(compiled(*given), segment(*given), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [128, 256])
def test_a_captured_layer_reads_this_replay(num_rows: int) -> None:
    """Bug: a GEMM that starts before the rows in front of it are rounded, or a rounding before the
    GEMM in front of it has ended, reads what an earlier replay left."""
    generator = torch.Generator("cuda").manual_seed(0)

    def matrix(outputs: int, inputs: int) -> Fp8Matrix:
        weight = torch.randn(outputs, inputs, generator=generator, device="cuda")
        return quantize_fp8((weight / inputs**0.5).bfloat16())

    o, gate_up, down = matrix(4096, 4096), matrix(24576, 4096), matrix(4096, 12288)
    norm = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(num_rows, 4096, generator=generator, device="cuda").bfloat16()

    def layer() -> torch.Tensor:
        h, y = x, linear_partials(x, o)
        for _ in range(3):
            h, y = add_rms_norm(h, y, norm, EPS, gate_up)
            y = linear_partials(linear_swiglu(y, gate_up), down)
        return h

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    for sign in (1, -1) * 10:
        x.mul_(sign)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, layer())
