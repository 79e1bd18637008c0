"""States of recurrent layers that are kept behind shared pages: whose, and for how long."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from graphengine.decode import prefix_cache
from graphengine.decode.prefix_cache import PrefixCache, StateSlots
from tests.decode.test_prefix_cache import SIZE, TEXTS
from tests.support.examples import examples


class StateMachine(RuleBasedStateMachine):
    """Bug: a state that is kept is another text's, its slot is given to two, lost, or taken from a
    running request; a beginning is found behind whose last token no state was kept, or a shorter
    one than the last of which one was; or one in a page that holds another text by now.

    A slot's contents are simulated: the tokens that whoever wrote it last had run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slots = StateSlots(6)
        self.cache = PrefixCache(9, SIZE, self.slots)
        self.contents: dict[int, tuple[int, ...]] = {}
        self.running: list[tuple[list[int], list[int], int]] = []  # (tokens, pages, slot)

    @rule(tokens=TEXTS, kept=st.integers(0, 14))
    def run(self, tokens: list[int], kept: int) -> None:
        shared = self.cache.share(tokens[:-1])
        needed = -(-len(tokens) // SIZE) - len(shared)
        if needed > self.cache.num_free or len(self.running) == 3:
            self.cache.free(shared)
            return
        begun = self.cache.begun(tokens[:-1], shared)
        known = len(shared) * SIZE + begun[1]
        source = self.cache.state_behind(shared, begun)
        assert (source is None) == (known == 0)
        assert source is None or self.contents[source] == tuple(tokens[:known])
        pages = shared + self.cache.allocate(needed)
        (slot,) = self.slots.allocate(1)
        self.contents[slot] = tuple(tokens)
        spare = self.slots.allocate(1) if known < kept < len(tokens) else []
        self.cache.publish(tokens, pages)
        for number in spare:
            self.contents[number] = tuple(tokens[:kept])
            self.cache.keep_state(tokens[:kept], number)
        self.running.append((tokens, pages, slot))

    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        """As an answer does; then it leaves a state behind its last token."""
        index = data.draw(st.integers(0, len(self.running) - 1)) if self.running else -1
        if index < 0 or not len(self.running[index][0]) % SIZE or self.slots.num_free < 1:
            return
        tokens, pages, slot = self.running[index]
        tokens = [*tokens, token]
        self.cache.publish(tokens, pages)
        (number,) = self.slots.allocate(1)
        self.contents[slot] = self.contents[number] = tuple(tokens)
        self.cache.keep_state(tokens, number)
        self.running[index] = tokens, pages, slot

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.running:
            index = data.draw(st.integers(0, len(self.running) - 1))
            _, pages, slot = self.running.pop(index)
            self.cache.free(pages)
            self.slots.free([slot])

    @invariant()
    def balanced(self) -> None:
        assert self.slots.num_free == self.slots.num_usable - len(self.running)
        assert not {page for page, _ in self.slots._kept} & set(self.cache._free)
        for tokens, _, slot in self.running:
            assert self.contents[slot] == tuple(tokens)


def test_states_are_kept_of_what_they_are_found_by() -> None:
    run_state_machine_as_test(
        StateMachine, settings=settings(max_examples=examples(200), deadline=None)
    )


def keep(cache: PrefixCache, tokens: list[int]) -> int:
    """Runs whole pages of a text and keeps the state behind them; its slot."""
    assert cache.state_slots is not None
    pages = cache.allocate(len(tokens) // SIZE)
    cache.publish(tokens, pages)
    (slot,) = cache.state_slots.allocate(1)
    cache.keep_state(tokens, slot)
    cache.free(pages)
    return slot


def test_states_go_with_their_pages() -> None:
    """Bug: a page that holds another text by now is still found with the old one's state; a longer
    text's state is kept behind the pages that are left of it; of two states behind one text a slot
    is lost; or a reset leaves states whose slots are free."""
    slots = StateSlots(5)
    cache = PrefixCache(3, SIZE, slots)
    keep(cache, [0] * 3)
    taken = cache.allocate(2)
    assert slots.counts() == {}
    cache.publish([1] * 3, taken[:1])
    assert cache.share([1] * 3) == []
    cache.free(taken)
    keep(cache, [1] * 3)
    last = keep(cache, [1] * 3)  # as two prompts do that come at once
    cache.keep_state([1] * 6, *slots.allocate(1))  # its second page is nobody's
    assert [slots.behind((page, SIZE)) for page in cache.share([1] * 3)] == [last]
    assert slots.num_free == slots.num_usable == 4
    slots.reset()
    assert slots.num_free == slots.num_usable
    assert len(set(slots.allocate(4))) == 4


def test_states_go_with_a_page_that_others_crowd_out() -> None:
    """Bug: of more beginnings than are compared the first leaves its state behind, which whoever
    gets its page next would go on from."""
    most = prefix_cache.MAX_PARTS
    slots = StateSlots(most + 3)
    cache = PrefixCache(most + 3, SIZE, slots)
    for token in range(most + 1):
        pages = cache.allocate(1)
        cache.publish([token, 0], pages)
        cache.keep_state([token, 0], *slots.allocate(1))
        cache.free(pages)
    assert len(slots.counts()) == most and not set(slots.counts()) & set(cache._free)


def test_more_states_than_there_are() -> None:
    """Bug: a request that cannot be had takes every state that is kept."""
    slots = StateSlots(4)
    keep(PrefixCache(9, SIZE, slots), [0] * 3)
    before = slots.counts()
    with pytest.raises(MemoryError, match="4 states asked, 3 of 3 free"):
        slots.allocate(4)
    assert slots.counts() == before and len(set(slots.allocate(3))) == 3


def test_the_state_that_was_used_last_is_kept() -> None:
    """Bug: the state of a text that is asked for again and again makes room for one that nobody
    has asked for since."""
    slots = StateSlots(4)
    cache = PrefixCache(9, SIZE, slots)
    for token in range(3):
        keep(cache, [token] * 3)
    assert cache.state_behind(cache.share([0] * 3), (0, 0)) is not None
    slots.allocate(2)
    assert [len(cache.share([token] * 3)) for token in range(3)] == [1, 0, 0]


def test_random_texts_find_the_last_state_that_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: of several states in a page, or in pages that begin alike, an early one is taken; or
    behind whole pages without a state nobody looks into the one in front of them."""
    monkeypatch.setattr(prefix_cache, "MAX_PARTS", 1000)
    rng = random.Random(1)
    slots = StateSlots(500)
    cache, kept, num_within = PrefixCache(900, SIZE, slots), set[tuple[int, ...]](), 0
    for _ in range(120):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 16))]
        shared = cache.share(tokens)
        begun = cache.begun(tokens, shared)
        known = len(shared) * SIZE + begun[1]
        wanted = (n for n in range(len(tokens) + 1) if tuple(tokens[:n]) in kept)
        assert known == max(wanted, default=0)
        num_within += begun[1] > 0
        assert (cache.state_behind(shared, begun) is None) == (known == 0)
        pages = shared + cache.allocate(-(-len(tokens) // SIZE) - len(shared))
        cache.publish(tokens, pages)
        for count in rng.sample(range(1, len(tokens) + 1), min(2, len(tokens))):
            kept.add(tuple(tokens[:count]))
            cache.keep_state(tokens[:count], *slots.allocate(1))
        cache.free(pages)
    assert num_within > 30


def test_a_page_without_a_state_costs_nothing_more() -> None:
    """Bug: for each page that is given back, or evicted, all states that are kept are looked
    through: 5 ms for the 1,900 pages of a budget of 30,000 tokens, in front of its first one."""

    class Counted(OrderedDict[Any, int]):
        num_seen = 0

        def __iter__(self) -> Iterator[Any]:
            self.num_seen += len(self)
            return super().__iter__()

    slots = StateSlots(20)
    cache = PrefixCache(200, SIZE, slots)
    for i in range(16):
        pages = cache.allocate(1)
        cache.publish([i] * SIZE, pages)
        cache.keep_state([i] * SIZE, *slots.allocate(1))
        cache.free(pages)
    kept = slots._kept = Counted(slots._kept)
    cache.free(cache.allocate(183))
    assert kept.num_seen == 0 and len(kept) == 16
    cache.free(cache.allocate(199))
    assert not kept and slots.counts() == {} and slots.num_free == 19
