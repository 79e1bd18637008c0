"""The products of moe.py whose experts are in MXFP4 (mxfp4.py), and their launches, in Triton.

As in moe_kernels.py an expert's rows of x are the columns of a product and its weights the side
that is 64 for wgmma, here a block of rows; of gate and up eight rows each in turn, so that x is
read once. Invariants are those of that file. A few rows on Hopper: moe_mxfp4_stream.py.

Legend: T rows, D hidden, K experts of a row, P = T * K pairs, S slots, I expert width.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.clamped_swiglu import Clamp, activate, clamp_options
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import on_grid, pdl_options
from graphengine.kernels.moe_kernels import STREAM_ROWS
from graphengine.kernels.mxfp4 import BLOCK, Mxfp4, product_mxfp4


def launch_gate_up(
    x_TD: torch.Tensor,
    gate_up: Mxfp4,
    slots_S3: torch.Tensor,
    pairs_P: torch.Tensor,
    top_k: int,
    bias_EJ: torch.Tensor | None,
    clamp: Clamp | None,
) -> torch.Tensor:
    """`moe_kernels.launch_gate_up` of rows `in_turn` in MXFP4."""
    (T, D), I = x_TD.shape, gate_up.codes.shape[1] * (BLOCK // 2)  # noqa: E741 (moe.py's width)
    out_PI = x_TD.new_empty((T * top_k, I))
    on_grid(_gate_up_kernel, (gate_up.codes.shape[1], len(slots_S3)))(
        x_TD,
        *gate_up.words,
        bias_EJ,
        slots_S3,
        pairs_P,
        out_PI,
        I,
        D=D,
        K=top_k,
        **clamp_options(clamp),
        **_tile(T, x_TD.device),
    )
    return out_PI


def launch_down(
    act_PI: torch.Tensor,
    down: Mxfp4,
    weight_TK: torch.Tensor,
    slots_S3: torch.Tensor,
    pairs_P: torch.Tensor,
    bias_ED: torch.Tensor | None,
) -> torch.Tensor:
    """`moe_kernels.launch_down` in MXFP4, without a shared expert."""
    (T, K), D, I = weight_TK.shape, down.codes.shape[1] * BLOCK, act_PI.shape[1]  # noqa: E741 (moe.py's width)
    out_KTD = torch.empty((K, T, D), dtype=torch.float32, device=act_PI.device)
    on_grid(_down_kernel, (down.codes.shape[1], len(slots_S3)))(
        act_PI,
        *down.words,
        bias_ED,
        weight_TK,
        slots_S3,
        pairs_P,
        out_KTD,
        T,
        D,
        I=I,
        K=K,
        **_tile(T, act_PI.device),
    )
    return out_KTD


def _tile(num_rows: int, device: torch.device) -> dict[str, Any]:
    """How a product is cut: few rows of an expert where weights are streamed; more of them use more
    often what has been widened."""
    rows = 16 if num_rows <= STREAM_ROWS else 32 if num_rows <= 512 else 64
    sizes = {"ROWS": rows, "num_stages": 3, "num_warps": 4}
    return sizes | {"DOT_FP32": INTERPRET, **pdl_options(device)}


@triton.jit(do_not_specialize=["I"])
def _gate_up_kernel(
    x,
    codes,
    scales,
    bias,
    slots,
    pairs,
    out,
    I,  # noqa: E741 (moe.py's width)
    D: tl.constexpr,
    K: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    DOT_FP32: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = slots + tl.program_id(1) * 3
    e, begin, end = tl.load(slot).to(tl.int64), tl.load(slot + 1), tl.load(slot + 2)
    block = e * (I // 32) + tl.program_id(0)
    i = tl.program_id(0) * 32 + tl.arange(0, 32)
    for start in range(begin, end, ROWS):
        at = start + tl.arange(0, ROWS)
        pair = tl.load(pairs + at, mask=at < end, other=0).to(tl.int64)
        sums = product_mxfp4(
            *(tl.zeros((64, ROWS), tl.float32), codes, scales, block),
            *(x, pair // K * D, at < end, D, DOT_FP32),
        )
        both = tl.permute(tl.reshape(sums, [4, 2, 8, ROWS]), [0, 2, 3, 1])
        gate, up = tl.split(both)
        gate, up = tl.reshape(gate, [32, ROWS]), tl.reshape(up, [32, ROWS])
        if bias is not None:
            of_gate = bias + e * 2 * I + i
            gate += tl.load(of_gate).to(tl.float32)[:, None]
            up += tl.load(of_gate + I).to(tl.float32)[:, None]
        y = activate(gate, up, ALPHA, LIMIT)
        to = out + pair[None, :] * I + i[:, None]
        tl.store(to, y.to(out.dtype.element_ty), mask=(at < end)[None, :])


@triton.jit(do_not_specialize=["num_rows", "D"])
def _down_kernel(
    act,
    codes,
    scales,
    bias,
    weights,
    slots,
    pairs,
    out,
    num_rows,
    D,
    I: tl.constexpr,  # noqa: E741 (moe.py's width)
    K: tl.constexpr,
    ROWS: tl.constexpr,
    DOT_FP32: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = slots + tl.program_id(1) * 3
    e, begin, end = tl.load(slot).to(tl.int64), tl.load(slot + 1), tl.load(slot + 2)
    n = tl.program_id(0) * 64 + tl.arange(0, 64)
    for start in range(begin, end, ROWS):
        at = start + tl.arange(0, ROWS)
        pair = tl.load(pairs + at, mask=at < end, other=0).to(tl.int64)
        y = product_mxfp4(
            *(tl.zeros((64, ROWS), tl.float32), codes, scales, e * (D // 64) + tl.program_id(0)),
            *(act, pair * I, at < end, I, DOT_FP32),
        )
        if bias is not None:
            y += tl.load(bias + e * D + n).to(tl.float32)[:, None]
        y *= tl.load(weights + pair, mask=at < end, other=0.0)[None, :]
        to = out + ((pair % K) * num_rows + pair // K)[None, :] * D + n[:, None]
        tl.store(to, y, mask=(at < end)[None, :])
