"""An engine's chains: the names of their steps, and something to do between two of them, for tests
that break or watch them. Eager runners alone: what a captured graph holds cannot be cut open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphengine.capture.runners import EagerRunner
from graphengine.capture.steps import Carry, Dense, Step
from graphengine.decode.buckets import Bucket
from graphengine.names import attention_name, dense_name


def chain_names(chain: str, num_layers: int) -> list[str]:
    """The steps of a chain in the order of execution: dense 00, attention L0, dense 01, ..., dense
    n."""
    names: list[str] = []
    for layer in range(num_layers):
        names += [dense_name(chain, layer), attention_name(chain, layer)]
    return [*names, dense_name(chain, num_layers)]


def insert_(bucket: Bucket, name: str, action: Callable[[], Any], *, behind: bool = False) -> None:
    """Does `action` in front of the step `name`, or behind it, greedy and sampled; a step that
    several stages have in common counts once. Mutates: the bucket's runners.
    """

    def run(carry: Carry) -> Carry:
        action()
        return carry

    inserted = Dense("inserted", run)
    found = 0
    for runner in runners_of(bucket):
        chain: list[Step] = []
        for step in runner.chain:
            is_here = step.name == name
            chain += [step, inserted] if is_here and behind else [inserted] * is_here + [step]
        found += len(chain) - len(runner.chain)
        runner.chain = chain
    assert found, f"no step {name}"


def runners_of(bucket: Bucket) -> list[EagerRunner]:
    """All runners of a bucket, each once."""
    runners = bucket.runners + [r for stage in bucket.stages for r in stage.runners.values()]
    assert all(isinstance(runner, EagerRunner) for runner in runners)
    return list({id(runner): runner for runner in runners}.values())  # type: ignore[misc]
