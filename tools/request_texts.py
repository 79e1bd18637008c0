"""First tokens of new texts, each a chat's only turn: how long encoding takes, and all of it.

Part of tools/measure_requests.py. Benches of first tokens pass token ids; a user passes text.
"""

from __future__ import annotations

import statistics
import time

import torch
from request_parts import Measurement, Numbers

TEXT_TOKENS = (32, 128, 1024, 8192, 26_000)  # or so, of prompts
WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have".split()
)
MARGIN = 1.25  # of tokens over what is wanted, where a tokenizer knows few words


def texts(m: Measurement) -> Numbers:
    """By length: medians of fresh texts, one call before them uncounted. The prompt is encoded, and
    then passed as ids, since a model of random weights has no tokenizer of its own.

    Raises:
        ValueError: there is no tokenizer.
    """
    if m.tokenizer is None:
        raise ValueError("this model has no tokenizer; pass --tokenizer")
    numbers: Numbers = {}
    for wanted in TEXT_TOKENS:
        if wanted * MARGIN >= m.engine.config.max_model_len:
            break
        counts, encode_ms, first_ms = list[int](), list[float](), list[float]()
        for _ in range(1 + m.sizes["repeats"]):
            text = a_text(wanted * 12 // 13, m.generator)
            began = time.perf_counter()
            ids = m.tokenizer.encode_chat([{"role": "user", "content": text}])
            encoded = time.perf_counter()
            m.engine.generate([ids], max_new_tokens=1, ignore_eos=True)
            first_ms.append((time.perf_counter() - began) * 1e3)
            encode_ms.append((encoded - began) * 1e3)
            counts.append(len(ids))
        numbers[f"text_{wanted}"] = {
            "num_tokens": statistics.median(counts[1:]),
            "encode_ms": statistics.median(encode_ms[1:]),
            "first_token_ms": statistics.median(first_ms[1:]),
        }
    return numbers


def a_text(num_words: int, generator: torch.Generator) -> str:
    """Lines of a dozen words, no two texts alike."""
    drawn = torch.randint(0, len(WORDS), (num_words,), generator=generator).tolist()
    words = [WORDS[i] for i in drawn]
    return "\n".join(" ".join(words[i : i + 12]) for i in range(0, num_words, 12))
