"""Halves of a chunk beside each other on a GPU: bit for bit what one after another gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graphengine.api import Engine
from graphengine.decode.kvcache import NULL_PAGE
from tests.decode.test_fixed_chunk import admitted, pools, prompt
from tests.support.checkpoints import make_drafter, make_target

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("pair")
    shape: dict[str, Any] = {"layers": 4, "hidden": 512, "heads": 4, "kv_heads": 2, "head_dim": 128}
    options: dict[str, Any] = {"max_positions": 10000, "dtype": "bfloat16"}
    target = make_target(directory / "target", **shape, **options)
    drafter = make_drafter(directory / "drafter", target, taps=(0, 2), dtype="bfloat16")
    run: dict[str, Any] = {"graph_mode": "full", "buckets": (1,), "device": "cuda"}
    with Engine.from_pretrained(target, drafter, **run, enable_prefix_caching=False) as engine:
        if not engine.built.loop.prefill.fixed[-1].is_long:
            pytest.skip("no chunk_attention on this GPU")
        yield engine


@pytest.mark.parametrize("length", [3585, 4000, 4095, 4096, 4097, 7800, 9000])
def test_halves_write_what_singles_do(engine: Engine, length: int) -> None:
    """Bug: a half reads keys that the other has not written yet, or memory that the other has taken
    again: most often right, so each length is run many times."""
    loop = engine.built.loop
    paired = loop.prefill
    assert paired.fixed[-1].is_paired
    for seed in range(8):
        found = []
        for prefill in (replace(paired, fixed=paired.fixed[:-1]), paired):
            loop.prefill = prefill
            for pool in pools(loop):
                pool[:, :, NULL_PAGE + 1 :] = torch.nan
            found.append(admitted(loop, [prompt(length, seed)]))
        loop.prefill = paired
        (tokens, (written,)), (others, (other,)) = found
        assert tokens == others
        for x, y in zip(written, other, strict=True):
            assert torch.equal(x, y)  # a NaN is not, either
