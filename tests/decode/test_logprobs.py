"""Log-probabilities from the rows of a verify: plain decoding's, and the target's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from graphengine import TINY_DRAFT, TINY_TARGET, Engine
from graphengine.decode import grammar
from graphengine.decode.buffers import Arena
from graphengine.decode.logprobs import Scores, score_rows
from tests.support.dflash_reference import load_target, run_target
from tests.test_requests import ASKED, one

# Nats in float32: a GEMM of other rows sums in another order; measured 2e-5 on logits around 25.
BOUND = 1e-4


@pytest.fixture(scope="module")
def engine() -> Engine:
    options: Any = {"buckets": (1, 4), "device": "cpu", "max_model_len": 512}
    return Engine.from_pretrained(TINY_TARGET, TINY_DRAFT, **options)


@pytest.fixture(scope="module")
def plain() -> Engine:
    options: Any = {"buckets": (1, 4), "device": "cpu", "max_model_len": 512}
    return Engine.from_pretrained(TINY_TARGET, "none", **options)


def test_two_steps_are_kept_apart() -> None:
    """Bug: a step in flight overwrites what the host has not fetched; or more alternatives are told
    than were asked for, the chosen token twice."""
    kept = Scores.take(Arena(torch.device("cpu"), torch.float32).take, 2, 3, 4)
    logits = [torch.randn(6, 9, generator=torch.Generator().manual_seed(s)) for s in (0, 1)]
    ids = [x.argmin(-1) for x in logits]
    for step in (4, 5):
        found = score_rows(logits[step - 4], ids[step - 4], 4)
        kept.write_(torch.full((2,), step), found)
    for step in (4, 5):
        wanted = logits[step - 4].log_softmax(-1)
        for row in range(2):
            own = kept.of_step(step).fetch(None).of_row(row)
            told = own.told(ids[step - 4][3 * row : 3 * row + 2].tolist(), 3)
            assert len(told) == 2
            for t, entry in enumerate(told):
                logprobs = wanted[3 * row + t]
                best = logprobs.topk(3).indices.tolist()
                assert list(entry) == [int(logprobs.argmin()), *best]
                for token, value in entry.items():
                    assert value == pytest.approx(float(logprobs[token]), abs=1e-5)


def test_rows_of_bf16_are_summed_in_float32() -> None:
    """Bug: over a large vocabulary a sum of bf16 is off by whole percents; a row without a choice
    reads another one's logits."""
    logits_TV = (torch.randn(3, 40_000, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    found = score_rows(logits_TV, torch.tensor([7, -1, 39_999]), 5)
    wanted_TV = logits_TV.double().log_softmax(-1)
    assert found.chosen.dtype == found.top.dtype == torch.float32
    for row, token in ((0, 7), (2, 39_999)):
        assert float(found.chosen[row]) == pytest.approx(float(wanted_TV[row, token]), abs=1e-4)
    torch.testing.assert_close(found.top.double(), wanted_TV.topk(5).values, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 1, "top_p": 0.9}])
def test_logprobs_equal_plain_decoding_s(
    engine: Engine, plain: Engine, params: dict[str, Any]
) -> None:
    """Bug: a row's logits are its neighbour's, those of the step behind, adjusted or filtered; or
    the first token has none."""
    for adjusted in ({}, {"presence_penalty": 1.0, "min_tokens": 110, "max_new_tokens": 115}):
        asked = {"logprobs": 4, "prompt_logprobs": 2} | params | adjusted
        drafted, alone = one(engine, **asked), one(plain, **asked)
        assert drafted.token_ids == alone.token_ids == one(engine, **params, **adjusted).token_ids
        found = [(r.logprobs, r.prompt_logprobs) for r in (drafted, alone)]
        (ours, prompt), (theirs, other) = found
        assert ours is not None and theirs is not None and prompt is not None and other is not None
        assert len(ours) == len(drafted.token_ids) and prompt[0] is None and other[0] is None
        for token, a, b in zip(drafted.token_ids, ours, theirs, strict=True):
            assert next(iter(a)) == token and len(a) in (4, 5)
            check_close(a, b)
        for a, b in zip(prompt[1:], other[1:], strict=True):
            assert a is not None and b is not None and len(a) in (2, 3)
            check_close(a, b)


def check_close(a: dict[int, float], b: dict[int, float]) -> None:
    """Equal but for the last alternative, which may be one of two that are alike."""
    assert sorted(a.values()) == pytest.approx(sorted(b.values()), abs=BOUND)
    for token in set(a) & set(b):
        assert a[token] == pytest.approx(b[token], abs=BOUND)


def test_logprobs_are_the_target_s(plain: Engine) -> None:
    """Bug: log-probabilities of the distribution after temperature, or of the row before."""
    assert plain.tokenizer is not None
    prompt = plain.tokenizer.encode_chat([{"role": "user", "content": ASKED}])
    asked: dict[str, Any] = {"logprobs": 0, "prompt_logprobs": 1, "max_new_tokens": 20}
    asked |= {"temperature": 1.5, "seed": 2, "repetition_penalty": 1.5, "frequency_penalty": 1.0}
    result = one(plain, **asked)
    ids = prompt + result.token_ids
    wanted = run_target(load_target(TINY_TARGET), ids).logits.log_softmax(-1)
    assert result.prompt_logprobs is not None and result.logprobs is not None
    assert len(result.prompt_logprobs) == len(prompt)
    told = [*result.prompt_logprobs[1:], *result.logprobs]
    for i, (token, entry) in enumerate(zip(ids[1:], told, strict=True)):
        assert entry is not None
        assert entry[token] == pytest.approx(float(wanted[i, token]), abs=1e-4)
        best = int(wanted[i].argmax())
        assert i >= len(prompt) - 1 or entry[best] == pytest.approx(
            float(wanted[i].amax()), abs=1e-4
        )
    assert all(len(entry) == 1 for entry in result.logprobs)


@pytest.mark.slow
def test_some_of_a_batch_are_scored(engine: Engine) -> None:
    """Bug: scores are another row's, or of a step that was launched behind; a first token has
    as many alternatives as another asks for; or prompts in front of one whose own scores are asked
    for run twice, and everyone ends with "list.remove(x)"."""
    loop = engine.built.loop
    prompts = [[5, 6, 7], [9], [100, 101], [3, 3]]
    alone = []
    for prompt in prompts:
        request = loop.submit(prompt, 30, (), logprobs=3)
        for _ in loop.run():
            pass
        alone.append((request.output_ids, request.output_logprobs))
        assert len(request.output_logprobs) == 30
    requests = [
        loop.submit(
            prompt, 30, (), logprobs=i if i != 1 else None, prompt_logprobs=0 if i == 1 else None
        )
        for i, prompt in enumerate(prompts)
    ]
    for _ in loop.run():
        pass
    for i, (request, (ids, told)) in enumerate(zip(requests, alone, strict=True)):
        assert request.output_ids == ids
        assert len(request.output_logprobs) == (30 if i != 1 else 0)
        for a, b in zip(request.output_logprobs, told, strict=False):
            assert len(a) >= i
            for token in a:
                assert a[token] == pytest.approx(b[token], abs=BOUND)


def test_no_more_alternatives_than_there_are_tokens() -> None:
    """Bug: 5 of a vocabulary of 3 are an error of torch's, in the middle of a step."""
    found = score_rows(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([0]), 5)
    assert found.top_ids.tolist() == [[1, 2, 0]]
    (told,) = found.told([0], 5)
    assert list(told) == [0, 1, 2] and abs(sum(map(math.exp, told.values())) - 1) < 1e-6


def test_a_first_token_that_its_grammar_took_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: an answer whose first mask took too long has no token, and yet log-probabilities of
    one; in its chunk or in its result."""
    asked: Any = {"regex": "[ab]{3}", "logprobs": 1, "max_new_tokens": 3}
    (known,) = engine.generate("x", **asked)
    assert len(known.logprobs or []) == len(known.token_ids) > 0
    monkeypatch.setattr(grammar, "BOUND_S", -1.0)  # of masks; it is compiled already
    (chunk,) = engine.stream("x", **asked)
    assert chunk.result is not None and chunk.result.finish_reason == "error"
    assert (chunk.token_ids, chunk.logprobs, chunk.result.logprobs) == ([], [], [])


def test_a_grammar_where_nothing_else_adjusts(plain: Engine) -> None:
    """Bug: where an engine has no adjustments a grammar's masks are written into the logits that
    log-probabilities are told of: what it rules out is told to be impossible."""
    options: Any = {"buckets": (1,), "device": "cpu", "max_model_len": 512, "adjustments": False}
    asked: Any = {"regex": "[0-9]{9}", "logprobs": 3, "max_new_tokens": 8}
    with Engine.from_pretrained(TINY_TARGET, TINY_DRAFT, **options) as engine:
        (found,), (wanted,) = (e.generate("Compare the bee.", **asked) for e in (engine, plain))
    assert found.token_ids == wanted.token_ids
    assert found.logprobs is not None and wanted.logprobs is not None
    for own, other in zip(found.logprobs, wanted.logprobs, strict=True):
        assert own == pytest.approx(other, abs=BOUND)
