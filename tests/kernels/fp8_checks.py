"""Whether FP8 rows stand for the rows that they were made of."""

import torch

from graphengine.kernels.fp8 import round_rows_fp8, split_rows_fp8
from graphengine.kernels.interpreter import INTERPRET

# Interpreted, a mantissa that is rounded up to the next power of two may lose the carry.
MAX_WRONG = 0.06 if INTERPRET else 0.0


def check_rounded(rows: torch.Tensor, scale_T: torch.Tensor, x: torch.Tensor) -> None:
    """Both as `round_rows_fp8` writes them on the CPU, where division by 448 is one."""
    wanted, wanted_scale_T = round_rows_fp8(x.cpu())
    assert (rows.shape, rows.dtype) == (wanted.shape, wanted.dtype)
    assert torch.equal(scale_T.cpu(), wanted_scale_T)
    assert share(rows.cpu().float() != wanted.float()) <= MAX_WRONG


def check_near(rows: torch.Tensor, scale_T: torch.Tensor, x: torch.Tensor) -> None:
    """One FP8 row for x, which may be off by a bit of bf16."""
    torch.testing.assert_close(scale_T, round_rows_fp8(x)[1], rtol=2**-7, atol=0)
    error = (rows.float() * scale_T[:, None] - x.float()).abs()
    bound = torch.maximum(x.float().abs() * 2**-4, scale_T[:, None] * 2**-10)
    assert share(error > 1.1 * bound) <= MAX_WRONG


def check_split(rows: torch.Tensor, scale_T: torch.Tensor, x: torch.Tensor) -> None:
    """Two FP8 rows hold a row of bf16."""
    torch.testing.assert_close(scale_T, split_rows_fp8(x)[1], rtol=1e-6, atol=0)
    error = (rows.float().sum(0) * scale_T[:, None] - x.float()).abs()
    bound = torch.maximum(x.float().abs() * 2**-8, scale_T[:, None] * 2**-10)
    assert bool((error <= bound * (8 if INTERPRET else 1.01)).all())  # interpreted, it truncates


def share(which: torch.Tensor) -> float:
    return float(which.float().mean())
