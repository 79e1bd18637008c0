"""gpt-oss equals transformers': windows in every other layer, sinks, biases, its experts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from graphengine.api import Engine
from graphengine.config.model import ModelConfig
from graphengine.decode.fixed_chunk import FixedChunk
from graphengine.startup.build import read_configs
from tests.models.test_qwen3_golden import check_logits_relative, token_ids
from tests.support.checkpoints import edit_config, make_drafter, make_target
from tests.support.dflash_reference import load_target, plain_generate
from tests.support.doctored import check, errors

YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
YARN |= {"original_max_position_embeddings": 16, "truncate": False}
TYPES = {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
UNSCALED = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "yarn": {"rope": {"rope_theta": 150000, "rope_scaling": YARN}, "heads": 8, "kv_heads": 1},
    "odd": {"hidden": 96, "heads": 6, "kv_heads": 3, "head_dim": 32, "intermediate": 160},
    "named-layers": {"extra": {**TYPES, "sliding_window": 3}},
    "no-attention-bias": {"bias": False},
    "tight-limit": {"extra": {"swiglu_limit": 0.4, "swiglu_alpha": 1.5}},
}
GPT_OSS_20B = "gpt-oss-20b"


def make(directory: Path, **options: Any) -> Path:
    """Of three layers, the first and the last of which slide by 7 where nothing else is said."""
    told: dict[str, Any] = {"bias": True, "tie": False, "layers": 3, "rope": UNSCALED}
    return make_target(directory, model_type="gpt_oss", **told | options)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    """Bug: the layers that slide are the others, a sink is another head's or scaled, gate and up
    are exchanged or not clamped, weights of experts sum over all of them, or a bias is dropped."""
    if name == "tight-limit" and not hasattr(AutoConfig.for_model("gpt_oss"), "swiglu_limit"):
        pytest.skip("this transformers (5.2) clamps by constants, whatever the file says")
    check_logits_relative(make(tmp_path, **CONFIGS[name]))


@pytest.mark.parametrize("name", ["plain", "yarn"])
def test_engine_continues_as_transformers(tmp_path: Path, name: str) -> None:
    """Bug: steps, buckets or drafts mix up rows of a target whose layers see different keys; or
    what launches our kernel tells it no window or no sinks."""
    directory = make(tmp_path / "target", likely_tokens=4, **CONFIGS[name])
    drafter = make_drafter(tmp_path / "drafter", directory, taps=(0, 2))
    prompts = [token_ids(n, seed=n) for n in (1, 30)]
    model = load_target(directory)
    expected = [plain_generate(model, prompt, 60) for prompt in prompts]
    ways: tuple[tuple[Any, Any], ...] = (None, "auto"), ("ngram", "auto"), (drafter, "triton")
    for draft, backend in ways:
        options = {"attention_backend": backend, "buckets": (1, 2), "max_model_len": 160}
        with Engine.from_pretrained(directory, draft, **options) as engine:
            results = engine.generate(prompts, max_new_tokens=60, ignore_eos=True)
        assert [result.token_ids for result in results] == expected


def test_prompts_in_chunks_of_a_fixed_size(tmp_path: Path) -> None:
    """Bug: a prompt's chunks, as a GPU runs them, see keys that slid away, or no sinks."""
    directory = make(tmp_path, likely_tokens=4)
    prompts = [token_ids(n, seed=n) for n in (9, 16, 40, 130)]
    options = {"buckets": (1,), "max_model_len": 160, "enable_prefix_caching": False}
    with Engine.from_pretrained(directory, None, **options) as engine:
        loop, ways = engine.built.loop, []
        eager = loop.prefill
        fixed = tuple(FixedChunk(eager.pair, size) for size in (16, 128))
        for chunks in ((), fixed):
            loop.prefill = replace(eager, fixed=chunks)
            results = engine.generate(prompts, max_new_tokens=20, ignore_eos=True)
            ways.append([result.token_ids for result in results])
    assert ways[0] == ways[1]


def test_missing_keys_are_transformers_defaults() -> None:
    """Bug: a file without layer_types, a window, heads or eps is read with another family's."""
    shape = {"model_type": "gpt_oss", "hidden_size": 96, "num_attention_heads": 64}
    shape |= {"intermediate_size": 96, "num_hidden_layers": 5, "vocab_size": 512}
    shape |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    theirs = AutoConfig.for_model(**shape)
    ours = ModelConfig.from_hf(shape | UNSCALED)
    kinds = ["full_attention" if w is None else "sliding_attention" for w in ours.windows]
    assert kinds == theirs.layer_types and set(ours.windows) == {None, theirs.sliding_window}
    for key in (
        *("head_dim", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings"),
        *("attention_bias", "tie_word_embeddings"),
    ):
        assert getattr(ours, key) == getattr(theirs, key)
    assert ours.moe is not None and ours.moe.clamp is not None
    said = [getattr(theirs, f"swiglu_{key}", None) for key in ("alpha", "limit")]
    assert ours.moe.clamp == ((1.702, 7.0) if said == [None, None] else tuple(said))  # 5.2 has none


def test_the_published_shape() -> None:
    """Bug: a key of the published config.json is refused, or its 20.9 billion weights are more."""
    config, _ = read_configs(GPT_OSS_20B, "gpt-oss-20b-dflash-b8")
    assert config.windows == (128, None) * 12 and config.has_sinks and config.has_output_bias
    assert config.rope.amplitude == pytest.approx(1.3466, abs=1e-4)
    assert config.max_position_embeddings == 131072


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ({"sliding_window": None}, "there is no sliding_window"),
        ({"rope_parameters": None, "rope_theta": 1e4}, "neither of rope_parameters and rope_sc"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_what_would_change_the_result_is_refused(
    tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    """Bug: a key that transformers obeys is passed over, and the text is another model's."""
    directory = make(tmp_path, tokenizer=False)
    edit_config(directory, lambda values: values | change)
    with pytest.raises(ValueError, match=text):
        ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))


def test_doctor_finds_nothing(tmp_path: Path) -> None:
    """Bug: doctor, which loads nothing, expects other tensors than the loader."""
    assert not errors(check(make(tmp_path), None))
