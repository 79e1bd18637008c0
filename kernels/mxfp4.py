"""Weights of four bits: MXFP4, a power of two for each 32 of them, multiplied as they are kept.

    w[j, d] = e2m1(code[j, d]) * 2^(scale[j, d // 32] - 127)
    e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same negative

Why: a step of few rows is what it reads, and this is 4.25 bits a weight instead of 16. Both factors
are exact in bf16, so a product is that of the widened weights.

How: matrices are kept in blocks of 64 rows and 64 columns, 2,048 bytes each, in the order in which
the 128 threads of a warpgroup hold the left side of a wgmma: a thread's 32 codes are 16 bytes next
to each other, so weights go from memory to tensor cores without shared memory. Of a word's eight
codes the low nibbles are of one step of 16 columns and the high ones of the next, so that it widens
to four bf16x2 by shifts and masks: the three bits of a magnitude, put where a bf16 has the end of
its exponent and the first bit of its fraction, are the number times 2^-126, subnormals included;
one fma by 2^126 times the scale makes it whole.

Legend: E matrices, J rows and D columns, multiples of 64; T rows of x. Of a block's row the bits
are (warp 2, half 1, group 3), of a column (32s 1, 16s 1, 8s 1, quad 2, last 1); of a byte's place
(warp, group, quad, half, 32s, 8s, last), and 16s says which nibble.
Source: OCP Microscaling Formats (MX) 1.0; PTX ISA, wgmma's register fragments.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.interpreter import dot

GROUP = 32  # columns of a scale
BLOCK = 64  # rows, and columns, of a block
BYTES = BLOCK * BLOCK // 2  # of a block's codes
SCALES = BLOCK * BLOCK // GROUP  # of a block: (warp, group, half, 32s)
MOST_SCALE = 128  # the largest that is widened: 2, where weights are far below 1
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

_ROW, _COLUMN = (4, 2, 8), (2, 2, 2, 4, 2)  # sizes of the legend's bits
_BYTES, _SCALES = tl.constexpr(BYTES), tl.constexpr(SCALES)


class Mxfp4(NamedTuple):
    """Matrices [.., J, D], as `pack_mxfp4` gives them."""

    codes: torch.Tensor  # uint8 [.., J / 64, D / 64, 2048]
    scales: torch.Tensor  # uint8 [.., J / 64, D / 64, 128]

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrices [.., J, D] in `dtype`."""
        codes = torch.stack([self.codes & 15, self.codes >> 4], -1)
        # (warp, group, quad, half, 32s, 8s, last, 16s) -> rows, columns
        codes = codes.reshape(-1, 4, 8, 4, 2, 2, 2, 2, 2).permute(0, 1, 4, 2, 5, 8, 6, 3, 7)
        scales = self.scales.reshape(-1, 4, 8, 2, 2).permute(0, 1, 3, 2, 4)
        blocks = widened(codes.reshape(-1, BLOCK), scales.reshape(-1, 2), dtype)
        *outer, rows, columns, _ = self.codes.shape
        blocks = blocks.view(-1, rows, columns, BLOCK, BLOCK).transpose(2, 3)
        return blocks.reshape(*outer, rows * BLOCK, columns * BLOCK)


def widened(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes [.., D], one an element, and scales [.., D / 32] -> the numbers in `dtype`."""
    table = torch.tensor(VALUES, dtype=torch.float32, device=codes.device)
    numbers = table[codes.int()].unflatten(-1, (-1, GROUP))
    return torch.ldexp(numbers, scales.int()[..., None] - 127).flatten(-2).to(dtype)


def pack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> Mxfp4:
    """Blocks as checkpoints have them, uint8 [.., J, D / 32, 16] with an even column in each low
    nibble, and scales uint8 [.., J, D / 32]."""
    *outer, rows, groups = scales.shape
    shape = (*outer, rows // BLOCK, groups * GROUP // BLOCK)
    codes = torch.stack([blocks & 15, blocks >> 4], -1)  # [.., J, D / 32, 16, 2]
    codes = codes.reshape(-1, shape[-2], *_ROW, shape[-1], *_COLUMN)
    codes = codes.permute(0, 1, 5, 2, 4, 9, 3, 6, 8, 10, 7)  # .., 16s last
    scales = scales.reshape(-1, shape[-2], *_ROW, shape[-1], 2).permute(0, 1, 5, 2, 4, 3, 6)
    both = (codes[..., 0] | (codes[..., 1] << 4)).reshape(*shape, BYTES)
    return Mxfp4(both, scales.reshape(*shape, SCALES))


def in_turn(rows: torch.Tensor) -> torch.Tensor:
    """Rows [.., gate | up, ..] of dimension 1, eight of gate and eight of up in turn: where both of
    an output are a thread's."""
    return rows.unflatten(1, (2, -1, 8)).transpose(1, 2).flatten(1, 3)


def out_of_turn(rows: torch.Tensor) -> torch.Tensor:
    """`in_turn` undone."""
    return rows.unflatten(1, (-1, 2, 8)).transpose(1, 2).flatten(1, 3)


WIDEN = """
{
.reg .b32 a, b, c, z;
mov.b32 z, 0x80008000;
prmt.b32 a, $4, 0, 0x1404;
prmt.b32 b, $4, 0, 0x3424;
shr.b32 c, a, 6;
and.b32 c, c, 0x01C001C0;
lop3.b32 c, c, a, z, 0xF8;
fma.rn.bf16x2 $2, c, $5, z;
shr.b32 c, b, 6;
and.b32 c, c, 0x01C001C0;
lop3.b32 c, c, b, z, 0xF8;
fma.rn.bf16x2 $3, c, $5, z;
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
"""
"""Four bytes, and of each the factor in bf16 twice, all four the same: -> bf16 of the low nibbles,
of the high ones."""
WIDEN_REGISTERS = "=r,=r,=r,=r,r,r,r,r,r"

_WIDEN, _WIDEN_REGISTERS = tl.constexpr(WIDEN), tl.constexpr(WIDEN_REGISTERS)


@triton.jit
def _widen_float32(code, scale):
    """Codes and their scales, as WIDEN does it."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    power = (scale + 126) << 23
    return bits.to(tl.float32, bitcast=True) * power.to(tl.float32, bitcast=True)


@triton.jit
def _columns(x):
    """[threads, (half, 32s), (8s, last)] of one nibble -> [64 rows, 32 columns]: (32s, 8s, quad,
    last)."""
    x = tl.reshape(x, [4, 8, 4, 2, 2, 2, 2])
    return tl.reshape(tl.permute(x, [0, 3, 1, 4, 5, 2, 6]), [64, 32])


@triton.jit
def product_mxfp4(
    sums, codes, scales, block, x, x_at, live, D: tl.constexpr, DOT_FP32: tl.constexpr
):
    """sums [64, T] + W x^T, of a block's rows and rows of x at elements `x_at` that are `live`.

    Args: block: int64, of all blocks of rows.
    """
    thread = tl.arange(0, 128)[:, None, None]
    word = tl.arange(0, 4)[None, :, None]
    code_at = codes + block * (D // 64 * _BYTES) + thread * 16 + word * 4
    scale_at = scales + block * (D // 64 * _SCALES) + thread // 4 * 4 + word
    c = tl.arange(0, 32)
    column = (c // 16 * 32 + c % 16)[:, None]
    for b in range(D // 64):
        bytes = tl.load(code_at + b * _BYTES + tl.arange(0, 4)[None, None, :])
        scale = tl.load(scale_at + b * _SCALES).to(tl.int32)
        if DOT_FP32:
            wide = bytes.to(tl.int32)
            low = _widen_float32(wide & 15, scale)
            high = _widen_float32(wide >> 4, scale)
        else:
            factor = (scale + 126) << 7
            low, high = tl.inline_asm_elementwise(
                _WIDEN,
                _WIDEN_REGISTERS,
                [bytes, tl.broadcast_to(factor | (factor << 16), bytes.shape)],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=4,
            )
        at = x_at[None, :] + b * 64 + column
        part = tl.load(x + at, mask=live[None, :], other=0.0)
        sums = dot(_columns(low), part, sums, DOT_FP32)
        part = tl.load(x + at + 16, mask=live[None, :], other=0.0)
        sums = dot(_columns(high), part, sums, DOT_FP32)
    return sums
