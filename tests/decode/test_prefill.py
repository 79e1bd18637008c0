"""How prompts are split into forwards, also beside a stream, and what happens between these."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from graphengine.decode import prefill
from graphengine.decode.admission import Budget
from graphengine.decode.chunk_sizes import far_sizes_for, sizes_for
from graphengine.decode.fixed_chunk import Piece
from graphengine.decode.logprobs import Scores
from graphengine.decode.loop import DecodeLoop
from graphengine.decode.prefill import FirstTokens
from tests.decode import test_fixed_chunk
from tests.decode.test_fixed_chunk import prompt, split

engine, loop = test_fixed_chunk.engine, test_fixed_chunk.loop
long_loop, far_loop = test_fixed_chunk.long_loop, test_fixed_chunk.far_loop


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

    assert lengths(390, 3) == [[256], [134], [3]]
    assert lengths(3, 192) == [[3], [64], [128]]
    assert lengths(3, 160) == [[3], [64], [96]]
    assert lengths(3, 128) == [[3], [64], [64]]


class Prompt(NamedTuple):
    """What `Prefill.split` reads of a request."""

    prompt_ids: range
    num_cached_tokens: int = 0
    pages: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    finish_reason: None = None
    state_slot: int = 0
    spare_slots: tuple[int, ...] = ()


class Size(NamedTuple):
    """What it reads of a chunk."""

    size: int
    is_long: bool = False
    num_prompts: int = 1


def pieces_of(
    loop: DecodeLoop,
    prompt: Prompt,
    budget: int | None = None,
    keyed_in: int = 1,
    are_paired: bool = False,
) -> list[int]:
    """Rows of a prompt's forwards as a GPU's chunks cut it, which are alone."""
    numbers = sizes_for(40960, are_long=True, are_paired=are_paired)
    sizes = [Size(n, n > 512, 1 if n > 512 else 4) for n in numbers]
    far = [Size(n, True) for n in far_sizes_for(40960, are_long=True, keyed_in=keyed_in)]
    made: Any = {"fixed": tuple(sizes), "far": tuple(far), "chunk": 2048}
    asked: Any = [prompt]
    works = list(replace(loop.prefill, **made).split(asked, Budget(budget, keyed_in).rows_at))
    assert all(len(work) == 1 for work in works)
    return [piece.num_rows for ((_, piece),) in works]


def test_what_a_forward_reads_goes_by_its_rows(
    loop: DecodeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a forward of 16 rows counts as if they chose all experts, or a long one those of one
    row; a far chunk's time is not known."""
    monkeypatch.setattr(prefill, "read_over_one_row", lambda _, num_rows: num_rows)
    monkeypatch.setattr(prefill, "forward_time", lambda num_rows, over: (num_rows, over))
    made: Any = {"fixed": (Size(16), Size(64)), "far": (Size(128, True),)}
    assert replace(loop.prefill, **made).times == {n: (n, n) for n in (16, 64, 128)}


def test_a_scored_prompt_runs_alone(loop: DecodeLoop) -> None:
    """Bug: a prompt whose own log-probabilities are asked for, also 0 of them, shares a forward,
    of which it alone is run then; or one has more rows than logits are planned for."""
    scored = [Prompt(range(n), prompt_logprobs=k) for n, k in ((70, 0), (5, 1))]
    asked: Any = [Prompt(range(10)), *scored, Prompt(range(4))]
    works = loop.prefill.split(asked)
    found = [[piece.num_rows for _, piece in work] for work in works]
    assert found == [[10], [64], [6], [5], [4]]


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (3840, [2048, 1024, 768]),
        (3841, [3841]),
        (4097, [4096, 1]),
        (6000, [4096, 1904]),
        (8192, [4096, 4096]),
        (11000, [4096, 4096, 2048, 760]),
        (12160, [4096, 4096, 3968]),
    ],
)
def test_a_long_prompt_is_cut_into_pairs(
    loop: DecodeLoop, length: int, expected: list[int]
) -> None:
    """Bug: two halves run where one is nearly empty, which costs a whole one's time; or a prompt of
    which they pay runs in singles."""
    assert pieces_of(loop, Prompt(range(length)), are_paired=True) == expected
    assert max(pieces_of(loop, Prompt(range(length)))) <= 2048


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
    asked: Any = [Prompt(range(16)), Prompt(range(begin + 420), begin)]
    own = replace(loop.prefill, fixed=fixed, far=(), chunk=2048)
    works = list(own.split(asked, Budget(512, keyed_in).rows_at))
    assert [[piece.num_rows for _, piece in work] for work in works] == [[16, 256], [164]]


def test_the_rest_of_a_long_prompt(loop: DecodeLoop) -> None:
    """Bug: a remainder, or a next turn behind a long text, in blocks that read all keys 16 rows
    after 16; a text that is not long, or a next turn, in more chunks than it needs, each of which
    reads all weights."""
    assert pieces_of(loop, Prompt(range(32100))) == [2048] * 15 + [768, 612]
    assert pieces_of(loop, Prompt(range(18200), 18048)) == [152]
    assert pieces_of(loop, Prompt(range(18177), 18048)) == [129]
    assert pieces_of(loop, Prompt(range(18340), 18048)) == [256, 36]
    assert pieces_of(loop, Prompt(range(18340), 18048), keyed_in=4) == [292]
    assert pieces_of(loop, Prompt(range(18300), 18048)) == [252]
    assert pieces_of(loop, Prompt(range(18100), 18048)) == [52]
    assert pieces_of(loop, Prompt(range(2500), 2000)) == [500]
    assert pieces_of(loop, Prompt(range(90000), 80000), 512)[:2] == [128, 128]
    assert set(pieces_of(loop, Prompt(range(4000)), 16)) == {16}


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


def test_a_chunk_takes_no_more_prompts_than_it_has_rows_for_them(loop: DecodeLoop) -> None:
    """Bug: as many as its blocks hold, and what is sent ends in front of the last one's pages."""
    made: Any = {"fixed": (Size(512, num_prompts=4),), "chunk": 2048}
    asked: Any = [Prompt(range(9))] * 6
    assert [len(work) for work in replace(loop.prefill, **made).split(asked)] == [4, 2]


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


def test_no_piece_is_empty(loop: DecodeLoop) -> None:
    """Bug: a prompt that exactly fills an eager forward waits for company, and the next one shares
    it with none of its rows."""
    asked: Any = [Prompt(range(8)), Prompt(range(3))]
    works = replace(loop.prefill, fixed=(), chunk=8).split(asked)
    assert [[piece.num_rows for _, piece in work] for work in works] == [[8], [3]]


def test_the_first_token_may_be_the_first_of_the_vocabulary() -> None:
    """Bug: token 0 behind a prompt is taken for an error's mark: its log-probability is missing,
    and those of later tokens are told of the wrong ones."""
    request: Any = SimpleNamespace(prompt_ids=[3], logprobs=0, output_logprobs=[])
    scores = Scores(torch.tensor([-0.5]), torch.zeros(1, 0), torch.zeros(1, 0))
    piece = Piece([3], 0, 1, [1])
    FirstTokens.fetch([(request, piece)], torch.tensor([0]), scores).wait()
    assert request.output_logprobs == [{0: -0.5}]


def test_the_smallest_far_piece_runs_alone(loop: DecodeLoop) -> None:
    """Bug: where no more rows than those may run beside a stream, it follows a short prompt into
    its chunk, whose blocks of 16 each read all the keys."""
    fixed: Any = tuple(Size(n, n > 512, 4) for n in sizes_for(131072, are_long=True))
    far: Any = tuple(Size(n, True) for n in far_sizes_for(131072, are_long=True))
    asked: Any = [Prompt(range(16)), Prompt(range(90000), 80000)]
    works = replace(loop.prefill, fixed=fixed, far=far).split(asked, Budget(512, 1).rows_at)
    found = [[piece.num_rows for _, piece in work] for work in itertools.islice(works, 3)]
    assert found == [[16], [128], [128]]
