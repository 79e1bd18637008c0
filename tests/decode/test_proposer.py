"""proposer: every drafter has all that a step, a prefill and a plan ask of one."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphengine.config.draft import NgramConfig
from graphengine.decode.buffers import Arena
from graphengine.decode.logprobs import score_rows
from graphengine.decode.proposer import Proposer, step_buffers
from graphengine.decode.segments import Segments
from graphengine.drafters.dflash import DFlash
from graphengine.drafters.forced import Forced
from graphengine.drafters.ngram import Ngram
from tests.decode.test_buffers import drafter
from tests.decode.test_kvcache import DRAFT, MODEL
from tests.decode.test_request import a_request

ASKED = [name for name, value in vars(Proposer).items() if inspect.isfunction(value)]


@pytest.mark.parametrize("kind", [DFlash, Forced, Ngram])
def test_every_drafter_is_asked_alike(kind: Any) -> None:
    """Bug: a drafter takes other arguments for what only a graph, a plan or a longer prompt asks:
    the first user of that finds out; or what it calls otherwise is never called."""
    assert len(ASKED) > 5
    for name in ASKED:
        asked, found = getattr(Proposer, name), getattr(kind, name)
        assert list(inspect.signature(asked).parameters) == list(
            inspect.signature(found).parameters
        )
    own = [name for name, value in vars(kind).items() if inspect.isfunction(value)]
    assert {"propose", "buffers", "shortened"} <= set(own)


def test_buffers_are_as_long_as_the_block() -> None:
    """Bug: buffers have as many rows as the drafter drafts, one too few, or lack its own."""
    for proposer, own in (
        (drafter(DRAFT), 5),
        (Ngram(config=NgramConfig(num_draft_tokens=4), num_positions=9), 1),
        (Proposer(), 0),
    ):
        buffers = step_buffers(Arena(torch.device("cpu"), torch.float32), MODEL, proposer, 3, 2)
        assert buffers.block == proposer.num_draft_tokens + 1
        assert buffers.positions_T.shape == (3 * buffers.block,)
        assert len(buffers.own) == own


def test_no_more_alternatives_than_tokens() -> None:
    """Bug: where fewer tokens than alternatives exist, a step's do not fit what keeps them."""
    config: Any = SimpleNamespace(adjustments=False, max_logprobs=99, structured_outputs=False)
    buffers = step_buffers(
        Arena(torch.device("cpu"), torch.float32), MODEL, Proposer(), 3, 2, config
    )
    assert buffers.scores is not None and buffers.scores.top.shape[-1] == MODEL.vocab_size
    buffers.scores.write_(buffers.step_B, score_rows(torch.zeros(3, 32), torch.zeros(3).long(), 99))


def test_a_plain_block() -> None:
    """Bug: plain decoding pays for a drafter's memory or steps, or is shortened below nothing."""
    plain = Proposer()
    buffers = step_buffers(Arena(torch.device("cpu"), torch.float32), MODEL, plain, 3, 2)
    assert buffers.block == 1 and buffers.own == ()
    assert buffers.draft_ids_BG is buffers.block_ids_BG
    assert plain.propose(buffers, {}, Segments()) == plain.context(buffers, Segments()) == []
    plain.write_rows_(buffers, {0: a_request(), 2: None})
    assert not buffers.block_ids_BG.any()
    assert plain.shortened(0) is plain
    with pytest.raises(AssertionError):
        plain.shortened(1)
