"""dflash: which weights a forward takes, where taps go, and drafts that are no tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphengine.capture.runners import run_chain
from graphengine.decode.buffers import Arena
from graphengine.decode.proposer import step_buffers
from graphengine.decode.segments import Segments
from graphengine.decode.stack import Rows, Target
from graphengine.drafters import dflash
from graphengine.drafters.dflash import MAX_QUANTIZED_ROWS
from graphengine.kernels.skinny_config import SKINNY_T
from graphengine.models.layers import rms_norm
from tests.decode.test_buffers import ANCHOR_FIRST, drafter
from tests.decode.test_kvcache import DRAFT, MODEL

CPU = torch.device("cpu")


def test_fp8_up_to_its_rows() -> None:
    """Bug: a forward of one row more than the kernel takes exactly runs in FP8 all the same, or one
    of just as many does not."""
    both = replace(drafter(DRAFT), weights="w", lm_head_VD="head", quantized=("w8", "head8"))
    exact, rounded = ("w", "head"), ("w8", "head8")
    limits: Any = MAX_QUANTIZED_ROWS
    for name, at_limit, behind in (
        ("none", exact, exact),
        ("fp8", rounded, exact),
        ("fp8-dynamic", rounded, rounded),
    ):
        own = replace(both, max_quantized_rows=limits[name])
        assert own.at(SKINNY_T) == at_limit and own.at(SKINNY_T + 1) == behind
    assert replace(drafter(DRAFT), max_quantized_rows=math.inf).at(1) == (None, None)


def test_a_context_s_weights_are_for_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: what the drafter keeps of a long prompt goes through the FP8 of a step's few rows, and
    acceptance behind it falls."""
    exact, rounded = (SimpleNamespace(bits=b, k_norm_LH=None, rope_PH=None) for b in (16, 8))
    pool, taken = torch.empty(0), list[Any]()
    both: Any = {"weights": exact, "quantized": (rounded, None), "kv_pool": pool}
    own = replace(drafter(DRAFT), max_quantized_rows=SKINNY_T, **both)
    monkeypatch.setattr(dflash, "ContextWeights", SimpleNamespace(of=taken.append))
    nothing: Any = SimpleNamespace(context=lambda *args: (pool,))
    monkeypatch.setattr(dflash, "Segments", lambda: nothing)
    monkeypatch.setattr(dflash, "context_kv_write_", lambda *args: None)
    for num_rows in (SKINNY_T, SKINNY_T + 1):
        rows = torch.zeros(num_rows, dtype=torch.int64)
        run_chain(own.prefill(Rows(rows, rows, rows))[1])
    assert taken == [rounded, exact]


@pytest.mark.parametrize("config", [DRAFT, ANCHOR_FIRST])
def test_a_forward_s_weights_are_for_the_rows_of_all(
    monkeypatch: pytest.MonkeyPatch, config: Any
) -> None:
    """Bug: FP8 is chosen by the rows of one request's block: a batch of many runs through a kernel
    of few, which rounds its activations or is slower."""
    exact, rounded = (SimpleNamespace(layers=[b], norm_D=None, rope_PH=None) for b in (16, 8))
    both: Any = {"weights": exact, "quantized": (rounded, None)}
    own = replace(drafter(config), max_quantized_rows=2 * config.block_size, **both)
    found: list[list[int]] = []

    def layer_steps(name: str, stack: Any, *_: Any) -> list[Any]:
        found.append(stack.layers)
        return [SimpleNamespace(name=name)]

    monkeypatch.setattr(dflash, "layer_steps", layer_steps)
    for size in (1, 2, 3):
        buffers = step_buffers(Arena(CPU, torch.float32), MODEL, own, size, 4)
        attention: Any = dict.fromkeys(config.attention_rules)
        own.propose(buffers, attention, Segments())
    assert found == [[8], [8], [16]]


def test_a_choice_that_is_none_drafts_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: where a drafter's logits are not finite, its map to the target's ids is read in front of
    its beginning: the step ends with an error, or drafts what is no token."""
    monkeypatch.setattr(dflash, "layer_steps", lambda *_: [])
    weights: Any = SimpleNamespace(layers=[None], norm_D=None, rope_PH=None)
    own = replace(drafter(DRAFT), weights=weights, target_ids_V=torch.tensor([7, 3, 9]))
    buffers = step_buffers(Arena(CPU, torch.float32), MODEL, own, 1, 4)
    buffers.block_ids_BG.fill_(5)
    chosen: Any = SimpleNamespace(draft_last=lambda *_: (torch.tensor([2, -1, 0, 1]),))
    run_chain(own.propose(buffers, dict.fromkeys(DRAFT.attention_rules), chosen))
    assert buffers.draft_ids_BG.tolist() == [[5, 9, 7, 7, 3]]


def test_taps_stand_in_the_drafter_s_order() -> None:
    """Bug: taps are written in the order of the layers, not in that of the config; the last layer's
    lacks the final norm, or the others have it."""
    weights: Any = type("Weights", (), {"norm_D": torch.linspace(0.5, 2, MODEL.hidden_size)})
    pool: Any = None
    target = Target(config=MODEL, weights=weights, kv_pool=pool)
    own = replace(drafter(replace(DRAFT, target_layer_ids=(2, 0))), target=target)
    buffers = step_buffers(Arena(CPU, torch.float32), MODEL, own, 1, 4)
    tap_ = own.tap(buffers)
    outputs = torch.randn(3, 5, MODEL.hidden_size)
    for layer, h_TD in enumerate(outputs):
        tap_(layer, h_TD)
    kept: Any = buffers.own
    normed = rms_norm(outputs[2], weights.norm_D, MODEL.rms_norm_eps)
    torch.testing.assert_close(kept.taps_TC, torch.cat([normed, outputs[0]], dim=1))


@pytest.mark.parametrize(("config", "rows"), [(DRAFT, 5), (ANCHOR_FIRST, 5)])
def test_attention_s_rows_are_the_draft_s(config: Any, rows: int) -> None:
    """Bug: an anchor-first drafter's attention is planned for as many rows as a verify has."""
    own = drafter(config)
    assert [kind.rows for kind in own.attends] == [rows]
    assert own.num_draft_tokens == (5 if config is ANCHOR_FIRST else 4)
    (kind,) = own.shortened(2).attends
    assert kind.rows == own.shortened(2).config.block_size
