"""What holds for attention alone holds with recurrent layers: the same tests, over a hybrid pair.

The plain continuation comes from transformers; acceptance lengths are forced.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from graphengine.api import Engine
from graphengine.checkpoints.hub import HYBRID_TARGET
from graphengine.decode import ends, recurrence
from graphengine.decode.buffers import Arena
from graphengine.decode.loop import DecodeLoop
from graphengine.decode.recurrence import NULL_SLOT, States
from graphengine.kernels.gated_delta_prefill import Pieces
from graphengine.startup.build import read_configs
from tests.decode.test_engine import (  # noqa: F401, pytest runs these tests here again
    BACKENDS,
    BLOCK,
    LENGTH,
    PROMPTS,
    Pair,
    assert_idle,
    force,
    loop_of,
    test_bucket_size_changes_nothing,
    test_every_acceptance_length,
    test_more_prompts_than_rows,
    test_pool_smaller_than_the_demand,
    test_random_acceptance_in_a_batch,
    test_short_then_long_then_short,
    tokens,
)
from tests.decode.test_engine_ends import (  # noqa: F401, pytest runs these tests here again
    test_budget_at_every_place,
    test_cancel_in_every_state,
    test_context_limit,
    test_dropped_stream_returns_its_pages,
    test_rows_end_at_different_times,
)
from tests.decode.test_fallback import (  # noqa: F401, pytest runs these tests here again
    impatient,
    test_drafted_and_plain_side_by_side,
    test_lost_speculation_falls_back,
    test_measuring_alone_changes_nothing,
)
from tests.decode.test_lane import (  # noqa: F401, pytest runs these tests here again
    test_only_the_row_that_changes_is_written,
    test_rows_behind_a_smaller_bucket_move,
)
from tests.support.checkpoints import make_drafter
from tests.support.dflash_reference import load_target, plain_generate
from tests.support.hybrids import A, D, make_hybrid


class HybridPair(Pair):
    """Two recurrent layers around one that attends, slow and fast decays."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.target = make_hybrid(
            directory / "target", tie=False, layer_types=[D, A, D, A], key_heads=1, **options
        )
        self.drafter = make_drafter(directory / "drafter", self.target, block_size=BLOCK)
        model = load_target(self.target)
        self.truth = {tuple(p): plain_generate(model, p, LENGTH) for p in PROMPTS}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return HybridPair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def engine(pair: Pair) -> Iterator[Engine]:
    """Two steps ahead of the host; what asks for no backend has the other one."""
    with pair.engine(attention_backend="triton") as engine:
        yield engine
        assert_idle(engine)


def states_of(loop: DecodeLoop) -> States:
    states = loop.prefill.pair.target.states
    assert states is not None
    return states


def states_by_length(
    pair: Pair, prompt: list[int], drafted: bool, lengths: Callable[[], int]
) -> dict[int, States]:
    """Committed tokens -> the states behind them, of one request stepped to its end."""
    found = {}
    with pair.engine(draft=drafted, buckets=(1,)) as loaded:
        if drafted:
            force(loaded, pair, lambda request, step: lengths())
        loop = loop_of(loaded)
        request = loop.submit(list(prompt), 40, ())
        while not request.finish_reason:
            loop.admit()
            slot = request.state_slot
            found[request.start] = States(*(x[:, slot].clone() for x in states_of(loop)))
            loop.launch()
            loop.collect()
        assert request.output_ids == pair.plain(prompt, 40)
    return found


@torch.no_grad()
def test_states_are_those_of_single_steps(pair: Pair) -> None:
    """Bug (H04, H08, H10, H11): after some acceptance length the state is another row's, the window
    is a column off, or each commit loses a little: drafted and plain decoding drift apart."""
    prompt, rng = PROMPTS[1], random.Random(5)
    plain = states_by_length(pair, prompt, False, lambda: 0)
    draws: list[Callable[[], int]] = [partial(int, n) for n in range(BLOCK)]
    for lengths in (*draws, lambda: rng.randrange(BLOCK)):
        for start, states in states_by_length(pair, prompt, True, lengths).items():
            for tensor, known in zip(states, plain[start], strict=True):
                # A deeper layer's inputs are products of other numbers of rows.
                for index, bound in enumerate((1e-6, 5e-6)):
                    error = (tensor[index] - known[index]).norm()
                    assert error <= bound * known[index].norm()
    model = load_target(pair.target)
    for start in (max(plain), len(prompt)):
        ids = (prompt + pair.plain(prompt))[:start]
        cache = model(torch.tensor([ids]), use_cache=True).past_key_values
        for index, layer in enumerate((0, 2)):
            # The cache has states by layer up to transformers 5.4; then a layer has one, of which
            # [0] is the only row, and in newer versions several by number.
            kept, number = (cache.layers[layer], 0) if hasattr(cache, "layers") else (cache, layer)
            theirs, window = kept.recurrent_states[number], kept.conv_states[number]
            theirs = theirs.reshape(theirs.shape[-3:]).transpose(1, 2)
            ours = plain[start].states_LSNVK[index]
            assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
            window = window.reshape(window.shape[-2:]).T[-3:]
            ours = plain[start].windows_LSXC[index]
            assert (ours - window).norm() <= 1e-5 * window.norm()


@pytest.mark.parametrize("fill", [float("nan"), 1e4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_poison_where_nothing_may_be_read(
    pair: Pair, backend: str, fill: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug (H02, H05, H32): a rejected row's record, the null slot or a free slot is read, or is
    multiplied by zero instead of left out."""
    real = ends.advance_

    def poisoned(states: States, buffers: Any, first_B: Any, start_B: Any, size: int) -> None:
        for tensor in states:
            tensor[:, NULL_SLOT] = fill
        for row, count in enumerate((start_B - first_B).tolist()):
            raw, *others = buffers.records
            raw[:, row, 3 + count :] = fill
            for record in others:
                record[:, row, count:] = fill
        real(states, buffers, first_B, start_B, size)

    monkeypatch.setattr(ends, "advance_", poisoned)
    rng = random.Random(1)
    with pair.engine(attention_backend=backend, buckets=(4,)) as loaded:
        force(loaded, pair, lambda request, step: rng.randrange(BLOCK))
        for tensor in states_of(loop_of(loaded)):
            tensor.fill_(fill)
        for prompts in (PROMPTS[:3], PROMPTS[1:]):
            results = loaded.generate(prompts, max_new_tokens=30, ignore_eos=True)
            assert tokens(results) == [pair.plain(p, 30) for p in prompts]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_verify_changes_no_state(
    pair: Pair, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a step that our own tools repeat, or one whose end never ran, has moved the state."""
    monkeypatch.setattr(ends, "advance_", lambda *args: None)
    with pair.engine(attention_backend=backend, buckets=(2,)) as loaded, torch.no_grad():
        loop = loop_of(loaded)
        requests = [loop.submit(list(p), 20, ()) for p in PROMPTS[:2]]
        loop.admit()
        before = [tensor.clone() for tensor in states_of(loop)]
        loop.launch()
        loop.collect()
        for tensor, known in zip(states_of(loop), before, strict=True):
            assert torch.equal(tensor, known)
        for request in requests:
            loop.cancel(request)
        loop.reset()


@pytest.mark.parametrize(("backend", "size"), [("triton", 8), ("triton", 20), ("torch", 8)])
def test_the_next_turn_begins_behind_the_last_answer(
    pair: Pair, backend: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the last answer is run again, or from a state that steps in flight at its end have moved
    on, so that the text changes; with two at once, from the other one's; or the part of a page that
    belongs to it is not taken along."""
    monkeypatch.setattr(recurrence, "ANSWER_SPACING", 8)
    outcomes: dict[bool, list[list[int]]] = {}
    for cached in (True, False):
        options = {"page_size": size, "buckets": (1, 2), "enable_prefix_caching": cached}
        with pair.engine(attention_backend=backend, **options) as loaded:
            prompts, outcomes[cached], ends = [list(p) for p in PROMPTS[1:3]], [], [0, 0]
            for turn in range(4):
                results = loaded.generate(prompts, max_new_tokens=9 + turn, ignore_eos=True)
                for i, result in enumerate(results):
                    known = ends[i] // 8 * 8 if cached else 0
                    assert result.metrics.num_cached_tokens == known
                    ends[i] = len(prompts[i]) + len(result.token_ids) - 1
                    prompts[i] = prompts[i] + result.token_ids + [40 + turn]
                outcomes[cached] += tokens(results)
            assert_idle(loaded)
    assert outcomes[True] == outcomes[False]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_answer_that_is_cut_off_leaves_no_later_state(pair: Pair, backend: str) -> None:
    """Bug: tokens behind a stop string have completed further pages: the state of one of these is
    taken for that of the last page that stays; also of one that they have just filled."""
    found: dict[bool, list[list[int]]] = {}
    for cached in (True, False):
        options = {"page_size": 8, "buckets": (1,), "enable_prefix_caching": cached}
        hits, found[cached] = [], []
        with pair.engine(attention_backend=backend, **options) as loaded, torch.no_grad():
            loop = loop_of(loaded)
            for num_dropped in (1, 9, 17, 25):
                first = loop.submit([num_dropped, *PROMPTS[1]], 60, ())
                while len(first.output_ids) < 40 or (num_dropped == 17 and first.start % 8):
                    loop.admit()
                    loop.launch()
                    loop.collect()
                loop.end_at(first, "said", num_dropped)
                second = loop.submit([*first.token_ids, 40], 8, ())
                for _ in loop.run():
                    pass
                hits.append(second.num_cached_tokens > len(first.prompt_ids))
                found[cached].append(second.output_ids)
        if cached:
            assert hits[0] and not hits[-1]
    assert found[True] == found[False]


def test_rows_of_no_piece_give_zeros() -> None:
    """Bug: behind a prompt's end a chunk's rows are what memory held, maybe NaN."""
    states = States(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 2, 4, 4))
    torch.use_deterministic_algorithms(True)  # then new memory is NaN
    try:
        found = recurrence.prefill_recurrence(states, Pieces(*torch.zeros(6, 1).int()), 5)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found is not None
    assert torch.equal(found.out_TNV, torch.zeros(5, 2, 4))


def test_one_row_leaves_only_its_columns() -> None:
    """Bug: plain decoding takes memory for what only rows that may be rejected need."""
    target, _ = read_configs(HYBRID_TARGET, None)
    for block, is_needed in ((1, False), (2, True)):
        arena = Arena(torch.device("cpu"), torch.float32)
        buffers = recurrence.take_buffers(arena, target, 1, block)
        assert buffers is not None
        assert all(bool(x.numel()) == is_needed for x in buffers.records[1:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_that_no_step_has_left_is_not_kept(pair: Pair, backend: str) -> None:
    """Bug: behind a prompt that fills its last page stands an answer that fills none: what lay in
    a slot for answers is taken for the state behind the prompt."""
    options = {"page_size": 8, "buckets": (1,), "attention_backend": backend}
    with pair.engine(**options) as loaded, torch.no_grad():
        loop = loop_of(loaded)
        first = loop.submit(list(range(5, 21)), 60, ())
        loop.admit()
        loop.launch()
        loop.collect()
        loop.end_at(first, "said", len(first.output_ids) - 2)
        second = loop.submit([*first.token_ids, 40], 1, ())
        for _ in loop.run():
            pass
        assert second.num_cached_tokens < 16, "none is behind the prompt's own pages"
