"""The engine on random pairs: output equals plain decoding, whatever is accepted.

How generations end is in test_engine_ends.py.

Acceptance lengths are forced (support/dflash_reference.py), since a random drafter is never right.
The plain continuation comes from transformers. `triton` on the CPU is the kernel's torch reference,
with the decode loop two steps ahead of the host as on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from graphengine.api import Engine, GenerationResult
from graphengine.capture.compile import CacheCounts, cache_counts
from graphengine.decode.buckets import BucketBuilder
from graphengine.decode.compile_ahead import make_segments
from graphengine.decode.fixed_chunk import Piece
from graphengine.decode.prefill import Prefill
from tests.support.chains import insert_
from tests.support.checkpoints import make_drafter, make_target
from tests.support.dflash_reference import Lengths, force_drafts, load_target, plain_generate

BLOCK = 4
LENGTH = 48  # tokens of plain continuation known per prompt
PROMPTS = [[7, 99, 23], list(range(100, 117)), [5], [250, 1, 2, 3, 4, 5, 6, 7], [60, 61] * 5]
BACKENDS = ["torch", "triton"]


class Pair:
    """A target, its drafter and the plain continuations of PROMPTS."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.target = make_target(directory / "target", tie=False, **options)
        self.drafter = make_drafter(directory / "drafter", self.target, block_size=BLOCK)
        model = load_target(self.target)
        self.truth = {tuple(p): plain_generate(model, p, LENGTH) for p in PROMPTS}

    def plain(self, prompt: list[int], count: int = LENGTH) -> list[int]:
        return self.truth[tuple(prompt)][:count]

    def engine(self, *, draft: bool = True, **options: Any) -> Engine:
        options = {"buckets": (1, 2, 4), "page_size": 4, "max_model_len": 96} | options
        return Engine.from_pretrained(self.target, self.drafter if draft else None, **options)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(params=BACKENDS)
def engine(pair: Pair, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with pair.engine(attention_backend=request.param) as engine:
        yield engine
        assert_idle(engine)


def loop_of(engine: Engine) -> Any:
    return engine._built.loop  # type: ignore[union-attr]


def assert_idle(engine: Engine) -> None:
    """No page is held and no request is left."""
    loop = loop_of(engine)
    for allocator in (loop.allocator, loop.state_slots):
        assert allocator.num_free == allocator.num_usable
    assert not loop.has_work


def force(engine: Engine, pair: Pair, lengths: int | Lengths) -> Any:
    fixed: Lengths = (lambda request, step: lengths) if isinstance(lengths, int) else lengths
    return force_drafts(engine, pair.truth, fixed)


def tokens(results: list[GenerationResult]) -> list[list[int]]:
    return [result.token_ids for result in results]


def ids_only(engine: Engine, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    return tokens(engine.generate(prompts, **({"ignore_eos": True} | options)))


@pytest.fixture(scope="module", params=[0, 1])
def lucky(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Pair:
    """Few likely tokens: the random drafter is right now and then."""
    return Pair(tmp_path_factory.mktemp("lucky"), seed=request.param, likely_tokens=3)


@pytest.mark.parametrize(
    ("page_size", "backend"), [(1, "torch"), (3, "triton"), (16, "torch"), (16, "triton")]
)
def test_speculative_equals_plain(lucky: Pair, page_size: int, backend: str) -> None:
    """Bug: a draft that the target would not say is kept, or state after a step is off by one."""
    options = {"page_size": page_size, "attention_backend": backend}
    with lucky.engine(**options) as engine, lucky.engine(draft=False, **options) as plain:
        results = engine.generate(PROMPTS, max_new_tokens=30, ignore_eos=True)
        assert tokens(results) == ids_only(plain, PROMPTS, max_new_tokens=30)
        assert tokens(results) == [lucky.plain(p, 30) for p in PROMPTS]
        assert any(sum(r.metrics.acceptance.steps_by_accepted[1:]) for r in results)


@pytest.mark.parametrize("accepted", range(BLOCK))
def test_every_acceptance_length(engine: Engine, pair: Pair, accepted: int) -> None:
    """Bug: positions, slots, context rows or the bonus token are wrong after one certain length;
    0 (nothing accepted) and G-1 (everything) are the classic ones."""
    force(engine, pair, accepted)
    for prompt in PROMPTS[:3]:
        (result,) = engine.generate(prompt, max_new_tokens=25, ignore_eos=True)
        assert result.token_ids == pair.plain(prompt, 25)
        histogram = result.metrics.acceptance.steps_by_accepted
        assert histogram[accepted] == sum(histogram) == -(-24 // (accepted + 1))


def test_random_acceptance_in_a_batch(engine: Engine, pair: Pair) -> None:
    """Bug: rows that advance by different lengths disturb each other."""
    rng = random.Random(0)
    forced = force(engine, pair, lambda request, step: rng.randrange(BLOCK))
    results = engine.generate(PROMPTS, max_new_tokens=40, ignore_eos=True)
    assert tokens(results) == [pair.plain(p, 40) for p in PROMPTS]
    for i, result in enumerate(results):
        counts = forced.expected[i]
        seen = result.metrics.acceptance
        # Steps that were in flight when the request ended are asked for but not counted.
        assert seen.steps_by_accepted == [counts[: seen.num_steps].count(a) for a in range(BLOCK)]


@torch.no_grad()
def run_to_end(engine: Engine, each_step: Callable[[], None] = lambda: None) -> None:
    loop = loop_of(engine)
    while loop.has_work:
        loop.admit()
        loop.launch()
        each_step()
        loop.collect()


def test_more_prompts_than_rows(pair: Pair) -> None:
    """Bug: waiting prompts are lost, reordered, or start with the state of the row before them."""
    many = [PROMPTS[i % len(PROMPTS)] for i in range(13)]
    for backend in BACKENDS:
        with pair.engine(buckets=(1, 3), attention_backend=backend) as engine:
            rng = random.Random(2)
            force(engine, pair, lambda request, step, rng=rng: rng.randrange(BLOCK))
            assert ids_only(engine, many, max_new_tokens=11) == [pair.plain(p, 11) for p in many]
            assert_idle(engine)


@pytest.mark.parametrize("bucket", [1, 2, 3, 8])
def test_bucket_size_changes_nothing(pair: Pair, bucket: int) -> None:
    """Bug: padded rows or the bucket's size leak into the result."""
    with pair.engine(buckets=(bucket,)) as engine:
        assert ids_only(engine, PROMPTS, max_new_tokens=12) == [pair.plain(p, 12) for p in PROMPTS]


def test_short_then_long_then_short(engine: Engine, pair: Pair) -> None:
    """Bug: what an earlier, longer or shorter request left in rows, pages or plans is used."""
    for prompt, budget in ((PROMPTS[2], 2), (PROMPTS[1], 45), (PROMPTS[2], 30), (PROMPTS[1], 3)):
        assert ids_only(engine, [prompt], max_new_tokens=budget) == [pair.plain(prompt, budget)]


def test_pool_smaller_than_the_demand(pair: Pair) -> None:
    """Bug: with too few pages for all rows, requests deadlock, fail half-way or share a page."""
    with pair.engine(max_model_len=40) as probe:
        page = probe.startup.kv_pool_bytes // probe.startup.num_pages
    with pair.engine(max_model_len=40, kv_cache_memory=14 * page) as engine:
        assert engine.startup.num_pages == 14
        results = engine.generate(PROMPTS, max_new_tokens=20, ignore_eos=True)
        assert tokens(results) == [pair.plain(p, 20) for p in PROMPTS]
        assert_idle(engine)
    with pytest.raises(ValueError, match="the longest that fits is 12 tokens"):
        pair.engine(max_model_len=40, kv_cache_memory=5 * page)
    with pair.engine(max_model_len=None, kv_cache_memory=5 * page) as engine:
        assert engine.config.max_model_len == 12
        assert ids_only(engine, PROMPTS[:1], max_new_tokens=99) == [pair.plain(PROMPTS[0], 9)]


def test_prefill_chunk_is_shared(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a chunk's rows are given to every prompt of a batch, so that a forward has more rows
    than the memory plan has room for."""
    real, num_rows = Prefill.logits, []

    def logits(self: Prefill, pieces: list[Piece], **wishes: Any) -> Any:
        num_rows.append(sum(piece.end - piece.begin for piece in pieces))
        return real(self, pieces, **wishes)

    monkeypatch.setattr(Prefill, "logits", logits)
    with pair.engine(buckets=(4,)) as engine:
        loop = loop_of(engine)
        monkeypatch.setattr(loop, "prefill", replace(loop.prefill, chunk=8))
        found = ids_only(engine, PROMPTS[:4], max_new_tokens=5)  # of 3 + 17 + 1 + 8 tokens
    assert num_rows == [8, 8, 8, 5]
    assert found == [pair.plain(p, 5) for p in PROMPTS[:4]]


# --- poison ---


@pytest.mark.parametrize("options", [{}, {"num_speculative_tokens": (3, 2, 1)}, {"draft": False}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_poisoned_cache_changes_nothing(pair: Pair, backend: str, options: dict[str, Any]) -> None:
    """Bug: attention reads K/V that no row of the request has written: beyond the length, in the
    null page, in a page of nobody, or in a slot whose row was rejected."""
    draft = options.get("draft", True)
    with pair.engine(attention_backend=backend, **options) as engine:
        loop = loop_of(engine)
        prefill = loop.prefill
        pools = [prefill.pair.target.kv_pool] + ([prefill.pair.proposer.kv_pool] if draft else [])
        for pool in pools:
            pool.fill_(float("nan"))
        page_size, reads = engine.config.page_size, []

        def poison(buffers: Any) -> None:
            """All slots from the next block on: rejected rows, and the rest of the pages."""
            for start, pages in zip(
                buffers.start_B.tolist(), buffers.page_table_BW.tolist(), strict=True
            ):
                if start == 0:
                    continue
                slots = [p * page_size + i for p in pages for i in range(page_size)][start:]
                for pool in pools:
                    pool.flatten(2, 3)[:, :, slots] = float("nan")
                    pool[:, :, 0] = float("nan")
                reads.append(start)

        rng = random.Random(3)
        if draft:
            force(engine, pair, lambda request, step: rng.randrange(BLOCK))
        for bucket in loop.first.buckets.values():
            # After the last reader of a step and before the next block's first writer.
            name = "draft.context" if draft else "accept"
            insert_(bucket, name, partial(poison, bucket.buffers), behind=True)
        assert ids_only(engine, PROMPTS, max_new_tokens=30) == [pair.plain(p, 30) for p in PROMPTS]
        assert len(reads) > 20


def test_padded_rows_touch_only_the_null_page(pair: Pair) -> None:
    """Bug: a padded row writes its K/V into a page of somebody else."""
    with pair.engine(buckets=(4,)) as engine:
        loop = loop_of(engine)
        pools = [loop.prefill.pair.target.kv_pool, loop.prefill.pair.proposer.kv_pool]
        for pool in pools:
            pool.fill_(123.0)
        assert ids_only(engine, [PROMPTS[0]], max_new_tokens=9) == [pair.plain(PROMPTS[0], 9)]
        # One request of 3 + 9 + 4 tokens owns pages 1 .. 4 of a fresh pool.
        for pool in pools:
            assert (pool[:, :, 5:] == 123.0).all()
            assert not (pool[:, :, 1] == 123.0).any()


@pytest.mark.slow
def test_compiled_equals_eager(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: Inductor fuses across a cache write, specialises on a stale shape, or a compiled segment
    bakes in one layer's weights; or segments are compiled one by one as a step runs, each behind
    the kernels that it waits for, or as a request's does, since few layers do not have all."""
    counts: list[CacheCounts] = []
    real: Any = BucketBuilder._warm_up

    def warm_up(self: BucketBuilder, sizes: list[int], prefills: Any) -> None:
        make_segments(self.segment_runs(sizes))
        counts.append(cache_counts())
        real(self, sizes, prefills)

    monkeypatch.setattr(BucketBuilder, "_warm_up", warm_up)
    with pair.engine(buckets=(1,), compile=True) as engine:
        assert engine.config.compile
        assert counts == [cache_counts()]
        force(engine, pair, lambda request, step: step % BLOCK)
        for prompt in PROMPTS[:2]:
            assert ids_only(engine, [prompt], max_new_tokens=12) == [pair.plain(prompt, 12)]
        assert counts[-1] == cache_counts()
