"""What an answer's text must be, as a user asks for it: a JSON schema, a regular expression, one of
some texts, or a grammar in Lark's notation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

KINDS = ("json_schema", "regex", "choice", "grammar")


class Constraint(NamedTuple):
    """One of `KINDS` and its text: of a choice a list in JSON."""

    kind: str
    text: str


def constraint_of(asked: Any) -> Constraint | None:
    """Of `SamplingParams`, which has one at most.

    Raises:
        ValueError: what cannot go together, with the remedy.
    """
    given = {kind: value for kind in KINDS if (value := getattr(asked, kind))}
    if not given:
        return None
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are given; an answer follows one of them")
    ((kind, value),) = given.items()
    for name, remedy in (
        ("ignore_eos", "leave it out"),
        ("min_tokens", "ask for it in the grammar"),
    ):
        if getattr(asked, name):
            raise ValueError(
                f"{name} is {getattr(asked, name)!r}, but behind a complete answer {kind} allows "
                f"its end alone; {remedy}"
            )
    return Constraint(kind, value if isinstance(value, str) else json.dumps(value))


def parse_schema(name: str, value: Any) -> str:
    """A JSON schema as a mapping or as text, as text. Raises: ValueError."""
    try:
        schema = value if isinstance(value, Mapping) else json.loads(value)
        if isinstance(schema, Mapping):
            return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON ({error}); pass a schema as an object") from error
    raise ValueError(f"{name} is {value!r}; expected a JSON schema, which is an object")


def parse_text(name: str, value: Any) -> str:
    """A text that is not empty. Raises: ValueError."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is {value!r}; expected a text that is not empty")
    return value
