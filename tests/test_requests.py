"""Requests as users send them, through the Python API: stop strings and tokens, reasons, streams,
and what is refused.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from graphengine import TINY_DRAFT, TINY_TARGET, Engine
from graphengine.api import GenerationResult
from graphengine.checkpoints.stops import Written
from graphengine.config.options import SamplingParams
from graphengine.decode.metrics import Acceptance
from graphengine.decode.request import Request
from graphengine.results import Teller
from tests.support.counted import Counted

ASKED = "Count from 20 to 146 in steps of 6."


@pytest.fixture(scope="module")
def engine() -> Engine:
    options: Any = {"buckets": (1, 4), "device": "cpu", "max_model_len": 512}
    return Engine.from_pretrained(TINY_TARGET, TINY_DRAFT, **options)


@pytest.fixture(scope="module")
def plain() -> Engine:
    options: Any = {"buckets": (1, 4), "device": "cpu", "max_model_len": 512}
    return Engine.from_pretrained(TINY_TARGET, "none", **options)


def one(engine: Engine, **params: Any) -> GenerationResult:
    """The result of a stream, whose chunks must add up to it."""
    chunks = list(engine.stream(ASKED, **({"max_new_tokens": 200} | params)))
    result = chunks[-1].result
    assert result is not None
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [token for chunk in chunks for token in chunk.token_ids] == result.token_ids
    if params.get("logprobs") is not None:
        assert [e for chunk in chunks for e in chunk.logprobs or []] == result.logprobs
    assert result.metrics.num_output_tokens == len(result.token_ids)
    return result


@pytest.fixture(scope="module")
def whole(engine: Engine) -> GenerationResult:
    result = one(engine)
    assert result.finish_reason == "stop" and result.stop_reason is None
    assert result.metrics.acceptance.mean_acceptance_length > 3  # runs of several tokens
    return result


def test_stop_strings(engine: Engine, plain: Engine, whole: GenerationResult) -> None:
    """Bug: a stop string that begins in one step and ends in the next is missed, tokens that were
    accepted behind it are given out, the end among them, or the row goes on."""
    text = whole.text
    for begin in range(0, len(text) - 6, 13):
        for length in (1, 4):
            stop = text[begin : begin + length]
            end = text.index(stop)
            for engine_ in (engine, plain)[: 1 + (begin < 40)]:
                left_out = one(engine_, stop=stop)
                assert left_out.text == text[:end]
                assert (left_out.finish_reason, left_out.stop_reason) == ("stop", stop)
                assert whole.token_ids[: len(left_out.token_ids)] == left_out.token_ids
            kept = one(engine, stop=[stop, "never said"], include_stop_str_in_output=True)
            assert kept.text == text[: end + length]
            assert kept.token_ids == left_out.token_ids
    assert not engine.built.loop.has_work
    allocator = engine.built.loop.allocator
    assert allocator.num_free == allocator.num_usable
    assert one(engine, stop="never said").text == text
    # In the step that the model's own end is in, which is dropped with what lies behind the string.
    assert engine.tokenizer is not None
    ids = one(engine, stop=text[-4:]).token_ids
    said = [engine.tokenizer.decode(ids[:count]) for count in (len(ids) - 1, len(ids))]
    assert [text[-4:] in part for part in said] == [False, True]
    # On the last token that the budget allows, the string is the reason.
    count = len(one(engine, stop=text[9:12]).token_ids)
    assert one(engine, stop=text[9:12], max_new_tokens=count).stop_reason == text[9:12]


def test_some_of_a_batch_stop(engine: Engine, whole: GenerationResult) -> None:
    """Bug: a row that ends at a string takes its neighbours' tokens with it."""
    asked = [ASKED, "Count from 3 to 60 in steps of 3.", ASKED, "Hello", ASKED]
    free = [result.text for result in engine.generate(asked, max_new_tokens=200)]
    stop = whole.text[20:24]
    for result, text in zip(
        engine.generate(asked, max_new_tokens=200, stop=stop), free, strict=True
    ):
        assert result.text == text.partition(stop)[0]


def test_stop_tokens(engine: Engine, plain: Engine, whole: GenerationResult) -> None:
    """Bug: a user's stop token replaces the model's end, is no reason, or its text stays."""
    ids = whole.token_ids
    for place in (0, 5, 11):
        token = ids[place]
        for engine_ in (engine, plain):
            result = one(engine_, stop_token_ids=[token, 0], ignore_eos=True)
            assert result.token_ids == ids[: ids.index(token) + 1]
            assert (result.finish_reason, result.stop_reason) == ("stop", token)
        kept = one(engine, stop_token_ids=[token], include_stop_str_in_output=True)
        assert whole.text.startswith(kept.text) and kept.text.startswith(result.text)
        assert len(kept.text) > len(result.text)
    assert one(engine, stop_token_ids=[0]).stop_reason is None


def test_special_tokens(engine: Engine, plain: Engine) -> None:
    """Bug: a special token that begins a tool call cannot be seen, or the one that ends an answer
    stands in it; or nobody can stop at its text."""
    assert engine.tokenizer is not None
    (begin,), (end,) = map(engine.tokenizer.encode, ("<|im_start|>", "<|im_end|>"))
    for each in (engine, plain):
        asked: dict[str, Any] = {"logit_bias": {begin: 100.0}, "max_new_tokens": 3}
        shown: dict[str, Any] = {"skip_special_tokens": False}
        assert (one(each, **asked).text, one(each, **asked, **shown).text) == (
            "",
            "<|im_start|>" * 3,
        )
        stopped = one(each, **asked, **shown, stop="start|><")
        assert (stopped.text, stopped.stop_reason) == ("<|im_", "start|><")
        asked["logit_bias"] = {end: 100.0}
        assert one(each, **asked, **shown).text == ""
        kept = one(each, **asked, **shown, include_stop_str_in_output=True)
        assert kept.text == "<|im_end|>"


@pytest.mark.slow
def test_min_tokens(engine: Engine, plain: Engine, whole: GenerationResult) -> None:
    """Bug: the end is only ignored, so that it stands in the middle of the answer; or a stop string
    counts too early."""
    count = len(whole.token_ids) + 7
    for params in ({}, {"temperature": 0.9, "seed": 3}):
        found = [
            one(e, min_tokens=count, max_new_tokens=count + 20, **params) for e in (engine, plain)
        ]
        assert found[0].token_ids == found[1].token_ids
        assert len(found[0].token_ids) >= count
        assert not set(found[0].token_ids[:count]) & engine.built.stop_ids
    late = one(engine, stop=",", min_tokens=12)
    assert len(late.token_ids) > 12 and late.stop_reason == ","
    assert "," in late.text


def test_bad_words_are_not_said(engine: Engine, plain: Engine, whole: GenerationResult) -> None:
    """Bug: a word of several tokens is said, or its last token is banned everywhere."""
    words = [whole.text[4:9].strip(), whole.text.split(",")[2].strip()]
    found = [one(e, bad_words=words) for e in (engine, plain)]
    assert found[0].token_ids == found[1].token_ids != whole.token_ids
    assert engine.tokenizer is not None
    for word in words:
        for ids in engine.tokenizer.encode_word(word):
            said = found[0].token_ids
            assert ids not in [said[i : i + len(ids)] for i in range(len(said))]


def test_reasons_in_vllm_s_words(engine: Engine) -> None:
    """Bug: a client that knows vLLM's reasons meets another one."""
    assert one(engine, max_new_tokens=3).finish_reason == "length"
    loop = engine.built.loop
    request = loop.submit([1, 2], 9, ())
    loop.cancel(request)
    assert request.finish_reason == "abort"
    loop.reset()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop": ""}, "stop is ''; expected a text or several"),
        ({"stop": ["a", 3]}, "stop is"),
        ({"stop": 5}, "stop is 5; expected a text or several"),
        ({"stop": {"a": 1}}, r"stop is \{'a': 1\}"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids is \[-1\]; expected token ids from 0 up"),
        ({"stop_token_ids": [10**9]}, r"stop_token_ids has \[1000000000\].*the vocabulary of"),
        ({"logit_bias": {10**9: 1.0}}, r"logit_bias has \[1000000000\].*the vocabulary of"),
        ({"allowed_token_ids": [1, 10**9]}, r"allowed_token_ids has \[1000000000\].*vocabulary of"),
        ({"allowed_token_ids": []}, r"allowed_token_ids is \[\], which leaves no token"),
        ({"allowed_token_ids": [-1]}, r"allowed_token_ids is \[-1\]; expected token ids from 0"),
        ({"logit_bias": {5: 101}}, "logit_bias has '5=101'; expected .* from -100 to 100"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias has '5=nan'"),
        ({"logit_bias": {"x": 1}}, "logit_bias has 'x=1'"),
        ({"logit_bias": {5: 10**400}}, "logit_bias has '5=10{400}'"),
        ({"bad_words": [""]}, "bad_words is"),
        ({"bad_words": ["a", " "]}, "bad_words has ' '; to ban white space, pass logit_bias"),
        ({"bad_words": ["never mind this " * 9]}, "room for 64 of 16 tokens"),
        ({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens is 9, max_new_tokens 8"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; expected a number 1e-06 <= x"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty is 1e-39; expected a number"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5; expected a number -2 <= x <= 2"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty is inf"),
        ({"min_p": 0.1}, "min_p 0.1 change nothing at temperature 0"),
        ({"min_p": 1.1, "temperature": 1}, "min_p is 1.1; expected a number 0 <= x <= 1"),
        ({"logprobs": 21}, "logprobs of 21 alternatives.*max_logprobs=21$"),
        ({"choice": []}, r"choice is \[\]; expected one text at least"),
        ({"prompt_logprobs": 21}, "logprobs of 21 alternatives.*max_logprobs=21$"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
    ],
)
def test_impossible_values(engine: Engine, params: dict[str, Any], message: str) -> None:
    """Bug: a value without a meaning is taken, ignored, or refused without value and remedy."""
    with pytest.raises(ValueError, match=message):
        engine.generate(ASKED, **params)
    assert not engine.built.loop.has_work or engine.built.loop.reset() is None


@pytest.mark.parametrize("params", [{}, {"regex": "[a-z]+"}])
def test_another_default_device(engine: Engine, params: dict[str, Any]) -> None:
    """Bug: under `torch.set_default_device("cuda")`, a script's habit, what the host prepares lies
    on the GPU: an error from within torch, or a grammar's compiler writes to the GPU's address."""
    calls = (
        lambda: Engine.from_pretrained(TINY_TARGET, device="cpu"),
        lambda: engine.generate(ASKED, max_new_tokens=2, **params),
        lambda: engine.stream(ASKED, max_new_tokens=2, **params),
    )
    with torch.device("meta"):
        for call in calls:
            with pytest.raises(ValueError, match=r"default device is meta.*set_default_device\('c"):
                call()
    assert engine.generate(ASKED, max_new_tokens=2, **params)[0].finish_reason == "length"


def test_a_superseded_stream_supersedes_nobody(engine: Engine, whole: GenerationResult) -> None:
    """Bug: a stream that was never started is asked to begin too late, and the one that has taken
    its place gives way to an error."""
    never, stream = engine.stream("Hello"), engine.stream(ASKED, max_new_tokens=200)
    tokens = next(stream).token_ids
    with pytest.raises(RuntimeError, match="superseded or its engine closed before it began"):
        next(never)
    assert tokens + [t for chunk in stream for t in chunk.token_ids] == whole.token_ids


class _Said(str):
    """A text that counts the characters of those that it is put behind."""

    num_read = 0

    def __radd__(self, front: str) -> str:
        _Said.num_read += len(front)
        return str.__add__(front, self)


def test_a_chunk_copies_what_is_new() -> None:
    """Bug: each step of an answer with logprobs or prompt_logprobs copies all of those of the
    answer and of the prompt, and its text, so that a step of a long one takes longer and longer."""
    asked, acceptance = SamplingParams(logprobs=1, prompt_logprobs=1), Acceptance(0)
    what: dict[str, Any] = {"prompt_ids": [7] * 500, "max_total_tokens": 2000, "stop_ids": ()}
    request = Request(request_id=0, acceptance=acceptance, **what)
    request.prompt_scores = scores = Counted([{7: -1.0}] * 499)
    request.output_logprobs = told = Counted()
    tell = Teller(cast(Any, None), [request], None, asked)
    tell._writers = [cast(Any, SimpleNamespace(feed=lambda *_, last: Written(_Said("a"))))]
    chunks = []
    for count in range(1, 401):
        request.output_ids.append(count)
        told.append({count: -1.0})
        if count == 400:
            assert scores.num_read == _Said.num_read == 0 and told.num_read == count - 1
            request.finish_reason = "length"
        chunks.append(tell.chunk(request, [count]))
    assert [chunk.logprobs for chunk in chunks] == [[{i: -1.0}] for i in range(1, 401)]
    result = chunks[-1].result
    assert result is not None and result.text == "a" * 400 and result.logprobs == list(told)
    assert result.prompt_logprobs == [None, *scores]
