"""Pages that are shared: the allocator as a state machine, what is found, and what is evicted."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from graphengine.decode.kvcache import NULL_PAGE
from graphengine.decode.prefix_cache import MAX_PARTS, PrefixCache
from tests.support.counted import Counted
from tests.support.examples import examples

SIZE = 3
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class CacheMachine(RuleBasedStateMachine):
    """Bug: a page in use is evicted or written by another, one is lost or freed twice, or a hit, or
    what a page that is copied begins with, has other tokens than were asked for.

    Every page's contents are simulated: who computes tokens writes them, whoever shares reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(9, SIZE)
        self.contents: dict[int, tuple[int, ...]] = {}
        self.running: list[tuple[list[int], list[int]]] = []  # (tokens, pages)

    @rule(tokens=TEXTS)
    def begin(self, tokens: list[int]) -> None:
        shared = self.cache.share(tokens[:-1])
        for i, page in enumerate(shared):
            assert self.contents[page] == tuple(tokens[: (i + 1) * SIZE])
        needed = -(-len(tokens) // SIZE) - len(shared)
        if needed > self.cache.num_free:
            with pytest.raises(MemoryError):
                self.cache.allocate(needed)
            self.cache.free(shared)
            return
        source, count = self.cache.begun(tokens[:-1], shared)
        known = len(shared) * SIZE + count
        assert not count or self.contents[source][:known] == tuple(tokens[:known])
        assert known < len(tokens) and count <= SIZE - (known < len(tokens) - 1)
        pages = shared + self.cache.allocate(needed)
        in_use = [page for _, owned in self.running for page in owned]
        assert not set(pages[len(shared) :]) & set(in_use)
        for i in range(len(shared), len(pages)):
            self.contents[pages[i]] = tuple(tokens[: (i + 1) * SIZE])
        self.running.append((tokens, pages))

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        if self.running:
            tokens, pages = data.draw(st.sampled_from(self.running))
            self.cache.publish(tokens, pages)

    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        if self.running:
            index = data.draw(st.integers(0, len(self.running) - 1))
            tokens, pages = self.running[index]
            if len(tokens) % SIZE:
                self.contents[pages[-1]] = (*tokens, token)
                self.running[index] = [*tokens, token], pages

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.running:
            index = data.draw(st.integers(0, len(self.running) - 1))
            self.cache.free(self.running.pop(index)[1])

    @invariant()
    def balanced(self) -> None:
        users = Counter(page for _, pages in self.running for page in pages)
        assert NULL_PAGE not in users
        assert self.cache.num_free == self.cache.num_usable - len(users)
        assert self.cache._pages == {key: page for page, key in self.cache._keys.items()}
        parts = self.cache._parts
        behind = {page: serial for serial, own in parts.items() for page in own}
        assert behind == self.cache._behind and all(parts.values())
        assert self.cache._idle.keys() <= behind.keys() | self.cache._keys.keys()


def test_pages_are_shared_and_never_written() -> None:
    run_state_machine_as_test(
        CacheMachine, settings=settings(max_examples=examples(200), deadline=None)
    )


def test_what_was_used_last_is_kept() -> None:
    """Bug: an early page of a text is evicted before its late ones, which nobody finds then."""
    cache = PrefixCache(7, SIZE)
    old, new = [0] * 9, [1] * 9
    for tokens in (old, new):
        pages = cache.allocate(3)
        cache.publish(tokens, pages)
        cache.free(pages)
    taken = cache.allocate(1)
    assert len(cache.share(new)) == 3
    assert len(cache.share(old)) == 2
    cache.free(taken)


def test_equal_tokens_behind_another_text_are_another_page() -> None:
    """Bug: a page is found by its tokens alone."""
    cache = PrefixCache(9, SIZE)
    pages = cache.allocate(2)
    cache.publish([1, 1, 1, 2, 2, 2], pages)
    assert cache.share([2, 2, 2]) == []
    assert cache.share([1, 1, 1, 2, 2, 2, 5]) == pages


def test_the_second_of_two_equal_pages_stays_private() -> None:
    """Bug: two requests that computed the same page at once both publish it: one is lost."""
    cache = PrefixCache(9, SIZE)
    first, second = cache.allocate(1), cache.allocate(1)
    for pages in (first, second):
        cache.publish([7, 7, 7], pages)
        cache.publish([7, 7, 7], pages)
    assert cache.share([7, 7, 7]) == first
    cache.free(first)
    cache.free(second)
    cache.free(first)
    assert cache.num_free == cache.num_usable


def test_a_page_that_moves_behind_another_is_forgotten_with_it() -> None:
    """Bug: two requests compute a text at once; the first one's page, behind which the second one's
    was published, is evicted; the second one's end publishes its own pages anew, and the late one
    is still found by that when it has been given to somebody else."""
    cache, text = PrefixCache(6, SIZE), [7] * 6
    first, second = cache.allocate(1), cache.allocate(2)
    cache.publish(text[:SIZE], first)
    cache.publish(text, second)
    cache.free(first)
    taken = cache.allocate(3)
    assert set(first) <= set(taken) and cache.share(text) == []
    cache.publish(text, second)
    cache.free(second)
    (other,) = cache.allocate(1)
    assert other == second[1]
    cache.publish([5] * SIZE, [other])
    assert cache.share(text) == second[:1]
    assert cache._pages == {key: page for page, key in cache._keys.items()}, "a name that leaks"


def test_random_texts_find_what_was_published() -> None:
    """Bug: a beginning that is held is not found, or more of it than is held."""
    rng = random.Random(0)
    cache = PrefixCache(400, SIZE)
    known: set[tuple[int, ...]] = set()
    for _ in range(60):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
        held = 0
        while tuple(tokens[: (held + 1) * SIZE]) in known and (held + 1) * SIZE <= len(tokens):
            held += 1
        shared = cache.share(tokens)
        assert len(shared) == held
        pages = shared + cache.allocate(len(tokens) // SIZE - held)
        cache.publish(tokens, pages)
        known |= {tuple(tokens[: n * SIZE]) for n in range(1, len(tokens) // SIZE + 1)}
        cache.free(pages)


def test_the_longest_of_those_that_begin_alike() -> None:
    """Bug: a shorter one is taken, one behind another text, or more than was asked for; or those
    that nobody will ask for again stay, and each admission compares with all of them."""
    cache = PrefixCache(40, 4)
    (first, second, third) = cache.allocate(3)
    cache.publish([1, 2], [first])
    cache.publish([1, 2, 3, 4], [second])
    cache.publish([1, 2, 3, 4, 5, 6], [second, third])
    assert cache.begun([1, 2, 9], []) in ((first, 2), (second, 2))
    assert cache.begun([1, 2, 3], []) == (second, 3)
    assert cache.begun([1, 2, 3, 4, 5, 9], [second]) == (third, 1)
    assert cache.begun([5, 6], []) == cache.begun([9], []) == (0, 0)
    cache.free([second, third, first])
    for i in range(MAX_PARTS + 3):
        pages = cache.allocate(1)
        cache.publish([100 + i], pages)
        cache.free(pages)
    assert cache.begun([1, 2, 9], []) == cache.begun([102], []) == (0, 0)
    assert cache.begun([103], [])[1] == 1 and cache.share([1, 2, 3, 4]) == [second]
    assert cache.num_free == 38


def test_a_part_goes_with_its_page_and_stays_while_it_is_asked_for() -> None:
    """Bug: a page that begins alike is copied, though another request has got it and writes; or one
    that was copied just now is evicted before one that does not begin like what was asked since."""
    cache = PrefixCache(3, SIZE)
    for tokens in ([1, 1], [2, 2]):
        pages = cache.allocate(1)
        cache.publish(tokens, pages)
        cache.free(pages)
    first, count = cache.begun([1, 1, 5], [])
    assert count == 2 and cache.begun([9, 9], []) == (0, 0)
    assert cache.allocate(1) != [first]
    assert (cache.begun([2, 2, 5], []), cache.begun([1, 1, 5], [])) == ((0, 0), (first, 2))
    assert cache.allocate(1) == [first]
    assert cache.begun([1, 1, 5], []) == (0, 0)


def test_a_page_that_moves_takes_what_stands_behind_it_along() -> None:
    """Bug: the first page of three equal texts is evicted, the second's takes its place, and the
    third's last page, which was found behind them, is found no more."""
    cache = PrefixCache(7, SIZE)
    a, b, c = ([token] * SIZE for token in range(3))
    first, second, third = (cache.allocate(count) for count in (1, 2, 3))
    cache.publish(a, first)
    cache.publish(a + b, second)
    cache.publish(a + b + c, third)
    cache.free(first)
    cache.allocate(1)
    assert cache.share(a) == []
    cache.publish(a + b, second)
    assert cache.share(a + b + c) == [*second, third[2]]


def test_one_of_too_many_that_begin_alike_is_still_found_whole() -> None:
    """Bug: a full page that is compared no more goes back to who asks for memory, while it is given
    out as the text's."""
    cache, pages = PrefixCache(MAX_PARTS + 9, SIZE), list[int]()
    for token in range(MAX_PARTS + 1):
        own = cache.allocate(1)
        cache.publish([token] * SIZE, own)
        cache.free(own)
        pages += own
    assert cache.begun([0, 1], []) == (0, 0) and cache.begun([1, 0], []) == (pages[1], 1)
    assert cache.share([0] * SIZE) == pages[:1]
    assert pages[0] not in cache.allocate(cache.num_free)


def test_what_grows_is_young() -> None:
    """Bug: a chat that goes on is as old among those that begin alike as its first turn, so that
    the next text drives it out while others, which nobody has asked for since, stay."""
    cache = PrefixCache(MAX_PARTS + 2, SIZE)
    first, *others, last = cache.allocate(MAX_PARTS + 1)
    for token, page in enumerate([first, *others]):
        cache.publish([token], [page])
    cache.publish([0, 1], [first])
    cache.publish([99], [last])
    assert cache.begun([0, 1], []) == (first, 2) and cache.begun([1], []) == (0, 0)


def test_what_is_published_is_not_compared_again() -> None:
    """Bug: at the end of each answer its whole text is hashed again, a millisecond for 30,000
    tokens in pages of 16; who looks for a page that begins alike copies all of the text's rest."""
    cache, text = PrefixCache(400, SIZE), Counted(range(3 * 300))
    pages = cache.allocate(302)
    cache.publish(text, pages)
    text += [7, 7, 7, 7]
    text.num_read = 0
    cache.publish(text, pages)
    assert text.num_read == 4 and cache.share(text) == pages[:301]
    other = Counted([0, 1, *range(5, 900)])
    assert cache.begun(other, []) == (pages[0], 2) and other.num_read <= SIZE
