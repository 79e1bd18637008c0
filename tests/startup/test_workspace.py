"""What attention keeps for chunks: what is planned is what is made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from graphengine import TINY_TARGET, Engine
from graphengine.decode import attention
from graphengine.decode.attention import ChunkAttention
from graphengine.decode.chunk_sizes import LONG_SIZES, PAIRED_SIZES
from graphengine.decode.fixed_chunk import FixedChunk
from graphengine.startup.workspace import chunk_scratch_bytes, tree_bytes

NUM_SMS = 132


@pytest.mark.parametrize("size", [*LONG_SIZES, *PAIRED_SIZES])
def test_partial_results_of_a_chunk(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: halves, which split keys that a chunk of both would not, keep partial results that
    nobody planned."""
    made: list[Any] = []
    real = ChunkAttention.make_workspace

    def record(*args: Any) -> Any:
        made.append(real(*args))
        return made[-1]

    is_paired = size in PAIRED_SIZES
    with Engine.from_pretrained(TINY_TARGET, device="cpu", dtype="float32") as engine:
        loop = engine.built.loop
        pair = loop.prefill.pair
        with monkeypatch.context() as patch:
            patch.setattr(attention, "_num_sms", lambda device: NUM_SMS)
            patch.setattr(ChunkAttention, "make_workspace", staticmethod(record))
            FixedChunk(pair, size, is_long=True, is_paired=is_paired)
        config = replace(loop.config, prefill_sizes=(size,), far_prefill_sizes=())
        planned = chunk_scratch_bytes(config, pair.target.config, NUM_SMS)
    assert planned == tree_bytes(tuple(made)) > 0
    assert len(made) == 1 + is_paired
