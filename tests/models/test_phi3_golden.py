"""Phi-3 equals transformers': packed tensors in the file, heads of which rope turns a part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from graphengine.api import Engine
from graphengine.config.model import ModelConfig
from graphengine.models import decoder
from graphengine.startup.build import read_configs
from tests.models.test_qwen3_golden import check_logits_relative, token_ids
from tests.support.checkpoints import edit_config, make_target
from tests.support.dflash_reference import load_target, plain_generate
from tests.support.doctored import check, errors, named

PART = {"rope_theta": 1e4, "partial_rotary_factor": 0.75, "rope_scaling": None}
NESTED = {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}
CONFIGS: dict[str, dict[str, Any]] = {
    "untied": {"tie": False},
    "mha": {"kv_heads": 4, "extra": {"sliding_window": 512}},
    "wide-heads": {"heads": 6, "kv_heads": 3, "head_dim": 32, "hidden": 48, "intermediate": 80},
    "part-of-a-head": {"rope": PART, "kv_heads": 1},
    "part-nested": {"rope": NESTED, "heads": 6, "kv_heads": 2, "hidden": 96, "tie": False},
}
PHI_4 = {
    "model_type": "phi3",
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "max_position_embeddings": 16384,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 10,
    "rope_theta": 250000,
    "rope_scaling": None,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}


def make(directory: Path, **options: Any) -> Path:
    return make_target(directory, model_type="phi3", **options)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    """Bug: q, k and v of a packed tensor are taken apart at other rows, gate and up are swapped, or
    another part of a head turns."""
    check_logits_relative(make(tmp_path, **CONFIGS[name]))


@pytest.mark.parametrize("name", ["untied", "part-of-a-head"])
def test_engine_continues_as_transformers(tmp_path: Path, name: str) -> None:
    """Bug: steps, buckets or drafts by look-up mix up rows of a target with packed tensors."""
    directory = make(tmp_path, **CONFIGS[name])
    prompts = [token_ids(n, seed=n) for n in (1, 9)]
    model = load_target(directory)
    expected = [plain_generate(model, prompt, 100) for prompt in prompts]
    for draft in (None, "ngram"):
        with Engine.from_pretrained(directory, draft, buckets=(1, 2), max_model_len=160) as engine:
            results = engine.generate(prompts, max_new_tokens=100, ignore_eos=True)
        assert [result.token_ids for result in results] == expected


def test_missing_keys_are_transformers_defaults() -> None:
    """Bug: a file without K/V heads, eps, positions or a window is read with Mistral's defaults."""
    shape = {"model_type": "phi3", "hidden_size": 512, "num_attention_heads": 64}
    shape |= {"intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
    theirs = AutoConfig.for_model(**shape)
    ours = ModelConfig.from_hf(shape | {"rope_theta": 1e4})
    assert ours.head_dim == 8 and ours.rope.partial_rotary_factor == 1.0
    for key in ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings"):
        assert getattr(ours, key) == getattr(theirs, key)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope type 'longrope'"),
        ({"partial_rotary_factor": 0.2}, "turns 3 of head_dim 16; rope needs an even"),
    ],
)
def test_what_would_change_the_result_is_refused(
    tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    """Bug: a scaling of Phi-3 is passed over, and the text is another model's."""
    directory = make(tmp_path, tokenizer=False, layers=1)
    edit_config(directory, lambda values: values | change)
    with pytest.raises(ValueError, match=text):
        ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))


def test_a_file_is_read_strictly(tmp_path: Path) -> None:
    """Bug: a file that holds Llama's tensors under phi3's name, or whose packed tensor lacks rows,
    loads; or doctor, which nothing of it is loaded for, disagrees with the loader."""
    directory = make(tmp_path, rope=PART)
    found = check(directory, None)
    assert not errors(found)
    assert "12 rotary dims of 16" in named(found, "target.rope")[0].value
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.0.self_attn.qkv_proj.weight"
    packed = tensors.pop(name)
    apart = dict(zip("qkv", packed.split([64, 32, 32]), strict=True))
    apart = {name.replace("qkv", n): rows.contiguous() for n, rows in apart.items()}
    for changed in (apart, {name: packed[:-16].contiguous()}):
        save_file(tensors | changed, directory / "model.safetensors")
        assert set(errors(check(directory, None))) == {"target.weights"}
        with pytest.raises(ValueError, match="qkv_proj"):
            Engine.from_pretrained(directory)


def test_dummy_weights_and_the_plan(tmp_path: Path) -> None:
    """Bug: a packed tensor is planned at another size than is built, counted twice, or dummy
    weights are drawn unpacked."""
    (tmp_path / "config.json").write_text(json.dumps(PHI_4))
    config, _ = read_configs(tmp_path, None)
    groups = [decoder.outer_weights(config)]
    groups += [part for layer in decoder.layer_weights(config) for part in layer]
    weights = [weight for fields in groups for parts in fields.values() for weight in parts]
    assert sum(w.num_elements for w in weights) == pytest.approx(14.66e9, rel=0.001)  # published
    small = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    small |= {"num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 512}
    edit_config(tmp_path, lambda values: values | small | {"partial_rotary_factor": 0.75})
    options: dict[str, Any] = {"load_format": "dummy", "max_model_len": 64, "device": "cpu"}
    with Engine.from_pretrained(tmp_path, "ngram", buckets=(1,), **options) as engine:
        plan = engine.memory_plan
        assert plan.target_weight_bytes + plan.rope_table_bytes == engine.startup.weight_bytes
        (result,) = engine.generate([1, 2, 3], max_new_tokens=7, ignore_eos=True)
        assert len(result.token_ids) == 7
