"""MXFP4: what four bits mean, how they are packed, and a product of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import on_grid
from graphengine.kernels.mxfp4 import Mxfp4, pack_mxfp4, product_mxfp4, widened


@triton.jit
def _kernel(x, codes, scales, out, T, J, D: tl.constexpr, PAIRS: tl.constexpr, FP32: tl.constexpr):
    row, t = tl.program_id(0) * 32 + tl.arange(0, 32), tl.arange(0, 16)
    sums = tl.zeros((32, 16), tl.float32)
    sums = product_mxfp4(
        *(sums, codes, scales, row.to(tl.int64), row < J, x, t * D, t < T, D, PAIRS, FP32)
    )
    to = out + t[None, :] * J + row[:, None]
    tl.store(to, sums, mask=(t < T)[None, :] & (row < J)[:, None])


def product(x: torch.Tensor, packed: Mxfp4, pairs: int = 2) -> torch.Tensor:
    if not (x.is_cuda or INTERPRET):
        return x.float() @ packed.dense(torch.float32).T
    (T, D), J = x.shape, len(packed.codes)
    out = torch.empty(T, J, device=x.device)
    scales = packed.scales.view(torch.int16)
    on_grid(_kernel, (-(-J // 32),))(
        x, packed.codes, scales, out, T, J, D=D, PAIRS=pairs, FP32=INTERPRET
    )
    return out


def random_blocks(rows: int, columns: int, device: Any = "cpu") -> tuple[torch.Tensor, ...]:
    blocks = torch.randint(256, (rows, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(110, 129, (rows, columns // 32), dtype=torch.uint8)
    return blocks.to(device), scales.to(device)


def test_what_codes_mean() -> None:
    """Bug: a code's magnitude or sign, or a scale's bias, is another; subnormal numbers are 0."""
    codes = torch.arange(32, dtype=torch.uint8) % 16
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = torch.tensor([*magnitudes, *(-x for x in magnitudes)] * 2)
    for scale in (0, 1, 127, 128, 240):
        found = widened(codes, torch.tensor([scale], dtype=torch.uint8), torch.float32)
        assert torch.equal(found.double(), expected.double() * 2.0 ** (scale - 127))


def test_packed_is_what_files_say() -> None:
    """Bug: the first of a file's two codes is taken from the high nibble, or columns of the halves
    are exchanged."""
    blocks, scales = random_blocks(3, 192)
    codes = torch.stack([blocks & 15, blocks >> 4], -1).reshape(3, 192)
    expected = widened(codes, scales, torch.bfloat16)
    assert torch.equal(pack_mxfp4(blocks, scales).dense(torch.bfloat16), expected)
    packed = pack_mxfp4(torch.stack([blocks, blocks]), torch.stack([scales, scales]))
    assert torch.equal(packed.dense(torch.bfloat16)[1], expected)


@pytest.mark.parametrize("pairs", [1, 2, 4])
@pytest.mark.parametrize("columns", [64, 192, 320])
def test_product_is_that_of_the_widened(device, columns: int, pairs: int) -> None:
    """Bug: a scale goes to its neighbour's columns, a code loses its sign or its last bit, what is
    subnormal becomes 0, or the last columns are read past the row's end."""
    torch.manual_seed(columns)
    blocks, scales = random_blocks(45, columns, device)
    scales[0], scales[1] = 0, 128
    packed = pack_mxfp4(blocks, scales)
    eye = torch.eye(columns, device=device, dtype=torch.bfloat16)
    for first in range(0, columns, 16):  # so that a sum is one number
        found = product(eye[first : first + 16].contiguous(), packed, pairs)
        expected = packed.dense(torch.bfloat16)[:, first : first + 16].T.float()
        assert torch.equal(found, expected)
    x = torch.randn(7, columns, device=device).to(torch.bfloat16)
    expected = x.float() @ packed.dense(torch.float32).T
    error = (product(x, packed, pairs) - expected).norm() / expected.norm()
    assert error < 1e-5
