"""What help and README show is answered, and answered rightly, by the bundled pair."""

import json
import re
import shlex
from itertools import pairwise
from typing import Any

import pytest
from click.testing import CliRunner

from graphengine.api import Engine
from graphengine.checkpoints.hub import TINY_TARGET, TOY_PROMPTS
from graphengine.checkpoints.tokenizer import Tokenizer
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
    "Write a note: Emma thanks David for a green key.": "Thank you very much for the green key.",
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
    shown = set().union({DEFAULT_PROMPT}, TOY_PROMPTS, *map(prompts_of, texts))
    assert len(shown) >= 5
    assert shown - set(RIGHT) == set()
    for name, prompts in (("tiny", sorted(shown)), ("tiny-hybrid", list(TOY_PROMPTS))):
        with Engine.from_pretrained(name, buckets=(8,)) as engine:
            for prompt, result in zip(prompts, engine.generate(prompts), strict=True):
                assert RIGHT[prompt] in result.text


@pytest.mark.slow
def test_a_request_as_users_send_it() -> None:
    """Bug: a flag of the command does not reach the engine, or its JSON lacks what was asked."""
    (count,) = [prompt for prompt in RIGHT if "146" in prompt]
    args = ["run", "--prompt", count, "--json", "--bucket", "1"]

    def run(*more: str) -> dict[str, Any]:
        done = CliRunner().invoke(main, [*args, *more])
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        return found | found["results"][0]

    free = run()
    assert free["finish_reason"] == "stop" and free["stop_reason"] is None
    assert free["logprobs"] is free["prompt_logprobs"] is None
    found = run("--stop", "never", "--stop", ", 50", "--logprobs", "2", "--prompt-logprobs", "0")
    assert found["text"] == "20, 26, 32, 38, 44"
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", ", 50")
    assert found["args"]["stop"] == ["never", ", 50"]
    assert len(found["logprobs"]) == len(found["token_ids"])
    for token, entry in zip(found["token_ids"], found["logprobs"], strict=True):
        assert next(iter(entry)) == str(token) and 2 <= len(entry) <= 3
    assert found["prompt_logprobs"][0] is None and len(found["prompt_logprobs"][1]) == 1
    kept = run(
        "--stop", ", 50", "--include-stop-str-in-output", "--min-tokens", "2", "--logprobs", "0"
    )
    assert kept["text"] == "20, 26, 32, 38, 44, 50"
    assert [list(entry) for entry in kept["logprobs"]] == [[str(t)] for t in kept["token_ids"]]
    token = free["token_ids"][3]
    ended = run("--stop-token-ids", str(token))
    assert ended["stop_reason"] == token and ended["token_ids"] == free["token_ids"][:4]
    (begin,) = Tokenizer(TINY_TARGET).encode("<|im_start|>")
    special = ["--logit-bias", f"{begin}=100", "--max-new-tokens", "2"]
    assert run(*special)["text"] == ""
    assert run(*special, "--no-skip-special-tokens")["text"] == "<|im_start|>" * 2
    thinking = run("--chat-template-kwargs", '{"enable_thinking": true}')
    assert thinking["args"]["chat_template_kwargs"] == {"enable_thinking": True}
    for flags in (
        ["--logit-bias", f"{token}=-100"],
        ["--bad-words", "26"],
        ["--repetition-penalty", "2"],
    ):
        assert run(*flags, "--max-new-tokens", "40")["token_ids"] != free["token_ids"][:40]
    drawn = ["--temperature", "4", "--seed", "1", "--max-new-tokens", "40"]
    hot = run(*drawn)["token_ids"]
    assert hot != free["token_ids"][:40]
    for flags in (["--presence-penalty", "2"], ["--frequency-penalty", "2"]):
        assert run(*drawn, *flags)["token_ids"] != hot
    assert run(*drawn, "--min-p", "0.99")["token_ids"] == free["token_ids"][:40]
    schema = '{"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3}'
    assert len(json.loads(run("--json-schema", schema)["text"])) <= 3
    assert re.fullmatch("[a-c]{2}7", run("--regex", "[a-c]{2}7", *drawn)["text"])
    assert run("--choice", "a bee", "--choice", "a duck")["text"] in ("a bee", "a duck")
    assert set(run("--grammar", 'start: "x" ("y" | "z")')["text"][1:]) < {"y", "z"}


@pytest.mark.parametrize("bad", ['graphengine run --prompt "1 + 1?"', 'engine.stream("1 + 1?")'])
def test_prompts_are_found(bad: str) -> None:
    """Bug: the reader of examples finds none, so that no wrong one is seen."""
    assert prompts_of(f"text\n  {bad}  # a note\n") == {"1 + 1?"}
