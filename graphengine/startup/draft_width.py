"""How long a block is by default on a mixture of experts: what a step costs by width, measured.

Why: on a dense model a block's rows are nearly free, and the drafter's whole block is the default.
Here every row reads experts of its own: 16 rows of Qwen3-30B-A3B read six times the bytes of one
(`config.moe`), so a wide block can lose to a narrow one, and to plain decoding.

    t(T) = sum over kinds of layers of count * t_kind(T) + t_head(T), and the drafter's the same way
    E(w) = 1 + a + .. + a^(w - 1),  a such that E(whole block) is a known mean
    rows = the widest w whose E(w) / t(B * w) lies within `SLACK` of the best

Measured is one layer of each kind of target and drafter (projections, experts) and the heads, for
B * w rows, as steps are launched: captured where they will be, else called. The kernels are those
of a step, but nothing is fused, and what reads K/V or a state is left out, since it hardly depends
on the width: to compile a whole chain for each width would take minutes. Rows are the
embeddings of different tokens, so that experts are many: rows of one text agree more, real blocks
cost less, and the choice errs towards short ones.

E is that of constant conditional acceptance a. Where acceptance is simulated its mean is the asked
one; else `TYPICAL_TOKENS`: what is published for chat (MT-Bench, SGLang) with DFlash's drafter of
Qwen3.5-35B-A3B, where mathematics and code have 7.2 and 7.9. Real acceptance falls off faster than
a constant a, which speaks for short blocks; that a drafter with fewer mask rows drafts like one
trained so is measured (`config.draft_length`).

What is not decided here: that no drafts are best. `decode.fallback` measures that on real
acceptance while running; a start-up line says where the curve expects it.
Invariant: `SLACK` is wider than the noise of a measurement, so that two starts rarely differ; who
needs them equal (a stored artifact) names a number, which always wins.

Legend: B requests, w rows of each, T = B * w.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain, takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine import names
from graphengine.capture.runners import GraphPool
from graphengine.capture.steps import Carry, Dense
from graphengine.config.draft_length import longest_draft
from graphengine.config.model import ModelConfig
from graphengine.decode.compile_ahead import CompileAhead, Workers, make_segments, run_kept
from graphengine.decode.metrics import DraftWidth
from graphengine.decode.proposer import Pair
from graphengine.decode.simulate import acceptance_rate
from graphengine.drafters.dflash import DFlash
from graphengine.models.decoder import LayerWeights, after_mixing, before_mixing, mixer_of
from graphengine.models.gated_delta import RecurrentState
from graphengine.models.layers import Matrix, linear

TYPICAL_TOKENS = 5.4  # a step with a whole block of 16, the bonus included
TYPICAL_LOOKUP_TOKENS = 2.0  # of n-gram look-up, an assumption: answers that repeat a little
SLACK = 0.03
NUM_REPLAYS, NUM_REPEATS = 5, 5  # replays timed together; the fastest repeat counts
MAX_S = 0.02  # of a layer or a head at one number of rows; then no repeat begins
_LOG = logging.getLogger(__name__)


class Forward(NamedTuple):
    """What a forward reads, of a target or of a drafter."""

    config: ModelConfig
    layers: tuple[LayerWeights, ...]
    embed_VD: Tensor
    head_VD: Matrix


class Guess(NamedTuple):
    """Runs of a step and of prefills, before the width of a step is known."""

    kernels: Iterable[Callable[[], object]] = ()
    segments: Iterable[Callable[[], object]] = ()


Part = tuple[int, Callable[[Carry], Carry]]
"""How often a forward does something, and what."""


def widths_of(num_verify_rows: int) -> list[int]:
    """Rows that are measured: 2, 4, 8, .. and the whole block."""
    return [*(w for w in (2, 4, 8, 16, 32) if w < num_verify_rows), num_verify_rows]


def expected_tokens(mean: float, num_verify_rows: int, rows: int) -> float:
    """Tokens a step of a block cut to `rows`, where the whole one yields `mean`."""
    rate = acceptance_rate(mean, num_verify_rows - 1)
    return sum(rate**j for j in range(rows))


def choose(
    bucket: int, step_s: Mapping[int, float], mean: float, least_tokens: float = 0.0
) -> DraftWidth:
    """The widest block within `SLACK` of the best rate.

    Args:
        step_s: rows of a request -> what a step costs, in any unit; 1 is plain decoding.
        mean: tokens that the widest yields.
        least_tokens: rows below it are not considered.
    """
    widest = max(step_s)
    tokens = {rows: expected_tokens(mean, widest, rows) for rows in step_s}
    rates = {w: tokens[w] / step_s[w] for w in step_s if w > 1 and w >= min(least_tokens, widest)}
    best = max(rates.values())
    rows = max(w for w, rate in rates.items() if rate >= best * (1 - SLACK))
    return DraftWidth(bucket=bucket, rows=rows, step_s=dict(step_s), tokens=tokens)


def assumed_tokens(pair: Pair) -> float:
    """Mean tokens of the proposer's whole block: simulated, or typical."""
    simulated = pair.config.simulate_acceptance
    if simulated is not None:
        return simulated
    return typical_tokens(pair.proposer.num_draft_tokens + 1, is_lookup=not pair.proposer.taps)


def typical_tokens(num_verify_rows: int, *, is_lookup: bool) -> float:
    """Tokens a step of a whole block of so many rows, where nothing says more."""
    return min(TYPICAL_LOOKUP_TOKENS if is_lookup else TYPICAL_TOKENS, float(num_verify_rows))


def measure_widths(
    pair: Pair, workers: Workers | None = None, guess: Callable[[], Guess] = Guess
) -> tuple[DraftWidth, ...]:
    """A choice for every bucket; each number of rows is measured once. Kernels that are not in
    their cache are compiled before, beside each other (`compile_ahead`).

    Args:
        workers: who is asked for kernels; None: they are compiled here.
        guess: what will be compiled behind that, probably; asked for where kernels are compiled.
    """
    config, block = pair.config, pair.proposer.num_draft_tokens + 1
    mean, widths = assumed_tokens(pair), (*reversed(widths_of(block)), 1)
    if pair.target.kv_pool.is_cuda:
        num_rows = sorted({bucket * width for bucket in config.buckets for width in widths})

        def warm_up() -> None:
            for run in _runs(pair, num_rows):
                run()

        if not run_kept(warm_up):
            guessed = guess()
            with CompileAhead(_runs(pair, num_rows), workers, guessed.kernels) as kernels:
                make_segments(takewhile(lambda _: not kernels.has_ended(), guessed.segments))
                kernels.wait()
    seconds = cache(partial(forward_seconds, pair))

    def step_s(bucket: int, rows: int) -> float:
        target_s, draft_s = seconds(bucket * rows)
        return target_s + (draft_s if rows > 1 else 0.0)

    found: list[DraftWidth] = []
    for bucket in config.buckets:
        curve: dict[int, float] = {}
        least = math.inf  # noise only adds: a step costs at most what a wider one does
        for rows in widths:
            least = curve[rows] = min(least, step_s(bucket, rows))
        found.append(choose(bucket, curve, mean, config.acceptance_floor))
        _LOG.info(found[-1].line())
    if pair.target.kv_pool.is_cuda:
        torch.cuda.empty_cache()
    return tuple(found)


def with_widths(pair: Pair, widths: Sequence[DraftWidth]) -> Pair:
    """The pair as these widths run it."""
    numbers = tuple(width.num_draft_tokens for width in widths)
    config = replace(pair.config, num_speculative_tokens=numbers)
    return replace(pair, config=config, proposer=longest_draft(config, pair.proposer))


def forward_seconds(pair: Pair, num_rows: int) -> tuple[float, float]:
    """(target, drafter) of a forward of so many rows."""
    device, is_captured = pair.target.kv_pool.device, pair.config.graph_mode != "none"
    target_s, draft_s = (
        sum(count * _seconds(run, device, is_captured) for count, run in parts)
        for parts in _parts(pair, num_rows)
    )
    return target_s, draft_s


def _runs(pair: Pair, rows: Iterable[int]) -> Iterator[Callable[[], object]]:
    """All that forwards of these numbers of rows call."""
    for num_rows in rows:
        for _, run in chain(*_parts(pair, num_rows)):
            yield partial(run, ())


def _parts(pair: Pair, num_rows: int) -> tuple[list[Part], list[Part]]:
    """(the target's, the drafter's)."""
    weights, proposer = pair.target.weights, pair.proposer
    target = Forward(pair.target.config, weights.layers, weights.embed_VD, weights.lm_head_VD)
    draft: list[Part] = []
    if isinstance(proposer, DFlash):
        own, head_VD = proposer.at(num_rows)
        draft = _parts_of(
            Forward(proposer.config.model, own.layers, proposer.embed_VD, head_VD), num_rows
        )
    return _parts_of(target, num_rows), draft


def _parts_of(forward: Forward, num_rows: int) -> list[Part]:
    """The head and a layer of each kind."""
    config, layers, embed_VD, head_VD = forward
    vocab = len(embed_VD)
    spread = torch.arange(num_rows, device=embed_VD.device) * max(vocab // num_rows, 1)
    h_TD, kinds = embed_VD[spread % vocab], config.layer_kinds
    parts: list[Part] = [(1, lambda carry: (linear(h_TD, head_VD),))]
    for kind in dict.fromkeys(kinds):
        parts.append((kinds.count(kind), _layer_run(config, layers[kinds.index(kind)], h_TD)))
    return parts


def _layer_run(config: ModelConfig, layer: LayerWeights, h_TD: Tensor) -> Callable[[Carry], Carry]:
    """A layer whose mixer gives zeros."""
    mixer, eps = mixer_of(layer), config.rms_norm_eps
    state = mixer.state(config)
    heads = config.num_attention_heads, config.head_dim
    if isinstance(state, RecurrentState):
        heads = state.config.num_value_heads, state.config.head_dim
    mixed, update_TD = h_TD.new_zeros(len(h_TD), *heads), torch.zeros_like(h_TD)

    def run(carry: Carry) -> Carry:
        summed_TD, _ = before_mixing(layer, h_TD, update_TD, eps)
        return after_mixing(layer, summed_TD, mixed, eps)

    return run


def _seconds(run: Callable[[Carry], Carry], device: torch.device, is_captured: bool) -> float:
    """Seconds of one call, its kernels compiled and its launches captured before."""
    call: Callable[[], object] = partial(run, ())
    call()
    if is_captured:
        pool = GraphPool()
        with pool.warming():
            call()
        graph, _ = pool.capture([Dense(names.dense_name("verify", 0), run)], ())
        call = graph.handle.replay
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    num_calls = NUM_REPLAYS if is_captured else 1
    best, spent = math.inf, 0.0
    for _ in range(NUM_REPEATS):
        wait()
        began = time.perf_counter()
        for _ in range(num_calls):
            call()
        wait()
        seconds = time.perf_counter() - began
        best, spent = min(best, seconds / num_calls), spent + seconds
        if spent > MAX_S:
            break
    return best
