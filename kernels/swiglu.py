"""SwiGLU of a projection that cuBLAS has written, where no GEMM of ours ends in it.

Why: as five kernels of torch through fp32 it moves 478 MB a layer at 1k rows of Qwen3-8B, here 75:
3.4 ms of a prompt of 1,024 tokens at an H200's bandwidth. Inductor would fuse it as well, but
prompts run uncompiled (decode/fixed_chunk.py).
Invariant: nothing is read or written before `gdc_wait`. Both factors stay in fp32 and the product
is rounded once. Cost: 6 T I bytes.

Legend: T rows, I MLP width, J = 2 * I.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import on_grid, pdl_options

BLOCK = 1024


def swiglu_reference(gate_up_TJ: torch.Tensor) -> torch.Tensor:
    """`swiglu` in plain torch."""
    gate, up = gate_up_TJ.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(gate_up_TJ.dtype)


def _launch(gate_up_TJ: torch.Tensor) -> torch.Tensor:
    T, J = gate_up_TJ.shape
    out_TI = gate_up_TJ.new_empty((T, J // 2))
    on_grid(_swiglu_kernel, (T, (J // 2 + BLOCK - 1) // BLOCK))(
        gate_up_TJ,
        out_TI,
        J // 2,
        BLOCK=BLOCK,
        **pdl_options(gate_up_TJ.device),
    )
    return out_TI


# A custom op: dynamo does not trace a launch with launch_pdl.
@torch.library.custom_op("graphengine::swiglu", mutates_args=(), schema="(Tensor x) -> Tensor")
def swiglu(gate_up_TJ: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` for rows laid out [gate | up].

    Args: gate_up_TJ: [T, J] bf16, fp16 or fp32, contiguous, J even.
    Returns: [T, I], contiguous, in its dtype.
    Raises: ValueError for another shape or stride.
    """
    T, J = gate_up_TJ.shape
    if J % 2 or not gate_up_TJ.is_contiguous():
        raise ValueError(f"gate_up {(T, J)}, strides {gate_up_TJ.stride()}: need dense pairs")
    if not (gate_up_TJ.is_cuda or INTERPRET):
        return swiglu_reference(gate_up_TJ)
    return _launch(gate_up_TJ)


@swiglu.register_fake
def _(gate_up_TJ):
    return gate_up_TJ.new_empty((gate_up_TJ.shape[0], gate_up_TJ.shape[1] // 2))


@triton.jit
def _swiglu_kernel(gate_up, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = gate_up + t * 2 * width + i
    gate = tl.load(row, mask=i < width).to(tl.float32)
    up = tl.load(row + width, mask=i < width).to(tl.float32)
    silu = gate / (1.0 + tl.exp(-gate))
    tl.store(out + t * width + i, (silu * up).to(out.dtype.element_ty), mask=i < width)
