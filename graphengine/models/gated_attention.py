"""Attention of the Qwen3.5 family: `attention.py`'s, with a gate on what it gives and a rotary
embedding that turns a part of each head.

    out = Wo (softmax(q k^T / sqrt(H)) v * sigmoid(gate))

A file's q_proj holds for each head its query rows, then its gate rows; here the gates stand behind
q, k, v, so that one projection gives all and the cache write sees rows [q | k | v] as ever. Heads
are packed in `layers.rotary_order`.

Legend: T rows, D hidden, N / K / H query heads / kv heads / head dim, F = N * H,
E = 2 * (N + K) * H.
Source: golden-tested against transformers' Qwen3_5Attention.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from graphengine.config.model import ModelConfig
from graphengine.kernels.qk_norm_rope import qk_norm_rope_write_
from graphengine.models.layers import Matrix, linear_partials, norm_linear, rotary_order
from graphengine.models.weight import Fields, Pick, Weight, norm


class GatedAttentionWeights(NamedTuple):
    """Fields in the order of use."""

    input_norm_D: Tensor  # float32: 1 + w
    qkvg_ED: Matrix  # rows [q | k | v | gate]
    q_norm_H: Tensor  # float32: 1 + w
    k_norm_H: Tensor  # float32: 1 + w
    o_DF: Matrix


def weights(config: ModelConfig) -> Fields:
    """Names, shapes and shards of `GatedAttentionWeights`."""
    hidden, head_dim, q_size = config.hidden_size, config.head_dim, config.q_size
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    order = rotary_order(config.rope.rotary_dim(head_dim), head_dim)
    name = "self_attn."

    def rows(which: str, size: int, pick: Pick | None) -> Weight:
        return Weight(f"{name}{which}_proj.weight", (size, hidden), 0, pick=pick)

    one = Pick(1, order)
    return {
        "input_norm_D": norm("input_layernorm.weight", hidden, config.has_offset_norms),
        "qkvg_ED": (
            rows("q", 2 * q_size, Pick(num_heads, order)),
            rows("k", config.kv_size, Pick(num_kv_heads, order)),
            rows("v", config.kv_size, None),
            rows("q", 2 * q_size, Pick(num_heads, ((head_dim, 2 * head_dim),))),
        ),
        "q_norm_H": norm(f"{name}q_norm.weight", head_dim, config.has_offset_norms, one),
        "k_norm_H": norm(f"{name}k_norm.weight", head_dim, config.has_offset_norms, one),
        "o_DF": (Weight(f"{name}o_proj.weight", (hidden, q_size), 1),),
    }


def row_bytes(config: ModelConfig, element_bytes: int) -> int:
    """Temporaries of a row: projections, what attention writes, and the gate in float32."""
    return (3 * config.q_size + 2 * config.kv_size) * element_bytes + 2 * config.q_size * 4


def project(
    layer: GatedAttentionWeights, h_TD: Tensor, update: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Input norm and the packed projection -> (h_TD, qkvg_TE or its partial sums)."""
    return norm_linear(h_TD, update, layer.input_norm_D, eps, layer.qkvg_ED)


def write_state_(
    layer: GatedAttentionWeights,
    qkvg_TE: Tensor,
    rope_PH: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    kv_cache: Tensor,
    eps: float,
) -> Tensor:
    """Per-head norm, rope and the cache write -> q_TNH. Mutates: kv_cache."""
    num_kv_heads, head_dim = kv_cache.shape[-2:]
    qkv_TE = qkvg_TE[..., : (qkvg_TE.shape[-1] + 2 * num_kv_heads * head_dim) // 2]
    return qk_norm_rope_write_(
        qkv_TE, layer.q_norm_H, layer.k_norm_H, rope_PH, positions_T, slots_T, kv_cache, eps
    )


def output(layer: GatedAttentionWeights, gated_TNH: Tensor) -> Tensor:
    """`gated @ Wo^T`: [T, D] or partial sums [Z, T, D]."""
    return linear_partials(gated_TNH.flatten(1), layer.o_DF)
