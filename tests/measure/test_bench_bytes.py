"""Bytes that a step reads, of published shapes, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from graphengine.config.draft import DraftConfig, NgramConfig
from graphengine.measure.bench import token_bytes, weight_bytes
from graphengine.measure.segment_bytes import bucket_bytes
from graphengine.startup.build import read_configs


def test_bytes_of_the_8b_preset_by_hand() -> None:
    """Bug: the floor under a step counts a matrix twice, or K and not V; or the draft's chain as
    one graph has the bytes of its first segment, which is queued apart."""
    target, draft = read_configs("qwen3-8b", "qwen3-8b-dflash-b16")
    hidden, kv, head = 4096, 8 * 128, 151936 * 4096
    layer = hidden * (32 * 128 + 2 * kv) + 32 * 128 * hidden + 3 * hidden * 12288
    verify = 36 * layer + head
    drafter = 5 * layer + 5 * hidden * hidden + 5 * 2 * kv * hidden + head

    def built(quantization: str, drafter: Any) -> Any:
        config = SimpleNamespace(
            dtype="bfloat16",
            draft_quantization=quantization,
            buckets=(1, 8),
            num_speculative_tokens=(),
        )
        return SimpleNamespace(target=target, draft=drafter, config=config)

    assert weight_bytes(built("none", draft), 1) == 2 * (verify + drafter) == 18_561_892_352
    assert weight_bytes(built("fp8", draft), 1) == 2 * verify + drafter
    assert weight_bytes(built("fp8", draft), 8) == 2 * (verify + drafter)
    assert weight_bytes(built("fp8-dynamic", draft), 8) == 2 * verify + drafter
    assert weight_bytes(built("none", None), 1) == 2 * verify
    chain = bucket_bytes(target, draft, 2, "none", 1)
    first = hidden * (32 * 128 + 2 * kv)
    assert chain["draft.00"] == 2 * first and chain["draft"] == 2 * (5 * layer + head - first)
    assert token_bytes(built("none", draft)) == 2 * 2 * (36 + 5) * kv
    assert token_bytes(built("none", None)) == 2 * 2 * 36 * kv


def test_bytes_where_a_forward_is_rounded_and_its_context_is_not() -> None:
    """Bug: an anchor-first drafter's forward, of a row a request less than a verify, is judged by
    the verify's rows, or its context, of as many, by the forward's: twice or half the GB/s."""
    target, draft = read_configs("qwen3-8b", "qwen3-8b-dflash-b16")
    assert isinstance(draft, DraftConfig)
    first = replace(draft, slot_convention="anchor-first")
    exact, rounded = (bucket_bytes(target, first, 2, how, 4) for how in ("none", "fp8-dynamic"))
    found = bucket_bytes(target, first, 2, "fp8", 4)  # 64 rows and 68
    assert found["draft"] == rounded["draft"] == exact["draft"] / 2
    assert found["draft.context"] == exact["draft.context"] == 2 * rounded["draft.context"]
    assert found["speculate"] == rounded["speculate"] + exact["draft.context"] / 2
    assert bucket_bytes(target, draft, 2, "fp8", 4) == bucket_bytes(
        target, draft, 2, "fp8-dynamic", 4
    )


def test_bytes_of_experts_by_hand() -> None:
    """Bug: a step's floor counts all experts, or those of one row, whatever the rows; or a block's
    rows are counted once for a bucket of several requests."""
    target, _ = read_configs("qwen3-30b-a3b", None)
    rest = 48 * (2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128 + 128 * 2048) + 151936 * 2048

    def built(draft: Any) -> Any:
        config = SimpleNamespace(
            dtype="bfloat16", draft_quantization="none", buckets=(1, 8), num_speculative_tokens=()
        )
        return SimpleNamespace(target=target, draft=draft, config=config)

    def expected(rows: int) -> float:
        touched = 128 * (1 - (1 - 8 / 128) ** rows)
        return 2 * (rest + 48 * touched * 3 * 2048 * 768)

    for bucket in (1, 8):
        assert weight_bytes(built(None), bucket) == pytest.approx(expected(bucket))
        assert weight_bytes(built(NgramConfig()), bucket) == pytest.approx(expected(16 * bucket))
    gigabytes = [weight_bytes(built(None), rows) / 1e9 for rows in (1, 16, 256)]
    assert gigabytes == pytest.approx([6.08, 39.8, 60.4], rel=0.01)  # 60.4: all experts
