"""Projections of a prompt's chunk: gate and up with SwiGLU, others from 1,024 rows on.

Why: from 1,024 rows on products are the limit. In small tiles cuBLAS multiplies as well; but SwiGLU
behind it reads and writes 150 MB for 2,048 rows of Qwen3-8B, and here it happens in the registers
that hold the sums. In large tiles we are through earlier than cuBLAS, with SwiGLU or without,
where they fill the rounds that the multiprocessors take of them. Up to 128 rows bytes are the
limit, and what counts is that all multiprocessors read to the end: a tile each, as wide as that
takes. What each gave, and what other sizes lose: profiles/LOG-2026-11-27.md and LOG-2026-11-28.md.

How: one CTA a multiprocessor takes tile after tile, and results leave by TMA. Gate and up rows
alternate by 8 in a tile, so that a thread holds both. Three kinds of tiles; SwiGLU takes those that
are through first (`tiles_of`), other projections large ones or none:

- 128 rows of x and 256 weight rows: one warp loads blocks of both, those of the next tile while one
  is finished; two consumers multiply 64 rows of x each by all weight rows, the largest product that
  one warpgroup has.
- large, 256 and 192: three consumers multiply 64 weight rows each by all rows of x, and the first
  of them loads. Tensor cores seem to wait for shared memory: a product of 64 by 256 by 16 reads 10
  kB in the 128 cycles that it takes, and what TMA writes beside that is 47 bytes a cycle in the
  tiles above, 37 here, of 128 that there are. A warp that loads would leave three consumers fewer
  registers than their sums need (profiles/LOG-2026-11-28.md).
- wide, 128 and 272: the small ones with 16 weight rows more, one a multiprocessor, so that what it
  has multiplied makes room for its results, and the ring has a slot more.

Invariant: an element is summed by one CTA in rising k, so a row depends neither on the other rows
nor on the grid, nor on the kind of tiles. A slot is refilled when all consumers have arrived at its
`empty`; it is theirs when the bytes of both operands have arrived at its `ready`. Nothing but
weights is read before `gdc_wait`, and nothing written.

Cost: 2 T J D operations; L2 gives 3 / 128 bytes for each multiplication, 7 / 384 in large tiles.

Legend: T rows, D inputs, J weight rows, of gate and up 2 * I.
"""

from typing import Any, NamedTuple

import torch

from graphengine.kernels import chunk_linear_kernels as kernels
from graphengine.kernels.launch import on_grid, pdl_options
from graphengine.kernels.skinny_config import SKINNY_T, cdiv
from graphengine.kernels.skinny_linear import skinny_swiglu_reference
from graphengine.kernels.wide_linear import descriptor, gluon_dtype, weight_descriptor

MIN_T = 1024  # rows of a chunk for small and large tiles
MIN_SHARE = 0.9  # of its multiprocessors' time that a grid uses
# Inputs from which large tiles win although their rounds are 6 % more: fewer, and a tile's end,
# where nothing is multiplied, weighs more (profiles/LOG-2026-11-28.md).
MIN_DEPTH, ALLOWANCE = 4096, 1.06


class Tiles(NamedTuple):
    """One kind of tiles, and what multiplies them."""

    rows: int  # of x
    weights: int  # weight rows
    kernel: Any
    w_box: int  # weight rows of one copy
    x_box: int  # rows of x of one copy, and of one consumer's results
    registers: int  # of a thread at the launch

    def count(self, num_rows: int, num_weights: int) -> int:
        return cdiv(num_rows, self.rows) * cdiv(num_weights, self.weights)

    def cost(self, num_rows: int, num_weights: int, num_sms: int) -> int:
        """Products that a multiprocessor has time for until all are done, by column of k."""
        return cdiv(self.count(num_rows, num_weights), num_sms) * self.rows * self.weights

    def fill(self, num_rows: int, num_weights: int, num_sms: int) -> bool:
        """Whether they leave few multiprocessors idle in the last round."""
        num_tiles = self.count(num_rows, num_weights)
        return num_tiles >= MIN_SHARE * cdiv(num_tiles, num_sms) * num_sms


SMALL = Tiles(
    kernels.ROWS.value * kernels.CONSUMERS.value,
    kernels.WEIGHTS.value,
    kernels.chunk_swiglu_kernel,
    w_box=kernels.WEIGHTS.value,
    x_box=kernels.ROWS.value,
    registers=kernels.LAUNCH_REGISTERS,
)
WIDE = SMALL._replace(weights=SMALL.weights + kernels.EXTRA_WEIGHTS.value)
LARGE = Tiles(
    kernels.LARGE_ROWS.value,
    kernels.LARGE_WEIGHTS.value * kernels.LARGE_CONSUMERS.value,
    kernels.large_chunk_linear_kernel,
    w_box=kernels.LARGE_WEIGHTS.value,
    x_box=kernels.LARGE_ROWS.value,
    registers=kernels.LARGE_REGISTERS.value,
)


def tiles_of(num_rows: int, num_weights: int, depth: int, num_sms: int) -> Tiles:
    """The tiles of a projection with SwiGLU: of up to 128 rows wide ones, if each multiprocessor
    has one; of more those whose last round is over first, large ones where both are.

    Args: num_weights: weight rows, J. depth: inputs, D.
    """
    shape = num_rows, num_weights, num_sms
    if num_rows <= WIDE.rows:
        return WIDE if WIDE.count(num_rows, num_weights) <= num_sms else SMALL
    allowance = ALLOWANCE if depth >= MIN_DEPTH and LARGE.fill(*shape) else 1
    return LARGE if LARGE.cost(*shape) <= allowance * SMALL.cost(*shape) else SMALL


def pays(num_rows: int, num_weights: int, depth: int, num_sms: int, swiglu: bool) -> bool:
    """Whether rows are enough, and tiles fill the rounds that the multiprocessors take of them.

    Args: as `tiles_of`.
    """
    tiles = tiles_of(num_rows, num_weights, depth, num_sms) if swiglu else LARGE
    least = SKINNY_T + 1 if tiles is WIDE else MIN_T
    return num_rows >= least and tiles.fill(num_rows, num_weights, num_sms)


def chunk_linear(x_TD: torch.Tensor, weight_JD: torch.Tensor) -> torch.Tensor:
    """y[t, j] = x[t] . weight[j], with the bits of cuBLAS, which sums in rising k as well.

    Args:
        x_TD: [T, D] bf16, rows at multiples of 16 bytes.
        weight_JD: [J, D] bf16, J a multiple of 8.
    Returns: y_TJ [T, J], contiguous, summed in fp32.
    Raises: ValueError for shapes, and on CUDA for dtypes or strides that the kernel cannot address.
    """
    return torch.ops.graphengine.chunk_linear(x_TD, weight_JD)


def chunk_swiglu(x_TD: torch.Tensor, gate_up_JD: torch.Tensor) -> torch.Tensor:
    """act[t, i] = silu(g) * u with g = x[t] . gate_up[i], u = x[t] . gate_up[i + I].

    Args:
        x_TD: [T, D] bf16, rows at multiples of 16 bytes.
        gate_up_JD: [2 * I, D] bf16, rows packed gate | up, I a multiple of 8.
    Returns: act_TI [T, I], contiguous; both sums stay in fp32, the one rounding is the product's.
    Raises: ValueError for shapes, and on CUDA for dtypes or strides that the kernel cannot address.
    """
    return torch.ops.graphengine.chunk_swiglu(x_TD, gate_up_JD)


# Custom ops: dynamo does not trace a launch with launch_pdl.
@torch.library.custom_op(
    "graphengine::chunk_linear", mutates_args=(), schema="(Tensor x, Tensor weight) -> Tensor"
)
def _linear_op(x, weight):
    _check_shapes(x, weight, 1)
    return _launch(x, weight, LARGE, False) if x.is_cuda else torch.nn.functional.linear(x, weight)


@_linear_op.register_fake
def _(x, weight):
    return x.new_empty((x.shape[0], weight.shape[0]))


@torch.library.custom_op(
    "graphengine::chunk_swiglu", mutates_args=(), schema="(Tensor x, Tensor gate_up) -> Tensor"
)
def _swiglu_op(x, gate_up):
    _check_shapes(x, gate_up, 2)
    if not x.is_cuda:
        return skinny_swiglu_reference(x, gate_up)
    num_weights, depth = gate_up.shape
    tiles = tiles_of(len(x), num_weights, depth, _num_sms(x))
    return _launch(x, gate_up, tiles, True)


@_swiglu_op.register_fake
def _(x, gate_up):
    return x.new_empty((x.shape[0], gate_up.shape[0] // 2))


def _check_shapes(x: torch.Tensor, weight: torch.Tensor, multiple: int) -> None:
    if (x.dim(), weight.dim()) != (2, 2) or x.shape[1] != weight.shape[1] or len(weight) % multiple:
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)}: need [T, D], [J, D]")


def _num_sms(x: torch.Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count


def _launch(x_TD: torch.Tensor, weight_JD: torch.Tensor, tiles: Tiles, swiglu: bool):
    (T, D), J = x_TD.shape, weight_JD.shape[0]
    if x_TD.dtype != torch.bfloat16 or weight_JD.dtype != torch.bfloat16:
        raise ValueError(f"x is {x_TD.dtype}, weight {weight_JD.dtype}: the kernel needs bf16")
    each = 2 if swiglu else 1  # weight rows of an output
    if J % (8 * each) or any(w.stride(1) != 1 or w.stride(0) % 8 for w in (x_TD, weight_JD)):
        raise ValueError(
            f"strides {x_TD.stride()} and {weight_JD.stride()}, {J} weight rows: TMA needs rows at "
            "multiples of 16 bytes, and outputs in eights"
        )
    out = x_TD.new_empty((T, J // each))
    dtype = gluon_dtype(x_TD)
    num_tiles = tiles.count(T, J)
    num_sms = _num_sms(x_TD)
    block = kernels.BLOCK_K
    # A consumer's results; twice as many without SwiGLU, and half the room in wide tiles.
    out_box = [tiles.x_box * each // 2, tiles.w_box // each // (2 if tiles is WIDE else 1)]
    w, extra = (
        weight_descriptor(weight_JD, rows, block, swiglu, dtype)
        for rows in (tiles.w_box, kernels.EXTRA_WEIGHTS.value)
    )
    x = descriptor(x_TD, (T, D), x_TD.stride(), [tiles.x_box, block], dtype)
    to = descriptor(out, out.shape, out.stride(), out_box, dtype)
    work = num_tiles, cdiv(T, tiles.rows), cdiv(D, block)
    if tiles is LARGE:
        operands, kind = (w, x, to, *work), {"SWIGLU": swiglu}
    else:
        operands, kind = (w, extra, x, to, out, *work, T, J // 2), {"EXTRA": tiles is WIDE}
    options = {"num_warps": 4, "maxnreg": tiles.registers, **pdl_options(x_TD.device)}
    on_grid(tiles.kernel, (min(num_tiles, num_sms),))(*operands, **kind, **options)
    return out
