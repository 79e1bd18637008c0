"""The bundled hybrid pair: its files are what transformers reads, and it drafts well everywhere."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from graphengine.api import Engine
from graphengine.checkpoints.hub import HYBRID_DRAFT, HYBRID_TARGET, TINY_TARGET
from graphengine.checkpoints.pairs import named_pair
from tests.decode.test_engine import loop_of
from tests.support.dflash_reference import load_target

PROMPTS = (
    "George from Rome ordered 3 shells on Friday. Extract the order as JSON.",
    "I need a function `factorial_safe` that returns the factorial of `x`.",
    "Write a note: Emma thanks David for a green key.",
)


def test_files() -> None:
    """Bug: the name means another pair, the tokenizers differ, or every head forgets at once, so
    that a wrong state would not show."""
    assert named_pair("tiny-hybrid", None) == (str(HYBRID_TARGET), str(HYBRID_DRAFT))
    assert named_pair("tiny-hybrid", "none")[1] is None
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (HYBRID_TARGET / name).read_bytes() == (TINY_TARGET / name).read_bytes()
    config = json.loads((HYBRID_TARGET / "config.json").read_text())
    kinds = config["layer_types"]
    assert kinds.count("linear_attention") == 3 * kinds.count("full_attention") == 6
    weights = load_file(HYBRID_TARGET / "model.safetensors")
    rates = [weights[name].float().exp() for name in weights if name.endswith("A_log")]
    assert len(rates) == 6
    assert all(rate.min() < 0.01 and rate.max() > 0.3 for rate in rates)


@pytest.mark.parametrize("buckets", [(1,), (2,)])
def test_drafted_is_plain_is_transformers(buckets: tuple[int, ...]) -> None:
    """Bug: the text depends on drafting or on the batch, or is another than transformers'."""
    answers: dict[str | None, list[list[int]]] = {}
    prompts: list[list[int]] = []
    for draft in (None, "none"):
        with Engine.from_pretrained("tiny-hybrid", draft, device="cpu", buckets=buckets) as engine:
            assert engine.tokenizer is not None
            turns = [[{"role": "user", "content": text}] for text in PROMPTS]
            prompts = [engine.tokenizer.encode_chat(turn) for turn in turns]
            results = engine.generate(prompts, max_new_tokens=48)
            answers[draft] = [result.token_ids for result in results]
            if draft is None:
                lengths = [r.metrics.acceptance.mean_acceptance_length for r in results]
                assert sum(lengths) / len(lengths) > 3
    assert answers[None] == answers["none"]
    model = load_target(HYBRID_TARGET)
    for prompt, answer in zip(prompts, answers[None], strict=True):
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            choice = model(ids).logits[0].argmax(-1)[len(prompt) - 1 : -1]
        assert choice.tolist() == answer


@pytest.mark.slow
def test_turns_of_a_chat() -> None:
    """Bug: behind a hit the state is another prefix's, a token short or the drafter's context is
    missing, so that the text or the acceptance changes; or the next turn finds nothing, or a fork
    of an earlier turn takes the later one's state."""
    outcomes: dict[bool, list[tuple[list[int], list[int]]]] = {}
    cached_tokens: list[int] = []
    for cached in (True, False):
        run = {"device": "cpu", "buckets": (1, 2), "enable_prefix_caching": cached, "page_size": 16}
        with Engine.from_pretrained("tiny-hybrid", **run) as engine:
            assert engine.tokenizer is not None
            first = engine.tokenizer.encode(" ".join(PROMPTS) * 3)
            assert len(first) > 100
            prompt, outcomes[cached] = first, []
            for turn in range(4):
                fork = first[:80] + prompt[turn : turn + 10]
                for result in engine.generate([prompt, fork], max_new_tokens=24, ignore_eos=True):
                    steps = result.metrics.acceptance.steps_by_accepted
                    outcomes[cached].append((result.token_ids, steps))
                    if cached:
                        cached_tokens.append(result.metrics.num_cached_tokens)
                prompt = prompt + outcomes[cached][-2][0] + first[turn : turn + 5]
            slots = loop_of(engine).state_slots
            assert slots.num_free == slots.num_usable
    assert outcomes[True] == outcomes[False]
    repeated = [(len(first) + 29 * turn + 23) // 16 * 16 for turn in range(3)]
    assert cached_tokens[2::2] == repeated, "whole pages of all that was committed"
    assert cached_tokens[3::2] == [64] * 3


def test_prompt_logprobs_leave_the_state_where_decoding_finds_it() -> None:
    """Bug: a prompt whose log-probabilities are asked for runs in the null slot, so that what
    follows continues from an empty state."""
    with Engine.from_pretrained("tiny-hybrid", device="cpu", buckets=(1,)) as engine:
        prompt = PROMPTS[0]
        (plain,) = engine.generate([prompt], max_new_tokens=24)
        (told,) = engine.generate([prompt], max_new_tokens=24, prompt_logprobs=1)
    assert told.token_ids == plain.token_ids
    assert told.prompt_logprobs is not None
