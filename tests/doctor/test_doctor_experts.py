"""What doctor says of a mixture of experts: its files in both forms, and what a block costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from graphengine.checkpoints.pairs import read_json
from graphengine.config.draft_formats import parse_draft
from graphengine.doctor.doctor import Examination
from graphengine.doctor.experts import break_even_tokens, verify_bytes
from graphengine.startup.build import read_configs
from tests.models.test_gpt_oss_experts import clamped as clamped
from tests.models.test_gpt_oss_experts import gpt_oss_mlp, packed, write
from tests.models.test_moe import fuse, rewrite
from tests.support.checkpoints import make_target
from tests.support.doctored import check, errors
from tests.support.doctored import named as all_named

# Of Qwen3-Coder-30B-A3B's drafter: 8 layers, 5 taps; the mask and theta do not matter for bytes.
DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
    "block_size": 16,
    "num_target_layers": 48,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 12, 23, 34, 45]},
}


def value(found: Examination, name: str) -> str:
    (finding,) = all_named(found, name)
    return finding.value


def test_what_a_block_costs(tmp_path: Path) -> None:
    """Bug: the break-even leaves out the drafter, or reads all experts for one row; or GB are told
    as if they were GiB."""
    target, _ = read_configs("qwen3-30b-a3b", None)
    read = [verify_bytes(target, rows) / 4.46e9 for rows in (1, 4, 8, 16, 32, 128)]
    assert read == pytest.approx([1.36, 3.51, 5.79, 8.92, 11.9, 13.6], rel=0.01)
    (tmp_path / "config.json").write_text(json.dumps(DRAFTER))
    draft = parse_draft(*read_json(tmp_path / "config.json"))
    assert break_even_tokens(target, draft, 16) == pytest.approx(6.8, abs=0.05)
    assert break_even_tokens(target, None, 16) == pytest.approx(8.92 / 1.36, rel=0.01)
    found = check("qwen3-30b-a3b", tmp_path)
    assert "82 of 128 experts a layer expected, 39.8 GB" in value(found, "experts.rows_16")
    assert "6.8 tokens a step with the drafter" in value(found, "experts.rows_16")
    assert "8 of 128 experts" in value(found, "experts.rows_1")
    # 4 rows read 3.51 ms at 4.46 TB/s beside the drafter's 0.33 and plain decoding's 1.36.
    assert "3 drafts a step" in value(found, "experts.width")
    assert "plain decoding" not in value(found, "experts.width")
    assert not any(f.name.startswith("experts.") for f in check("qwen3-8b", None).findings)


def test_a_block_shorter_than_what_is_typical(tmp_path: Path) -> None:
    """Bug: a drafter of two tokens ends doctor, since no block of its own yields 5.4."""
    (tmp_path / "config.json").write_text(json.dumps(DRAFTER | {"block_size": 3}))
    text = value(check("qwen3-30b-a3b", tmp_path), "experts.width")
    assert "a block of 3 yields 3 tokens" in text


@pytest.mark.parametrize(
    ("options", "mean"),
    [({}, "2"), ({"simulate_acceptance": 6.35}, "6.35"), ({"simulate_acceptance": 16.0}, "16")],
)
def test_the_tokens_that_a_start_assumes(options: dict[str, Any], mean: str) -> None:
    """Bug: look-up is credited with a trained drafter's tokens, or what is simulated with others:
    doctor names a width that no start would choose."""
    text = value(check("qwen3-30b-a3b", "ngram", **options), "experts.width")
    assert f"a block of 16 yields {mean} tokens" in text
    assert ("plain decoding is better still" in text) == (mean == "2")


@pytest.mark.parametrize("simulated", [0.5, 99.0])
def test_an_acceptance_that_no_block_has(simulated: float) -> None:
    """Bug: a wrong --simulate-acceptance is blamed on the files, to be compared with the published
    ones, beside the finding about the option."""
    found = check("qwen3-30b-a3b", "ngram", simulate_acceptance=simulated)
    names = [name for name in errors(found) if name != "run.memory"]
    assert names == ["run.options"] and "2 tokens" in value(found, "experts.width")


@pytest.mark.parametrize("form", ["per expert", "fused"])
def test_files_in_both_forms(tmp_path: Path, form: str) -> None:
    """Bug: files that load are called incomplete, or an expert that is missing is not."""
    directory = make_target(tmp_path, model_type="qwen3_moe")
    if form == "fused":
        rewrite(directory, fuse)
    assert not errors(check(directory, None))
    last = max(name for name in load_file(directory / "model.safetensors") if "experts" in name)
    rewrite(directory, lambda tensors: tensors.pop(last))
    assert "missing" in value(check(directory, None), "target.weights")


def test_experts_in_mxfp4(tmp_path: Path, clamped: None) -> None:
    """Bug: doctor calls the bytes of MXFP4 weights that are not supported, or passes over a file
    without their scales, or with them as floats or numbers with a sign, which do not load."""
    directory = write(tmp_path, gpt_oss_mlp(96, 160, 8), packed)
    found = check(directory, None)
    assert [finding.level for finding in all_named(found, "target.weights")] == ["ok"]
    assert [finding.level for finding in all_named(found, "target.weights.dtype")] == ["ok"]
    name = "model.layers.0.mlp.experts.down_proj_scales"
    scales = load_file(directory / "model.safetensors")[name]
    for kind, said in ((torch.int8, "I8"), (torch.float32, "F32")):
        other = {name: scales.to(kind)}
        rewrite(directory, lambda tensors, other=other: tensors.update(other))
        (wrong, _) = all_named(check(directory, None), "target.weights.dtype")
        assert wrong.level == "error" and f"{name} is {said}" in wrong.value
    rewrite(directory, lambda tensors: tensors.pop(name))
    (missing,) = all_named(check(directory, None), "target.weights")
    assert missing.level == "error" and f"1 missing: {name}" in missing.value


def test_rows_of_a_block_whose_anchor_drafts(tmp_path: Path) -> None:
    """Bug: of a drafter whose anchor's row drafts too, what its own block costs is told for a row
    less than the target verifies, or not at all."""
    first = DRAFTER["dflash_config"] | {"sample_from_anchor": True}
    (tmp_path / "config.json").write_text(json.dumps(DRAFTER | {"dflash_config": first}))
    found = check("qwen3-30b-a3b", tmp_path).findings
    rows = [f.name for f in found if f.name.startswith("experts.rows_")]
    assert rows == [f"experts.rows_{count}" for count in (1, 8, 16, 17)]
