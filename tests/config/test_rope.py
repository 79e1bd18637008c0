"""Rotary positions in config.json: one rope, every spelling; scaled ones against transformers."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graphengine.config.draft import DraftConfig
from graphengine.config.draft_formats import parse_draft
from graphengine.config.model import ModelConfig
from graphengine.config.rope import RopeConfig
from graphengine.models.layers import rope_frequencies
from tests.config.test_config import DRAFTER, MISSING, TARGET, YARN, YARN_64, Json, changed

SPELLINGS: dict[str, tuple[Json, RopeConfig]] = {
    "flat": ({"rope_theta": 1e7, "rope_scaling": None}, RopeConfig(theta=1e7)),
    "nested": (
        {"rope_theta": MISSING, "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}},
        RopeConfig(theta=1e7),
    ),
    "nested-without-type": (
        {"rope_theta": MISSING, "rope_parameters": {"rope_theta": 10000000}},
        RopeConfig(theta=1e7),
    ),
    "both-nested-wins": (
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}},
        RopeConfig(theta=1e7),
    ),
    "both-say-the-same": (
        {
            "rope_theta": 1e4,
            "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
            "rope_scaling": {"type": "default"},
        },
        RopeConfig(theta=1e7),
    ),
    "a-type-at-one-place": (
        {"rope_parameters": {"rope_theta": 1e7}, "rope_scaling": {"type": "default"}},
        RopeConfig(theta=1e7),
    ),
    "theta-flat-rest-nested": (
        {"rope_theta": 1e7, "rope_parameters": {"rope_type": "default"}},
        RopeConfig(theta=1e7),
    ),
    "per-layer-type": (
        {
            "rope_theta": MISSING,
            "rope_parameters": {"full_attention": {"rope_theta": 1e7, "rope_type": "default"}},
        },
        RopeConfig(theta=1e7),
    ),
}
YARN_SPELLINGS: dict[str, Json] = {
    "flat-type": {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", **YARN}},
    "flat-rope_type": {"rope_theta": 5e4, "rope_scaling": YARN_64},
    "flat-both-types": {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", **YARN_64}},
    "nested": {"rope_theta": MISSING, "rope_parameters": {"rope_theta": 5e4, **YARN_64}},
    "at-both-places": {
        "rope_theta": MISSING,
        "rope_parameters": {"rope_theta": 5e4, **YARN_64},
        "rope_scaling": {"type": "yarn", **YARN},
    },
}


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("config", [TARGET, DRAFTER], ids=["target", "drafter"])
def test_theta_in_every_spelling(config: Json, name: str) -> None:
    """Bug T05: under one spelling a default theta is used instead of the file's."""
    keys, wanted = SPELLINGS[name]
    parse = parse_draft if config is DRAFTER else ModelConfig.from_hf
    parsed = parse(changed(config, **keys))
    rope = parsed.model.rope if isinstance(parsed, DraftConfig) else parsed.rope
    assert rope == wanted


@pytest.mark.parametrize("name", YARN_SPELLINGS)
def test_yarn_in_every_spelling(name: str) -> None:
    """Bug T05: scaling is dropped under one spelling; or a file that has it at both places, its
    type under two names, is said to disagree with itself."""
    rope = ModelConfig.from_hf(changed(TARGET, **YARN_SPELLINGS[name])).rope
    assert (rope.kind, rope.theta, rope.factor) == ("yarn", 5e4, 64.0)
    assert rope.original_max_position_embeddings == 4096
    # T06: 0.1 * ln 64 + 1, the amplitude recorded for the Kimi drafter without mscale keys.
    assert rope.amplitude == pytest.approx(1.41589, abs=1e-5)


def test_yarn_amplitude() -> None:
    """Bug T06: mscale keys are ignored (amplitude 1.41589 instead of 1), which doubles the
    attention logits."""

    def amplitude(**keys: Any) -> float:
        scaling = {"rope_scaling": {**YARN_64, **keys}}
        return ModelConfig.from_hf(changed(TARGET, **scaling)).rope.amplitude

    assert amplitude(mscale=1.0, mscale_all_dim=1.0) == pytest.approx(1.0)
    assert amplitude(mscale=0.707, mscale_all_dim=1.0) == pytest.approx(1.29404 / 1.41589, rel=1e-4)
    assert amplitude(attention_factor=1.25) == 1.25
    assert amplitude(attention_factor=1.25, mscale=1.0, mscale_all_dim=1.0) == 1.25


def test_original_context_at_the_top_level() -> None:
    """Bug T05: yarn is stretched from the whole context, because the original one stands outside
    the scaling, where transformers looks first."""
    scaling = {"rope_type": "yarn", "factor": 64.0}
    for rope in (scaling, {**scaling, "original_max_position_embeddings": 8192}):
        keys = {"rope_scaling": rope, "original_max_position_embeddings": 4096}
        found = ModelConfig.from_hf(changed(TARGET, **keys)).rope
        assert found.original_max_position_embeddings == 4096
    assert ModelConfig.from_hf(changed(TARGET, rope_scaling=scaling)).rope == replace(
        found, original_max_position_embeddings=TARGET["max_position_embeddings"]
    )


@pytest.mark.parametrize("is_nested", [True, False])
def test_yarn_stretches_the_context(is_nested: bool) -> None:
    """Bug: of a Qwen whose config.json got the rope_scaling that its readme gives for 131,072
    tokens, which leaves max_position_embeddings as it is, a long prompt is refused."""
    original, yarn = "original_max_position_embeddings", {"rope_type": "yarn", "factor": 4.0}
    stated: Json = {"rope_scaling": yarn, original: 32768}
    if is_nested:
        stated = {"rope_scaling": {**yarn, original: 32768}}

    def positions(**keys: Any) -> int:
        return ModelConfig.from_hf(changed(TARGET, **keys)).max_position_embeddings

    assert positions(**stated, max_position_embeddings=40960) == 131072
    assert positions(**stated, max_position_embeddings=262144) == 262144
    # Whether it is meant before or behind the stretching nobody says.
    assert positions(rope_scaling=yarn, max_position_embeddings=40960) == 40960
    with pytest.raises(ValueError, match=r"factor 1e\+300 stretches the context past"):
        positions(rope_scaling=yarn | {original: 32768, "factor": 1e300})


def test_llama_3_stretches_no_context() -> None:
    """Bug: Llama 3.2, whose factor of 32 is that of its wave lengths, is said to have 262,144
    positions of the 131,072 that it was trained for."""
    rope = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 8192}
    config = changed(TARGET, rope_scaling=rope, max_position_embeddings=131072)
    assert ModelConfig.from_hf(config).max_position_embeddings == 131072


def test_a_key_that_is_null_is_not_there() -> None:
    """Bug: a file is refused for an original context of null outside its scaling, for a null beside
    a type that has no such key, or as if two places disagreed, one of which has a null more."""
    keys: Json = {"rope_scaling": YARN_64, "original_max_position_embeddings": None}
    wanted = ModelConfig.from_hf(changed(TARGET, rope_scaling=YARN_64)).rope
    assert ModelConfig.from_hf(changed(TARGET, **keys)).rope == wanted
    keys["rope_parameters"] = {**YARN_64, "mscale": None, "partial_rotary_factor": None}
    assert ModelConfig.from_hf(changed(TARGET, **keys)).rope == wanted
    bare = {"rope_type": "yarn", "factor": 64.0}
    nulls = {**bare, "original_max_position_embeddings": None}
    assert RopeConfig.from_hf(
        {"rope_theta": 1e7, "max_position_embeddings": 64, "rope_scaling": nulls}, "config.json"
    ) == RopeConfig.from_hf(
        {"rope_theta": 1e7, "max_position_embeddings": 64, "rope_scaling": bare}, "config.json"
    )
    unscaled = {"rope_theta": 1e7, "rope_scaling": {"type": "default", "factor": None}}
    assert RopeConfig.from_hf(unscaled, "config.json") == RopeConfig(theta=1e7)


def test_resaved_by_transformers(tmp_path: Path) -> None:
    """Bug T05: a checkpoint re-saved by transformers 5 has rope_parameters only and loses theta."""
    from transformers import Qwen3Config

    for rope in (
        {"rope_theta": 1e7},
        {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", **YARN}},
        {"rope_theta": 5e4, "rope_scaling": {**YARN_64, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ):
        flat = changed(TARGET, **rope)
        Qwen3Config(**flat).save_pretrained(tmp_path)
        resaved = json.loads((tmp_path / "config.json").read_text())
        assert "rope_theta" not in resaved, "transformers has changed; check this test's point"
        assert ModelConfig.from_hf(resaved).rope == ModelConfig.from_hf(flat).rope


ROPES: dict[str, dict[str, list[Any]]] = {
    "linear": {"factor": [1.0, 2, 4.5]},
    "dynamic": {"factor": [1.0, 2, 8.0]},
    "yarn": {
        "factor": [1.0, 1.5, 4, 64.0],
        "original_max_position_embeddings": [1, 64, 4096, 32768],
        "beta_fast": [MISSING, None, 0, 16, 64.0],
        "beta_slow": [MISSING, 0.1, 2, 64],
        "attention_factor": [MISSING, None, 0.7],
        "mscale": [MISSING, 0.707, 0],
        "mscale_all_dim": [MISSING, 1.0],
        "truncate": [MISSING, True, False],
    },
    "llama3": {
        "factor": [2.0, 32],
        "original_max_position_embeddings": [1, 256, 8192],
        "low_freq_factor": [0.5, 1.0],
        "high_freq_factor": [2, 4.0],
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_scaled_ropes_equal_transformers(kind: str) -> None:
    """Bug T05, T06: a band's edge, the amplitude, a default or a clamp is another than the one that
    the checkpoint was trained with: acceptance falls with the length, without an error."""
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rng = random.Random(0)
    for _ in range(150):
        drawn = {key: rng.choice(values) for key, values in ROPES[kind].items()}
        scaling = {key: value for key, value in drawn.items() if value is not MISSING}
        keys = {
            # transformers' dynamic divides by head_dim - 2.
            "head_dim": rng.choice([4 if kind == "dynamic" else 2, 16, 64, 80, 128, 256]),
            "rope_theta": rng.choice([2.0, 1e4, 1e6, 1e7]),
            "rope_scaling": {rng.choice(["type", "rope_type"]): kind, **scaling},
        }
        ours = ModelConfig.from_hf(changed(TARGET, **keys)).rope
        theirs = Qwen3Config(**copy.deepcopy(changed(TARGET, **keys)))
        frequencies, amplitude = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu")
        found = rope_frequencies(ours, keys["head_dim"])
        torch.testing.assert_close(found, frequencies, rtol=1e-5, atol=0, msg=str(keys))
        assert ours.amplitude == pytest.approx(amplitude), keys


@pytest.mark.parametrize("kind", ROPES)
def test_a_scaled_rope_that_turns_a_part(kind: str) -> None:
    """Bug: a hybrid whose context is stretched turns its whole heads, where it was trained to turn
    a quarter of each."""
    scaling = {key: values[-1] for key, values in ROPES[kind].items()}
    keys = {"rope_theta": 1e7, "rope_scaling": {"rope_type": kind, **scaling}}
    whole = RopeConfig.from_hf(keys, "config.json")
    assert RopeConfig.from_hf(keys, "config.json", 0.25) == replace(
        whole, partial_rotary_factor=0.25
    )
    nested = {**keys, "rope_scaling": {**keys["rope_scaling"], "partial_rotary_factor": 0.5}}
    assert RopeConfig.from_hf(nested, "config.json", 0.25).rotary_dim(64) == 32
