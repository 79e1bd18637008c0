"""What the requests of a soak ask for: texts that begin like earlier ones, every option at random.

Why: a prefix hits, a page is evicted, a table is another request's only where texts share their
beginnings and neighbours want different things. Everything comes from the given generator.
Grammars are of the bundled tokenizer, whose first tokens are "!" and the quotation mark.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Sequence
from typing import Any

from graphengine.config.constraint import Constraint
from graphengine.decode.grammar import Grammars
from graphengine.decode.sampling import Sampling

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "sizes": {"type": "array", "items": {"enum": [1, 2]}},
    },
    "required": ["name", "sizes"],
}
CONSTRAINTS = (
    Constraint("regex", '[!"]{3,60}'),  # drafts are right for a while
    Constraint("regex", '([!"]{1,9} and so on, ){1,9}end'),  # and then tokens are forced
    Constraint("regex", "[^!]*"),
    Constraint("choice", '["!", "!!!!!!!!!!!!", "one of several texts", "one of them"]'),
    Constraint("json_schema", json.dumps(_SCHEMA)),
    Constraint("json_schema", '{"type": "array", "items": {"type": "string", "maxLength": 9}}'),
    Constraint("grammar", 'start: item (", " item)*\nitem: /[!a-z]{2,30}/ | "(" start ")"'),
)
LONGEST_ANSWER, LONGEST_PROMPT, LONGEST_NEWS = 85, 130, 40


def a_prompt(rng: random.Random, texts: Sequence[Sequence[int]], vocab: int) -> list[int]:
    """A new text, the next turn behind an earlier one, or one that leaves it somewhere."""
    news = [rng.randrange(vocab) for _ in range(rng.randint(1, LONGEST_NEWS))]
    kind = rng.random()
    if not texts or kind < 0.2:
        return news
    earlier = rng.choice(texts)
    end = len(earlier) if kind < 0.6 else rng.randint(1, len(earlier))
    again = list(earlier[: min(end, LONGEST_PROMPT - len(news))])
    return again if rng.random() < 0.1 else again + news


def a_request(
    rng: random.Random, vocab: int, likely: int, grammars: Grammars, ends: Collection[int]
) -> dict[str, Any]:
    """Arguments of `DecodeLoop.submit` behind the prompt; `likely` tokens are said more often.

    Args:
        ends: tokens that end an answer behind a grammar.
    """

    def tokens(count: int) -> list[int]:
        return [rng.randrange(likely if rng.random() < 0.7 else vocab) for _ in range(count)]

    temperature = rng.choice([0.0, 0.0, 0.6, 1.0, 1.7])
    sampling: dict[str, Any] = {"temperature": temperature, "seed": rng.getrandbits(63)}
    if temperature and rng.random() < 0.6:
        sampling |= {
            "top_p": rng.choice([1.0, 0.9, 0.5]),
            "top_k": rng.choice([0, 2, 20]),
            "min_p": rng.choice([0.0, 0.05, 0.3]),
        }
    if rng.random() < 0.3:  # drafts are right for a while where one token is favoured
        sampling["logit_bias"] = {rng.randrange(likely): rng.choice([0.5, 1.0, 2.0])}
    elif rng.random() < 0.5:
        words = {tuple(tokens(rng.randint(1, 4))) for _ in range(rng.randrange(4))}
        sampling |= {
            "repetition_penalty": rng.choice([1.0, 0.8, 1.3]),
            "presence_penalty": rng.choice([0.0, -0.5, 1.0]),
            "frequency_penalty": rng.choice([0.0, -0.2, 0.4]),
            "logit_bias": rng.choice([None, dict.fromkeys(tokens(3), rng.choice([-100.0, 1.5]))]),
            "bad_words": tuple(sorted(words)),
        }
    stop_ids = tokens(rng.randint(1, 2)) if rng.random() < 0.3 else []
    count = rng.randint(1, LONGEST_ANSWER)
    constraint = rng.choice(CONSTRAINTS) if rng.random() < 0.25 else None
    if constraint is not None:
        stop_ids += ends
    elif stop_ids and rng.random() < 0.7:
        sampling["min_tokens"] = rng.randint(0, count)
    return {
        "max_new_tokens": count,
        "stop_ids": stop_ids,
        "sampling": Sampling(**sampling),
        "matcher": constraint and grammars.matcher(constraint),
        "logprobs": rng.choice([None, None, None, 0, 3]),
        "prompt_logprobs": rng.choice([None] * 9 + [2]),
    }
