"""Sampling with noise that is a function of where a token stands, not of how it came about.

A row's token is `argmax(log p + Gumbel noise)` after temperature, min-p, top-k and top-p, which is
exactly a draw from that distribution. The noise of vocabulary entry v at position p of a request is
a hash of (seed, p, v). Drafts are greedy, so verification may sample the target's token at every
row and keep a draft while it equals the sample: every emitted token is a sample of the target
given an accepted prefix. Keyed noise adds that the *same* tokens come out with and without
speculation, in any batch, up to float noise in the logits; a generator's state would be consumed
differently.

Invariant: no host synchronisation and no shape that depends on data, so one graph holds it for any
mix of requests; what a request wants is read on the device. Rows with temperature 0 are greedy: the
first index of the largest logit, as kernels/argmax.py.

Legend: B requests, T rows (T / B of each), V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.config.options import SamplingParams, adjusts
from graphengine.kernels.argmax import argmax_rows
from graphengine.kernels.filter_threshold import filter_threshold
from graphengine.kernels.gumbel_argmax import gumbel_argmax

NUM_SEED_BITS = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a request picks its tokens.

    `temperature` 0 is greedy. `min_p` keeps tokens at least this share as likely as the most likely
    one, `top_k` the k most likely tokens (0: all), then `top_p` the fewest of those that hold this
    share of their probability; ties with the last one stay. Before all of it logits are adjusted
    (kernels/adjust_logits.py); `bad_words` are tokens here. Ranges are `SamplingParams`' to check.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0

    @classmethod
    def of(cls, asked: SamplingParams, bad_words: tuple[tuple[int, ...], ...] = ()) -> Sampling:
        """As asked for. Args: bad_words: their tokens."""
        same = {name: getattr(asked, name) for name in _same_names()}
        return cls(**same, bad_words=bad_words, seed=asked.seed or 0)

    @property
    def is_greedy(self) -> bool:
        """Whether no noise is drawn."""
        return self.temperature == 0

    @property
    def adjusts(self) -> bool:
        """Whether logits change before they are compared or drawn from."""
        return adjusts(self)

    def numbered(self, index: int) -> Sampling:
        """The same for prompt `index` of a call: its seed is `seed + index`."""
        if index == 0:  # a first token waits for this, and `replace` asks for every field
            return self
        return replace(self, seed=(self.seed + index) % 2**NUM_SEED_BITS)


@cache
def _same_names() -> list[str]:
    """What a user's options and a request's sampling mean by the same name."""
    return [field.name for field in fields(Sampling) if field.name not in ("bad_words", "seed")]


GREEDY = Sampling()


def random_seed() -> int:
    """A seed that nobody chose."""
    return random.SystemRandom().getrandbits(NUM_SEED_BITS)


class Controls(NamedTuple):
    """Sampling of B requests on the device."""

    temperature_B: Tensor  # float32
    top_p_B: Tensor  # float32
    top_k_B: Tensor  # int32
    seed_B: Tensor  # int64
    min_p_B: Tensor  # float32

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
            column([s.min_p for s in samplings], torch.float32),
        )


def sample_rows(logits_TV: Tensor, positions_T: Tensor, controls: Controls) -> Tensor:
    """Draws the token after each row.

        out[t] = argmax_v(log p[t, v] + g[t, v])
        p = top_p(top_k(min_p(softmax(logits / temperature))))
        g[t, v] = Gumbel noise keyed by (seed, positions[t] + 1, v)

    Args:
        logits_TV: [T, V] bf16, fp16 or fp32.
        positions_T: int64 [T], of the rows; the token drawn stands one further.
        controls: of B requests with T / B rows each.

    Returns:
        int64 [T]; -1 where logits were not finite.
    """
    temperature_B, top_p_B, top_k_B, seed_B, min_p_B = controls
    best_T = argmax_rows(logits_TV)
    threshold_T = filter_threshold(logits_TV, best_T, temperature_B, top_p_B, top_k_B, min_p_B)
    return gumbel_argmax(logits_TV, best_T, threshold_T, positions_T, temperature_B, seed_B)
