"""Pages by what they hold: a prompt that begins like an earlier one takes over its pages.

A page holds the target's K/V of its tokens and, behind the same page table, the drafter's context
of them, so a hit needs neither a second prefill nor costs acceptance. It is found by its tokens and
by the page in front of it, so that equal tokens behind another text are another page.

Invariant: a page that is published is full and committed, and from then on nobody writes it: steps
in flight write behind the committed tokens. A page in use by any request is never given to another.
What was released last is evicted last, and of one request's pages the last first: a page whose
predecessor is gone could not be found any more.

A page that begins like what is asked for is found too, up to the first token that differs, and so
is the last page of a text, which is not full. It is not shared, since both its owner and the taker
go on to write in it: the taker copies it into a page of its own, at once, so that any later write
to the one that was found is behind the copy on the stream.

Recurrent layers keep no state of a token, only one of all tokens so far. So with such a target a
beginning counts up to the last token behind which a state was kept.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from itertools import compress, count
from operator import ne

from graphengine.decode.kvcache import PageAllocator

MAX_PARTS = 16  # behind one page; each is compared with whoever asks

Key = tuple[int, tuple[int, ...]]
"""The serial number of the page in front (0: none), and a page's tokens."""


Place = tuple[int, int]
"""A page that can be found, and so many of its tokens."""


class StateSlots(PageAllocator):
    """Hands out slots of recurrent states, to requests and to what is kept of their texts: each
    behind a token of a page, until a request needs the slot. The oldest go first."""

    def reset(self) -> None:
        super().reset()
        self._kept: OrderedDict[Place, int] = OrderedDict()  # -> slot; oldest first
        self._counts: dict[int, list[int]] = {}  # as `counts` says

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._kept)

    def allocate(self, count: int) -> list[int]:
        if count > self.num_free:
            raise MemoryError(f"{count} states asked, {self.num_free} of {self.num_usable} free")
        while len(self._free) < count:
            self._give_up(next(iter(self._kept)))
        return super().allocate(count)

    def keep(self, place: Place, slot: int) -> None:
        """Gives a slot away: it holds the state behind this place."""
        if place in self._kept:
            self._give_up(place)
        self._kept[place] = slot
        self._counts.setdefault(place[0], []).append(place[1])

    def behind(self, place: Place) -> int | None:
        """The slot kept there, which is now the last to go."""
        if place in self._kept:
            self._kept.move_to_end(place)
        return self._kept.get(place)

    def counts(self) -> dict[int, list[int]]:
        """Page -> behind how many of its tokens states are kept."""
        return {page: list(counts) for page, counts in self._counts.items()}

    def forget(self, page: int) -> None:
        """Returns the slots kept in a page."""
        for num_tokens in tuple(self._counts.get(page, ())):
            self._give_up((page, num_tokens))

    def _give_up(self, place: Place) -> None:
        """Returns the slot kept there."""
        page, num_tokens = place
        self.free([self._kept.pop(place)])
        self._counts[page].remove(num_tokens)
        if not self._counts[page]:
            del self._counts[page]


class PrefixCache(PageAllocator):
    """Hands out pages, and keeps those that were published until their memory is needed."""

    def __init__(
        self, num_pages: int, page_size: int, state_slots: StateSlots | None = None
    ) -> None:
        """Args: state_slots: of a target with recurrent layers."""
        self._page_size, self.state_slots = page_size, state_slots
        self.num_changes = 0
        """How often more pages may have become free, or known."""
        super().__init__(num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._idle)

    def num_users(self, page: int) -> int:
        """Requests that hold a page; of one that is not published at most one."""
        assert self._users[page] <= 1 or page in self._keys
        return self._users[page]

    def reset(self) -> None:
        """Forgets everything: after an error nobody knows what the pages hold."""
        super().reset()
        self._users: Counter[int] = Counter()
        self._pages: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._serials: dict[int, int] = {}
        self._parts: dict[int, dict[int, tuple[int, ...]]] = {}  # serial in front -> page -> tokens
        self._behind: dict[int, int] = {}  # page that `begun` finds -> serial in front
        self._idle: OrderedDict[int, None] = OrderedDict()  # published, of nobody; oldest first
        self._numbers = count(1)

    def allocate(self, count: int) -> list[int]:
        if count > self.num_free:
            raise MemoryError(f"{count} pages asked, {self.num_free} of {self.num_usable} free")
        while len(self._free) < count:
            page, _ = self._idle.popitem(last=False)
            if page in self._keys:
                del self._pages[self._keys.pop(page)], self._serials[page]
            self._withdraw(page)
            self._drop(page)
        pages = super().allocate(count)
        self._users.update(pages)
        return pages

    def share(self, token_ids: Sequence[int]) -> list[int]:
        """Takes the pages of the longest beginning of these tokens that is held, whole pages; with
        recurrent layers up to the last kept state, or to the page in front of the one it is in."""
        pages = [page for page, _ in self._held(token_ids)]
        if self.state_slots is not None:
            kept = self.state_slots.counts()
            fronts = {self._behind.get(page) for page in kept}
            while pages and self._page_size not in kept.get(pages[-1], ()):
                if self._serials[pages[-1]] in fronts and self.begun(token_ids, pages)[1]:
                    break
                pages.pop()
        for page in pages:
            self._idle.pop(page, None)
            self._used.add(page)
            self._users[page] += 1
        return pages

    def begun(self, token_ids: Sequence[int], shared: Sequence[int]) -> Place:
        """A page that begins like what follows these shared pages, to be copied at once, and how
        many of its tokens are the same, with recurrent layers up to a kept state; 0, 0: none."""
        serial = self._serials[shared[-1]] if shared else 0
        begin, best = len(shared) * self._page_size, (0, 0)
        wanted = token_ids[begin : begin + self._page_size]
        kept = None if self.state_slots is None else self.state_slots.counts()
        for page, tokens in self._parts.get(serial, {}).items():
            if kept is not None and page not in kept:
                continue
            most = min(len(tokens), len(wanted))
            num_alike = next(compress(count(), map(ne, tokens, wanted)), most)
            if kept is not None:
                num_alike = max((n for n in kept[page] if n <= num_alike), default=0)
            best = max(best, (num_alike, page))
        num_tokens, page = best
        if not num_tokens:
            return 0, 0
        if page in self._idle:
            self._idle.move_to_end(page)
        return page, num_tokens

    def publish(self, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        """Makes pages findable whose tokens are these and committed; one whose like is held already
        stays its owner's alone."""
        self.num_changes += 1
        serial, size, full = 0, self._page_size, len(token_ids) // self._page_size
        for i, page in enumerate(pages[:full]):
            if page in self._keys and self._keys[page][0] == serial:  # these tokens are its own
                serial = self._serials[page]
                continue
            key = serial, tuple(token_ids[i * size : (i + 1) * size])
            holder = self._pages.setdefault(key, page)
            if holder == page:
                assert page in self._used
                if page in self._keys:  # what it was found behind, of another request, was evicted
                    del self._pages[self._keys[page]]
                self._keys[page] = key
                self._serials.setdefault(page, next(self._numbers))
                self._offer(*key, page)
            serial = self._serials[holder]
        rest = tuple(token_ids[full * size :])
        if rest and full < len(pages):
            self._offer(serial, rest, pages[full])

    def keep_state(self, token_ids: Sequence[int], slot: int) -> None:
        """Gives away the slot of the state behind these tokens. Where no page holds the last of
        them nobody could find it: then it is free."""
        assert self.state_slots is not None
        held, (whole, rest) = list(self._held(token_ids)), divmod(len(token_ids), self._page_size)
        places: list[Place] = []
        if len(held) == whole and not rest:
            places = [(page, self._page_size) for page, _ in held[-1:]]
        elif len(held) == whole:
            parts, last = self._parts.get(held[-1][1] if held else 0, {}), tuple(token_ids[-rest:])
            places = [(page, rest) for page, tokens in parts.items() if tokens[:rest] == last]
        if places:
            self.state_slots.keep(places[-1], slot)
        else:
            self.state_slots.free([slot])

    def state_behind(self, shared: Sequence[int], begun: Place) -> int | None:
        """The slot of the state behind these pages and so many tokens of one that `begun` has
        found; None without recurrent layers or where none of the text is held."""
        if self.state_slots is None or not (shared or begun[1]):
            return None
        return self.state_slots.behind(begun if begun[1] else (shared[-1], self._page_size))

    def free(self, pages: list[int]) -> None:
        """Returns a request's pages, shared ones too, each once."""
        self.num_changes += 1
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page] > 0:
                continue
            assert page in self._used, f"page {page} freed twice or never allocated"
            self._used.remove(page)
            if page in self._keys or page in self._behind:
                self._idle[page] = None
            else:
                self._drop(page)

    def _drop(self, page: int) -> None:
        """Has nobody find it, nor a state in it, any more."""
        self._free.append(page)
        if self.state_slots is not None:
            self.state_slots.forget(page)

    def _offer(self, serial: int, tokens: tuple[int, ...], page: int) -> None:
        """Has `begun` find a page behind another one."""
        self._withdraw(page)
        parts = self._parts.setdefault(serial, {})
        parts[page], self._behind[page] = tokens, serial
        if len(parts) > MAX_PARTS:
            oldest = next(iter(parts))
            self._withdraw(oldest)
            if oldest in self._idle and oldest not in self._keys:
                del self._idle[oldest]
                self._drop(oldest)

    def _withdraw(self, page: int) -> None:
        serial = self._behind.pop(page, None)
        if serial is not None:
            parts = self._parts[serial]
            del parts[page]
            if not parts:
                del self._parts[serial]

    def _held(self, token_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Pages and their serial numbers, from the beginning."""
        serial, size = 0, self._page_size
        for begin in range(0, len(token_ids) - size + 1, size):
            page = self._pages.get((serial, tuple(token_ids[begin : begin + size])))
            if page is None:
                return
            serial = self._serials[page]
            yield page, serial
