"""Llama equals transformers': no per-head norms, biases in attention and MLP, llama3 rope."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from graphengine.api import Engine
from graphengine.config.model import ModelConfig
from graphengine.models.layers import rope_frequencies
from graphengine.startup.build import read_configs
from tests.models.test_qwen3_golden import (
    NUM_TOKENS,
    chain_logits,
    check_logits,
    token_ids,
)
from tests.support.checkpoints import edit_config, make_drafter, make_target
from tests.support.dflash_reference import (
    DraftReference,
    load_target,
    plain_generate,
    run_target,
    speculative_generate,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "tied": {},
    "llama3-flat": {"rope": {"rope_theta": 5e5, "rope_scaling": LLAMA3}, "tie": False},
    "llama3-nested": {"rope": {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}, "head_dim": 32},
    "attention-bias": {"bias": True, "kv_heads": 1},
    "mlp-bias": {"mlp_bias": True, "tie": False},
    "both-biases": {"bias": True, "mlp_bias": True, "heads": 6, "kv_heads": 3, "hidden": 48},
    "one-layer": {"layers": 1, "mlp_bias": True},
}


def make(directory: Path, **options: Any) -> Path:
    return make_target(directory, model_type="llama", **options)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    """Bug: heads are normalised that Llama does not normalise, a bias of the MLP is dropped or
    packed in the wrong order, or the rope's scaling is."""
    directory = make(tmp_path, **CONFIGS[name])
    check_logits(directory)


@torch.no_grad()
def test_missing_keys_are_transformers_defaults(tmp_path: Path) -> None:
    """Bug: a file without head_dim, K/V heads, eps or biases, as older ones are, is refused or read
    otherwise than transformers reads it."""
    directory = make(tmp_path, kv_heads=4, head_dim=16)
    gone = ("head_dim", "num_key_value_heads", "rms_norm_eps", "attention_bias", "mlp_bias")
    gone += ("max_position_embeddings",)
    edit_config(directory, lambda values: {k: v for k, v in values.items() if k not in gone})
    config = ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))
    assert (config.head_dim, config.num_key_value_heads) == (16, 4)
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-6, 2048)
    ids = token_ids(NUM_TOKENS)
    expected = run_target(load_target(directory), ids).logits
    found = chain_logits(directory, ids, [NUM_TOKENS])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_rope_of_the_preset() -> None:
    """Bug: a band of frequencies is scaled that llama3 keeps, or the blend's ends are swapped."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config, _ = read_configs("llama-3.1-8b", None)
    rope = {"rope_theta": 5e5, **LLAMA3, "original_max_position_embeddings": 8192}
    theirs = LlamaConfig(
        hidden_size=4096,
        num_attention_heads=32,
        max_position_embeddings=131072,
        rope_parameters=rope,  # type: ignore[arg-type]
    )
    expected, amplitude = ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
    assert amplitude == config.rope.amplitude == 1.0
    torch.testing.assert_close(rope_frequencies(config.rope, config.head_dim), expected)
    unscaled = dataclasses.replace(config.rope, kind="default", factor=1.0)
    ratio = rope_frequencies(unscaled, config.head_dim) / expected
    assert ratio[0] == 1 and ratio[-1] == pytest.approx(8)
    assert ((ratio > 1.01) & (ratio < 7.99)).any()


@pytest.mark.parametrize("chunk", [1, 5, 2048])
@pytest.mark.parametrize("name", ["tied", "llama3-flat", "both-biases"])
def test_engine_continues_as_transformers(tmp_path: Path, name: str, chunk: int) -> None:
    """Bug: another architecture's chunks or buckets mix up rows, positions or slots."""
    directory = make(tmp_path, **CONFIGS[name])
    prompts = [token_ids(n, seed=n) for n in (1, 4, 9)]
    model = load_target(directory)
    with Engine.from_pretrained(directory, buckets=(1, 4), page_size=4, max_model_len=96) as engine:
        loop = engine._built.loop  # type: ignore[union-attr]
        loop.prefill = dataclasses.replace(loop.prefill, chunk=chunk)
        results = engine.generate(prompts, max_new_tokens=12, ignore_eos=True)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == plain_generate(model, prompt, 12)


def test_a_drafter_is_accepted_as_its_reference(tmp_path: Path) -> None:
    """Bug: taps of a Llama target are taken at another place, or its drafter, whose own layers are
    Qwen3's, loses their norms: acceptance is lost without an error."""
    rope = CONFIGS["llama3-flat"]["rope"]
    target = make(tmp_path / "t", layers=3, tie=False, likely_tokens=3, rope=rope)
    draft = make_drafter(tmp_path / "d", target, taps=(0, 2), block_size=5)
    reference = DraftReference.load(draft, load_target(target))
    prompt = token_ids(7)
    tokens, counts = speculative_generate(reference, prompt, 60)
    histogram = [counts.count(a) for a in range(reference.block_size)]
    assert sum(histogram[1:]) >= 5, "the pair never agrees, the test would be vacuous"
    with Engine.from_pretrained(target, draft, buckets=(1,), page_size=4) as engine:
        (result,) = engine.generate(prompt, max_new_tokens=60, ignore_eos=True)
    assert result.token_ids == tokens[:60]
    assert result.metrics.acceptance.steps_by_accepted == histogram
