"""Hybrids of Gated-DeltaNet and gated attention equal transformers'."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphengine.api import Engine
from graphengine.config.gated_delta import DEFAULTS, read_mixers, text_part
from graphengine.config.model import ModelConfig
from graphengine.config.values import RawConfig
from graphengine.decode.loop import DecodeLoop
from tests.models.test_qwen3_golden import token_ids
from tests.support.checkpoints import edit_config, make_drafter
from tests.support.dflash_reference import (
    DraftReference,
    load_target,
    plain_generate,
    run_target,
    speculative_generate,
)
from tests.support.doctored import check, errors
from tests.support.hybrids import A, D, make_hybrid

CONFIGS: dict[str, dict[str, Any]] = {
    "three-to-one": {},
    "one-value-head-a-key-head": {"key_heads": 3, "value_heads": 3, "tie": False},
    "three-value-heads-a-key-head": {"key_heads": 1, "value_heads": 3, "layer_types": [D, A, D]},
    "recurrence-last": {"layer_types": [A, D, D]},
    "half-a-head-turns": {"factor": 0.5, "kv_heads": 1, "layer_types": [D, A]},
    "a-whole-head-turns": {"factor": 1.0, "layer_types": [D, A]},
    "experts": {"model_type": "qwen3_5_moe_text", "tie": False},
    "qwen3-next": {"model_type": "qwen3_next", "key_heads": 2, "value_heads": 6},
}
NUM_TOKENS = 140


def load(directory: Path, **options: Any) -> Engine:
    options = {"buckets": (1, 2, 4), "page_size": 4, "max_model_len": 256} | options
    return Engine.from_pretrained(directory, **options)


def loop_of(engine: Engine) -> DecodeLoop:
    return engine._built.loop  # type: ignore[union-attr]


def logits_of(engine: Engine, ids: list[int], chunks: list[int]) -> Tensor:
    """Of every row, through the engine's prefill in these chunks."""
    from graphengine.decode.fixed_chunk import Piece

    loop, done, found = loop_of(engine), 0, []
    pages = loop.allocator.allocate(-(-len(ids) // loop.config.page_size))
    (slot,) = loop.state_slots.allocate(1)
    for count in chunks:
        piece = Piece(ids, done, done + count, pages, slot)
        found.append(loop.prefill.logits([piece], range(count)))
        done += count
    loop.allocator.free(pages)
    loop.state_slots.free([slot])
    return torch.cat(found)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    """Bug (H20 to H24): a norm's weight is read as w where it is 1 + w or the other way round, q
    and gate are split as halves instead of by head, the wrong part of a head turns, the query has
    no scale, or a value head reads with another key head; or a chunk begins with a stale window."""
    directory = make_hybrid(tmp_path, **CONFIGS[name])
    ids = token_ids(NUM_TOKENS)
    expected = run_target(load_target(directory), ids).logits
    with load(directory) as engine:
        loop = loop_of(engine)
        states = loop.prefill.pair.target.states
        assert states is not None
        for chunks in ([NUM_TOKENS], [1, 3, 64, 72], [63, 64, 13], [1] * 20 + [120]):
            for tensor in states:  # who had the slot before leaves nothing (H19)
                tensor.fill_(float("nan"))
            found = logits_of(engine, ids, chunks)
            error = (found - expected).norm() / expected.norm()
            assert error < 2e-5, f"{chunks}: {error}"
            assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["three-to-one", "three-value-heads-a-key-head", "experts"])
def test_engine_continues_as_transformers(tmp_path: Path, name: str) -> None:
    """Bug (H01, H18, H29): requests of a batch read each other's states, or a prompt's state is
    not what its first step begins with."""
    directory = make_hybrid(tmp_path, **CONFIGS[name])
    prompts = [token_ids(n, seed=n) for n in (1, 5, 16, 17, 40)]
    model = load_target(directory)
    with load(directory) as engine:
        loop = loop_of(engine)
        for chunk in (7, 2048):
            loop.prefill = dataclasses.replace(loop.prefill, chunk=chunk)
            results = engine.generate(prompts, max_new_tokens=24, ignore_eos=True)
            for prompt, result in zip(prompts, results, strict=True):
                assert result.token_ids == plain_generate(model, prompt, 24)


@pytest.mark.parametrize("taps", [(0, 3), (1, 2)])
def test_a_drafter_is_accepted_as_its_reference(tmp_path: Path, taps: tuple[int, ...]) -> None:
    """Bug: what is tapped of a recurrent layer is its mixer's output, not the residual stream
    behind its MLP: acceptance is lost without an error."""
    target = make_hybrid(tmp_path / "t", tie=False, likely_tokens=3)
    draft = make_drafter(tmp_path / "d", target, taps=taps, block_size=5)
    reference = DraftReference.load(draft, load_target(target))
    prompt = token_ids(7)
    expected, counts = speculative_generate(reference, prompt, 60)
    histogram = [counts.count(a) for a in range(reference.block_size)]
    assert sum(histogram[1:]) >= 4, "the pair never agrees, the test would be vacuous"
    with Engine.from_pretrained(target, draft, buckets=(1,), page_size=4) as engine:
        (result,) = engine.generate(prompt, max_new_tokens=60, ignore_eos=True)
    assert result.token_ids == expected[:60]
    assert result.metrics.acceptance.steps_by_accepted == histogram


def test_published_files(tmp_path: Path) -> None:
    """Bug: a vision-language checkpoint's names are not found, its vision and MTP tensors are
    refused or loaded, or another tensor that nobody knows is passed over."""
    text = make_hybrid(tmp_path / "text", layer_types=[D, A], tie=False)
    config = json.loads((text / "config.json").read_text())
    tensors = load_file(text / "model.safetensors")
    whole = tmp_path / "whole"
    whole.mkdir()
    for file in text.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (whole / file.name).write_bytes(file.read_bytes())
    renamed = {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()}
    renamed |= {"model.visual.patch_embed.weight": torch.ones(3), "mtp.fc.weight": torch.ones(2)}
    save_file(renamed, whole / "model.safetensors")
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": config,
        "vision_config": {"depth": 2},
        "tie_word_embeddings": False,
    }
    (whole / "config.json").write_text(json.dumps(outer))
    assert not errors(check(whole, "none"))
    prompt = token_ids(9)
    with load(text) as engine, load(whole) as published:
        expected = engine.generate(prompt, max_new_tokens=8, ignore_eos=True)[0].token_ids
        assert published.generate(prompt, max_new_tokens=8, ignore_eos=True)[0].token_ids == (
            expected
        )
    renamed["model.language_model.layers.0.linear_attn.other"] = torch.ones(2)
    save_file(renamed, whole / "model.safetensors")
    assert errors(check(whole, "none")) == ["target.weights"]
    with pytest.raises(ValueError, match=r"linear_attn\.other"):
        load(whole)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rope_parameters": None}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 1.5}}, "factor is 1.5,"),
        ({"attn_output_gate": False}, "attn_output_gate false"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid'"),
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim 3"),
        ({"linear_value_head_dim": 32}, "linear_value_head_dim 32"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads 5"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype 'bfloat16'"),
        ({"attention_bias": True}, "attention_bias true"),
        ({"layer_types": [D, "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": [D, D]}, "no layer has full_attention"),
        ({"full_attention_interval": 1}, "full_attention_interval 1 disagree"),
        ({"model_type": "qwen4_exp"}, "model_type 'qwen4_exp'"),
        ({"model_type": "qwen3_5"}, "'qwen3_5' has no text_config"),
    ],
)
def test_what_would_change_the_result_is_refused(
    tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    """Bug: a key that engines read differently is passed over, and the text is another model's."""
    directory = make_hybrid(tmp_path, layer_types=[D, A], tokenizer=False)
    edit_config(directory, lambda values: values | change)
    with pytest.raises(ValueError, match=text):
        ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))


@pytest.mark.parametrize(("head_dim", "turned"), [(20, 5), (12, 3), (2, 0)])
def test_dims_that_do_not_pair_are_refused(tmp_path: Path, head_dim: int, turned: int) -> None:
    """Bug: where rope turns an odd number of a head's dims, or none, a target loads and its text is
    another model's."""
    directory = make_hybrid(tmp_path, layer_types=[D, A], head_dim=head_dim, tokenizer=False)
    text = f"partial_rotary_factor 0.25 turns {turned} of head_dim {head_dim}; rope needs an even"
    with pytest.raises(ValueError, match=text):
        ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))


def test_two_places_for_the_tie_must_agree(tmp_path: Path) -> None:
    """Bug (H26): the head of a published file is tied by one key and its own by the other."""
    directory = make_hybrid(tmp_path, layer_types=[D, A], tokenizer=False)
    text = json.loads((directory / "config.json").read_text())
    outer = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": False}
    with pytest.raises(ValueError, match="tie_word_embeddings is False"):
        ModelConfig.from_hf(outer)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("place", ["outer", "text", "both"])
def test_one_place_for_the_tie_is_enough(tmp_path: Path, tied: bool, place: str) -> None:
    """Bug: a file that says it at one of the two places alone is read as if it said nothing: its
    head is looked for and refused as missing, or is the embedding in place of its own."""
    directory = make_hybrid(tmp_path, layer_types=[D, A], tokenizer=False)
    text = json.loads((directory / "config.json").read_text())
    del text["tie_word_embeddings"]
    outer: dict[str, Any] = {"model_type": "qwen3_5", "text_config": text}
    assert ModelConfig.from_hf(outer).tie_word_embeddings is False
    outer |= {"tie_word_embeddings": tied} if place != "text" else {}
    text |= {"tie_word_embeddings": tied} if place != "outer" else {}
    assert ModelConfig.from_hf(outer).tie_word_embeddings is tied


def test_files_without_layer_types() -> None:
    """Bug: of every n layers the first attends, not the last."""
    raw = RawConfig({"full_attention_interval": 3}, "config.json")
    wanted = ("gated_delta", "gated_delta", "gated_attention", "gated_delta", "gated_delta")
    assert read_mixers(raw, [], 5) == wanted


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_missing_keys_are_transformers_defaults(model_type: str) -> None:
    """Bug: a file that leaves out what its model has of transformers' defaults is read as a model
    of other sizes, and refused as not its own."""
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(model_type)
    stated = {key: getattr(theirs, key) for key in DEFAULTS if hasattr(theirs, key)}
    assert stated == {key: DEFAULTS[key] for key in stated}
    assert DEFAULTS.keys() - stated.keys() <= {"full_attention_interval"}


def test_keys_that_are_null_are_not_there(tmp_path: Path) -> None:
    """Bug: a file that was saved with a null for what it does not say is refused."""
    directory = make_hybrid(tmp_path, layer_types=[D, A], tokenizer=False)
    values = json.loads((directory / "config.json").read_text())
    keys = "full_attention_interval linear_conv_kernel_dim partial_rotary_factor".split()
    for key in keys:
        assert ModelConfig.from_hf(values | {key: None}) == ModelConfig.from_hf(values)


def test_what_the_text_part_says_itself() -> None:
    """Bug: what stands beside a published file's text part counts before what it says itself, or is
    not looked at where it says nothing."""
    outer = {"model_type": "qwen3_5", "eos_token_id": 1, "quantization_config": {"a": 1}}
    raw = RawConfig(outer | {"text_config": {"eos_token_id": [2, 3]}}, "config.json")
    found = text_part(raw)
    assert found.get("eos_token_id") == [2, 3] and found.get("quantization_config") == {"a": 1}


def test_a_null_of_the_text_part_says_nothing() -> None:
    """Bug: transformers writes `"eos_token_id": null` into a text part without its own, and answers
    no longer end at the token that the file names beside it."""
    outer = {"model_type": "qwen3_5", "eos_token_id": 1, "quantization_config": {"a": 1}}
    text = {"eos_token_id": None, "quantization_config": None, "head_dim": 4}
    found = text_part(RawConfig(outer | {"text_config": text}, "config.json"))
    assert found.get("eos_token_id") == 1 and found.get("quantization_config") == {"a": 1}
