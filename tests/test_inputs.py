"""inputs: what is taken as a prompt, what as options, and what is refused before anything runs."""

from __future__ import annotations

import inspect
import pickle
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from graphengine import TINY_DRAFT, TINY_TARGET, Engine
from graphengine.config.options import SamplingParams
from graphengine.inputs import PromptError, _ids_within, asked_for, inputs_of, rehearse
from graphengine.verify.run import encode
from tests.support.checkpoints import make_target

TEXTS = ["Tom has 3 apples", "how many apples?", "def add"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    options: Any = {"buckets": (1, 4), "max_model_len": 200}
    with Engine.from_pretrained(TINY_TARGET, TINY_DRAFT, **options) as engine:
        yield engine


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_prompt_kinds_agree(engine: Engine) -> None:
    """Bug: text, a conversation and token ids of the same prompt are encoded differently, or a list
    of ids is taken for several prompts."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    message = _user(TEXTS[0])
    ids = tokenizer.encode_chat([message])
    wanted = engine.generate(TEXTS[0], max_new_tokens=9, ignore_eos=True)[0].token_ids
    for prompt in ([message], ids, tuple(ids), [TEXTS[0]], [[message]], [ids], (TEXTS[0],)):
        results = engine.generate(prompt, max_new_tokens=9, ignore_eos=True)  # type: ignore[arg-type]
        assert [r.token_ids for r in results] == [wanted]
    raw = engine.generate(TEXTS[0], max_new_tokens=9, ignore_eos=True, raw=True)
    by_ids = engine.generate(tokenizer.encode(TEXTS[0]), max_new_tokens=9, ignore_eos=True)
    assert raw[0].token_ids == by_ids[0].token_ids
    assert engine.generate([]) == []


@pytest.mark.parametrize("template", ["{{ messages[0].content }} 1", "{{ raise_exception('2') }}"])
def test_the_first_text_compiles_no_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    """Bug: the first user of an engine waits 33 ms for its chat template to be compiled, six times
    what the first token takes; or a start fails whose template takes no single turn."""
    directory = make_target(tmp_path, layers=1)
    (directory / "chat_template.jinja").write_text(template)
    with Engine.from_pretrained(directory, buckets=(1,), max_model_len=64) as engine:

        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("compiled behind the start")

        monkeypatch.setattr(jinja2.Environment, "compile", refuse)
        if "raise" in template:
            with pytest.raises(ValueError, match="2"):
                engine.generate("hi")
        else:
            assert engine.generate("hi", max_new_tokens=1)[0].token_ids


def test_a_template_that_does_not_end_is_rendered_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a start waits for a template that does not end once for each of its rehearsals."""
    tried: list[Any] = []

    def fails(*asked: Any) -> list[int]:
        tried.append(asked)
        raise ValueError("it takes longer than 5 s")

    monkeypatch.setattr(engine.tokenizer, "encode_chat", fails)
    rehearse(engine.built)
    assert len(tried) == 1


def test_a_request_asks_for_no_default_device(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: each request asks torch for the default device in Python, 0.1 ms of a first token where
    none has run for a while, though nobody has set one."""
    monkeypatch.setattr(torch, "get_default_device", lambda: pytest.fail("asked"))
    assert engine.generate([3], max_new_tokens=1)[0].token_ids


def test_text_to_continue_has_its_front(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: <|begin_of_text|> is put in front by the tokenizer and missing in what is generated or
    verified, or stands in front of a conversation too."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    ids, chat = tokenizer.encode(TEXTS[0]), tokenizer.encode_chat([_user(TEXTS[0])])
    monkeypatch.setattr(tokenizer, "_front", [5])
    for raw, prompt in ((True, [5, *ids]), (False, chat)):
        (result,) = engine.generate(TEXTS[0], max_new_tokens=1, raw=raw)
        assert result.metrics.num_prompt_tokens == len(prompt)
        assert encode(tokenizer, TEXTS[:1], raw) == [prompt]


def test_what_a_template_is_given(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: what a call has for the chat template does not reach it, or is dropped where there is
    none to take it; the messages are blamed for a name that is already taken; or one that is
    transformers' own, such as max_length, does nothing."""
    given, tokenizer = list[Any](), engine.tokenizer
    assert tokenizer is not None
    real = tokenizer.encode_chat
    monkeypatch.setattr(
        tokenizer, "encode_chat", lambda said, more: (given.append(more), real(said, more))[1]
    )
    more: dict[str, Any] = {"enable_thinking": True, "tools": []}
    for value in (more, '{"enable_thinking": true, "tools": []}', None):
        engine.generate(TEXTS[0], max_new_tokens=1, chat_template_kwargs=value)
    engine.generate([[_user("hi")]], SamplingParams(max_new_tokens=1, chat_template_kwargs=more))
    assert given == [more, more, None, more]
    with pytest.raises(ValueError, match="raw text has no chat template; leave out one"):
        engine.generate(TEXTS[0], max_new_tokens=1, raw=True, chat_template_kwargs=more)
    with pytest.raises(ValueError, match="token ids have no chat template; leave out one"):
        engine.generate([5, 6], max_new_tokens=1, chat_template_kwargs=more)
    with pytest.raises(ValueError, match="raw: messages have a chat template; pass text, or"):
        engine.generate([[_user("hi")]], max_new_tokens=1, raw=True)
    for wrong in ("{", "[1]", "[" * 99_999, 5, {5: 1}):
        with pytest.raises(ValueError, match=r"chat_template_kwargs is .*; expected a JSON object"):
            engine.generate(TEXTS[0], max_new_tokens=1, chat_template_kwargs=wrong)
    of_the_call = set(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters)
    of_the_call -= {"add_generation_prompt", "continue_final_message", "documents", "tools"}
    for name in {"messages", "conversations", *of_the_call} - {"kwargs"}:
        with pytest.raises(ValueError, match=f"has {name}, which is not the caller's"):
            engine.generate(TEXTS[0], max_new_tokens=1, chat_template_kwargs={name: True})


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ({"role": "user", "content": "hi"}, "dict is no prompt"),  # would be "role" and "content"
        (b"hi", "bytes is no prompt"),  # would be the token ids 104 and 105
        ({"hi", "ho"}, "set is no prompt"),  # would be answered in an order that nobody knows
        (None, "NoneType is no prompt"),
        (["hi", 5], "prompt 2 of 2: int is no prompt"),
        ([5, "hi"], "a list of int and str is no prompt"),
        ([[1], [2.0]], "prompt 2 of 2: a list of float is no prompt"),
        ([{"content": "hi"}], "a message without a role is no prompt"),  # templates leave it out
        (["hi", [7, 10**9]], r"prompt 2 of 2: token ids \[1000000000\] lie outside"),
    ],
)
def test_what_is_no_prompt(engine: Engine, prompts: Any, message: str) -> None:
    """Bug: a single message runs as the prompts "role" and "content", bytes run as token ids, and
    other types are a TypeError that names no prompt."""
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts, max_new_tokens=3)
    assert len(list(engine.stream_many("hi", max_new_tokens=1))) == 1  # not one a letter


@pytest.mark.parametrize("value", [0, 2.5, float("nan"), "3", None])
def test_max_new_tokens_is_a_number(engine: Engine, value: Any) -> None:
    """Bug: a fraction is a TypeError of the page allocator."""
    with pytest.raises(ValueError, match=r"max_new_tokens is .*; expected an integer from 1 up"):
        engine.generate("hi", max_new_tokens=value)


def test_none_is_nothing() -> None:
    """Bug: vLLM's defaults for what ends an answer, is not to be said or to be chosen from, None,
    are refused."""
    nothing: Any = dict.fromkeys(["stop", "stop_token_ids", "bad_words", "logit_bias", "choice"])
    assert SamplingParams(max_new_tokens=4, **nothing) == SamplingParams(max_new_tokens=4)


def test_ids_in_arrays(engine: Engine) -> None:
    """Bug: token ids as a tokenizer returns them, in a tensor or an array, are a TypeError."""
    ids = [5, 6, 7, 8]
    arguments: dict[str, Any] = {"max_new_tokens": 4, "ignore_eos": True}
    expected = engine.generate(ids, **arguments)[0].token_ids
    tensor = torch.tensor(ids)
    for prompt in (tensor, tensor.numpy(), list(tensor.numpy()), tensor[None], [tensor]):
        results = engine.generate(prompt, **arguments)  # type: ignore[arg-type]
        assert [result.token_ids for result in results] == [expected]
    with pytest.raises(ValueError, match="is no prompt"):
        engine.generate(torch.tensor([0.5]), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("outside", [-1, 512, 1 << 31, 1 << 70])
def test_ids_out_of_range(outside: int) -> None:
    """Bug: an id beyond what a machine's integer holds, or a negative one behind others, is taken
    or ends in another error; numpy's ids stay numpy's, and JSON has no word for them."""
    for ids in ([3, outside], [outside, 4]):
        with pytest.raises(ValueError, match=rf"token ids \[{outside}\] lie outside"):
            _ids_within(512, ids)
    mixed: list[Any] = [0, np.int32(511), np.uint8(7), True]
    found = _ids_within(512, mixed)
    assert found == [0, 511, 7, 1] and {type(token) for token in found} == {int}
    assert _ids_within(512, []) == []
    for wrong in (["3"], [3, 0.5], [{}], [None]):
        with pytest.raises(TypeError):
            _ids_within(512, wrong)


def test_sampling_as_one_value(engine: Engine) -> None:
    """Bug: a keyword beside `sampling=` is dropped, or the value's own are; or it is judged
    without them, so that a filter beside a temperature is refused."""
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True, temperature=2.0, seed=3)
    one = engine.generate(TEXTS[0], sampling)[0].token_ids
    apart = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 2.0}
    assert one == engine.generate(TEXTS[0], **apart, seed=3)[0].token_ids
    assert one != engine.generate(TEXTS[0], sampling, seed=4)[0].token_ids
    assert len(engine.generate(TEXTS[0], sampling, max_new_tokens=2)[0].token_ids) == 2
    greedy = engine.generate(TEXTS[0], max_new_tokens=6, ignore_eos=True)[0].token_ids
    assert greedy == engine.generate(TEXTS[0], sampling, top_k=1)[0].token_ids
    with pytest.raises(TypeError, match="did you mean max_new_tokens"):
        engine.generate(TEXTS[0], sampling, max_tokens=2)


def test_one_value_holds_what_names_do(engine: Engine) -> None:
    """Bug: a template's arguments that are taken by name, in a mapping of another type, cannot be
    copied out of a `SamplingParams`: "first argument must be callable"."""
    parameters = MappingProxyType({"type": "object"})
    tool = defaultdict(list, name="f", parameters=parameters)
    kwargs: dict[str, Any] = {"chat_template_kwargs": {"tools": [tool]}, "max_new_tokens": 2}
    named = engine.generate("hi", **kwargs)[0].token_ids
    assert engine.generate("hi", SamplingParams(**kwargs))[0].token_ids == named


@pytest.mark.parametrize("value", [0.7, {"temperature": 0.7}, SamplingParams])
def test_sampling_is_sampling(engine: Engine, value: Any) -> None:
    """Bug: for a number or a dict in its place the error is about dataclasses."""
    with pytest.raises(TypeError, match=r"sampling is .*; pass a SamplingParams, or its values"):
        engine.generate("hi", value)


def test_the_last_token_and_the_one_behind_it(engine: Engine) -> None:
    """Bug: the first id that the vocabulary lacks is taken, and indexes past a table's end; or the
    last that it has is refused."""
    vocab = engine.built.target.vocab_size
    for name, of in (("stop_token_ids", lambda t: [t]), ("logit_bias", lambda t: {t: 1.0})):
        asked_for(engine.built, None, {name: of(vocab - 1)})
        with pytest.raises(ValueError, match=rf"{name} has \[{vocab}\]"):
            asked_for(engine.built, None, {name: of(vocab)})


def test_what_was_asked_before_is_checked_by_its_kind(engine: Engine) -> None:
    """Bug: a value that equals an earlier call's is taken unseen, though it is none of the kind."""
    asked, _ = asked_for(engine.built, None, {"max_new_tokens": 1, "raw": False})
    again, _ = asked_for(engine.built, None, {"max_new_tokens": 1, "raw": False})
    assert again is asked
    for name, value in (("max_new_tokens", True), ("max_new_tokens", 1.0), ("raw", 0)):
        with pytest.raises(ValueError, match=f"{name} is {value!r}; expected"):
            asked_for(engine.built, None, {"max_new_tokens": 1, "raw": False, name: value})


def test_what_was_asked_before_draws_anew(engine: Engine) -> None:
    """Bug: a second call with the same options gives the first one's answer, or another call's
    words; seed 0 is taken for none; a greedy one's seed is drawn, which takes the system's
    randomness and time."""
    built, params = engine.built, {"temperature": 1.0}
    seeds = {asked_for(built, None, params)[1].seed for _ in range(5)}
    assert len(seeds) == 5
    for seed in (7, 0):
        assert {asked_for(built, None, params | {"seed": seed})[1].seed for _ in range(3)} == {seed}
    assert asked_for(built, None, {})[1].seed == asked_for(built, None, {})[1].seed == 0
    words = [asked_for(built, None, {"bad_words": [w]})[1].bad_words for w in ("a", "b", "a")]
    assert words[0] == words[2] != words[1]


def test_nothing_is_queued_by_a_check(engine: Engine) -> None:
    """Bug: prompts in front of a wrong one are left in the queue, or all of a call draw alike."""
    built = engine.built
    asked, sampled = asked_for(built, None, {"temperature": 1.0, "seed": 3, "regex": "[ab]{9}"})
    wrong: Any = ["a", [5], 2.0]
    with pytest.raises(PromptError, match="prompt 3 of 3: float is no prompt") as raised:
        inputs_of(built, wrong, asked, sampled, 0.0)
    assert raised.value.index == 2 and not built.loop.has_work
    one, other = inputs_of(built, ["a", [5]], asked, sampled, 0.0)
    assert other.ids == [5] and one.sampled.seed != other.sampled.seed
    assert one.matcher is not other.matcher and not built.loop.has_work


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"stop": "a"}, "no tokenizer, so stop and bad_words have no tokens"),
        ({"bad_words": ["a"]}, "no tokenizer, so stop and bad_words have no tokens"),
        ({"regex": "a"}, "regex needs this model's tokenizer"),
    ],
)
def test_inputs_without_a_tokenizer(engine: Engine, asked: dict[str, Any], message: str) -> None:
    """Bug: words to end at or to ban are dropped in silence, or a grammar is a traceback."""
    built = replace(engine.built, tokenizer=None, grammars=None)
    with pytest.raises(ValueError, match=message):
        inputs_of(built, [[5]], *asked_for(built, None, asked), 0.0)
    with pytest.raises(ValueError, match="no tokenizer; pass token ids with --prompt-file"):
        encode(None, [[5], "a"], True)


def test_a_refusal_reaches_another_process() -> None:
    """Bug: a refused prompt in a worker of a process pool breaks the pool, or hangs it: the error
    cannot be unpickled."""
    error = PromptError(1, 3, "too long")
    found = pickle.loads(pickle.dumps(error))
    assert (str(found), found.index, found.reason) == (str(error), 1, "too long")


def test_one_prompt_is_not_counted() -> None:
    """Bug: who gave one prompt reads "prompt 1 of 1", or who gave two does not read which."""
    assert str(PromptError(0, 1, "it is empty")) == "it is empty"
    assert str(PromptError(1, 2, "it is empty")) == "prompt 2 of 2: it is empty"
