"""What a check has to say: a name, a value, how bad it is, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

Level = Literal["ok", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = get_args(Level)
MAX_CHARS = 400  # of a row


class Finding(NamedTuple):
    """One line of a report.

    `name`: what was looked at, `part.property` (`draft.block_size`). `value`: what was found.
    `remedy`: what the user can do; empty where there is nothing to do.
    """

    name: str
    value: str
    level: Level
    remedy: str = ""


def ok(name: str, value: str) -> Finding:
    """Looked at, and right."""
    return Finding(name, value, "ok")


def info(name: str, value: str, remedy: str = "") -> Finding:
    """Neither right nor wrong, but good to know."""
    return Finding(name, value, "info", remedy)


def warning(name: str, value: str, remedy: str) -> Finding:
    """Runs, but slower or with less acceptance than it could."""
    return Finding(name, value, "warning", remedy)


def error(name: str, value: str, remedy: str) -> Finding:
    """Will be refused, or would give wrong drafts."""
    return Finding(name, value, "error", remedy)


def guarded(name: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """The findings; an exception in a check becomes an error finding, its last one."""
    try:
        yield from findings
    except Exception as problem:  # whatever a damaged file provokes
        value = f"cannot be checked: {type(problem).__name__}: {one_line(problem)}"
        remedy = "a value in the files is not what it should be; compare them with the published "
        yield error(name, value, remedy + "ones")


def reason(problem: Exception) -> str:
    """Why a file is refused: our messages name key, value and remedy, others need their type."""
    kind = "" if isinstance(problem, ValueError) else f"{type(problem).__name__}: "
    return kind + one_line(problem)


def one_line(text: object) -> str:
    """Text fit for one row of a report: printable, no line breaks, not too long."""
    flat = " ".join(str(text).split())
    flat = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in flat)
    return flat if len(flat) <= MAX_CHARS else flat[: MAX_CHARS - 3] + "..."
