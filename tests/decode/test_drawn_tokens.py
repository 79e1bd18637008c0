"""Engines that sample: speculation changes neither the distribution nor a seed's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphengine.api import Engine
from graphengine.decode import ends
from graphengine.decode.sampling import Sampling
from tests.support.checkpoints import edit_config, make_drafter, make_target
from tests.support.dflash_reference import force_drafts, load_target, plain_generate, run_target
from tests.support.sampling import PROMPTS, Pair, assert_drawn, reference_warp


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


def draw(engine: Engine, prompts: Any = None, **options: Any) -> list[list[int]]:
    options = {"max_new_tokens": 24, "ignore_eos": True, "seed": 5} | options
    results = engine.generate(prompts or PROMPTS, **options)
    return [result.token_ids for result in results]


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("torch", {"temperature": 1.0, "top_k": 4}),
        ("triton", {"temperature": 1.0, "top_k": 4}),
        ("triton", {"temperature": 0.8, "top_p": 0.9, "top_k": 20}),
    ],
)
def test_same_seed_same_tokens(pair: Pair, backend: str, options: dict[str, Any]) -> None:
    """Bug: noise is keyed by the row, the step or the batch, or sits one position off in verify, so
    speculation changes what a seed says; or the first token is not drawn."""
    with (
        pair.engine(attention_backend=backend) as engine,
        pair.engine(draft=False, attention_backend=backend) as plain,
    ):
        drafted = engine.generate(PROMPTS, max_new_tokens=24, ignore_eos=True, seed=5, **options)
        tokens = [result.token_ids for result in drafted]
        assert sum(sum(r.metrics.acceptance.steps_by_accepted[1:]) for r in drafted) > 0
        assert tokens == draw(plain, **options)
        # Prompt i draws with seed + i, alone or in a batch.
        for i, prompt in enumerate(PROMPTS):
            assert draw(engine, [prompt], seed=5 + i, **options) == [tokens[i]]
        first = {tuple(draw(plain, [PROMPTS[0]], seed=s, max_new_tokens=1)[0]) for s in range(9)}
        assert len(first) == 1
        many = draw(plain, [PROMPTS[0]] * 16, max_new_tokens=1, temperature=3.0)
        assert len({ids[0] for ids in many}) > 1


def test_anchor_first_drafter(pair: Pair, tmp_path: Path) -> None:
    """Bug: where a verify has one row more than a draft, rows and noise are counted in drafts."""
    drafter = make_drafter(tmp_path / "drafter", pair.target)
    edit_config(
        drafter,
        lambda config: (
            config | {"dflash_config": config["dflash_config"] | {"sample_from_anchor": True}}
        ),
    )
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 4}
    with (
        Engine.from_pretrained(pair.target, drafter, buckets=(4,), max_model_len=96) as engine,
        pair.engine(draft=False) as plain,
    ):
        assert engine.num_draft_tokens == 4
        assert draw(engine, **options) == draw(plain, **options)


def test_every_acceptance_length(pair: Pair) -> None:
    """Bug: after a certain number of accepted drafts the next draw has another position's noise."""
    prompt = PROMPTS[0]
    with pair.engine() as engine:
        (truth,) = draw(engine, [prompt], temperature=1.0, max_new_tokens=60)
        for accepted in range(4):
            with pair.engine() as forced:
                force_drafts(forced, {tuple(prompt): truth}, lambda request, step, a=accepted: a)
                (result,) = forced.generate(
                    [prompt], max_new_tokens=30, ignore_eos=True, temperature=1.0, seed=5
                )
                assert result.token_ids == truth[:30]
                histogram = result.metrics.acceptance.steps_by_accepted
                assert histogram[accepted] == sum(histogram)


def test_greedy_and_sampling_requests_in_one_batch(pair: Pair) -> None:
    """Bug: one request's temperature is another's, or a stale one is left in a row."""
    with pair.engine() as engine:
        loop = engine.built.loop
        model = load_target(pair.target)
        alone = draw(engine, [PROMPTS[1]], temperature=1.5)
        for _ in range(2):
            greedy = loop.submit(list(PROMPTS[0]), 20, ())
            sampled = loop.submit(list(PROMPTS[1]), 24, (), Sampling(temperature=1.5, seed=5))
            other = loop.submit(list(PROMPTS[2]), 9, (), Sampling(temperature=3.0, top_k=2))
            with torch.no_grad():
                while loop.has_work:
                    loop.admit()
                    loop.launch()
                    loop.collect()
            assert sampled.output_ids == alone[0] and len(other.output_ids) == 9
            assert greedy.output_ids == plain_generate(model, PROMPTS[0], 20)


def test_greedy_batches_run_nothing_extra(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: greedy decoding, the default, pays for sampling; also after a sampling batch."""
    calls: list[int] = []
    real = ends.sample_rows

    def spy(*args: Any) -> Tensor:
        calls.append(1)
        return real(*args)

    monkeypatch.setattr(ends, "sample_rows", spy)
    with pair.engine() as engine:
        before = draw(engine)
        assert not calls
        draw(engine, temperature=1.0)
        assert calls
        calls.clear()
        assert draw(engine) == before and not calls


@pytest.mark.slow
@pytest.mark.parametrize("draft", [True, False])
def test_first_tokens_follow_the_target(tmp_path: Path, draft: bool) -> None:
    """Bug T25: accepted drafts bias what is drawn. The first three tokens against the exact
    distribution, which transformers computes by enumeration."""
    pair = Pair(tmp_path)
    model = load_target(pair.target)
    prompt, count, depth = PROMPTS[0], 800, 3
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    warp: dict[str, Any] = {"temperature": 1.2, "top_p": 1.0, "top_k": 3}
    for _ in range(depth):
        grown: dict[tuple[int, ...], float] = {}
        for prefix, mass in exact.items():
            logits = run_target(model, [*prompt, *prefix]).logits[-1:]
            probs = reference_warp(logits, **warp).softmax(-1)[0]
            for token in probs.nonzero()[:, 0].tolist():
                grown[(*prefix, token)] = mass * float(probs[token])
        exact = grown
    with pair.engine(draft, buckets=(16,)) as engine:
        found = engine.generate(
            [prompt] * count, max_new_tokens=depth, ignore_eos=True, seed=100, **warp
        )
    assert_drawn([tuple(result.token_ids) for result in found], exact)
    if draft:
        assert sum(sum(r.metrics.acceptance.steps_by_accepted[1:]) for r in found) > 0


def test_engines_without_sampling(pair: Pair) -> None:
    """Bug: a temperature is silently ignored where no sampled chain was built."""
    with (
        pair.engine(simulate_acceptance=2.0) as engine,
        pytest.raises(ValueError, match="draws its acceptance"),
    ):
        draw(engine, temperature=1.0)
    with pytest.raises(ValueError, match="sampling needs real acceptance"):
        pair.engine(simulate_acceptance=2.0, sampling=True)
    with pair.engine() as engine, pytest.raises(ValueError, match=r"top_p is 2\.0"):
        engine.stream(PROMPTS[0], temperature=1.0, top_p=2.0)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_graph_modes_draw_the_same(tmp_path: Path, backend: Any) -> None:
    """Bug: the sampled tail is captured against other logits than the chain leaves, or something
    in it cannot be captured or waits."""
    target = make_target(
        tmp_path / "target", tie=False, likely_tokens=6, head_dim=64, dtype="bfloat16"
    )
    drafter = make_drafter(tmp_path / "drafter", target, dtype="bfloat16")
    found = {}
    for graph_mode in ("none", "piecewise", "full"):
        with Engine.from_pretrained(
            target,
            drafter,
            device="cuda",
            graph_mode=graph_mode,
            attention_backend=backend,
            buckets=(1, 4),
            max_model_len=200,
            sampling=True,
            fallback=False,  # whether it comes depends on measured times
        ) as engine:
            greedy = draw(engine, max_new_tokens=60)
            found[graph_mode] = [
                greedy,
                draw(engine, temperature=1.0, max_new_tokens=60),
                draw(engine, PROMPTS[:1], temperature=0.7, top_p=0.9, top_k=9, max_new_tokens=60),
            ]
            assert draw(engine, max_new_tokens=60) == greedy
            assert found[graph_mode][1] != greedy
    assert found["piecewise"] == found["none"] and found["full"] == found["none"]


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_only_what_is_allowed_is_said(pair: Pair, temperature: float) -> None:
    """Bug: a draft, the bonus token or the first one is none of `allowed_token_ids`; a bias or a
    request that comes later into the row lifts what they rule out; drafted is not plain."""
    allowed = tuple(range(3, 64, 4))
    options: dict[str, Any] = {"temperature": temperature, "allowed_token_ids": allowed}
    options |= {"logit_bias": {4: 100.0, 7: 1.0}, "repetition_penalty": 1.2}
    with pair.engine(buckets=(2,)) as engine, pair.engine(draft=False) as plain:
        free = draw(plain, temperature=temperature)
        for among in (engine, plain):
            told = draw(among, **options)
            assert set().union(*told) <= {*allowed} and len(set().union(*told)) > 1
            assert draw(among, temperature=temperature) == free
        assert draw(engine, **options) == draw(plain, **options)
        (ends,) = engine.generate(PROMPTS[:1], allowed_token_ids=[9], stop_token_ids=[9])
        assert ends.token_ids == [9] and ends.finish_reason == "stop"
        (none,) = engine.generate(
            PROMPTS[:1], allowed_token_ids=[9], stop_token_ids=[9], min_tokens=2
        )
        assert none.finish_reason == "error" and "allowed_token_ids" in str(none.error)
