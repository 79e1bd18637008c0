"""Sampling with noise that is a function of where a token stands, not of how it came about.

What: a row's token is `argmax(log p + Gumbel noise)` after temperature, top-k and top-p, which is
exactly a draw from that distribution. The noise of vocabulary entry v at position p of a request
is a hash of (seed, p, v). Why: the drafter is greedy, so verification may sample the target's token
at every row and keep a draft while it equals the sample; every emitted token is then a sample of
the target given an accepted prefix, and the output's distribution is the target's. Keyed noise adds
that the *same* tokens come out with and without speculation, in any batch, up to float noise
in the logits; a generator with a state would be consumed differently in each case.

Invariant: no host synchronisation and no shape that depends on data, so a graph can hold it. Rows
with temperature 0 are greedy: the first index of the largest logit, as kernels/argmax.py.

Legend: T rows, V vocabulary. Plain torch ops; about 150 passes over [T, V], most of them small:
top-k and top-p thresholds are found by bisection, since a sort of the vocabulary costs more memory.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.kernels.argmax import argmax_rows

ROWS = 64  # at once: int64 hashes of 64 rows of 152k tokens are 78 MB
NUM_SEED_BITS = 63
_UNIFORM_BITS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a request picks its tokens.

    `temperature` 0 is greedy. `top_k` keeps the k most likely tokens (0: all), then `top_p` the
    fewest of those that hold this share of their probability; ties with the last one stay.

    Raises:
        ValueError: a value outside its range, or a filter of greedy decoding.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"temperature is {self.temperature}; expected 0 (greedy) or a positive number"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; expected 0 < top_p <= 1 (1 keeps all)")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k!r}; expected an integer >= 0 (0 keeps all)")
        if not (isinstance(self.seed, int) and 0 <= self.seed < 2**NUM_SEED_BITS):
            raise ValueError(f"seed is {self.seed!r}; expected an integer 0 <= seed < 2^63")
        if self.is_greedy and (self.top_p < 1 or self.top_k > 0):
            raise ValueError(
                f"top_p {self.top_p} and top_k {self.top_k} change nothing at temperature 0; "
                "pass a temperature above 0"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether no noise is drawn."""
        return self.temperature == 0

    def numbered(self, index: int) -> Sampling:
        """The same for prompt `index` of a call: its seed is `seed + index`."""
        return replace(self, seed=(self.seed + index) % 2**NUM_SEED_BITS)


GREEDY = Sampling()


def random_seed() -> int:
    """A seed that nobody chose."""
    return random.SystemRandom().getrandbits(NUM_SEED_BITS)


class Controls(NamedTuple):
    """Sampling of B requests (or T rows) on the device."""

    temperature_B: Tensor  # float32
    top_p_B: Tensor  # float32
    top_k_B: Tensor  # int32
    seed_B: Tensor  # int64

    @classmethod
    def upload(cls, samplings: list[Sampling], device: torch.device) -> Controls:
        """One entry a request."""

        def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device)

        return cls(
            column([s.temperature for s in samplings], torch.float32),
            column([s.top_p for s in samplings], torch.float32),
            column([min(s.top_k, 2**31 - 1) for s in samplings], torch.int32),
            column([s.seed for s in samplings], torch.int64),
        )

    def per_row(self, block_length: int) -> Controls:
        """Every request's entry once for each of its rows."""
        return Controls(*(x[:, None].expand(-1, block_length).reshape(-1) for x in self))


def sample_rows(logits_TV: Tensor, positions_T: Tensor, controls: Controls) -> Tensor:
    """Draws the token after each row.

        out[t] = argmax_v(log p[t, v] + g[t, v]),  p = top_p(top_k(softmax(logits / temperature)))
        g[t, v] = Gumbel noise keyed by (seed[t], positions[t] + 1, v)

    Args:
        logits_TV: [T, V] bf16, fp16 or fp32.
        positions_T: int64 [T], of the rows; the token drawn stands one further.
        controls: one entry a row.

    Returns:
        int64 [T].
    """
    pieces = [
        argmax_rows(_scores(logits, positions + 1, Controls(*own)))
        for logits, positions, *own in zip(
            logits_TV.split(ROWS),
            positions_T.split(ROWS),
            *(x.split(ROWS) for x in controls),
            strict=True,
        )
    ]
    return torch.cat(pieces)


def _scores(logits_TV: Tensor, token_positions_T: Tensor, controls: Controls) -> Tensor:
    """What the draw maximises: perturbed log-probabilities, or a greedy row's own logits."""
    z_TV = logits_TV.float()
    greedy = (controls.temperature_B <= 0)[:, None]
    temperature = torch.where(greedy, 1.0, controls.temperature_B[:, None])
    # The largest becomes 0, so a small temperature cannot overflow; + 0.0 makes -0.0 positive.
    scaled_TV = (z_TV - z_TV.amax(-1, keepdim=True)) / temperature + 0.0
    kept_TV = torch.ones_like(scaled_TV, dtype=torch.bool)
    # Looking at the values would be a wait on a GPU; on the CPU it saves half of the work.
    if z_TV.is_cuda or ((controls.top_p_B < 1) | (controls.top_k_B > 0)).any():
        kept_TV = kept(scaled_TV, controls.top_p_B, controls.top_k_B)
    noise_TV = gumbel(controls.seed_B, token_positions_T, z_TV.shape[1])
    return torch.where(greedy, z_TV, torch.where(kept_TV, scaled_TV + noise_TV, -math.inf))


# --- filters ---


def kept(scaled_TV: Tensor, top_p_T: Tensor, top_k_T: Tensor) -> Tensor:
    """Which tokens top-k, then top-p leave: bool [T, V].

    Args:
        scaled_TV: float32 [T, V], log-probabilities up to a constant, each row's largest 0.
    """
    bits = scaled_TV.view(torch.int32)
    key_TV = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # an integer of the same order
    by_k = top_k_T > 0
    goal = torch.where(by_k, top_k_T.clamp(max=scaled_TV.shape[1]), 1).float()
    lowest = _threshold(key_TV, torch.ones_like(scaled_TV), goal)
    in_k = ~by_k[:, None] | (key_TV >= lowest[:, None])
    mass_TV = torch.where(in_k, scaled_TV.exp(), 0.0)
    lowest = _threshold(key_TV, mass_TV, top_p_T * mass_TV.sum(-1))
    in_p = (top_p_T >= 1)[:, None] | (key_TV >= lowest[:, None])
    return in_k & in_p


def _threshold(key_TV: Tensor, weight_TV: Tensor, goal_T: Tensor) -> Tensor:
    """The largest key k for which `sum(weight where key >= k) >= goal`; int64 [T].

    Keys are those of numbers <= 0, so they lie in [-2^31, 0].
    """
    low = torch.full_like(goal_T, -(2**31), dtype=torch.int64)
    high = torch.zeros_like(low)
    for _ in range(31):
        middle = (low + high + 1) >> 1
        reached = torch.where(key_TV >= middle[:, None], weight_TV, 0.0).sum(-1) >= goal_T
        low = torch.where(reached, middle, low)
        high = torch.where(reached, high, middle - 1)
    return low


# --- noise ---


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLIERS = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _right(x: Tensor, count: int) -> Tensor:
    """Logical shift; torch's of int64 is arithmetic."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The finalizer of splitmix64: a bijection of 64 bits in which every input bit matters.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    x = (x ^ _right(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _right(x, 27)) * _MULTIPLIERS[1]
    return x ^ _right(x, 31)


def uniform(seed_T: Tensor, position_T: Tensor, num_tokens: int) -> Tensor:
    """Uniform numbers in (0, 1), float32 [T, V]: a hash of (seed, position, token).

    Small values keep their relative precision (40 bits below 1), and they are what the winner of
    152k candidates is made of.
    """
    row = _mix(_mix(seed_T + _GOLDEN) ^ (position_T * _GOLDEN))
    token = torch.arange(1, num_tokens + 1, device=seed_T.device)
    bits = _right(_mix(row[:, None] + token * _GOLDEN), 64 - _UNIFORM_BITS)
    return ((bits.float() + 0.5) * 2.0**-_UNIFORM_BITS).clamp(max=1 - 2.0**-24)


def gumbel(seed_T: Tensor, position_T: Tensor, num_tokens: int) -> Tensor:
    """Standard Gumbel noise `-log(-log(1 - u))`, float32 [T, V]."""
    return -torch.log(-torch.log1p(-uniform(seed_T, position_T, num_tokens)))
