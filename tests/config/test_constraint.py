"""What an answer's text must be: what cannot go together is refused, and what would do is told."""

from __future__ import annotations

from typing import Any

import pytest

from graphengine.config.constraint import Constraint, constraint_of
from graphengine.config.options import SamplingParams


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, None),
        ({"json_schema": {"type": "null"}}, Constraint("json_schema", '{"type": "null"}')),
        ({"regex": "a+"}, Constraint("regex", "a+")),
        ({"choice": ("yes", 'n"o')}, Constraint("choice", '["yes", "n\\"o"]')),
        ({"grammar": "start: A"}, Constraint("grammar", "start: A")),
    ],
)
def test_what_is_asked_for(asked: dict[str, Any], found: Constraint | None) -> None:
    """Bug: a constraint is taken for one of another kind, or a list for its text in Python."""
    assert constraint_of(SamplingParams(**asked)) == found


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (
            {"regex": "a", "choice": ("b",)},
            "regex and choice are given; an answer follows one of them",
        ),
        (
            {"regex": "a", "ignore_eos": True},
            "ignore_eos is True, but behind a complete answer regex allows its end alone; leave it "
            "out",
        ),
        (
            {"choice": ("a",), "min_tokens": 2},
            "min_tokens is 2, but behind a complete answer choice allows its end alone; ask for it "
            "in the grammar",
        ),
        (
            {"json_schema": "[1]"},
            "json_schema is '[1]'; expected a JSON schema, which is an object",
        ),
        ({"regex": ""}, "regex is ''; expected a text that is not empty"),
        ({"grammar": 3}, "grammar is 3; expected a text that is not empty"),
    ],
)
def test_what_cannot_be_asked_for(asked: dict[str, Any], told: str) -> None:
    """Bug: a refusal names what nobody has given, or the remedy of another option."""
    with pytest.raises(ValueError, match=" ") as refused:
        SamplingParams(**asked)
    assert str(refused.value) == told
