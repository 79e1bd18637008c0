"""config.json parsing: what decides the numerics is read or refused, never guessed.

The classic failures (a default theta, taps from a formula, keys at one of two places) lose
acceptance without any error, so every spelling is pinned here, and every refusal in
test_config_refusals.py.
"""

from __future__ import annotations

import copy
import json
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


@pytest.mark.parametrize(
    "keys",
    [
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 36},
        {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention"] * 36},
        {"mlp_bias": True},
    ],
)
def test_what_no_layer_has(keys: Json) -> None:
    """Bug: a flag that transformers ignores turns a model away whose layers are all full; or one of
    another architecture's has biases looked for that no checkpoint of this one has."""
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
