"""Chunks of a fixed size against eager prefills: the same K/V, the same first tokens."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from graphengine import TINY_DRAFT, TINY_TARGET, Engine
from graphengine.checkpoints.hub import HYBRID_TARGET
from graphengine.decode import attention, prefill
from graphengine.decode.admission import Budget
from graphengine.decode.fixed_chunk import FixedChunk, Piece, far_sizes_for, sizes_for
from graphengine.decode.kvcache import NULL_PAGE
from graphengine.decode.loop import DecodeLoop

BORDERS = (1, 2, 15, 16, 17, 31, 33, 47, 48, 49, 63, 64, 65, 100, 129)
LONG_BORDERS = (65, 81, 192, 193, 255, 256, 257, 321, 390)
SIZES = (16, 48, 64)
LONG, FAR = 256, 64
FAR_BORDERS = (128, 129, 140, 192, 193, 250, 321, 390)


PAIRS = {
    "dflash": (TINY_TARGET, TINY_DRAFT),
    "plain": (TINY_TARGET, None),
    "recurrent": (HYBRID_TARGET, None),
}


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


@pytest.fixture
def long_loop(loop: DecodeLoop) -> DecodeLoop:
    """With a long chunk too, so that nothing is eager."""
    eager = loop.prefill
    long = FixedChunk(eager.pair, LONG, is_long=True)
    loop.prefill = replace(eager, fixed=(*eager.fixed, long))
    return loop


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


@pytest.mark.parametrize("length", BORDERS)
def test_a_prompt_of_any_length(loop: DecodeLoop, length: int) -> None:
    """Bug: at a border a row is left out, run twice, or sees a key too few or too many: the first
    block, whose start is that of a padded request in a step; the rows behind the prompt's end."""
    compare_with_eager(loop, length)


@pytest.mark.parametrize("length", LONG_BORDERS)
def test_a_long_prompt_of_any_length(long_loop: DecodeLoop, length: int) -> None:
    """Bug: the same between a prompt's chunks, where a later one begins behind keys that an earlier
    one wrote, and in blocks of 128 rows, most of which may lie behind the prompt's end."""
    compare_with_eager(long_loop, length)


@pytest.mark.parametrize("length", FAR_BORDERS)
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


def test_how_prompts_are_split(loop: DecodeLoop) -> None:
    """Bug: a long prompt waits for company, rows are lost between two forwards, or more prompts
    share a chunk than it has rows of logits for."""

    def lengths(*prompts: int) -> list[list[int]]:
        works = split(loop, [prompt(n) for n in prompts])
        return [[piece.end - piece.begin for _, piece in work] for work in works]

    assert lengths(64) == [[64]]
    assert lengths(65) == [[65]]
    assert lengths(75) == [[70], [5]]
    assert lengths(75, 10) == [[70], [5, 10]]
    assert lengths(10, 75, 1) == [[10], [70], [5, 1]]
    assert lengths(40, 20) == [[40], [20]]
    assert lengths(1, 1, 1, 1) == [[1, 1, 1, 1]]
    loop.prefill = replace(loop.prefill, fixed=(), chunk=8)
    assert lengths(3, 17, 1) == [[3, 5], [8], [4, 1]]


def test_how_a_long_prompt_is_cut(long_loop: DecodeLoop) -> None:
    """Bug: a chunk runs mostly empty where a shorter one would do, or the last rows are lost."""

    def lengths(*prompts: int) -> list[list[int]]:
        works = split(long_loop, [prompt(n) for n in prompts])
        return [[piece.num_rows for _, piece in work] for work in works]

    assert lengths(65) == [[64], [1]]
    assert lengths(192) == [[64], [64], [64]]
    assert lengths(193) == [[193]]
    assert lengths(256) == [[256]]
    assert lengths(260, 3) == [[256], [4, 3]]
    assert lengths(3, 200) == [[3], [200]]


def test_how_a_prompt_behind_much_text_is_cut(far_loop: DecodeLoop) -> None:
    """Bug: a far piece shares a chunk with a prompt that must not be there, or a few last rows take
    a far chunk, whose attention costs as much as that of 64 rows in blocks of 16."""

    def lengths(*prompts: int) -> list[list[int]]:
        works = split(far_loop, [prompt(n) for n in prompts])
        return [[piece.num_rows for _, piece in work] for work in works]

    assert lengths(390, 3) == [[256], [128], [6, 3]]
    assert lengths(3, 192) == [[3], [64], [128]]
    assert lengths(3, 160) == [[3], [64], [96]]
    assert lengths(3, 128) == [[3], [64], [64]]


class Prompt(NamedTuple):
    """What `Prefill.split` reads of a request."""

    prompt_ids: range
    num_cached_tokens: int = 0
    pages: tuple[int, ...] = ()
    prompt_logprobs: None = None
    finish_reason: None = None
    state_slot: int = 0
    spare_slots: tuple[int, ...] = ()


class Size(NamedTuple):
    """What it reads of a chunk."""

    size: int
    is_long: bool = False
    num_prompts: int = 1


def pieces_of(
    loop: DecodeLoop, prompt: Prompt, budget: int | None = None, keyed_in: int = 1
) -> list[int]:
    """Rows of a prompt's forwards as a GPU's chunks cut it, which are alone."""
    sizes = [Size(n, n > 512, 1 if n > 512 else 4) for n in sizes_for(40960, are_long=True)]
    far = [Size(n, True) for n in far_sizes_for(40960, are_long=True, keyed_in=keyed_in)]
    made: Any = {"fixed": tuple(sizes), "far": tuple(far), "chunk": 2048}
    asked: Any = [prompt]
    works = list(replace(loop.prefill, **made).split(asked, Budget(budget, keyed_in).rows_at))
    assert all(len(work) == 1 for work in works)
    return [piece.num_rows for ((_, piece),) in works]


def test_a_long_prompt_beside_a_stream(loop: DecodeLoop) -> None:
    """Bug: a reader waits more than 20 ms for a token while 32,000 others come in, or the newcomer
    waits twice as long as alone. By what was measured of 8B shapes: ms of a step 4.6, of 128, 256
    and 512 rows without their attention 5, 6 and 11.5, of a row and 1,000 keys 0.0012 in blocks of
    128 and 0.0027 in those of 16; 1,234 alone."""
    rows = pieces_of(loop, Prompt(range(32000)), 512)
    assert rows == [512] * 4 + [256] * 89 + [128] * 56
    begin, gaps = 0, []
    for n in rows:
        attention = n * (begin + n) / 1000 * (0.0027 if n == 512 else 0.0012)
        gaps.append(4.6 + {128: 5, 256: 6, 512: 11.5}[n] + attention)
        begin += n
    assert max(gaps) < 20
    assert sum(gaps) < 2 * 1234


def test_a_hybrids_long_prompt_beside_a_stream(loop: DecodeLoop) -> None:
    """Bug: pieces of a hybrid's prompt shrink behind as few keys as a dense model's, and 152 steps
    stand between them: its first token came 2.7 times as late as alone (Qwen3.5-4B)."""
    rows = pieces_of(loop, Prompt(range(32000)), 512, keyed_in=4)
    assert rows == [512] * 62 + [256]


@pytest.mark.parametrize(("begin", "keyed_in"), [(10000, 1), (40000, 4)])
def test_a_forward_has_one_piece_of_a_prompt(loop: DecodeLoop, begin: int, keyed_in: int) -> None:
    """Bug: beside a stream, where no far chunks are built (another GPU than Hopper), a next turn
    behind much text follows a short prompt into its chunk with two pieces: a hybrid runs both at
    once from one state."""
    fixed: Any = tuple(Size(n, num_prompts=4) for n in sizes_for(131072, are_long=False))
    asked: Any = [Prompt(range(16)), Prompt(range(begin + 300), begin)]
    own = replace(loop.prefill, fixed=fixed, far=(), chunk=2048)
    works = list(own.split(asked, Budget(512, keyed_in).rows_at))
    assert [[piece.num_rows for _, piece in work] for work in works] == [[16, 256], [44]]


def test_the_rest_of_a_long_prompt(loop: DecodeLoop) -> None:
    """Bug: a remainder, or a next turn behind a long text, in blocks that read all keys 16 rows
    after 16; a text that is not long, or a next turn, in more chunks than it needs, each of which
    reads all weights."""
    assert pieces_of(loop, Prompt(range(32100))) == [2048] * 15 + [1024, 256, 100]
    assert pieces_of(loop, Prompt(range(18200), 18048)) == [152]
    assert pieces_of(loop, Prompt(range(18177), 18048)) == [129]
    assert pieces_of(loop, Prompt(range(18340), 18048)) == [256, 36]
    assert pieces_of(loop, Prompt(range(18340), 18048), keyed_in=4) == [292]
    assert pieces_of(loop, Prompt(range(18300), 18048)) == [252]
    assert pieces_of(loop, Prompt(range(18100), 18048)) == [52]
    assert pieces_of(loop, Prompt(range(2500), 2000)) == [500]
    assert pieces_of(loop, Prompt(range(90000), 80000), 512)[:2] == [128, 128]
    assert set(pieces_of(loop, Prompt(range(4000)), 16)) == {16}


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


def test_first_tokens_do_not_wait_for_each_other(loop: DecodeLoop) -> None:
    """Bug: the first prompt's token is given out when the last prompt of the batch is done."""
    requests = [loop.submit(prompt(60, n), 2, ()) for n in range(3)]
    for request in requests:
        assert [output.request for output in loop.admit_next()] == [request]
    assert not loop.prefilling


def test_a_request_cancelled_in_its_prefill(loop: DecodeLoop) -> None:
    """Bug: it begins none the less, and its pages are free and its own at once."""
    first, second = (loop.submit(prompt(60, n), 5, ()) for n in range(2))
    loop.admit_next()
    loop.cancel(second)
    assert loop.admit_next() == [] and not loop.prefilling
    assert second.finish_reason == "abort" and loop.running == [first]
    loop.cancel(first)
    assert loop.allocator.num_free == loop.allocator.num_usable


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


def test_a_small_context_needs_no_large_chunk() -> None:
    """Bug: chunks are captured that no prompt can fill."""
    assert sizes_for(2, are_long=True) == sizes_for(16, are_long=True) == (16,)
    assert sizes_for(17, are_long=True) == (16, 128)
    assert sizes_for(4096, are_long=False) == (16, 128, 256, 512)
    assert sizes_for(1024, are_long=True) == (16, 128, 256, 512, 1024)
    assert far_sizes_for(2112, are_long=True) == far_sizes_for(4096, are_long=False) == ()
    assert far_sizes_for(4096, are_long=True) == (128, 256)
    assert far_sizes_for(4096, are_long=True, keyed_in=4) == (128, 256, 512)


def test_a_chunk_takes_no_more_prompts_than_it_has_rows_for_them(loop: DecodeLoop) -> None:
    """Bug: as many as its blocks hold, and what is sent ends in front of the last one's pages."""
    made: Any = {"fixed": (Size(512, num_prompts=4),)}
    asked: Any = [Prompt(range(9))] * 6
    assert [len(work) for work in replace(loop.prefill, **made).split(asked)] == [4, 2]


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


def test_the_last_state_of_a_prompt_that_is_cut(loop: DecodeLoop) -> None:
    """Bug: a piece keeps the state behind so many rows that the scan does not stop there, or behind
    the last token, which is run whatever is known; or behind one with too few rows to keep any the
    last piece but one has kept none either, and the next turn runs both again."""
    for begin, end, kept in (
        (3, 700, 672),
        (645, 700, 32),
        (0, 672, 672),
        (0, 667, 0),
        (0, 668, 640),
        (672, 700, 0),
        (667, 700, 32),
        (668, 700, 0),
    ):
        request: Any = SimpleNamespace(prompt_ids=range(700), spare_slots=[7, 8], kept_slots={})
        assert loop.prefill._kept(request, begin, end) == (kept, 8 if kept else 0)
        assert request.kept_slots == ({begin + kept: 8} if kept else {})


def test_the_last_slot_is_for_the_prompt_s_end(loop: DecodeLoop) -> None:
    """Bug: the only state that is kept of a long prompt is one from its middle."""
    request: Any = SimpleNamespace(prompt_ids=range(2500), spare_slots=[8], kept_slots={})
    assert loop.prefill._kept(request, 0, 2240) == (0, 0)
    assert loop.prefill._kept(request, 2240, 2500) == (256, 8)


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


def test_a_prompt_begins_with_its_first_piece(
    loop: DecodeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the wait for the pieces in front of the last one counts as time in the queue; or a
    prompt whose first rows are cached has never left it."""
    clock = SimpleNamespace(perf_counter=itertools.count(1).__next__)
    monkeypatch.setattr(prefill, "time", clock)
    request = loop.submit(prompt(200), 2, ())
    loop.admit()
    assert request.prefill_s == 1 and (now := clock.perf_counter()) > 3
    again = loop.submit(prompt(200), 2, ())
    loop.admit()
    assert again.num_cached_tokens or loop.prefill.pair.target.states is not None
    assert again.prefill_s == now + 1
