"""ngram: drafts are looked up by the definition, in a text that a step keeps."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from graphengine.capture.runners import run_chain
from graphengine.config.draft import NgramConfig
from graphengine.decode.buffers import Arena
from graphengine.decode.ends import publish_step
from graphengine.decode.proposer import step_buffers
from graphengine.decode.request import Request
from graphengine.decode.segments import Segments
from graphengine.drafters.ngram import Ngram, look_up
from tests.decode.test_kvcache import MODEL
from tests.decode.test_request import a_request


def request_of(prompt_ids: list[int]) -> Request:
    return replace(a_request(), prompt_ids=prompt_ids)


def looked_up(ids: list[int], config: NgramConfig) -> list[int]:
    """Prompt look-up, written from its definition."""
    for count in range(config.longest, config.shortest - 1, -1):
        for end in range(len(ids) - 1, count - 1, -1):
            if ids[end - count : end] == ids[len(ids) - count :]:
                period = len(ids) - end
                return [ids[end + i % period] for i in range(config.num_draft_tokens)]
    return [0] * config.num_draft_tokens


def test_look_up_by_its_definition() -> None:
    """Bug: a place that overlaps the end is missed, an earlier or shorter match wins, tokens behind
    the end of the text count, or the beginning wraps round."""
    config = NgramConfig(num_draft_tokens=6)
    rng = torch.Generator().manual_seed(1)
    found = 0
    for kinds in (2, 3, 5):
        for _ in range(60):
            lengths = torch.randint(1, 40, (3,), generator=rng)
            text = torch.randint(1, kinds + 1, (3, 41), generator=rng).int()
            drafts = look_up(text, lengths[:, None] - 1, 6, config.shortest, config.longest)
            pairs = zip(text.tolist(), lengths.tolist(), strict=True)
            wanted = [looked_up(row[:n], config) for row, n in pairs]
            assert drafts.tolist() == wanted
            found += sum(any(row) for row in wanted)
    assert found > 100


def test_drafting_again_changes_nothing() -> None:
    """Bug: a block that is drafted twice, as when a row begins, finds itself in the text; or a
    row's text keeps what the request before it has left."""
    ngram = Ngram(config=NgramConfig(num_draft_tokens=3), num_positions=20)
    buffers = step_buffers(Arena(torch.device("cpu"), torch.float32), MODEL, ngram, 2, 5)
    own: Any = buffers.own
    own.text_BP[1] = 7
    texts = [[1, 2, 3, 9, 1, 2, 3], [4, 5, 4]]
    ngram.write_rows_(buffers, dict(enumerate(map(request_of, texts))))
    buffers.start_B.copy_(torch.tensor([6, 2]))
    buffers.block_ids_BG[:, 0] = torch.tensor([3, 4])
    found = []
    for _ in range(2):
        run_chain(ngram.propose(buffers, {}, Segments()))
        found.append((buffers.draft_ids_BG.tolist(), own.text_BP.tolist()))
    assert found[0] == found[1]
    wanted = [looked_up(text, ngram.config) for text in texts]
    assert found[0][0] == [[3, *wanted[0]], [4, *wanted[1]]]
    assert wanted[0] == [9, 1, 2]
    # What is accepted of the block stands in the text already.
    assert found[0][1][0][:10] == [*texts[0], *wanted[0]]


def test_a_row_that_is_written_again_has_its_answer() -> None:
    """Bug: where a batch moves to another bucket its rows hold their prompts alone, and an answer
    that repeats itself is not drafted on."""
    ngram = Ngram(config=NgramConfig(num_draft_tokens=3), num_positions=20)
    buffers = step_buffers(Arena(torch.device("cpu"), torch.float32), MODEL, ngram, 1, 5)
    request = replace(request_of([1, 2]), output_ids=[5, 6, 9, 5, 6], start=6)
    ngram.write_rows_(buffers, {0: request})
    buffers.start_B.fill_(request.start)
    buffers.block_ids_BG[:, 0] = request.anchor
    run_chain(ngram.propose(buffers, {}, Segments()))
    assert buffers.draft_ids_BG.tolist() == [[6, 9, 5, 6]]


def test_what_a_grammar_forces_stands_in_the_text() -> None:
    """Bug: where a grammar took the place of drafts the text keeps what was looked up, so that
    later drafts follow words that were never said."""
    ngram = Ngram(config=NgramConfig(num_draft_tokens=3), num_positions=20)
    config: Any = SimpleNamespace(adjustments=False, max_logprobs=0, structured_outputs=True)
    arena = Arena(torch.device("cpu"), torch.float32)
    buffers = step_buffers(arena, MODEL, ngram, 1, 5, config)
    ngram.write_rows_(buffers, {0: request_of([1, 2, 3, 9, 1, 2, 3])})
    buffers.start_B.fill_(6)
    buffers.block_ids_BG[:, 0] = 3
    grammar = buffers.grammar
    assert grammar is not None
    grammar.is_on_B.fill_(1)
    grammar.forced_BG.copy_(torch.tensor([[-1, 5, 4, -1]]))
    run_chain([*ngram.propose(buffers, {}, Segments()), publish_step(buffers, grammar, ngram)])
    own: Any = buffers.own
    assert own.text_BP[0, 6:10].tolist() == buffers.draft_ids_BG[0].tolist() == [3, 5, 4, 2]


def test_a_block_over_the_end() -> None:
    """Bug: drafts past the last position are written into the text's beginning or over its end, or
    fail."""
    ngram = Ngram(config=NgramConfig(num_draft_tokens=3), num_positions=6)
    text = [8, 9, 7, 6, 8, 9]
    buffers = step_buffers(Arena(torch.device("cpu"), torch.float32), MODEL, ngram, 1, 5)
    ngram.write_rows_(buffers, {0: request_of(text)})
    buffers.start_B.fill_(5)
    buffers.block_ids_BG[:, 0] = 9
    run_chain(ngram.propose(buffers, {}, Segments()))
    own: Any = buffers.own
    assert own.text_BP[0, :6].tolist() == text
    assert buffers.draft_ids_BG.tolist() == [[9, 7, 6, 8]]


def test_what_is_drafted_where_nobody_says() -> None:
    """Bug: one token that was there before is a match, and most drafts are noise; or two are none;
    or the longest match of five tokens wins over a later one of four."""
    config = NgramConfig()
    assert (config.num_draft_tokens, config.num_verify_rows, config.block_size) == (15, 16, 16)
    for ids, first in (
        ([1, 7, 2, 1], 0),
        ([1, 2, 7, 3, 1, 2], 7),
        ([1, 2, 3, 4, 5, 7, 9, 2, 3, 4, 5, 8, 1, 2, 3, 4, 5], 8),
    ):
        last = torch.tensor([[len(ids) - 1]])
        numbers = config.num_draft_tokens, config.shortest, config.longest
        drafts = look_up(torch.tensor([ids]).int(), last, *numbers)
        assert drafts.shape == (1, 15) and drafts[0, 0] == first
