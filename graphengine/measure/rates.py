"""What the GPU does at most, measured in the process that is compared with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

READ_BYTES = 4 << 30
MATMUL_SIZE = 8192


class Rates(NamedTuple):
    """0 without a GPU, or where it was not measured."""

    read_gbps: float
    matmul_tflops: float


def read_bandwidth_gbps() -> float:
    """Read-only bandwidth: a float32 sum over 4 GiB."""
    if not torch.cuda.is_available():
        return 0.0
    x = torch.ones(READ_BYTES // 4, dtype=torch.float32, device="cuda")
    return READ_BYTES / _best_ms(x.sum) / 1e6


def matmul_tflops() -> float:
    """A large bf16 product."""
    if not torch.cuda.is_available():
        return 0.0
    x = torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device="cuda")
    return 2 * MATMUL_SIZE**3 / _best_ms(lambda: torch.mm(x, x)) / 1e9


def _best_ms(run: Callable[[], object]) -> float:
    """The best of five runs, behind one that is not counted."""
    run()
    times = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)
