"""One speculative step on one page: propose, verify, accept, commit.

No cache, no graph, no batch: whole forwards over one list of tokens. This is what every part of the
engine comes down to, and what tests hold it against, for every drafter and every kind of layer.

    committed    t_1 .. t_n                  t_n, the anchor, has been said but not yet read
    propose      d_1 .. d_{G-1}              the drafter's guesses of what follows
    verify       t_1 .. t_n d_1 .. d_{G-1}   one forward of the target; row i says what follows i
    accept       the longest run of drafts that are what the target says in their places
    commit       that run, and the target's next token behind it: the bonus, never a guess

Whatever is proposed, what is committed is the target's own choice row by row; a bad drafter costs
time alone. `choose` is argmax, or a draw whose noise is a function of (seed, position): then the
drawn tokens too are those of plain decoding. A penalty counts the tokens before a row, drafts among
them, and a grammar is led along them: where the row matters, they are what was said.

Legend: n tokens so far, G rows of a block (anchor and drafts), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from graphengine.decode.grammar import Matcher
from graphengine.decode.sampling import Controls, Sampling, sample_rows

Logits = Callable[[Tensor], Tensor]
"""The target: ids int64 [n] -> logits [n, V], row i given ids 0 .. i."""
Propose = Callable[[Tensor], Tensor]
"""The drafter: ids int64 [n], the anchor last -> drafts int64 [G - 1]."""
Choose = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logits [G, V], positions int64 [G] of their rows, ids int64 [n + G - 1]) -> the tokens behind
them, int64 [G]. A row may look at ids up to its own position alone."""


def greedy(logits_GV: Tensor, positions_G: Tensor, ids: Tensor) -> Tensor:
    """The first of the most likely tokens."""
    return logits_GV.argmax(-1)


def adjusted(
    z_V: Tensor, prompt: list[int], said: list[int], asked: Sampling, stop_ids: Collection[int]
) -> Tensor:
    """A row's logits as a request wants them, up to the temperature: vLLM's order."""
    z_V = z_V.float().clone()
    if not asked.adjusts:
        return z_V
    if asked.allowed_token_ids is not None:
        is_banned_V = torch.ones_like(z_V, dtype=torch.bool)
        is_banned_V[list(asked.allowed_token_ids)] = False
        z_V[is_banned_V] = -math.inf
    if len(said) < asked.min_tokens:
        z_V[list(stop_ids)] = -math.inf
    for *before, last in asked.bad_words:
        if len(said) >= len(before) and said[len(said) - len(before) :] == before:
            z_V[last] = -math.inf
    for token, bias in (asked.logit_bias or {}).items():
        z_V[token] += bias
    for token in {*prompt, *said}:
        r = asked.repetition_penalty
        z_V[token] = z_V[token] / r if z_V[token] > 0 else z_V[token] * r
    for token in set(said):
        z_V[token] -= asked.frequency_penalty * said.count(token) + asked.presence_penalty
    return z_V


def chooser(
    prompt: list[int], asked: Sampling, stop_ids: Collection[int], matcher: Matcher | None = None
) -> Choose:
    """The choice of a request. Args: matcher: of an answer that begins; it stays there."""

    def choose(logits_GV: Tensor, positions_G: Tensor, ids: Tensor) -> Tensor:
        rows, behind, num_led = [], matcher and matcher.copy(), 0
        for z_V, p in zip(logits_GV, positions_G.tolist(), strict=True):
            said = ids[len(prompt) : p + 1].tolist()
            z_V = adjusted(z_V, prompt, said, asked, stop_ids)
            if behind is not None:  # whose tokens are led to it one by one
                behind.advance(said[num_led:])
                num_led = len(said)
                z_V.masked_fill_(~behind.allowed(len(z_V)).to(z_V.device), -math.inf)
            rows.append(z_V)
        controls = Controls.upload([asked] * len(rows), logits_GV.device)
        return sample_rows(torch.stack(rows), positions_G.to(logits_GV.device), controls)

    return choose


def step(ids: Tensor, target: Logits, propose: Propose, choose: Choose = greedy) -> Tensor:
    """What one step commits: int64 [1 .. G], the accepted drafts and the bonus token."""
    drafts = propose(ids)
    block = torch.cat([ids, drafts])
    rows = torch.arange(len(ids) - 1, len(block))  # the anchor's and the drafts'
    choices = choose(target(block)[rows], rows, block)
    num_accepted = int((drafts == choices[:-1]).long().cumprod(0).sum())
    return choices[: num_accepted + 1]


def generate(
    prompt: Sequence[int],
    target: Logits,
    propose: Propose,
    max_new_tokens: int,
    choose: Choose = greedy,
    stop_ids: Collection[int] = (),
) -> tuple[list[int], list[int]]:
    """Steps until a stop token (kept) or the budget: (new tokens, accepted drafts of each step).

    The first token is the prefill's: a step without drafts.
    """
    ids = torch.tensor(prompt)
    new, accepted = step(ids, target, lambda _: ids.new_empty(0), choose).tolist(), []
    while len(new) < max_new_tokens and not set(stop_ids) & set(new):
        committed = step(torch.cat([ids, torch.tensor(new)]), target, propose, choose).tolist()
        new += committed
        accepted.append(len(committed) - 1)
    end = next((i + 1 for i, token in enumerate(new) if token in stop_ids), len(new))
    return new[: min(end, max_new_tokens)], accepted
