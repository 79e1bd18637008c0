"""Pages that are shared: the allocator as a state machine, and the engine behind a hit."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from graphengine.decode.kvcache import NULL_PAGE
from graphengine.decode.prefix_cache import PrefixCache
from tests.support.examples import examples

SIZE = 3
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class CacheMachine(RuleBasedStateMachine):
    """Bug: a page in use is evicted or written by another, one is lost or freed twice, or a hit has
    other tokens than were asked for.

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
