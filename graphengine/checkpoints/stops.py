"""Where an answer's text ends: stop strings, found while the text grows.

A stop string may lie across tokens and across what two steps commit. It counts where the first one
is complete, character by character, so neither tokens nor accepted runs decide which one that is.
Invariant: what is given out is never taken back. Text that may become a stop string is held back
until it does, or cannot any more; where the string stays in the answer nothing is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

from graphengine.checkpoints.tokenizer import Detokenizer, Tokenizer


class StopStrings:
    """Watches a growing text."""

    def __init__(self, stops: Sequence[str], is_kept: bool) -> None:
        """Args: stops: none empty. is_kept: the string that is found stays in the text."""
        self._stops, self._is_kept = stops, is_kept
        self._begun = ""  # the longest end of the text that may become a stop string

    def feed(self, new: str, is_watched: bool = True) -> tuple[str, str | None]:
        """(what may be given out, the stop string that is complete or None).

        Args: is_watched: whether one that ends in `new` counts.
        """
        text, num_before = self._begun + new, len(self._begun)
        found = [
            (begin + len(stop), begin, stop)
            for stop in self._stops
            if is_watched and (begin := text.find(stop, max(0, num_before + 1 - len(stop)))) >= 0
        ]
        out = num_before if self._is_kept else 0
        if found:
            end, begin, stop = min(found)
            self._begun = ""
            return text[out : end if self._is_kept else begin], stop
        first = max(0, len(text) + 1 - max(map(len, self._stops)))
        ends = (text[i:] for i in range(first, len(text)))
        begun = (e for e in ends if any(len(s) > len(e) and s.startswith(e) for s in self._stops))
        self._begun = next(begun, "")
        return text[out : len(text) if self._is_kept else len(text) - len(self._begun)], None

    def held(self) -> str:
        """What was held back, when no more text comes."""
        return "" if self._is_kept else self._begun


class Written(NamedTuple):
    """Text that new tokens complete; `num_dropped` of them lie behind a stop string."""

    text: str
    stop: str | None = None
    num_dropped: int = 0


class Writer:
    """From a growing answer's tokens to its text, up to a stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        is_kept: bool,
        min_tokens: int,
        behind: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        """Args: min_tokens: text of so many first tokens ends no stop string. behind: the
        prompt."""
        self._detokenizer = Detokenizer(tokenizer, behind, skip_special_tokens)
        self._stops = StopStrings(stops, is_kept) if stops else None
        self._num_unwatched = min_tokens

    def feed(self, token_ids: Sequence[int], last: bool = False) -> Written:
        """The new complete text. With `last`, what is held back is given out as it is."""
        if self._stops is None:
            return Written(self._detokenizer.feed(token_ids, last))
        count = len(token_ids)
        if count > 1 and not 0 < self._num_unwatched < count:
            # At once, as without stop strings; one by one where that finds one, to tell its token.
            before = copy(self._detokenizer), copy(self._stops)
            new = self._detokenizer.feed(token_ids, last)
            text, stop = self._stops.feed(new, self._num_unwatched <= 0)
            if stop is None:
                self._num_unwatched -= count
                return Written(text + self._stops.held() if last else text)
            self._detokenizer, self._stops = before
        text = ""
        pieces = [[token] for token in token_ids] or [[]]  # a step may add an end alone
        for num_behind, piece in zip(reversed(range(len(pieces))), pieces, strict=True):
            self._num_unwatched -= len(piece)
            new = self._detokenizer.feed(piece, last and not num_behind)
            out, stop = self._stops.feed(new, self._num_unwatched < 0)
            text += out
            if stop is not None:
                return Written(text, stop, num_behind)
        return Written(text + self._stops.held() if last else text)
