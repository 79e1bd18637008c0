"""The mixer of a Gated-DeltaNet layer: one projection, a short convolution and a recurrence whose
state has a fixed size by request, a gated norm and the projection back.

    m, z, b, a = W x                         one GEMM, rows [q | k | v | z | b | a]
    q, k, v    = silu(conv4(m))              depthwise; q and k normalised by head
    S         <- exp(g) S + k (beta (v - (exp(g) S)^T k))^T,   o = S^T q
    out        = Wo (rmsnorm(o) * w * silu(z))

What stands between the two projections is kernels/gated_delta.py; here are the dense ends.

Legend: T rows, D hidden, N value heads, V head dim, C channels of the convolution,
E = C + N * V + 2 * N, F = N * V.
Source: Gated Delta Networks (arXiv 2412.06464); golden-tested against transformers.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.config.gated_delta import CONV_TAPS, GatedDeltaConfig
from graphengine.config.model import ModelConfig
from graphengine.models.layers import Matrix, linear_partials, norm_linear
from graphengine.models.weight import Fields, Pick, Weight, norm


class GatedDeltaWeights(NamedTuple):
    """Fields in the order of use."""

    input_norm_D: Tensor  # float32: 1 + w
    in_ED: Matrix  # rows [q | k | v | z | b | a]
    conv_C14: Tensor  # the last tap is the newest column's
    a_log_N: Tensor  # float32
    dt_bias_N: Tensor  # float32
    norm_V: Tensor  # float32: w itself
    out_DF: Matrix


class RecurrentState(NamedTuple):
    """State by request: the last columns in front of the convolution, and the recurrence's."""

    config: GatedDeltaConfig

    @property
    def window_shape(self) -> tuple[int, int]:
        """Of one request, in the model's dtype: [3, C]."""
        return CONV_TAPS - 1, self.config.num_channels

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Of one request, float32: [N, V, K]."""
        return self.config.num_value_heads, self.config.head_dim, self.config.head_dim


def _shape(config: ModelConfig) -> GatedDeltaConfig:
    assert config.gated_delta is not None
    return config.gated_delta


def weights(config: ModelConfig) -> Fields:
    """Names, shapes and shards of `GatedDeltaWeights`."""
    hidden, own, name, f32 = config.hidden_size, _shape(config), "linear_attn.", torch.float32
    heads = own.num_value_heads
    projections = _interleaved(own) if own.is_interleaved else _flat(own)
    return {
        "input_norm_D": norm("input_layernorm.weight", hidden, config.has_offset_norms),
        "in_ED": tuple(
            Weight(f"{name}in_proj_{part}.weight", (size, hidden), 0, pick=pick)
            for part, size, pick in projections
        ),
        "conv_C14": (Weight(f"{name}conv1d.weight", (own.num_channels, 1, CONV_TAPS), 0),),
        "a_log_N": (Weight(f"{name}A_log", (heads,), 0, dtype=f32),),
        "dt_bias_N": (Weight(f"{name}dt_bias", (heads,), 0, dtype=f32),),
        "norm_V": (Weight(f"{name}norm.weight", (own.head_dim,), None, "ones", dtype=f32),),
        "out_DF": (Weight(f"{name}out_proj.weight", (hidden, own.value_size), 1),),
    }


def _flat(own: GatedDeltaConfig) -> list[tuple[str, int, Pick | None]]:
    """Tensor of the file, its rows, and which of them: of Qwen3.5 and later."""
    sizes = {"qkv": own.num_channels, "z": own.value_size}
    sizes |= dict.fromkeys("ba", own.num_value_heads)
    return [(part, size, None) for part, size in sizes.items()]


def _interleaved(own: GatedDeltaConfig) -> list[tuple[str, int, Pick | None]]:
    """The same of Qwen3-Next: for each key head q, k, its value heads' v and z; and b, a."""
    width, group = own.head_dim, own.num_value_heads // own.num_key_heads
    ends = [0, width, 2 * width, (2 + group) * width, (2 + 2 * group) * width]
    parts = [("qkvz", ends), ("ba", [0, group, 2 * group])]
    return [
        (part, own.num_key_heads * edges[-1], Pick(own.num_key_heads, (bounds,)))
        for part, edges in parts
        for bounds in pairwise(edges)
    ]


def state(config: ModelConfig) -> RecurrentState:
    """What a layer keeps of each request."""
    return RecurrentState(_shape(config))


def row_bytes(config: ModelConfig, element_bytes: int) -> int:
    """Temporaries of a row: the projection, the recurrence's outputs, the gated norm in float32;
    and of a chunk the convolved columns and what its solve leaves, in float32."""
    own = _shape(config)
    columns = own.num_channels + own.value_size
    return (columns + 2 * own.value_size) * element_bytes + (2 * columns + own.value_size) * 4


def project(
    layer: GatedDeltaWeights, h_TD: Tensor, update: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Input norm and the packed projection -> (h_TD, projected_TE or its partial sums)."""
    return norm_linear(h_TD, update, layer.input_norm_D, eps, layer.in_ED)


def output(layer: GatedDeltaWeights, gated_TNV: Tensor) -> Tensor:
    """`gated @ Wo^T`: [T, D] or partial sums."""
    return linear_partials(gated_TNV.flatten(1), layer.out_DF)
