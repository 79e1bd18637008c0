"""Frozen configs, parsed from a checkpoint's raw JSON.

What: `ModelConfig` (a Qwen3 dense transformer), `DraftConfig` (a DFlash drafter), `EngineConfig`
(how to run them). Why raw JSON: transformers fills in defaults silently (rope theta 10000), and
a wrong theta or tap index loses acceptance without any error. Invariant: what decides the numerics
(theta, scaling, taps, mask id, block size) is read or refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from graphengine.config.rope import RopeConfig
from graphengine.config.values import read_flag, read_number, read_positive, required, token_ids

GraphMode = Literal["none", "piecewise", "full"]
AttentionBackend = Literal["flashinfer", "triton", "torch"]
DeviceName = Literal["cpu", "cuda"]
DTypeName = Literal["bfloat16", "float32"]
DraftQuantization = Literal["none", "fp8", "fp8-dynamic"]
DraftFormat = Literal["z-lab-old", "z-lab", "speculators", "deepspec"]
SlotConvention = Literal["anchor-dropped", "anchor-first"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """Which keys a row of a layer sees. The row stands at position p, the key at position k:

    `(k <= p or not causal) and (window is None or |p - k| < window)`
    """

    causal: bool
    window: int | None = None


FULL_NON_CAUSAL = AttentionRule(causal=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """A DFlash drafter: its own Qwen3-style layers plus what ties it to a target.

    `target_layer_ids` are 0-based target layers, tapped at the layer's output, whatever the file
    counts from. `block_size` is the number of rows of a draft forward, the anchor among them;
    `slot_convention` says what a row predicts: the token at its own position, the anchor's row
    being dropped ("anchor-dropped"), or the one behind it ("anchor-first"). Buffers, budgets and
    verification go by `num_draft_tokens` and `num_verify_rows`.
    `layer_attention`: one rule a layer; empty, every layer is full and non-causal.
    `target_hidden_size`, `draft_vocab_size`: None where they are the drafter's own hidden and
    vocabulary size. `verifier`: the target that the file names.
    `format`, `block_size_source` and `notes` say what was detected and where; two drafters that
    differ only there are equal.
    """

    model: ModelConfig
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    slot_convention: SlotConvention = "anchor-dropped"
    layer_attention: tuple[AttentionRule, ...] = ()
    target_hidden_size: int | None = None
    draft_vocab_size: int | None = None
    verifier: str | None = None
    format: DraftFormat = field(default="z-lab", compare=False)
    block_size_source: str = field(default="", compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens proposed a step."""
        return self.block_size - (self.slot_convention == "anchor-dropped")

    @property
    def num_verify_rows(self) -> int:
        """Rows that the target runs a step: the anchor and every draft."""
        return self.num_draft_tokens + 1

    def shortened(self, num_draft_tokens: int) -> DraftConfig:
        """The same drafter with fewer mask rows in its block, so that it proposes fewer tokens."""
        fewer = self.num_draft_tokens - num_draft_tokens
        assert 0 <= fewer < self.num_draft_tokens
        return replace(self, block_size=self.block_size - fewer)

    @property
    def attention_rules(self) -> tuple[AttentionRule, ...]:
        """The rule of every layer."""
        return self.layer_attention or (FULL_NON_CAUSAL,) * self.model.num_hidden_layers

    @property
    def num_draft_ids(self) -> int:
        """Rows of the drafter's head."""
        return self.draft_vocab_size or self.model.vocab_size

    @property
    def tap_size(self) -> int:
        """Width of one tap: the target's hidden size."""
        return self.target_hidden_size or self.model.hidden_size

    @property
    def num_taps(self) -> int:
        """Number of target layers whose output feeds the drafter."""
        return len(self.target_layer_ids)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str = "config.json") -> DraftConfig:
        """Parses a drafter's `config.json` of any known format; see `draft_formats`.

        Raises:
            ValueError: not a DFlash drafter, a missing key, or a feature that is not supported.
        """
        from graphengine.config.draft_formats import parse_draft

        return parse_draft(config, source)

    def check_target(self, target: ModelConfig, source: str = "drafter") -> None:
        """Refuses a target that this drafter was not made for.

        Raises:
            ValueError: depth, hidden size, vocabulary, taps or mask id do not fit.
        """
        depth = target.num_hidden_layers
        if self.num_target_layers is not None and self.num_target_layers != depth:
            raise ValueError(
                f"{source}: made for a target of {self.num_target_layers} layers, this one has "
                f"{depth}; pass the drafter of this target"
            )
        if max(self.target_layer_ids) >= depth:
            raise ValueError(
                f"{source}: target_layer_ids {list(self.target_layer_ids)} reach past the target's "
                f"{depth} layers; pass the drafter of this target"
            )
        if self.format == "deepspec" and depth - 1 in self.target_layer_ids:
            raise ValueError(
                f"{source}: target_layer_ids holds the target's last layer, {depth - 1}, which "
                "DeepSpec taps behind the final norm; only taps before it are supported"
            )
        if self.tap_size != target.hidden_size:
            key = "hidden_size" if self.target_hidden_size is None else "target_hidden_size"
            raise ValueError(
                f"{source}: {key} {self.tap_size} differs from the target's "
                f"{target.hidden_size}; pass the drafter of this target"
            )
        if self.model.vocab_size != target.vocab_size:
            raise ValueError(
                f"{source}: vocab_size {self.model.vocab_size} differs from the target's "
                f"{target.vocab_size}; pass the drafter of this target"
            )
        if self.mask_token_id >= target.vocab_size:
            raise ValueError(
                f"{source}: mask_token_id {self.mask_token_id} lies outside the target's embedding "
                f"of {target.vocab_size} rows"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How to run a pair; every value is resolved (no "auto" left).

    `buckets`: ascending batch sizes that are captured. `num_speculative_tokens`: drafts a step, one
    number a bucket (see `draft_length`); empty: all that the drafter has, if there is one.
    `max_model_len`: most tokens (prompt and generated) of one request. `prefill_chunk`: rows of one
    prefill forward. `kv_cache_memory`: most bytes of the K/V pool; None takes what memory allows.
    `simulate_acceptance`: a mean acceptance length to draw instead of comparing drafts (measuring
    speed only).
    `draft_quantization`: "fp8" rounds the drafter's matrices, "fp8-dynamic" in large batches its
    activations too; the output stays the target's.
    `speculation_limit`: the last position at which a block may begin; from there a request decodes
    plainly. `acceptance_floor`: mean acceptance length below which is warned; 0 never.
    `fallback`: decode plainly where speculation is measured to lose.
    `sampling`: requests may have a temperature (a second verify chain is built).
    """

    device: DeviceName
    dtype: DTypeName
    buckets: tuple[int, ...]
    graph_mode: GraphMode
    compile: bool
    attention_backend: AttentionBackend
    prefill_attention_backend: AttentionBackend
    page_size: int
    max_model_len: int
    prefill_chunk: int = 2048
    gpu_memory_utilization: float = 0.9
    kv_cache_memory: int | None = None
    simulate_acceptance: float | None = None
    draft_quantization: DraftQuantization = "none"
    num_speculative_tokens: tuple[int, ...] = ()
    speculation_limit: int | None = None
    acceptance_floor: float = 0.0
    fallback: bool = False
    sampling: bool = False

    @property
    def plans_attention(self) -> bool:
        """Whether attention needs the lengths on the host before each forward."""
        return self.attention_backend != "triton"


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
