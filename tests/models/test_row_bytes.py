"""Temporaries of a row, as layers declare them, are those that their kernels are given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphengine.kernels.gated_delta_prefill import CHUNK
from graphengine.models import attention, gated_attention, gated_delta, moe, swiglu
from graphengine.startup.build import read_configs


@pytest.mark.parametrize("preset", ["qwen3.5-4b", "qwen3.6-35b-a3b"])
def test_a_recurrent_layer(preset: str) -> None:
    """Bug: a chunk's columns, solve or gates are not planned: a long prompt finds no memory."""
    config, _ = read_configs(preset, None)
    own = config.gated_delta
    assert own is not None
    heads, size = own.num_value_heads, 2
    projected = own.num_channels + own.value_size + 2 * heads
    of_chunk = (own.num_channels + heads * CHUNK) * size + (heads * CHUNK + 4 * heads) * 4
    ends = 2 * own.value_size * size  # outputs, and those that are gated
    needed = projected * size + of_chunk + ends
    assert needed <= gated_delta.row_bytes(config, size) <= 3 * needed


def test_an_attention() -> None:
    """Bug: what attends is not planned, or the projection's keys and values are not."""
    config, size = read_configs("gpt-oss-20b", None)[0], 2  # queries are wider than the residual
    assert config.q_size > config.hidden_size
    projected = config.q_size + 2 * config.kv_size
    assert attention.row_bytes(config, size) == (projected + config.q_size) * size


def test_an_attention_that_gates() -> None:
    """Bug: what the gate leaves of a row is not planned, or the gate's own columns are not, or in
    plain torch their copy in float32 and its sigmoid."""
    config, size = read_configs("qwen3.5-4b", None)[0], 2
    projected = 2 * config.q_size + 2 * config.kv_size
    needed = (projected + 3 * config.q_size) * size  # queries, what attends, what is gated
    assert needed <= gated_attention.row_bytes(config, size) <= 3 * needed
    in_torch = (projected + config.q_size) * size + 2 * config.q_size * 4
    assert in_torch <= gated_attention.row_bytes(config, size)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("preset", ["qwen3-30b-a3b", "qwen3.6-35b-a3b"])
def test_experts(preset: str, narrow: bool) -> None:
    """Bug: what a row's experts leave is planned as one's, or the shared one is forgotten; or its
    output is, which a wide one's temporaries hide."""
    config, _ = read_configs(preset, None)
    own = config.moe
    assert own is not None
    if narrow and own.shared_expert_intermediate_size:
        own = replace(own, shared_expert_intermediate_size=64)
        config = replace(config, moe=own)
    top_k, shared, size = own.num_experts_per_tok, own.shared_expert_intermediate_size, 2
    routed = own.num_experts * size + top_k * (4 + 4 + 4)
    acted = top_k * own.moe_intermediate_size * size
    added = (top_k + bool(shared)) * config.hidden_size * 4
    of_shared = 3 * shared * size + bool(shared) * config.hidden_size * size
    needed = routed + acted + added + of_shared
    assert needed <= moe.row_bytes(config, size) <= 1.5 * needed


def test_a_shared_expert_is_a_dense_mlp() -> None:
    """Bug: SwiGLU's float32 copies of a shared expert are not planned: beside a wide one a long
    prompt finds no memory."""
    config, _ = read_configs("qwen3.6-35b-a3b", None)
    assert config.moe is not None
    width, size = config.moe.shared_expert_intermediate_size, 2
    wider = replace(config, moe=replace(config.moe, shared_expert_intermediate_size=2 * width))
    added = moe.row_bytes(wider, size) - moe.row_bytes(config, size)
    assert added == swiglu.row_bytes(replace(config, intermediate_size=width), size)
