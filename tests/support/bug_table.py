"""Tables of bugs that others met: a row names the tests that catch it, which must exist."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]


class Row:
    """One bug: what goes wrong, the tests (`file::function`), and why not where there is none."""

    def __init__(self, bug: str, *tests: str, why_not: str = "") -> None:
        self.bug, self.tests, self.why_not = bug, tests, why_not


@functools.cache
def functions(file: str) -> set[str]:
    """Names of the test functions of a file in any room, its own and those that it imports to run
    them over other fixtures. Args: file: with as many folders as tell it from others."""
    (path,) = HERE.rglob(file)
    tree = list(ast.walk(ast.parse(path.read_text())))
    imported = [node for node in tree if isinstance(node, ast.ImportFrom)]
    return {node.name for node in tree if isinstance(node, ast.FunctionDef)} | {
        alias.name for node in imported for alias in node.names
    }


def check_row(name: str, row: Row) -> None:
    """Every test that a row names exists."""
    for test in row.tests:
        file, _, function = test.partition("::")
        assert function in functions(file), f"{name} ({row.bug}): no {test}"
