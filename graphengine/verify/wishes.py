"""Batches that mix all options: what each prompt asks for, and how its tokens are judged.

Prompt i asks for wish i of a fixed list: nothing, penalties, biases, bad words, min_tokens, draws
with every filter, grammars, and several of them at once; so greedy rows, drawn ones and constrained
ones share steps. A token is judged as ever, by the plain model after the tokens that were emitted
before it, but its logits are first changed as the request asked, by the one-page reference step
(decode/reference.py), and masked by a fresh matcher that is led token by token. None of that knows
blocks, drafts, tables or rows.

    greedy    regret = max z - z[emitted]           z: adjusted and masked logits
    drawn     regret = max s - s[emitted]           s = z / temperature + Gumbel noise: its largest
                                                    entry is the draw of this seed and position

Invariant: what a filter or a mask rules out has the regret `RULED_OUT_NATS`. Filters have edges:
a token is ruled out only if it lies beyond the edge by more than the tolerance, and one that lies
nearer than that to it on the other side need not have been drawn.

Legend: T judged rows, V vocabulary, W words of a mask.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphengine.config.constraint import Constraint
from graphengine.decode.grammar import Matcher
from graphengine.decode.reference import adjusted
from graphengine.decode.sampling import GREEDY, Controls, Sampling, sample_rows
from graphengine.kernels.argmax import argmax_rows
from graphengine.kernels.filter_threshold import filter_threshold
from graphengine.kernels.gumbel_argmax import gumbel
from graphengine.startup.build import Built
from graphengine.verify.check import decode
from graphengine.verify.teacher import Judge, Scores

NUM_SAID = 16  # tokens that words and biases are taken from
RULED_OUT_NATS = 100.0  # finite, as the plain model's own logits were
CPU = torch.device("cpu")

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["bee", "duck", "none of them"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
_JSON = Constraint("json_schema", json.dumps(_SCHEMA))
_REGEX = Constraint("regex", "([a-z]{1,9} [0-9]{2}, ){6}end")
_CHOICE = Constraint("choice", json.dumps(["yes", "no", "perhaps, but not today"]))
_GRAMMAR = Constraint("grammar", 'start: item ("; " item)* "."\nitem: /[a-z ]{3,20}/')


class Wish(NamedTuple):
    """What a request asks for."""

    sampling: Sampling = GREEDY
    constraint: Constraint | None = None

    def __str__(self) -> str:
        own = ((field.name, getattr(self.sampling, field.name)) for field in fields(Sampling))
        texts = [f"{name} {value}" for name, value in own if value != getattr(GREEDY, name)]
        texts += [self.constraint.kind] if self.constraint is not None else []
        return ", ".join(texts) or "greedy"


NOTHING = Wish()


def wishes_of(said: Sequence[int], stop_ids: Collection[int], min_tokens: int) -> list[Wish]:
    """The list. Words and biases are of what the model says when nothing is asked, so that they
    change something.

    Args:
        said: the model's greedy answer to the prompt.
        min_tokens: of the wish for a late end, whose model is made to want an early one.
    """
    said = [token for token in said if token not in stop_ids] or [0]
    a, b, c, d = (said[i % len(said)] for i in (1, 3, 6, 7))
    less: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": 1.5}
    less["frequency_penalty"] = 1.0
    words: dict[str, Any] = {"bad_words": ((a,), (c, d)), "logit_bias": {b: -4.0, d: 2.0}}
    ends = dict.fromkeys(sorted(stop_ids), 40.0)
    late: dict[str, Any] = {"min_tokens": min_tokens, "logit_bias": ends}
    drawn = partial(Sampling, temperature=1.5)
    return [
        NOTHING,
        NOTHING,
        Wish(constraint=_JSON),
        Wish(Sampling(**words)),
        Wish(drawn(top_p=0.9)),
        Wish(drawn()),
        Wish(drawn(), _REGEX),
        Wish(drawn(top_k=20, min_p=0.02)),
        Wish(Sampling(**late)),
        Wish(Sampling(**less)),
        Wish(drawn(min_p=0.05)),
        Wish(drawn(top_p=0.95, top_k=50, min_p=0.01, **less, **words)),
        Wish(Sampling(presence_penalty=1.0), _GRAMMAR),
        Wish(drawn(top_p=0.9, **(less | late))),
        Wish(drawn(top_k=40, **words), _JSON),
        Wish(constraint=_CHOICE),
    ]


NUM_WISHES = len(wishes_of([0], (), 0))


def _ends(built: Built) -> list[int]:
    """Tokens that end an answer and have a logit."""
    return [token for token in built.stop_ids if 0 <= token < built.target.vocab_size]


def wishes_for(
    built: Built, ids: Sequence[Sequence[int]], max_new_tokens: int, seed: int, grammars: bool
) -> list[Wish]:
    """One wish a prompt, round the list; decodes all of them greedily first.

    Args:
        ids: the prompts.
        seed: of the first prompt; the next one's is one more.
        grammars: whether answers can follow one; if not, they are left out of the wishes.
    """
    budgets, found = [min(max_new_tokens, NUM_SAID)] * len(ids), []
    for i, answer in enumerate(decode(built.loop, ids, budgets, built.stop_ids)):
        wishes = wishes_of(answer.output_ids, _ends(built), max(max_new_tokens // 2, 1))
        wish = wishes[i % NUM_WISHES]
        if not grammars:
            wish = wish._replace(constraint=None)
        own = wish.sampling
        own = own if own.is_greedy else replace(own, seed=seed).numbered(i)
        found.append(wish._replace(sampling=own))
    return found


def matcher_of(built: Built, wish: Wish) -> Matcher | None:
    """Of an answer that begins."""
    if wish.constraint is None:
        return None
    assert built.grammars is not None
    return built.grammars.matcher(wish.constraint)


def judge_of(
    built: Built, wish: Wish, prompt: list[int], output: list[int], tolerance_nats: float
) -> Judge:
    """Judges the tokens of an answer by what it was asked to be; on the host, in float32."""
    matcher = matcher_of(built, wish)
    asked, stop_ids = wish.sampling, _ends(built)

    def judge(logits_TV: Tensor, positions: Sequence[int], emitted_T: Tensor) -> Scores:
        """The rows of one chunk, in order: the matcher follows them."""
        rows = []
        for z_V, p in zip(logits_TV.float().cpu(), positions, strict=True):
            said = output[: p + 1 - len(prompt)]
            z_V = adjusted(z_V, prompt, said, asked, stop_ids)
            if matcher is not None:
                _mask_(z_V, matcher, said)
            rows.append(z_V)
        z_TV, emitted_T = torch.stack(rows), emitted_T.cpu()
        z_emitted_T = z_TV.gather(1, emitted_T[:, None])[:, 0]
        if asked.is_greedy:
            best_T, regret_T = argmax_rows(z_TV), z_TV.amax(-1) - z_emitted_T
        else:
            at_T = torch.tensor(positions)
            best_T, regret_T = _drawn(z_TV, at_T, emitted_T, asked, tolerance_nats)
        degrees = 1.0 if asked.is_greedy else asked.temperature
        logprob_T = z_emitted_T / degrees - (z_TV / degrees).logsumexp(-1)
        regret_T = regret_T.clamp(max=RULED_OUT_NATS)
        return Scores(regret_T.tolist(), best_T.tolist(), logprob_T.tolist())

    return judge


def _mask_(z_V: Tensor, matcher: Matcher, said: list[int]) -> None:
    """-inf where the grammar lets nothing stand behind `said`, of which the matcher knows all but
    the last token. Behind a token that did not fit nothing is ruled out. Mutates: z_V, matcher."""
    inner = matcher.inner
    if said and not inner.is_error():
        inner.consume_tokens(said[-1:])
    if not inner.is_error():
        words_W = torch.frombuffer(bytearray(inner.compute_bitmask()), dtype=torch.int32)
        bits = (words_W[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
        z_V.masked_fill_(bits.flatten()[: len(z_V)] == 0, -math.inf)


def _drawn(
    z_TV: Tensor, positions_T: Tensor, emitted_T: Tensor, asked: Sampling, tolerance_nats: float
) -> tuple[Tensor, Tensor]:
    """(the draws of this seed, regrets of what was emitted)."""
    best_T = sample_rows(z_TV, positions_T, Controls.upload([asked], CPU))
    seed_T = torch.full_like(positions_T, asked.seed)
    score_TV = z_TV / asked.temperature + gumbel(seed_T, positions_T + 1, z_TV.shape[1])

    def edge_T(slack: float) -> Tensor:
        """The least logit that filters keep if they give so many nats, or take them."""
        share = max(1 - (1 - asked.top_p) * math.exp(-slack), 1e-6)
        own = replace(asked, top_p=min(share, 1.0), min_p=min(asked.min_p * math.exp(-slack), 1.0))
        degrees, top_p, top_k, _, min_p = Controls.upload([own], CPU)
        found_T = filter_threshold(z_TV, argmax_rows(z_TV), degrees, top_p, top_k, min_p)
        return found_T - slack * asked.temperature

    is_rival_TV = z_TV >= edge_T(-tolerance_nats)[:, None]
    rival_T = score_TV.masked_fill(~is_rival_TV, -math.inf).amax(-1)
    score_T, z_T = (x.gather(1, emitted_T[:, None])[:, 0] for x in (score_TV, z_TV))
    regret_T = (rival_T - score_T).clamp(min=0)
    is_out_T = (z_T < edge_T(tolerance_nats)) | (z_T == -math.inf)
    regret_T = regret_T.masked_fill(is_out_T, RULED_OUT_NATS)
    # NaN where the model's own logits are: nothing was compared.
    regret_T = torch.where(emitted_T == best_T, 0.0, regret_T)
    return best_T, regret_T.masked_fill(z_TV.isnan().any(-1), math.nan)
