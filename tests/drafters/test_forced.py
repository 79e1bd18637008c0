"""forced: what is drafted at a position is read from the row's table; the real drafts are lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from graphengine.capture.runners import run_chain
from graphengine.config.draft import NgramConfig
from graphengine.decode.buffers import Arena, StepBuffers
from graphengine.decode.proposer import step_buffers
from graphengine.decode.segments import Segments
from graphengine.drafters.forced import Forced, right_at_first
from graphengine.drafters.ngram import Ngram
from tests.decode.test_kvcache import MODEL
from tests.decode.test_request import a_request


def test_positions_and_rows() -> None:
    """Bug: a table is read one position off or for another row, so a test that forces an acceptance
    length forces another; or the drafter inside does not run or knows no text: it is not tested."""
    inner: list[list[list[int]]] = []

    def seen(buffers: StepBuffers) -> None:
        inner.append(buffers.draft_ids_BG.tolist())

    forced = Forced(
        inner=Ngram(config=NgramConfig(num_draft_tokens=3), num_positions=12),
        num_positions=12,
        tokens=lambda content, block, count: [content.prompt_ids[0] + i for i in range(count)],
        seen=seen,
    )
    buffers = step_buffers(Arena(torch.device("cpu"), torch.float32), MODEL, forced, 3, 5)
    requests = [replace(a_request(), prompt_ids=ids) for ids in ([100, 5, 100], [200])]
    forced.write_rows_(buffers, {2: requests[0], 1: None, 0: requests[1]})
    buffers.start_B.copy_(torch.tensor([4, 0, 10]))
    buffers.block_ids_BG[:, 0] = torch.tensor([21, 0, 23])
    run_chain(forced.propose(buffers, {}, Segments()))
    (drafted,) = inner
    assert [row[0] for row in drafted] == [21, 0, 23]
    found = buffers.draft_ids_BG.tolist()
    assert found[0] == [21, 205, 206, 207]
    assert found[2] == [23, 111, 111, 111], "past the table's end its last position counts"
    own: Any = buffers.own
    assert not own.table_BP[1].any(), "padding has no table"
    assert own.inner.text_BP[2, :3].tolist() == [100, 5, 100]


def test_shortened_with_what_is_inside() -> None:
    """Bug: in a bucket of fewer drafts the table is forced on blocks of another length."""
    inner = Ngram(config=NgramConfig(num_draft_tokens=5), num_positions=9)
    forced = Forced(inner=inner, num_positions=9, tokens=lambda content, block, count: [0] * count)
    short = forced.shortened(2)
    assert (short.num_draft_tokens, short.inner.num_draft_tokens) == (2, 2)
    assert forced.num_draft_tokens == 5


def test_drafts_that_are_right_at_first() -> None:
    """Bug: where all drafts are asked for, the next step is taken to begin behind more of them than
    a block has, and what it was to get wrong is somewhere else; or whoever comes back to a row is
    forced from the first length on again."""
    request = a_request()
    request.begin(10)
    truth = list(range(10, 22))
    told, asked = right_at_first(request, truth, lambda step: (1, 99)[step % 2], 4, 16)
    known = [*request.prompt_ids, *truth, 0]
    assert asked == [1, 99, 1, 99]  # from 3, 5, 9 and 11 on
    assert [i for i, (a, b) in enumerate(zip(told, known, strict=True)) if a != b] == [5, 11]
    # Beside token 0 there is no token -1, which no embedding has.
    zeros, _ = right_at_first(request, [10, *[0] * 11], lambda step: (1, 99)[step % 2], 4, 16)
    assert zeros == [*request.prompt_ids, 10, 0, 1, *[0] * 5, 1, *[0] * 4]
    request.advance(truth[1:5], 1)
    told, asked = right_at_first(request, truth, lambda step: (1, 99)[step % 2], 4, 16)
    assert asked == [99, 1, 99]
    assert [i for i, (a, b) in enumerate(zip(told, known, strict=True)) if a != b] == [11]
