"""Requests that tests hand in, and a wait that ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from graphengine.api import Engine

COUNT = 12


def submit(engine: Engine, prompt: Any, count: int = COUNT) -> Any:
    return engine.submit(list(prompt), max_new_tokens=count, ignore_eos=True)


def soon(happens: Callable[[], object]) -> None:
    """Waits for it; a hang of the engine's thread is no hang of the test."""
    deadline = time.perf_counter() + 20
    while not happens() and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert happens()
