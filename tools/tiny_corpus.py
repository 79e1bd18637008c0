"""Deterministic chat corpus of the tiny pair: arithmetic, JSON, Python, stories, questions.

The tiny target must be a real language model whose greedy text is sensible, and whose next words a
drafter can partly guess, with no download. Every exchange is made from a seeded `random.Random`.

Invariant: an answer is a function of its prompt alone, and it is right (sums are computed, JSON is
dumped by `json`, code is executed by `--check`). Otherwise the target would learn coin flips, and
its greedy text would sit on near ties that differ between two numerically equivalent engines.

The split is a hash of the prompt: a held-out prompt cannot occur in training.

    python tools/tiny_corpus.py --check
    python tools/tiny_corpus.py --show 3
    python tools/tiny_corpus.py --write-heldout tests/data/heldout.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from corpus_arithmetic import (
    math_chain,
    math_column,
    math_count,
    math_geometry,
    math_give,
    math_save,
    math_share,
    math_shop,
    math_table,
    math_times_as_many,
    math_travel,
)
from corpus_code import code_class, code_function, code_loop, code_module
from corpus_json import json_config, json_describe, json_order, json_person, json_stock, json_update
from corpus_questions import (
    qa_animals,
    qa_calendar,
    qa_classify,
    qa_countries,
    qa_hello,
    qa_recipe,
    qa_sort,
    qa_units,
)
from corpus_stories import story_day, story_dialog, story_letter, story_tale, story_week
from corpus_words import Pair, Rng

HELDOUT_SHARE = 24  # one prompt in HELDOUT_SHARE is held out


class Exchange(NamedTuple):
    """One user prompt and the assistant's answer (plain text, no chat markup)."""

    category: str
    prompt: str
    answer: str


CATEGORIES: dict[str, tuple[Callable[[Rng], Pair], ...]] = {
    "math": (math_shop, math_give, math_share, math_travel, math_save, math_chain, math_column,
             math_geometry, math_table, math_count, math_times_as_many),
    "json": (json_person, json_order, json_stock, json_config, json_update, json_describe),
    "code": (code_function, code_function, code_module, code_class, code_loop),
    "story": (story_tale, story_tale, story_day, story_letter, story_dialog, story_week),
    "qa": (qa_countries, qa_animals, qa_sort, qa_classify, qa_calendar, qa_recipe, qa_units,
           qa_hello),
}  # fmt: skip


def is_heldout(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out split: sha256(prompt) mod HELDOUT_SHARE == 0."""
    return int(hashlib.sha256(prompt.encode()).hexdigest()[:12], 16) % HELDOUT_SHARE == 0


def exchanges(seed: int, count: int, *, heldout: bool) -> Iterator[Exchange]:
    """Yield `count` exchanges of one split with distinct prompts, categories in turn.

    Args:
        seed: seeds `random.Random`; the same seed gives the same exchanges on every machine.
        count: number of exchanges.
        heldout: which split; the other one's prompts are skipped.
    """
    r = random.Random(f"graphengine-tiny-{seed}")
    seen: set[str] = set()
    names = list(CATEGORIES)
    while len(seen) < count:
        category = names[len(seen) % len(names)]
        while True:
            prompt, answer = r.choice(CATEGORIES[category])(r)
            if is_heldout(prompt) == heldout and prompt not in seen:
                break
        seen.add(prompt)
        yield Exchange(category, prompt, answer)


def heldout_set(count: int = 256) -> list[Exchange]:
    """The fixed held-out exchanges that acceptance is measured on (tests/data/heldout.jsonl)."""
    return list(exchanges(1_000_000, count, heldout=True))


def check(count: int) -> dict[str, int]:
    """Parse every JSON answer, compile every Python answer, and look for prompts with two answers.

    Raises:
        AssertionError: an answer is malformed, or one prompt has two different answers.
    """
    counts: dict[str, int] = {}
    answers: dict[str, str] = {}
    for shard in range(4):
        for ex in exchanges(shard, count // 4, heldout=False):
            assert answers.setdefault(ex.prompt, ex.answer) == ex.answer, ex
            assert ex.prompt.isascii() and ex.answer.isascii() and ex.answer == ex.answer.strip()
            for kind in ("json", "python"):
                if f"```{kind}\n" in ex.answer:
                    body = ex.answer.split(f"```{kind}\n")[1].split("\n```")[0]
                    _ = json.loads(body) if kind == "json" else compile(body, "answer", "exec")
                    block = f"{kind} blocks"
                    counts[block] = counts.get(block, 0) + 1
            counts[ex.category] = counts.get(ex.category, 0) + 1
    return counts


def main() -> None:
    """Command line: show samples or check the corpus."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--show", type=int, default=0, help="samples to print per category")
    parser.add_argument("--check", action="store_true", help="verify 40000 exchanges")
    parser.add_argument("--write-heldout", metavar="PATH", help="write the 256 held-out prompts")
    args = parser.parse_args()
    for ex in exchanges(0, args.show * len(CATEGORIES), heldout=True):
        print(f"[{ex.category}] {ex.prompt}\n---\n{ex.answer}\n")
    if args.write_heldout:
        with open(args.write_heldout, "w", encoding="ascii") as file:
            for ex in heldout_set():
                row = {"prompt": ex.prompt, "category": ex.category}
                file.write(json.dumps(row) + "\n")
    if args.check:
        print(json.dumps(check(40000)))


if __name__ == "__main__":
    main()
