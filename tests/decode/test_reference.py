"""decode.reference: the step on one page, and every proposer held against it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphengine.api import Engine
from graphengine.checkpoints.hub import TINY_TARGET
from graphengine.config.draft import NgramConfig
from graphengine.decode import reference
from tests.decode.test_engine import PROMPTS, Pair
from tests.drafters.test_ngram import looked_up
from tests.support.dflash_reference import DraftReference, load_target, run_target


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"), likely_tokens=3)


def target_of(model: Any) -> reference.Logits:
    return lambda ids: run_target(model, ids.tolist()).logits


@pytest.mark.parametrize("stop", [None, 4])
def test_whatever_is_proposed_is_corrected(pair: Pair, stop: int | None) -> None:
    """Bug: the oracle commits a draft that the target would not say, loses the bonus token, or goes
    on behind a stop token or the budget."""
    plain = pair.plain(PROMPTS[1], 24)
    stops = () if stop is None else (plain[stop],)
    wanted = plain[: plain.index(plain[stop]) + 1] if stop is not None else plain[:20]
    target, rng = target_of(load_target(pair.target)), torch.Generator().manual_seed(0)

    def often_right(ids: Tensor) -> Tensor:
        begin = len(ids) - len(PROMPTS[1])
        drafts = torch.tensor(plain[begin : begin + 3] + [0] * 3)[:3]
        return torch.where(torch.rand(3, generator=rng) < 0.7, drafts, drafts + 1)

    new, accepted = reference.generate(PROMPTS[1], target, often_right, 20, stop_ids=stops)
    assert new == wanted
    assert len(set(accepted)) > 1 or stop is not None


def test_dflash_equals_the_reference(pair: Pair) -> None:
    """Bug: the engine's steps commit other tokens, or accept other drafts, than the page says."""
    model = load_target(pair.target)
    drafter = DraftReference.load(pair.drafter, model)

    def propose(ids: Tensor) -> Tensor:
        taps = drafter.taps(run_target(model, ids[:-1].tolist()))
        return torch.tensor(drafter.drafts(drafter.draft_logits(taps, int(ids[-1]))))

    with pair.engine(buckets=(1,)) as engine:
        for prompt in PROMPTS[:3]:
            (result,) = engine.generate(prompt, max_new_tokens=24, ignore_eos=True)
            new, accepted = reference.generate(prompt, target_of(model), propose, 24)
            assert result.token_ids == new
            histogram = result.metrics.acceptance.steps_by_accepted
            assert histogram == [accepted.count(a) for a in range(len(histogram))]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_ngram_equals_the_reference(backend: Any) -> None:
    """Bug: the text on the device lacks the prompt, the anchor or what was accepted last, keeps
    rejected tokens or another request's, or is one place off: only acceptance shows it."""
    model = load_target(TINY_TARGET)
    config = NgramConfig(num_draft_tokens=4)
    texts = ["Count from 3 to 60 in steps of 3.", "Repeat: red blue red blue red blue", "Hello"]
    # The kernel's reference reads all of a page table: a short one.
    options: Any = {"buckets": (1, 2, 4), "device": "cpu", "max_model_len": 256}
    with Engine.from_pretrained(
        *(TINY_TARGET, "ngram"),
        num_speculative_tokens=4,
        fallback=False,
        attention_backend=backend,
        **options,
    ) as engine:
        assert engine.tokenizer is not None
        prompts = [engine.tokenizer.encode_chat([{"role": "user", "content": t}]) for t in texts]
        together = engine.generate(prompts, max_new_tokens=40, ignore_eos=True)
        alone = [engine.generate(p, max_new_tokens=40, ignore_eos=True)[0] for p in prompts]
    for prompt, one, other in zip(prompts, together, alone, strict=True):

        def propose(ids: Tensor) -> Tensor:
            return torch.tensor(looked_up(ids.tolist(), config))

        new, accepted = reference.generate(prompt, target_of(model), propose, 40)
        assert one.token_ids == other.token_ids == new
        for result in (one, other):
            histogram = result.metrics.acceptance.steps_by_accepted
            assert histogram == [accepted.count(a) for a in range(len(histogram))]
    assert sum(r.metrics.acceptance.num_accepted for r in together) > 10
