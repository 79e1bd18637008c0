"""Grammars: what is refused and kept, and where an answer stands, with the bundled tokenizer."""

from __future__ import annotations

import itertools
import json
import os
import string
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from graphengine import TINY_DRAFT, TINY_TARGET, Engine
from graphengine.checkpoints.hub import resolve
from graphengine.checkpoints.tokenizer import Tokenizer
from graphengine.config.constraint import Constraint
from graphengine.decode import grammar as module
from graphengine.decode.grammar import REMEDY, Grammar, Grammars, Matcher, fill_masks

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
    return tokens(mask)


def tokens(mask_TW: torch.Tensor) -> list[set[int]]:
    bits = (mask_TW[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
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
        ("grammar", "start: c*\nc: " + " | ".join(f'"{c}"' for c in string.ascii_letters)),
    ],
)
def test_what_cannot_be_used_is_refused(grammars: Grammars, kind: str, text: str) -> None:
    """Bug: a broken grammar, or one whose first mask is too much for a parser, is found in the
    middle of an answer, or allows anything."""
    remedy = "repeat less" if len(text) > 99 else "correct it$"
    with pytest.raises(ValueError, match=f"(?s){kind} cannot be used: .*{remedy}"):
        grammars.matcher(Constraint(kind, text))


def test_a_first_mask_that_takes_too_long_is_refused(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a request begins whose every step will keep the others waiting."""
    monkeypatch.setattr(module, "BOUND_S", 0.0)
    with pytest.raises(ValueError, match=r"mask took \d\.\d\d s, and 0.0 are allowed; repeat less"):
        grammars.matcher(Constraint("regex", "[a-z]{1,30}"))


def test_waiting_is_no_work(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: time that other threads take counts as a first mask's, and beside busy ones a schema is
    refused that takes 0.3 ms; or the time of its compilation counts."""
    monkeypatch.setattr(module, "BOUND_S", 0.05)
    real, make = grammars._warm, grammars._make
    monkeypatch.setattr(grammars, "_make", lambda text: (sum(range(10**7)), make(text))[1])
    monkeypatch.setattr(grammars, "_warm", lambda m: (time.sleep(module.BOUND_S), real(m))[1])
    assert grammars.matcher(Constraint("regex", "[a-z]{1,30}"))


@pytest.mark.parametrize("text", [r"[^\s\S]", r"a[^\s\S]b"])
def test_what_can_match_nothing(grammars: Grammars, text: str) -> None:
    """Bug: an expression that no text matches is told to repeat less, for a reason that only
    llguidance knows."""
    with pytest.raises(ValueError, match=r"regex cannot be used: no text .* correct it"):
        grammars.matcher(Constraint("regex", text))


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


@pytest.mark.parametrize("outside", [2048, 1 << 40])
def test_an_end_past_the_vocabulary(tokenizer: Tokenizer, outside: int) -> None:
    """Bug: a model of several end tokens, of which one lies behind its last row, answers, but no
    grammar of it can be used."""
    grammars = Grammars(tokenizer.as_json, 2048, (*ENDS, outside))
    matcher = grammars.matcher(Constraint("choice", json.dumps(["no"])))
    assert matcher.advance(tokenizer.encode("no")) is None
    assert allowed(matcher)[0] == set(ENDS)


def test_a_block_of_one_draft_is_forced_too(grammars: Grammars) -> None:
    """Bug: a drafter of one token a step says what is forced without a draft."""
    matcher = grammars.matcher(Constraint("choice", json.dumps(["no"])))
    forced = matcher.forced(5)
    assert forced and matcher.forced(1) == forced[:1]


def test_a_choice_of_thousands(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Bug: a choice of many texts is taken, and its answers end in an error at their first word."""
    matcher = grammars.matcher(Constraint("choice", json.dumps([f"no. {i}" for i in range(3000)])))
    assert matcher.advance(tokenizer.encode("no. 299")) is None
    assert allowed(matcher)[0] >= {ENDS[0], tokenizer.encode("7")[0]}


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
    make = partial(LLMatcher, inner, source, log_level=0, limits=few)
    matcher = Matcher(Grammar(make(), make), ENDS)
    while all(len(row) > len(ENDS) for row in allowed(matcher, 6, [a] * 5)):
        assert matcher.advance([a]) is None and num_said < 50
        num_said += 1
    wrong = matcher.advance([]) or ""
    assert "items" in wrong and REMEDY in wrong


def spread(*matchers: Matcher) -> None:
    for matcher in matchers:
        matcher.grammar.spread()
        assert matcher.grammar.spreading is not None
        matcher.grammar.spreading.join()
        assert len(matcher.grammar.made) == module.num_readers()


@pytest.mark.parametrize("num_requests", [1, 2, 9])
def test_readers_share_the_rows(
    grammars: Grammars,
    tokenizer: Tokenizer,
    num_requests: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bug: a reader masks a row of another one, stays behind what was committed or goes along
    drafts that were not; of several answers of one grammar, one is another's; one that was not
    there at first begins at the end; tokens that are allowed unseen are not."""
    monkeypatch.setattr(module, "MAX_READERS", 5)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    plain = Grammars(tokenizer.as_json, 2048, ENDS)
    plain.prepare(slices=[])
    schema = {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 3}
    constraint = Constraint("json_schema", json.dumps(schema))
    texts = [f'["{"abcdefghi"[: i + 1]}", "at {i} here", "{i}{i}", "x"' for i in range(9)]
    said = [tokenizer.encode(text) for text in texts[:num_requests]]
    matchers = [grammars.matcher(constraint) for _ in said]
    for at in range(0, 15, 3):
        if at == 6:
            spread(matchers[0])
        mask = torch.zeros(num_requests * 6, 64, dtype=torch.int32)
        drafts = [ids[at : at + 4] + [ENDS[0]] for ids in said]
        fill_masks([(6 * i, matchers[i], ids) for i, ids in enumerate(drafts)], mask)
        rows = iter(tokens(mask))
        for i, ids in enumerate(drafts):
            single = plain.matcher(constraint)
            assert single.advance(said[i][:at]) is None
            own, fits = list(itertools.islice(rows, 6)), len(ids) - 1
            for row in range(fits + 1):
                assert own[row] == allowed(single)[0]
                assert row == fits or single.advance([ids[row]]) is None
            assert not any(own[fits + 1 :])
            assert matchers[i].advance(said[i][at : at + 3]) is None


def test_only_a_slow_grammar_is_compiled_again(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: every request pays for matchers that none needs, or no slow one gets them."""
    matcher = grammars.matcher(Constraint("regex", "[a-z]{1,30}"))
    monkeypatch.setattr(module, "SLOW_S", 60.0)
    allowed(matcher)
    assert matcher.grammar.spreading is None
    monkeypatch.setattr(module, "SLOW_S", 0.0)
    allowed(matcher)
    spread(matcher)


def test_what_takes_too_long_ends_alone(
    grammars: Grammars, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a grammar that takes seconds a mask keeps the other answers waiting to its end, one
    hiccup of the machine ends an answer, or another answer ends for it."""
    slow, quick = (grammars.matcher(Constraint("regex", text)) for text in ("a+", "b+"))
    shares, delays_s, found = Matcher.shares, (0.3, 0.0, 0.3, 0.3), list[bool]()

    def late(self: Matcher, *args: Any) -> Any:
        time.sleep(delays_s[len(found)] if self is slow else 0.0)
        return shares(self, *args)

    monkeypatch.setattr(Matcher, "shares", late)
    mask, drafts = torch.zeros(4, 64, dtype=torch.int32), tokenizer.encode("a")
    for _ in delays_s:
        fill_masks([(0, quick, []), (1, slow, drafts)], mask)
        assert quick.advance([]) is None
        found.append(slow.advance([]) is not None)
    assert found == [False, False, False, True]
    assert REMEDY in (slow.advance([]) or "") and "0.25 are allowed" in (slow.advance([]) or "")


@pytest.mark.slow
def test_a_lexer_at_its_limit_ends_its_answer_alone() -> None:
    """Bug: a grammar too complex for the lexer is said to be complete; another stream ends with it;
    what is kept of it is broken for every request to come."""
    text = "(.{1,500}){40,500}"
    with Engine.from_pretrained(TINY_TARGET, draft=TINY_DRAFT) as engine:
        (alone,) = engine.generate("Hi", regex="[0-9]{30}", max_new_tokens=40)
        for _ in range(2):
            beside = engine.submit("Hi", regex="[0-9]{30}", max_new_tokens=40)
            found = engine.submit("Hi", regex=text, temperature=1.0, seed=1, max_new_tokens=99)
            assert found.result().finish_reason == "error"
            assert REMEDY in (found.result().error or "") and found.result().token_ids
            assert beside.result().token_ids == alone.token_ids


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


def test_nothing_is_ruled_out_behind_what_does_not_fit(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    """Bug: a check of an answer that left its grammar sees an error behind every later token too,
    none of which its masks have chosen."""
    matcher = grammars.matcher(Constraint("regex", "a"))
    assert not matcher.allowed(2048).all()
    assert matcher.advance(tokenizer.encode("b")) is not None
    assert matcher.allowed(2048).all()


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


def test_a_model_without_an_end(tokenizer: Tokenizer) -> None:
    """Bug: llguidance's own words ("eos_token list must not be empty"), with no remedy."""
    grammars = Grammars(tokenizer.as_json, 2048, [2048])
    with pytest.raises(ValueError, match=r"write eos_token_id into its generation_config.json"):
        grammars.matcher(Constraint("regex", "a"))


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
        ({"json_schema": "[" * 100_000}, r"no JSON \((maximum recursion|Stack overflow)"),
        ({"json_schema": "true"}, "is an object"),
        ({"regex": ""}, "not empty"),
        ({"grammar": 3}, "not empty"),
        ({"choice": ()}, ""),
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


def test_what_is_kept_is_what_was_asked_for_last(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the grammar that every request has is compiled again and again, since it came first; or
    one that has met a limit of its lexer ends each answer to come."""
    monkeypatch.setattr(module, "MAX_KEPT", 2)
    often, once, new = (Constraint("regex", text) for text in ("a", "b", "c"))
    first = grammars.matcher(often).grammar
    for constraint in (once, often, new):
        grammars.matcher(constraint)
    assert grammars.matcher(often).grammar is first
    reader: Any = SimpleNamespace(is_error=lambda: True, get_error=lambda: "too many expressions")
    grammars.matcher(often).judge([reader], 0.0)
    assert grammars.matcher(often).grammar is not first


def test_a_copy_goes_its_own_way(
    grammars: Grammars, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: what a copy is led along counts as said by the answer, whose other readers then stand
    somewhere else; or those of a copy do, at the beginning of its text."""
    monkeypatch.setattr(module, "DEAR_LEAD_S", 99.0)
    constraint, ids = Constraint("regex", "(ab|cd){4}"), tokenizer.encode("a")
    one = grammars.matcher(constraint)
    spread(one)
    copy = one.copy()
    assert copy.advance(ids) is None
    expected = allowed(grammars.matcher(constraint))[0]
    assert allowed(one, 2, ids) == [expected, allowed(copy)[0]] and allowed(copy)[0] != expected
    behind = tokenizer.encode("b")
    wanted = allowed(copy, 2, behind)
    assert allowed(copy.copy(), 2, behind) == wanted
