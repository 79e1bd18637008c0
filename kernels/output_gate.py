"""The gates on what a mixer of the Qwen3.5 family gives, in one launch each.

    Gated DeltaNet   x / rms(x) * w * silu(z), the norm of each head
    attention        x * sigmoid(z), where its own kernel has not gated (block_attention.py)

Why: Inductor makes two launches of the first, and prompts, which run uncompiled, ten; each of those
moves the rows in fp32.
Invariant: before `gdc_wait` nothing but the weight is read and nothing is written. z is rounded to
the model's dtype, where it comes as partial sums, all else is fp32 and rounded once.

Legend: T rows, N heads, V head dim, E columns of the projection, Z partial sums.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.gated_delta_kernels import row_columns
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import on_grid, pdl_options
from graphengine.kernels.qk_norm_rope import sum_partials

HEADS, MANY_HEADS = 4, 8  # of a program; the latter where rows are many
MANY_ROWS = 1024


def output_gate_reference(
    x_TNV: torch.Tensor,
    projected: torch.Tensor,
    begin: int,
    weight_V: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """`output_gate` in plain torch; without a weight what `gate_` leaves."""
    size = x_TNV.shape[1] * x_TNV.shape[2]
    z_TNV = sum_partials(projected[..., begin : begin + size], x_TNV.dtype).view_as(x_TNV).float()
    x = x_TNV.float()
    if weight_V is None:
        gated = x * torch.sigmoid(z_TNV)
    else:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        gated = normed * weight_V.float() * F.silu(z_TNV)
    return gated.to(x_TNV.dtype).flatten(1)


def _launch(
    x_TNV: torch.Tensor,
    projected: torch.Tensor,
    begin: int,
    weight_V: torch.Tensor | None,
    eps: float,
    out_TX: torch.Tensor,
) -> torch.Tensor:
    T, N, V = x_TNV.shape
    is_split = projected.dim() == 3
    heads = MANY_HEADS if T >= MANY_ROWS else HEADS
    on_grid(_output_gate_kernel, (T, (N + heads - 1) // heads))(
        x_TNV,
        projected,
        x_TNV if weight_V is None else weight_V,
        out_TX,
        projected.stride(-2),
        projected.stride(0) if is_split else 0,
        begin,
        eps,
        N=N,
        V=V,
        HEADS=heads,
        Z=projected.shape[0] if is_split else 1,
        NORMS=weight_V is not None,
        **pdl_options(x_TNV.device),
    )
    return out_TX


# A custom op: dynamo does not trace a launch with launch_pdl.
@torch.library.custom_op(
    "graphengine::output_gate",
    mutates_args=(),
    schema="(Tensor x, Tensor projected, int begin, Tensor weight, float eps) -> Tensor",
)
def output_gate(
    x_TNV: torch.Tensor,
    projected: torch.Tensor,
    begin: int,
    weight_V: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """`x / rms(x) * w * silu(z)` of each head.

    Args:
        x_TNV: bf16, fp16 or fp32, contiguous; V a power of two.
        projected: [T, E] in the dtype of x, or fp32 partial sums [Z, T, E]; dense rows.
        begin: column of z's first; its N * V columns are laid out as x's.
        weight_V: any float, contiguous.
    Returns: [T, N * V] in the dtype of x.
    Raises: ValueError for shapes and strides that do not belong together.
    """
    check_gate(x_TNV, projected, begin)
    if not (projected.is_cuda or INTERPRET):
        return output_gate_reference(x_TNV, projected, begin, weight_V, eps)
    out_TX = x_TNV.new_empty(len(x_TNV), x_TNV[0].numel())
    return _launch(x_TNV, projected, begin, weight_V, eps, out_TX)


def gate_(x_TNV: torch.Tensor, projected: torch.Tensor) -> None:
    """`x *= sigmoid(z)`, z the last columns of what was projected; else as `output_gate`. Outside
    of compiled code only: no custom op. Mutates: x_TNV."""
    begin = projected.shape[-1] - x_TNV[0].numel()
    check_gate(x_TNV, projected, begin)
    if x_TNV.is_cuda or INTERPRET:
        _launch(x_TNV, projected, begin, None, 0.0, x_TNV)
    else:
        x_TNV.copy_(output_gate_reference(x_TNV, projected, begin, None, 0.0).view_as(x_TNV))


def check_gate(x_TNV: torch.Tensor, projected: torch.Tensor, begin: int) -> None:
    """Raises: ValueError for a gate of other rows or fewer columns, or strides that no kernel
    addresses."""
    (T, N, V), E = x_TNV.shape, projected.shape[-1]
    if projected.shape[-2] != T or not 0 <= begin <= E - N * V:
        raise ValueError(
            f"x {(T, N, V)}, gate {tuple(projected.shape)}: need {T} rows with {N * V} columns "
            f"from {begin} on"
        )
    is_dense = projected.stride(-1) == 1 and x_TNV.is_contiguous() and not V & (V - 1)
    if not is_dense and (x_TNV.is_cuda or INTERPRET):
        raise ValueError(f"strides {projected.stride()}, {x_TNV.stride()}, V {V}: need dense rows")


@output_gate.register_fake
def _(x_TNV, projected, begin, weight_V, eps):
    return x_TNV.new_empty(x_TNV.shape[0], x_TNV.shape[1] * x_TNV.shape[2])


@triton.jit
def gated(value, gate, t, column, live, dtype: tl.constexpr, Z: tl.constexpr):
    """What attention gives, fp32, in dtype. With a gate, which is (its first column, row stride,
    stride of its Z partial sums), times its sigmoid, as if the kernel below had read it rounded."""
    if Z:
        at = gate[0] + t * gate[1]
        z = row_columns(at, column, live, gate[2], dtype, Z)  # pyright: ignore
        value = value.to(dtype).to(tl.float32) * (1.0 / (1.0 + tl.exp(-z.to(tl.float32))))
    return value.to(dtype)


@triton.jit
def _output_gate_kernel(
    x,
    projected,
    weight,
    out,
    row_stride,
    split_stride,
    begin,
    eps,
    N: tl.constexpr,
    V: tl.constexpr,
    HEADS: tl.constexpr,
    Z: tl.constexpr,
    NORMS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim, live = tl.arange(0, V), (head < N)[:, None]
    if NORMS:
        scale = tl.load(weight + dim).to(tl.float32)[None, :]
    if PDL:
        gdc_wait()
    at = head[:, None] * V + dim[None, :]
    dtype: tl.constexpr = out.dtype.element_ty
    value = tl.load(x + t * N * V + at, mask=live, other=0.0).to(tl.float32)
    z = row_columns(projected + t * row_stride + begin, at, live, split_stride, dtype, Z)  # pyright: ignore
    z = z.to(tl.float32)
    gate = 1.0 / (1.0 + tl.exp(-z))
    if NORMS:
        mean = tl.sum(value * value, axis=1) / V
        value *= tl.rsqrt(mean + eps)[:, None] * scale
        gate *= z
    tl.store(out + t * N * V + at, (value * gate).to(dtype), mask=live)
