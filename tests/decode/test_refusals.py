"""What a refused request is told."""

from __future__ import annotations

from typing import Any

import pytest

from tests.decode.test_engine import Pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({}, r"--finish-in-plain-decode$"),
        ({"max_model_len": 20}, r"raise --max-model-len, or where .* --kv-cache-memory$"),
        ({"kv_cache_memory": 20_000}, r"raise --max-model-len, or where .* --kv-cache-memory$"),
        ({"draft": False}, r"shorten the prompt$"),
        ({"finish_in_plain_decode": True}, r"shorten the prompt$"),
    ],
)
def test_what_helps_a_prompt_past_the_context(
    pair: Pair, options: dict[str, Any], remedy: str
) -> None:
    """Bug: where the models have no more positions, or the pool holds no longer request, a user is
    told to raise --max-model-len, which is refused."""
    with pair.engine(**{"buckets": (1,), "max_model_len": None} | options) as engine:
        prompt = [1] * engine.config.max_model_len
        with pytest.raises(ValueError, match=remedy):
            engine.generate(prompt)
        positions = engine.built.target.max_position_embeddings
        with pytest.raises(ValueError, match=r"shorten the prompt$"):
            engine.generate([1] * positions)
