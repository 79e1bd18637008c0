"""The shape of a transformer, parsed from a checkpoint's raw JSON.

Why raw JSON: transformers fills in defaults silently (rope theta 10000), and a wrong theta loses
acceptance without any error. Invariant: what decides the numerics (theta, scaling) is read or
refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphengine.config.rope import RopeConfig
from graphengine.config.values import read_flag, read_number, read_positive, required, token_ids

# Past these a file is damaged, and trying to build what it says would not end.
MAX_LAYERS, MAX_HEAD_DIM = 1024, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and constants of a Qwen3 dense transformer (also the drafter's own layers)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    rope: RopeConfig
    eos_token_ids: tuple[int, ...] = ()

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of one layer's four matrices (norms left out: under 0.01 %)."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Parses a Hugging Face `config.json` of a dense Qwen3 model.

        Raises:
            ValueError: another architecture, a missing key, or a value that is not supported.
        """
        if config.get("model_type") != "qwen3":
            raise ValueError(
                f"{source}: model_type {config.get('model_type')!r} is not supported; graphengine "
                "runs dense Qwen3 models (model_type 'qwen3')"
            )
        model = cls.from_layer_keys(config, source)
        layer_types = read_layer_types(config, model.num_hidden_layers, source)
        other = sorted(set(layer_types) - {"full_attention"})
        if other or config.get("use_sliding_window"):
            raise ValueError(
                f"{source}: sliding or mixed attention ({other or 'use_sliding_window'}) is not "
                "supported in a target; only full_attention layers are"
            )
        return model

    @classmethod
    def from_layer_keys(cls, config: Mapping[str, Any], source: str) -> ModelConfig:
        """The shape of a Qwen3 stack; does not look at model_type or at the layers' attention."""
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(
                f"{source}: hidden_act {config['hidden_act']!r} is not supported (silu is)"
            )
        if config.get("quantization_config"):
            raise ValueError(
                f"{source}: quantization_config is not supported; use the bf16 weights"
            )
        num_heads = read_positive(config, "num_attention_heads", source)
        num_kv_heads = read_positive(config, "num_key_value_heads", source)
        hidden = read_positive(config, "hidden_size", source)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"{source}: num_attention_heads {num_heads} is not a multiple of "
                f"num_key_value_heads {num_kv_heads}"
            )
        head_dim = read_positive(config, "head_dim", source, MAX_HEAD_DIM)
        if head_dim % 2:
            raise ValueError(f"{source}: head_dim {head_dim} is odd; rope needs an even one")
        eps = read_number(required(config, "rms_norm_eps", source), "rms_norm_eps", source)
        return cls(
            vocab_size=read_positive(config, "vocab_size", source),
            hidden_size=hidden,
            intermediate_size=read_positive(config, "intermediate_size", source),
            num_hidden_layers=read_positive(config, "num_hidden_layers", source, MAX_LAYERS),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=eps,
            max_position_embeddings=read_positive(config, "max_position_embeddings", source),
            tie_word_embeddings=read_flag(config, "tie_word_embeddings", source),
            attention_bias=read_flag(config, "attention_bias", source),
            rope=RopeConfig.from_hf(config, source),
            eos_token_ids=token_ids(config.get("eos_token_id"), "eos_token_id", source),
        )


def read_layer_types(config: Mapping[str, Any], num_layers: int, source: str) -> list[str]:
    """`layer_types`, one a layer; empty where the file has none."""
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise ValueError(f"{source}: layer_types is {layer_types!r}, expected a list")
    if layer_types and len(layer_types) != num_layers:
        raise ValueError(
            f"{source}: {len(layer_types)} layer_types for num_hidden_layers {num_layers}"
        )
    return [str(kind) for kind in layer_types]
