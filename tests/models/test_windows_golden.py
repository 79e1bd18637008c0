"""Layers that slide equal transformers', of every family that says so in its own way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from graphengine.api import Engine
from graphengine.config.model import ModelConfig
from graphengine.startup.build import read_configs
from tests.models.test_qwen3_golden import check_logits_relative, token_ids
from tests.support.checkpoints import edit_config, make_drafter, make_target
from tests.support.dflash_reference import load_target, plain_generate

SWITCH = {"use_sliding_window": True, "sliding_window": 7}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
# what the file says, and the layers that slide by 7, counted by hand
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "mistral": ("mistral", {"sliding_window": 7}, "777"),
    "mistral-one": ("mistral", {"sliding_window": 1}, "111"),
    "mistral-types": ("mistral", {"sliding_window": 7, **MIXED}, "7-7"),
    "mistral-full": ("mistral", {"sliding_window": 7, "layer_types": ["full_attention"] * 3}, ""),
    "phi3": ("phi3", {"sliding_window": 7}, "777"),
    "qwen2-from": ("qwen2", {**SWITCH, "max_window_layers": 1}, "-77"),
    "qwen2-types": ("qwen2", {**SWITCH, **MIXED, "max_window_layers": 0}, "7-7"),
    "qwen3-from": ("qwen3", {**SWITCH, "max_window_layers": 2}, "--7"),
    "qwen3-types": ("qwen3", {**SWITCH, **MIXED}, "7-7"),
    "qwen3-moe": ("qwen3_moe", {**SWITCH, "max_window_layers": 2}, "777"),
    "qwen3-off": ("qwen3", {**SWITCH, "use_sliding_window": False}, ""),
    "llama": ("llama", {"sliding_window": 7}, ""),
}


def make(directory: Path, name: str, **options: Any) -> Path:
    model_type, extra, _ = FAMILIES[name]
    made = make_target(directory, model_type=model_type, layers=3, extra=extra, **options)
    if "layer_types" not in extra:  # which transformers has filled in from the other keys
        edit_config(made, lambda values: {k: v for k, v in values.items() if k != "layer_types"})
    return made


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    """Bug: a window is one key too wide, slides in another layer than the family's code says, or is
    lost where a prompt is cut."""
    directory = make(tmp_path, name)
    windows = read_configs(directory, None)[0].windows
    assert windows == tuple({"7": 7, "1": 1, "-": None}[c] for c in FAMILIES[name][2])
    check_logits_relative(directory)


@pytest.mark.parametrize("name", ["mistral", "qwen3-types"])
def test_engine_continues_as_transformers(tmp_path: Path, name: str) -> None:
    """Bug: a step plans one window for all layers, or a drafted block's later rows see keys that
    slid away for them."""
    directory = make(tmp_path / "target", name, tie=False, likely_tokens=4)
    drafter = make_drafter(tmp_path / "drafter", directory, taps=(0, 2))
    prompts = [token_ids(n, seed=n) for n in (1, 30)]
    model = load_target(directory)
    expected = [plain_generate(model, prompt, 60) for prompt in prompts]
    for draft in (None, "ngram", drafter):
        with Engine.from_pretrained(directory, draft, buckets=(1, 2), max_model_len=160) as engine:
            results = engine.generate(prompts, max_new_tokens=60, ignore_eos=True)
        assert [result.token_ids for result in results] == expected


@pytest.mark.parametrize(
    ("model_type", "said", "text"),
    [
        ("llama", MIXED, "'llama' has, or not supported"),
        ("phi3", MIXED, "sliding_attention"),
        ("llama", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3", {**MIXED, "sliding_window": 7}, "use_sliding_window is not true"),
        ("qwen3", {**SWITCH, **MIXED, "sliding_window": None}, "there is no sliding_window"),
        ("qwen3", {**SWITCH, "layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ("phi3", {"sliding_window": 0}, "sliding_window holds 0"),
    ],
)
def test_what_would_change_the_result_is_refused(
    tmp_path: Path, model_type: str, said: dict[str, Any], text: str
) -> None:
    """Bug: a window that a family's code would not apply, or has no width for, is passed over, and
    long texts are another model's."""
    directory = make_target(tmp_path, model_type=model_type, layers=3, tokenizer=False)
    edit_config(directory, lambda values: values | said)
    with pytest.raises(ValueError, match=text):
        read_configs(directory, None)


@pytest.mark.parametrize(
    ("said", "windows"),
    [
        ({"use_sliding_window": True, "sliding_window": 7}, (None,) * 28 + (7, 7)),
        ({"use_sliding_window": True}, (None,) * 28 + (4096, 4096)),
        ({"sliding_window": 7, "max_window_layers": 0}, ()),
    ],
)
def test_missing_keys_are_transformers_defaults(
    said: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    """Bug: a file without the switch slides, or without max_window_layers in all layers."""
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"intermediate_size": 96, "num_hidden_layers": 30, "vocab_size": 512}
    for model_type in ("qwen2", "qwen3"):
        theirs = AutoConfig.for_model(model_type, **shape, **said)
        ours = ModelConfig.from_hf({"model_type": model_type, "rope_theta": 1e4, **shape, **said})
        kinds = ["sliding_attention" if w else "full_attention" for w in ours.windows or [0] * 30]
        assert ours.windows == windows and kinds == theirs.layer_types


@pytest.mark.parametrize(("width", "slides"), [(511, True), (512, False), (4096, False)])
def test_a_window_of_all_positions_is_none(width: int, slides: bool) -> None:
    """Bug: a window that nothing can leave, as most files have it, costs long prompts their own
    attention; or one that is a position short counts as none."""
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
    said = {"model_type": "mistral", "rope_theta": 1e4, "max_position_embeddings": 512}
    config = ModelConfig.from_hf(shape | said | {"sliding_window": width})
    assert config.windows == ((width, width) if slides else ())
    assert config.shortened(1).windows == config.windows[:1]
