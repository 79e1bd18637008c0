"""The dense ffn: `down(silu(gate(x)) * up(x))` behind its norm.

Legend: T rows, D hidden, I MLP width, J = 2 * I.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from graphengine.config.model import ModelConfig
from graphengine.models.layers import Matrix, add_rms_norm, linear_partials, linear_swiglu
from graphengine.models.weight import Fields, Weight, norm, num_matrix_elements


class SwigluWeights(NamedTuple):
    """Fields in the order of use."""

    post_norm_D: Tensor
    gate_up_JD: Matrix  # rows [gate | up]
    gate_up_bias_J: Tensor | None
    down_DI: Matrix
    down_bias_D: Tensor | None


def weights(config: ModelConfig) -> Fields:
    """Names, shapes and shards of `SwigluWeights`."""
    hidden, inter = config.hidden_size, config.intermediate_size
    rows = {f"mlp.{name}_proj": inter for name in ("gate", "up")}
    rows = {"mlp.gate_up_proj": 2 * inter} if config.is_packed else rows
    axis, bias = None if config.is_packed else 0, config.mlp_bias
    return {
        "post_norm_D": norm("post_attention_layernorm.weight", hidden, config.has_offset_norms),
        "gate_up_JD": tuple(Weight(f"{n}.weight", (j, hidden), axis) for n, j in rows.items()),
        "gate_up_bias_J": tuple(Weight(f"{n}.bias", (j,), axis) for n, j in rows.items() if bias),
        "down_DI": (Weight("mlp.down_proj.weight", (hidden, inter), 1),),
        "down_bias_D": (Weight("mlp.down_proj.bias", (hidden,)),) if bias else (),
    }


def num_read_elements(config: ModelConfig, fields: Fields, num_rows: int) -> int:
    """Every matrix once, however many rows."""
    return sum(map(num_matrix_elements, fields.values()))


def row_bytes(config: ModelConfig, element_bytes: int) -> int:
    """Temporaries of a row: both projections, and SwiGLU's three float32 copies."""
    return config.intermediate_size * (2 * element_bytes + 3 * 4)


def run(layer: SwigluWeights, h_TD: Tensor, update: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`h += update; down(swiglu(rms_norm(h)))` -> (h_TD, update), the update [T, D] or partial sums
    [Z, T, D], which whatever norm comes next adds."""
    gate_up_JD, bias_J = layer.gate_up_JD, layer.gate_up_bias_J
    h_TD, x = add_rms_norm(h_TD, update, layer.post_norm_D, eps, gate_up_JD, bias_J)
    x = linear_swiglu(x, gate_up_JD, bias_J)
    return h_TD, linear_partials(x, layer.down_DI, layer.down_bias_D)
