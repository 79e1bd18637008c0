"""The drafter equals an independent dense reference, step after step, at forced accept lengths.

Losslessness cannot catch a drafter that is wired wrongly: its output is right anyway. So the ids
and logits that it proposes are compared with support/dflash_reference.py, which recomputes all
from the committed tokens and knows no cache, page or overwrite.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from graphengine.api import Engine
from graphengine.checkpoints.sources import Checkpoint
from graphengine.checkpoints.weights import draft_weights
from graphengine.config.draft_formats import parse_draft
from graphengine.drafters.dflash import DFlash
from graphengine.models import dflash, layers
from tests.support.checkpoints import make_drafter, make_target
from tests.support.dflash_reference import (
    DraftReference,
    force_drafts,
    load_target,
    plain_generate,
    run_target,
    speculative_generate,
)

YARN = {
    "rope_theta": 5e4,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "other-heads": ({"layers": 3}, {"heads": 6, "kv_heads": 3, "head_dim": 32, "taps": (1,)}),
    "tap-last-layer": ({"layers": 3}, {"taps": (2, 0), "layers": 1, "block_size": 8}),
    "untied-bias": (
        {"tie": False, "bias": True, "layers": 3},
        {"bias": True, "taps": (0, 1, 2), "block_size": 5, "nested": False, "layers": 3},
    ),
    "yarn-draft": ({"heads": 2, "kv_heads": 1}, {"rope": YARN, "block_size": 2}),
}
NUM_TOKENS = 60
PROMPTS = [[11, 300, 7, 45, 212], [9], list(range(40, 61))]


def generate_forced(
    target: Path, drafter: Path, model: Any, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[list[list[int]], list[Any], list[Tensor], dict[int, list[int]]]:
    """Decodes PROMPTS with random acceptance: outputs, drafted blocks, draft logits of each step,
    acceptance lengths."""
    truth = {tuple(p): plain_generate(model, p, NUM_TOKENS + 10) for p in PROMPTS}
    logits: list[Tensor] = []
    plain_argmax = layers.argmax_rows

    def spy(logits_TV: Tensor) -> Tensor:
        logits.append(logits_TV.clone())
        return plain_argmax(logits_TV)

    monkeypatch.setattr(layers, "argmax_rows", spy)
    rng = random.Random(5)
    with Engine.from_pretrained(
        target, drafter, buckets=(4,), page_size=4, max_model_len=96, **options
    ) as engine:
        forced = force_drafts(
            engine, truth, lambda request, step: rng.randint(0, engine.num_draft_tokens)
        )
        results = engine.generate(PROMPTS, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.token_ids == truth[tuple(prompt)][:NUM_TOKENS]
    draft_logits = logits[::2]  # one call a draft, one a verify
    return [r.token_ids for r in results], forced.drafted, draft_logits, forced.expected


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", PAIRS)
def test_drafts_equal_reference(
    tmp_path: Path, name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: taps off by one layer, rejected context rows that stay visible, positions or lengths off
    by one after some acceptance length, the target's theta or heads used for the drafter."""
    of_target, of_drafter = PAIRS[name]
    target = make_target(tmp_path / "target", **of_target)
    drafter = make_drafter(tmp_path / "drafter", target, **of_drafter)
    model = load_target(target)
    reference = DraftReference.load(drafter, model)
    outputs, drafted, logits, expected = generate_forced(
        target, drafter, model, monkeypatch, attention_backend=backend
    )
    ids = [p + o for p, o in zip(PROMPTS, outputs, strict=True)]
    taps = [reference.taps(run_target(model, sequence)) for sequence in ids]
    block = reference.block_size
    checked: dict[int, int] = {}
    for drafts in drafted:
        index, start, row = drafts.request_id, drafts.start, drafts.row
        if start >= len(ids[index]):
            continue  # a step that was in flight when the request ended
        assert drafts.ids[0] == ids[index][start]
        found = logits[drafts.run][row * (block - 1) : (row + 1) * (block - 1)]
        wanted = reference.draft_logits(taps[index][:start], ids[index][start])
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
        assert drafts.ids[1:] == wanted.argmax(-1).tolist()
        checked[index] = checked.get(index, 0) + 1
    assert min(checked.values()) >= 20 or block > 4
    assert {a for counts in expected.values() for a in counts} == set(range(block))


@pytest.mark.parametrize("mistake", ["tap", "order", "shift", "causal", "theta", "context"])
def test_comparison_has_teeth(
    tmp_path: Path, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the golden comparison above is too loose to see the classic mistakes."""
    target = make_target(tmp_path / "target", layers=3)
    drafter = make_drafter(tmp_path / "drafter", target, taps=(0, 1))
    model = load_target(target)
    reference = DraftReference.load(drafter, model)
    ids = PROMPTS[2] + plain_generate(model, PROMPTS[2], 10)
    start = len(ids) - 1
    run = run_target(model, ids)
    right = reference.draft_logits(reference.taps(run)[:start], ids[start])
    options: dict[str, Any] = {}
    length = start
    if mistake == "tap":
        reference.config["dflash_config"]["target_layer_ids"] = [1, 2]
    elif mistake == "order":
        reference.config["dflash_config"]["target_layer_ids"] = [1, 0]
    elif mistake == "theta":
        reference.config["rope_theta"] = 1e4
    elif mistake == "context":
        length = start - 1  # a context row lost
        options["shift"] = 1
    else:
        options = {"shift": {"shift": 1}, "causal": {"causal": True}}[mistake]
    wrong = reference.draft_logits(reference.taps(run)[:length], ids[start], **options)
    # 100 times the tolerance of the comparison.
    assert (wrong - right).abs().max() > 2e-2


def test_own_drafts_and_counts_equal_reference(tmp_path: Path) -> None:
    """Bug: unforced decoding accepts a draft too many or too few, or counts it differently."""
    target = make_target(tmp_path / "target", tie=False, likely_tokens=3)
    drafter = make_drafter(tmp_path / "drafter", target, block_size=5)
    reference = DraftReference.load(drafter, load_target(target))
    tokens, counts = speculative_generate(reference, PROMPTS[0], 60)
    histogram = [counts.count(a) for a in range(reference.block_size)]
    assert sum(histogram[1:]) >= 5, "the pair never agrees, the test would be vacuous"
    with Engine.from_pretrained(target, drafter, buckets=(1,), page_size=4) as engine:
        (result,) = engine.generate(PROMPTS[0], max_new_tokens=60, ignore_eos=True)
    assert result.token_ids == tokens[:60]
    assert result.metrics.acceptance.steps_by_accepted == histogram


def test_rejected_context_rows_are_never_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the drafter's non-causal rows read K/V beyond the block, or rows that were rejected:
    invisible in the output, so the comparison is made with unread K/V poisoned as NaN."""
    target = make_target(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", target)
    model = load_target(target)
    plain = plain_generate(model, PROMPTS[2], 30)
    with Engine.from_pretrained(target, drafter, buckets=(2,), page_size=4) as engine:
        prefill = engine._built.loop.prefill  # type: ignore[union-attr]
        assert isinstance(prefill.pair.proposer, DFlash)
        prefill.pair.target.kv_pool.fill_(float("nan"))
        prefill.pair.proposer.kv_pool.fill_(float("nan"))
        forced = force_drafts(
            engine, {tuple(PROMPTS[2]): plain + [0] * 9}, lambda request, step: step % 4
        )
        (result,) = engine.generate([PROMPTS[2]], max_new_tokens=20, ignore_eos=True)
    assert result.token_ids == plain[:20]
    reference = DraftReference.load(drafter, model)
    taps = reference.taps(run_target(model, PROMPTS[2] + plain))
    ids = PROMPTS[2] + plain
    for drafts in forced.drafted:
        wanted = reference.draft_logits(taps[: drafts.start], ids[drafts.start]).argmax(-1)
        assert drafts.ids[1:] == wanted.tolist()


@pytest.mark.parametrize("rows", [1, 4, 4097])
@pytest.mark.parametrize("bias", [True, False])
def test_fused_context_equals_every_layers_own(tmp_path: Path, rows: int, bias: bool) -> None:
    """Bug T36: one GEMM for all layers' context K/V takes the wrong rows or forgets a bias; an
    engine that falls back to the layers' own projections hides it."""
    target = make_target(tmp_path / "target", layers=3, tokenizer=False)
    path = make_drafter(tmp_path / "drafter", target, layers=3, taps=(0, 2), bias=bias)
    raw = json.loads((path / "config.json").read_text())
    config, device = parse_draft(raw), torch.device("cpu")
    weights = draft_weights(Checkpoint(path, device, torch.float32), config, 8, device)
    files = load_file(path / "model.safetensors")
    taps = torch.randn(rows, 2 * 64, generator=torch.Generator().manual_seed(0))
    needed = dflash.ContextWeights.of(weights)
    fused = dflash.context(needed, taps, 1e-6).unflatten(1, (3, 2, -1))
    ctx = taps @ files["fc.weight"].T
    ctx = ctx * (ctx.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * files["hidden_norm.weight"]
    for layer in range(3):
        for which, name in enumerate("kv"):
            key = f"layers.{layer}.self_attn.{name}_proj."
            own = F.linear(ctx, files[f"{key}weight"], files.get(f"{key}bias"))
            torch.testing.assert_close(fused[:, layer, which], own, atol=1e-5, rtol=1e-5)
