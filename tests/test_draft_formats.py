"""Every draft format decodes as the independent reference says, at forced acceptance lengths.

The output is right whatever a drafter does, so what is compared are its logits and proposals, step
by step, with tests/dflash_reference.py, which reads the same files by its own rules.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from graphengine import forward
from graphengine.api import Engine
from graphengine.hub import TINY_DRAFT, TINY_TARGET
from tests.checkpoints import as_deepspec, as_speculators, edit_config, make_drafter, make_target
from tests.dflash_reference import (
    DraftReference,
    force_drafts,
    load_target,
    plain_generate,
    run_target,
    speculative_generate,
)

NUM_TOKENS = 40
PROMPTS = [[11, 300, 7, 45, 212], [9], list(range(40, 61))]
KEPT = [*range(3, 260, 2), 300, 302, 511]
LLAMA3 = {
    "rope_theta": 5e4,
    "rope_scaling": {
        **{"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 32,
    },
}
YARN = {
    "rope_theta": 5e4,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}

Maker = Callable[[Path, Path], Path]
"""(directory, target) -> a drafter's directory."""


def z_lab(**options: Any) -> Maker:
    return lambda directory, target: make_drafter(directory / "z-lab", target, **options)


def speculators(z: dict[str, Any] | None = None, **options: Any) -> Maker:
    def make(directory: Path, target: Path) -> Path:
        made = z_lab(**(z or {}))(directory, target)
        return as_speculators(directory / "speculators", made, target, **options)

    return make


def deepspec(**options: Any) -> Maker:
    def make(directory: Path, target: Path) -> Path:
        return as_deepspec(directory / "deepspec", z_lab(**options)(directory, target), target)

    return make


MIXED: dict[str, Any] = {"layers": 3, "sliding": "sfs"}
FORMATS: dict[str, Maker] = {
    "z-lab": z_lab(taps=(2, 0)),
    "z-lab-old": z_lab(nested=False, block_size=6),
    "causal-window": z_lab(sliding="ss", window=6),
    "mixed": z_lab(**MIXED, window=5),
    # Shorter than the block: a row does not see the block's end either.
    "window-both-ways": z_lab(
        sliding="ss", window=3, block_size=6, extra={"is_causal": False}, taps=(0, 1, 2)
    ),
    "mixed-non-causal": z_lab(**MIXED, window=9, dflash_extra={"causal": False}),
    "all-causal": z_lab(**MIXED, window=7, extra={"is_causal": True}),
    "use_swa": z_lab(extra={"layer_types": None}, window=6, dflash_extra={"use_swa": True}),
    "anchor-first": z_lab(dflash_extra={"sample_from_anchor": True}),
    "own-tables": z_lab(own_embedding=True, own_head=True),
    "other-width": z_lab(hidden=96, heads=3, kv_heads=1, head_dim=64, bias=True, rope=LLAMA3),
    "speculators": speculators(rope=YARN, verifier="elsewhere") if False else speculators(),
    "speculators-mixed": speculators(z={**MIXED, "window": 5, "rope": YARN}),
    "speculators-non-causal": speculators(z={**MIXED, "window": 5, "extra": {"is_causal": False}}),
    "speculators-few-ids": speculators(kept=KEPT),
    "speculators-own-head": speculators(z={"hidden": 96}, kept=KEPT, block_size=5),
    "speculators-anchor-first": speculators(kept=KEPT, sample_from_anchor=True),
    "deepspec": deepspec(block_size=3),
    "deepspec-bias": deepspec(bias=True, head_dim=64, block_size=5),
}


class Pair(NamedTuple):
    """The one target of this file, with transformers' model of it and its plain output."""

    directory: Path
    model: Any
    truth: dict[tuple[int, ...], list[int]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = make_target(tmp_path_factory.mktemp("pair") / "target", layers=3)
    model = load_target(directory)
    truth = {tuple(p): plain_generate(model, p, NUM_TOKENS + 12) for p in PROMPTS}
    return Pair(directory, model, truth)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", FORMATS)
def test_drafts_equal_reference(
    tmp_path: Path, pair: Pair, name: str, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: taps are not converted, a window or a causality is ignored or off by one, ids of the
    reduced vocabulary are taken for the target's, the wrong head or embedding is used, or the
    anchor's row is dropped (or kept) against the format."""
    drafter = FORMATS[name](tmp_path, pair.directory)
    reference = DraftReference.load(drafter, pair.model)
    logits: list[torch.Tensor] = []
    plain_argmax = forward.argmax_rows

    def spy(logits_TV: torch.Tensor) -> torch.Tensor:
        logits.append(logits_TV.clone())
        return plain_argmax(logits_TV)

    rng = random.Random(7)
    with Engine.from_pretrained(
        pair.directory,
        drafter,
        buckets=(4,),
        page_size=4,
        max_model_len=96,
        attention_backend=backend,
    ) as engine:
        monkeypatch.setattr(forward, "argmax_rows", spy)
        num_drafts = engine.num_draft_tokens
        assert num_drafts == reference.num_drafts
        prefill = engine.built.loop._prefill
        assert prefill.drafter is not None
        for pool in (prefill.target.kv_pool, prefill.drafter.kv_pool):
            pool[:, :, 1:].fill_(float("nan"))
        forced = force_drafts(engine, pair.truth, lambda request, step: rng.randint(0, num_drafts))
        results = engine.generate(PROMPTS, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    ids = []
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.token_ids == pair.truth[tuple(prompt)][:NUM_TOKENS]
        assert sum(result.metrics.acceptance.steps_by_accepted) > 0
        ids.append(prompt + result.token_ids)
    taps = [reference.taps(run_target(pair.model, sequence)) for sequence in ids]
    draft_logits = logits[::2]  # one call a draft, one a verify
    checked = 0
    for drafts in forced.drafted:
        start, row = drafts.start, drafts.row
        if start >= len(ids[drafts.request_id]):
            continue  # a step that was in flight when the request ended
        anchor = ids[drafts.request_id][start]
        wanted = reference.draft_logits(taps[drafts.request_id][:start], anchor)
        found = draft_logits[drafts.run][row * num_drafts : (row + 1) * num_drafts]
        torch.testing.assert_close(found, wanted, atol=3e-4, rtol=1e-4)
        assert drafts.ids == [anchor, *reference.drafts(wanted)]
        checked += 1
    assert checked >= 15
    lengths = {a for counts in forced.expected.values() for a in counts}
    assert lengths == set(range(num_drafts + 1))


@pytest.mark.parametrize("name", ["mixed", "speculators-anchor-first", "deepspec"])
def test_own_drafts_are_accepted_alike(tmp_path: Path, name: str) -> None:
    """Bug: unforced, a format loses drafts that the reference would have accepted."""
    target = make_target(tmp_path / "target", layers=3, tie=False, likely_tokens=3)
    drafter = FORMATS[name](tmp_path, target)
    if name != "deepspec":  # ids that come up are among the first
        edit_config(drafter, lambda config: config)
    reference = DraftReference.load(drafter, load_target(target))
    tokens, counts = speculative_generate(reference, PROMPTS[0], 50)
    with Engine.from_pretrained(target, drafter, buckets=(1,), page_size=4) as engine:
        (result,) = engine.generate(PROMPTS[0], max_new_tokens=50, ignore_eos=True)
    assert result.token_ids == tokens[:50]
    histogram = [counts.count(a) for a in range(reference.num_drafts + 1)]
    assert result.metrics.acceptance.steps_by_accepted == histogram
    if name != "speculators-anchor-first":  # its vocabulary has one of the likely tokens
        assert sum(histogram[1:]) >= 3, "never agrees, the test would be vacuous"
