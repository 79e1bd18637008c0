"""Log-probabilities of what was chosen and of the most likely tokens, from the rows of a verify.

They are of the model's own distribution, before anything that a request asks for changes it (vLLM's
`raw_logprobs`), and equal those of plain decoding as far as the logits do. They stay on the device
in as many copies as steps may be in flight, each overwritten two steps later; the host fetches a
step's when it has seen that step's results, without waiting for the one behind it.

Legend: B requests, G rows of a block, T rows, V vocabulary, K alternatives, S steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.kernels.accept import NUM_RESULTS

Logprobs = dict[int, float]
"""Token -> log-probability: the chosen one first, then the most likely ones in order."""


class Scores(NamedTuple):
    """Scores of rows, [T] and [T, K]; in a bucket's buffers [S, B, G] and [S, B, G, K]."""

    chosen: Tensor  # float32
    top_ids: Tensor  # int64, the most likely first
    top: Tensor  # float32

    @classmethod
    def take(
        cls, take: Callable[..., Tensor], num_requests: int, block: int, num_alternatives: int
    ) -> Scores:
        """Memory for the steps in flight. Args: take: of an `Arena`."""
        shape, f32 = (NUM_RESULTS, num_requests, block), torch.float32
        return cls(
            take("chosen_logprob", *shape, dtype=f32),
            take("top_ids", *shape, num_alternatives),
            take("top_logprobs", *shape, num_alternatives, dtype=f32),
        )

    def write_(self, step_B: Tensor, scores: Scores) -> None:
        """Keeps a step's. Mutates: self, at the place of the step's number."""
        at_1 = step_B[:1] % NUM_RESULTS
        for kept, new in zip(self, scores, strict=True):
            kept.index_copy_(0, at_1, new.view(1, *kept.shape[1:]))

    def of_step(self, number: int) -> Scores:
        """Those of a step, by its number; views."""
        return self.of_row(number % NUM_RESULTS)

    def of_row(self, row: int) -> Scores:
        """A part of each, along the first dimension; views."""
        return Scores(*(x[row] for x in self))

    def fetch(self, stream: torch.cuda.Stream | None) -> Scores:
        """On the host, beside what is queued. The kernels that wrote them are done: acceptance,
        behind them on their stream, has been seen.

        Args: stream: on which nothing else runs; None on the CPU.
        """
        with torch.cuda.stream(stream):
            return Scores(*(x.cpu() for x in self))

    def told(self, tokens: Sequence[int], num_alternatives: int) -> list[Logprobs]:
        """What a request is told of its first rows, one a token.

        Args: num_alternatives: at most K.
        """
        parts = (x[: len(tokens)].tolist() for x in self)
        found, k = [], num_alternatives
        for token, chosen, ids, logprobs in zip(tokens, *parts, strict=True):
            likely = dict(zip(ids[:k], logprobs[:k], strict=True))
            likely.pop(token, None)
            found.append({token: chosen} | likely)
        return found


def score_rows(logits_TV: Tensor, ids_T: Tensor, num_alternatives: int) -> Scores:
    """Log-probabilities of a token and of the most likely ones after each row.

        logprob[t, v] = logits[t, v] - log sum_w exp(logits[t, w])

    Args:
        logits_TV: [T, V] of any float, summed in float32.
        ids_T: int64 [T]; a negative one, of a row without a choice, has no meaning.
        num_alternatives: at most V of them are given.
    """
    z_TV = logits_TV.float()
    total_T1 = z_TV.logsumexp(-1, keepdim=True)
    top_TK, ids_TK = z_TV.topk(min(num_alternatives, z_TV.shape[1]), dim=-1)
    chosen_T1 = z_TV.gather(1, ids_T.clamp(min=0)[:, None])
    return Scores((chosen_T1 - total_T1)[:, 0], ids_TK, top_TK - total_T1)
