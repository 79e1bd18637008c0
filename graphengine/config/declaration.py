"""What an option is: a field of a frozen dataclass with its declaration, and who reads that.

Who reads it: the command line (its flags, choices, checks and help), the Python API (signature,
help, refusal of unknown names), doctor, the start (`startup.options` decides what was left open)
and the JSON of results. Why: an option that is written down in seven places differs in one of them.

No torch here: `--help` answers at once.
"""

from __future__ import annotations

import difflib
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from math import inf
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

COMMANDS = frozenset("run bench profile graphs doctor compile verify".split())
_Made = TypeVar("_Made")
_KEYWORD, _INDENT = inspect.Parameter.KEYWORD_ONLY, " " * 4


def _kinds(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) in (Union, UnionType, Literal):
        return tuple(kind for part in get_args(hint) for kind in _kinds(part))
    return (get_origin(hint) or hint,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """One option. `kinds`: types that a value may have, a Literal's values among them; `choices`:
    its values, "auto" first, where they are words.

    `auto` tells people what the default comes to where that is decided later, or "none" where the
    default is None or empty. Allowed are `low` to `high`, both included, and what is greater than
    `above`. `of_drafter`: it means nothing without one. `commands` offer it. `parse` makes the
    value of what a user writes. `repeated`: a flag gives one of several values.
    """

    name: str
    default: Any
    hint: Any
    kinds: tuple[Any, ...]
    choices: tuple[str, ...]
    text: str
    auto: str = ""
    low: float = -inf
    above: float = -inf
    high: float = inf
    flag: str = ""
    metavar: str | None = None
    of_drafter: bool = False
    repeated: bool = False
    commands: frozenset[str] = COMMANDS
    parse: Callable[[Any], Any] | None = None

    def checked(self, value: Any) -> Any:
        """The value, as this option keeps it. Raises: ValueError: with the value and a remedy."""
        kinds = self.kinds
        if value is None and type(None) in kinds:
            return value
        if self.parse is not None:
            return self.parse(value)
        if self.choices:
            if value in self.choices:
                return value
            raise self._refusal(value, f"one of {', '.join(self.choices)}")
        if bool in kinds:
            if isinstance(value, bool):
                return value
            raise self._refusal(value, "True or False")
        if Sequence in kinds:  # looked at together with the buckets and the drafter
            return value
        is_int = int in kinds
        if isinstance(value, Integral if is_int else Real) and not isinstance(value, bool):
            with suppress(OverflowError):  # an integer past any float
                given: Any = value
                number = int(given) if is_int else float(given)
                if self.low <= number <= self.high and number > self.above:  # NaN is in no range
                    return number
        what = "an integer" if is_int else "a number"
        if self.high < inf:
            low = f"{self.low:g} <=" if self.above == -inf else f"{self.above:g} <"
            what += f" {low} x <= {self.high:g}"
        elif self.low > -inf:
            what += f" from {self.low:g} up"
        raise self._refusal(value, what)

    def _refusal(self, value: Any, expected: str) -> ValueError:
        hint = f" (default: {self.auto})" if self.auto else ""
        return ValueError(f"{self.name} is {value!r}; expected {expected}{hint}")

    def arguments(self, value: Any) -> list[str]:
        """The value as a command line has it."""
        if value is None:
            return []
        if isinstance(value, bool):
            return [self.flag if value else f"--no-{self.flag[2:]}"]
        items = value if isinstance(value, tuple) else (value,)
        return [self.flag, ",".join(map(str, items))]


def option(default: Any, text: str, **rest: Any) -> Any:
    """A field with its declaration."""
    return field(default=default, metadata={"declaration": (text, rest)})


@cache
def declarations(cls: type) -> Mapping[str, Declaration]:
    """The options of a class by their name in Python."""
    hints, found = get_type_hints(cls), {}
    for each in fields(cls):
        if each.default is MISSING or "declaration" not in each.metadata:
            continue
        text, rest = each.metadata["declaration"]
        none = "none" if each.default in (None, ()) else ""
        rest = {"flag": f"--{each.name.replace('_', '-')}", "auto": none} | rest
        hint = hints[each.name]
        words = [kind for kind in _kinds(hint) if isinstance(kind, str)]
        found[each.name] = Declaration(
            name=each.name,
            default=each.default,
            hint=hint,
            kinds=_kinds(hint),
            choices=tuple(sorted(words, key=lambda word: word != "auto")),
            text=text,
            **rest,
        )
    return found


class Checked:
    """Checks options when the value is made, but for those that have their defaults: a request
    sets few, and its first token waits for the checks."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, declared in declarations(type(self)).items():
            value = getattr(self, name)
            if value is not declared.default:
                object.__setattr__(self, name, declared.checked(value))


def made(cls: type[_Made], given: Mapping[str, Any]) -> _Made:
    """A value of `cls` from options by name.

    Raises:
        TypeError: an unknown name.
        ValueError: a value out of its range.
    """
    known = declarations(cls)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise TypeError(f"{name} is no option; {remedy}")
    return cls(**given)


def spelled_out(cls: type) -> Callable[[Callable[..., _Made]], Callable[..., _Made]]:
    """Decorates a function that takes a class's options as `**keywords`: its signature and help
    show each of them; the line {options} of its docstring is where."""

    def decorate(function: Any) -> Any:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]
        lines = []
        for name, declared in declarations(cls).items():
            own.append(
                inspect.Parameter(
                    name, _KEYWORD, default=declared.default, annotation=declared.hint
                )
            )
            text = f"{name}: {declared.text} Default: {declared.auto or repr(declared.default)}."
            lines += textwrap.wrap(text, 88, initial_indent=_INDENT, subsequent_indent=_INDENT * 2)
        function.__signature__ = signature.replace(parameters=own)
        if function.__doc__ is not None:  # python -OO leaves them out
            text = inspect.cleandoc(function.__doc__)  # which Python 3.13 has done already
            function.__doc__ = text.replace(f"{_INDENT}{{options}}", "\n".join(lines))
        return function

    return decorate
