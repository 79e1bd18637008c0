"""Drafters' config.json in every format: what is detected, converted and refused.

A key read by another format's rule costs acceptance without any error, so each conversion is pinned
and each feature that is not there is refused by key and value.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphengine.checkpoints.pairs import read_json
from graphengine.config.draft import AttentionRule
from graphengine.config.draft_formats import parse_draft
from graphengine.config.model import ModelConfig
from tests.config.test_config import DRAFTER, JSON_VALUES, MISSING, TARGET, Json, changed
from tests.support.checkpoints import as_deepspec, as_speculators, make_drafter, make_target
from tests.support.examples import examples

LAYERS: Json = {
    key: DRAFTER[key]
    for key in (
        "model_type vocab_size hidden_size intermediate_size num_hidden_layers head_dim "
        "num_attention_heads num_key_value_heads rms_norm_eps max_position_embeddings rope_theta "
        "attention_bias tie_word_embeddings layer_types"
    ).split()
}
SPECULATORS: Json = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.5.0",
    "transformer_layer_config": LAYERS,
    "draft_vocab_size": 151936,
    "block_size": 16,
    "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
    "mask_token_id": 151669,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dflash",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 15}],
        "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
    },
}
DEEPSPEC: Json = changed(
    DRAFTER,
    architectures=["Qwen3DSparkModel"],
    dflash_config=MISSING,
    mask_token_id=151669,
    target_layer_ids=[1, 9, 17, 25, 33],
    block_size=7,
    num_anchors=512,
    markov_rank=0,
    enable_confidence_head=False,
)


def inside(config: Json, key: str, **changes: Any) -> Json:
    """A copy with keys set in the object under `key`."""
    return {**config, key: changed(config[key], **changes)}


def test_what_is_detected() -> None:
    """Bug: the format, the slot convention or the block size is taken from the wrong sign, so that
    buffers or verification have a row too many or too few."""
    new = changed(DRAFTER, block_size=MISSING, dflash__block_size=16)
    first = {**SPECULATORS, "sample_from_anchor": True}
    spark = {**SPECULATORS, "speculators_model_type": "dspark", "sample_from_anchor": None}
    found = {
        name: parse_draft(config)
        for name, config in {
            "old": DRAFTER,
            "new": new,
            "spec": SPECULATORS,
            "first": first,
            "spark": spark,
            "deep": DEEPSPEC,
        }.items()
    }
    assert {
        name: (c.format, c.slot_convention, c.num_draft_tokens, c.num_verify_rows)
        for name, c in found.items()
    } == {
        "old": ("z-lab-old", "anchor-dropped", 15, 16),
        "new": ("z-lab", "anchor-dropped", 15, 16),
        "spec": ("speculators", "anchor-dropped", 15, 16),
        "first": ("speculators", "anchor-first", 16, 17),
        "spark": ("speculators", "anchor-first", 16, 17),
        "deep": ("deepspec", "anchor-first", 7, 8),
    }
    sources = {name: c.block_size_source for name, c in found.items()}
    assert sources["old"] == "block_size" and sources["new"] == "dflash_config.block_size"
    assert found["spec"].verifier == "Qwen/Qwen3-8B"
    assert all(c.target_layer_ids == (1, 9, 17, 25, 33) for c in found.values())
    for config in found.values():
        config.check_target(ModelConfig.from_hf(TARGET))


def test_formats_say_the_same() -> None:
    """Bug: one drafter becomes two configs, depending on the format that it was saved in."""
    wanted = parse_draft(DRAFTER)
    found = replace(parse_draft(SPECULATORS), verifier=None, num_target_layers=36)
    assert replace(found, model=replace(found.model, eos_token_ids=(151645,))) == wanted
    deep = replace(parse_draft(DEEPSPEC), block_size=16, slot_convention="anchor-dropped")
    assert deep == wanted


def test_written_formats_parse(tmp_path: Path) -> None:
    """Bug: transformer_layer_config as transformers writes it (rope_parameters, no theta at the top
    level) is not understood."""
    target = make_target(tmp_path / "target", layers=3, tokenizer=False)
    z_lab = make_drafter(
        tmp_path / "z", target, head_dim=128, layers=3, sliding="sfs", window=4096, taps=(2, 0)
    )
    written = as_speculators(tmp_path / "s", z_lab, target)
    config, source = read_json(written / "config.json")
    wanted = parse_draft(*read_json(z_lab / "config.json"))
    found = parse_draft(config, source)
    assert found.model == wanted.model
    assert found.attention_rules == wanted.attention_rules != ()
    assert found.target_layer_ids == (2, 0)
    deep = parse_draft(*read_json(as_deepspec(tmp_path / "d", z_lab, target) / "config.json"))
    assert deep.target_layer_ids == (2, 0) and deep.block_size == wanted.block_size


# --- T22, T23: which keys a layer sees ---

FULL, FULL_CAUSAL = AttentionRule(causal=False), AttentionRule(causal=True)
MIX: Json = {
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 2048,
    "use_sliding_window": True,
}


def four_and_one(sliding_causal: bool, full_causal: bool) -> tuple[AttentionRule, ...]:
    sliding = AttentionRule(causal=sliding_causal, window=2048)
    return (sliding,) * 4 + (AttentionRule(causal=full_causal),)


RULES: dict[str, tuple[Json, tuple[AttentionRule, ...]]] = {
    "full": ({}, (FULL,) * 5),
    "no-types": ({"layer_types": MISSING}, (FULL,) * 5),
    "said-causal": ({"is_causal": True}, (FULL_CAUSAL,) * 5),
    "said-causal-inside": ({"dflash__causal": True}, (FULL_CAUSAL,) * 5),
    "mixed": (MIX, four_and_one(True, False)),
    "widths-of-no-layer": ({"dflash__swa_window_size": 64, "sliding_window": 4096}, (FULL,) * 5),
    "full-flagged": (
        {"layer_types": ["full_attention"] * 5, "use_sliding_window": True},
        (FULL,) * 5,
    ),
    "mixed-unflagged": ({**MIX, "use_sliding_window": MISSING}, four_and_one(True, False)),
    "not-causal": ({**MIX, "is_causal": False}, four_and_one(False, False)),
    "not-causal-inside": ({**MIX, "dflash__causal": False}, four_and_one(False, False)),
    "top-level-first": (
        {**MIX, "is_causal": False, "dflash__causal": True},
        four_and_one(False, False),
    ),
    "is_causal-first": ({"dflash__is_causal": True, "dflash__causal": False}, (FULL_CAUSAL,) * 5),
    "all-causal": ({**MIX, "is_causal": True}, four_and_one(True, True)),
    "mixed-use_swa": ({**MIX, "dflash__use_swa": True}, four_and_one(True, False)),
    "use_swa": (
        {"layer_types": MISSING, "dflash__use_swa": True, "sliding_window": 1024},
        (AttentionRule(causal=False, window=1024),) * 5,
    ),
    "use_swa-own-size": (
        {
            "layer_types": MISSING,
            "dflash__use_swa": True,
            "dflash__swa_window_size": 64,
            "sliding_window": 4096,
        },
        (AttentionRule(causal=False, window=64),) * 5,
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_attention_rules(name: str) -> None:
    """Bug T22, T23: sliding layers are taken for full ones, or for non-causal ones; or a drafter is
    refused for what none of its layers has."""
    keys, wanted = RULES[name]
    assert parse_draft(changed(DRAFTER, **keys)).attention_rules == wanted


@pytest.mark.parametrize("non_causal", [True, False])
def test_speculators_attention_rules(non_causal: bool) -> None:
    """Bug T22: sliding_window_non_causal is ignored, or makes full layers causal."""
    config = inside(SPECULATORS, "transformer_layer_config", **MIX)
    config["sliding_window_non_causal"] = non_causal
    assert parse_draft(config).attention_rules == four_and_one(not non_causal, False)


def test_nested_keys_win_and_are_named() -> None:
    """Bug T34: block sizes at both places differ and nobody hears of it, or equal ids are named."""
    outer = {"block_size": 7, "mask_token_id": DRAFTER["dflash_config"]["mask_token_id"]}
    config = parse_draft(changed(DRAFTER, **outer, dflash__block_size=16))
    assert config.block_size == 16 and config.block_size_source == "dflash_config.block_size"
    (note,) = config.notes
    assert "block_size is 7" in note and "16 in dflash_config" in note


def test_a_null_inside_is_no_value() -> None:
    """Bug: a null in dflash_config hides what the top level says: a right drafter is refused."""
    config = parse_draft(changed(DRAFTER, block_size=7, dflash__block_size=None))
    assert (config.block_size, config.block_size_source, config.notes) == (7, "block_size", ())


def test_the_top_level_s_causality_wins_and_is_named() -> None:
    """Bug: of two `is_causal` the inner one counts, or the note says that it does."""
    config = parse_draft(changed(DRAFTER, **MIX, is_causal=False, dflash__is_causal=True))
    assert config.attention_rules == four_and_one(False, False)
    (note,) = config.notes
    assert note.startswith("is_causal is False") and note.endswith("the top level counts")


def test_wrong_speculative_tokens_are_named() -> None:
    """Bug T07: a file that counts the anchor among its speculative tokens (an exporter did) drafts
    a token more than its block has, or nobody says so since another of its methods does not."""
    block = copy.deepcopy(SPECULATORS["speculators_config"])
    block["proposal_methods"] = [{"speculative_tokens": count} for count in (16, 15)]
    config = parse_draft({**SPECULATORS, "speculators_config": block})
    assert config.num_draft_tokens == 15 and config.notes[-1] == (
        "speculative_tokens 16 does not follow from block_size 16: 15 tokens are drafted"
    )


def test_other_sizes() -> None:
    """Bug: fc, tables or taps are sized by the drafter where the target counts, or vice versa."""
    config = parse_draft({**SPECULATORS, "target_hidden_size": 5120, "draft_vocab_size": 32000})
    assert (config.tap_size, config.num_draft_ids) == (5120, 32000)
    target = ModelConfig.from_hf(changed(TARGET, hidden_size=5120))
    config.check_target(target)
    with pytest.raises(ValueError, match="target_hidden_size 5120 differs from the target's 4096"):
        config.check_target(ModelConfig.from_hf(TARGET))
    plain = parse_draft(SPECULATORS)
    assert (plain.tap_size, plain.num_draft_ids) == (4096, 151936)
    assert plain.draft_vocab_size is None


def test_one_row_that_drafts() -> None:
    """Bug: an anchor-first block of one row, which drafts one token, is refused; or an
    anchor-dropping one, which drafts none, is not."""
    config = parse_draft({**DEEPSPEC, "block_size": 1})
    assert (config.num_draft_tokens, config.num_verify_rows) == (1, 2)
    with pytest.raises(ValueError, match="block_size holds 1"):
        parse_draft({**SPECULATORS, "block_size": 1})


def test_taps_at_the_edge_of_the_target() -> None:
    """Bug T02: the last layer as a tap is refused, or one past it is not: the first index that the
    target lacks is what a file with the other index convention holds."""
    for last, fits in ((36, True), (37, False)):
        config = parse_draft({**SPECULATORS, "aux_hidden_state_layer_ids": [2, last]})
        if fits:
            config.check_target(ModelConfig.from_hf(TARGET))
            continue
        with pytest.raises(ValueError, match=r"\[1, 36\] reach past the target's 36 layers"):
            config.check_target(ModelConfig.from_hf(TARGET))


# --- refusals ---

REFUSED: dict[str, tuple[Json, str]] = {
    "other-speculator": ({**SPECULATORS, "speculators_model_type": "eagle3"}, "'eagle3'"),
    "no-layers": ({**SPECULATORS, "transformer_layer_config": None}, "transformer_layer_config"),
    "llama-layers": (
        inside(SPECULATORS, "transformer_layer_config", model_type="llama"),
        "model_type 'llama'",
    ),
    "no-theta": (
        inside(SPECULATORS, "transformer_layer_config", rope_theta=MISSING),
        "no rope_theta",
    ),
    "no-taps": ({**SPECULATORS, "aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids"),
    "empty-taps": ({**SPECULATORS, "aux_hidden_state_layer_ids": []}, "expected a list"),
    "taps-in-words": ({**SPECULATORS, "aux_hidden_state_layer_ids": "2, 10"}, "expected a list"),
    "embedding-tap": (
        {**SPECULATORS, "aux_hidden_state_layer_ids": [0, 2]},
        "aux_hidden_state_layer_ids holds 0",
    ),
    "same-taps": (
        {**SPECULATORS, "aux_hidden_state_layer_ids": [2, 2]},
        r"aux_hidden_state_layer_ids \[2, 2\] has duplicates",
    ),
    "no-mask": ({**SPECULATORS, "mask_token_id": None}, "no mask_token_id"),
    "no-block": ({**SPECULATORS, "block_size": None}, "no block_size"),
    "no-draft-vocab": ({**SPECULATORS, "draft_vocab_size": None}, "no draft_vocab_size"),
    "domino": ({**SPECULATORS, "projector_type": "domino"}, "projector_type = 'domino'"),
    "shifted": ({**SPECULATORS, "shift_label": True}, "shift_label = True"),
    "inner-interleaved": (
        inside(SPECULATORS, "transformer_layer_config", is_neox_style=False),
        "transformer_layer_config: is_neox_style = False",
    ),
    "inner-soft-cap": (
        inside(SPECULATORS, "transformer_layer_config", final_logit_softcapping=30.0),
        "transformer_layer_config: final_logit_softcapping = 30.0",
    ),
    "spark-markov": (
        {**SPECULATORS, "speculators_model_type": "dspark", "markov_rank": 256},
        "markov_rank = 256",
    ),
    "spark-confidence": (
        {**SPECULATORS, "speculators_model_type": "dspark", "enable_confidence_head": True},
        "enable_confidence_head = True",
    ),
    "verifier-number": (
        {**SPECULATORS, "speculators_config": {"verifier": {"name_or_path": 3}}},
        "name_or_path is 3",
    ),
    "flag-text": ({**SPECULATORS, "sample_from_anchor": "yes"}, "sample_from_anchor is 'yes'"),
    "deepspec-markov": ({**DEEPSPEC, "markov_rank": 256}, "markov_rank = 256"),
    "deepspec-dropped": ({**DEEPSPEC, "sample_from_anchor": False}, "sample_from_anchor is false"),
    "deepspec-embedding": ({**DEEPSPEC, "target_layer_ids": [-1, 3]}, "holds -1"),
    "window-off": ({**DRAFTER, **MIX, "use_sliding_window": False}, "use_sliding_window False"),
    "window-missing": ({**DRAFTER, **MIX, "sliding_window": None}, "sliding_window is None"),
    "window-zero": ({**DRAFTER, **MIX, "sliding_window": 0}, "sliding_window holds 0"),
    "window-unused": (
        {**DRAFTER, "use_sliding_window": True, "layer_types": None},
        "there are no layer_types",
    ),
    "chunked": ({**DRAFTER, "layer_types": ["chunked_attention"] * 5}, "chunked_attention"),
    "swa-no-width": (changed(DRAFTER, layer_types=MISSING, dflash__use_swa=True), "use_swa"),
    "two-lists-of-taps": (
        changed(DRAFTER, dflash__layer_ids=[0, 8, 16, 24, 32]),
        r"layer_ids \[0, 8, 16, 24, 32\] and target_layer_ids",
    ),
    "two-windows": (
        changed(DRAFTER, **MIX, dflash__swa_window_size=1024),
        "swa_window_size 1024 and sliding_window 2048 disagree",
    ),
    "swa-full": (changed(DRAFTER, dflash__use_swa=True, sliding_window=8), "use_swa is true"),
    "two-ropes": (
        {
            **DRAFTER,
            **MIX,
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6},
                "sliding_attention": {"rope_theta": 1e4},
            },
        },
        "rope_parameters per layer type",
    ),
    "two-taps": (
        {**DRAFTER, "eagle_aux_hidden_state_layer_ids": [1, 9, 17, 25, 33]},
        "eagle_aux_hidden_state_layer_ids",
    ),
    "rope-types-number": (
        {**DRAFTER, "layer_types": 5, "rope_parameters": {"x": {"rope_theta": 1e6}}},
        "rope_parameters per layer type",
    ),
    "laguna": (changed(DRAFTER, architectures=["LagunaDFlashModel"]), "LagunaDFlashModel"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    """Bug: what is not supported is ignored, so that the drafter drafts noise."""
    config, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as caught:
        parse_draft(config, "here/config.json")
    assert str(caught.value).startswith("here/config.json: ")


def test_one_rope_for_two_layer_types() -> None:
    """Bug: equal ropes under two names are refused, or the top level's theta wins."""
    rope = {"rope_theta": 1e7, "rope_type": "default"}
    nested = {"full_attention": rope, "sliding_attention": rope}
    config = parse_draft({**DRAFTER, **MIX, "rope_parameters": nested})
    assert config.model.rope.theta == 1e7


@settings(deadline=None, max_examples=examples(300))
@given(
    base=st.sampled_from([SPECULATORS, DEEPSPEC, {**DRAFTER, **MIX}]),
    keys=st.dictionaries(
        st.sampled_from(sorted({*SPECULATORS, *DEEPSPEC, *MIX, "is_causal", "target_hidden_size"})),
        JSON_VALUES,
        max_size=3,
    ),
)
def test_any_json_parses_or_is_refused(base: Json, keys: Json) -> None:
    """Bug: a damaged file ends in a TypeError, or without the file's name."""
    message, config = "", None
    try:
        config = parse_draft({**base, **keys}, "some/config.json")
    except ValueError as error:
        message = str(error)
    if config is None:
        assert message.startswith("some/config.json: ")
        return
    assert config.num_verify_rows == config.num_draft_tokens + 1 >= 2
    assert len(config.attention_rules) == config.model.num_hidden_layers
    hash(config)
