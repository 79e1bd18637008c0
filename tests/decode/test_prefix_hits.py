"""The engine behind a hit of the prefix cache: the same tokens and drafts, from fewer rows."""

from __future__ import annotations

import random

import pytest
import torch

from graphengine.decode.rows import Results
from tests.decode.test_engine import BACKENDS, PROMPTS, Pair, assert_idle, force, loop_of
from tests.support.dflash_reference import load_target, plain_generate


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


@torch.no_grad()
def test_who_waits_for_room_is_looked_up_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a long prompt that waits for pages is looked up in the cache again at each step, 0.8 ms
    of 20,000 tokens (2-core CPU); or what was freed or published meanwhile does not let it in."""
    with pair.engine(max_model_len=40) as engine:
        loop = loop_of(engine)
        allocator, calls = loop.allocator, list[int]()
        share = allocator.share
        monkeypatch.setattr(allocator, "share", lambda ids: calls.append(1) or share(ids))
        request = loop.submit(list(range(30, 50)), 9, ())
        held = allocator.allocate(allocator.num_free)
        for _ in range(5):
            assert loop.admit() == []
        assert len(calls) == 1
        allocator.publish(request.prompt_ids, held[:5])
        assert loop.admit() == [] and len(calls) == 2
        missing = loop.holdings.pages_of(request.max_total_tokens) - 4
        allocator.free(held[5 : 5 + missing])
        assert len(loop.admit()) == 1 and request.num_cached_tokens >= 16
        loop.cancel(request)
        allocator.free(held[:5] + held[5 + missing :])
        assert_idle(engine)


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


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize(
    ("backend", "num_chunks"), [("triton", 1), ("triton", 2), ("triton", 99), ("torch", 2)]
)
def test_a_stream_that_is_left(pair: Pair, backend: str, is_closed: bool, num_chunks: int) -> None:
    """Bug: whoever leaves the loop over a stream, be it behind its result, loses the texts of all
    prompts before, and a chat's next turn is run from its first token on."""
    chat, other = list(range(60, 81)), PROMPTS[1]
    with pair.engine(attention_backend=backend) as engine:
        expected = engine.generate([chat], max_new_tokens=9, ignore_eos=True)[0].token_ids
        asked = {"max_new_tokens": 40, "ignore_eos": True}
        stream = engine.stream_many([other, chat[:5], PROMPTS[3]], **asked)
        for _, chunk in zip(range(num_chunks), stream, strict=False):
            if chunk.result is not None:
                break
        if is_closed:
            del stream  # else it stands still, and gives way
            assert_idle(engine)
        again = engine.generate([chat], max_new_tokens=9, ignore_eos=True)[0]
        assert again.metrics.num_cached_tokens == len(chat) - 1
        assert again.token_ids == expected
        (said,) = engine.generate([other], max_new_tokens=9, ignore_eos=True)
        assert said.token_ids == pair.plain(other, 9)
        assert said.metrics.num_cached_tokens == len(other) - 1
        assert_idle(engine)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ctrl_c_while_a_step_is_waited_for(
    pair: Pair, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a chat's answer is stopped, most likely while a step runs, and the next turn is run from
    its first token on; or it is stopped by a failure, and what that has left is used."""
    chat, raised = list(range(60, 81)), iter([KeyboardInterrupt, RuntimeError])
    wait, calls = Results.wait, list[int]()

    def waits(results: Results) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise next(raised)
        wait(results)

    with pair.engine(attention_backend=backend) as engine:
        engine.generate([chat], max_new_tokens=9)
        monkeypatch.setattr(Results, "wait", waits)
        for error, num_cached in ((KeyboardInterrupt, len(chat) - 1), (RuntimeError, 0)):
            with pytest.raises(error):
                engine.generate(PROMPTS, max_new_tokens=40, ignore_eos=True)
            assert_idle(engine)
            again = engine.generate([chat, PROMPTS[1]], max_new_tokens=9, ignore_eos=True)
            assert again[0].metrics.num_cached_tokens == num_cached
            assert again[1].token_ids == pair.plain(PROMPTS[1], 9)
            calls.clear()


def test_a_stream_that_never_began(pair: Pair) -> None:
    """Bug: a stream that is made and forgotten, as by an error between it and its loop, loses the
    texts of all prompts before."""
    chat = list(range(60, 81))
    with pair.engine() as engine:
        expected = engine.generate([chat], max_new_tokens=9, ignore_eos=True)[0].token_ids
        for prompts in ([PROMPTS[1]], [PROMPTS[3], chat[:5]]):
            engine.stream_many(prompts, max_new_tokens=9)
        again = engine.generate([chat], max_new_tokens=9, ignore_eos=True)[0]
        assert again.metrics.num_cached_tokens == len(chat) - 1
        assert again.token_ids == expected
        assert_idle(engine)


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


def test_drawn_acceptance_keeps_nothing(pair: Pair) -> None:
    """Bug: pages of a text that drawn acceptance made are kept, and the next round of a measurement
    is told to have run prompts that it found."""
    with pair.engine(simulate_acceptance=2.0) as engine:
        for _ in range(2):
            (result,) = engine.generate([PROMPTS[1]], max_new_tokens=9, ignore_eos=True)
            assert result.metrics.num_cached_tokens == 0
        assert_idle(engine)
