"""Sampling: the noise is uniform and independent, the filters are transformers', and speculation
changes neither the distribution nor, for one seed, the tokens.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from graphengine.api import Engine
from graphengine.capture.runners import Graph, capture_ends, run_chain
from graphengine.capture.steps import Dense
from graphengine.config.options import SamplingParams
from graphengine.decode import ends
from graphengine.decode.sampling import Controls, Sampling, sample_rows
from graphengine.kernels.argmax import argmax_rows
from graphengine.kernels.filter_threshold import filter_threshold
from graphengine.kernels.gumbel_argmax import gumbel, uniform
from tests.support.checkpoints import edit_config, make_drafter, make_target
from tests.support.dflash_reference import force_drafts, load_target, plain_generate, run_target
from tests.support.examples import examples

LEVEL = 1e-3  # of every statistical test here; seeds are fixed, so nothing is flaky
PROMPTS = [[7, 99, 23], list(range(100, 117)), [5], [250, 1, 2, 3, 4, 5, 6, 7]]
CPU = torch.device("cpu")


def controls(num_rows: int, **options: Any) -> Controls:
    return Controls.upload([Sampling(**options)] * num_rows, CPU)


# --- noise ---


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


# --- filters ---


def kept(logits_TV: Tensor, own: Controls) -> Tensor:
    settings = own.temperature_B, own.top_p_B, own.top_k_B, own.min_p_B
    threshold_T = filter_threshold(logits_TV, argmax_rows(logits_TV), *settings)
    return logits_TV >= threshold_T[:, None]


def reference_warp(logits_TV: Tensor, temperature: float, top_p: float, top_k: int) -> Tensor:
    """transformers' own warpers, in generate's order."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    ids: Any = torch.zeros(1, 1, dtype=torch.int64)
    scores: Any = TemperatureLogitsWarper(temperature)(ids, logits_TV.float())
    if top_k:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    return scores


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 2, 50, 300, 10**6])
def test_filters_equal_transformers(top_p: float, top_k: int) -> None:
    """Bug: top-p counts the crossing token out, is taken before top-k, or k is off by one."""
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
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    """Bug: a value without a meaning is taken, or silently ignored."""
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


# --- the engine ---


class Pair:
    def __init__(self, directory: Path) -> None:
        # Few likely tokens: the drafter is right now and then, and distributions are wide.
        self.target = make_target(directory / "target", tie=False, likely_tokens=6)
        self.drafter = make_drafter(directory / "drafter", self.target)

    def engine(self, draft: bool = True, **options: Any) -> Engine:
        options = {"buckets": (1, 4), "page_size": 4, "max_model_len": 96} | options
        return Engine.from_pretrained(self.target, self.drafter if draft else None, **options)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


def draw(engine: Engine, prompts: Any = None, **options: Any) -> list[list[int]]:
    options = {"max_new_tokens": 24, "ignore_eos": True, "seed": 5} | options
    results = engine.generate(prompts or PROMPTS, **options)
    return [result.token_ids for result in results]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    "options", [{"temperature": 1.0, "top_k": 4}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20}]
)
def test_same_seed_same_tokens(pair: Pair, backend: str, options: dict[str, Any]) -> None:
    """Bug: noise is keyed by the row, the step or the batch, or sits one position off in verify, so
    speculation changes what a seed says; or the first token is not drawn."""
    with (
        pair.engine(attention_backend=backend) as engine,
        pair.engine(draft=False, attention_backend=backend) as plain,
    ):
        drafted = engine.generate(PROMPTS, max_new_tokens=24, ignore_eos=True, seed=5, **options)
        tokens = [result.token_ids for result in drafted]
        assert sum(sum(r.metrics.acceptance.steps_by_accepted[1:]) for r in drafted) > 0
        assert tokens == draw(plain, **options)
        # Prompt i draws with seed + i, alone or in a batch.
        for i, prompt in enumerate(PROMPTS):
            assert draw(engine, [prompt], seed=5 + i, **options) == [tokens[i]]
        first = {tuple(draw(plain, [PROMPTS[0]], seed=s, max_new_tokens=1)[0]) for s in range(9)}
        assert len(first) == 1
        many = draw(plain, [PROMPTS[0]] * 16, max_new_tokens=1, temperature=3.0)
        assert len({ids[0] for ids in many}) > 1


def test_anchor_first_drafter(pair: Pair, tmp_path: Path) -> None:
    """Bug: where a verify has one row more than a draft, rows and noise are counted in drafts."""
    drafter = make_drafter(tmp_path / "drafter", pair.target)
    edit_config(
        drafter,
        lambda config: (
            config | {"dflash_config": config["dflash_config"] | {"sample_from_anchor": True}}
        ),
    )
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 4}
    with (
        Engine.from_pretrained(pair.target, drafter, buckets=(4,), max_model_len=96) as engine,
        pair.engine(draft=False) as plain,
    ):
        assert engine.num_draft_tokens == 4
        assert draw(engine, **options) == draw(plain, **options)


def test_every_acceptance_length(pair: Pair) -> None:
    """Bug: after a certain number of accepted drafts the next draw has another position's noise."""
    prompt = PROMPTS[0]
    with pair.engine() as engine:
        (truth,) = draw(engine, [prompt], temperature=1.0, max_new_tokens=60)
        for accepted in range(4):
            with pair.engine() as forced:
                force_drafts(forced, {tuple(prompt): truth}, lambda request, step, a=accepted: a)
                (result,) = forced.generate(
                    [prompt], max_new_tokens=30, ignore_eos=True, temperature=1.0, seed=5
                )
                assert result.token_ids == truth[:30]
                histogram = result.metrics.acceptance.steps_by_accepted
                assert histogram[accepted] == sum(histogram)


def test_greedy_and_sampling_requests_in_one_batch(pair: Pair) -> None:
    """Bug: one request's temperature is another's, or a stale one is left in a row."""
    with pair.engine() as engine:
        loop = engine.built.loop
        model = load_target(pair.target)
        alone = draw(engine, [PROMPTS[1]], temperature=1.5)
        for _ in range(2):
            greedy = loop.submit(list(PROMPTS[0]), 20, ())
            sampled = loop.submit(list(PROMPTS[1]), 24, (), Sampling(temperature=1.5, seed=5))
            other = loop.submit(list(PROMPTS[2]), 9, (), Sampling(temperature=3.0, top_k=2))
            with torch.no_grad():
                while loop.has_work:
                    loop.admit()
                    loop.launch()
                    loop.collect()
            assert sampled.output_ids == alone[0] and len(other.output_ids) == 9
            assert greedy.output_ids == plain_generate(model, PROMPTS[0], 20)


def test_greedy_batches_run_nothing_extra(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: greedy decoding, the default, pays for sampling; also after a sampling batch."""
    calls: list[int] = []
    real = ends.sample_rows

    def spy(*args: Any) -> Tensor:
        calls.append(1)
        return real(*args)

    monkeypatch.setattr(ends, "sample_rows", spy)
    with pair.engine() as engine:
        before = draw(engine)
        assert not calls
        draw(engine, temperature=1.0)
        assert calls
        calls.clear()
        assert draw(engine) == before and not calls


@pytest.mark.parametrize("draft", [True, False])
def test_first_tokens_follow_the_target(tmp_path: Path, draft: bool) -> None:
    """Bug T25: accepted drafts bias what is drawn. The first three tokens against the exact
    distribution, which transformers computes by enumeration."""
    pair = Pair(tmp_path)
    model = load_target(pair.target)
    prompt, count, depth = PROMPTS[0], 800, 3
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    warp = {"temperature": 1.2, "top_p": 1.0, "top_k": 3}
    for _ in range(depth):
        grown: dict[tuple[int, ...], float] = {}
        for prefix, mass in exact.items():
            logits = run_target(model, [*prompt, *prefix]).logits[-1:]
            probs = reference_warp(logits, **warp).softmax(-1)[0]  # type: ignore[arg-type]
            for token in probs.nonzero()[:, 0].tolist():
                grown[(*prefix, token)] = mass * float(probs[token])
        exact = grown
    with pair.engine(draft, buckets=(16,)) as engine:
        found = engine.generate(
            [prompt] * count, max_new_tokens=depth, ignore_eos=True, seed=100, **warp
        )
    seen = [tuple(result.token_ids) for result in found]
    assert set(seen) <= set(exact)
    ordered = sorted(exact, key=lambda ids: exact[ids])
    expected = [exact[ids] * count for ids in ordered]
    observed = [seen.count(ids) for ids in ordered]
    while expected[0] < 5:  # the chi-square test wants no thin cells
        expected[:2], observed[:2] = [sum(expected[:2])], [sum(observed[:2])]
    scale = sum(observed) / sum(expected)
    assert stats.chisquare(observed, [e * scale for e in expected]).pvalue > LEVEL
    if draft:
        assert sum(sum(r.metrics.acceptance.steps_by_accepted[1:]) for r in found) > 0


def test_engines_without_sampling(pair: Pair) -> None:
    """Bug: a temperature is silently ignored where no sampled chain was built."""
    with (
        pair.engine(simulate_acceptance=2.0) as engine,
        pytest.raises(ValueError, match="draws its acceptance"),
    ):
        draw(engine, temperature=1.0)
    with pytest.raises(ValueError, match="sampling needs real acceptance"):
        pair.engine(simulate_acceptance=2.0, sampling=True)
    with pair.engine() as engine, pytest.raises(ValueError, match=r"top_p is 2\.0"):
        engine.stream(PROMPTS[0], temperature=1.0, top_p=2.0)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_graph_modes_draw_the_same(tmp_path: Path, backend: Any) -> None:
    """Bug: the sampled tail is captured against other logits than the chain leaves, or something
    in it cannot be captured or waits."""
    target = make_target(
        tmp_path / "target", tie=False, likely_tokens=6, head_dim=64, dtype="bfloat16"
    )
    drafter = make_drafter(tmp_path / "drafter", target, dtype="bfloat16")
    found = {}
    for graph_mode in ("none", "piecewise", "full"):
        with Engine.from_pretrained(
            target,
            drafter,
            device="cuda",
            graph_mode=graph_mode,
            attention_backend=backend,
            buckets=(1, 4),
            max_model_len=200,
            sampling=True,
        ) as engine:
            greedy = draw(engine, max_new_tokens=60)
            found[graph_mode] = [
                greedy,
                draw(engine, temperature=1.0, max_new_tokens=60),
                draw(engine, PROMPTS[:1], temperature=0.7, top_p=0.9, top_k=9, max_new_tokens=60),
            ]
            assert draw(engine, max_new_tokens=60) == greedy
            assert found[graph_mode][1] != greedy
    assert found["piecewise"] == found["none"] and found["full"] == found["none"]


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


def test_two_ends_of_one_captured_chain() -> None:
    """Bug: the other end replays the first end too, or reads a carry that is not the chain's."""
    log: list[str] = []
    memory = torch.zeros(5)

    class Recorded:
        def __init__(self, steps: Any, carry: Any) -> None:
            self.steps, self.carry = steps, carry

        def replay(self) -> None:
            run_chain(self.steps, self.carry)

    class Pool:
        num_captures = 0

        def capture(self, steps: Any, carry: Any) -> Any:
            self.num_captures += 1
            graph: Any = Recorded(steps, carry)
            return Graph(graph, 0, 0), run_chain(steps, carry)

    def step(name: str, place: int, carries: bool = False) -> Dense:
        def run(carry: Any) -> Any:
            log.append(name)
            memory[place] = 1.0 + (carry[0] if carry else 0.0)
            return (memory[place : place + 1],) if carries else ()

        return Dense(name, run)

    first, context = step("first", 0, carries=True), step("context", 4)
    ends = {
        "greedy": [step("ids", 1, carries=True), step("accept", 2)],
        "sampled": [step("logits", 1, carries=True), step("draw", 3)],
    }
    pool: Any = Pool()
    runner, other = capture_ends("step", [first], ends, [context], (), pool, whole=False).values()
    assert pool.num_captures == 6
    assert list(capture_ends("step", [context], {}, [], (), pool, whole=False)) == [""]
    for chosen, names, expected in (
        (runner, ["first", "ids", "accept", "context"], [1.0, 2.0, 3.0, 0.0, 1.0]),
        (other, ["first", "logits", "draw", "context"], [1.0, 2.0, 0.0, 3.0, 1.0]),
    ):
        log.clear()
        memory.zero_()
        chosen.run()
        assert log == names and memory.tolist() == expected
        assert [call.name for call in chosen.calls] == names
