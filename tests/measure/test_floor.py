"""The bytes under a step's floor, of published shapes."""

from types import SimpleNamespace
from typing import Any

import pytest

from graphengine.measure.bench import context_bytes, token_bytes
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
    whole = 32768 * token_bytes(built)
    unread = len(windows) * (32768 - 2048) * 2 * model.kv_size * 2  # K and V, two bytes each
    assert context_bytes(built, 32768) == pytest.approx(whole - unread)
    for short in (2048, 100):
        assert context_bytes(built, short) == pytest.approx(short * token_bytes(built))
    built.draft = None
    assert context_bytes(built, 32768) == 32768 * token_bytes(built)
