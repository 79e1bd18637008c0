"""Frozen configs, parsed from a checkpoint's raw JSON.

What: `ModelConfig` (a Qwen3 dense transformer), `DraftConfig` (a DFlash drafter), `EngineConfig`
(how to run them). Why raw JSON: transformers fills in defaults silently (rope theta 10000), and
a wrong theta or tap index loses acceptance without any error. Invariant: what decides the numerics
(theta, scaling, taps, mask id, block size) is read or refused, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

RopeKind = Literal["default", "yarn", "llama3"]
GraphMode = Literal["none", "piecewise", "full"]
AttentionBackend = Literal["flashinfer", "triton", "torch"]
DeviceName = Literal["cpu", "cuda"]
DTypeName = Literal["bfloat16", "float32"]
DraftQuantization = Literal["none", "fp8", "fp8-dynamic"]
DraftFormat = Literal["z-lab-old", "z-lab", "speculators", "deepspec"]
SlotConvention = Literal["anchor-dropped", "anchor-first"]

# Past these a file is damaged, and trying to build what it says would not end.
MAX_LAYERS, MAX_HEAD_DIM = 1024, 4096
MAX_NUMBER = 1e300
MAX_POSITIONS = 1 << 40
MIN_ROPE_TURNS = 1e-6  # of yarn's beta_fast and beta_slow, which are around 32 and 1

_ROPE_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "yarn": frozenset(
        "factor original_max_position_embeddings beta_fast beta_slow attention_factor mscale "
        "mscale_all_dim truncate".split()
    ),
    "llama3": frozenset(
        "factor original_max_position_embeddings low_freq_factor high_freq_factor".split()
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding over the whole head, NeoX (half-split) layout.

    `theta` is the base; `factor` and the rest parametrise the scaling of `kind` and are unused by
    `default`. `amplitude` multiplies cos and sin (yarn's attention factor; 1 otherwise).
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str) -> RopeConfig:
        """Reads `rope_parameters` (transformers 5) or flat `rope_theta` + `rope_scaling` (4).

        Of two thetas the one in `rope_parameters` counts, as in transformers. Of two scalings
        transformers takes `rope_scaling` and other engines `rope_parameters`: they must agree.

        Raises:
            ValueError: theta is missing, the kind is unknown, a key is not understood, or the two
                places disagree.
        """
        nested = config.get("rope_parameters")
        if nested is not None and not isinstance(nested, Mapping):
            raise ValueError(f"{source}: rope_parameters is {nested!r}, expected an object")
        if nested and all(isinstance(value, Mapping) for value in nested.values()):
            kinds = sorted(nested)
            if kinds != ["full_attention"]:
                raise ValueError(
                    f"{source}: rope_parameters per layer type {kinds} is not supported; only a "
                    "model whose layers are all full_attention is"
                )
            nested = nested["full_attention"]
        flat = config.get("rope_scaling") or {}
        if not isinstance(flat, Mapping):
            raise ValueError(f"{source}: rope_scaling is {flat!r}, expected an object")
        scaling = dict(nested or flat)
        if nested and flat and _scaling(nested) != _scaling(flat):
            raise ValueError(
                f"{source}: rope_parameters {dict(nested)} and rope_scaling {dict(flat)} disagree, "
                "and engines differ in which one counts; remove the one that is not meant"
            )
        theta = scaling.pop("rope_theta", None)
        theta = config.get("rope_theta") if theta is None else theta
        if theta is None:
            raise ValueError(
                f"{source}: no rope_theta (neither in rope_parameters nor at the top level); add "
                "the base that the model was trained with, it is never guessed"
            )
        theta = read_number(theta, "rope_theta", source, minimum=2.0)
        if "partial_rotary_factor" in config or "partial_rotary_factor" in scaling:
            value = scaling.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
            if value != 1.0:
                raise ValueError(
                    f"{source}: partial_rotary_factor {value!r} is not supported: engines disagree "
                    "on whether this architecture obeys it"
                )
        old, new = scaling.pop("type", None), scaling.pop("rope_type", None)
        kind = new or old or "default"
        if old and new and old != new:
            raise ValueError(f"{source}: rope type {old!r} and rope_type {new!r} disagree")
        if not isinstance(kind, str) or kind not in _ROPE_KEYS:
            raise ValueError(
                f"{source}: rope type {kind!r} is not supported; supported: {', '.join(_ROPE_KEYS)}"
            )
        unknown = sorted(set(scaling) - _ROPE_KEYS[kind])
        if unknown:
            raise ValueError(f"{source}: rope keys {unknown} are not understood for type {kind!r}")
        if kind == "default":
            return cls(theta=theta)
        return cls._scaled(theta, kind, scaling, config, source)

    @classmethod
    def _scaled(
        cls,
        theta: float,
        kind: str,
        scaling: Mapping[str, Any],
        config: Mapping[str, Any],
        source: str,
    ) -> RopeConfig:
        if "factor" not in scaling:
            raise ValueError(f"{source}: rope type {kind!r} without a factor")
        factor = read_number(scaling["factor"], "rope factor", source, minimum=1.0)
        fallback = config.get("max_position_embeddings") if kind == "yarn" else None
        original = scaling.get("original_max_position_embeddings", fallback)
        # At the top level it counts before either, as in transformers.
        original = config.get("original_max_position_embeddings", original)
        if original is None:
            raise ValueError(
                f"{source}: rope type {kind!r} without original_max_position_embeddings"
            )
        original = int(read_number(original, "original_max_position_embeddings", source, minimum=1))
        if original > MAX_POSITIONS:
            raise ValueError(
                f"{source}: original_max_position_embeddings is past {MAX_POSITIONS}; the file is "
                "damaged"
            )
        if kind == "llama3":
            for key in ("low_freq_factor", "high_freq_factor"):
                if key not in scaling:
                    raise ValueError(f"{source}: rope type 'llama3' without {key}")
            low = read_number(scaling["low_freq_factor"], "low_freq_factor", source)
            high = read_number(scaling["high_freq_factor"], "high_freq_factor", source)
            if not high > low:
                raise ValueError(f"{source}: high_freq_factor {high} must exceed {low}")
            return cls(
                theta=theta,
                kind="llama3",
                factor=factor,
                original_max_position_embeddings=original,
                low_freq_factor=low,
                high_freq_factor=high,
            )
        amplitude = scaling.get("attention_factor")
        if amplitude is None:
            mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
            if mscale and mscale_all:
                mscale = read_number(mscale, "mscale", source)
                mscale_all = read_number(mscale_all, "mscale_all_dim", source)
                amplitude = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)
            else:
                amplitude = _yarn_mscale(factor, 1.0)
        return cls(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=_turns(scaling, "beta_fast", 32, source),
            beta_slow=_turns(scaling, "beta_slow", 1, source),
            truncate=read_flag(scaling, "truncate", source, default=True),
            amplitude=read_number(amplitude, "attention_factor", source),
        )


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
        eps = read_number(_required(config, "rms_norm_eps", source), "rms_norm_eps", source)
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
        from graphengine.draft_formats import parse_draft

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


def token_ids(value: Any, key: str, source: str) -> tuple[int, ...]:
    """One id, a list of ids or None -> a tuple of ids."""
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    return tuple(read_integer(token, key, source, minimum=0) for token in ids)


def _turns(scaling: Mapping[str, Any], key: str, default: float, source: str) -> float:
    """Turns over the original context; 0 and null are the default, as in transformers."""
    return read_number(scaling.get(key) or default, key, source, minimum=MIN_ROPE_TURNS)


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    """A rope's keys but for theta, under one spelling of its type."""
    rest = {key: value for key, value in rope.items() if key not in ("rope_theta", "type")}
    rest["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    return rest


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _required(config: Mapping[str, Any], key: str, source: str) -> Any:
    if config.get(key) is None:
        raise ValueError(f"{source}: no {key}; the file is incomplete, fetch it again")
    return config[key]


def read_number(value: Any, key: str, source: str, minimum: float = 0.0) -> float:
    """A finite number of at least `minimum`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= MAX_NUMBER:  # also NaN, and integers past any float
        raise ValueError(f"{source}: {key} is {value!r}, expected a number")
    if value < minimum:
        raise ValueError(f"{source}: {key} is {value!r}, expected at least {minimum:g}")
    return float(value)


def read_flag(config: Mapping[str, Any], key: str, source: str, default: bool = False) -> bool:
    """`config[key]`, true or false; `default` where the file has none."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{source}: {key} is {value!r}, expected true or false")
    return default if value is None else value


def read_integer(value: Any, key: str, source: str, minimum: int, maximum: int = 1 << 40) -> int:
    """An integer from `minimum` to `maximum`; true and 1.0 are none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{source}: {key} holds {value!r}, expected an integer >= {minimum}")
    if value > maximum:
        raise ValueError(f"{source}: {key} holds a number past {maximum}; the file is damaged")
    return value


def read_positive(config: Mapping[str, Any], key: str, source: str, maximum: int = 1 << 40) -> int:
    """`config[key]`, an integer from 1 to `maximum`."""
    return read_integer(_required(config, key, source), key, source, minimum=1, maximum=maximum)
