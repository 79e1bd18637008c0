"""Chunks of a fixed size against eager prefills: the same K/V, the same first tokens."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from graphengine import TINY_DRAFT, TINY_TARGET, Engine
from graphengine.capture.runners import Graph, run_chain
from graphengine.capture.steps import AttentionStep, Carry, Step
from graphengine.checkpoints.hub import HYBRID_TARGET
from graphengine.decode import attention, prefill
from graphengine.decode.fixed_chunk import FixedChunk, Piece
from graphengine.decode.kvcache import NULL_PAGE
from graphengine.decode.loop import DecodeLoop

BORDERS = (1, 2, 15, 16, 17, 31, 33, 47, 48, 49, 63, 64, 65, 100, 129)
LONG_BORDERS = (65, 81, 192, 193, 255, 256, 257, 321, 390)
SIZES = (16, 48, 64)
LONG, FAR, PAIRED = 256, 64, 512
PAIRED_BORDERS = (384, 385, 386, 390)
FAR_BORDERS = (128, 129, 140, 192, 193, 250, 321, 380)


PAIRS = {
    "dflash": (TINY_TARGET, TINY_DRAFT),
    "plain": (TINY_TARGET, None),
    "recurrent": (HYBRID_TARGET, None),
}


def of_lengths(lengths: tuple[int, ...]) -> pytest.MarkDecorator:
    """All pairs and lengths; without a drafter, where a target's rows are the same, the last."""
    cases = [(x, n) for x in PAIRS for n in (lengths if x != "plain" else lengths[-1:])]
    return pytest.mark.parametrize(
        ("engine", "length"),
        [pytest.param(PAIRS[x], n, id=f"{x}-{n}") for x, n in cases],
        indirect=["engine"],
    )


@pytest.fixture(scope="module", params=PAIRS.values(), ids=list(PAIRS))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    # A page size that no block begins with, and in bf16 a near tie may fall either way.
    options: dict[str, Any] = {"page_size": 5, "dtype": "float32", "max_model_len": 400}
    with Engine.from_pretrained(*request.param, device="cpu", buckets=(4,), **options) as engine:
        yield engine


@pytest.fixture
def loop(engine: Engine) -> Iterator[DecodeLoop]:
    """Prefills in chunks of SIZES, the rest eagerly in pieces of 70."""
    loop = engine.built.loop
    eager = loop.prefill
    fixed = [FixedChunk(eager.pair, size) for size in SIZES]
    loop.prefill = replace(eager, fixed=tuple(fixed), chunk=70)
    with torch.no_grad():
        yield loop
    loop.prefill = eager
    loop.reset()


def a_forward_adds(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill made from now on cuts as if a forward took its rows' time and that of so many."""
    monkeypatch.setattr(prefill, "forward_time", lambda n, _: n + num_rows)


@pytest.fixture
def long_loop(loop: DecodeLoop, monkeypatch: pytest.MonkeyPatch) -> DecodeLoop:
    """With a long chunk too, so that nothing is eager. A forward costs as much as 30 rows."""
    a_forward_adds(30, monkeypatch)
    eager = loop.prefill
    long = FixedChunk(eager.pair, LONG, is_long=True)
    loop.prefill = replace(eager, fixed=(*eager.fixed, long))
    return loop


@pytest.fixture
def paired_loop(long_loop: DecodeLoop, monkeypatch: pytest.MonkeyPatch) -> DecodeLoop:
    """With a chunk of two halves too, which more than 384 rows fill."""
    a_forward_adds(40, monkeypatch)
    own = long_loop.prefill
    paired = FixedChunk(own.pair, PAIRED, is_long=True, is_paired=True)
    long_loop.prefill = replace(own, fixed=(*own.fixed, paired))
    return long_loop


@pytest.fixture
def far_loop(long_loop: DecodeLoop, monkeypatch: pytest.MonkeyPatch) -> DecodeLoop:
    """With a chunk of 128 rows for what has 64 in front, whose keys are split as on a GPU."""
    monkeypatch.setattr(prefill, "FAR", FAR)
    monkeypatch.setattr(attention, "_num_sms", lambda device: 132)
    far = FixedChunk(long_loop.prefill.pair, 128, is_long=True)
    long_loop.prefill = replace(long_loop.prefill, far=(far,))
    return long_loop


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def pools(loop: DecodeLoop) -> list[torch.Tensor]:
    own = getattr(loop.prefill.pair.proposer, "kv_pool", None)
    return [loop.prefill.pair.target.kv_pool] + ([] if own is None else [own])


def written(loop: DecodeLoop, request: Any) -> list[torch.Tensor]:
    """K/V of the prompt, of the target and of the drafter."""
    length = len(request.prompt_ids)
    return [p[:, :, request.pages].flatten(2, 3)[:, :, :length].clone() for p in pools(loop)]


def admitted(loop: DecodeLoop, prompts: list[list[int]]) -> tuple[list[int], list[Any]]:
    requests = [loop.submit(ids, 9, ()) for ids in prompts]
    with torch.no_grad():
        outputs = loop.admit()
    assert [output.request for output in outputs] == requests
    found = [written(loop, request) for request in requests]
    loop.reset()
    return [output.token_ids[0] for output in outputs], found


def test_what_is_on_its_way_is_not_written(loop: DecodeLoop) -> None:
    """Bug: a chunk is told what the next one is, since its numbers were written over before the
    device had read them."""
    chunk = FixedChunk(loop.prefill.pair, 16)

    class Event:
        is_over = True

        def query(self) -> bool:
            return self.is_over

        def record(self) -> None:
            self.is_over = False

    event: Any = Event()
    chunk._uploads[0] = first = chunk._uploads[0]._replace(is_free=event)
    pieces = [[Piece(prompt(9, seed), 0, 9, [1])] for seed in range(3)]
    with torch.no_grad():
        chunk.run(pieces[0])
        sent = first.flat_X.copy()
        chunk.run(pieces[1])
        assert (first.flat_X == sent).all() and len(chunk._uploads) == 2
        event.is_over = True
        chunk.run(pieces[2])
    assert (first.flat_X != sent).any() and len(chunk._uploads) == 2


def test_the_oldest_upload_is_the_next(loop: DecodeLoop) -> None:
    """Bug: with three chunks on their way, what is asked whether it is free is not what is written:
    a chunk runs with the numbers of a later one."""
    chunk = FixedChunk(loop.prefill.pair, 16)
    held = [chunk._uploads[0], chunk._new_upload(), chunk._new_upload()]
    chunk._uploads.extend(held[1:])
    chosen = [chunk._next_upload() for _ in range(4)]
    assert [[x is upload for x in held].index(True) for upload in chosen] == [0, 1, 2, 0]


@pytest.mark.parametrize("length", BORDERS)
def test_a_prompt_of_any_length(loop: DecodeLoop, length: int) -> None:
    """Bug: at a border a row is left out, run twice, or sees a key too few or too many: the first
    block, whose start is that of a padded request in a step; the rows behind the prompt's end."""
    compare_with_eager(loop, length)


@of_lengths(LONG_BORDERS)
def test_a_long_prompt_of_any_length(long_loop: DecodeLoop, length: int) -> None:
    """Bug: the same between a prompt's chunks, where a later one begins behind keys that an earlier
    one wrote, and in blocks of 128 rows, most of which may lie behind the prompt's end."""
    compare_with_eager(long_loop, length)


@pytest.mark.parametrize("engine", [PAIRS["dflash"], PAIRS["plain"]], ids=str, indirect=True)
@pytest.mark.parametrize("length", PAIRED_BORDERS)
def test_a_prompt_in_halves_beside_each_other(
    paired_loop: DecodeLoop, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the second half sees no keys of the first, or other rows than its own; the first token
    is that of a row of the first half; the drafter's context is of one half alone."""
    runs: list[str] = []
    real = FixedChunk.run

    def run(chunk: FixedChunk, *args: Any) -> Any:
        runs.append(chunk.name)
        return real(chunk, *args)

    monkeypatch.setattr(FixedChunk, "run", run)
    compare_with_eager(paired_loop, length)
    assert ("prefill.T2x256" in runs) == (length > 384)


@pytest.mark.parametrize("engine", [PAIRS["dflash"]], ids=["dflash"], indirect=True)
def test_halves_of_a_prompt_that_goes_on(paired_loop: DecodeLoop) -> None:
    """Bug: where a prompt goes on behind two halves, either leaves out a layer's keys."""
    ids, loop = prompt(399), paired_loop
    paired, pages = loop.prefill.fixed[-1], list(range(1, loop.prefill.pair.width + 1))
    eager = replace(loop.prefill, fixed=())
    found = []
    for run in (lambda piece: eager.logits([piece]), lambda piece: paired.run([piece])):
        for pool in pools(loop):
            pool[:, :, NULL_PAGE + 1 :] = torch.nan
        run(Piece(ids, 0, 390, pages))
        found.append([pool[:, :, pages].flatten(2, 3)[:, :, :390].clone() for pool in pools(loop)])
    for part, other in zip(*found, strict=True):
        torch.testing.assert_close(part, other, atol=2e-5, rtol=2e-5)


@of_lengths(FAR_BORDERS)
def test_a_prompt_behind_much_text(
    far_loop: DecodeLoop, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a piece behind much text runs in blocks of 16, each of which reads all keys; in those of
    128 it begins at another row, or a row behind the prompt's end is seen."""
    runs: list[tuple[int, bool]] = []
    real = FixedChunk.run

    def run(chunk: FixedChunk, *args: Any) -> Any:
        runs.append((chunk.size, chunk.is_long))
        return real(chunk, *args)

    monkeypatch.setattr(FixedChunk, "run", run)
    compare_with_eager(far_loop, length)
    assert ((128, True) in runs) == (length not in (128, 193, 250))


def compare_with_eager(loop: DecodeLoop, length: int) -> None:
    for pool in pools(loop):
        pool[:, :, NULL_PAGE + 1 :] = torch.nan  # what others left there
    tokens, (found,) = admitted(loop, [prompt(length)])
    loop.prefill = replace(loop.prefill, fixed=(), far=(), chunk=2048)
    expected, (wanted,) = admitted(loop, [prompt(length)])
    assert tokens == expected
    for part, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(part, other, atol=2e-5, rtol=2e-5)


def test_prompts_that_share_a_chunk(loop: DecodeLoop) -> None:
    """Bug: a block sees another prompt's keys, or a logit row is another prompt's."""
    prompts = [prompt(n, seed) for seed, n in enumerate((3, 20, 16, 1))]
    sizes = [[piece.end for _, piece in work] for work in split(loop, prompts)]
    assert sizes == [[3, 20, 16], [1]]
    tokens, found = admitted(loop, prompts)
    loop.prefill = replace(loop.prefill, fixed=())
    alone = [admitted(loop, [ids]) for ids in prompts]
    assert tokens == [token for (token,), _ in alone]
    for parts, (_, (others,)) in zip(found, alone, strict=True):
        for part, other in zip(parts, others, strict=True):
            torch.testing.assert_close(part, other, atol=2e-5, rtol=2e-5)


def split(loop: DecodeLoop, prompts: list[list[int]]) -> list[Any]:
    requests = [loop.submit(ids, 9, ()) for ids in prompts]
    for request in requests:
        request.pages = [1]
    works = list(loop.prefill.split(requests))
    loop.reset()
    return works


def test_padding_writes_to_the_null_page(loop: DecodeLoop) -> None:
    """Bug: a block without a prompt writes into pages that a request owns, those of the chunk's
    last run among them."""
    chunk = loop.prefill.fixed[-1]
    chunk.run([Piece(prompt(60), 0, 60, list(range(1, 14)))])
    for pool in pools(loop):
        pool.fill_(7)
    chunk.run([Piece(prompt(10), 0, 10, [20, 21])])
    for pool in pools(loop):
        is_old = (pool == 7).flatten(3).all(-1).all(0).all(0)  # [num_pages]
        assert not is_old[[20, 21]].any()
        is_old[[NULL_PAGE, 20, 21]] = True
        assert is_old.all()


def test_rows_past_the_page_table(loop: DecodeLoop) -> None:
    """Bug: a block's rows behind the last page write into that page, over a prompt's rows."""
    pair, pool = loop.prefill.pair, loop.prefill.pair.target.kv_pool
    end, pages = pair.num_positions, list(range(1, pair.width + 1))
    found = []
    for run in (loop.prefill.logits, loop.prefill.fixed[0].run):
        for tensor in (pool, *(pair.target.states or ())):
            tensor.zero_()
        run([Piece(prompt(end), end - 5, end, pages)])
        found.append(pool[:, :, pages].flatten(2, 3)[:, :, end - 5 : end].clone())
    torch.testing.assert_close(*found, atol=2e-5, rtol=2e-5)


def test_logits_that_are_not_finite(loop: DecodeLoop) -> None:
    """Bug: a NaN in a prompt's logits is token 0."""
    table = loop.prefill.pair.target.weights.embed_VD
    kept = table[9].clone()
    table[9] = torch.nan
    try:
        request = loop.submit([3, 9], 4, ())
        loop.admit()
        assert request.finish_reason == "error"
    finally:
        table[9] = kept


def test_who_drops_a_chunk_gives_it_back(loop: DecodeLoop) -> None:
    """Bug: its steps hold it, so a closed engine keeps weights and graphs until Python collects."""
    chunk = FixedChunk(loop.prefill.pair, 16)
    seen = weakref.ref(chunk)
    gc.disable()
    try:
        del chunk
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("size", [48, PAIRED])
def test_few_layers_warm_up(loop: DecodeLoop, size: int) -> None:
    """Bug: a chunk is launched whole before it is captured, which takes as long again; or the few
    layers leave no numbers on the null page, which rows that are masked read."""
    pair = loop.prefill.pair

    class Pool:
        def capture(self, steps: list[Step], carry: Carry) -> Any:
            return Graph(cast(Any, SimpleNamespace(replay=None)), 0, 0), carry

    is_paired, pool = size == PAIRED and pair.target.states is None, cast(Any, Pool())
    for kv_pool in pair.kv_pools:
        kv_pool[:, :, NULL_PAGE] = 0.0
    torch.use_deterministic_algorithms(True)  # what is empty is NaN
    try:
        chunk = FixedChunk(pair, size, is_long=size == PAIRED, is_paired=is_paired)
        ran = chunk.short_chain()
        run_chain(ran)
        chunk.capture_(pool, True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert sum(isinstance(step, AttentionStep) for step in ran) == 2  # of a hybrid's 8 layers, too
    assert all(pool[:, :, NULL_PAGE].isfinite().all() for pool in pair.kv_pools)


def test_prompts_of_a_chunk(loop: DecodeLoop) -> None:
    """Bug: a chunk of an engine of few rows keeps logits of sixteen prompts, which no plan has; or
    it has more of them than blocks."""
    pair = loop.prefill.pair

    def most(bucket: int, size: int) -> int:
        config = replace(pair.config, buckets=(1, bucket))
        return FixedChunk(replace(pair, config=config), size).num_prompts

    assert [most(*x) for x in ((1, 48), (2, 48), (32, 16), (32, 48), (32, 512))] == [1, 2, 1, 3, 16]


def test_an_error_ends_what_a_chunk_was_to_tell(loop: DecodeLoop) -> None:
    """Bug: behind an error the next prompts' first tokens are told to those before them as well."""
    chunk, piece, told = loop.prefill.fixed[0], Piece([1, 2], 0, 2, [1]), list[bool]()

    def explode(*_: Any) -> None:
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        chunk.run([piece], explode)
    chunk.run([piece], lambda *_: told.append(True))
    assert told == [True]


def test_no_token_has_no_log_probability(loop: DecodeLoop) -> None:
    """Bug: where a prompt's logits are not finite, one of token -1 is told."""
    table = loop.prefill.pair.target.weights.embed_VD
    kept = table[9].clone()
    table[9] = torch.nan
    try:
        request = loop.submit([3, 9], 4, (), logprobs=1)
        loop.admit()
        assert request.finish_reason == "error" and request.output_logprobs == []
    finally:
        table[9] = kept


@pytest.mark.parametrize("engine", [PAIRS["recurrent"]], ids=["recurrent"], indirect=True)
def test_a_last_layer_that_recurs_runs_in_every_piece(loop: DecodeLoop) -> None:
    """Bug: of a prompt that goes on the last layer is left out, though it has no keys, and its
    state is that of the last piece alone."""
    pair, ids = loop.prefill.pair, prompt(300)
    pair = replace(pair, target=pair.target.shortened(3))
    assert pair.target.config.mixers[-1] == "gated_delta" and pair.target.states is not None
    made, chunk = replace(loop.prefill, pair=pair), FixedChunk(pair, LONG, is_long=True)
    pages, found = list(range(1, pair.width + 1)), list[torch.Tensor]()
    for run in (lambda piece: made.logits([piece]), lambda piece: chunk.run([piece])):
        pair.target.states.states_LSNVK.fill_(torch.nan)
        for begin, end in ((0, LONG), (LONG, 300)):
            run(Piece(ids, begin, end, pages, 1))
        found.append(pair.target.states.states_LSNVK[:3, 1].clone())
    torch.testing.assert_close(*found, atol=2e-5, rtol=2e-5)
