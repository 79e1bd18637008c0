"""What commands share: options made from their declarations, places to write to, deliveries.

Each option is a decorator, as click's own are; a command stacks those that it takes. Nothing here
imports torch.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from graphengine.config.options import Declaration, Options, declarations

Option = Callable[[Any], Any]


class Refusal(click.ClickException):
    """An input that cannot work; the message carries the value and the remedy."""

    exit_code = 2


def _group(*options: Option) -> Option:
    """One decorator for several options, in the order in which help shows them."""

    def decorate(command: Any) -> Any:
        return functools.reduce(lambda inner, option: option(inner), reversed(options), command)

    return decorate


class IntList(click.ParamType):
    """`1,8,16` -> (1, 8, 16), as typed."""

    name = "N,N,.."

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            self.fail(f"{value!r}: pass integers from 1 up, such as 1,8,16", param, ctx)
        return tuple(int(part) for part in parts)


class DistinctInts(IntList):
    """The same, each once."""

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        return tuple(dict.fromkeys(super().convert(value, param, ctx)))


class Declared(click.ParamType):
    """A number, in the range of its declaration."""

    def __init__(self, declared: Declaration) -> None:
        self._declared = declared
        self._number = click.INT if int in declared.kinds else click.FLOAT
        self.name = declared.metavar or self._number.name

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if self._declared.parse is None:
            value = self._number.convert(value, param, ctx)
        try:
            return self._declared.checked(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Rate(click.FloatRange):
    """A number from 0 up; neither nan, which is in every range, nor inf, which JSON lacks."""

    def __init__(self) -> None:
        super().__init__(min=0)

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value}: pass a finite number", param, ctx)
        return found


class Default(NamedTuple):
    """A command's own default of an option, and what that amounts to."""

    value: Any
    auto: str


def _option(declared: Declaration, at: Default) -> Option:
    """A declared option of a command with its own default there."""
    default = at.value
    names, kind = declared.flag, None
    extra: dict[str, Any] = {}
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    if bool in declared.kinds:
        names += "" if default is False else f"/--no-{declared.flag[2:]}"
        shown = "" if default is False else "on"
        extra = {"is_flag": True}
    elif declared.choices:
        kind = click.Choice(declared.choices)
    elif tuple in declared.kinds:
        kind = DistinctInts()  # in the user's order, which is that of --num-speculative-tokens
    else:
        is_list = any(issubclass(k, Sequence) for k in declared.kinds if isinstance(k, type))
        kind = IntList() if is_list else Declared(declared)
    shown = at.auto or shown
    text = f"{declared.text}  [default: {shown}]" if shown != "" else declared.text
    return click.option(names, declared.name, type=kind, default=default, help=text, **extra)


def declared(command: str, kind: type = Options, **defaults: Any) -> Option:
    """The options of a kind that a command offers.

    Args:
        defaults: what is another default there, a value or a `Default`.
    """
    options = []
    for name, found in declarations(kind).items():
        if command in found.commands:
            default = defaults.pop(name, Default(found.default, found.auto))
            default = default if isinstance(default, Default) else Default(default, "")
            options.append(_option(found, default))
    assert not defaults, defaults
    return _group(*options)


def taken(options: dict[str, Any], kind: type = Options) -> dict[str, Any]:
    """Those of a kind, by name. Mutates: options, which lose them."""
    return {name: options.pop(name) for name in declarations(kind) if name in options}


MODEL = click.argument("model", required=False)
DRAFT = click.option(
    "--draft",
    metavar="MODEL|ngram|none",
    help="Drafter of MODEL: a hub id, a directory or a preset; ngram looks drafts up in the text "
    "so far, for any target; none decodes plainly.  "
    "[default: the bundled drafter for the bundled model, else none]",
)
PRESET = Default(None, "dummy for a preset, else the checkpoint's weights")
"""Of load_format, where random weights are as good."""
PROMPT_FILE = functools.partial(
    click.option, "--prompt-file", type=click.Path(path_type=Path), metavar="FILE.jsonl"
)
PROMPT_SEED = click.option(
    "--seed",
    type=click.IntRange(-(1 << 63), (1 << 64) - 1),  # torch.Generator's
    default=0,
    show_default=True,
    help="Of the random prompts.",
)
RESULT_FILE = _group(
    click.option(
        "--output-json",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Write the result file here.",
    ),
    click.option(
        "--commit", metavar="SHA", help="Commit to record where the checkout has no history."
    ),
)


def as_json(text: str) -> Option:
    """`--json`."""
    return click.option("--json", "as_json", is_flag=True, help=text)


def check_place(option: str, file: Path | None, *, makes_folders: bool = False) -> None:
    """Refuses a file that cannot be written, before minutes are spent on what goes into it.

    Raises:
        ValueError: with the option's name.
    """
    if file is None:
        return
    folder = file.absolute().parent
    if makes_folders:
        folder = next(path for path in (folder, *folder.parents) if path.exists())
    if not folder.is_dir():
        raise ValueError(f"{option} {file}: cannot be written (no such folder); make it first")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise ValueError(f"{option} {file}: cannot be written (no permission); choose another path")


def deliver(
    options: Mapping[str, Any],
    document: Mapping[str, Any],
    files: Mapping[Path | None, Callable[[Path], object]],
) -> None:
    """Prints the JSON where it was asked for, then writes each file, whatever became of the others.

    Raises:
        ClickException: naming the files that could not be written.
    """
    if options["as_json"]:
        click.echo(json.dumps(document))
    failed = []
    for path, write in files.items():
        if path is None:
            continue
        try:
            write(path)
            click.echo(f"wrote {path}", err=True)
        except (OSError, ValueError) as error:
            text = str(error)
            failed.append(text if str(path) in text else f"{path}: {text}")
    if failed:
        raise click.ClickException("; ".join(failed))


def out_of_memory(error: Exception) -> str | None:
    """What was lacking, for a message; None for any other error."""
    # torch's own type exists for CUDA alone; on the CPU it raises a bare RuntimeError.
    texts = ("out of memory", "not enough memory", "can't allocate memory")
    if not isinstance(error, MemoryError) and not any(text in str(error) for text in texts):
        return None
    return f"out of memory ({str(error).strip().partition(chr(10))[0] or 'on the host'})"


def refuses(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a command: a ValueError is a usage error."""

    @functools.wraps(command)
    def outer(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except ValueError as error:
            raise click.UsageError(str(error)) from error

    return outer
