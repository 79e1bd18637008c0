"""Experts in a config.json: every key is read, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from graphengine.config.model import ARCHITECTURES
from graphengine.config.moe import Clamp, MoeConfig, MoeKeys
from graphengine.config.values import RawConfig

KEYS = MoeKeys(norm_topk_prob=True, reads_norm_key=False, is_clamped=True)
VALUES = {"num_local_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 160}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two counts": ({"num_experts": 5}, "num_experts 5 and num_local_experts 8 disagree"),
    "two choices": ({"experts_per_token": 2}, "num_experts_per_tok 4 and experts_per_token 2"),
    "an alias alone": (
        {"num_experts_per_tok": None, "experts_per_token": 2},
        "no num_experts_per_tok, which is never guessed",
    ),
    "more than there are": (
        {"num_experts_per_tok": 9},
        "num_experts_per_tok holds a number past 8; the file is damaged",
    ),
    "no width": ({"intermediate_size": None}, "no intermediate_size"),
    "limit": ({"swiglu_limit": "seven"}, "swiglu_limit is 'seven', expected a number"),
    "negative": ({"swiglu_limit": -7.0}, "swiglu_limit is -7.0, expected at least 0"),
    "alpha": ({"swiglu_alpha": True}, "swiglu_alpha is True, expected a number"),
    "past float32": ({"swiglu_limit": 1e300}, r"swiglu_limit is 1e\+300, expected at most 1e\+30"),
    "not normalised": ({"norm_topk_prob": False}, "norm_topk_prob False has no meaning"),
    "shared": ({"shared_expert_intermediate_size": 32}, "no shared expert"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_configs_refused(name: str) -> None:
    """Bug: a key that changes the result is not read, or of two that disagree one is taken, or a
    name that transformers does not know: without num_experts_per_tok it takes 4; or a row that
    takes more experts than there are ends in a traceback of the first step."""
    change, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        MoeConfig.from_raw(RawConfig(VALUES | change, "config.json"), KEYS)


def test_spellings_and_defaults() -> None:
    """Bug: the alias of a published file is not known, a limit of its own is passed over, or other
    families are clamped."""
    values = {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 160}
    found = MoeConfig.from_raw(RawConfig(values | {"experts_per_token": 3}, ""), KEYS)
    assert (found.num_experts, found.num_experts_per_tok, found.moe_intermediate_size) == (
        8,
        3,
        160,
    )
    assert found.norm_topk_prob and found.clamp == Clamp(alpha=1.702, limit=7.0)
    own = {"swiglu_limit": 3, "swiglu_alpha": 1.5}
    assert MoeConfig.from_raw(RawConfig(values | own, ""), KEYS).clamp == Clamp(1.5, 3.0)
    plain = {**values, **own, "moe_intermediate_size": 20}
    ordinary = MoeConfig.from_raw(RawConfig(plain, ""), MoeKeys(norm_topk_prob=True))
    assert ordinary.clamp is None and ordinary.moe_intermediate_size == 20


def test_a_width_of_nothing_is_no_shared_expert() -> None:
    """Bug: a file that says that no expert is shared, by a width of 0, is refused as if it had
    one."""
    raw = RawConfig(VALUES | {"shared_expert_intermediate_size": 0}, "config.json")
    assert MoeConfig.from_raw(raw, KEYS).shared_expert_intermediate_size == 0


@pytest.mark.parametrize("model_type", [name for name, a in ARCHITECTURES.items() if a.moe])
def test_who_reads_whether_weights_are_divided(model_type: str) -> None:
    """Bug: norm_topk_prob is obeyed in a file of a family whose code in transformers knows no such
    key, which scales every layer's output; or it is another default where the file lacks it."""
    from transformers import AutoConfig

    keys, theirs = ARCHITECTURES[model_type].moe, AutoConfig.for_model(model_type)
    assert keys is not None and keys.reads_norm_key == hasattr(theirs, "norm_topk_prob")
    assert keys.norm_topk_prob == getattr(theirs, "norm_topk_prob", True)
    values = VALUES | {"moe_intermediate_size": 20}
    if keys.has_shared_expert:
        values["shared_expert_intermediate_size"] = 30
    for said in (True, False):
        raw = RawConfig(values | {"norm_topk_prob": said}, "config.json")
        if keys.reads_norm_key or said == keys.norm_topk_prob:
            assert MoeConfig.from_raw(raw, keys).norm_topk_prob is said
        else:
            with pytest.raises(ValueError, match="remove the key"):
                MoeConfig.from_raw(raw, keys)
