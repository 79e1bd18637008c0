"""A launch's time within a CUDA graph, on buffers that the L2 cache does not hold.

Shapes are Qwen3-8B's with a block of 16; pages as the engine's for our attention.
"""

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch

N, K, H, V, L, G, S = 32, 8, 128, 151936, 5, 16, 128  # S as the engine's for our attention
EPS, MASK, POSITIONS = 1e-6, 151669, 40960
MIN_LAUNCHES, MAX_LAUNCHES, NUM_REPLAYS = 20, 400, 15
DEVICE, DTYPE = "cuda", torch.bfloat16
Numbers = dict[str, float]


def num_sets(set_bytes: int) -> int:
    """How many copies of a kernel's buffers exceed L2 twice (at least 2)."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, min(MAX_LAUNCHES, 1 + 2 * l2_bytes // set_bytes))


def graph_us(launch: Callable[[int], Any], sets: int) -> float:
    """Median microseconds of one launch; launch(i) runs on buffer set i."""
    order = list(itertools.islice(itertools.cycle(range(sets)), max(MIN_LAUNCHES, sets)))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which may still be filling the buffers
    with torch.cuda.stream(side):
        for i in order[:3]:
            launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [launch(i) for i in order]
    times = []
    for _ in range(NUM_REPLAYS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(order))
    del kept
    return statistics.median(times[3:])


def compare(
    kernel: Callable[[int], Any], baseline: Callable[[int], Any], sets: int, num_bytes: int
) -> Numbers:
    """Times of a kernel and of its compiled reference, with the kernel's bandwidth."""
    us = graph_us(kernel, sets)
    numbers = {"kernel_us": us, "kernel_gbps": num_bytes / us / 1e3}
    return numbers | {"compiled_us": graph_us(baseline, sets)}


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, fullgraph=True, dynamic=False)
