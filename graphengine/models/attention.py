"""The mixer of attention over paged K/V: norm and packed projection, then per-head norm, rope and
the cache write in one kernel, a planned attention, and the projection back.

Qwen3 normalises each head of q and k, the others do not; Qwen2 has biases of q, k and v, Mistral
and Phi-3 none, the others may have them. Phi-3's files hold q, k, v as one tensor; where rope turns
a part of a head, heads are packed in `layers.rotary_order`. gpt-oss has a sink for each head, a
logit that joins every row's softmax and takes its share to no value.

Legend: T rows, D hidden, N / K / H query heads / kv heads / head dim, F = N * H, E = (N + 2K) * H.
Source: Qwen3 technical report (arXiv 2505.09388), Llama 3 (arXiv 2407.21783); golden-tested against
transformers.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from graphengine.config.model import ModelConfig
from graphengine.kernels.qk_norm_rope import qk_norm_rope_write_
from graphengine.models.layers import Matrix, linear_partials, norm_linear, rotary_order
from graphengine.models.weight import Fields, Pick, Weight, norm


class AttentionWeights(NamedTuple):
    """Fields in the order of use."""

    input_norm_D: Tensor
    qkv_ED: Matrix  # rows [q | k | v]
    qkv_bias_E: Tensor | None
    q_norm_H: Tensor | None
    k_norm_H: Tensor | None
    sinks_N: Tensor | None
    o_DF: Matrix
    o_bias_D: Tensor | None


class PagedKV(NamedTuple):
    """State by token: keys and values of a layer in a paged pool."""

    num_heads: int
    head_dim: int

    @property
    def num_token_elements(self) -> int:
        """Elements of one token, keys and values."""
        return 2 * self.num_heads * self.head_dim


def weights(config: ModelConfig) -> Fields:
    """Names, shapes and shards of `AttentionWeights`."""
    hidden, q_size, name = config.hidden_size, config.q_size, "self_attn."
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    # heads that rope turns, and behind them heads that it does not, of each tensor of the file
    heads = {"q": (num_heads, 0), "k": (num_kv_heads, 0), "v": (0, num_kv_heads)}
    heads = {"qkv": (num_heads + num_kv_heads, num_kv_heads)} if config.is_packed else heads
    axis, bias = None if config.is_packed else 0, config.attention_bias
    rows = {n: (sum(h) * config.head_dim, _pick(config, *h)) for n, h in heads.items()}
    norms = [f"{name}{head}_norm.weight" for head in "qk"] if config.has_qk_norm else []
    order, is_offset = _pick(config, 1, 0), config.has_offset_norms
    q_norm, k_norm = [norm(n, config.head_dim, is_offset, order) for n in norms] or ((), ())
    return {
        "input_norm_D": norm("input_layernorm.weight", hidden, is_offset),
        "qkv_ED": tuple(
            Weight(f"{name}{n}_proj.weight", (e, hidden), axis, pick=pick)
            for n, (e, pick) in rows.items()
        ),
        "qkv_bias_E": tuple(
            Weight(f"{name}{n}_proj.bias", (e,), axis, pick=pick)
            for n, (e, pick) in rows.items()
            if bias
        ),
        "q_norm_H": q_norm,
        "k_norm_H": k_norm,
        "sinks_N": (Weight(f"{name}sinks", (num_heads,), 0),) if config.has_sinks else (),
        "o_DF": (Weight(f"{name}o_proj.weight", (hidden, q_size), 1),),
        "o_bias_D": (Weight(f"{name}o_proj.bias", (hidden,)),) if config.has_output_bias else (),
    }


def _pick(config: ModelConfig, num_turned: int, num_still: int) -> Pick | None:
    """Rows of so many heads that rope turns in part, in its order, and of others behind them."""
    size = config.head_dim
    if (turned := config.rope.rotary_dim(size)) == size:
        return None
    order = rotary_order(turned, size)
    rows = [(size * h + begin, size * h + end) for h in range(num_turned) for begin, end in order]
    return Pick(1, (*rows, (size * num_turned, size * (num_turned + num_still))))


def state(config: ModelConfig) -> PagedKV:
    """What a layer keeps of each token."""
    return PagedKV(config.num_key_value_heads, config.head_dim)


def row_bytes(config: ModelConfig, element_bytes: int) -> int:
    """Temporaries of a row: projections, and what attention writes."""
    return (2 * config.q_size + 2 * config.kv_size) * element_bytes


def project(
    layer: AttentionWeights, h_TD: Tensor, update: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Input norm and the packed projection: `h += update; rms_norm(h) @ Wqkv^T` -> (h_TD, qkv_TE),
    rows [q | k | v], or its partial sums qkv_ZTE."""
    return norm_linear(h_TD, update, layer.input_norm_D, eps, layer.qkv_ED, layer.qkv_bias_E)


def write_state_(
    layer: AttentionWeights,
    qkv_TE: Tensor,
    rope_PH: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    kv_cache: Tensor,
    eps: float,
) -> Tensor:
    """Per-head norm, rope and the cache write -> q_TNH. Mutates: kv_cache."""
    return qk_norm_rope_write_(
        qkv_TE, layer.q_norm_H, layer.k_norm_H, rope_PH, positions_T, slots_T, kv_cache, eps
    )


def output(layer: AttentionWeights, attn_TNH: Tensor) -> Tensor:
    """`attn @ Wo^T`: what the residual stream is to add, [T, D] or partial sums [Z, T, D]."""
    return linear_partials(attn_TNH.flatten(1), layer.o_DF, layer.o_bias_D)
