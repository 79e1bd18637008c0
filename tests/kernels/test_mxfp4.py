"""MXFP4: what four bits mean, how they are packed, and a product of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import on_grid
from graphengine.kernels.mxfp4 import (
    Mxfp4,
    in_turn,
    out_of_turn,
    pack_mxfp4,
    product_mxfp4,
    widened,
)


@triton.jit
def _kernel(x, codes, scales, out, T, J, D: tl.constexpr, FP32: tl.constexpr):
    row, t = tl.program_id(0) * 64 + tl.arange(0, 64), tl.arange(0, 16)
    sums, block = tl.zeros((64, 16), tl.float32), tl.program_id(0).to(tl.int64)
    sums = product_mxfp4(sums, codes, scales, block, x, t * D, t < T, D, FP32)
    tl.store(out + t[None, :] * J + row[:, None], sums, mask=(t < T)[None, :])


def product(x: torch.Tensor, packed: Mxfp4) -> torch.Tensor:
    if not (x.is_cuda or INTERPRET):
        return x.float() @ packed.dense(torch.float32).T
    (T, D), J = x.shape, len(packed.codes) * 64
    out = torch.empty(T, J, device=x.device)
    on_grid(_kernel, (J // 64,))(x, *packed.words, out, T, J, D=D, FP32=INTERPRET)
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
    """Bug: the first of a file's two codes is taken from the high nibble, or rows or columns of a
    block are another's."""
    blocks, scales = random_blocks(128, 192)
    codes = torch.stack([blocks & 15, blocks >> 4], -1).reshape(128, 192)
    expected = widened(codes, scales, torch.bfloat16)
    packed = pack_mxfp4(blocks, scales)
    assert packed.codes.shape == (2, 3, 1024) and packed.scales.shape == (2, 3, 128)
    assert torch.equal(packed.dense(torch.bfloat16), expected)
    packed = pack_mxfp4(torch.stack([scales_of(blocks), blocks]), torch.stack([scales, scales]))
    assert torch.equal(packed.dense(torch.bfloat16)[1], expected)


def scales_of(blocks: torch.Tensor) -> torch.Tensor:
    """Others."""
    return blocks.flip(0)


def test_gate_and_up_in_turn() -> None:
    """Bug: an output's gate and up are no neighbours' eight, or what undoes it is another order."""
    rows = torch.arange(2 * 64).view(2, 64)
    found = in_turn(rows)
    assert found[1, :24].tolist() == [*range(64, 72), *range(96, 104), *range(72, 80)]
    assert torch.equal(out_of_turn(found), rows)


@pytest.mark.parametrize("columns", [64, 192, 320])
def test_product_is_that_of_the_widened(device, columns: int) -> None:
    """Bug: a scale goes to its neighbour's columns, a code loses its sign or its last bit, or what
    is subnormal becomes 0."""
    torch.manual_seed(columns)
    blocks, scales = random_blocks(128, columns, device)
    scales[0], scales[1] = 0, 128
    packed = pack_mxfp4(blocks, scales)
    eye = torch.eye(columns, device=device, dtype=torch.bfloat16)
    for first in range(0, columns, 16):  # so that a sum is one number
        found = product(eye[first : first + 16].contiguous(), packed)
        expected = packed.dense(torch.bfloat16)[:, first : first + 16].T.float()
        assert torch.equal(found, expected)
    x = torch.randn(7, columns, device=device).to(torch.bfloat16)
    expected = x.float() @ packed.dense(torch.float32).T
    assert (product(x, packed) - expected).norm() < 1e-5 * expected.norm()
