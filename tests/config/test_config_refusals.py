"""config.json files that are refused: what is missing, not understood, or of another target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from graphengine.config.draft_formats import parse_draft
from graphengine.config.model import ModelConfig
from graphengine.config.values import RawConfig
from graphengine.config.windows import Sliding, read_windows
from tests.config.test_config import DRAFTER, MISSING, TARGET, YARN, YARN_64, Json, changed

BAD_MODEL: dict[str, tuple[Json, str]] = {
    # transformers would read that one, and others what lies beside it.
    "other-weights": ({"transformers_weights": "ema.safetensors"}, "'ema.safetensors' is not supp"),
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
        "rope type 'llama3' and rope_type 'yarn' disagree",
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
    "llama3-band-upside-down": (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                **YARN,
                "low_freq_factor": 4.0,
                "high_freq_factor": 1.0,
            }
        },
        "high_freq_factor 1.0 must exceed 4.0",
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
    "layer-types-count": ({"layer_types": ["full_attention"] * 3}, "3 layer_types"),
    "quantised": ({"quantization_config": {"bits": 4}}, "use the bf16 weights"),
    "mxfp4": ({"quantization_config": {"quant_method": "mxfp4"}}, "use the bf16 weights"),
    "activation": ({"hidden_act": "gelu"}, "'gelu'"),
    "heads": (
        {"num_key_value_heads": 5},
        "num_attention_heads 32 is not a multiple of num_key_value_heads 5",
    ),
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
    # Else an option that nobody gave is to be between 2 and 1.
    "one-position": (
        {"max_position_embeddings": 1},
        "max_position_embeddings holds 1, expected an integer >= 2",
    ),
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
    "empty-alias-of-taps": (
        {"dflash__target_layer_ids": MISSING, "dflash__layer_ids": []},
        r"no dflash_config\.target_layer_ids",
    ),
    "text-taps": ({"dflash__target_layer_ids": "1,2"}, r"no dflash_config\.target_layer_ids"),
    "duplicate-taps": ({"dflash__target_layer_ids": [1, 9, 9]}, "duplicates"),
    "negative-taps": ({"dflash__target_layer_ids": [1, -1]}, "holds -1"),
    "float-taps": ({"dflash__target_layer_ids": [1.0]}, "holds 1.0"),
    "taps-past-the-end": ({"dflash__target_layer_ids": [1, 36]}, "reach past"),
    "taps-far-past-the-end": (
        {"dflash__target_layer_ids": [1, 40]},
        r"target_layer_ids \[1, 40\] reach past num_target_layers 36",
    ),
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
    if name == "sliding-layers" and config is DRAFTER:
        keys = {"layer_types": ["sliding_attention"] * 5}  # without a sliding_window
    parse: Callable[[Mapping[str, Any], str], Any] = (
        parse_draft if config is DRAFTER else ModelConfig.from_hf
    )
    with pytest.raises(ValueError, match=message) as caught:
        parse(changed(config, **keys), "here/config.json")
    assert str(caught.value).startswith("here/config.json")


def test_other_weights_of_a_wrapped_model() -> None:
    """Bug: the file's own key is looked for in its text_config, where it does not stand."""
    whole = {"model_type": "qwen3_5", "text_config": {}, "transformers_weights": "ema.safetensors"}
    with pytest.raises(ValueError, match=r"transformers_weights 'ema\.safetensors' is not"):
        ModelConfig.from_hf(whole)


def test_layers_that_slide_by_no_width() -> None:
    """Bug: a gpt-oss whose sliding_window is null runs with full attention; transformers has every
    other layer slide and fails."""
    alternating = Sliding(128, by_type=True, alternates=True)
    assert read_windows(RawConfig({}, ""), alternating, [], 3) == (128, None, 128)
    null = RawConfig({"sliding_window": None}, "here")
    with pytest.raises(ValueError, match=r"here: every other layer slides, but .* add the"):
        read_windows(null, alternating, [], 3)
    assert read_windows(null, alternating, ["full_attention"] * 3, 3) == ()
    assert read_windows(null, Sliding(4096, by_type=True), [], 3) == ()


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


@pytest.mark.parametrize("kind", [None, ["qwen3"], "mixtral", "gemma3"])
def test_other_models_are_refused(kind: str | None) -> None:
    """Bug: another architecture is run as if it were Qwen3."""
    with pytest.raises(ValueError, match="model_type"):
        ModelConfig.from_hf(changed(TARGET, model_type=kind))


MISFITS: dict[str, tuple[Json, Json, str]] = {
    "depth": ({"num_hidden_layers": 28}, {}, "made for a target of 36 layers, this one has 28"),
    "deeper": ({"num_hidden_layers": 48}, {}, "made for a target of 36 layers, this one has 48"),
    "taps": (
        {"num_hidden_layers": 28},
        {"num_target_layers": MISSING},
        "reach past the target's 28 layers",
    ),
    "hidden": ({"hidden_size": 2560}, {}, "hidden_size 4096 differs from the target's 2560"),
    "vocab": ({"vocab_size": 151000}, {}, "vocab_size 151936 differs"),
    "mask": ({}, {"dflash__mask_token_id": 151936}, "outside the target's embedding"),
    "mask-of-few-ids": (
        {},
        {"dflash__mask_token_id": 151936, "dflash__draft_vocab_size": 32000},
        "mask_token_id 151936 lies outside the target's embedding of 151936 rows",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_drafter_of_another_target(name: str) -> None:
    """Bug: a drafter of another target loads and drafts noise."""
    of_target, of_drafter, message = MISFITS[name]
    target = ModelConfig.from_hf(changed(TARGET, **of_target))
    with pytest.raises(ValueError, match=message):
        parse_draft(changed(DRAFTER, **of_drafter)).check_target(target, "x")
