"""config.json parsing: what decides the numerics is read or refused, never guessed.

The classic failures (a default theta, taps from a formula, keys at one of two places) lose
acceptance without any error, so every spelling and every refusal is pinned here.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphengine.config.draft import DraftConfig
from graphengine.config.draft_formats import parse_draft
from graphengine.config.model import ModelConfig
from graphengine.config.rope import RopeConfig
from graphengine.models.layers import rope_frequencies
from tests.support.checkpoints import make_drafter, make_target
from tests.support.examples import examples

Json = dict[str, Any]

TARGET: Json = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "eos_token_id": 151645,
}
DRAFTER: Json = TARGET | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 5,
    "layer_types": ["full_attention"] * 5,
    "block_size": 16,
    "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}
YARN: Json = {"factor": 64.0, "original_max_position_embeddings": 4096}
YARN_64 = {"rope_type": "yarn", **YARN}
MISSING = object()


def changed(config: Json, **changes: Any) -> Json:
    """A copy with keys set, or removed where the value is MISSING; `dflash__x` reaches inside."""
    result = copy.deepcopy(config)
    for key, value in changes.items():
        home = result
        if key.startswith("dflash__"):
            home, key = result["dflash_config"], key.removeprefix("dflash__")
        if value is MISSING:
            home.pop(key, None)
        else:
            home[key] = value
    return result


def test_published_shapes() -> None:
    """Bug: a field is read from the wrong key."""
    target = ModelConfig.from_hf(TARGET)
    draft = parse_draft(DRAFTER)
    assert (target.q_size, target.kv_size, target.rope.theta) == (4096, 1024, 1e6)
    assert target.eos_token_ids == (151645,)
    assert (draft.block_size, draft.mask_token_id) == (16, 151669)
    assert draft.target_layer_ids == (1, 9, 17, 25, 33)
    draft.check_target(target)


# --- refusals ---

BAD_MODEL: dict[str, tuple[Json, str]] = {
    "no-theta": ({"rope_theta": MISSING}, "no rope_theta"),
    "null-theta": ({"rope_theta": None}, "no rope_theta"),
    "text-theta": ({"rope_theta": "1e6"}, "rope_theta is '1e6', expected a number"),
    "zero-theta": ({"rope_theta": 0}, "rope_theta is 0"),
    "nan-theta": ({"rope_theta": float("nan")}, "rope_theta is nan"),
    "partial-rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    "partial-rotary-nested": (
        {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}},
        "partial_rotary_factor 0.25",
    ),
    "rope-kind": ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "'longrope'"),
    "rope-kinds-disagree": (
        {"rope_scaling": {"rope_type": "yarn", "type": "llama3", **YARN}},
        "disagree",
    ),
    "rope-unknown-key": ({"rope_scaling": {**YARN_64, "beta_medium": 3}}, "beta_medium"),
    "rope-mrope": (
        {"rope_parameters": {"rope_theta": 1e6, "mrope_section": [1, 2]}},
        "mrope_section",
    ),
    "rope-key-of-other-kind": (
        {"rope_scaling": {**YARN_64, "low_freq_factor": 1.0}},
        "low_freq_factor",
    ),
    "yarn-no-factor": ({"rope_scaling": {"rope_type": "yarn"}}, "no factor"),
    "llama3-no-original": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8}},
        "no original_max_position_embeddings",
    ),
    "llama3-no-band": (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8,
                "original_max_position_embeddings": 64,
                "low_freq_factor": 2.0,
                "high_freq_factor": 2.0,
            }
        },
        "high_freq_factor 2.0 must exceed 2.0",
    ),
    "llama3-no-low": (
        {"rope_scaling": {"rope_type": "llama3", **YARN}},
        "no low_freq_factor",
    ),
    # transformers takes rope_scaling, other engines rope_parameters.
    "rope-two-scalings": (
        {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": YARN_64},
        "disagree, and engines differ",
    ),
    "rope-two-factors": (
        {"rope_parameters": {"rope_theta": 1e6, **YARN_64, "factor": 8.0}, "rope_scaling": YARN_64},
        "disagree, and engines differ",
    ),
    # Logarithms of these are past any number.
    "yarn-tiny-beta": ({"rope_scaling": {**YARN_64, "beta_fast": 1e-310}}, "beta_fast is 1e-310"),
    "yarn-tiny-slow": ({"rope_scaling": {**YARN_64, "beta_slow": 1e-310}}, "beta_slow is 1e-310"),
    "yarn-huge-original": (
        {"rope_scaling": {**YARN_64, "original_max_position_embeddings": 1e299}},
        "original_max_position_embeddings is past",
    ),
    "rope-list": ({"rope_parameters": [1]}, "rope_parameters is"),
    "rope-sliding": (
        {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_theta": 1.0}}},
        "sliding_attention",
    ),
    "sliding-layers": ({"layer_types": ["sliding_attention"] * 36}, "sliding_attention"),
    "sliding-window": ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window"),
    "sliding-some": (
        {"use_sliding_window": True, "sliding_window": MISSING, "max_window_layers": 35},
        "use_sliding_window",
    ),
    "layer-types-count": ({"layer_types": ["full_attention"] * 3}, "3 layer_types"),
    "quantised": ({"quantization_config": {"bits": 4}}, "use the bf16 weights"),
    "activation": ({"hidden_act": "gelu"}, "'gelu'"),
    "heads": ({"num_key_value_heads": 5}, "not a multiple"),
    "odd-head": ({"head_dim": 127}, "head_dim 127 is odd"),
    "bool-number": ({"rms_norm_eps": True}, "rms_norm_eps is True, expected a number"),
    "bool-count": ({"num_hidden_layers": True}, "num_hidden_layers holds True"),
    "float-count": ({"hidden_size": 4096.0}, "hidden_size holds 4096.0"),
    "text-flag": ({"attention_bias": "false"}, "attention_bias is 'false', expected true or"),
    "layer-types-text": ({"layer_types": "full_attention"}, "layer_types is 'full_attention'"),
    "rope-scaling-text": ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
    "rope-kind-list": ({"rope_scaling": {"rope_type": ["yarn"]}}, "is not supported"),
    "mscale-text": (
        {"rope_scaling": {**YARN_64, "mscale": "1", "mscale_all_dim": 1}},
        "mscale is '1'",
    ),
    "zero-count": ({"vocab_size": 0}, "vocab_size holds 0"),
    "negative-eos": ({"eos_token_id": [1, -2]}, "eos_token_id holds -2"),
    **{
        f"no-{key}": ({key: MISSING}, f"no {key}")
        for key in (
            "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
            "num_key_value_heads"
        ).split()
    },
}
BAD_DRAFTER: dict[str, tuple[Json, str]] = {
    # T03: taps are never guessed.
    "no-taps": ({"dflash__target_layer_ids": MISSING}, r"no dflash_config\.target_layer_ids"),
    "empty-taps": ({"dflash__target_layer_ids": []}, r"no dflash_config\.target_layer_ids"),
    "text-taps": ({"dflash__target_layer_ids": "1,2"}, r"no dflash_config\.target_layer_ids"),
    "duplicate-taps": ({"dflash__target_layer_ids": [1, 9, 9]}, "duplicates"),
    "negative-taps": ({"dflash__target_layer_ids": [1, -1]}, "holds -1"),
    "float-taps": ({"dflash__target_layer_ids": [1.0]}, "holds 1.0"),
    "taps-past-the-end": ({"dflash__target_layer_ids": [1, 36]}, "reach past"),
    "no-mask": ({"dflash__mask_token_id": MISSING}, "no mask_token_id"),
    "negative-mask": ({"dflash__mask_token_id": -1}, "mask_token_id holds -1"),
    "no-block": ({"block_size": MISSING}, "no block_size"),
    "block-of-one": ({"block_size": 1}, "block_size holds 1"),
    "unknown-key": ({"dflash__new_feature": 1}, "new_feature"),
    "nested-list": ({"dflash_config": [1]}, "dflash_config is"),
    "no-architecture": ({"architectures": MISSING}, "is not a DFlash drafter"),
    "dflash2": ({"architectures": ["DFlash2DraftModel"]}, "is not a DFlash drafter"),
    "dspark": ({"dflash__markov_rank": 256}, "markov_rank"),
    "domino": ({"dflash__projector_type": "domino"}, "projector_type"),
    "logit-scale": ({"logit_scale": 0.5}, "logit_scale = 0.5"),
    "output-multiplier": ({"dflash__output_multiplier": 0.5}, "output_multiplier = 0.5"),
    "rotary-base": ({"dflash__backbone_rotary_base": 5e6}, "backbone_rotary_base"),
    "latent-attention": ({"dflash__attention_mode": "mla"}, "attention_mode = 'mla'"),
    "convolution": ({"dflash__conv_kernel_size": 4}, "conv_kernel_size = 4"),
    "selector": ({"dflash__selector_rank": 64}, "selector_rank = 64"),
    "no-taps-used": ({"dflash__use_aux_hidden_state": False}, "use_aux_hidden_state = False"),
    "other-interleaved": ({"is_neox_style": False}, "is_neox_style = False"),
    "soft-cap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    "embedding-scale": ({"dflash__input_embedding_scale": 2.0}, "input_embedding_scale"),
    "interleaved-rope": ({"rope_is_neox_style": False}, "rope_is_neox_style"),
    "sinks": ({"dflash__attention_sink_bias": True}, "attention_sink_bias"),
    "value-scale": ({"dflash__attention_value_scale": 0.612}, "attention_value_scale"),
    "sliding": ({"layer_types": ["sliding_attention"] * 4 + ["full_attention"]}, "sliding"),
}


@pytest.mark.parametrize("name", BAD_MODEL)
@pytest.mark.parametrize("config", [TARGET, DRAFTER], ids=["target", "drafter"])
def test_model_refusals(config: Json, name: str) -> None:
    """Bug: a value that is not understood is ignored or replaced by a default."""
    keys, message = BAD_MODEL[name]
    if name == "layer-types-count" and config is DRAFTER:
        keys = {"layer_types": ["full_attention"] * 3}
    if name in ("sliding-window", "sliding-some") and config is DRAFTER:
        keys = {**keys, "layer_types": None}
    if name == "sliding-layers" and config is DRAFTER:
        keys = {"layer_types": ["sliding_attention"] * 5}  # without a sliding_window
    parse: Callable[[Mapping[str, Any], str], Any] = (
        parse_draft if config is DRAFTER else ModelConfig.from_hf
    )
    with pytest.raises(ValueError, match=message) as caught:
        parse(changed(config, **keys), "here/config.json")
    assert str(caught.value).startswith("here/config.json")


@pytest.mark.parametrize("name", BAD_DRAFTER)
def test_drafter_refusals(name: str) -> None:
    """Bug T03 and kin: a feature of the drafter is ignored, or a missing key is guessed."""
    keys, message = BAD_DRAFTER[name]
    with pytest.raises(ValueError, match=message):
        parse_draft(changed(DRAFTER, **keys))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_sink_bias", True),
        ("shift_label", True),
        ("enable_confidence_head", True),
        ("markov_rank", 256),
        ("projector_type", "domino"),
        ("attention_mode", "mla"),
        ("backbone_rotary_base", 5e6),
        ("conv_kernel_size", 4),
        ("selector_rank", 64),
        ("use_aux_hidden_state", False),
        ("attention_value_scale", 0.612),
        ("output_multiplier", 0.5),
        ("input_embedding_scale", 2.0),
    ],
)
def test_features_beside_dflash_config(key: str, value: Any) -> None:
    """Bug: a feature is refused within dflash_config alone, where every unknown key is, and is
    ignored at the top level, where DeepSpec's files have theirs."""
    with pytest.raises(ValueError, match=f"{key} = {value!r} is not supported"):
        parse_draft(changed(DRAFTER, **{key: value}))


@pytest.mark.parametrize("kind", [None, ["qwen3"], "mixtral", "qwen2"])
def test_other_models_are_refused(kind: str | None) -> None:
    """Bug: another architecture is run as if it were Qwen3."""
    with pytest.raises(ValueError, match="model_type"):
        ModelConfig.from_hf(changed(TARGET, model_type=kind))


@pytest.mark.parametrize(
    "keys",
    [
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 36},
        {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention"] * 36},
    ],
)
def test_windows_that_no_layer_has(keys: Json) -> None:
    """Bug: a flag that transformers ignores turns a model away whose layers are all full."""
    assert ModelConfig.from_hf(changed(TARGET, **keys)) == ModelConfig.from_hf(TARGET)


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_missing_keys_are_what_transformers_documents(model_type: str) -> None:
    """Bug: a file that leaves a default out is refused, or read with another model's default."""
    from transformers import AutoConfig

    keys = ("head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings")
    keys += ("attention_bias", "num_key_value_heads") if model_type == "llama" else ()
    shape: Json = {key: value for key, value in TARGET.items() if key not in keys}
    shape |= {"model_type": model_type, "num_attention_heads": 64}
    theirs = AutoConfig.for_model(**shape)
    ours = ModelConfig.from_hf(shape)
    assert {key: getattr(ours, key) for key in keys} == {key: getattr(theirs, key) for key in keys}


HARMLESS: dict[str, Json] = {
    "keys-nested": {
        "block_size": MISSING,
        "dflash__block_size": 16,
        "num_target_layers": MISSING,
        "dflash__num_target_layers": 36,
    },
    "keys-flat": {
        "dflash_config": MISSING,
        "mask_token_id": 151669,
        "target_layer_ids": [1, 9, 17, 25, 33],
    },
    "nested-wins": {"block_size": 7, "dflash__block_size": 16},
    "training-keys": {"dflash__num_anchors": 512, "dflash__loss_decay_gamma": 7.0},
    "said-plainly": {
        "is_causal": False,
        "dflash__causal": False,
        "dflash__use_swa": False,
        "rope_is_neox_style": True,
        "draft_vocab_size": 151936,
        "target_hidden_size": 4096,
        "dflash__input_embedding_scale": 1.0,
    },
    "unknown-top-level": {"auto_map": {"AutoModel": "dflash.DFlash"}, "max_window_layers": 5},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_generations_of_the_format_agree(name: str) -> None:
    """Bug T34: keys are looked for at one of their two places, or the outer one wins."""
    assert parse_draft(changed(DRAFTER, **HARMLESS[name])) == parse_draft(DRAFTER)


MISFITS: dict[str, tuple[Json, Json, str]] = {
    "depth": ({"num_hidden_layers": 28}, {}, "made for a target of 36 layers, this one has 28"),
    "taps": (
        {"num_hidden_layers": 28},
        {"num_target_layers": MISSING},
        "reach past the target's 28 layers",
    ),
    "hidden": ({"hidden_size": 2560}, {}, "hidden_size 4096 differs from the target's 2560"),
    "vocab": ({"vocab_size": 151000}, {}, "vocab_size 151936 differs"),
    "mask": ({}, {"dflash__mask_token_id": 151936}, "outside the target's embedding"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_drafter_of_another_target(name: str) -> None:
    """Bug: a drafter of another target loads and drafts noise."""
    of_target, of_drafter, message = MISFITS[name]
    target = ModelConfig.from_hf(changed(TARGET, **of_target))
    with pytest.raises(ValueError, match=message):
        parse_draft(changed(DRAFTER, **of_drafter)).check_target(target, "x")


def test_written_checkpoints_parse(tmp_path: Path) -> None:
    """Bug: the tests' own checkpoints are of a form that the parser reads differently."""
    target_dir = make_target(tmp_path / "target", layers=3, tokenizer=False)
    target = ModelConfig.from_hf(json.loads((target_dir / "config.json").read_text()))
    assert target.rope == RopeConfig(theta=1e4) and target.num_hidden_layers == 3
    for nested in (True, False):
        path = make_drafter(tmp_path / "drafter", target_dir, nested=nested, taps=(2, 0))
        draft = parse_draft(json.loads((path / "config.json").read_text()))
        draft.check_target(target)
        assert draft.target_layer_ids == (2, 0) and draft.block_size == 4


# --- fuzz ---

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 200000),
    st.floats(),
    st.sampled_from(["", "yarn", "llama3", "default", "full_attention", "1"]),
)
JSON_VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["rope_theta", "rope_type", "type", "factor", "full_attention", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=5,
)
TOP_KEYS = sorted({*DRAFTER, "rope_parameters", "quantization_config", "target_layer_ids"})
NESTED_KEYS = [
    *("mask_token_id", "target_layer_ids", "block_size", "num_target_layers", "causal"),
    *("use_swa", "draft_vocab_size", "input_embedding_scale"),
]
ROPE_KEYS = (
    "rope_theta rope_type type factor original_max_position_embeddings beta_fast beta_slow "
    "attention_factor mscale mscale_all_dim truncate low_freq_factor high_freq_factor "
    "partial_rotary_factor"
).split()


@settings(deadline=None, max_examples=examples(400))
@given(
    top=st.dictionaries(st.sampled_from(TOP_KEYS), JSON_VALUES, max_size=3),
    nested=st.dictionaries(st.sampled_from(NESTED_KEYS), JSON_VALUES, max_size=2),
    rope=st.none() | st.dictionaries(st.sampled_from(ROPE_KEYS), SCALARS, max_size=8),
    dropped=st.sets(st.sampled_from(TOP_KEYS), max_size=2),
)
def test_any_json_parses_or_is_refused(
    top: Json, nested: Json, rope: Json | None, dropped: set[str]
) -> None:
    """Bug: a damaged config.json ends in a TypeError or KeyError without the file's name, or gives
    a config whose rope cannot be computed."""
    base = copy.deepcopy(DRAFTER)
    base["dflash_config"] |= nested
    base |= top
    if rope is not None:
        base["rope_parameters"] = rope
    for key in dropped:
        base.pop(key, None)
    for parse in (parse_draft, ModelConfig.from_hf):
        message = ""
        parsed: Any = None
        try:
            parsed = parse(base, "some/config.json")
        except ValueError as error:
            message = str(error)
        if parsed is None:
            assert message.startswith("some/config.json: ")
            continue
        model = parsed.model if isinstance(parsed, DraftConfig) else parsed
        assert model.rope.theta >= 1 and model.num_attention_heads >= 1
        assert isinstance(model.tie_word_embeddings, bool)
        hash(parsed)
        assert rope_frequencies(model.rope, 8).isfinite().all()
