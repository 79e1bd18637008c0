"""Qwen2 and Mistral equal transformers': Llama's layers with other biases, windows and defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from graphengine.api import Engine
from graphengine.config.model import ModelConfig
from tests.models.test_qwen3_golden import check_logits, token_ids
from tests.support.checkpoints import edit_config, make_target
from tests.support.dflash_reference import load_target, plain_generate

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2"},
    "qwen2-untied": {"model_type": "qwen2", "tie": False, "heads": 6, "kv_heads": 3, "hidden": 48},
    "mistral": {"model_type": "mistral", "tie": False, "extra": {"sliding_window": None}},
    "mistral-wide": {"model_type": "mistral", "head_dim": 32, "extra": {"sliding_window": 512}},
    "mistral-flag": {"model_type": "mistral", "bias": True, "extra": {"sliding_window": None}},
}


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    """Bug: the biases that Qwen2's files do not speak of are left out, the output gets one too, or
    a flag that Mistral's layers ignore gives them some."""
    directory = make_target(tmp_path, **CONFIGS[name])
    check_logits(directory)


@pytest.mark.parametrize("model_type", ["qwen2", "mistral"])
def test_missing_keys_are_transformers_defaults(model_type: str) -> None:
    """Bug: a file without its K/V heads, eps or positions, as older ones are, is read with Llama's
    defaults."""
    shape = {"model_type": model_type, "hidden_size": 512, "num_attention_heads": 64}
    shape |= {"intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
    theirs = AutoConfig.for_model(**shape)
    ours = ModelConfig.from_hf(shape | {"rope_theta": 1e6, "sliding_window": None})
    assert ours.head_dim == 8 and ours.has_output_bias is False
    for key in ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings"):
        assert getattr(ours, key) == getattr(theirs, key)


def test_a_mistral_that_does_not_say_slides(tmp_path: Path) -> None:
    """Bug: a Mistral whose layers see their last 4,096 keys, which a file says by leaving the key
    out, runs with all of them: answers differ behind the window, without an error."""
    directory = make_target(tmp_path, model_type="mistral", max_positions=8192)
    edit_config(
        directory, lambda values: {k: v for k, v in values.items() if k != "sliding_window"}
    )
    values = json.loads((directory / "config.json").read_text())
    assert ModelConfig.from_hf(values).windows == (4096, 4096)


@pytest.mark.parametrize("name", ["qwen2", "mistral"])
def test_engine_continues_as_transformers(tmp_path: Path, name: str) -> None:
    """Bug: buckets mix up rows of an architecture whose projections have biases, or drafts by
    look-up are not what such a target says."""
    directory = make_target(tmp_path, **CONFIGS[name])
    prompts = [token_ids(n, seed=n) for n in (1, 4, 9)]
    model = load_target(directory)
    for draft in (None, "ngram"):
        with Engine.from_pretrained(directory, draft, buckets=(1, 4), max_model_len=96) as engine:
            results = engine.generate(prompts, max_new_tokens=12, ignore_eos=True)
        for prompt, result in zip(prompts, results, strict=True):
            assert result.token_ids == plain_generate(model, prompt, 12)
