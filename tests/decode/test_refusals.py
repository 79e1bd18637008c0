"""What a refused request is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from graphengine.decode.refusals import check_offered, longer_context
from graphengine.decode.sampling import Sampling
from tests.decode.test_engine import BLOCK, Pair


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
        (
            {"finish_in_plain_decode": True, "max_model_len": 512 - BLOCK},
            r"raise --max-model-len, or ",
        ),
    ],
)
def test_what_helps_a_prompt_past_the_context(
    pair: Pair, options: dict[str, Any], remedy: str
) -> None:
    """Bug: where the models have no more positions, or the pool holds no longer request, a user is
    told to raise --max-model-len, which is refused; or to pass what was passed."""
    with pair.engine(**{"buckets": (1,), "max_model_len": None} | options) as engine:
        prompt = [1] * engine.config.max_model_len
        with pytest.raises(ValueError, match=remedy):
            engine.generate(prompt)
        positions = engine.built.target.max_position_embeddings
        with pytest.raises(ValueError, match=r"shorten the prompt$"):
            engine.generate([1] * positions)


@pytest.mark.parametrize(
    ("device", "memory", "option"),
    [
        ("cuda", None, "--gpu-memory-utilization"),
        ("cuda", 1 << 30, "--kv-cache-memory"),
        ("cpu", None, "--kv-cache-memory"),
    ],
)
def test_which_option_sizes_the_pool(device: str, memory: int | None, option: str) -> None:
    """Bug: who has given the pool's bytes is told to raise the share of the GPU, which decides
    nothing then."""
    fields = {"max_model_len": 8, "speculation_limit": None}
    config: Any = SimpleNamespace(device=device, kv_cache_memory=memory, **fields)
    assert longer_context(config, 99, 9).endswith(f"where that is not given {option}")


def test_as_many_alternatives_as_the_engine_has() -> None:
    """Bug: the number that an engine was loaded with is refused, with itself as the remedy."""
    config: Any = SimpleNamespace(simulate_acceptance=None, max_logprobs=4)
    check_offered(config, Sampling(), None, 4, None)
    with pytest.raises(ValueError, match=r"logprobs of 5 .* max_logprobs=5"):
        check_offered(config, Sampling(), None, None, 5)


@pytest.mark.parametrize(
    ("asked", "alternatives", "what", "option"),
    [
        ({"temperature": 0.5}, (), "temperature is 0.5", "sampling=True"),
        (
            {"presence_penalty": 1.0},
            (),
            "penalties, logit_bias, allowed_token_ids, bad_words or",
            "adjustments=True",
        ),
        ({}, (None, 0), "logprobs of 0 alternatives .* has none", "max_logprobs=1"),
        ({}, (3, 7), "logprobs of 7 alternatives .* has none", "max_logprobs=7"),
    ],
)
@pytest.mark.parametrize("simulated", [None, 2.0])
def test_what_an_engine_was_built_without(
    asked: dict[str, Any],
    alternatives: tuple[int | None, ...],
    what: str,
    option: str,
    simulated: float | None,
) -> None:
    """Bug: the remedy is an option that changes nothing, as max_logprobs=0, or another one's; or it
    is refused as well, where acceptance is drawn."""
    names = ("sampling", "adjustments", "structured_outputs", "max_logprobs")
    config: Any = SimpleNamespace(simulate_acceptance=simulated, **dict.fromkeys(names, 0))
    with pytest.raises(ValueError, match=f"^{what}.*load it with {option}") as refused:
        check_offered(config, Sampling(**asked), None, *alternatives)
    assert str(refused.value).count("without simulate_acceptance") == bool(simulated)
