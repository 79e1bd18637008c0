"""Who has which slots of recurrent states. Of pages `test_kvcache` and `test_prefix_hits` tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphengine.decode import holdings, prefill
from graphengine.decode.recurrence import KEPT_STATES, num_slots
from graphengine.kernels.gated_delta_prefill import CHUNK
from tests.decode.test_engine import BLOCK, PROMPTS, Pair, assert_idle, loop_of
from tests.decode.test_recurrence import HybridPair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return HybridPair(tmp_path_factory.mktemp("pair"))


def test_slots_return(pair: Pair) -> None:
    """Bug (H19): a slot leaks on a cancel, an error or a reset, and later requests are refused."""
    with pair.engine(buckets=(1, 2)) as loaded, torch.no_grad():
        loop = loop_of(loaded)
        for _ in range(3):
            requests = [loop.submit(list(p), 9, ()) for p in PROMPTS[:3]]
            loop.admit()
            loop.launch()
            loop.cancel(requests[0])
            loop.reset()
            assert loop.state_slots.num_free == loop.state_slots.num_usable
        loaded.generate(PROMPTS, max_new_tokens=3)
        assert loop.state_slots.num_free == loop.state_slots.num_usable


def test_what_is_kept_leaves_every_row_its_slot(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: prompts whose states are kept at several places take the slots that those behind them
    in the same batch need."""
    monkeypatch.setattr(holdings, "KEPT_SPACING", 8)
    with pair.engine(buckets=(8,)) as loaded:
        loop = loop_of(loaded)
        requests = [loop.submit([*range(i, i + 40)], 3, ()) for i in range(8)]
        for _ in loop.run():
            pass
        assert [len(request.output_ids) for request in requests] == [3] * 8
        assert_idle(loaded)


@torch.no_grad()
def test_answers_leave_prompts_their_slots(pair: Pair) -> None:
    """Bug: the first answers of a batch take all slots, one that fills no page among them, and of
    its last prompts no state is kept, so that the next turn runs them again."""
    with pair.engine(buckets=(8,), page_size=8) as loaded:
        loop = loop_of(loaded)
        lengths = [3] + [30] * 7
        requests = [loop.submit([*range(i, i + 40)], n, ()) for i, n in enumerate(lengths)]
        loop.admit()
        assert all((request.pages[3], 8) in loop.state_slots._kept for request in requests)
        assert not requests[0].answer_slots and requests[1].answer_slots
        loop.reset()


@torch.no_grad()
def test_the_prompt_s_slot_is_not_free_for_its_answer(pair: Pair) -> None:
    """Bug: an answer takes slots where less than half of those that are kept is left for others."""
    with pair.engine(buckets=(1,), page_size=8) as loaded:
        loop, found = loop_of(loaded), list[bool]()
        for num_held in (KEPT_STATES // 2 - 1, KEPT_STATES // 2):
            loop.state_slots.allocate(num_held)
            request = loop.submit(PROMPTS[1], 40, ())
            loop.admit()
            found.append(bool(request.answer_slots))
            loop.reset()
    assert found == [True, False]


@torch.no_grad()
def test_a_next_turn_takes_slots_for_the_rows_that_it_runs(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a prompt whose beginning is known takes as many slots as if all of it were run, for
    which kept states of other texts go."""
    monkeypatch.setattr(holdings, "KEPT_SPACING", 16)
    with pair.engine(buckets=(1,), page_size=8) as loaded:
        loop, prompt = loop_of(loaded), [*range(40)]
        loaded.generate(prompt, max_new_tokens=1)
        request = loop.submit([*prompt, 41, 42], 3, ())
        assert loop.holdings.take(request, 1) and request.num_cached_tokens == 32
        assert len(request.spare_slots) == 1  # and 3 for all 42
        loop.reset()


@torch.no_grad()
def test_a_scored_prompt_takes_no_slots_to_keep(pair: Pair) -> None:
    """Bug: a prompt whose log-probabilities are asked for, which keeps no state, takes slots for
    some all the same, and the states of other texts go."""
    with pair.engine(buckets=(1,), page_size=8, max_logprobs=1) as loaded:
        loop = loop_of(loaded)
        request = loop.submit([*range(40)], 30, (), prompt_logprobs=0)
        assert loop.holdings.take(request, 1)
        assert not request.spare_slots and not request.answer_slots
        loop.reset()


@torch.no_grad()
def test_a_prompt_that_is_cancelled_returns_what_it_has_kept(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a long prompt that is cancelled on its way keeps the slots of the states that it has
    left so far for others, until nothing is kept of anybody."""
    for module in (holdings, prefill):
        monkeypatch.setattr(module, "KEPT_SPACING", CHUNK)
    with pair.engine(buckets=(1,), max_model_len=None) as loaded:
        loop = loop_of(loaded)
        prompt = [i % 60 for i in range(loop.config.max_model_len - 1)]
        request = loop.submit(prompt, 1, ())
        loop.admit_next(2 * CHUNK)
        assert request.kept_slots and loop.prefilling == [request]
        loop.cancel(request)
        loop.admit_next(2 * CHUNK)
        assert loop.state_slots.num_free == loop.state_slots.num_usable
        assert_idle(loaded)


def test_where_nothing_is_shared_no_state_is_kept() -> None:
    """Bug: an engine without a prefix cache has slots for states of prompts, which nobody finds:
    several times the memory of its own."""
    configs: list[Any] = [
        SimpleNamespace(buckets=(1, 4), shares_prefixes=shares) for shares in (False, True)
    ]
    assert [num_slots(config) for config in configs] == [1 + 4, 1 + 4 + KEPT_STATES]


@torch.no_grad()
@pytest.mark.parametrize("spacing", [BLOCK - 1, BLOCK])
def test_no_step_passes_two_places(pair: Pair, spacing: int) -> None:
    """Bug: a block is longer than the spacing of kept states: a step passes two places and leaves
    the later one's, and behind an answer that is cut off between them an older one is found."""
    with pair.engine(buckets=(1,), page_size=spacing) as loaded:
        loop = loop_of(loaded)
        request = loop.submit(PROMPTS[1], 40, ())
        loop.admit()
        assert bool(request.answer_slots) == (spacing == BLOCK)
        loop.reset()


@pytest.mark.parametrize(
    ("num_prompt", "num_in_flight", "is_kept"), [(20, 1, True), (20, 2, False), (32, 1, False)]
)
def test_a_slot_that_a_step_in_flight_writes_is_not_given_away(
    num_prompt: int, num_in_flight: int, is_kept: bool
) -> None:
    """Bug: of blocks as long as the spacing two in flight may end at the next place but one, whose
    state goes into the same slot, and a next turn goes on from the state of a longer text; or from
    what was in the slot before, where the prompt's end is that place, which no step has passed."""
    spacing, found = 16, list[tuple[int, int]]()
    own: Any = SimpleNamespace(
        config=SimpleNamespace(page_size=spacing),
        block=spacing,
        _lane=SimpleNamespace(in_flight=[None] * num_in_flight),
        allocator=SimpleNamespace(keep_state=lambda ids, slot: found.append((len(ids), slot))),
    )
    request: Any = SimpleNamespace(start=32, prompt_ids=[1] * num_prompt, answer_slots=[7, 8])
    holdings.Holdings._keep_last_state(own, request, [1] * request.start)
    assert found == [(32, 7)] * is_kept
