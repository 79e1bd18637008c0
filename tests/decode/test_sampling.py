"""Sampling a row: the noise is uniform and independent, the filters are transformers'."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from graphengine.config.options import SamplingParams
from graphengine.decode.sampling import Controls, Sampling, sample_rows
from graphengine.kernels.argmax import argmax_rows
from graphengine.kernels.filter_threshold import filter_threshold
from graphengine.kernels.gumbel_argmax import gumbel, uniform
from tests.support.examples import examples
from tests.support.sampling import LEVEL, reference_warp

CPU = torch.device("cpu")


def controls(num_rows: int, **options: Any) -> Controls:
    return Controls.upload([Sampling(**options)] * num_rows, CPU)


def test_uniform_in_every_direction() -> None:
    """Bug: the hash is weak: numbers are not uniform, or those of neighbouring tokens, positions or
    seeds are alike."""
    seeds = torch.arange(40).repeat_interleave(40)
    positions = torch.arange(40).repeat(40)
    u = uniform(seeds, positions, 512).double()
    assert u.min() > 0 and u.max() < 1
    assert stats.kstest(u.flatten()[::7].numpy(), "uniform").pvalue > LEVEL
    cube = u.view(40, 40, 512)
    pairs: dict[str, tuple[Tensor, Tensor]] = {
        "token": (cube[..., :-1], cube[..., 1:]),
        "position": (cube[:, :-1], cube[:, 1:]),
        "seed": (cube[:-1], cube[1:]),
    }
    for name, (a, b) in pairs.items():
        r: Any = stats.pearsonr(a.flatten().numpy(), b.flatten().numpy())
        assert r.pvalue > LEVEL, name
        cells = (a * 8).long() * 8 + (b * 8).long()
        counts = torch.bincount(cells.flatten(), minlength=64)
        assert stats.chisquare(counts.numpy()).pvalue > LEVEL, name


def test_seeds_that_differ_in_high_bits_alone() -> None:
    """Bug: the key is truncated, so that seeds 2^32 apart draw the same."""
    seeds = torch.tensor([1 << bit for bit in range(63)])
    u = uniform(seeds, torch.zeros_like(seeds), 4)
    assert len({tuple(row) for row in u.tolist()}) == 63


@pytest.mark.slow
def test_gumbel_of_a_large_vocabulary() -> None:
    """Bug: too few random bits: the maximum over 152k tokens, which decides, is granular or
    capped."""
    rows = torch.arange(150)
    largest = gumbel(rows, rows, 151936).amax(-1).double() - math.log(151936)
    assert stats.kstest(largest.numpy(), "gumbel_r").pvalue > LEVEL
    assert len(set(largest.tolist())) == 150


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [(1.0, 1.0, 0), (0.5, 1.0, 0), (2.0, 1.0, 0), (1.0, 0.7, 0), (1.0, 1.0, 5), (1.3, 0.8, 9)],
)
def test_draws_follow_the_distribution(temperature: float, top_p: float, top_k: int) -> None:
    """Bug: noise is scaled with the temperature, or a filter changes the shape of what it keeps."""
    logits = torch.randn(24, generator=torch.Generator().manual_seed(3)) * 2
    expected = reference_warp(logits[None], temperature, top_p, top_k).double().softmax(-1)[0]
    count = examples(20000)
    own = Controls.upload(
        [
            Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
            for seed in range(count)
        ],
        CPU,
    )
    drawn = sample_rows(logits.expand(count, -1), torch.full((count,), 11), own)
    observed = torch.bincount(drawn, minlength=24)
    live = expected > 0
    assert observed[~live].sum() == 0
    pvalue = stats.chisquare(observed[live].numpy(), (expected[live] * count).numpy()).pvalue
    assert pvalue > LEVEL


def kept(logits_TV: Tensor, own: Controls) -> Tensor:
    settings = own.temperature_B, own.top_p_B, own.top_k_B, own.min_p_B
    threshold_T = filter_threshold(logits_TV, argmax_rows(logits_TV), *settings)
    return logits_TV >= threshold_T[:, None]


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 2, 50, 300, 10**6, 2**31])
def test_filters_equal_transformers(top_p: float, top_k: int) -> None:
    """Bug: top-p counts the crossing token out, is taken before top-k, or k is off by one, or has
    no room in 32 bits."""
    generator = torch.Generator().manual_seed(top_k)
    logits = torch.randn(9, 300, generator=generator) * torch.logspace(-2, 1.5, 9)[:, None]
    expected = reference_warp(logits, 0.7, top_p, top_k) > -math.inf
    found = kept(logits, controls(9, temperature=0.7, top_p=top_p, top_k=top_k))
    # At a sum that equals top_p up to float noise either answer is right.
    assert (found != expected).sum() <= (2 if 0.1 <= top_p < 1 else 0)
    assert (found & expected).any(-1).all()


def test_ties_stay_together() -> None:
    """Bug: of equal tokens an arbitrary one is kept, so that results depend on the order."""
    logits = torch.tensor([[0.0, -0.0, 0.0, -1.0, -2.0]])
    found = kept(logits, controls(1, temperature=1.0, top_k=1))
    assert found.tolist() == [[True] * 3 + [False] * 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_rows_are_untouched(dtype: torch.dtype) -> None:
    """Bug: a greedy request beside a sampling one gets another first choice: ties, NaN, -0.0."""
    logits = torch.randn(70, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1] = 0.0
    logits[2, 5:9] = 7.0
    logits[3, 4] = math.nan
    logits[4] = -math.inf
    logits[5, 3] = math.inf
    rows = torch.arange(70)
    samplings = [Sampling(temperature=float(i >= 6 and i % 2), seed=i) for i in range(70)]
    found = sample_rows(logits, rows, Controls.upload(samplings, CPU))
    greedy = torch.tensor([s.is_greedy for s in samplings])
    assert torch.equal(found[greedy], argmax_rows(logits)[greedy])
    assert not torch.equal(found, argmax_rows(logits))


def test_small_and_large_temperatures() -> None:
    """Bug: logits / 1e-30 overflows, to a tie of infinities or to inf - inf, or a high temperature
    is not uniform."""
    logits = torch.tensor([[10.0, 30.0, 20.0, -60.0]]).expand(2000, -1)
    rows = torch.arange(2000)
    for low in (1e-30, 2e-38):
        assert (sample_rows(logits, rows, controls(2000, temperature=low)) == 1).all()
    counts = torch.bincount(sample_rows(logits, rows, controls(2000, temperature=1e9)))
    assert stats.chisquare(counts.numpy()).pvalue > LEVEL


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"temperature": None}, "temperature is None"),
        ({"temperature": "1"}, "temperature is '1'"),
        ({"temperature": 1.0, "top_p": "x"}, "top_p is 'x'"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p is 0.0"),
        ({"temperature": 1.0, "top_p": 1.1}, "top_p is 1.1"),
        ({"temperature": 1.0, "top_k": -1}, "top_k is -1"),
        ({"temperature": 1.0, "top_k": 1.5}, "top_k is 1.5"),
        ({"temperature": 1.0, "seed": -1}, "seed is -1"),
        ({"temperature": 1.0, "seed": 2**63}, "seed is 9223372036854775808"),
        ({"top_p": 0.9}, "change nothing at temperature 0"),
        ({"top_k": 5}, "change nothing at temperature 0"),
        ({"top_k": 1}, "change nothing at temperature 0"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    """Bug: a value without a meaning is taken, or silently ignored."""
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


@pytest.mark.gpu
def test_cuda_draws_what_the_cpu_draws() -> None:
    """Bug: int64 hashing differs between devices."""
    logits = torch.randn(70, 1000, generator=torch.Generator().manual_seed(1))
    own = Controls.upload(
        [Sampling(temperature=1.0, top_p=0.9, top_k=40, seed=i) for i in range(70)], CPU
    )
    rows = torch.arange(70)
    expected = sample_rows(logits, rows, own)
    on_gpu = Controls(*(x.cuda() for x in own))
    found = sample_rows(logits.cuda(), rows.cuda(), on_gpu).cpu()
    assert (found == expected).sum() >= 69
    u = uniform(own.seed_B, rows, 1000)
    assert torch.equal(uniform(on_gpu.seed_B, rows.cuda(), 1000).cpu(), u)


@pytest.mark.gpu
def test_one_captured_tail_serves_every_mix() -> None:
    """Bug: a setting, or that no row has a filter, is baked into the graph, or sums of the last
    replay are left."""
    device = torch.device("cuda")
    logits = torch.zeros(32, 151936, dtype=torch.bfloat16, device=device)
    positions = torch.arange(32, device=device)
    own = Controls.upload([Sampling()] * 4, device)
    sample_rows(logits, positions, own)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = sample_rows(logits, positions, own)
    kinds = [
        Sampling(),
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0.7, top_p=0.9, seed=2),
        Sampling(temperature=1.3, top_k=40, top_p=0.5, seed=3),
    ]
    for turn in range(6):
        mix = [kinds[(turn + i) % 4] for i in range(4)] if turn < 4 else [kinds[turn - 3]] * 4
        for old, new in zip(own, Controls.upload(mix, device), strict=True):
            old.copy_(new)
        logits.copy_(torch.randn(32, 151936, device=device) * 3)
        graph.replay()
        assert torch.equal(drawn, sample_rows(logits, positions, own))
        on_cpu = Controls(*(x.cpu() for x in own))
        assert (drawn.cpu() == sample_rows(logits.cpu(), positions.cpu(), on_cpu)).sum() >= 31


def test_the_seeds_of_a_call_s_prompts() -> None:
    """Bug: with the largest seed there is the second prompt ends in a traceback of torch's."""
    for seed, seeds in ((0, [0, 1, 2]), (2**63 - 2, [2**63 - 2, 2**63 - 1, 0])):
        numbered = [Sampling(temperature=1.0, seed=seed).numbered(i) for i in range(3)]
        controls = Controls.upload(numbered, torch.device("cpu"))
        assert controls.seed_B.tolist() == seeds
