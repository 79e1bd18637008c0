"""segments: what ends a chain picks the right rows, and the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from graphengine.decode import segments
from graphengine.decode.stack import Target
from tests.decode.test_stack import load

End = Callable[..., Any]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load(tmp_path_factory.mktemp("segments") / "target", layers=1, tie=False)


@pytest.fixture
def end(target: Target) -> Callable[..., Any]:
    """An end segment on six rows."""
    generator = torch.Generator().manual_seed(0)
    h_TD, attn_TNH = (torch.randn(6, *s, generator=generator) for s in ((64,), (4, 16)))
    weights = target.weights
    last = segments.LastWeights(weights.layers[0], weights.norm_D, weights.lm_head_VD)
    return lambda segment, *more: segment(last, h_TD, attn_TNH, *more, 1e-6)


def test_an_argmax_and_logits_agree(end: End) -> None:
    """Bug: sampled and greedy batches normalise otherwise, so a greedy request's tokens depend on
    its neighbours."""
    h_TD, ids_T = end(segments.last_segment)
    same_TD, logits_TV = end(segments.logits_segment)
    assert torch.equal(h_TD, same_TD)
    assert torch.equal(logits_TV.argmax(-1), ids_T)
    assert len(set(ids_T.tolist())) > 1


def test_a_draft_drops_each_request_s_anchor(end: End) -> None:
    """Bug: the first row of the batch is dropped, not that of each request, or the last."""
    _, ids_T = end(segments.last_segment)
    for block in (2, 3, 6):
        (found,) = end(segments.draft_last_segment, block)
        assert torch.equal(found, ids_T.view(-1, block)[:, 1:].flatten())


@pytest.mark.parametrize("is_tapped", [True, False])
def test_logits_of_some_rows(end: End, is_tapped: bool) -> None:
    """Bug: a prompt's last row is looked up in a tensor that holds only the chosen rows; or a tap
    of the last layer sees those alone."""
    rows_R = torch.tensor([5, 1])
    h_TD, logits_TV = end(segments.logits_segment)
    segment: Any = partial(segments.row_logits_segment, rows_R, is_tapped)
    found_TD, found_RV = end(segment)
    torch.testing.assert_close(found_RV, logits_TV[rows_R])
    torch.testing.assert_close(found_TD, h_TD if is_tapped else h_TD[rows_R])
