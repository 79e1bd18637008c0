"""Products with an FP8 matrix, beyond the rows of our own GEMM, against float64."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from graphengine.kernels.fp8 import FP8, round_rows_fp8
from graphengine.kernels.skinny_config import SKINNY_T
from graphengine.models.layers import Fp8Matrix, library_linear, linear_swiglu, quantize_fp8, swiglu

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
        rounded, scale_T = round_rows_fp8(x)
        expected = product(rounded.float() * scale_T[:, None], matrix)
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
