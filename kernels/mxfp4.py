"""Weights of four bits: MXFP4, a power of two for each 32 of them, multiplied as they are kept.

    w[j, d] = e2m1(code[j, d]) * 2^(scale[j, d // 32] - 127)
    e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same negative

Why: a step of few rows is what it reads, and this is 4.25 bits a weight instead of 16. Both factors
are exact in bf16, so a product is that of the widened weights.

How: matrices are kept in blocks of 64 rows and 64 columns, 2,048 bytes each, in the order in which
the 128 threads of a warpgroup hold the left side of a wgmma: a thread's 32 codes are 16 bytes next
to each other, so weights go from memory to tensor cores without shared memory. A half word has four
codes, a word those of two columns next to each other. Where a code's bits stand is chosen for how
few instructions make a bf16x2 of it (WIDEN): the sign in bit 15 and the three others in 8 to 6, the
end of a bf16's exponent and the begin of its fraction, are the number times 2^-126, subnormals
included, and a product with 2^126 times the scale makes it whole.

Legend: E matrices, J rows and D columns, multiples of 64; T rows of x. Of a block's row the bits
are (warp 2, half 1, group 3), of a column (32s 1, 16s 1, 8s 1, quad 2, last 1); of a half word's
place (warp, group, quad, half, 32s, last), and (16s, 8s) say which code of it.
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
HALF_WORDS = BLOCK * BLOCK // 4  # of a block's codes
SCALES = BLOCK * BLOCK // GROUP  # of a block: (warp, group, half, 32s)
MOST_SCALE = 128  # the largest that is widened: 2, where weights are far below 1
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

SIGN, REST = (15, 14, 9, 13), (6, 3, 0, 10)  # where a code's sign stands, and its other bits' last
_ROW = 4, 2, 8  # sizes of the legend's bits
_WORDS, _SCALES = tl.constexpr(HALF_WORDS // 2), tl.constexpr(SCALES)


class Mxfp4(NamedTuple):
    """Matrices [.., J, D], as `pack_mxfp4` gives them."""

    codes: torch.Tensor  # int16 [.., J / 64, D / 64, 1024]
    scales: torch.Tensor  # uint8 [.., J / 64, D / 64, 128]

    @property
    def words(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both as int32, as kernels take them."""
        return self.codes.view(torch.int32), self.scales.view(torch.int32)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrices [.., J, D] in `dtype`."""
        found = [(self.codes.int() >> at & 1) << 3 for at in SIGN]
        found = [bit | (self.codes.int() >> at & 7) for bit, at in zip(found, REST, strict=True)]
        # (warp, group, quad, half, 32s, last, 16s, 8s) -> rows, columns
        codes = torch.stack(found, -1).reshape(-1, 4, 8, 4, 2, 2, 2, 2, 2)
        codes = codes.permute(0, 1, 4, 2, 5, 7, 8, 3, 6)
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
    pairs = blocks.reshape(-1, shape[-2], *_ROW, shape[-1], 2, 4, 4)  # .., 32s, (16s, 8s), quad
    words = pairs.new_empty(*pairs.shape[:-2], 4, 2, dtype=torch.int16)  # .., 32s, quad, last
    for last in range(2):
        word = torch.zeros_like(words[..., 0])
        for pair, sign, rest in zip(pairs.unbind(-2), SIGN, REST, strict=True):
            code = pair.to(torch.int16) >> 4 * last
            word |= ((code & 8) << (sign - 3)) | ((code & 7) << rest)
        words[..., last] = word
    words = words.permute(0, 1, 5, 2, 4, 7, 3, 6, 8)
    scales = scales.reshape(-1, shape[-2], *_ROW, shape[-1], 2).permute(0, 1, 5, 2, 4, 3, 6)
    return Mxfp4(words.reshape(*shape, HALF_WORDS), scales.reshape(*shape, SCALES))


def in_turn(rows: torch.Tensor) -> torch.Tensor:
    """Rows [.., gate | up, ..] of dimension 1, eight of gate and eight of up in turn: where both of
    an output are a thread's."""
    return rows.unflatten(1, (2, -1, 8)).transpose(1, 2).flatten(1, 3)


def out_of_turn(rows: torch.Tensor) -> torch.Tensor:
    """`in_turn` undone."""
    return rows.unflatten(1, (-1, 2, 8)).transpose(1, 2).flatten(1, 3)


def _widen_asm() -> str:
    """Of each code's place in both half words: what is in place already, or moved there."""
    parts = [("$8", "$8"), ("b", "c"), ("b", "b"), ("b", "c")]  # other bits, and sign
    moves = [[], ["shl.b32 b, $8, 3;", "shl.b32 c, $8, 1;"], ["shl.b32 b, $8, 6;"]]
    moves += [["shr.b32 b, $8, 4;", "shl.b32 c, $8, 2;"]]
    lines = [".reg .b32 b, c, z;", "mov.b32 z, 0x80008000;"]
    for i, ((rest, sign), moved) in enumerate(zip(parts, moves, strict=True)):
        lines += moved
        if rest == sign:
            lines += [f"and.b32 b, {rest}, 0x81C081C0;"]
        else:
            lines += [f"and.b32 b, {rest}, 0x01C001C0;", f"lop3.b32 b, b, {sign}, z, 0xF8;"]
        lines += ["fma.rn.bf16x2 b, b, $9, z;", f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, b;"]
    return "{ " + " ".join(lines) + " }"


WIDEN = _widen_asm()
"""A word of eight codes and their factor, in bf16 twice -> eight bf16: both half words' first ones,
their second ones and so on."""
WIDEN_REGISTERS = "=h,=h,=h,=h,=h,=h,=h,=h,r,r"

_WIDEN, _WIDEN_REGISTERS = tl.constexpr(WIDEN), tl.constexpr(WIDEN_REGISTERS)


@triton.jit
def _widen_float32(words, scales, SIGN: tl.constexpr, REST: tl.constexpr):
    """The codes there of both half words, as WIDEN does it."""
    power = ((scales + 126) << 23).to(tl.float32, bitcast=True)
    low = ((words >> SIGN) << 31) | (((words >> REST) & 7) << 22)
    high = ((words >> (16 + SIGN)) << 31) | (((words >> (16 + REST)) & 7) << 22)
    return low.to(tl.float32, bitcast=True) * power, high.to(tl.float32, bitcast=True) * power


@triton.jit
def _widen(words, scales, DOT_FP32: tl.constexpr):
    """Words of eight codes and their scales -> [.., last, 8s, 16s]."""
    if DOT_FP32:
        a, b = _widen_float32(words, scales, 15, 6)
        c, d = _widen_float32(words, scales, 14, 3)
        e, f = _widen_float32(words, scales, 9, 0)
        g, h = _widen_float32(words, scales, 13, 10)
    else:
        factor = (scales + 126) << 7
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _WIDEN,
            _WIDEN_REGISTERS,
            [words, factor | (factor << 16)],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=1,
        )
    low = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.join(low, tl.join(tl.join(e, f), tl.join(g, h)))


@triton.jit
def product_mxfp4(
    sums, codes, scales, block, x, x_at, live, D: tl.constexpr, DOT_FP32: tl.constexpr
):
    """sums [64, T] + W x^T, of a block's rows and rows of x at elements `x_at` that are `live`.

    Args: codes, scales: as int32. block: int64, of all blocks of rows.
    """
    thread = tl.arange(0, 128)[:, None]
    word = tl.arange(0, 4)[None, :]
    code_at = codes + block * (D // 64 * _WORDS) + thread * 4 + word
    scale_at = scales + block * (D // 64 * _SCALES // 4) + thread // 4
    column = tl.arange(0, 64)[:, None]
    for b in range(D // 64):
        words = tl.load(code_at + b * _WORDS)
        four = tl.load(scale_at + b * (_SCALES // 4))
        wide = _widen(words, (four >> (8 * word)) & 255, DOT_FP32)
        # (warp, group, quad, half, 32s, last, 8s, 16s) -> rows, columns
        wide = tl.permute(tl.reshape(wide, [4, 8, 4, 2, 2, 2, 2, 2]), [0, 3, 1, 4, 7, 6, 2, 5])
        part = tl.load(x + x_at[None, :] + b * 64 + column, mask=live[None, :], other=0.0)
        sums = dot(tl.reshape(wide, [64, 64]), part, sums, DOT_FP32)
    return sums
