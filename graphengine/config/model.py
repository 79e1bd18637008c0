"""The shape of a transformer, parsed from a checkpoint's raw JSON.

Why raw JSON: transformers fills in defaults silently (rope theta 10000), and a wrong theta loses
acceptance without any error. Invariant: theta and scaling are read or refused, never guessed; what
else may be missing is what transformers documents for that architecture (`ARCHITECTURES`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphengine.config.rope import RopeConfig
from graphengine.config.values import (
    read_flag,
    read_integer,
    read_number,
    read_positive,
    token_ids,
)

# Past these a file is damaged, and trying to build what it says would not end.
MAX_LAYERS, MAX_HEAD_DIM = 1024, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What a model_type says beyond the keys of its config.json.

    `defaults`: keys that a file may lack, and what transformers takes then. `heads_decide`: so are
    head_dim (hidden / heads) and num_key_value_heads (heads). `mixer`, `ffn`: every layer's kind,
    names in `models.decoder`.
    """

    defaults: Mapping[str, Any]
    heads_decide: bool
    has_qk_norm: bool
    has_mlp_bias: bool
    mixer: str = "attention"
    ffn: str = "swiglu"


# model_type -> what it means; an architecture of known layer kinds is one row.
ARCHITECTURES = {
    "qwen3": Architecture(
        defaults={"head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768},
        heads_decide=False,
        has_qk_norm=True,
        has_mlp_bias=False,
    ),
    "llama": Architecture(
        defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
        heads_decide=True,
        has_qk_norm=False,
        has_mlp_bias=True,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and constants of a decoder-only transformer (also the drafter's own layers)."""

    model_type: str = "qwen3"
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
    mlp_bias: bool = False
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
    def has_qk_norm(self) -> bool:
        """Whether each head of queries and keys is normalised."""
        return ARCHITECTURES[self.model_type].has_qk_norm

    @property
    def layer_kinds(self) -> tuple[tuple[str, str], ...]:
        """Names of every layer's mixer and ffn."""
        architecture = ARCHITECTURES[self.model_type]
        return ((architecture.mixer, architecture.ffn),) * self.num_hidden_layers

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Parses a target's Hugging Face `config.json`.

        Raises:
            ValueError: another architecture, a missing key, or a value that is not supported.
        """
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
            raise ValueError(
                f"{source}: model_type {model_type!r} is not supported; graphengine runs dense "
                f"models of model_type {' or '.join(map(repr, ARCHITECTURES))}"
            )
        model = cls.from_layer_keys(config, source, model_type)
        layer_types = read_layer_types(config, model.num_hidden_layers, source)
        other = sorted(set(layer_types) - {"full_attention"})
        if not layer_types and read_flag(config, "use_sliding_window", source):
            first = config.get("max_window_layers", 28)  # transformers' defaults, here and below
            first = read_integer(first, "max_window_layers", source, minimum=0)
            if first < model.num_hidden_layers and config.get("sliding_window", 4096) is not None:
                other = [f"use_sliding_window from max_window_layers {first} on"]
        if other:
            raise ValueError(
                f"{source}: sliding or mixed attention ({', '.join(other)}) is not supported in a "
                "target; only full_attention layers are"
            )
        return model

    @classmethod
    def from_layer_keys(
        cls, config: Mapping[str, Any], source: str, model_type: str = "qwen3"
    ) -> ModelConfig:
        """The shape of a stack of layers; does not look at the file's model_type (a drafter's says
        little) nor at the layers' attention."""
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(
                f"{source}: hidden_act {config['hidden_act']!r} is not supported (silu is)"
            )
        if config.get("quantization_config"):
            raise ValueError(
                f"{source}: quantization_config is not supported; use the bf16 weights"
            )
        architecture = ARCHITECTURES[model_type]
        num_heads = read_positive(config, "num_attention_heads", source)
        hidden = read_positive(config, "hidden_size", source)
        keys = dict(architecture.defaults)
        if architecture.heads_decide:
            keys |= {"head_dim": hidden // num_heads, "num_key_value_heads": num_heads}
        keys |= {key: value for key, value in config.items() if value is not None}
        num_kv_heads = read_positive(keys, "num_key_value_heads", source)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"{source}: num_attention_heads {num_heads} is not a multiple of "
                f"num_key_value_heads {num_kv_heads}"
            )
        head_dim = read_positive(keys, "head_dim", source, MAX_HEAD_DIM)
        if head_dim % 2:
            raise ValueError(f"{source}: head_dim {head_dim} is odd; rope needs an even one")
        return cls(
            model_type=model_type,
            vocab_size=read_positive(keys, "vocab_size", source),
            hidden_size=hidden,
            intermediate_size=read_positive(keys, "intermediate_size", source),
            num_hidden_layers=read_positive(keys, "num_hidden_layers", source, MAX_LAYERS),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=read_number(keys["rms_norm_eps"], "rms_norm_eps", source),
            max_position_embeddings=read_positive(keys, "max_position_embeddings", source),
            tie_word_embeddings=read_flag(keys, "tie_word_embeddings", source),
            attention_bias=read_flag(keys, "attention_bias", source),
            mlp_bias=architecture.has_mlp_bias and read_flag(keys, "mlp_bias", source),
            rope=RopeConfig.from_hf(config, source),
            eos_token_ids=token_ids(keys.get("eos_token_id"), "eos_token_id", source),
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
