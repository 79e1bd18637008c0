"""`doctor` on models that do not belong together, or that load and are suspect all the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphengine.checkpoints.hub import TINY_DRAFT
from graphengine.checkpoints.tokenizer import Tokenizer
from graphengine.config.draft import DraftConfig
from graphengine.doctor.files import ModelFiles
from graphengine.doctor.pair import pair_findings
from graphengine.startup.build import read_configs
from tests.support.checkpoints import as_speculators, edit_config
from tests.support.doctored import Edit, check, dflash, errors, load, named


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        (lambda c: c | {"rope_theta": 1000000.0}, "pair.theta"),
        (
            lambda c: (
                c
                | {
                    "rope_scaling": {
                        "rope_type": "yarn",
                        "factor": 4.0,
                        "original_max_position_embeddings": 64,
                    }
                }
            ),
            "pair.rope_scaling",
        ),
        (
            lambda c: (
                c
                | {
                    "rope_scaling": {
                        "type": "yarn",
                        "factor": 64.0,
                        "original_max_position_embeddings": 64,
                        "mscale": 1.0,
                        "mscale_all_dim": 1.0,
                    }
                }
            ),
            "draft.rope_amplitude",
        ),
    ],
)
def test_legal_but_suspect(copies: tuple[Path, Path], edit: Edit, name: str) -> None:
    """Bug: a theta or a scaling that an export has lost costs acceptance without a word."""
    edit_config(copies[1], edit)
    found = check(*copies)
    assert not found.has_errors
    (finding,) = named(found, name)
    assert finding.level == "warning"
    assert finding.remedy
    load(*copies).close()


@pytest.mark.parametrize(
    ("extra", "per_type", "warned"),
    [
        ({}, False, True),
        ({}, True, True),
        ({"attention_factor": 1.4}, False, False),
        ({"mscale": None}, False, False),
    ],
)
def test_amplitude_that_engines_read_in_two_ways(
    copies: tuple[Path, Path], extra: dict[str, Any], per_type: bool, warned: bool
) -> None:
    """Bug: the warning is lost where ropes are said per layer type or in a speculators file, or
    comes where the file itself says the amplitude, or one of its two keys is null."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 64.0, "mscale": 1.0}
    rope |= {"original_max_position_embeddings": 64, "mscale_all_dim": 1.0} | extra
    nested = {"full_attention": rope} if per_type else rope
    edit_config(
        copies[1],
        lambda c: c | {"rope_scaling": None, "rope_theta": None, "rope_parameters": nested},
    )
    for draft in (copies[1], as_speculators(copies[1].with_name("s"), copies[1], copies[0])):
        found = check(copies[0], draft)
        assert not found.has_errors
        assert bool(named(found, "draft.rope_amplitude")) == warned


def test_more_draft_tokens_than_the_target_has() -> None:
    """Bug: a reduced vocabulary that is larger than the target's is told as one that fits."""
    target, draft = read_configs("qwen3-8b", "qwen3-8b-dflash-b16")
    assert isinstance(draft, DraftConfig)
    for more, level in ((0, "ok"), (1, "error")):
        larger = replace(draft, draft_vocab_size=target.vocab_size + more)
        found = pair_findings(ModelFiles(name="target"), target, ModelFiles(name="draft"), larger)
        assert [f.level for f in found if f.name == "pair.draft_vocabulary"] == [level]


@pytest.mark.parametrize(
    ("name", "level"),
    [("Qwen/Qwen3-8B", "ok"), ("/models/Qwen3-8B", "ok"), ("/models/Qwen3-4B", "warning")],
)
def test_whom_a_drafter_names(name: str, level: str) -> None:
    """Bug: a target that was fetched into a directory of its name is said to be another than the
    one that the drafter names; or another passes without a word."""
    target, draft = read_configs("qwen3-8b", "qwen3-8b-dflash-b16")
    assert isinstance(draft, DraftConfig)
    named_one = replace(draft, verifier="Qwen/Qwen3-8B")
    found = pair_findings(ModelFiles(name=name), target, ModelFiles(name="draft"), named_one)
    (finding,) = [f for f in found if f.name == "pair.verifier"]
    told = f"the drafter names Qwen/Qwen3-8B, the target is {name}"
    assert (finding.level, finding.value) == (level, "Qwen/Qwen3-8B" if level == "ok" else told)


def test_stop_tokens_outside_the_vocabulary(copies: tuple[Path, Path]) -> None:
    """Bug: a stop token that cannot come up stops doctor, though the pair loads and runs."""
    edit_config(copies[0], lambda c: {"eos_token_id": [9999, 2]}, "generation_config.json")
    found = check(*copies)
    assert not found.has_errors
    (finding,) = named(found, "target.stop_tokens")
    assert finding.level == "warning" and finding.value == "[9999] lie outside 512"
    load(*copies).close()


def test_block_past_the_positions(copies: tuple[Path, Path]) -> None:
    """Bug: the refusal of a block that no context holds names an option that nobody passed, and
    lengths below zero."""
    edit_config(copies[1], dflash(block_size=600))
    (finding,) = [f for f in check(*copies, max_model_len=None).findings if f.level == "error"]
    assert finding.name == "run.options"
    assert "block of 600" in finding.value and "256 positions" in finding.value
    assert "--max-model-len" not in finding.value


def test_theta_that_transformers_fills_in(copies: tuple[Path, Path]) -> None:
    """Bug: the one wrong theta that is common, 10000, is not called by its cause; or each model's
    is said to be the other's."""
    edit_config(copies[0], lambda c: c | {"rope_theta": 1000000.0})
    (finding,) = named(check(*copies), "pair.theta")
    assert (finding.level, finding.value) == ("warning", "drafter 10000, target 1000000")
    assert "transformers fills in" in finding.remedy


def test_wrong_target_of_the_tiny_drafter(pair: tuple[Path, Path]) -> None:
    """Bug: a drafter is accepted for a target that it was not trained on; or what it expects is
    told as what the target has."""
    for target in (pair[0], "qwen3-8b"):
        assert {"pair.hidden_size", "pair.vocabulary", "pair.num_layers"} <= set(
            errors(check(target, TINY_DRAFT))
        )
    (layers,) = named(check("qwen3-8b", TINY_DRAFT), "pair.num_layers")
    assert layers.value == "the drafter expects 8, the target has 36"


def test_a_hybrid_turns_a_part_of_its_heads() -> None:
    """Bug: a target that turns a quarter of a head, whose drafter turns it all as it was trained
    to, is said to be scaled otherwise."""
    found = check("qwen3.5-4b", "qwen3.5-4b-dflash-b16", load_format="dummy")
    (scaling,), (dims,) = named(found, "pair.rope_scaling"), named(found, "pair.rotary_dims")
    assert scaling.level == "ok" and dims.value == "drafter 128, target 64"


def test_values_at_the_edge(copies: tuple[Path, Path]) -> None:
    """Bug: a good pair with one draft a step is refused; the first id or layer past the last is
    taken for one; two scalings that differ in their factor alone are called the same, or each is
    said to be the other's."""
    edit_config(copies[1], dflash(block_size=2))
    found = check(*copies)
    assert not found.has_errors
    assert not [f for f in named(found, "run.memory") if f.level != "ok"], "the pool holds all rows"
    edit_config(copies[0], lambda c: {"eos_token_id": [512, 2]}, "generation_config.json")
    (finding,) = named(check(*copies), "target.stop_tokens")
    assert finding.level == "warning" and "512" in finding.value
    edit_config(copies[1], dflash(mask_token_id=512))
    assert errors(check(*copies)) == ["pair.mask_token"]
    edit_config(
        copies[1], dflash(mask_token_id=511, target_layer_ids=[0, 3], num_target_layers=None)
    )
    (finding,) = named(check(*copies), "pair.taps")
    assert (finding.level, finding.value) == ("error", "layer 3 of a target with 3 layers")
    edit_config(copies[1], dflash(target_layer_ids=[0, 1]))
    for directory, factor in ((copies[0], 4.0), (copies[1], 4.5)):
        rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 64}
        rope["attention_factor"] = 1.0
        edit_config(directory, lambda c, rope=rope: c | {"rope_scaling": rope})
    (finding,) = named(check(*copies), "pair.rope_scaling")
    assert finding.level == "warning" and finding.value.startswith("drafter yarn x 4.5 ")


def test_whose_the_mask_token_is(copies: tuple[Path, Path]) -> None:
    """Bug: the first id behind the tokenizer is called one of its tokens, which text can hold."""
    count = len(Tokenizer(copies[0]))
    for mask, whose in ((count - 1, "a token of the tokenizer"), (count, "behind the tokenizer")):
        edit_config(copies[1], dflash(mask_token_id=mask))
        (finding,) = named(check(*copies), "pair.mask_token")
        assert finding.level == "ok" and finding.value == f"{mask} of 512 rows, {whose}"


def test_requests_that_wait_for_pages(pair: tuple[Path, Path]) -> None:
    """Bug: a pool that holds three of a bucket's four requests is called enough, and the fourth
    waits unannounced; or a pool that holds all of them is called small."""
    plan = check(*pair, buckets=(1, 4)).memory_plan
    assert plan is not None
    for count, is_told in ((3, True), (4, False)):
        pool = plan.kv_page_bytes * (1 + count * plan.max_request_pages)
        found = named(check(*pair, buckets=(1, 4), kv_cache_memory=pool), "run.memory")
        told = [f.value for f in found if "of full length for a bucket" in f.value]
        assert told == ["3.0 requests of full length for a bucket of 4"] * is_told


def test_a_context_that_the_pool_lowers(pair: tuple[Path, Path]) -> None:
    """Bug: the pool ends requests before the models would, and doctor does not say so; or says so
    of a length that was asked for, which a start refuses."""
    plan = check(*pair, max_model_len=None).memory_plan
    assert plan is not None
    whole = plan.max_model_len
    for missing, is_told in ((1, True), (0, False)):
        pool = plan.kv_page_bytes * (1 + plan.max_request_pages - missing)
        found = check(*pair, max_model_len=None, kv_cache_memory=pool)
        assert found.memory_plan is not None
        left = found.memory_plan.max_model_len
        assert (left < whole) == is_told
        told = [f.value for f in named(found, "run.memory") if f.level == "warning"]
        assert told == [f"K/V for {left} of {whole} tokens a request is left"] * is_told
        asked = check(*pair, max_model_len=whole, kv_cache_memory=pool)
        assert errors(asked) == ["run.memory"] * is_told


def test_positions_of_both_models(copies: tuple[Path, Path]) -> None:
    """Bug: the context is told as if the drafter had the target's positions, or the target only
    the drafter's once nothing is drafted; or less the rows of a drafter's block, to which one that
    drafts from the anchor adds a row of the verify's."""
    edit_config(copies[1], lambda c: c | {"max_position_embeddings": 128})
    (finding,) = named(check(*copies), "run.context")
    drafting = "124 with drafting (128 positions less a block of 4), 256 without"
    assert finding.value.endswith(f"the models allow {drafting}")
    load(*copies, max_model_len=256, finish_in_plain_decode=True).close()
    edit_config(copies[1], dflash(sample_from_anchor=True))
    (finding,) = named(check(*copies), "run.context")
    assert "123 with drafting (128 positions less a block of 5)" in finding.value
