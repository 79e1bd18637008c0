"""Teacher forcing: what the plain model says about every token of a finished output.

What: one causal forward of the target over prompt + output, in chunks, through the eager prefill
path; the logits of row p judge the token at p + 1. Why this path: it shares weights with decoding,
but no graph, block row, plan, page table or attention over a block, so a fault in those cannot hide
by being in both. It cannot see what both share: wrong weights, a wrong rope theta of the target, a
prefill that is itself wrong (golden tests against transformers see that).

Invariant: the pages it writes come from the idle pool and return to it; no request is running.
After a benign tie the rest is judged given that choice, and never counted as one long divergence.

Legend: T rows of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.decode.fixed_chunk import Piece
from graphengine.decode.kvcache import pages_for
from graphengine.decode.loop import DecodeLoop
from graphengine.decode.proposer import Proposer
from graphengine.kernels.argmax import argmax_rows

CHUNK = 256  # rows of one forward: their float32 logits at 152k tokens are 156 MB


class TokenScores(NamedTuple):
    """One entry per output token.

    `regret_nats[i] = log p(best_ids[i]) - log p(output[i])` under the plain model, NaN where its
    logits are not finite; `logprob[i] = log p(output[i])`.
    """

    regret_nats: list[float]
    best_ids: list[int]
    logprob: list[float]


Judge = Callable[[Tensor, Sequence[int], Tensor], TokenScores]
"""(logits [T, V], positions of their rows, int64 [T] the tokens behind them) -> what the model says
about these. Called in the order of the rows."""


def first_choice(logits_TV: Tensor, positions: Sequence[int], emitted_T: Tensor) -> TokenScores:
    """The `Judge` of requests that ask for nothing."""
    z_TV = logits_TV.float()
    z_emitted = z_TV.gather(1, emitted_T[:, None])[:, 0]
    regret_nats = (z_TV.amax(-1) - z_emitted).tolist()
    logprob = (z_emitted - z_TV.logsumexp(-1)).tolist()
    return TokenScores(regret_nats, argmax_rows(logits_TV).tolist(), logprob)


@torch.no_grad()
def teacher_force(
    loop: DecodeLoop,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    judge: Judge = first_choice,
) -> TokenScores:
    """Judges every token of an output by the target alone.

        regret[i] = max_v z[v] - z[output[i]],   z = logits after prompt + output[:i]

    Args:
        loop: idle; its target, page pool and prefill attention are used.
        judge: compares logits with tokens, for requests that change them.
    """
    assert not loop.has_work
    if not output_ids:
        return TokenScores([], [], [])
    ids = [*prompt_ids, *output_ids]
    first = len(prompt_ids) - 1  # the row whose logits judge output 0
    num_rows = len(ids) - 1  # the last token is judged, not fed
    pages = loop.allocator.allocate(pages_for(num_rows, loop.config.page_size))
    slots = loop.state_slots.allocate(1)
    scores = TokenScores([], [], [])
    prefill = replace(loop.prefill, pair=replace(loop.prefill.pair, proposer=Proposer()))
    try:
        for begin in range(0, num_rows, CHUNK):
            end = min(begin + CHUNK, num_rows)
            judged = range(max(begin, first), end)
            rows = [p - begin for p in judged]
            logits_TV = prefill.logits([Piece(ids, begin, end, pages, *slots)], rows)
            if not judged:
                continue
            emitted = torch.tensor([ids[p + 1] for p in judged], device=logits_TV.device)
            own = judge(logits_TV, judged, emitted)
            scores.regret_nats.extend(own.regret_nats)
            scores.best_ids.extend(own.best_ids)
            scores.logprob.extend(own.logprob)
    finally:
        loop.allocator.free(pages)
        loop.state_slots.free(slots)
    return scores
