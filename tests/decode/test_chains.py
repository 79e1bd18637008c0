"""chains: a step's parts have the names, the order and the ends of what was loaded."""

from __future__ import annotations

from typing import Any

import pytest

from graphengine.api import Engine
from graphengine.capture.steps import Step
from graphengine.decode.attention import LayerAttentions
from graphengine.decode.chains import step_chains
from graphengine.decode.segments import Segments
from tests.decode.test_engine import Pair, loop_of
from tests.support.chains import chain_names


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


def names(steps: list[Step]) -> list[str]:
    return [step.name for step in steps]


def chains_of(engine: Engine) -> Any:
    builder = loop_of(engine).first.builder
    bucket = loop_of(engine).first.buckets[2]
    rules = [kind.rule for kind in builder.pair.proposer.attends]
    drafts = dict(zip(rules, bucket.attentions[1:], strict=True))
    layers = builder.pair.target.config.num_hidden_layers
    verify = LayerAttentions(bucket.attentions[:1] * layers)
    return step_chains(builder.pair, bucket.buffers, verify, drafts, Segments())


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({}, {"greedy", "sampled", "adjusted", "scored", "constrained", "constrained_scored"}),
        ({"simulate_acceptance": 2.0}, {"simulated"}),
    ],
)
def test_a_drafted_step(pair: Pair, options: dict[str, Any], ends: set[str]) -> None:
    """Bug: a part is built of the wrong model, the last segment stands in every end and in the
    verify too, or an end is built that nothing can choose."""
    with pair.engine(buckets=(2,), **options) as engine:
        chains = chains_of(engine)
    verify, draft = (chain_names(chain, 2) for chain in ("verify", "draft"))
    assert names(chains.propose) == draft and names(chains.verify) == verify[:-1]
    assert set(chains.ends) == ends
    for name, end in chains.ends.items():
        assert names(end) == [verify[-1], *["grammar"] * ("constrained" in name), "accept"]
    assert names(chains.publish) == ["publish"] * ("constrained" in ends)
    assert names(chains.context) == ["draft.context"]


def test_a_plain_step(pair: Pair) -> None:
    """Bug: plain decoding is shown as a verify, or runs steps of a drafter that is not there."""
    with pair.engine(draft=False, buckets=(2,)) as engine:
        chains = chains_of(engine)
    assert chains.propose == [] and chains.context == []
    assert names(chains.verify) == chain_names("decode", 2)[:-1]
