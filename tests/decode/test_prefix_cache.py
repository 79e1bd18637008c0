"""Pages that are shared: the allocator as a state machine, and the engine behind a hit."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from graphengine.decode import prefix_cache
from graphengine.decode.kvcache import NULL_PAGE
from graphengine.decode.prefix_cache import MAX_PARTS, PrefixCache, StateSlots
from tests.decode.test_engine import BACKENDS, PROMPTS, Pair, assert_idle, force, loop_of
from tests.support.dflash_reference import load_target, plain_generate
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


# ---- the engine behind a hit --------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"), likely_tokens=3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_turns_of_a_chat(pair: Pair, backend: str) -> None:
    """Bug: the next turn computes its whole prompt again, or says something else behind a hit; or
    its drafts are worse, because the drafter's context was not taken over with the target's K/V."""
    outcomes: dict[bool, list[tuple[list[int], list[int]]]] = {}
    for cached in (True, False):
        with pair.engine(attention_backend=backend, enable_prefix_caching=cached) as engine:
            prompt, outcomes[cached] = [9, 8, 7, 6, 5], []
            for turn in range(5):
                (result,) = engine.generate([prompt], max_new_tokens=9, ignore_eos=True)
                metrics = result.metrics
                outcomes[cached].append((result.token_ids, metrics.acceptance.steps_by_accepted))
                # All that the last turn has committed, its last token too if that was a draft; of
                # its last page of 4 a copy.
                known = len(prompt) - 3
                hits = (known, known + 1) if turn and cached else (0,)
                assert metrics.num_cached_tokens in hits
                prompt = prompt + result.token_ids + [40 + turn, 41]
            assert_idle(engine)
    assert outcomes[True] == outcomes[False]
    assert sum(sum(steps[1:]) for _, steps in outcomes[True]) >= 3, "nothing is ever accepted"


@pytest.mark.parametrize("length", [16, 17, 18])
def test_the_same_prompt_again(pair: Pair, length: int) -> None:
    """Bug: of a prompt that is known whole a page is run again, to have something to draft from, or
    its last token is not, whose logits are the first new token's."""
    prompt = list(range(30, 30 + length))
    with pair.engine() as engine:
        first, again = (
            engine.generate([prompt], max_new_tokens=9, ignore_eos=True)[0] for _ in range(2)
        )
    assert again.metrics.num_cached_tokens == length - 1
    assert again.token_ids == first.token_ids
    steps = [r.metrics.acceptance.steps_by_accepted for r in (first, again)]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_texts_that_share_their_beginnings(pair: Pair, backend: str) -> None:
    """Bug: under eviction, cancels and joins a shared page is written by one of its users, freed
    while another reads it, or lost."""
    rng, model = random.Random(3), load_target(pair.target)
    stems = [[rng.randrange(200) for _ in range(n)] for n in (6, 9, 17)]
    truth: dict[tuple[int, ...], list[int]] = {}
    hits = 0
    with pair.engine(attention_backend=backend, kv_cache_memory=230 << 10) as engine:
        loop = loop_of(engine)
        cache, pools = loop.allocator, [loop.prefill.pair.target.kv_pool]
        pools.append(loop.prefill.pair.proposer.kv_pool)
        active, sums = [], {}
        for _ in range(60):
            if rng.random() < 0.4 and len(loop.waiting) < 3:
                tokens = rng.choice(stems) + [rng.randrange(200) for _ in range(rng.randrange(9))]
                active.append(loop.submit(tokens, rng.randrange(1, 12), ()))
            if active and rng.random() < 0.1:
                loop.cancel(rng.choice(active))
            with torch.no_grad():
                loop.admit()
                loop.launch()
                loop.collect()
            for page in list(cache._keys):
                found = sum(float(pool[:, :, page].double().abs().sum()) for pool in pools)
                key = cache._keys[page], cache._serials[page]
                assert sums.setdefault(key, found) == found, "a published page was written"
        while loop.has_work:
            with torch.no_grad():
                loop.admit()
                loop.launch()
                loop.collect()
        assert_idle(engine)
        for request in active:
            hits += request.num_cached_tokens > 0
            if request.finish_reason != "length":
                continue
            key = tuple(request.prompt_ids)
            if len(truth.get(key, ())) < len(request.output_ids):
                truth[key] = plain_generate(model, request.prompt_ids, 12)
            assert request.output_ids == truth[key][: len(request.output_ids)]
    assert hits >= 5


def test_what_is_not_kept(pair: Pair) -> None:
    """Bug: pages outlive a reset, or those of tokens that were decoded plainly, which the drafter
    has no context of, are taken for whole."""
    with pair.engine(max_model_len=96) as engine:
        force(engine, pair, 1)
        loop, prompt = loop_of(engine), PROMPTS[1]
        engine.generate([prompt], max_new_tokens=4, ignore_eos=True)
        held = loop.allocator.share(prompt)
        assert held
        loop.allocator.free(held)
        plain = loop.submit([*PROMPTS[2]], 40, ())
        with torch.no_grad():
            loop.admit()
            loop.fallback.leave([plain], "a test says so")
        for _ in loop.run():
            pass
        assert plain.num_plain_steps > 9
        found = loop.allocator.share(plain.token_ids)
        assert len(found) <= len(PROMPTS[2]) // 4, "more than its prefill has left"
        loop.allocator.free(found)
        loop.reset()
        assert loop.allocator.share(prompt) == []


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
