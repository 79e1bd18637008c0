"""A small case of `graphengine bench` for tests to vary."""

from __future__ import annotations

from typing import Any

from graphengine.measure.bench import Case


def case(**changes: Any) -> Case:
    values: dict[str, Any] = {"bucket": 2, "input_len": 8, "output_len": 16}
    values |= {"num_iters": 4, "warmup": 0, "seed": 0} | changes
    return Case(**values)
