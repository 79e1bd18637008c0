"""Products with an FP8 matrix, beyond the rows of our own GEMM, against float64."""

import pytest
import torch

from graphengine.kernels.fp8 import round_rows_fp8
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


def test_swiglu_of_many_rows() -> None:
    """Bug: the gate's half is rounded by the up half's scale."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 64, generator=generator)
    gate_up = quantize_fp8(torch.randn(96, 64, generator=generator))
    expected = swiglu(product(x, gate_up).float())
    assert relative(linear_swiglu(x, gate_up), expected.double()) < 8e-2
