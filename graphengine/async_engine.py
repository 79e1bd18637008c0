"""The engine for asyncio: requests are awaited, and a cancelled task cancels its request.

    async with AsyncEngine.from_pretrained("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16") as engine:
        async for chunk in engine.stream("What is block diffusion?"):
            print(chunk.text, end="")

It is `Engine.submit` underneath: any number of tasks share the steps of one loop, which runs on a
thread of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from graphengine.api import Engine, Prompt
from graphengine.config.options import SamplingParams
from graphengine.results import Chunk, GenerationResult


class AsyncEngine:
    """A loaded engine; see `Engine` for arguments, options and errors."""

    def __init__(self, engine: Engine) -> None:
        """Takes over an engine, which is closed with this one."""
        self.engine = engine

    @classmethod
    def from_pretrained(
        cls, target: str | Path, draft: str | Path | None = None, **options: Any
    ) -> AsyncEngine:
        """As `Engine.from_pretrained`, which blocks until the model is loaded."""
        return cls(Engine.from_pretrained(target, draft, **options))

    async def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **params: Any
    ) -> AsyncIterator[Chunk]:
        """Chunks as they are decoded; the last one carries the result. Leaving the iteration, or
        cancelling its task, cancels the request."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def told() -> None:
            with suppress(RuntimeError):  # it may be closed at any time, also between two lines
                loop.call_soon_threadsafe(changed.set)

        queue = self.engine.queue
        handle = await asyncio.to_thread(queue, prompt, sampling, params, told)  # it tokenizes
        try:
            is_over = False
            while not is_over:
                await changed.wait()
                changed.clear()
                is_over = handle.done
                for chunk in handle.take():
                    yield chunk
            handle.take()  # what went wrong comes behind the last chunks
        finally:
            handle.cancel()

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **params: Any
    ) -> GenerationResult:
        """The result of one prompt; for several, gather them."""
        result = None
        async for chunk in self.stream(prompt, sampling, **params):
            result = chunk.result or result
        assert result is not None
        return result

    async def close(self) -> None:
        """Frees the engine; requests that run end with an error."""
        await asyncio.to_thread(self.engine.close)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
