"""A text's token ids from those of its pieces, which are remembered.

A next turn repeats all that was said, and 21,500 tokens of it took 71 ms to encode again (2-core
cloud CPU), where their K/V comes from the cache. A tokenizer cuts a text at its added tokens, as a
chat template puts them around each message, and encodes what stands between two by itself. So do
we, and what is new on all cores: a long piece is cut where a line begins with a letter or a digit,
if the tokenizer cuts there too.

Invariant: the ids are those of the whole text. A tokenizer whose added tokens take the text beside
them into account, or one that tells a text's beginning from a piece's, is asked for whole texts;
the latter shows when it is loaded, and so does what it does where a line begins.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection
from itertools import chain, islice
from threading import Lock
from typing import Any

MAX_CHARS = 4_000_000  # of pieces that are remembered, a million tokens or so
SHARED_CHARS = 3_000  # new text that is worth threads: two milliseconds of one
PART_CHARS = 1_500  # of a long piece that one core encodes
_LINE = re.compile(r"(?<=\n)(?=[0-9A-Za-z])")  # where one begins that may be encoded by itself
_ENDS = ("x", "x  ", *" \t\n\r.7\u00e9\u4e2d\u3000", "\n\n", " \n ", "!=")
_BEGINS = (*"aZ09", "The", "def", "x7", "42", "I'm", "E\u0301")
_BESIDE = ("x", " x", "x ", "\n", "7", "\u00e9", "\u4e2d\u6587", "  ")
_SAID = " ".join("a" * 64)  # which every tokenizer knows


class PieceEncoder:
    """Encodes for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        """Args: tokenizer: of transformers."""
        self._tokenizer, self._lock = tokenizer, Lock()
        # Asked itself where it says the same: transformers adds 0.04 ms, half of a short text's.
        said = tokenizer.encode(_SAID, add_special_tokens=False)  # its way of cutting off is set
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None and self._whole(_SAID) != said:
            self._backend = None
        self._kept: OrderedDict[str, list[int]] = OrderedDict()  # piece -> ids; oldest first
        self._num_chars = 0
        self._ids = _cutting(tokenizer)
        # Of two that begin at one place the longer, as the tokenizer does.
        names = sorted(self._ids, key=len, reverse=True)
        self._cuts = re.compile(f"({'|'.join(map(re.escape, names))})")
        if self._ids:
            found = names * -(-len(_BESIDE) // len(names))
            beside = _BESIDE * -(-len(found) // len(_BESIDE))
            probe = "".join(
                f"{text}{name}{text}" for name, text in zip(found, beside, strict=False)
            )
            if self.encode(probe) != tokenizer.encode(probe, add_special_tokens=False):
                self._ids = {}
        self._cuts_lines = bool(self._ids) and _cuts_lines(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, no special tokens added; one that the text spells is one."""
        if not self._ids:
            return self._whole(text)
        pieces = self._cuts.split(text)
        ids_of, ids = self._encoded(dict.fromkeys(filter(None, pieces[::2]))), list[int]()
        for i, piece in enumerate(pieces):
            if i % 2:
                ids.append(self._ids[piece])
            elif piece:
                ids += ids_of[piece]
        return ids

    def _whole(self, text: str) -> list[int]:
        if self._backend is None:
            return self._tokenizer.encode(text, add_special_tokens=False)
        return self._backend.encode(text, add_special_tokens=False).ids

    def _batch(self, texts: list[str]) -> list[list[int]]:
        """The same of several texts, on all cores."""
        if self._backend is None:
            return self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [e.ids for e in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _each(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text; long ones are shared out among the cores."""
        if sum(map(len, texts)) < SHARED_CHARS:
            return [*map(self._whole, texts)]
        parts = [_parts(text) if self._cuts_lines else [text] for text in texts]
        if len(each := [*chain.from_iterable(parts)]) < 2:
            return [*map(self._whole, texts)]
        ids = iter(self._batch(each))
        return [[*chain.from_iterable(islice(ids, len(own)))] for own in parts]

    def _encoded(self, pieces: Collection[str]) -> dict[str, list[int]]:
        """Token ids by piece, of pieces without added tokens. Mutates: what is remembered."""
        found: dict[str, list[int]] = {}
        with self._lock:
            for piece in pieces:
                if piece in self._kept:
                    self._kept.move_to_end(piece)
                    found[piece] = self._kept[piece]
        new = [piece for piece in pieces if piece not in found]
        found |= zip(new, self._each(new), strict=True)
        with self._lock:
            for piece in new:
                small = len(piece) <= MAX_CHARS // 4
                if small and self._kept.setdefault(piece, found[piece]) is found[piece]:
                    self._num_chars += len(piece)
            while self._num_chars > MAX_CHARS:
                self._num_chars -= len(self._kept.popitem(last=False)[0])
        return found


def _cutting(tokenizer: Any) -> dict[str, int]:
    """Added tokens at which any text may be cut, and their ids; none where one takes spaces beside
    it or must be a whole word. Those that are matched in normalised text stay inside pieces."""
    added = tokenizer.added_tokens_decoder if getattr(tokenizer, "is_fast", False) else {}
    if any(token.lstrip or token.rstrip or token.single_word for token in added.values()):
        return {}
    return {
        token.content: i for i, token in added.items() if token.content and not token.normalized
    }


def _cuts_lines(tokenizer: Any) -> bool:
    """Whether texts may be cut where a line begins with a letter or digit: the tokenizer's own
    split into words cuts there too, so no token spans that place or depends on what is across."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = getattr(backend, "pre_tokenizer", None)
    if words is None or any("\n" in t.content for t in tokenizer.added_tokens_decoder.values()):
        return False
    lines = [f"{begin}{end}\n" for end in _ENDS for begin in _BEGINS]
    text = "".join(lines)
    cuts = {begin for _, (begin, _) in words.pre_tokenize_str(text)}
    if not cuts.issuperset(match.start() for match in _LINE.finditer(text)):
        return False
    parts = tokenizer(_LINE.split(text), add_special_tokens=False)["input_ids"]
    return [*chain.from_iterable(parts)] == tokenizer.encode(text, add_special_tokens=False)


def _parts(text: str) -> list[str]:
    """The text in parts of some PART_CHARS, each from the beginning of a line."""
    parts, begin = list[str](), 0
    while (found := _LINE.search(text, begin + PART_CHARS)) is not None:
        parts.append(text[begin : found.start()])
        begin = found.start()
    return [*parts, text[begin:]]
