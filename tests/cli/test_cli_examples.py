"""What help and README show is answered, and answered rightly, by the bundled pair."""

import re
import shlex
from itertools import pairwise

import pytest
from click.testing import CliRunner

from graphengine.api import Engine
from graphengine.checkpoints.hub import TINY_DRAFT, TINY_TARGET
from graphengine.cli.main import main
from tests.support.command_line import ROOT
from tools.bootstrap import DEFAULT_PROMPT

STEPS_OF_6 = ", ".join(map(str, range(20, 147, 6)))
RIGHT = {
    DEFAULT_PROMPT: "Answer: 450 km",  # 60 * 5 + 30 * 5
    "Count from 20 to 146 in steps of 6.": f"{STEPS_OF_6}.\nThat is 22 numbers.",
    "Count from 5 to 50 in steps of 5.": "5, 10, 15, 20, 25, 30, 35, 40, 45, 50.\n"
    "That is 10 numbers.",
    "Compare the bee and the duck.": "The bee eats nectar, and the duck eats water plants.",
}
"""Prompt -> what its answer holds; a new example needs an entry, which somebody has checked."""


def prompts_of(text: str) -> set[str]:
    """Prompts of commands and of Python in a text."""
    found = set(re.findall(r'\.(?:stream|generate)\("([^"]+)"', text))
    for line in text.splitlines():
        if "graphengine run" in line and "`" not in line:
            words = shlex.split(line.strip().strip("`"), comments=True)
            found |= {b for a, b in pairwise(words) if a in ("--prompt", "echo")}
    return found


def test_examples_are_answered_rightly() -> None:
    """Bug: the first sum that a newcomer is shown is wrong: "Tom has 3 apples and buys 4 more"."""
    helps = [CliRunner().invoke(main, [name, "--help"]).stdout for name in main.commands]
    texts = [*helps, *((ROOT / name).read_text() for name in ("README.md", "graphengine/api.py"))]
    shown = set().union({DEFAULT_PROMPT}, *map(prompts_of, texts))
    assert len(shown) >= 3
    assert shown - set(RIGHT) == set()
    with Engine.from_pretrained(TINY_TARGET, TINY_DRAFT, buckets=(1,)) as engine:
        for prompt in sorted(shown):
            assert RIGHT[prompt] in engine.generate(prompt)[0].text


@pytest.mark.parametrize("bad", ['graphengine run --prompt "1 + 1?"', 'engine.stream("1 + 1?")'])
def test_prompts_are_found(bad: str) -> None:
    """Bug: the reader of examples finds none, so that no wrong one is seen."""
    assert prompts_of(f"text\n  {bad}  # a note\n") == {"1 + 1?"}
