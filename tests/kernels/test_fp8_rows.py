"""Rows rounded to FP8 against fp8.py's formulas on the CPU."""

from collections.abc import Callable

import pytest
import torch

from graphengine.kernels.fp8 import quantize_rows_fp8, round_rows_fp8, split_rows_fp8
from graphengine.kernels.fp8_rows import MAX_D, round_rows, split_rows
from graphengine.kernels.interpreter import INTERPRET
from tests.kernels.fp8_checks import check_rounded, check_split

Rounding = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
BOTH = pytest.mark.parametrize(
    ("kernel", "reference"),
    [(round_rows, round_rows_fp8), (split_rows, split_rows_fp8)],
    ids=["round", "split"],
)
SHAPES = [(1, 64), (7, 100), (16, 12288), (130, 2560), (3, 20480), (5, 33)]  # T, D


def rows_of_all_sizes(device: str, T: int, D: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different magnitudes, the first of zeros."""
    x = torch.randn(T, D, device=device) * torch.logspace(-15, 15, T, device=device)[:, None]
    x[0] = 0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "D"), SHAPES)
def test_rounds_as_the_formula(device, T, D, dtype) -> None:
    """Bug: a division that is off by a bit at the middle between two FP8 numbers, a row with its
    neighbour's scale, a maximum that leaves the last columns out; a row of zeros is 0 / 0."""
    x = rows_of_all_sizes(device, T, D, dtype)
    check_rounded(*round_rows(x), x)


@pytest.mark.parametrize(("T", "D"), SHAPES)
def test_splits_as_the_formula(device, T, D) -> None:
    """Bug: as above; hi and lo exchange places, or lo is of another row."""
    x = rows_of_all_sizes(device, T, D, torch.bfloat16)
    rows, scale_T = split_rows(x)
    check_split(rows, scale_T, x)
    wanted, wanted_scale_T = split_rows_fp8(x.cpu())
    assert torch.equal(scale_T.cpu(), wanted_scale_T)
    if not INTERPRET:
        assert torch.equal(rows.cpu().float(), wanted.float())


def test_a_large_weight_is_rounded_in_parts(device) -> None:
    """Bug: rows at the end of a part, or the last part, keep what the memory held before: a head of
    152k rows has tokens that no logit is right for."""
    weight = torch.randn(2 * 16384 + 3, 2, device=device)
    rows, scales = quantize_rows_fp8(weight)
    expected, expected_scales = round_rows_fp8(weight)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(rows.float(), expected.float())


def test_divides_exactly_between_two_numbers(device) -> None:
    """Bug: x / scale by the reciprocal alone is an ulp off in a fourth of all cases, which decides
    where it lies halfway between two FP8 numbers."""
    scale = torch.rand(64, 1) + 0.5
    halfway = (torch.arange(16, 32) + 0.5)[:, None] * 2.0 ** torch.arange(-8, 4)
    x = (halfway.flatten() * scale).view(torch.int32) + torch.arange(-1, 2).view(3, 1, 1)
    x = x.view(torch.float32).flatten(0, 1)
    x[:, 0] = 448 * scale.repeat(3, 1)[:, 0]
    check_rounded(*round_rows(x.to(device)), x)


@BOTH
def test_rows_that_are_not_finite(device, kernel: Rounding, reference: Rounding) -> None:
    """Bug: NaN, which a maximum of floats drops, becomes a number, infinity a large one; or they
    spoil other rows."""
    x = torch.randn(9, 200).bfloat16()
    x[1, 3], x[4, 199], x[5, 7], x[6, 0] = torch.nan, torch.inf, -torch.inf, torch.inf
    x[6, 1] = torch.nan
    rows, scale_T = kernel(x.to(device))
    wanted, wanted_scale_T = reference(x)
    torch.testing.assert_close(scale_T.cpu(), wanted_scale_T, rtol=0, atol=0, equal_nan=True)
    got = rows.cpu().float()
    assert not got.view(-1, 9, 200)[:, 4, :199].any()  # beside an infinity: zeros
    if not INTERPRET:  # whose rounding to FP8 makes a number of NaN
        torch.testing.assert_close(got, wanted.float(), rtol=0, atol=0, equal_nan=True)
        again = got.view(-1, 9, 200).sum(0) * scale_T.cpu()[:, None]
        assert again.isnan().any(1).nonzero()[:, 0].tolist() == [1, 4, 5, 6]


@BOTH
@pytest.mark.usefixtures("poisoned_outputs")
def test_writes_every_element(device, kernel: Rounding, reference: Rounding) -> None:
    """Bug: columns behind the last full vector keep what the memory held before."""
    for D in (1, 1000, 12296):
        rows, scale_T = kernel(torch.randn(5, D, device=device).bfloat16())
        assert bool(rows.float().isfinite().all() and scale_T.isfinite().all())


@BOTH
def test_rows_of_a_wider_tensor(device, kernel: Rounding, reference: Rounding) -> None:
    """Bug: a slice of columns is read as if its rows were packed, or columns as if they were rows;
    no rows, or rows that do not fit a program, are launched all the same."""
    wide = torch.randn(6, 300, device=device).bfloat16()
    for part in (wide[:, 100:200], wide[::2], wide[:0], wide[:1].expand(3, -1)):
        for got, wanted in zip(kernel(part), kernel(part.clone()), strict=True):
            assert torch.equal(got.float(), wanted.float())
    with pytest.raises(ValueError, match="rows contiguous"):
        kernel(wide.t())
    x = torch.randn(2, MAX_D + 1, device=device).bfloat16()
    assert torch.equal(kernel(x)[0].float(), reference(x)[0].float())


@BOTH
def test_traced_as_run(kernel: Rounding, reference: Rounding) -> None:
    """Bug: a compiled segment is told other shapes, types or strides than the op returns."""
    for x in (torch.randn(5, 64).bfloat16(), torch.randn(0, 64).bfloat16()):
        num_fp8 = 1 if kernel is round_rows else 2
        torch.library.opcheck(
            torch.ops.graphengine.rows_to_fp8.default,
            (x, num_fp8),
            test_utils=("test_schema", "test_faketensor"),
        )
