"""tools/tiny_corpus.py: what the tiny pair has learnt, and what it is measured on."""

from __future__ import annotations

import calendar
import json
import random
import re
from pathlib import Path

from tools import corpus_questions, tiny_corpus

HELDOUT = Path(__file__).parents[1] / "data" / "heldout.jsonl"
NUM_EXCHANGES = 3000  # some ten of them come up again


def test_the_held_out_prompts_are_those_of_the_tool() -> None:
    """Bug: another word in a list, and the prompts that acceptance is measured on are no longer
    those that training leaves out."""
    stored = [json.loads(line) for line in HELDOUT.read_text().splitlines()]
    made = tiny_corpus.heldout_set()
    assert stored == [{"prompt": ex.prompt, "category": ex.category} for ex in made]
    assert all(tiny_corpus.is_heldout(ex.prompt) for ex in made)


def test_no_prompt_comes_twice() -> None:
    """Bug: what a few words can say is learnt over and over, and there are more exchanges than
    were asked for."""
    made = list(tiny_corpus.exchanges(0, NUM_EXCHANGES, heldout=False))
    assert len(made) == NUM_EXCHANGES == len({ex.prompt for ex in made})
    assert not any(tiny_corpus.is_heldout(ex.prompt) for ex in made)


def test_weeks_and_years_go_round() -> None:
    """Bug: behind Sunday or December comes nothing, or what is wrong."""
    days, months = list(calendar.day_name), list(calendar.month_name)[1:]
    rng, seen = random.Random(0), set[str]()
    for _ in range(300):
        prompt, answer = corpus_questions.qa_calendar(rng)
        found = re.search(r"on a (\w+) in (\w+)\. Which day is it (\d) days", prompt)
        assert found is not None
        day, month, num_days = found.groups()
        later = days[(days.index(day) + int(num_days)) % 7]
        after = months[(months.index(month) + 1) % 12]
        assert answer.endswith(f"it is {later}. The month after {month} is {after}.")
        seen |= {day, month}
    assert seen == {*days, *months}
