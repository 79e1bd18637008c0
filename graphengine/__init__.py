"""Latency-critical, single-stream LLM decode with DFlash block-diffusion speculative decoding.

`Engine` is the Python API; `TINY_TARGET` and `TINY_DRAFT` name the bundled pair. Both are imported
at first use, so that `graphengine --help` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
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
_HOMES = {
    **dict.fromkeys(("TINY_DRAFT", "TINY_TARGET"), "checkpoints.hub"),
    **dict.fromkeys(("Chunk", "Engine", "GenerationResult"), "api"),
    "AsyncEngine": "async_engine",
    "SamplingParams": "config.options",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'graphengine' has no attribute {name!r}")
    return getattr(import_module(f"graphengine.{_HOMES[name]}"), name)
