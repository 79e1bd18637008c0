"""A pair for every file of these tests, an engine of it, and what it says."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from graphengine.api import Engine
from tests.decode.test_engine import Pair
from tests.support.submitting import COUNT


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"), likely_tokens=3)


@pytest.fixture(scope="module")
def truth(pair: Pair) -> dict[tuple[int, ...], list[int]]:
    """Random prompts and what they say alone."""
    rng = random.Random(0)
    prompts = [[rng.randrange(1, 250) for _ in range(rng.randrange(1, 40))] for _ in range(12)]
    with pair.engine() as engine:
        results = [engine.generate([p], max_new_tokens=COUNT, ignore_eos=True)[0] for p in prompts]
    return {tuple(p): r.token_ids for p, r in zip(prompts, results, strict=True)}


@pytest.fixture
def engine(pair: Pair) -> Iterator[Engine]:
    with pair.engine(max_num_batched_tokens=16) as engine:
        yield engine
