"""Grammars: what is refused and kept, and where an answer stands, with the bundled tokenizer."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import pytest
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from graphengine import TINY_DRAFT, TINY_TARGET, Engine
from graphengine.checkpoints.hub import resolve
from graphengine.checkpoints.tokenizer import Tokenizer
from graphengine.config.constraint import Constraint
from graphengine.decode import grammar as module
from graphengine.decode.grammar import Grammars, Matcher, fill_masks

ENDS = (2040, 2042)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve(TINY_TARGET))


@pytest.fixture
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer.as_json, 2048, ENDS)


def allowed(matcher: Any, rows: int = 1, drafts: Any = ()) -> list[set[int]]:
    mask = torch.zeros(rows, 64, dtype=torch.int32)
    fill_masks([(0, matcher, list(drafts))], mask)
    bits = (mask[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return [set(row.nonzero()[:, 0].tolist()) for row in bits.flatten(1)]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type": "nothing"}'),
        ("json_schema", '{"type": "object", "properties": {"a": 3}}'),
        ("regex", "a("),
        ("regex", "(?=a)b"),
        ("grammar", "start: missing"),
        ("grammar", "start: /a"),
    ],
)
def test_what_cannot_be_compiled_is_refused(grammars: Grammars, kind: str, text: str) -> None:
    """Bug: a broken grammar is found in the middle of an answer, or allows anything."""
    with pytest.raises(ValueError, match=f"{kind} cannot be used"):
        grammars.matcher(Constraint(kind, text))


def test_an_answer_ends_where_its_grammar_does(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Bug: a second of two end tokens is ruled out, an answer may end too early or must go on, or
    what is over forces nothing."""
    matcher = grammars.matcher(Constraint("choice", json.dumps(["no", "nob"])))
    assert not set(ENDS) & allowed(matcher)[0] and matcher.forced(5)
    assert matcher.advance(tokenizer.encode("no")) is None
    assert allowed(matcher)[0] >= set(ENDS) and matcher.forced(5) == []
    assert matcher.advance(tokenizer.encode("b")) is None
    assert allowed(matcher)[0] == set(ENDS) and matcher.forced(5) == [ENDS[0]]
    assert matcher.forced(0) == []
    assert "" != matcher.advance(tokenizer.encode("x")) is not None


def test_masks_along_drafts_leave_the_matcher_where_it_was(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    """Bug: a matcher that was led along drafts stays there, rows behind a draft that does not fit
    are written."""
    constraint = Constraint("regex", "[0-9]{9}")
    matcher, fresh = grammars.matcher(constraint), grammars.matcher(constraint)
    ids = tokenizer.encode("1234567") + tokenizer.encode("x") + tokenizer.encode("34")
    known = len(tokenizer.encode("1234567"))
    assert known > 4
    rows = allowed(matcher, len(ids) + 1, ids)
    assert all(rows[: known + 1]) and not any(rows[known + 2 :])
    assert rows[0] == allowed(fresh)[0] == allowed(matcher)[0]
    for i, token in enumerate(ids[:known]):
        assert fresh.advance([token]) is None and allowed(fresh)[0] == rows[i + 1]


def test_a_parser_at_its_limit_is_told(tokenizer: Tokenizer) -> None:
    """Bug: a parser meets a limit, from which on it allows the end alone: the answer breaks off
    there and says that it is complete."""
    inner = LLTokenizer(tokenizer.as_json(), n_vocab=2048, eos_token=list(ENDS))
    source = LLMatcher.grammar_from_lark('start: s\ns: s s | "a" | ""')
    few = LLParserLimits(max_items_in_row=30)
    (a,), num_said = tokenizer.encode("a"), 0
    matcher = Matcher(LLMatcher(inner, source, log_level=0, limits=few), ENDS)
    while all(len(row) > len(ENDS) for row in allowed(matcher, 6, [a] * 5)):
        assert matcher.advance([a]) is None and num_said < 50
        num_said += 1
    assert "items" in (matcher.advance([]) or "")


def test_answers_of_one_grammar_stand_apart(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Bug: what is kept is handed out itself, and the second answer begins where the first is; or
    all that was ever compiled is kept."""
    constraint = Constraint("regex", "[ab]{3}")
    one, other = grammars.matcher(constraint), grammars.matcher(constraint)
    assert one.advance(tokenizer.encode("aba")) is None
    assert allowed(one)[0] == set(ENDS) != allowed(other)[0]
    for n in range(module.MAX_KEPT + 9):
        grammars.matcher(Constraint("regex", f"a{{{n + 1}}}"))
    assert len(grammars._kept) == module.MAX_KEPT and constraint not in grammars._kept


def test_threads_share_a_tokenizer(tokenizer: Tokenizer) -> None:
    """Bug: two first requests build it twice."""
    asked: list[str] = []

    def once() -> str:
        asked.append("")
        return tokenizer.as_json()

    grammars = Grammars(once, 2048, ENDS)
    constraint = Constraint("regex", "a+")
    threads = [threading.Thread(target=grammars.matcher, args=(constraint,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1


def test_without_the_extra(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: an ImportError with no remedy."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"graphengine\[grammar\]"):
        grammars.matcher(Constraint("regex", "a"))


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"json_schema": "{"}, "json_schema is no JSON"),
        ({"json_schema": "[1]"}, "is an object"),
        ({"json_schema": 5}, "no JSON"),
        ({"json_schema": "true"}, "is an object"),
        ({"regex": ""}, "not empty"),
        ({"grammar": 3}, "not empty"),
        ({"choice": []}, ""),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"regex": "a", "choice": ["b"]}, "one of them"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"regex": "a", "min_tokens": 2}, "min_tokens"),
    ],
)
def test_refusals(asked: dict[str, Any], why: str) -> None:
    """Bug: a wish that cannot be granted is dropped, or ends in a traceback from a library."""
    with Engine.from_pretrained(TINY_TARGET, draft=TINY_DRAFT) as engine:
        if not why:
            assert engine.generate("Hi", max_new_tokens=2, **asked)
            return
        with pytest.raises(ValueError, match=why):
            engine.generate("Hi", **asked)


def test_only_where_it_is_built() -> None:
    """Bug: an engine without masks says whatever it likes."""
    options: Any = {"simulate_acceptance": 2.0}
    with (
        Engine.from_pretrained(TINY_TARGET, draft=TINY_DRAFT, **options) as engine,
        pytest.raises(ValueError, match="structured_outputs=True"),
    ):
        engine.generate("Hi", regex="a+")
    with pytest.raises(ValueError, match="structured_outputs needs real acceptance"):
        Engine.from_pretrained(TINY_TARGET, draft=TINY_DRAFT, **options, structured_outputs=True)


def test_nothing_is_left() -> None:
    """Bug: bad words rule out all that a grammar allows, and the answer goes on with token 0, or
    its error blames the weights."""
    with Engine.from_pretrained(TINY_TARGET, draft=TINY_DRAFT) as engine:
        ids = [t for t in range(2040) if (engine.tokenizer and engine.tokenizer.decode([t])) == "a"]
        bias = dict.fromkeys(ids, -100.0)
        (found,) = engine.generate("Hi", choice=["a"], logit_bias=bias, max_new_tokens=4)
        assert found.text == "a"  # less likely, but all there is
        (found,) = engine.generate("Hi", choice=["a"], bad_words=["a"], max_new_tokens=4)
        assert found.finish_reason == "error" and "grammar allows" in (found.error or "")
