"""What tests of drawn tokens share: a pair with wide distributions, transformers' own filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from graphengine.api import Engine
from tests.support.checkpoints import make_drafter, make_target

LEVEL = 1e-3  # of every statistical test here; seeds are fixed, so nothing is flaky
PROMPTS = [[7, 99, 23], list(range(100, 117)), [5], [250, 1, 2, 3, 4, 5, 6, 7]]


def reference_warp(logits_TV: Tensor, temperature: float, top_p: float, top_k: int) -> Tensor:
    """transformers' own warpers, in generate's order."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    ids: Any = torch.zeros(1, 1, dtype=torch.int64)
    scores: Any = TemperatureLogitsWarper(temperature)(ids, logits_TV.float())
    if top_k:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    return scores


def assert_drawn(seen: Sequence[tuple[int, ...]], exact: Mapping[tuple[int, ...], float]) -> None:
    """What was drawn against its exact probabilities."""
    assert set(seen) <= set(exact)
    ordered, scale = sorted(exact, key=lambda ids: exact[ids]), len(seen) / sum(exact.values())
    expected = [exact[ids] * scale for ids in ordered]
    observed = [seen.count(ids) for ids in ordered]
    while expected[0] < 5:  # the chi-square test wants no thin cells
        expected[:2], observed[:2] = [sum(expected[:2])], [sum(observed[:2])]
    assert len(expected) > 3
    assert stats.chisquare(observed, expected).pvalue > LEVEL


class Pair:
    def __init__(self, directory: Path) -> None:
        # Few likely tokens: the drafter is right now and then, and distributions are wide.
        self.target = make_target(directory / "target", tie=False, likely_tokens=6)
        self.drafter = make_drafter(directory / "drafter", self.target)

    def engine(self, draft: bool = True, **options: Any) -> Engine:
        options = {"buckets": (1, 4), "page_size": 4, "max_model_len": 96} | options
        return Engine.from_pretrained(self.target, self.drafter if draft else None, **options)
