"""Grammars and where an answer stands in one: llguidance's door.

Compiling takes milliseconds to a second and happens in the thread that asks; what comes of it is
kept by its text, and an answer gets a copy. A row's mask takes up to a millisecond (a string whose
length is bounded, 152k tokens); a request's rows are worked out one after another.

Invariant: a matcher stands behind the committed tokens; for masks a copy is led along the drafts.
It does not go there and come back: of a matcher that had, one mask of 18,000 allowed too much.

Legend: T rows, W words of a row's mask.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from graphengine.config.constraint import Constraint

MAX_KEPT = 64  # compiled grammars, the last asked for
# Between JSON's tokens: compact, as json.dumps writes it, or indented. Without a bound a weak model
# may say nothing else until its budget ends. A schema's own "x-guidance" overrides it.
WHITE_SPACE = r" |\n {0,40}"


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ValueError(
            "json_schema, regex, choice and grammar need llguidance; "
            'install it: pip install "graphengine[grammar]"'
        ) from error
    return llguidance


def llguidance_missing() -> bool:
    """Whether the `grammar` extra is not installed."""
    return importlib.util.find_spec("llguidance") is None


class Grammars:
    """Compiles grammars for one tokenizer and keeps them by their text. Several threads may ask."""

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, ends: Collection[int]):
        """Args:
        tokenizer_json: gives the text of a tokenizer.json; asked at the first grammar.
        vocab_size: of the target's logits; tokens past the tokenizer's are never allowed.
        ends: tokens that end an answer, which is what may stand behind a complete one.
        """
        self._json, self._vocab_size, self._ends = tokenizer_json, vocab_size, sorted(ends)
        self._tokenizer: Any = None
        self._kept: OrderedDict[Constraint, Any] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Builds what all grammars share, a second's work for 150k tokens; once."""
        with self._lock:
            if self._tokenizer is None:
                make = _llguidance().LLTokenizer
                text, ends = self._json(), self._ends
                self._tokenizer = make(text, n_vocab=self._vocab_size, eos_token=ends)

    def matcher(self, constraint: Constraint) -> Matcher:
        """Of an answer that begins.

        Raises:
            ValueError: the grammar cannot be compiled, or llguidance is not there.
        """
        self.prepare()
        with self._lock:
            found = self._kept.pop(constraint, None)
        if found is None:
            found = self._compile(constraint)
        with self._lock:
            self._kept[constraint] = found
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return Matcher(found.deep_copy(), self._ends)

    def _compile(self, constraint: Constraint) -> Any:
        kind, text = constraint
        matchers = _llguidance().LLMatcher
        try:
            if kind == "json_schema":
                defaults = {"whitespace_pattern": WHITE_SPACE}
                source = matchers.grammar_from_json_schema(text, defaults=defaults)
            elif kind == "regex":
                source = matchers.grammar_from_regex(text)
            elif kind == "choice":
                texts = " | ".join(json.dumps(each) for each in json.loads(text))
                source = matchers.grammar_from_lark(f"start: {texts}")
            else:
                source = matchers.grammar_from_lark(text)
            found = matchers(self._tokenizer, source, log_level=0)
            error = found.get_error()
        except Exception as raised:  # whatever its compiler makes of a broken text
            found, error = None, str(raised)
        if error:
            reason = error.partition("<state>")[0].strip()
            raise ValueError(f"{kind} cannot be used: {reason}; correct it")
        # Copies share what a first mask builds: milliseconds that no step shall wait for.
        mask_1W = torch.zeros(1, (self._vocab_size + 31) // 32, dtype=torch.int32)
        fill_masks([(0, Matcher(found, self._ends), [])], mask_1W)
        return found


class Matcher:
    """Where an answer stands in its grammar. Not thread-safe."""

    def __init__(self, inner: Any, ends: Sequence[int]) -> None:
        """Args: inner: llguidance's own."""
        self.inner, self._ends = inner, ends
        self.broken: Any = None
        """A copy that met a limit of the parser, from which on it allows the end alone."""

    def advance(self, token_ids: Sequence[int]) -> str | None:
        """Follows tokens that were committed. Returns what went wrong, if anything, here or in
        masks before."""
        self.inner.consume_tokens(list(token_ids))
        broken = self.inner if self.inner.is_error() else self.broken
        if broken is None:
            return None
        return broken.get_error().partition("<state>")[0].strip() or "a token does not fit"

    def forced(self, most: int) -> list[int]:
        """The next tokens, at most so many, as far as there is no choice; the end's with them."""
        if most < 1:
            return []
        if self.inner.is_stopped():
            return [self._ends[0]]
        return self.inner.compute_ff_tokens()[:most]

    def allowed(self, vocab_size: int) -> Tensor:
        """What may stand next, bool [V], worked out alone: for who checks `fill_masks`. Behind a
        token that did not fit nothing is ruled out."""
        if self.inner.is_error():
            return torch.ones(vocab_size, dtype=torch.bool)
        words_W = torch.frombuffer(bytearray(self.inner.compute_bitmask()), dtype=torch.int32)
        bits_WB = (words_W[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
        return bits_WB.flatten()[:vocab_size] != 0

    def copy(self) -> Matcher:
        """One that goes on from here on its own."""
        return Matcher(self.inner.deep_copy(), self._ends)


@cache
def _executor() -> Any:
    return _llguidance().LLExecutor()


def fill_masks(jobs: Sequence[tuple[int, Matcher, list[int]]], mask_TW: Tensor) -> None:
    """What may stand next, a bit a token: of each matcher in the row that is named, and in those
    below behind each of its drafts, up to one that does not fit; later rows stay as they are.

    Args:
        jobs: (row, matcher, drafts).
        mask_TW: int32 on the host, contiguous.
    Mutates: mask_TW; matchers, where a parser meets a limit. Runs on llguidance's threads, one a
    matcher.
    """
    assert mask_TW.is_contiguous() and mask_TW.device.type == "cpu"
    where = mask_TW.data_ptr(), mask_TW.shape[1] * mask_TW.element_size(), len(mask_TW)
    if alone := [(matcher.inner, row) for row, matcher, drafts in jobs if not drafts]:
        _executor().unsafe_compute_mask_ptr(alone, *where)
    led = [(matcher, row, drafts) for row, matcher, drafts in jobs if drafts]
    copies = [(matcher.inner.deep_copy(), row, drafts) for matcher, row, drafts in led]
    if copies:
        _executor().unsafe_compute_mask_ptr_with_draft_token(copies, *where)
    for (matcher, *_), (copy, *_) in zip(led, copies, strict=True):
        if copy.is_error():
            matcher.broken = copy
