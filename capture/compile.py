"""torch.compile for segments, and nothing else from torch.compile.

Weights are inputs, so one compiled artifact serves every layer of the same shape. Shapes are
static: a bucket is its own specialisation, because automatic dynamic shapes would make the second
bucket's kernels slower. Mode "default", not max-autotune: in a graph of 36 dense layers at 16 rows
on an H200 it took 4.55 ms against 4.59 (autotuning times with a warm L2 and picks worse GEMMs).
Inductor's own CUDA graphs stay off: segments are captured by hand, so no compiled function (whose
guards cost over 100 us a call) is on the hot path.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

# Specialisations of one function: (buckets + plain decode) x (target, drafter) x engines.
RECOMPILE_LIMIT = 512
# Inductor's own kernels take part in programmatic dependent launch (Hopper and later; no effect
# elsewhere): our GEMMs then fetch their first weights while what is before them still runs.
OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"triton.enable_pdl": True}


@functools.cache
def compile_segment(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a pure segment with Inductor, whole (fullgraph) and for static shapes.

    Compilation happens at the first call with new shapes; a second engine of the same shapes in
    one process compiles nothing. Mutates: torch's recompile limits, raised once for the process:
    eight, the default, is fewer than the buckets of two models.
    """
    dynamo: Any = torch._dynamo.config
    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(dynamo, limit, max(getattr(dynamo, limit), RECOMPILE_LIMIT))
    return torch.compile(function, fullgraph=True, dynamic=False, options=OPTIONS)


def import_inductor() -> None:
    """Imports what the first compilation would, two seconds of it; on another thread meanwhile."""
    importlib.import_module("torch._inductor.compile_fx")


class CacheCounts(NamedTuple):
    """How often Inductor has found a graph in its cache on disk, and how often it compiled one."""

    num_hits: int = 0
    num_misses: int = 0

    def since(self, before: CacheCounts) -> CacheCounts:
        """What was added."""
        return CacheCounts(self.num_hits - before.num_hits, self.num_misses - before.num_misses)


def cache_counts() -> CacheCounts:
    """This process's counts so far."""
    import torch._dynamo.utils

    found = torch._dynamo.utils.counters["inductor"]
    misses = found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"]
    return CacheCounts(found["fxgraph_cache_hit"], misses)
