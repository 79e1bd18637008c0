"""Whose tables a drafter uses, its reduced vocabulary, and a speculators checkpoint as MODEL.

Sharing wrongly is silent in both directions: the target's head under a reduced vocabulary, or the
drafter's own where it was meant to be the target's, both draft noise and lose acceptance alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import Tensor

from graphengine.api import Engine
from graphengine.checkpoints.hub import TINY_DRAFT, TINY_TARGET
from graphengine.checkpoints.pairs import named_pair, read_json
from graphengine.checkpoints.sources import Checkpoint, RandomSource
from graphengine.checkpoints.weights import draft_vocabulary, draft_weights
from graphengine.checkpoints.weights import target_weights as read_target
from graphengine.cli.main import main
from graphengine.config.draft_formats import parse_draft
from graphengine.config.model import ModelConfig
from graphengine.models.decoder import Weights
from graphengine.models.dflash import DraftVocabulary
from graphengine.startup.build import read_configs
from tests.support.checkpoints import (
    as_deepspec,
    as_speculators,
    edit_config,
    make_drafter,
    make_target,
    output_table,
    write_checkpoint,
)

CPU = torch.device("cpu")
VOCAB = 300
KEPT = [5, 3, 250, 17]  # in no order: an offset may be negative
Tensors = dict[str, Tensor]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_target(tmp_path / "target", tie=False, vocab=VOCAB, layers=3)


def load(target: Path, drafter: Path) -> tuple[Weights, DraftVocabulary]:
    """Both checkpoints, read to the end, so that a tensor nobody asked for is refused."""
    config = ModelConfig.from_hf(*read_json(target / "config.json"))
    weights = read_target(Checkpoint(target, CPU, torch.float32), config, 8, CPU)
    draft = parse_draft(*read_json(drafter / "config.json"))
    draft.check_target(config)
    source = Checkpoint(drafter, CPU, torch.float32)
    vocabulary = draft_vocabulary(source, draft, weights)
    draft_weights(source, draft, 8, CPU)
    return weights, vocabulary


def rewrite(drafter: Path, change: Callable[[Tensors], Any]) -> Path:
    tensors = load_file(drafter / "model.safetensors")
    change(tensors)
    return write_checkpoint(drafter, read_json(drafter / "config.json")[0], tensors)


def test_sharing(tmp_path: Path, target: Path) -> None:
    """Bug T29: the head is shared although the drafter has its own, or is not although it is the
    target's; the same for the embedding. Or marks that have lost their map are passed over."""
    plain = make_drafter(tmp_path / "plain", target)
    cases = {
        "none": (plain, True, True),
        "identical": (as_deepspec(tmp_path / "deepspec", plain, target), True, True),
        "own": (make_drafter(tmp_path / "own", target, own_embedding=True, own_head=True), 0, 0),
        "own-head": (make_drafter(tmp_path / "head", target, own_head=True), True, False),
        "full-map": (as_speculators(tmp_path / "s", plain, target, kept=range(VOCAB)), True, True),
        "few": (as_speculators(tmp_path / "few", plain, target, kept=KEPT), True, False),
    }
    for name, (drafter, shares_embed, shares_head) in cases.items():
        weights, vocabulary = load(target, drafter)
        assert (vocabulary.embed_VD is weights.embed_VD) == bool(shares_embed), name
        assert (vocabulary.lm_head_VD is weights.lm_head_VD) == bool(shares_head), name
        if name != "few":
            assert vocabulary.target_ids_V is None, name
        else:
            assert vocabulary.target_ids_V is not None
            assert vocabulary.target_ids_V.tolist() == KEPT
            assert torch.equal(vocabulary.lm_head_VD, output_table(target)[KEPT])
    marked = rewrite(cases["full-map"][0], lambda tensors: tensors.pop("d2t"))
    with pytest.raises(ValueError, match="'d2t' is missing"):
        load(target, marked)


def test_tied_target(tmp_path: Path) -> None:
    """Bug T31: a tied target has no lm_head.weight to share."""
    target = make_target(tmp_path / "target", tie=True, vocab=VOCAB)
    weights, vocabulary = load(target, make_drafter(tmp_path / "d", target))
    assert vocabulary.lm_head_VD is weights.embed_VD


def test_prefixed_names(tmp_path: Path, target: Path) -> None:
    """Bug T33: an export with `model.` before its names is refused."""

    def prefix(tensors: Tensors) -> None:
        for name in list(tensors):
            if name not in ("lm_head.weight", "d2t", "t2d"):
                tensors[f"model.{name}"] = tensors.pop(name)

    plain = make_drafter(tmp_path / "plain", target, own_embedding=True)
    drafter = rewrite(as_speculators(tmp_path / "s", plain, target, kept=KEPT), prefix)
    weights, vocabulary = load(target, drafter)
    assert vocabulary.embed_VD is not weights.embed_VD


BROKEN: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "no-head": (lambda t: t.pop("lm_head.weight"), "'lm_head.weight' is missing"),
    "no-map": (lambda t: t.pop("d2t"), "'d2t' is missing"),
    "no-maps": (lambda t: (t.pop("d2t"), t.pop("t2d")), "'d2t' is missing"),
    "whole-head": (
        lambda t: t.update({"lm_head.weight": torch.zeros(VOCAB, 64)}),
        r"shape \[300, 64\]",
    ),
    "ids-for-offsets": (
        lambda t: t.update(d2t=torch.tensor([5, 3, 299, 17])),
        "offsets",
    ),
    "one-past-the-end": (
        lambda t: t.update(d2t=torch.tensor([5, 2, 248, VOCAB - 3])),
        f"ids 3 .. {VOCAB}, outside the target's vocabulary of {VOCAB};",
    ),
    "negative": (lambda t: t.update(d2t=torch.tensor([-1, 2, 3, 4])), "ids -1 .. "),
    "t2d-of-another": (
        lambda t: t.update(t2d=torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, t["d2t"], True)),
        "t2d marks",
    ),
    "one-mark-more": (
        lambda t: t.update(t2d=t["t2d"].index_fill(0, torch.tensor([9]), True)),
        "t2d marks 5 ids, which are not the 4 of d2t",
    ),
    "twice": (lambda t: t.update(d2t=torch.tensor([5, 4, 3, 2])), "t2d marks"),
    "float-map": (lambda t: t.update(d2t=torch.zeros(4)), "expected integers"),
    "markov": (lambda t: t.update({"markov_w1.weight": torch.zeros(2, 2)}), "markov_w1.weight"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_maps(tmp_path: Path, target: Path, name: str) -> None:
    """Bug T30, T33: d2t is read as ids, a map of another drafter is used, a tensor is dropped."""
    change, message = BROKEN[name]
    plain = make_drafter(tmp_path / "plain", target)
    drafter = rewrite(as_speculators(tmp_path / "s", plain, target, kept=[5, 3, 250, 17]), change)
    with pytest.raises(ValueError, match=message):
        load(target, drafter)


def test_another_width_needs_its_own_tables(tmp_path: Path, target: Path) -> None:
    """Bug: a drafter of another width takes the target's embedding rows."""
    drafter = make_drafter(tmp_path / "d", target, hidden=96)
    _, vocabulary = load(target, drafter)
    assert vocabulary.embed_VD.shape == vocabulary.lm_head_VD.shape == (VOCAB, 96)
    with pytest.raises(ValueError, match=r"'embed_tokens\.weight' is missing"):
        load(target, rewrite(drafter, lambda t: t.pop("embed_tokens.weight")))


def test_dummy_weights_of_a_reduced_vocabulary(tmp_path: Path, target: Path) -> None:
    """Bug: --load-format dummy asks for a map that is in no file."""
    plain = make_drafter(tmp_path / "plain", target)
    drafter = as_speculators(tmp_path / "s", plain, target, kept=KEPT)
    config = parse_draft(*read_json(drafter / "config.json"))
    weights, _ = load(target, plain)
    vocabulary = draft_vocabulary(RandomSource(CPU, torch.float32), config, weights)
    assert vocabulary.lm_head_VD.shape == (4, 64) and vocabulary.target_ids_V is None
    with Engine.from_pretrained(target, drafter, load_format="dummy", buckets=(1,)) as engine:
        assert len(engine.generate([1, 2], max_new_tokens=5)[0].token_ids) == 5


# --- a speculators checkpoint as MODEL ---


def test_named_pair(tmp_path: Path, target: Path) -> None:
    """Bug: the verifier block is ignored, or wins over what the user named."""
    plain = make_drafter(tmp_path / "plain", target)
    other = make_drafter(tmp_path / "other", target, seed=9)
    drafter = as_speculators(tmp_path / "s", plain, target)
    assert named_pair(None, None) == (str(TINY_TARGET), str(TINY_DRAFT))
    assert named_pair(None, "none") == (str(TINY_TARGET), None)
    assert named_pair(drafter, None) == (str(target), str(drafter))
    assert named_pair(drafter, other) == (str(target), str(other))
    assert named_pair(drafter, "none") == (str(target), None)
    elsewhere = shutil.copytree(target, tmp_path / "elsewhere")
    assert named_pair(elsewhere, drafter) == (str(elsewhere), str(drafter))
    assert named_pair(target, None) == named_pair(target, "none") == (str(target), None)
    beside = as_speculators(tmp_path / "b", plain, target, verifier="../target")
    assert Path(named_pair(beside, None)[0]).resolve() == target.resolve()
    hub = as_speculators(tmp_path / "h", plain, target, verifier="Qwen/Qwen3-8B")
    assert named_pair(hub, None)[0] == "Qwen/Qwen3-8B"
    edit_config(hub, lambda config: config | {"speculators_config": {}})
    with pytest.raises(ValueError, match="names no verifier") as refused:
        named_pair(hub, None)
    assert str(refused.value) == (
        f"{hub}/config.json: a drafter whose speculators_config names no verifier; pass its target "
        f"as MODEL and --draft {hub}"
    )


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-that-name/x", "nul\0", "\ud800/x"])
def test_verifier_that_is_no_name(
    tmp_path: Path, target: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a verifier's name that no system takes, or that no terminal shows, is a traceback."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    plain = make_drafter(tmp_path / "plain", target)
    drafter = as_speculators(tmp_path / "s", plain, target, verifier=name)
    with pytest.raises(ValueError, match="pass a directory"):
        read_configs(drafter, None)
    for extra in ([], ["--json"]):
        done = CliRunner().invoke(main, ["doctor", str(drafter), *extra])
        assert done.exit_code == 1 and isinstance(done.exception, SystemExit), done.exception


def test_alone_it_finds_its_target(tmp_path: Path, target: Path) -> None:
    """Bug: the directory alone is refused as a target, or decodes plainly."""
    plain = make_drafter(tmp_path / "plain", target)
    drafter = as_speculators(tmp_path / "s", plain, target, kept=range(200))
    assert read_configs(drafter, None) == read_configs(target, drafter)
    found = []
    for names in ((drafter,), (target, drafter), (drafter, "none")):
        with Engine.from_pretrained(*names, buckets=(1,), page_size=4) as engine:
            (result,) = engine.generate([7, 8, 9], max_new_tokens=20, ignore_eos=True)
        found.append(
            (engine_drafts := result.metrics.acceptance.num_draft_tokens, result.token_ids)
        )
        assert engine_drafts == (0 if "none" in names else 3)
    assert found[0] == found[1] and found[0][1] == found[2][1]


def test_command_line(tmp_path: Path, target: Path) -> None:
    """Bug: the command says that it decodes plainly, and drafts."""
    drafter = as_speculators(tmp_path / "s", make_drafter(tmp_path / "p", target), target)
    command = ["run", str(drafter), "--prompt", "hi", "--max-new-tokens", "3", "--bucket", "1"]
    for extra, drafts in ([], True), (["--draft", "none"], False):
        done = CliRunner().invoke(main, [*command, *extra])
        assert done.exit_code == 0, done.output
        assert "decoding plainly" not in done.output
        heading = done.output.replace("\n", "")
        assert (f"drafter {drafter}" in heading) == drafts
