"""Asserts only look: `python -O` leaves them out, with all that they would have done."""

import ast

import pytest

from tests.house.test_layering import FILES

LOOKS = set("all any dim is_contiguous isinstance issubclass len numel set type values".split())


def doings(source: str) -> list[str]:
    """What asserts call or set that may change something."""
    asserts = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]
    found = [part for each in asserts for part in ast.walk(each.test)]
    called = [ast.unparse(part.func) for part in found if isinstance(part, ast.Call)]
    named = [part.target.id for part in found if isinstance(part, ast.NamedExpr)]
    return [name for name in [*called, *named] if name.split(".")[-1] not in LOOKS]


@pytest.mark.parametrize("module", sorted(FILES), ids=lambda name: name or "__init__")
def test_asserts_only_look(module: str) -> None:
    """Bug: under `python -O` a drafter that helps little ends in an AttributeError: what a plain
    step is timed for was brought up to date by an assert."""
    assert doings(FILES[module].read_text()) == []


def test_an_assert_that_does_something() -> None:
    """Bug: none is found, for nothing is looked at."""
    assert doings("assert len(a) and a.pop() == (b := 2)") == ["a.pop", "b"]
