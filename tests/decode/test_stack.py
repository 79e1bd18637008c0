"""stack: which segment, attention and tap runs where; on a target of three layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphengine.capture.runners import run_chain
from graphengine.capture.steps import AttentionStep, Dense
from graphengine.checkpoints.sources import Checkpoint
from graphengine.checkpoints.weights import target_weights
from graphengine.config.model import ModelConfig
from graphengine.decode.attention import LayerAttentions
from graphengine.decode.kvcache import make_pool
from graphengine.decode.segments import LastWeights, Segments, last_segment
from graphengine.decode.stack import Rows, Target, last_step, target_chain
from tests.support.chains import chain_names
from tests.support.checkpoints import make_target

CPU = torch.device("cpu")


def load(directory: Path, **options: Any) -> Target:
    path = make_target(directory, tokenizer=False, **options)
    config = ModelConfig.from_hf(json.loads((path / "config.json").read_text()))
    weights = target_weights(Checkpoint(path, CPU, torch.float32), config, 32, CPU)
    pool = make_pool(config, 4, 4, torch.float32, CPU).zero_()
    return Target(config=config, weights=weights, kv_pool=pool)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load(tmp_path_factory.mktemp("stack") / "target", layers=3, tie=False)


class Passing:
    """An attention that notes whose cache it was given and hands queries on."""

    def __init__(self) -> None:
        self.caches: list[int] = []

    def run(self, q_TNH: Tensor, kv_cache: Tensor, out_TNH: Tensor, *rest: Tensor | None) -> None:
        self.caches.append(kv_cache.data_ptr())
        out_TNH.copy_(q_TNH)


def test_order_caches_and_taps(target: Target) -> None:
    """Bug: a layer attends to another's K/V, a tap is called early, twice or for another layer, or
    attention's output goes where no captured segment reads it."""
    attention, tapped = Passing(), {}
    rows = Rows(torch.tensor([5, 6]), torch.tensor([0, 1]), torch.tensor([4, 5]))
    attn_TNH = torch.zeros(2, 4, 16)

    def tap_(layer: int, h_TD: Tensor) -> None:
        assert layer not in tapped
        tapped[layer] = h_TD.clone()

    each: Any = (attention,) * 3
    args: Any = (rows, LayerAttentions(each), attn_TNH, Segments(), tap_)
    chain = target_chain("verify", target, *args)
    chain.append(last_step("verify", target, tap_, last_segment))
    assert [step.name for step in chain] == chain_names("verify", 3)
    assert [type(step) for step in chain] == [Dense, AttentionStep] * 3 + [Dense]
    (ids_T,) = run_chain(chain)
    assert ids_T.shape == (2,)
    assert list(tapped) == [0, 1, 2]
    assert attention.caches == [target.kv_pool[layer].data_ptr() for layer in range(3)]
    assert all(not torch.equal(tapped[a], tapped[b]) for a, b in ((0, 1), (1, 2)))
    # Every layer wrote the rows' K/V to their slots, page 1, and nothing else.
    written = target.kv_pool.flatten(2, 3).abs().sum((1, 3, 4)).bool()
    assert written.nonzero()[:, 1].tolist() == [4, 5] * 3


def test_the_last_step_taps_in_front_of_the_norm(target: Target) -> None:
    """Bug: the last layer's tap is what the head reads."""
    seen: list[Tensor] = []
    step = last_step("verify", target, lambda layer, h_TD: seen.append(h_TD), last_segment)
    h_TD, attn_TNH = torch.randn(2, 64), torch.randn(2, 4, 16)
    (ids_T,) = step.run((h_TD, attn_TNH))
    weights = target.weights
    last = LastWeights(weights.layers[2], weights.norm_D, weights.lm_head_VD)
    h_TD, expected = last_segment(last, h_TD, attn_TNH, 1e-6)
    assert torch.equal(seen[0], h_TD) and torch.equal(ids_T, expected)


def test_no_target_is_shortened_to_more_than_it_has(target: Target) -> None:
    """Bug: the config of a target with fewer layers than are asked for counts layers that have no
    weights, and what is compiled ahead of a start fails on the first of them."""
    for count, left in ((2, 2), (9, 3)):
        short = target.shortened(count)
        assert len(short.weights.layers) == short.config.num_hidden_layers == left
