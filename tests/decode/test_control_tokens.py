"""Control tokens in grammars: text that spells one, and grammars that name one."""

from __future__ import annotations

import json

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Fast

from graphengine import TINY_DRAFT, TINY_TARGET, Engine
from graphengine.checkpoints.hub import resolve
from graphengine.checkpoints.tokenizer import Tokenizer
from graphengine.config.constraint import Constraint
from graphengine.decode.control_tokens import hidden, numbered
from graphengine.decode.grammar import Grammars

END, NAME = 2042, "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve(TINY_TARGET))


def first_answer(grammars: Grammars, constraint: Constraint) -> list[int]:
    """What a grammar without a choice has for an answer."""
    matcher, answer = grammars.matcher(constraint), []
    while True:
        (token,) = matcher.allowed(2048).nonzero()[:, 0].tolist()
        assert matcher.forced(1) == [token]
        answer.append(token)
        if token == END:
            return answer
        assert matcher.advance([token]) is None


@pytest.mark.parametrize("name", [NAME, "<|im_start|>"])
@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("choice", '["{}x"]', "{}x"),
        ("json_schema", '{{"const": "{}x"}}', '"{}x"'),
        ("grammar", 'start: "{}x"', "{}x"),
    ],
)
def test_text_that_spells_one(
    tokenizer: Tokenizer, name: str, kind: str, text: str, expected: str
) -> None:
    """Bug: an answer that has to spell a control token ends there, or its request does."""
    grammars = Grammars(tokenizer.as_json, 2048, [END])
    answer = first_answer(grammars, Constraint(kind, text.format(name)))
    assert answer.count(END) == 1
    assert tokenizer.decode(answer) == expected.format(name)


def test_an_engine_spells_one() -> None:
    """Bug: the same, through an engine's masks and forced tokens."""
    with Engine.from_pretrained(
        TINY_TARGET, TINY_DRAFT, device="cpu", structured_outputs=True
    ) as engine:
        (result,) = engine.generate("Say it.", choice=(f"{NAME}x",), max_new_tokens=30)
    assert (result.text, result.finish_reason) == (f"{NAME}x", "stop")


def test_a_grammar_may_name_one(tokenizer: Tokenizer) -> None:
    """Bug: a Lark grammar can no longer ask for a control token."""
    grammars = Grammars(tokenizer.as_json, 2048, [END])
    answer = first_answer(grammars, Constraint("grammar", 'start: <|im_start|> "ok"'))
    assert answer == [2041, *tokenizer.encode("ok"), END]


@pytest.mark.parametrize(
    "text",
    [
        r'"a<think>"',
        r'"\"<think>"',
        r"/a<think>\/<think>/",
        "// <think>",
        '%json {"const": "<think>"}',
        "<other>",
    ],
)
def test_what_names_none(text: str) -> None:
    """Bug: a name in a string, an expression or a remark is taken for the control token."""
    ids = {"<think>": 7}
    assert numbered(f"start: {text}\nb: <think> <think>", ids) == (f"start: {text}\nb: <[7]> <[7]>")


@pytest.mark.parametrize("is_list", [False, True])
def test_other_tokens_keep_their_ids(is_list: bool) -> None:
    """Bug: a control token that is in the vocabulary gets a new id, and shifts those behind it; or
    one that llguidance takes for such is left out, or taken for a text by its new name."""
    texts = ["<unk>", "<s>", "<", "s", ">"]
    kind = (
        models.Unigram([(t, -1.0) for t in texts], unk_id=0, byte_fallback=False)
        if is_list
        else models.BPE({t: i for i, t in enumerate(texts)}, [], unk_token="<unk>")
    )
    made = Fast(kind)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<unk>", "<s>"])
    made.add_tokens([AddedToken("  "), AddedToken("<tool>"), AddedToken("[X]")])
    made.add_special_tokens(["</s>"])
    before = made.get_vocab()
    text, ids = hidden(made.to_str(), 10)
    base = LLTokenizer(made.to_str(), n_vocab=10, eos_token=1, slices=[])
    assert set(ids.values()) == {i for i in before.values() if base.is_special_token(i)}
    base = LLTokenizer(text, n_vocab=10, eos_token=1, slices=[])
    assert set(ids.values()) == {i for i in before.values() if base.is_special_token(i)}
    after = Fast.from_str(text)
    assert {t.removeprefix("\0"): i for t, i in after.get_vocab().items()} == before
    assert after.encode("<s>").ids == [2, 3, 4]
    assert after.encode("  [X]").ids == made.encode("  [X]").ids == [5, 7]
    assert json.loads(text)["model"].get("unk_token") in ("\0<unk>", None)


def test_tokens_behind_the_logits_are_left_out() -> None:
    """Bug: an added token right behind the last logit is told to llguidance, which refuses every
    grammar for it."""
    made = Fast(models.BPE({"a": 0, "b": 1}, []))
    made.add_tokens([AddedToken("<in>"), AddedToken("<out>"), AddedToken("<far>")])
    text, ids = hidden(made.to_str(), 3)
    assert ids == {"<in>": 2}
    assert [token["id"] for token in json.loads(text)["added_tokens"]] == [2]
