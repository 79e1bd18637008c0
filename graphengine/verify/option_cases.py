"""Batches that mix all options: what each prompt asks for, and how its tokens are judged.

Prompt i asks for case i of a fixed list: nothing, penalties, biases, bad words, draws with every
filter, grammars, log-probabilities, every kind of end, and several of them at once; so greedy rows,
drawn, scored and constrained ones share steps. What is told beside tokens is told.py's to judge.

A token is judged as ever, by the plain model after the tokens that were emitted before it, but its
logits are first changed as the request asked, by the one-page reference step (decode/reference.py),
and masked by a fresh matcher that is led token by token. None of that knows blocks, drafts, tables
or rows.

    greedy    regret = max z - z[emitted]           z: adjusted and masked logits
    drawn     regret = max s - s[emitted]           s = z / temperature + Gumbel noise: its largest
                                                    entry is the draw of this seed and position

Invariant: what a filter or a mask rules out has the regret `RULED_OUT_NATS`. Filters have edges:
a token is ruled out only if it lies beyond the edge by more than the tolerance, and one that lies
nearer than that to it on the other side need not have been drawn.

Legend: T judged rows, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphengine.config.constraint import KINDS, constraint_of
from graphengine.config.options import SamplingParams
from graphengine.decode.grammar import Matcher
from graphengine.decode.reference import adjusted
from graphengine.decode.sampling import Controls, Sampling, sample_rows
from graphengine.kernels.argmax import argmax_rows
from graphengine.kernels.filter_threshold import filter_threshold
from graphengine.kernels.gumbel_argmax import gumbel
from graphengine.startup.build import Built
from graphengine.verify import told
from graphengine.verify.check import decode
from graphengine.verify.teacher import Judge, TokenScores

MAX_LOGPROBS = 4  # of all cases
NUM_SAID = 16  # tokens that words and biases are taken from
RULED_OUT_NATS = 100.0  # finite, as the plain model's own logits were
CPU = torch.device("cpu")

_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "count": {"type": "integer", "minimum": 0, "maximum": 999},
            "kind": {"enum": ["bee", "duck", "none of them"]},
        },
        "required": ["name", "count", "kind"],
        "additionalProperties": False,
    }
)
_REGEX = "([a-z]{1,9} [0-9]{2}, ){6}end"
_CHOICE = "yes", "no", "perhaps, but not today"
_GRAMMAR = 'start: item ("; " item)* "."\nitem: /[a-z ]{3,20}/'


class OptionCase(NamedTuple):
    """What a request asks for; of bad words the tokens alone are given."""

    asked: SamplingParams = told.NOTHING
    words: tuple[tuple[int, ...], ...] = ()

    @property
    def sampling(self) -> Sampling:
        """How its tokens are picked."""
        return Sampling.of(self.asked, self.words)

    @property
    def chooses(self) -> bool:
        """Whether its tokens are anything but the model's first choices."""
        own = self.sampling
        return not own.is_greedy or own.adjusts or constraint_of(self.asked) is not None

    def budget(self, most: int) -> int:
        """Its most new tokens in a run that gives so many."""
        return most if self.asked == told.NOTHING else min(most, self.asked.max_new_tokens)

    def __str__(self) -> str:
        return told.options_text(self.asked) + (f", bad_words {self.words}" if self.words else "")


def cases_of(
    said: Sequence[int], text: str, stop_ids: Collection[int], max_new_tokens: int
) -> list[OptionCase]:
    """The list. Words, biases and stops are of what the model says when nothing is asked, so that
    they change something.

    Args:
        said: the model's greedy answer to the prompt.
        text: of `said`.
    """
    said = [token for token in said if token not in stop_ids] or [0]
    a, b, c, d = (said[i % len(said)] for i in (1, 3, 6, 7))
    middle, early = len(text) // 2, max(max_new_tokens // 4, 1)
    stop = text[max(middle - 2, 0) : middle + 2] or "."  # some way in, and over tokens' borders
    less: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": 1.5}
    less["frequency_penalty"] = 1.0
    words, bias = ((a,), (c, d)), dict[str, Any](logit_bias={b: -4.0, d: 2.0})
    # Answers that the model would end at once, and such as it ends again and again.
    ends: dict[str, Any] = {"logit_bias": dict.fromkeys(sorted(stop_ids), 40.0)}
    late: dict[str, Any] = {"min_tokens": max(max_new_tokens // 2, 1)}
    allowed = tuple(dict.fromkeys((*said, *stop_ids)))
    again = tuple((end, other) for end in stop_ids for other in stop_ids)
    greedy = partial(SamplingParams, max_new_tokens=max_new_tokens)
    drawn = partial(greedy, temperature=1.5)
    return [  # first and last what changes unsure answers alone, as those to the bundled probes are
        OptionCase(),
        OptionCase(greedy(**less)),
        OptionCase(drawn(min_p=0.05)),
        OptionCase(),
        OptionCase(greedy(json_schema=_SCHEMA)),
        OptionCase(greedy(frequency_penalty=0.3), words[1:]),  # some drafts pass
        OptionCase(greedy(stop=(stop,), logprobs=2)),
        OptionCase(drawn(regex=_REGEX)),
        OptionCase(greedy(stop_token_ids=(c,))),
        OptionCase(greedy(**ends, **late)),
        OptionCase(drawn(top_p=0.95, top_k=50, min_p=0.01, **less, **bias), words),
        OptionCase(greedy(ignore_eos=True, **ends), again),
        OptionCase(greedy(presence_penalty=1.0, grammar=_GRAMMAR)),
        OptionCase(SamplingParams(max_new_tokens=early, logprobs=0, prompt_logprobs=2)),
        OptionCase(drawn(top_p=0.9, **less, **ends, **late)),
        OptionCase(drawn(top_k=40, json_schema=_SCHEMA, logprobs=2, **bias), words),
        OptionCase(greedy(choice=_CHOICE)),
        OptionCase(greedy(stop=(stop, "\n"), include_stop_str_in_output=True, **late)),
        OptionCase(greedy(stop=(" ",), json_schema=_SCHEMA, logprobs=3)),
        OptionCase(
            greedy(stop_token_ids=(c,), include_stop_str_in_output=True, logprobs=1, **late)
        ),
        OptionCase(drawn(top_p=0.9)),
        OptionCase(drawn(logprobs=MAX_LOGPROBS)),
        OptionCase(drawn(top_k=20, min_p=0.02, allowed_token_ids=allowed)),
        OptionCase(drawn(stop_token_ids=(b, c), stop=(stop,), presence_penalty=-1.0)),
    ]


NUM_CASES = len(cases_of([0], "", (), 1))


def _ends(built: Built) -> list[int]:
    """Tokens that end an answer and have a logit."""
    return [token for token in built.stop_ids if 0 <= token < built.target.vocab_size]


def cases_for(
    built: Built, ids: Sequence[Sequence[int]], max_new_tokens: int, seed: int, grammars: bool
) -> list[OptionCase]:
    """One case a prompt, round the list; decodes all of them greedily first.

    Args:
        ids: the prompts.
        seed: of the first prompt; the next one's is one more.
        grammars: whether answers can follow one; if not, they are left out of the cases, as are
            stop strings where no tokenizer writes a text.
    """
    budgets, found = [min(max_new_tokens, NUM_SAID)] * len(ids), []
    without: dict[str, Any] = {} if grammars else dict.fromkeys(KINDS)
    if not grammars:
        without["choice"] = ()
    if built.tokenizer is None:
        without |= {"stop": (), "include_stop_str_in_output": False}
    for i, answer in enumerate(decode(built.loop, ids, budgets, built.stop_ids)):
        said = answer.output_ids
        text = built.tokenizer.decode(said) if built.tokenizer is not None else ""
        case = cases_of(said, text, _ends(built), max_new_tokens)[i % NUM_CASES]
        own = case.sampling
        seeds = {} if own.is_greedy else {"seed": replace(own, seed=seed).numbered(i).seed}
        found.append(case._replace(asked=replace(case.asked, **without, **seeds)))
    return found


def matcher_of(built: Built, case: OptionCase) -> Matcher | None:
    """The matcher of an answer that begins; None where it follows no grammar."""
    constraint = constraint_of(case.asked)
    if constraint is None:
        return None
    assert built.grammars is not None
    return built.grammars.matcher(constraint)


def judge_of(
    built: Built, case: OptionCase, prompt: list[int], output: list[int], tolerance_nats: float
) -> Judge:
    """Judges the tokens of an answer by what it was asked to be; on the host, in float32."""
    matcher = matcher_of(built, case)
    asked = case.sampling
    stop_ids = [*case.asked.stop_token_ids, *([] if case.asked.ignore_eos else _ends(built))]

    def judge(logits_TV: Tensor, positions: Sequence[int], emitted_T: Tensor) -> TokenScores:
        """The rows of one chunk, in order: the matcher follows them."""
        rows = []
        for z_V, p in zip(logits_TV.float().cpu(), positions, strict=True):
            said = output[: p + 1 - len(prompt)]
            z_V = adjusted(z_V, prompt, said, asked, stop_ids)
            if matcher is not None:
                matcher.advance(said[-1:])
                z_V = z_V.masked_fill(~matcher.allowed(len(z_V)), -math.inf)
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
        return TokenScores(regret_T.tolist(), best_T.tolist(), logprob_T.tolist())

    return judge


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
