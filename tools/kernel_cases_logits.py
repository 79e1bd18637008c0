"""Kernels on rows of logits: the best token, and what sampling puts in its place."""

from collections.abc import Callable
from typing import Any

import torch
from kernel_timing import DEVICE, DTYPE, Numbers, V, compare, compiled, graph_us, num_sets

from graphengine.decode.sampling import Controls, Sampling, sample_rows
from graphengine.kernels import argmax, filter_threshold, gumbel_argmax


def bench_argmax(T: int, baseline: bool = True) -> Numbers:
    num_bytes = T * V * DTYPE.itemsize
    sets = num_sets(num_bytes)
    logits = torch.randn(sets, T, V, device=DEVICE).to(DTYPE)
    assert torch.equal(argmax.argmax_rows(logits[0]).cpu(), logits[0].cpu().argmax(-1))

    def kernel(i: int) -> torch.Tensor:
        return argmax.argmax_rows(logits[i])

    if not baseline:
        return {"kernel_us": graph_us(kernel, sets)}
    fast = compiled(argmax.argmax_rows_reference)
    numbers = compare(kernel, lambda i: fast(logits[i]), sets, num_bytes)
    return numbers | {"eager_us": graph_us(lambda i: logits[i].argmax(-1), sets)}


# What every row asks for.
SAMPLINGS = {
    "both": Sampling(temperature=0.8, top_p=0.95, top_k=50),
    "top_p": Sampling(temperature=0.8, top_p=0.95),
    "top_k": Sampling(temperature=0.8, top_k=50),
    "plain": Sampling(temperature=0.8),
}


class SampledCase:
    """T rows of logits in rotating buffers, one request a row."""

    def __init__(self, T: int) -> None:
        self.num_bytes = T * V * DTYPE.itemsize
        self.sets = num_sets(self.num_bytes)
        self.logits = (torch.randn(self.sets, T, V, device=DEVICE) * 3).to(DTYPE)
        self.best = [argmax.argmax_rows(logits) for logits in self.logits]
        self.positions = torch.arange(T, device=DEVICE)
        self.controls = {
            name: Controls.upload([one.numbered(t) for t in range(T)], torch.device(DEVICE))
            for name, one in SAMPLINGS.items()
        }

    def threshold(self, name: str, fn: Callable[..., Any]) -> Callable[[int], torch.Tensor]:
        own = self.controls[name]
        settings = (*own[:3], own.min_p_B)
        return lambda i: fn(self.logits[i], self.best[i], *settings)

    def draw(self, thresholds: torch.Tensor, fn: Callable[..., Any]) -> Callable[[int], Any]:
        own = self.controls["plain"]
        rest = (thresholds, self.positions, own.temperature_B, own.seed_B)
        return lambda i: fn(self.logits[i], self.best[i], *rest)

    def tail(self, name: str) -> Callable[[int], torch.Tensor]:
        return lambda i: sample_rows(self.logits[i], self.positions, self.controls[name])


def check_rows(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, but for a row in 16 or so: exp and log of kernel and reference differ in their last
    bits, and a near tie may fall either way."""
    assert (found != expected).sum() <= 1 + len(found) // 16


def bench_filter_threshold(T: int, baseline: bool = True) -> Numbers:
    case = SampledCase(T)
    for name in SAMPLINGS:
        found = case.threshold(name, filter_threshold.filter_threshold)(0)
        check_rows(found, case.threshold(name, filter_threshold.filter_threshold_reference)(0))
    names = list(SAMPLINGS) if baseline else ["both"]
    times = {
        f"{name}_us": graph_us(case.threshold(name, filter_threshold.filter_threshold), case.sets)
        for name in names
    }
    return {"kernel_us": times.pop("both_us")} | times


def bench_gumbel_argmax(T: int, baseline: bool = True) -> Numbers:
    case = SampledCase(T)
    everything = torch.full((T,), -torch.inf, device=DEVICE)
    kernel = case.draw(everything, gumbel_argmax.gumbel_argmax)
    check_rows(kernel(0), case.draw(everything, gumbel_argmax.gumbel_argmax_reference)(0))
    us = graph_us(kernel, case.sets)
    numbers = {"kernel_us": us, "kernel_gbps": case.num_bytes / us / 1e3}
    if baseline:
        eager = case.draw(everything, gumbel_argmax.gumbel_argmax_reference)
        numbers["eager_us"] = graph_us(eager, case.sets)
    return numbers


def bench_sampled_tail(T: int) -> Numbers:
    """What a verify that samples runs in place of one argmax."""
    case = SampledCase(T)
    return {f"{name}_us": graph_us(case.tail(name), case.sets) for name in SAMPLINGS}
