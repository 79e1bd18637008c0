"""Run-time guards where the GPU differs: graphs captured in the middle of a run, NaN in captured
kernels, real step times. That the rules are right is `test_guards`' business."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from graphengine.decode import guards
from graphengine.decode.fallback import LAST_BLOCK
from graphengine.decode.lane import Lane
from tests.decode.test_gpu_modes import FAMILIES, PROMPTS, Mode, Pair
from tests.decode.test_gpu_modes import pair as pair  # the fixture

pytestmark = pytest.mark.gpu

MODES = [mode for family in FAMILIES.values() for mode in family]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: f"{mode.attention_backend}-{mode[0]}")
def test_not_finite_ends_one_request(pair: Pair, mode: Mode) -> None:
    """Bug: -1 reaches an embedding inside a graph and the device asserts, for all and for good."""
    with pair.engine(mode) as engine:
        truth = engine.generate(PROMPTS[:3], max_new_tokens=30, ignore_eos=True)
        table = engine.built.loop.prefill.pair.target.weights.embed_VD
        kept = table[400].clone()
        table[400] = float("nan")
        # As long as the prompt it replaces: in bf16 a prefill of fewer rows may round otherwise.
        bad = [*PROMPTS[:2], [7, 400, *PROMPTS[2][2:]]]
        results = engine.generate(bad, max_new_tokens=30, ignore_eos=True)
        assert [r.finish_reason for r in results] == ["length", "length", "error"]
        assert [r.token_ids for r in results[:2]] == [r.token_ids for r in truth[:2]]
        # In the middle of a step: the token of a running request turns bad.
        token = truth[1].token_ids[4]
        kept_token = table[token].clone()
        table[token] = float("inf")
        results = engine.generate(PROMPTS[:3], max_new_tokens=30, ignore_eos=True)
        assert results[1].finish_reason == "error" and "NaN" in (results[1].error or "")
        table[400], table[token] = kept, kept_token
        again = engine.generate(PROMPTS[:3], max_new_tokens=30, ignore_eos=True)
        assert [r.token_ids for r in again] == [r.token_ids for r in truth]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: f"{mode.attention_backend}-{mode[0]}")
def test_last_block_captures_in_the_middle(pair: Pair, mode: Mode) -> None:
    """Bug: capturing while requests run breaks their graphs, or the plain graphs replay on stale
    addresses; the context beyond the last block differs from plain decoding."""
    options: dict[str, Any] = {"max_model_len": 512, "finish_in_plain_decode": True}
    prompts = [list(range(460)), list(range(5, 400)), list(range(3, 493))]
    with pair.engine(mode, draft=False, **options) as plain:
        truth = plain.generate(prompts, max_new_tokens=99, ignore_eos=True)
    with pair.engine(mode, **options) as engine:
        for _ in range(2):
            results = engine.generate(prompts, max_new_tokens=99, ignore_eos=True)
            for result, expected in zip(results, truth, strict=True):
                assert len(result.token_ids) == len(expected.token_ids)
                # bf16: one row and a block of rows take other kernels, so ties may fall otherwise.
                assert result.token_ids[0] == expected.token_ids[0]
            reasons = [r.metrics.fallback_reason for r in results]
            # A block in flight when the limit is passed may bring the last tokens.
            assert LAST_BLOCK in (reasons[0], reasons[2]) and reasons[1] is None


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: f"{mode.attention_backend}-{mode[0]}")
def test_fallback_by_real_times(pair: Pair, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: measuring needs more than it saves, the hand-over waits for ever, or memory grows with
    every request that falls back."""
    monkeypatch.setattr(guards.SpeculationGuard, "_may_lose", _suspects)
    times: list[float] = []
    real = Lane.time_step

    def time_step(self: Lane, requests: list[Any]) -> float:
        times.append(real(self, requests))
        return 1e-9

    monkeypatch.setattr(Lane, "time_step", time_step)
    with pair.engine(mode, fallback=True) as engine:
        used: list[int] = []
        for _ in range(4):
            results = engine.generate(PROMPTS, max_new_tokens=300, ignore_eos=True)
            assert all(r.metrics.num_plain_steps > 0 for r in results)
            assert all(len(r.token_ids) == 300 for r in results)
            gc.collect()
            used.append(torch.cuda.memory_allocated())
        assert used[1:] == used[1:2] * 3
    assert len(times) == 1 and 1e-6 < times[0] < 2  # other tests may share the GPU


def _suspects(self: guards.SpeculationGuard, size: int) -> bool:
    """The window's conditions alone: a random drafter may be lucky."""
    full = len(self._steps) == guards.WINDOW and len(self._times_s) >= guards.FEWEST_TIMES
    return full and self.may_fall_back and size == self._size


def test_unused_plain_decode_costs_nothing(pair: Pair, tmp_path: Path) -> None:
    """Bug: every start-up pays memory and graphs for plain decoding."""
    mode = FAMILIES["triton"][1]
    graphs = []
    gc.collect()
    for options in ({"fallback": False}, {"fallback": True}):
        with pair.engine(mode, **options) as engine:
            graphs.append((engine.startup.num_graphs, torch.cuda.memory_allocated()))
        gc.collect()
    assert graphs[0] == graphs[1]
