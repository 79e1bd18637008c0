"""Prefills nobody asked for, so that the first request meets kernels that are there.

Decode steps are compiled and captured while an engine is built; a prefill runs eagerly, and its
kernels come into being at their first launch: FlashInfer's by its own compiler (half a minute where
that has not run before), Triton's, unless `compile_ahead` has been there, in a second or two each.
Without this the first user waits.

Invariant: the loop is idle before and after, and no step has run: guards and statistics saw
nothing.
"""

from __future__ import annotations

from graphengine.config.engine import EngineConfig
from graphengine.decode.loop import DecodeLoop
from graphengine.decode.sampling import GREEDY, Sampling

# Our GEMMs for up to 16, 32, 64 and, of some shapes, 128, 192 and 256 rows are kernels of their
# own; what reads their partial sums is another kernel than what reads cuBLAS's output above that.
PROMPT_LENGTHS = (1, 17, 33, 65, 129, 193, 257)
_DRAWN = Sampling(temperature=1.0, top_p=0.9, top_k=10, seed=0)


def prompt_lengths(config: EngineConfig) -> list[int]:
    """Those of PROMPT_LENGTHS that a request may have."""
    return [length for length in PROMPT_LENGTHS if length < config.max_model_len]


def warm_up(loop: DecodeLoop) -> None:
    """Runs a prompt of every length that has kernels of its own, greedy and, if built, drawn.

    Args:
        loop: idle.
    """
    assert not loop.has_work
    samplings = [GREEDY, _DRAWN] if loop.config.sampling else [GREEDY]
    for length in prompt_lengths(loop.config):
        for sampling in samplings:
            loop.submit([0] * length, 1, (), sampling)
            loop.admit()  # the prefill's token is the only one, so no step follows
    assert not loop.has_work
