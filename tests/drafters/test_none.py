"""none: nothing is drafted, so a block is the anchor alone."""

from __future__ import annotations

import pytest
import torch

from graphengine.decode.buffers import Arena
from graphengine.decode.proposer import RowContent, step_buffers
from graphengine.decode.segments import Segments
from graphengine.drafters.none import NoDraft
from tests.decode.test_kvcache import MODEL


def test_a_plain_block() -> None:
    """Bug: plain decoding pays for a drafter's memory or steps, or is shortened below nothing."""
    plain = NoDraft()
    buffers = step_buffers(Arena(torch.device("cpu"), torch.float32), MODEL, plain, 3, 2)
    assert buffers.block == 1 and buffers.own == ()
    assert buffers.draft_ids_BG is buffers.block_ids_BG
    assert plain.propose(buffers, {}, Segments()) == plain.context(buffers, Segments()) == []
    plain.write_rows_(buffers, [0, 2], [RowContent([1, 2]), None])
    assert not buffers.block_ids_BG.any()
    assert plain.shortened(0) is plain
    with pytest.raises(AssertionError):
        plain.shortened(1)
