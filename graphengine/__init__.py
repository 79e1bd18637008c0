"""Latency-critical, single-stream LLM decode with DFlash block-diffusion speculative decoding.

`Engine` is the Python API; `TINY_TARGET` and `TINY_DRAFT` name the bundled pair. Both are imported
at first use, so that `graphengine --help` does not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from graphengine.api import Chunk, Engine, GenerationResult
    from graphengine.async_engine import AsyncEngine
    from graphengine.checkpoints.hub import TINY_DRAFT, TINY_TARGET
    from graphengine.config.options import SamplingParams

__all__ = [
    "TINY_DRAFT",
    "TINY_TARGET",
    "AsyncEngine",
    "Chunk",
    "Engine",
    "GenerationResult",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    if name in ("TINY_DRAFT", "TINY_TARGET"):
        from graphengine.checkpoints import hub

        return getattr(hub, name)
    if name == "SamplingParams":
        from graphengine.config import options

        return options.SamplingParams
    if name == "AsyncEngine":
        from graphengine import async_engine

        return async_engine.AsyncEngine
    if name in ("Chunk", "Engine", "GenerationResult"):
        from graphengine import api

        return getattr(api, name)
    raise AttributeError(f"module 'graphengine' has no attribute {name!r}")
