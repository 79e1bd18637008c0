"""The shape of a transformer, parsed from a checkpoint's raw JSON.

Why raw JSON: transformers fills in defaults silently (rope theta 10000), and a wrong theta loses
acceptance without any error. Invariant: theta and scaling are read or refused, never guessed; what
else may be missing is what transformers documents for that architecture (`ARCHITECTURES`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from graphengine.config import gated_delta
from graphengine.config.gated_delta import GatedDeltaConfig
from graphengine.config.moe import MoeConfig, MoeKeys
from graphengine.config.rope import RopeConfig
from graphengine.config.values import RawConfig
from graphengine.config.windows import Sliding, read_windows

# Past these a file is damaged, and trying to build what it says would not end.
MAX_LAYERS, MAX_HEAD_DIM = 1024, 4096
ROPE_SECTIONS = "rope_parameters", "rope_scaling"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What a model_type says beyond the keys of its config.json.

    Each field is what transformers' code of that model_type does, whatever its file says.

    defaults: keys that a file may lack, and what transformers takes then.
    heads_decide: a file may also lack head_dim (hidden / heads) and num_key_value_heads (heads).
    has_qk_norm: each head of queries and keys is normalised.
    has_mlp_bias: the key mlp_bias counts.
    has_qkv_bias: whether q, k and v have biases, the output none; None: the key attention_bias
        says, of the output too.
    has_sinks: a logit of each head joins every row's softmax, and takes its share to no value.
    sliding: who says which layers slide; None: none does, sliding_window is passed over.
    is_packed: files hold q, k, v as one tensor qkv_proj, and gate and up as gate_up_proj.
    mixer, ffn: every layer's kind, names in `models.decoder`.
    is_hybrid: layer_types say which mixer a layer has; `mixer` is not looked at.
    has_offset_norms: norms multiply by `1 + w`.
    partial_rotary_factor: that of a file without one; None: another than 1 is refused.
    is_rope_scaled: where a file does not say how rope is scaled transformers takes a scaling, which
        is not guessed: such a file is refused.
    wrapped: the name of the model_type whose text_config this is.
    skipped: beginnings of names of tensors that are for something else.
    is_interleaved: see `GatedDeltaConfig`.
    moe: which keys speak of experts, where `ffn` is "moe".
    quantised: quantisations of its files that are read, into the run's dtype.
    """

    defaults: Mapping[str, Any]
    heads_decide: bool = False
    has_qk_norm: bool = False
    has_mlp_bias: bool = False
    has_qkv_bias: bool | None = None
    has_sinks: bool = False
    sliding: Sliding | None = None
    is_packed: bool = False
    mixer: str = "attention"
    ffn: str = "swiglu"
    is_hybrid: bool = False
    has_offset_norms: bool = False
    partial_rotary_factor: float | None = None
    is_rope_scaled: bool = False
    wrapped: str | None = None
    skipped: tuple[str, ...] = ()
    is_interleaved: bool = False
    moe: MoeKeys | None = None
    quantised: tuple[str, ...] = ()


# model_type -> what it means; an architecture of known layer kinds is one row.
ARCHITECTURES = {
    "qwen3": Architecture(
        defaults={"head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768},
        has_qk_norm=True,
        sliding=Sliding(4096, is_switched=True, by_type=True),
    ),
    "llama": Architecture(
        defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
        heads_decide=True,
        has_mlp_bias=True,
    ),
    "qwen3_5_text": Architecture(
        defaults=gated_delta.DEFAULTS,
        has_qk_norm=True,
        is_hybrid=True,
        has_offset_norms=True,
        partial_rotary_factor=0.25,
        wrapped="qwen3_5",
        skipped=("model.visual.", "visual.", "mtp."),
    ),
    "qwen3_moe": Architecture(
        defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 32768},
        has_qk_norm=True,
        sliding=Sliding(4096, is_switched=True),
        ffn="moe",
        moe=MoeKeys(norm_topk_prob=False),
    ),
    "gpt_oss": Architecture(
        defaults={
            "head_dim": 64,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "attention_bias": True,
        },
        has_sinks=True,
        is_rope_scaled=True,
        sliding=Sliding(128, by_type=True, alternates=True),
        ffn="moe",
        moe=MoeKeys(norm_topk_prob=True, reads_norm_key=False, is_clamped=True),
        quantised=("mxfp4",),
    ),
}
ARCHITECTURES["mistral"] = replace(
    ARCHITECTURES["llama"],
    defaults={
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
    },
    has_mlp_bias=False,
    has_qkv_bias=False,
    sliding=Sliding(4096, by_type=True),  # with layer_types transformers takes it for a ministral
)
ARCHITECTURES["qwen2"] = replace(
    ARCHITECTURES["mistral"],
    defaults={
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
    },
    has_qkv_bias=True,
    sliding=ARCHITECTURES["qwen3"].sliding,
)
ARCHITECTURES["phi3"] = replace(
    ARCHITECTURES["mistral"],
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    sliding=Sliding(None),
    is_packed=True,
    partial_rotary_factor=1.0,
)
ARCHITECTURES["qwen3_5_moe_text"] = replace(
    ARCHITECTURES["qwen3_5_text"],
    ffn="moe",
    moe=MoeKeys(norm_topk_prob=True, reads_norm_key=False, has_shared_expert=True),
    wrapped="qwen3_5_moe",
)
ARCHITECTURES["qwen3_next"] = replace(
    ARCHITECTURES["qwen3_5_moe_text"],
    moe=MoeKeys(norm_topk_prob=True, has_shared_expert=True),
    wrapped=None,
    is_interleaved=True,
)
_WRAPPED = {found.wrapped: name for name, found in ARCHITECTURES.items() if found.wrapped}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and constants of a decoder-only transformer (also the drafter's own layers)."""

    model_type: str = "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of a dense MLP; 0 where every layer has experts instead
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool = False
    moe: MoeConfig | None = None
    rope: RopeConfig
    eos_token_ids: tuple[int, ...] = ()
    mixers: tuple[str, ...] = ()  # of every layer, where they differ
    gated_delta: GatedDeltaConfig | None = None
    windows: tuple[int | None, ...] = ()  # of every layer, where some slide

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
    def has_output_bias(self) -> bool:
        """Whether attention's output is projected with a bias, as its inputs are."""
        return self.attention_bias and not ARCHITECTURES[self.model_type].has_qkv_bias

    @property
    def has_sinks(self) -> bool:
        """Whether each head has a logit that joins every row's softmax."""
        return ARCHITECTURES[self.model_type].has_sinks

    @property
    def is_packed(self) -> bool:
        """Whether files hold q, k, v as one tensor, and gate and up."""
        return ARCHITECTURES[self.model_type].is_packed

    @property
    def layer_kinds(self) -> tuple[tuple[str, str], ...]:
        """Names of every layer's mixer and ffn."""
        architecture = ARCHITECTURES[self.model_type]
        mixers = self.mixers or (architecture.mixer,) * self.num_hidden_layers
        return tuple((mixer, architecture.ffn) for mixer in mixers)

    @property
    def distinct_windows(self) -> frozenset[int | None]:
        """The windows of the layers, None of those that see everything."""
        return frozenset(self.windows or (None,))

    @property
    def has_offset_norms(self) -> bool:
        """Whether norms multiply by `1 + w`."""
        return ARCHITECTURES[self.model_type].has_offset_norms

    def shortened(self, num_layers: int) -> ModelConfig:
        """The first layers alone."""
        mixers, windows = self.mixers[:num_layers], self.windows[:num_layers]
        return replace(self, num_hidden_layers=num_layers, mixers=mixers, windows=windows)

    def widened(self) -> ModelConfig:
        """The same with experts in the run's dtype, whatever files hold."""
        return replace(self, moe=replace(self.moe, is_mxfp4=False)) if self.moe else self

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Parses a target's Hugging Face `config.json`.

        Raises:
            ValueError: another architecture, a missing key, or a value that is not supported.
        """
        raw = RawConfig(config, source)
        model_type = raw.get("model_type")
        _check_weight_file(raw)  # also where it stands beside a text_config
        if isinstance(model_type, str) and model_type in _WRAPPED:
            raw, model_type = gated_delta.text_part(raw), _WRAPPED[model_type]
        if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
            known = [*ARCHITECTURES, *_WRAPPED]
            raise raw.refusal(
                f"model_type {model_type!r} is not supported; graphengine runs models of "
                f"model_type {' or '.join(map(repr, known))}"
            )
        model, architecture = cls.from_layer_keys(raw, model_type), ARCHITECTURES[model_type]
        num_layers = model.num_hidden_layers
        layer_types = read_layer_types(raw, num_layers)
        if architecture.is_hybrid:
            whole = raw.over(architecture.defaults)
            mixers = gated_delta.read_mixers(whole, layer_types, num_layers)
            delta = GatedDeltaConfig.from_raw(whole, architecture.is_interleaved)
            return replace(model, mixers=mixers, gated_delta=delta)
        windows = read_windows(raw, architecture.sliding, layer_types, num_layers)
        if all(window is None or window >= model.max_position_embeddings for window in windows):
            return model
        return replace(model, windows=windows)

    @classmethod
    def from_layer_keys(cls, raw: RawConfig, model_type: str = "qwen3") -> ModelConfig:
        """The shape of a stack of layers; does not look at the file's model_type (a drafter's says
        little) nor at the layers' attention."""
        _check_weight_file(raw)
        act = raw.values.get("hidden_act", "silu")
        if act != "silu":
            raise raw.refusal(f"hidden_act {act!r} is not supported (silu is)")
        architecture = ARCHITECTURES[model_type]
        quantised = raw.section("quantization_config")
        if quantised and quantised.get("quant_method") not in architecture.quantised:
            raise raw.refusal("quantization_config is not supported; use the bf16 weights")
        num_heads, hidden = raw.integer("num_attention_heads"), raw.integer("hidden_size")
        keys: dict[str, Any] = {}
        if architecture.heads_decide:
            keys = {"head_dim": hidden // num_heads, "num_key_value_heads": num_heads}
        whole = raw.over(keys | dict(architecture.defaults))
        num_kv_heads = whole.integer("num_key_value_heads")
        if num_heads % num_kv_heads:
            raise raw.refusal(
                f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads "
                f"{num_kv_heads}"
            )
        head_dim = whole.integer("head_dim", maximum=MAX_HEAD_DIM)
        if head_dim % 2:
            raise raw.refusal(f"head_dim {head_dim} is odd; rope needs an even one")
        if architecture.is_rope_scaled and not any(map(raw.section, ROPE_SECTIONS)):
            raise raw.refusal(
                f"neither of {' and '.join(ROPE_SECTIONS)}, which are never guessed; add what the "
                "model was trained with, or fetch the file again"
            )
        rope = RopeConfig.from_hf(raw.values, raw.source, architecture.partial_rotary_factor)
        turned = rope.rotary_dim(head_dim)
        if turned % 2 or not turned:
            raise raw.refusal(
                f"partial_rotary_factor {rope.partial_rotary_factor} turns {turned} of head_dim "
                f"{head_dim}; rope needs an even number"
            )
        return cls(
            model_type=model_type,
            vocab_size=whole.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=0 if architecture.moe else whole.integer("intermediate_size"),
            num_hidden_layers=whole.integer("num_hidden_layers", maximum=MAX_LAYERS),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=whole.number("rms_norm_eps"),
            max_position_embeddings=max(
                whole.integer("max_position_embeddings", minimum=2), rope.stretched_positions
            ),
            tie_word_embeddings=whole.flag("tie_word_embeddings"),
            attention_bias=(
                whole.flag("attention_bias")
                if architecture.has_qkv_bias is None
                else architecture.has_qkv_bias
            ),
            mlp_bias=architecture.has_mlp_bias and whole.flag("mlp_bias"),
            moe=MoeConfig.from_raw(whole, architecture.moe) if architecture.moe else None,
            rope=rope,
            eos_token_ids=whole.integers("eos_token_id"),
        )


def _check_weight_file(raw: RawConfig) -> None:
    """Refuses a file that has transformers read weights of another name."""
    file = raw.get("transformers_weights")
    if file not in (None, "model.safetensors", "model.safetensors.index.json"):
        raise raw.refusal(
            f"transformers_weights {file!r} is not supported: model.safetensors or its index is "
            "what is read; call the file so and leave out the key"
        )


def read_layer_types(raw: RawConfig, num_layers: int) -> list[str]:
    """`layer_types`, one a layer; empty where the file has none."""
    layer_types = raw.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise raw.refusal(f"layer_types is {layer_types!r}, expected a list")
    if layer_types and len(layer_types) != num_layers:
        raise raw.refusal(f"{len(layer_types)} layer_types for num_hidden_layers {num_layers}")
    return [str(kind) for kind in layer_types]
