"""What a hybrid's config.json says of its recurrent layers (Qwen3-Next, Qwen3.5 and later)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphengine.config.values import RawConfig

CONV_TAPS = 4
LAYER_TYPES = {"linear_attention": "gated_delta", "full_attention": "gated_attention"}
# What transformers takes where a file lacks a key.
DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": CONV_TAPS,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaConfig:
    """Heads of a Gated-DeltaNet layer: value head h reads with key head
    `h // (num_value_heads / num_key_heads)`; keys and values are equally wide. `is_interleaved`:
    the file's projections hold one key head after another, with all that belongs to it."""

    num_key_heads: int
    num_value_heads: int
    head_dim: int
    is_interleaved: bool = False

    @property
    def key_size(self) -> int:
        """Width of all key (or query) heads."""
        return self.num_key_heads * self.head_dim

    @property
    def value_size(self) -> int:
        """Width of all value heads."""
        return self.num_value_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """What the convolution runs over: queries, keys, values."""
        return 2 * self.key_size + self.value_size

    @classmethod
    def from_raw(cls, raw: RawConfig, is_interleaved: bool = False) -> GatedDeltaConfig:
        """Reads the linear_* keys of a file with `DEFAULTS` filled in.

        Raises:
            ValueError: what is not built, naming the key and its value.
        """
        taps = raw.integer("linear_conv_kernel_dim")
        widths = [raw.integer(f"linear_{name}_head_dim") for name in ("key", "value")]
        keys, values = (raw.integer(f"linear_num_{name}_heads") for name in ("key", "value"))
        if values % keys:
            raise raw.refusal(
                f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}"
            )
        gate, dtype = raw.get("output_gate_type"), raw.get("mamba_ssm_dtype")
        refused = {
            f"linear_conv_kernel_dim {taps} ({CONV_TAPS} is)": taps != CONV_TAPS,
            f"linear_key_head_dim {widths[0]} beside linear_value_head_dim {widths[1]} (equal ones "
            "are)": widths[0] != widths[1],
            "attn_output_gate false": not raw.flag("attn_output_gate", default=True),
            "attention_bias true": raw.flag("attention_bias"),
            f"output_gate_type {gate!r} (silu and swish are)": gate not in (None, "silu", "swish"),
            f"mamba_ssm_dtype {dtype!r} (float32 is)": dtype not in (None, "float32"),
        }
        for text, is_refused in refused.items():
            if is_refused:
                raise raw.refusal(f"{text} is not supported")
        heads = {"num_key_heads": keys, "num_value_heads": values, "head_dim": widths[0]}
        return cls(**heads, is_interleaved=is_interleaved)


def read_mixers(raw: RawConfig, layer_types: list[str], num_layers: int) -> tuple[str, ...]:
    """The mixer of every layer: `layer_types` decides, `full_attention_interval` n (every n-th
    layer) only where there are none; both must agree.

    Raises:
        ValueError: an unknown kind, no layer of full attention, or the two disagree.
    """
    interval = raw.integer("full_attention_interval")
    kinds = ("linear_attention", "full_attention")
    regular = [kinds[(i + 1) % interval == 0] for i in range(num_layers)]
    unknown = sorted(set(layer_types) - set(LAYER_TYPES))
    if unknown:
        raise raw.refusal(f"layer_types {unknown} are not supported; {', '.join(kinds)} are")
    is_stated = interval != DEFAULTS["full_attention_interval"]
    if layer_types and is_stated and layer_types != regular:
        raise raw.refusal(
            f"layer_types and full_attention_interval {interval} disagree; remove the one that is "
            "not meant"
        )
    found = tuple(LAYER_TYPES[kind] for kind in layer_types or regular)
    if "gated_attention" not in found:
        raise raw.refusal("no layer has full_attention; a model without any is not supported")
    return found


def text_part(raw: RawConfig) -> RawConfig:
    """The language model of a published vision-language config.json: its `text_config`.

    Raises:
        ValueError: there is none, or what stands in both disagrees and decides numerics.
    """
    text = raw.section("text_config")
    if not text:
        raise raw.refusal(f"model_type {raw.get('model_type')!r} has no text_config")
    both = [raw.get("tie_word_embeddings"), text.get("tie_word_embeddings")]
    if None not in both and both[0] != both[1]:
        raise raw.refusal(
            f"tie_word_embeddings is {both[0]} at the top level and {both[1]} in text_config, and "
            "engines differ in which counts; make them equal"
        )
    inherited = ("tie_word_embeddings", "eos_token_id", "quantization_config")
    outer = {key: raw.get(key) for key in inherited}
    return RawConfig(text, f"{raw.source}: text_config").over(outer)
