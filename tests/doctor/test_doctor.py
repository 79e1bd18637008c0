"""`doctor` on pairs that work, in every format, and on options that do not; it never crashes.

The engine is the reference: what loads has no error finding, what is refused has one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from graphengine.api import Engine
from graphengine.checkpoints.hub import TINY_DRAFT, TINY_TARGET
from graphengine.config.bytesize import format_bytes
from graphengine.config.draft import DraftConfig
from graphengine.doctor.findings import error, guarded, one_line
from graphengine.startup import memory
from tests.support.checkpoints import as_deepspec, as_speculators, make_drafter
from tests.support.doctored import (
    check,
    drop_tensor,
    errors,
    load,
    named,
    put_tensor,
)


def test_good_pairs_have_no_error(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a check that is too strict turns a user away from a pair that works."""
    monkeypatch.setattr(memory, "host_memory_bytes", lambda: 64 << 30)
    for models in (pair, (TINY_TARGET, TINY_DRAFT), ("qwen3-8b", "qwen3-8b-dflash-b16")):
        found = check(*models)
        assert not found.has_errors, errors(found)
        assert found.memory_plan is not None
        # On the CPU, and on whatever machine this test runs.
        warned = {f.name for f in found.findings if f.level == "warning"}
        assert not {name for name in warned if not name.startswith("host.")} - {"speed.device"}
    assert not check(pair[0], None).has_errors


def test_a_drafter_without_files(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Bug: --draft ngram is examined as no drafter at all, so that options which `run` takes are
    refused, positions are another number, and a speculators file's own drafter is looked at."""
    found = check(pair[0], "ngram", num_speculative_tokens=4)
    assert not found.has_errors, errors(found)
    assert found.draft == "ngram" and not named(found, "speed.draft")
    assert "block of 5" in named(found, "run.context")[0].value
    with Engine.from_pretrained(pair[0], "ngram", num_speculative_tokens=4, device="cpu") as engine:
        assert engine.num_draft_tokens == 4
    spec = as_speculators(tmp_path / "spec", pair[1], pair[0])
    assert check(spec, "ngram").draft == "ngram"


def test_what_is_reported(pair: tuple[Path, Path]) -> None:
    """Bug: a property that the engine goes by is missing from the report, or is another one's."""
    found = check(TINY_TARGET, TINY_DRAFT)
    expected = {
        "draft.format": "z-lab-old",
        "draft.slots": "anchor-dropped",
        "draft.taps": "1, 3, 5, 6",
        "draft.block_size": "16 rows, 15 drafts a step, read from block_size",
        "draft.layers": "3 x full, non-causal",
        "draft.rope": "theta 1000000, 64 rotary dims of 64, not scaled",
        "target.rope": "theta 1000000",
        "target.head": "the embedding",
        "target.weights": "90 tensors, 7.51 MiB, none missing",
        "target.tokenizer": "2043 tokens for 2048 rows of the embedding",
        "target.stop_tokens": "2042, 2040 from generation_config.json",
        "pair.mask_token": "2043 of 2048 rows",
        "pair.theta": "1000000 in both",
        "run.context": "64 tokens a request; the models allow 4080 with drafting",
    }
    for name, text in expected.items():
        (finding,) = named(found, name)
        assert text in finding.value
        assert finding.level == "ok"
    assert found.num_by_level["ok"] > 25
    nested = check(*pair)
    assert "read from dflash_config.block_size" in named(nested, "draft.block_size")[0].value


PUBLISHED = {
    "gpt-oss-20b": {
        "target.config": "24 layers, hidden 2880, 32 experts x 2880, 4 a token, heads 64/8 x 64, "
        "vocabulary 201088, 131072 positions, biases",
        "target.rope": "theta 150000, 64 rotary dims of 64, yarn x 32 from 4096 positions, "
        "amplitude 1.34657",
        "target.head": "its own",
        "draft.config": "8 layers, hidden 2880, MLP 7680, heads 64/8 x 64, vocabulary 201088, "
        "131072 positions",
        "draft.block_size": "8 rows, 7 drafts a step, read from block_size",
        "draft.layers": "8 x full, non-causal",
        "pair.mask_token": "200000 of 201088 rows",
        "pair.theta": "150000 in both",
    },
    "qwen3.6-35b-a3b": {
        "target.config": "40 layers, hidden 2048, 256 experts x 512, 8 a token and a shared one x "
        "512, heads 16/2 x 256, vocabulary 248320, 262144 positions",
        "target.rope": "theta 10000000, 64 rotary dims of 256, not scaled",
        "target.stop_tokens": "248044 from config.json",
        "draft.taps": "after target layers 1, 6, 11, 16, 22, 27, 32, 37 (counted from 0)",
        "draft.layers": "5 x window 4096, causal; 1 x full, non-causal",
        "pair.num_layers": "40 in both",
        "pair.hidden_size": "2048 in both",
        "pair.vocabulary": "248320 in both",
        "pair.rotary_dims": "drafter 128, target 64",
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_said_of_published_shapes(name: str) -> None:
    """Bug: a size of a model is told as another one: heads of keys as those of queries, an expert's
    width as their number, rotary dims as the head's."""
    block = "b8" if name == "gpt-oss-20b" else "b16"
    found = check(name, f"{name}-dflash-{block}", max_model_len=None).findings
    told = {finding.name: finding.value for finding in found}
    expected = PUBLISHED[name]
    assert {key: told[key] for key in expected} == expected


def test_options_that_cannot_work(pair: tuple[Path, Path]) -> None:
    """Bug: a refusal of the options or of the memory plan ends the report, or is left out."""
    found = check(*pair, max_model_len=9999)
    assert errors(found) == ["run.options"]
    found = check(*pair, kv_cache_memory=100)
    assert errors(found) == ["run.memory"]
    assert found.memory_plan is None
    found = check(*pair, graph_mode="full", device="cpu")
    assert errors(found) == ["run.options"]


FORMATS: dict[str, Callable[[Path, Path], Path]] = {
    "z-lab": lambda d, t: make_drafter(d / "z", t),
    "z-lab-old": lambda d, t: make_drafter(d / "z", t, nested=False),
    "mixed layers": lambda d, t: make_drafter(d / "z", t, layers=3, sliding="sfs", window=5),
    "own tables": lambda d, t: make_drafter(d / "z", t, own_embedding=True, own_head=True),
    "other width": lambda d, t: make_drafter(d / "z", t, hidden=96, heads=3, kv_heads=1),
    "speculators": lambda d, t: as_speculators(d / "s", make_drafter(d / "z", t), t),
    "few ids": lambda d, t: as_speculators(d / "s", make_drafter(d / "z", t), t, kept=[3, 7, 300]),
    "anchor first": lambda d, t: as_speculators(
        d / "s", make_drafter(d / "z", t), t, sample_from_anchor=True
    ),
    "deepspec": lambda d, t: as_deepspec(d / "s", make_drafter(d / "z", t), t),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_that_loads_passes(pair: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    """Bug: a format that the engine runs has an error in doctor, or tensors of its own that the
    memory plan does not count."""
    target = pair[0]
    draft = FORMATS[name](tmp_path, target)
    found = check(target, draft)
    assert not found.has_errors, [f for f in found.findings if f.level == "error"]
    plan = found.memory_plan
    assert plan is not None
    with load(target, draft) as engine:
        assert plan == engine.memory_plan
        config, loop = engine.built.draft, engine.built.loop
        assert isinstance(config, DraftConfig)
        assert f"{config.format}: " in named(found, "draft.format")[0].value
        assert (
            f"{config.num_draft_tokens} drafts a step" in named(found, "draft.block_size")[0].value
        )
        assert plan.step_buffer_bytes == loop.first.builder.arena.num_bytes
        weights = plan.target_weight_bytes + plan.draft_weight_bytes + plan.rope_table_bytes
        if name == "deepspec":  # copies of the target's tables, which only their values tell
            assert weights > engine.startup.weight_bytes
        else:
            assert weights == engine.startup.weight_bytes


def num_bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_speculators_file_alone_finds_its_target(copies: tuple[Path, Path], tmp_path: Path) -> None:
    """Bug: a drafter that names its target must be passed with it nevertheless; its id map is not
    looked at before it is used."""
    target = copies[0]
    draft = as_speculators(tmp_path / "s", copies[1], target, kept=[3, 7, 300])
    for found in (check(draft, None), check(target, draft)):
        assert not found.has_errors, errors(found)
        assert (found.target, found.draft) == (str(target), str(draft))
        assert "after target layers 0, 2 " in named(found, "draft.taps")[0].value
        assert named(found, "pair.verifier")[0].level == "ok"
        assert "3 of 512 tokens" in named(found, "pair.draft_vocabulary")[0].value
        assert "its own [3, 64]" in named(found, "draft.head")[0].value
    (finding,) = named(check(draft, None), "draft.verifier")
    assert finding.value == f"{draft} is a drafter of {target}"
    assert (check(draft, "none").target, check(draft, "none").draft) == (str(target), None)
    assert check(draft, "none-of-these").has_errors
    put_tensor(draft, "d2t", torch.ones(3))
    assert errors(check(draft, None)) == ["draft.weights.dtype"]
    drop_tensor(draft, "d2t")
    assert "d2t, which is missing" in named(check(draft, None), "pair.draft_vocabulary")[0].value
    with pytest.raises(ValueError, match="d2t"):
        load(target, draft)


def test_bytes_of_an_id_map(copies: tuple[Path, Path], tmp_path: Path) -> None:
    """Bug: ids of eight bytes are counted as one byte each, like what has no known type."""
    draft = as_speculators(tmp_path / "s", copies[1], copies[0], kept=list(range(500)))
    size = format_bytes(num_bytes(*load_file(draft / "model.safetensors").values()))
    assert f" {size}, none missing" in named(check(draft, None), "draft.weights")[0].value


def test_a_crashing_check_is_a_finding() -> None:
    """Bug: one check that fails takes the findings of all others with it."""

    def broken() -> Any:
        yield error("a", "b", "c")
        raise KeyError("gone\n\x1b[31m")

    first, second = guarded("part", broken())
    assert first.name == "a"
    assert second.level == "error"
    assert "KeyError" in second.value
    assert second.value.isprintable()
    assert len(one_line("x" * 5000)) == 400


def test_a_row_is_one_line() -> None:
    """Bug: a message of several lines tears its row apart, or its indents stand in the middle."""
    assert one_line("a\tkey:\r\n    wrong\n") == "a key: wrong"
