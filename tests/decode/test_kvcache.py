"""Pages: the allocator as a state machine, the buffers' views, and page leaks under a real loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from graphengine.api import Engine
from graphengine.config.draft import DraftConfig
from graphengine.config.model import ModelConfig
from graphengine.config.rope import RopeConfig
from graphengine.decode.kvcache import NULL_PAGE, PageAllocator, make_pool, page_bytes, pages_for
from graphengine.decode.prefix_cache import PrefixCache
from tests.support.checkpoints import make_drafter, make_target
from tests.support.examples import examples

MODEL = ModelConfig(
    vocab_size=32,
    hidden_size=24,
    intermediate_size=8,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    attention_bias=False,
    rope=RopeConfig(theta=1e4),
)
DRAFT = DraftConfig(
    model=MODEL, block_size=5, mask_token_id=31, target_layer_ids=(0, 2), num_target_layers=3
)


def test_pool_layout_and_bytes() -> None:
    """Bug: the memory budget counts other bytes than the pool takes, or the null page holds NaN."""
    pool = make_pool(MODEL, 7, 4, torch.bfloat16, torch.device("cpu"))
    assert pool.shape == (3, 2, 7, 4, 2, 6)
    assert pool.numel() * 2 == 7 * page_bytes(MODEL, 4, 2)
    assert (pool[:, :, NULL_PAGE] == 0).all()
    assert [pages_for(n, 4) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("kind", [PageAllocator, partial(PrefixCache, page_size=4)])
def test_what_is_told_where_pages_lack(kind: Callable[[int], PageAllocator]) -> None:
    """Bug: a defect in the reservation is told with a page that nobody can have, or as if all were
    free."""
    allocator = kind(6)
    allocator.allocate(2)
    with pytest.raises(MemoryError, match=r"^4 pages asked, 3 of 5 free$"):
        allocator.allocate(4)
    with pytest.raises(ValueError, match=r"^a pool of 1 pages holds no request; at least 2 are"):
        kind(1)


class AllocatorMachine(RuleBasedStateMachine):
    """Bug: a page is handed out twice, lost, is the null page, or a failed request takes some."""

    owned = Bundle("owned")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(12)
        self.used: list[int] = []

    @rule(target=owned, count=st.integers(0, 13))
    def allocate(self, count: int) -> list[int]:
        if count > 11 - len(self.used):
            with pytest.raises(MemoryError, match=f"{count} pages asked"):
                self.allocator.allocate(count)
            return []
        pages = self.allocator.allocate(count)
        assert len(set(pages)) == count and NULL_PAGE not in pages
        assert all(0 < page < 12 and page not in self.used for page in pages)
        self.used += pages
        return pages

    @rule(pages=consumes(owned))
    def free(self, pages: list[int]) -> None:
        self.allocator.free(pages)
        self.used = [page for page in self.used if page not in pages]

    @rule(page=st.integers(0, 12))
    def free_what_is_not_owned(self, page: int) -> None:
        if page not in self.used:
            with pytest.raises(AssertionError):
                self.allocator.free([page])

    @invariant()
    def counts(self) -> None:
        assert self.allocator.num_free == 11 - len(self.used)


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(deadline=None)


@pytest.mark.parametrize("num_pages", [0, 1])
def test_empty_pool_is_refused(num_pages: int) -> None:
    """Bug: a pool of the null page alone waits for ever for its first page."""
    with pytest.raises(ValueError, match="at least 2 are needed"):
        PageAllocator(num_pages)


class LoopMachine(RuleBasedStateMachine):
    """Bug: in some order of admissions, refusals, steps, hand-overs to plain decoding, ends and
    cancellations a page leaks or is shared, a request never ends, its tokens depend on its
    neighbours, or a step's results are those of another."""

    engine: Engine
    truth: dict[tuple[int, ...], list[int]]

    def __init__(self) -> None:
        super().__init__()
        self.loop: Any = self.engine._built.loop  # type: ignore[union-attr]
        self.loop.reset()
        self.requests: list[Any] = []

    @rule(
        seed=st.integers(0, 3),
        length=st.integers(1, 9),
        budget=st.integers(1, 12),
        stop=st.one_of(st.none(), st.integers(0, 5)),
    )
    def submit(self, seed: int, length: int, budget: int, stop: int | None) -> None:
        prompt = [seed + 3 * i for i in range(length)]
        plain = self.truth.get(tuple(prompt), [])
        stops = frozenset() if stop is None or not plain else frozenset({plain[stop]})
        self.requests.append(self.loop.submit(prompt, budget, stops))

    @rule(
        refused=st.sampled_from([([], 5), ([3], 0), ([1] * 24, 1), ([1] * 40, 9)]),
    )
    def refuse(self, refused: tuple[list[int], int]) -> None:
        waiting, free = list(self.loop.waiting), self.loop.allocator.num_free
        with pytest.raises(ValueError, match=r"prompt has|max_new_tokens"):
            self.loop.submit(*refused, frozenset())
        assert list(self.loop.waiting) == waiting and self.loop.allocator.num_free == free

    @rule()
    @torch.no_grad()
    def admit(self) -> None:
        self.loop.admit()

    @property
    def running(self) -> list[Any]:
        """Requests that draft, then those that decode plainly."""
        return self.loop.running

    @precondition(lambda self: self.running)
    @rule()
    @torch.no_grad()
    def launch(self) -> None:
        self.loop.launch()

    @precondition(lambda self: self.loop.first.running)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.loop.first.running))
        self.loop.fallback.leave([request], "a test says so")

    @rule()
    def collect(self) -> None:
        self.loop.collect()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.loop.cancel(data.draw(st.sampled_from(self.requests)))

    @rule()
    def reset(self) -> None:
        self.loop.reset()
        assert not self.loop.has_work
        assert self.loop.allocator.num_free == self.loop.allocator.num_usable

    @invariant()
    def pages_have_one_owner(self) -> None:
        held = [page for request in self.requests for page in request.pages]
        allocator, users = self.loop.allocator, Counter(held)
        assert NULL_PAGE not in users
        assert all(allocator.num_users(page) == number for page, number in users.items())
        assert len(users) == allocator.num_usable - allocator.num_free
        for request in self.requests:
            if request.pages and request not in self.running:
                raise AssertionError(f"{request.finish_reason} holds {request.pages}")
        assert len(self.running) <= max(self.loop.config.buckets)

    @invariant()
    def results_are_apart(self) -> None:
        for lane in self.loop.lanes:
            flying = [step.results for step in lane.in_flight]
            numbers = [results.number for results in flying]
            assert numbers == sorted(set(numbers)) and len(numbers) <= lane.depth
            # On the CPU a step is over when it is launched: nothing may have covered its words.
            assert all(results.are_there() for results in flying)

    @invariant()
    def outputs_are_plain(self) -> None:
        for request in self.requests:
            key = tuple(request.prompt_ids)
            plain = self.truth.setdefault(key, [])
            shared = min(len(plain), len(request.output_ids))
            assert request.output_ids[:shared] == plain[:shared]
            if len(request.output_ids) > shared:
                self.truth[key] = list(request.output_ids)

    @torch.no_grad()
    def teardown(self) -> None:
        for _ in range(1000):
            if not self.loop.has_work:
                break
            self.loop.admit()
            self.loop.launch()
            self.loop.collect()
        assert all(r.finish_reason is not None and not r.pages for r in self.requests)
        assert self.loop.allocator.num_free == self.loop.allocator.num_usable


@pytest.mark.parametrize("numbers", [None, (2, 1)])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_loop_in_any_order(tmp_path: Path, backend: str, numbers: tuple[int, ...] | None) -> None:
    """Bug: see LoopMachine. The pool is too small for all rows, so that requests must wait; with
    numbers of their own the buckets' blocks differ, and requests move between them."""
    target = make_target(tmp_path / "target", layers=1, tie=False, likely_tokens=3)
    # The drafter's context ends at 15 of 24 tokens: whoever comes that far finishes plainly.
    drafter = make_drafter(
        tmp_path / "drafter", target, layers=1, taps=(0,), block_size=3, max_positions=18
    )
    options: dict[str, Any] = {
        "buckets": (1, 3),
        "page_size": 2,
        "attention_backend": backend,
        "finish_in_plain_decode": True,
    }
    plain: dict[tuple[int, ...], list[int]] = {}
    with Engine.from_pretrained(target, **options) as engine:
        for seed in range(4):
            for length in range(1, 10):
                prompt = [seed + 3 * i for i in range(length)]
                (result,) = engine.generate(prompt, max_new_tokens=12, ignore_eos=True)
                plain[tuple(prompt)] = result.token_ids
    token_bytes = 2 * (2 * 16) * 4  # K and V, two heads of 16, float32, one layer
    page = 2 * 2 * token_bytes  # two tokens, target and drafter
    options["kv_cache_memory"] = 29 * page
    options |= {"max_model_len": 24, "num_speculative_tokens": numbers}
    with Engine.from_pretrained(target, drafter, **options) as engine:
        assert engine.startup.num_pages == 29

        class Machine(LoopMachine):
            pass

        Machine.engine, Machine.truth = engine, plain
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=examples(60),
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            ),
        )


def test_the_smallest_pool() -> None:
    """Bug: a pool of one page beside the null page, which holds a short request, is refused."""
    assert PageAllocator(2).allocate(1) == [1]
    with pytest.raises(ValueError, match="at least 2 are needed"):
        PageAllocator(1)
