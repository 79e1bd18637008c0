"""Building blocks shared by the target and the drafter: tensor in, tensor out.

Legend: T rows, D hidden, J = 2 * MLP width, N heads, H head dim, P positions.
Invariant: norms and rope are computed in float32 and rounded once, so eager and compiled segments
differ by at most the order of a reduction.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from graphengine.capture.torch_internals import scaled_mm
from graphengine.config.rope import RopeConfig
from graphengine.kernels import add_rms_norm as kernels
from graphengine.kernels.argmax import argmax_rows
from graphengine.kernels.chunk_linear import chunk_linear, chunk_swiglu
from graphengine.kernels.chunk_linear import pays as chunk_pays
from graphengine.kernels.fp8 import Fp8Rows, Fp8Scales, quantize_rows_fp8, round_rows_fp8
from graphengine.kernels.fp8_rows import round_rows, split_rows
from graphengine.kernels.head_argmax import skinny_argmax
from graphengine.kernels.output_gate import output_gate as kernel_output_gate
from graphengine.kernels.output_gate import output_gate_reference
from graphengine.kernels.qk_norm_rope import sum_partials
from graphengine.kernels.skinny_config import (
    DEFAULT_SMS,
    NARROW_T,
    SKINNY_T,
    SkinnyConfig,
    choose_config,
)
from graphengine.kernels.skinny_linear import (
    is_hopper,
    skinny_linear,
    skinny_linear_partials,
    skinny_swiglu,
)
from graphengine.kernels.swiglu import swiglu as kernel_swiglu
from graphengine.kernels.swiglu import swiglu_reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dim: `x / sqrt(mean(x^2) + eps) * weight`.

    Args:
        x: [..., D], any float dtype; [T, D] on a GPU contiguous.
        weight: [D], in x's dtype or float32.
        eps: added to the mean square.

    Returns:
        [..., D] in x's dtype; computed in float32, rounded once. One kernel on a GPU, or what
        Inductor fuses it into.
    """
    if x.is_cuda and x.dim() == 2 and not torch.compiler.is_compiling():
        return kernels.add_rms_norm(None, x, weight, eps)[1]
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * scale * weight.float()).to(x.dtype)


class Fp8Matrix(NamedTuple):
    """A matrix whose rows are rounded to FP8 with one scale each: `row = weight * scale`."""

    weight_ED: Tensor  # float8_e4m3fn
    scale_E: Tensor  # float32

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The rounded matrix [E, D] in `dtype`."""
        return (self.weight_ED.float() * self.scale_E[:, None]).to(dtype)


Matrix = Tensor | Fp8Matrix
Operand = Tensor | Fp8Rows  # what a matrix is multiplied by: [T, D], or in FP8 as it takes them


def add_rms_norm(
    h_TD: Tensor | None,
    update: Tensor,
    weight_D: Tensor,
    eps: float,
    matrix: Matrix,
    bias: Tensor | None = None,
) -> tuple[Tensor, Operand]:
    """`h = h + update; x = rms_norm(h)` -> (h_TD, x), x as the matrix that follows takes it.

    One kernel on a GPU, behind which the product begins to fetch its weights; plain torch on the
    CPU, and for an FP8 matrix on another GPU than Hopper, or of a shape that our GEMM does not take
    in up to 64 rows.

    Args:
        h_TD: None is zero.
        update: [T, D], or partial sums [Z, T, D] in float32.
        matrix, bias: what x goes into next.
    """
    num_rows, ours = update.shape[-2], _takes_skinny(kernels.like(h_TD, update, weight_D))
    config = _config(num_rows, matrix) if ours and bias is None else None
    norm = (h_TD, update, weight_D, eps)
    if isinstance(matrix, Fp8Matrix):
        if config is not None and not config.cols:
            h_TD, rows_2TD, scale_T = kernels.add_rms_norm_split(*norm)
            return h_TD, Fp8Rows(rows_2TD, scale_T)
        if ours and num_rows > SKINNY_T:
            h_TD, rows_TD, scale_T = kernels.add_rms_norm_round(*norm)
            return h_TD, Fp8Rows(rows_TD, scale_T)
    elif weight_D.is_cuda:
        early = config is not None and config.ctas_per_sm > 1
        return kernels.add_rms_norm(*norm, early)
    return kernels.add_rms_norm_reference(*norm)


def linear(x: Operand, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """`x @ matrix^T + bias`: x [T, in], matrix [out, in] -> [T, out] in x's dtype."""
    config = skinny_config(x, matrix) if bias is None else None
    if config is None or (config.num_splits > 1 and not isinstance(x, Fp8Rows)):
        return library_linear(x, matrix, bias)
    x, weight, scales = operands(x, matrix, config)
    if config.num_splits == 1:
        return skinny_linear(x, weight, config=config, scales=scales)
    partials_ZTE = skinny_linear_partials(x, weight, config=config, scales=scales)
    return sum_partials(partials_ZTE, torch.bfloat16)


def linear_argmax(x: Operand, matrix: Matrix) -> Tensor:
    """`argmax_rows(linear(x, matrix))`, int64 [T]: -1 where the largest is not finite.

    Invariant: the GEMM and its config are `linear`'s, so the tokens are equal, not close, to those
    of the logits: a greedy request keeps its tokens in a batch that is sampled. Where the GEMM is
    ours the logits are never written.
    """
    config = skinny_config(x, matrix)
    if config is None or config.num_splits > 1:
        return argmax_rows(linear(x, matrix))
    x, weight, scales = operands(x, matrix, config)
    return skinny_argmax(x, weight, config=config, scales=scales)


def linear_partials(x: Operand, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """`linear` for a consumer that adds partial sums.

    Returns:
        [T, out] in x's dtype, or float32 [Z, T, out] whose sum over Z is the product. The consumer
        reads the product anyway; adding there saves the kernel that would only add.
    """
    config = skinny_config(x, matrix) if bias is None else None
    if config is None:
        return library_linear(x, matrix, bias)
    x, weight, scales = operands(x, matrix, config)
    return skinny_linear_partials(x, weight, config=config, scales=scales)


def norm_linear(
    h_TD: Tensor,
    update: Tensor | None,
    norm_D: Tensor,
    eps: float,
    matrix: Matrix,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`h += update; rms_norm(h) @ matrix^T + bias` -> (h_TD, the product or its partial sums).

    Args: update: what the layer before left to add; None for the embedding.
    """
    if update is None:
        x: Operand = rms_norm(h_TD, norm_D, eps)
    else:
        h_TD, x = add_rms_norm(h_TD, update, norm_D, eps, matrix, bias)
    return h_TD, linear_partials(x, matrix, bias)


def linear_swiglu(x: Operand, gate_up: Matrix, bias: Tensor | None = None) -> Tensor:
    """`swiglu(x @ gate_up^T + bias)`: rows packed [gate | up], [T, D] -> [T, I]."""
    config = skinny_config(x, gate_up, swiglu=True) if bias is None else None
    if config is None:
        chunk = _chunk_operands(x, gate_up, bias, swiglu=True)
        return chunk_swiglu(*chunk) if chunk else swiglu(library_linear(x, gate_up, bias))
    x, weight, scales = operands(x, gate_up, config)
    return skinny_swiglu(x, weight, config=config, scales=scales)


def library_linear(x: Operand, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """`linear` without our GEMM of a few rows; rows split in two do not come here.

    An FP8 matrix and more rows than SKINNY_T: x is rounded too, each row with a scale of its
    own (as vLLM's dynamic per-token scales), because from there on the tensor cores are the limit
    and two FP8 products cost as much as one in bf16.
    """
    if not isinstance(matrix, Fp8Matrix) or (isinstance(x, Tensor) and x.shape[0] <= SKINNY_T):
        assert isinstance(x, Tensor)
        chunk = _chunk_operands(x, matrix, bias, swiglu=False)
        return chunk_linear(*chunk) if chunk else F.linear(x, dense(matrix, x.dtype), bias)
    dtype = x.dtype if isinstance(x, Tensor) else torch.bfloat16
    x_TD, scale_T = rounded(x)
    takes_shape = not (matrix.weight_ED.shape[0] % 16 or matrix.weight_ED.shape[1] % 16)
    if x_TD.is_cuda and dtype == torch.bfloat16 and takes_shape and is_hopper():
        y = scaled_mm(x_TD, matrix.weight_ED, scale_T, matrix.scale_E, dtype)
        return y if bias is None else y + bias
    again_TD = (x_TD.float() * scale_T[:, None]).to(dtype)
    return F.linear(again_TD, matrix.dense(dtype), bias)


def operands(
    x: Operand, matrix: Matrix, config: SkinnyConfig
) -> tuple[Tensor, Tensor, Fp8Scales | None]:
    """What our GEMM multiplies: both as they are or, with an FP8 matrix, both in FP8: x as two rows
    without loss, or as one rounded row where `library_linear` would round it as well."""
    if not isinstance(matrix, Fp8Matrix):
        assert isinstance(x, Tensor)
        return x, matrix, None
    if config.cols:
        x = rounded(x)
    elif isinstance(x, Tensor):
        x = Fp8Rows(*split_rows(x))
    return x.rows, matrix.weight_ED, Fp8Scales(x.scale_T, matrix.scale_E)


def rounded(x: Operand) -> Fp8Rows:
    """x as one FP8 row with a scale; the norm in front of it may have rounded it already."""
    if isinstance(x, Fp8Rows):
        assert x.rows.dim() == 2, "rows in two are for our GEMM"
        return x
    return Fp8Rows(*(round_rows(x) if _takes_skinny(x) else round_rows_fp8(x)))


def skinny_config(x: Operand, matrix: Matrix, swiglu: bool = False) -> SkinnyConfig | None:
    """Our GEMM's launch for these shapes; None where cuBLAS streams the weights as well."""
    if isinstance(x, Fp8Rows):  # whoever wrote them asked already
        return _config(x.rows.shape[-2], matrix, swiglu)
    return _config(x.shape[0], matrix, swiglu) if _takes_skinny(x) else None


def _config(num_rows: int, matrix: Matrix, swiglu: bool = False) -> SkinnyConfig | None:
    weight = matrix.weight_ED if isinstance(matrix, Fp8Matrix) else matrix
    outputs, inputs = weight.shape
    return choose_config(num_rows, outputs, inputs, weight.element_size(), swiglu)


def _chunk_operands(
    x: Operand, matrix: Matrix, bias: Tensor | None, swiglu: bool
) -> tuple[Tensor, Tensor] | None:
    """What our GEMM of a chunk multiplies; None where it does not take these or does not pay."""
    if isinstance(x, Fp8Rows) or isinstance(matrix, Fp8Matrix) or bias is not None:
        return None
    if not _takes_skinny(x) or x.dim() != 2 or not (x.is_contiguous() and matrix.is_contiguous()):
        return None
    (num_rows, depth), num_weights = x.shape, matrix.shape[0]
    if num_weights % (16 if swiglu else 8) or depth % 8:  # TMA takes whole 16 bytes
        return None
    num_sms = DEFAULT_SMS  # dynamo may not know the device; the grid asks it
    if not torch.compiler.is_compiling():
        num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    elif num_rows > NARROW_T:  # a step of 64 requests
        return None
    return (x, matrix) if chunk_pays(num_rows, num_weights, depth, num_sms, swiglu) else None


def _takes_skinny(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16 and is_hopper()


def dense(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """The matrix as one tensor; FP8 is multiplied out."""
    return matrix.dense(dtype) if isinstance(matrix, Fp8Matrix) else matrix


def quantize_fp8(matrix: Tensor) -> Fp8Matrix:
    """Rounds a matrix row by row."""
    return Fp8Matrix(*quantize_rows_fp8(matrix))


def add(residual: Tensor, update: Tensor) -> Tensor:
    """`residual + update`, added in float32, rounded once; `update` may be partial sums [Z, T, D].

    In float32 on purpose: Inductor turns a plain `h + x @ W` into an addmm, which first copies h
    into the output (1.4 us a GEMM on an H200, twice a layer). Cast, the sum fuses into the norm
    that follows instead. Delete the casts when Inductor stops preferring addmm.
    """
    update = sum_partials(update, torch.float32)
    return (residual.float() + update.float()).to(residual.dtype)


def swiglu(gate_up_TJ: Tensor) -> Tensor:
    """`silu(gate) * up` for rows laid out [gate | up]: [T, J] -> [T, J / 2]."""
    return (kernel_swiglu if gate_up_TJ.is_cuda else swiglu_reference)(gate_up_TJ)


def output_gate(
    x_TNV: Tensor, projected: Tensor, begin: int, weight_V: Tensor, eps: float
) -> Tensor:
    """Heads normed, then gated by columns of what was projected from `begin` on: [T, N, V] ->
    [T, N * V] (`kernels.output_gate`)."""
    gate = output_gate_reference if x_TNV.is_cpu else kernel_output_gate
    return gate(x_TNV, projected, begin, weight_V, eps)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angular frequencies after scaling: [H / 2], float32, radians per position; of the part of a
    head that is turned, [rotary_dim / 2].

    default: `f_i = theta^(-2i / H)`; linear: `f_i / factor`.
    yarn: a linear blend of `f_i / factor` and `f_i` between the dimensions that turn `beta_slow`
        and `beta_fast` times over the original context (arXiv 2309.00071).
    llama3: low frequencies divided by factor, high ones kept, smooth between.
    """
    head_dim = rope.rotary_dim(head_dim)
    half = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / (rope.theta**half)
    if rope.kind == "yarn":
        original = rope.original_max_position_embeddings

        def dimension(turns: float) -> float:
            return (
                head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
            )

        low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        high = high + 0.001 if low == high else high
        ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
        keep = 1 - ramp.clamp(0, 1)
    elif rope.kind == "llama3":
        original = rope.original_max_position_embeddings
        wavelength = 2 * math.pi / inverse
        low, high = rope.low_freq_factor, rope.high_freq_factor
        keep = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    else:
        return inverse / rope.factor
    return inverse / rope.factor * (1 - keep) + inverse * keep


def rope_table(
    rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device | str
) -> Tensor:
    """cos and sin of every position: `table[p] = amplitude * [cos(p f) | sin(p f)]`.

    Where only a part of a head is turned, the rest has cos 1 and sin 0, and dims are packed so that
    (i, i + H / 2) are pairs all the same (`rotary_order`).

    Returns:
        [P, H] float32, cos in the first half of the columns, sin in the second.
    """
    if torch.device(device).type == "meta":  # arithmetic there imports torch's compiler, 1 s
        return torch.empty(num_positions, head_dim, device=device)
    frequencies = rope_frequencies(rope, head_dim).to(device)
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos() * rope.amplitude, angles.sin() * rope.amplitude
    still = cos.new_zeros(num_positions, head_dim // 2 - len(frequencies))
    return torch.cat([cos, still + 1, sin, still], dim=-1)


def rotary_order(rotary_dim: int, head_dim: int) -> tuple[tuple[int, int], ...]:
    """Ranges of a head's dims in the order in which halves pair up, the turned ones (i, i + R / 2)
    first in each half. Scores do not change: queries and keys have the same order."""
    half, other = rotary_dim // 2, (head_dim - rotary_dim) // 2
    middle = rotary_dim + other
    return ((0, half), (rotary_dim, middle), (half, rotary_dim), (middle, head_dim))
