"""The GEMM of up to 192 rows with warps that load and warps that multiply.

Why: in wide_linear.py every warp waits for a block, multiplies it and asks for the next, so loads
and products pause together. Here one warp loads, and waits for slots alone; `consumers` warpgroups
multiply 64 weight rows each, and each frees a slot when it is done with it. And a tile may have 192
rows of x, as 128 and 64: 12 rows of each of 16 requests (11 drafted tokens) are a quarter fewer
products than 256, and rows past the end of x, which TMA fills with zeros, cost more than products
do: down of Qwen3-8B at 192 rows takes 59.5 us in a tile of 256, 42.7 if x goes on to row 256, 36.8
here (one H200, profiles/results/2026-11-22-h200-specialized.json).

The last two consumers may share weight rows, which both multiply and write alike, so that a tile
has any sixteens of rows: 28,672 are 128 tiles of 224, one for each of 128 multiprocessors, where
those of 128 are 224 for 132; a step of Llama-3.1-8B ends 0.9 % sooner so (one H200,
profiles/results/2026-11-29-h200-llama-judged-d3bbc3d.json). What is read twice should come from L2
the second time.

Not above 192 rows: at 256, where power is the limit, down took 2 % less with one consumer and 4 %
more with two, and the heads 7 % more.

Invariant: as wide_linear.py's. A slot is refilled when all consumers have arrived at its `empty`;
it is theirs when the bytes of both operands have arrived at its `ready`.

Cost: as wide_linear.py's.
"""

import torch

from graphengine.kernels.fp8 import Fp8Scales
from graphengine.kernels.launch import early_options, on_grid
from graphengine.kernels.skinny_config import MIDDLE_T, SkinnyConfig, cdiv, split_width
from graphengine.kernels.specialized_linear_kernels import (
    LOADER_REGISTERS,
    ROWS,
    specialized_linear_kernel,
)
from graphengine.kernels.wide_linear import descriptor, gluon_dtype, weight_descriptor

MAX_CONSUMERS = 4
MAX_PART = 128  # rows of x of one product


def parts_of(cols: int) -> tuple[int, int]:
    """Rows of x of a tile as two powers of two, (high, low); low may be 0.

    Raises:
        ValueError: they are none, or out of what the sums leave registers for.
    """
    high = min(MAX_PART, 1 << (cols.bit_length() - 1)) if cols > 0 else 0
    low = cols - high
    if high < 16 or cols > MIDDLE_T or low & (low - 1) or 0 < low < 16:
        raise ValueError(
            f"cols {cols}: choose 16 to {MIDDLE_T}, a power of two or the sum of two from 16 on"
        )
    return high, low


def check_tile(config: SkinnyConfig, swiglu: bool, element_size: int) -> None:
    """Refuses a config that no tile can be made of; element_size: bytes of a weight.

    Raises:
        ValueError: with the value and what to choose.
    """
    shared = config.consumers * ROWS.value - config.rows
    if not 0 <= shared < ROWS.value or shared % 16 or config.consumers > MAX_CONSUMERS:
        raise ValueError(
            f"rows {config.rows}, consumers {config.consumers}: choose 1 to {MAX_CONSUMERS}, of "
            f"{ROWS.value} weight rows each, of which the last two may share sixteens"
        )
    high, _ = parts_of(config.cols)
    if swiglu and config.block_k * element_size < high:
        raise ValueError(
            f"block_k {config.block_k}, cols {config.cols}: SwiGLU needs {high} bytes in a row of "
            "a block for its results"
        )


def registers_of(config: SkinnyConfig, out: torch.Tensor, is_fp8: bool) -> tuple[int, int]:
    """(registers of a thread at the launch, of a consumer's later).

    As few as the sums leave: the compiler would take all that a multiprocessor has, and the kernels
    in front and behind, which overlap with this one, would wait until it has gone.
    """
    if config.cols <= 64:
        registers = 64
    elif config.consumers < 3 or (config.cols <= MAX_PART and not is_fp8):
        registers = 96
    else:
        registers = 112
    if out.dtype == torch.int64:  # a head is long, and ranks its sums
        registers = 128
    num_warps = 4 * (config.consumers + 1)  # the compiler makes four of the one that loads
    registers = min(registers, 2048 // num_warps // 8 * 8)  # that a multiprocessor has
    in_all = registers * num_warps - 4 * LOADER_REGISTERS.value
    return registers, in_all // (4 * config.consumers) // 8 * 8


def launch_specialized(
    x_TD: torch.Tensor,
    weight_ED: torch.Tensor,
    scales: Fp8Scales | None,
    out: torch.Tensor,
    config: SkinnyConfig,
    swiglu: bool,
) -> torch.Tensor:
    """Runs the kernel of a config with `consumers`, which `check_tile` has passed, into out as
    wide_linear.py's launch_wide; in int64 [T, tiles * consumers]."""
    (T, D), E = x_TD.shape, weight_ED.shape[0] // (1 + swiglu)
    outputs = config.rows // 2 if swiglu else config.rows
    num_k = split_width(D, config.num_splits, config.block_k) // config.block_k
    dtype = gluon_dtype(x_TD)
    high, low = parts_of(config.cols)
    x_high, x_low = (
        descriptor(x_TD, x_TD.shape, x_TD.stride(), [part, config.block_k], dtype)
        for part in (high, low or high)
    )
    # SwiGLU's results leave through TMA; nothing else uses these.
    out_high, out_low = (
        descriptor(out, out.shape, out.stride(), [part, ROWS.value // 2], gluon_dtype(out))
        if swiglu
        else x_high
        for part in (high, low or high)
    )
    num_items = cdiv(T, config.cols) * cdiv(E, outputs) * config.num_splits
    maxnreg, registers = registers_of(config, out, scales is not None)
    num_sms = torch.cuda.get_device_properties(x_TD.device).multi_processor_count
    num_ctas = num_items if swiglu else min(num_items, num_sms)
    on_grid(specialized_linear_kernel, (num_ctas,))(
        weight_descriptor(weight_ED, ROWS.value, config.block_k, swiglu, dtype),
        x_high,
        x_low,
        out_high,
        out_low,
        *(scales or (out, out)),  # pointers that are not read
        out,
        *(T, E, num_items, config.num_splits, num_k),
        TILE=config.rows,
        CONSUMERS=config.consumers,
        PARTS=2 if low else 1,
        STAGES=config.num_stages,
        REGISTERS=registers,
        maxnreg=maxnreg,
        num_warps=4,
        **early_options(config.pdl),
    )
    return out
