"""proposer: every drafter has all that a step, a prefill and a plan ask of one."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from graphengine.config.draft import NgramConfig
from graphengine.decode.buffers import Arena
from graphengine.decode.proposer import Proposer, step_buffers
from graphengine.drafters.dflash import DFlash
from graphengine.drafters.forced import Forced
from graphengine.drafters.ngram import Ngram
from graphengine.drafters.none import NoDraft
from tests.decode.test_buffers import drafter
from tests.decode.test_kvcache import DRAFT, MODEL

ASKED = [name for name in vars(Proposer) if not name.startswith("_")]


@pytest.mark.parametrize("kind", [DFlash, Forced, Ngram, NoDraft])
def test_every_drafter_has_all_of_it(kind: Any) -> None:
    """Bug: a drafter lacks what only a graph, a plan or a longer prompt asks for, or takes other
    arguments: the first user of that finds out."""
    assert len(ASKED) > 8
    for name in ASKED:
        asked, found = getattr(Proposer, name), getattr(kind, name, None)
        found = found or kind.__dataclass_fields__.get(name)
        assert found is not None, name
        if inspect.isfunction(asked):
            assert inspect.isfunction(found), name
            assert list(inspect.signature(asked).parameters) == list(
                inspect.signature(found).parameters
            )


def test_buffers_are_as_long_as_the_block() -> None:
    """Bug: buffers have as many rows as the drafter drafts, one too few, or lack its own."""
    for proposer, own in (
        (drafter(DRAFT), 5),
        (Ngram(config=NgramConfig(num_draft_tokens=4), num_positions=9), 1),
        (NoDraft(), 0),
    ):
        buffers = step_buffers(Arena(torch.device("cpu"), torch.float32), MODEL, proposer, 3, 2)
        assert buffers.block == proposer.num_draft_tokens + 1
        assert buffers.positions_T.shape == (3 * buffers.block,)
        assert len(buffers.own) == own
