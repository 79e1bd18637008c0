"""The bytes under a step's floor, of published shapes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from graphengine.drafters.dflash import MAX_QUANTIZED_ROWS
from graphengine.measure import rates
from graphengine.measure.bench import context_bytes, token_bytes, weight_bytes
from graphengine.measure.first_token import Rates, roofline_ms
from graphengine.startup.build import read_configs


def test_a_window_is_all_that_its_layer_reads() -> None:
    """Bug: the floor of a step behind 32,768 tokens has K/V of them in drafter layers that see the
    last 2,048, so that a step stands closer to it than it is; or of a shorter text more than there
    are."""
    target, draft = read_configs("qwen3.6-27b", "qwen3.6-27b-dflash-b16")
    config = SimpleNamespace(dtype="bfloat16")
    built: Any = SimpleNamespace(config=config, target=target, draft=draft)
    assert draft is not None
    (model,) = draft.models
    windows = [rule.window for rule in draft.attention_rules if rule.window]
    assert windows and set(windows) == {2048}
    states = context_bytes(built, 0)
    whole = 32768 * token_bytes(built) + states
    unread = len(windows) * (32768 - 2048) * 2 * model.kv_size * 2  # K and V, two bytes each
    assert context_bytes(built, 32768) == pytest.approx(whole - unread)
    for short in (2048, 100):
        assert context_bytes(built, short) == pytest.approx(short * token_bytes(built) + states)
    built.draft = None
    assert context_bytes(built, 32768) == 32768 * token_bytes(built) + states


def test_a_roofline_of_four_bits_and_windows() -> None:
    """Bug: experts in MXFP4 are multiplied with as few numbers as they have bits; layers that slide
    see every key of a prompt; or a float32 run, which widens experts, reads four bits of them."""
    target, _ = read_configs("gpt-oss-20b", None)
    config = SimpleNamespace(dtype="bfloat16", draft_quantization="none")
    built: Any = SimpleNamespace(config=config, target=target, draft=None)
    head, of_experts = 201088 * 2880, 24 * 4 * 3 * 2880 * 2880  # of one row
    rest = 24 * (2 * 2880 * (64 + 8) * 64 + 32 * 2880)
    for length, seen in ((100, 100 * 101 / 2), (1000, 128 * 129 / 2 + 872 * 128)):
        of_keys = 4 * 64 * 64 * 12 * (length * (length + 1) / 2 + seen)
        flops = 2 * length * (rest + of_experts) + 2 * head + of_keys
        assert roofline_ms(built, length, 1, Rates(math.inf, 1e-9)) == pytest.approx(flops)
    of_one = roofline_ms(built, 1, 1, Rates(1e-6, math.inf))
    assert of_one == pytest.approx(2 * (rest + head) + of_experts * 17 / 32)
    assert of_one == weight_bytes(built, 1)
    config.dtype = "float32"
    of_one = roofline_ms(built, 1, 1, Rates(1e-6, math.inf))
    assert of_one == weight_bytes(built, 1) == 4 * (rest + head + of_experts)


def test_a_roofline_of_the_drafters_context() -> None:
    """Bug: what a prefill reads of the drafter counts its numbers, not their bytes; or a rounded
    drafter's two bytes each, so that a first token stands closer to its floor than it is."""
    target, draft = read_configs("qwen3-8b", "qwen3-8b-dflash-b16")
    assert draft is not None
    (model,) = draft.models
    context = 5 * 4096 * 4096 + model.num_hidden_layers * 2 * 8 * 128 * 4096  # fc, keys and values
    most = MAX_QUANTIZED_ROWS["fp8"]
    assert 16 <= most < 8192
    for dtype, quantization, rows, size in (
        ("bfloat16", "none", 1, 2),
        ("float32", "none", 1, 4),
        ("bfloat16", "fp8", int(most), 1),
        ("bfloat16", "fp8", int(most) + 1, 2),
    ):
        config = SimpleNamespace(dtype=dtype, draft_quantization=quantization)
        built: Any = SimpleNamespace(config=config, target=target, draft=draft)
        both = roofline_ms(built, rows, 1, Rates(1e-6, math.inf))
        built.draft = None
        alone = roofline_ms(built, rows, 1, Rates(1e-6, math.inf))
        assert both - alone == pytest.approx(size * context)


def test_a_window_of_a_target_too() -> None:
    """Bug: the floor of gpt-oss's step has all K/V of the layers that see the last 128 tokens."""
    target, _ = read_configs("gpt-oss-20b", None)
    built: Any = SimpleNamespace(
        config=SimpleNamespace(dtype="bfloat16"), target=target, draft=None
    )
    of_layer = 2 * 8 * 64 * 2  # K and V, heads, wide, bytes
    assert context_bytes(built, 1000) == 12 * of_layer * (1000 + 128)
    assert context_bytes(built, 100) == 24 * of_layer * 100


@pytest.mark.parametrize(
    ("name", "of_states"),
    [
        ("qwen3.6-27b", 48 * 48 * 128 * 128 * 4),  # layers, heads, keys, values, float32
        ("qwen3.5-4b", 24 * 32 * 128 * 128 * 4),
        ("qwen3-8b", 0),
    ],
)
def test_states_are_read_and_written(name: str, of_states: int) -> None:
    """Bug: the floor of a hybrid's step has no states, so that one of 16 requests of 4B stands 0.4
    ms further from it than it is."""
    target, _ = read_configs(name, None)
    built: Any = SimpleNamespace(
        config=SimpleNamespace(dtype="bfloat16"), target=target, draft=None
    )
    found = context_bytes(built, 0)
    assert 2 * of_states <= found <= 2.06 * of_states  # the windows in front are small


def test_a_rate_is_the_best_that_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: one time that something else disturbed, or the first one, lowers the bandwidth, and
    every step stands closer to its floor than it is."""
    times_ms, runs = iter([9.0, 2.0, 7.0, 4.0, 3.0]), list[int]()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return next(times_ms)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.Event", Event)
    x = SimpleNamespace(sum=lambda: runs.append(1))
    monkeypatch.setattr("torch.ones", lambda *size, **how: x)
    assert rates.read_bandwidth_gbps() == pytest.approx(rates.READ_BYTES / 2e-3 / 1e9)
    assert len(runs) == 1 + 5
