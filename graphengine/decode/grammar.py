"""Grammars and where an answer stands in one: llguidance's door.

Compiling takes milliseconds to a second and happens in the thread that asks; what comes of it is
kept by its text, and an answer gets a copy. A row's mask takes up to a millisecond (a string near
the bound of its length, 152k tokens), and copies of one matcher share a lock: a grammar whose masks
take long is compiled several times over, beside the loop, and the rows of a block are shared out.
What takes too long all the same ends its request, since others wait meanwhile.

Invariant: a matcher stands behind the committed tokens; for masks a copy is led along the drafts.
It does not go there and come back: llguidance (1.9.1) keeps a mask over a rollback, and gives it to
another path whose lexer stands alike in a row of that number (one mask in 18,000 was wrong).

Legend: T rows, W words of a row's mask.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from graphengine.config.constraint import Constraint
from graphengine.decode import control_tokens

MAX_KEPT = 64  # compiled grammars, the last asked for
# Between JSON's tokens: compact, as json.dumps writes it, or indented. Without a bound a weak model
# may say nothing else until its budget ends. A schema's own "x-guidance" overrides it.
WHITE_SPACE = r" |\n {0,40}"
MAX_READERS = 8  # of a slow grammar
SLOW_S = 2e-3  # for the masks of a step; a verify takes longer
DEAR_LEAD_S = 5e-4  # to go along the drafts, which readers do one after another
BOUND_S = 0.25  # for the first mask of a grammar, and for the masks of a step twice in a row
REMEDY = "repeat less (maxLength, maxItems, {m,n}), recurse on the left, allow one reading only"
NO_BEGINNING = "NoExtensionBias"  # llguidance's word where a first mask allows no token
# Where any text of up to so many characters may stand, tokens within it are allowed unseen.
# llguidance's own slices are 10 and 30 long and leave it every token near the bound of a string:
# with Qwen3's, 634 us a row of the last 20 characters, 415 with these (a cloud CPU).
TEXT = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{TEXT}{{1,{n}}}" for n in (4, 7, 11, 16)), f"{TEXT}+"]


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


def _reason(matcher: Any) -> str:
    return matcher.get_error().partition("<state>")[0].strip()


def num_readers() -> int:
    """Readers of a slow grammar, and threads for them; more than cores would only cost caches."""
    return max(2, min(MAX_READERS, os.cpu_count() or 1))


class Grammar:
    """A compiled text: matchers that share no lock, each of which was compiled for itself."""

    def __init__(self, first: Any, make: Callable[[], Any]) -> None:
        """Args: first: llguidance's matcher, make: another one."""
        self.made, self._make = [first], make
        self.is_broken = False
        """An answer met a limit of the lexer, which copies share, so the others of this text end
        too; for the next one it is compiled anew."""
        self.spreading: threading.Thread | None = None

    def spread(self) -> None:
        """Has the other readers compiled, once; each is used from then on. Where the machine gives
        no thread for that there is the first one alone."""
        if self.spreading is None:
            # No daemon, which would be torn out of foreign code where the interpreter ends.
            self.spreading = threading.Thread(target=self._spread, name="graphengine-grammar")
            with suppress(RuntimeError):
                self.spreading.start()

    def _spread(self) -> None:
        while len(self.made) < num_readers():
            self.made.append(self._make())


class Grammars:
    """Compiles grammars for one tokenizer and keeps them by their text. Several threads may ask."""

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, ends: Collection[int]):
        """Args:
        tokenizer_json: gives the text of a tokenizer.json; asked at the first grammar.
        vocab_size: of the target's logits; tokens past the tokenizer's are never allowed.
        ends: tokens that end an answer, which is what may stand behind a complete one; those past
            the logits never come up.
        """
        self._json, self._vocab_size = tokenizer_json, vocab_size
        self._ends = sorted(token for token in ends if token < vocab_size)
        self._tokenizer: Any = None
        self._control_ids: dict[str, int] = {}
        self._kept: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self, slices: Sequence[str] = SLICES) -> None:
        """Builds what all grammars share, a second's work for 150k tokens; once.

        Raises:
            ValueError: no token ends an answer; or llguidance is not there.
        """
        if not self._ends:
            raise ValueError(
                "json_schema, regex, choice and grammar need a token that ends an answer, and this "
                "model names none; write eos_token_id into its generation_config.json"
            )
        with self._lock:
            if self._tokenizer is None:
                make = _llguidance().LLTokenizer
                size, ends = self._vocab_size, self._ends
                text, self._control_ids = control_tokens.hidden(self._json(), size)
                self._tokenizer = make(text, n_vocab=size, eos_token=ends, slices=list(slices))

    def matcher(self, constraint: Constraint) -> Matcher:
        """The matcher of an answer that begins.

        Raises:
            ValueError: the grammar cannot be compiled, its first mask is more than a step may
                take, or `prepare` fails.
        """
        self.prepare()
        with self._lock:
            found = self._kept.pop(constraint, None)
        if found is None or found.is_broken:
            found = self._compile(constraint)
        with self._lock:
            self._kept[constraint] = found
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return Matcher(found, self._ends)

    def _compile(self, constraint: Constraint) -> Grammar:
        kind, text = constraint
        try:
            source = _source(kind, text, self._control_ids)
            first = self._make(source)
            reason = _reason(first)
        except Exception as raised:  # whatever its compiler makes of a broken text
            raise ValueError(f"{kind} cannot be used: {raised}; correct it") from raised
        if reason:
            raise ValueError(f"{kind} cannot be used: {reason}; correct it")
        began = time.thread_time()  # others may have the cores, or Python's lock, meanwhile
        self._warm(first)
        took_s, reason = time.thread_time() - began, _reason(first)
        if took_s > BOUND_S and not reason:
            reason = f"its first mask took {took_s:.2f} s, and {BOUND_S} are allowed"
        if reason:
            remedy = REMEDY
            if reason == NO_BEGINNING:
                reason, remedy = "no text that this model can write matches it", "correct it"
            raise ValueError(f"{kind} cannot be used: {reason}; {remedy}")
        return Grammar(first, lambda: self._warm(self._make(source)))

    def _make(self, source: str) -> Any:
        return _llguidance().LLMatcher(self._tokenizer, source, log_level=0)

    def _warm(self, matcher: Any) -> Any:
        # Copies share what a first mask builds: milliseconds that no step shall wait for.
        mask_W = torch.zeros((self._vocab_size + 31) // 32, dtype=torch.int32)
        matcher.unsafe_compute_mask_ptr(mask_W.data_ptr(), mask_W.nbytes)
        return matcher


def _source(kind: str, text: str, control_ids: Mapping[str, int]) -> str:
    """What llguidance compiles."""
    matchers = _llguidance().LLMatcher
    if kind == "json_schema":
        defaults = {"whitespace_pattern": WHITE_SPACE}
        return matchers.grammar_from_json_schema(text, defaults=defaults)
    if kind == "regex":
        return matchers.grammar_from_regex(text)
    if kind == "choice":
        texts = " | ".join(json.dumps(each) for each in json.loads(text))
        # One token of its lexer: as rules, 2,000 texts are more than a row of its parser holds.
        return matchers.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    return matchers.grammar_from_lark(control_tokens.numbered(text, control_ids))


class Matcher:
    """Where an answer stands in its grammar. Not thread-safe."""

    def __init__(self, grammar: Grammar, ends: Sequence[int]) -> None:
        self.grammar, self._ends = grammar, ends
        self.inner = grammar.made[0].deep_copy()
        self._said = list[int]()
        self._others = dict[int, tuple[Any, int]]()  # readers, and how many tokens they followed
        self.took_s = 0.0  # the masks of the last step
        self.broken: str | None = None
        """What went wrong, after which masks allow the end alone."""

    def advance(self, token_ids: Sequence[int]) -> str | None:
        """Follows tokens that were committed. Returns what went wrong, if anything, here or in
        masks before."""
        self.inner.consume_tokens(list(token_ids))
        self._said += token_ids
        if self.broken is None and self.inner.is_error():
            self.broken = _reason(self.inner) or "a token does not fit"
        return self.broken

    def forced(self, most: int) -> list[int]:
        """The next tokens, at most so many, as far as there is no choice; the end's with them."""
        if most < 1:
            return []
        if self.inner.is_stopped():
            return [self._ends[0]]
        return self.inner.compute_ff_tokens()[:most]

    def shares(
        self, row: int, drafts: list[int], first: int, most: int
    ) -> Iterator[tuple[Any, int, list[int]]]:
        """Shares the rows of a block among at most so many readers, from the `first` on; those of a
        reader come one after another. Yields (what stands in front of a row, the row, drafts behind
        it, along which it is led and masks a row each)."""
        if not drafts:
            yield self._reader(first), row, []
            return
        count, num_rows = min(most, len(self.grammar.made)), 1 + len(drafts)
        if count > 1:
            began, ahead = time.perf_counter(), self.inner.deep_copy()
            num_rows = 1 + ahead.try_consume_tokens(drafts)
            if ahead.is_error() or time.perf_counter() - began > DEAR_LEAD_S:
                count = 1
        if count == 1:
            yield self._reader(first).deep_copy(), row, drafts
            return
        # Rows that take long stand side by side: each reader takes one of them.
        for i in range(min(count, num_rows)):
            ahead, num_led = self._reader(first + i).deep_copy(), 0
            for at in range(i, num_rows, count):
                ahead.consume_tokens(drafts[num_led:at])
                num_led = at
                yield ahead.deep_copy(), row + at, []

    def _reader(self, index: int) -> Any:
        """One of the grammar's, behind the committed tokens."""
        index %= len(self.grammar.made)
        if index == 0:
            return self.inner
        reader, count = self._others.get(index) or (self.grammar.made[index].deep_copy(), 0)
        reader.consume_tokens(self._said[count:])
        self._others[index] = reader, len(self._said)
        return reader

    def judge(self, readers: Sequence[Any], took_s: float) -> None:
        """Takes note of a step's masks. Args: readers: who worked them out. took_s: seconds, those
        of others with them unless some took too long in the step before."""
        for reader in readers:
            if reader.is_error() and self.broken is None:
                self.broken, self.grammar.is_broken = f"{_reason(reader)}; {REMEDY}", True
        if min(took_s, self.took_s) > BOUND_S:
            self.broken = f"masks took {took_s:.2f} s a step, and {BOUND_S} are allowed; {REMEDY}"
        if took_s > SLOW_S:
            self.grammar.spread()
        self.took_s = took_s

    def allowed(self, vocab_size: int) -> Tensor:
        """What may stand next, bool [V], worked out alone, to check `fill_masks`. Behind a token
        that did not fit nothing is ruled out."""
        if self.inner.is_error():
            return torch.ones(vocab_size, dtype=torch.bool)
        words_W = torch.frombuffer(bytearray(self.inner.compute_bitmask()), dtype=torch.int32)
        bits_WB = (words_W[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
        return bits_WB.flatten()[:vocab_size] != 0

    def copy(self) -> Matcher:
        """One that goes on from here on its own."""
        found = Matcher(self.grammar, self._ends)
        found.inner, found._said = self.inner.deep_copy(), list(self._said)
        return found


@cache
def _executor() -> Any:
    return _llguidance().LLExecutor(num_readers())


def fill_masks(jobs: Sequence[tuple[int, Matcher, list[int]]], mask_TW: Tensor) -> None:
    """What may stand next, a bit a token: for each matcher in its row, and in the rows below it
    behind each of its drafts, up to one that does not fit; later rows stay as they are.

    Args:
        jobs: (row, matcher, drafts).
        mask_TW: int32 on the host, contiguous.
    Mutates: mask_TW; matchers, which learn what was too much or took too long. Runs on llguidance's
    threads.
    """
    assert mask_TW.is_contiguous() and mask_TW.device.type == "cpu"
    address, num_rows = mask_TW.data_ptr(), len(mask_TW)
    row_bytes = mask_TW.shape[1] * mask_TW.element_size()
    # Nothing tells whose masks took the time, so where they took too much they go one by one.
    is_long = any(matcher.took_s > BOUND_S for _, matcher, _ in jobs)
    for group in [[job] for job in jobs] if is_long else [jobs]:
        began, most = time.perf_counter(), max(1, num_readers() // len(group))
        shares = [
            list(matcher.shares(row, drafts, i * most, most))
            for i, (row, matcher, drafts) in enumerate(group)
        ]
        every = list(itertools.chain.from_iterable(shares))
        if alone := [(reader, row) for reader, row, drafts in every if not drafts]:
            _executor().unsafe_compute_mask_ptr(alone, address, row_bytes, num_rows)
        if led := [share for share in every if share[2]]:
            _executor().unsafe_compute_mask_ptr_with_draft_token(led, address, row_bytes, num_rows)
        took_s = time.perf_counter() - began
        for (_, matcher, _), own in zip(group, shares, strict=True):
            matcher.judge([reader for reader, *_ in own], took_s)
