"""Weights of four bits: MXFP4, a power of two for each 32 of them, multiplied as they are kept.

    w[j, d] = e2m1(code[j, d]) * 2^(scale[j, d // 32] - 127)
    e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same negative

Why: a step of few rows is what it reads, and this is 4.25 bits a weight instead of 16. Both factors
are exact in bf16, so a product is that of the widened weights.

How: `pack_mxfp4` lays 64 columns of a row into 32 bytes, byte i the codes of columns i (low nibble)
and 32 + i. So four bytes widen to two bf16x2 of each half by shifts and masks: the three bits of a
magnitude, put where a bf16 has the end of its exponent and the first bit of its fraction, are the
number times 2^-126, subnormals included; one fma by 2^126 times the scale makes it whole. A half is
multiplied by its own columns of x, so that no code changes places.

Legend: E matrices, J rows, D columns, a multiple of 64; T rows of x.
Source: OCP Microscaling Formats (MX) 1.0.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.interpreter import dot

GROUP = 32  # columns of a scale
PAIR = 64  # columns of 32 bytes
MOST_SCALE = 128  # the largest that the kernel widens: 2, where weights are far below 1
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

_NARROW: tl.constexpr = tl.constexpr(PAIR // 2)


class Mxfp4(NamedTuple):
    """Matrices [.., J, D], as `pack_mxfp4` gives them."""

    codes: torch.Tensor  # uint8 [.., J, D / 2]
    scales: torch.Tensor  # uint8 [.., J, D / 32]

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrices [.., J, D] in `dtype`."""
        pairs = self.codes.unflatten(-1, (-1, PAIR // 2))
        codes = torch.stack([pairs & 15, pairs >> 4], -2).flatten(-3)
        return widened(codes, self.scales, dtype)


def widened(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes [.., D], one an element, and scales [.., D / 32] -> the numbers in `dtype`."""
    table = torch.tensor(VALUES, dtype=torch.float32, device=codes.device)
    numbers = table[codes.int()].unflatten(-1, (-1, GROUP))
    return torch.ldexp(numbers, scales.int()[..., None] - 127).flatten(-2).to(dtype)


def pack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> Mxfp4:
    """Blocks as checkpoints have them, uint8 [.., J, D / 32, 16] with an even column in each low
    nibble, and scales uint8 [.., J, D / 32]."""
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-3)  # [.., J, D]
    low, high = codes.unflatten(-1, (-1, 2, PAIR // 2)).unbind(-2)
    return Mxfp4((low | (high << 4)).flatten(-2), scales.contiguous())


@triton.jit
def _widen_float32(code, scale):
    """Codes and their scales, as `_widen` does it."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    power = (scale + 126) << 23
    return bits.to(tl.float32, bitcast=True) * power.to(tl.float32, bitcast=True)


@triton.jit
def _widen(codes, low, high, DOT_FP32: tl.constexpr):
    """Bytes [J, B, 32] and the scales of each half [J, B, 1] -> (columns of the low nibbles, of the
    high ones), [J, B * 32] each."""
    if DOT_FP32:
        x = codes.to(tl.int32)
        first = _widen_float32(x & 15, low)
        second = _widen_float32(x >> 4, high)
    else:
        # bf16 twice; every one of the four that an element's register is asked for is the same.
        low = (low + 126) << 7
        high = (high + 126) << 7
        first, second = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, c, d, z;
            mov.b32 z, 0x80008000;
            prmt.b32 a, $4, 0, 0x1404;
            prmt.b32 b, $4, 0, 0x3424;
            shr.b32 c, a, 6;
            and.b32 c, c, 0x01C001C0;
            lop3.b32 c, c, a, z, 0xF8;
            fma.rn.bf16x2 $2, c, $9, z;
            shr.b32 c, b, 6;
            and.b32 c, c, 0x01C001C0;
            lop3.b32 c, c, b, z, 0xF8;
            fma.rn.bf16x2 $3, c, $9, z;
            shl.b32 a, a, 4;
            shl.b32 b, b, 4;
            shr.b32 c, a, 6;
            and.b32 c, c, 0x01C001C0;
            lop3.b32 c, c, a, z, 0xF8;
            fma.rn.bf16x2 $0, c, $5, z;
            shr.b32 c, b, 6;
            and.b32 c, c, 0x01C001C0;
            lop3.b32 c, c, b, z, 0xF8;
            fma.rn.bf16x2 $1, c, $5, z;
            }
            """,
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",
            [
                codes,
                tl.broadcast_to(low | (low << 16), codes.shape),
                tl.broadcast_to(high | (high << 16), codes.shape),
            ],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    J: tl.constexpr = codes.shape[0]
    WIDTH: tl.constexpr = codes.shape[1] * codes.shape[2]
    return tl.reshape(first, [J, WIDTH]), tl.reshape(second, [J, WIDTH])


@triton.jit
def product_mxfp4(
    sums,
    codes,
    scales,
    row,
    exists,
    x,
    x_at,
    live,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """sums [J, T] + W[row] x^T: rows `row` of the matrices that `exists`, and rows of x at elements
    `x_at` that are `live`.

    Args: scales: as int16, two of a pair. PAIRS: of 64 columns, multiplied at once.
    """
    b = tl.arange(0, PAIRS)[None, :, None]
    i = tl.arange(0, _NARROW)[None, None, :]
    row = row[:, None, None]
    exists = exists[:, None, None]
    code_at = codes + row * (D // 2) + b * _NARROW + i
    scale_at = scales + row * (D // 64) + b
    j = tl.arange(0, PAIRS * _NARROW)
    column = (j // _NARROW * 64 + j % _NARROW)[:, None]
    for pair in range(0, D // 64, PAIRS):
        is_in = exists & (pair + b < D // 64)
        bytes = tl.load(code_at + pair * _NARROW, mask=is_in, other=0)
        two = tl.load(scale_at + pair, mask=is_in, other=0).to(tl.int32)
        low, high = _widen(bytes, two & 255, (two >> 8) & 255, DOT_FP32)
        at = pair * 64 + column
        in_x = live[None, :] & (at < D)
        part = tl.load(x + x_at[None, :] + at, mask=in_x, other=0.0)
        sums = dot(low, part, sums, DOT_FP32)
        part = tl.load(x + x_at[None, :] + at + _NARROW, mask=in_x, other=0.0)
        sums = dot(high, part, sums, DOT_FP32)
    return sums
