"""What commands share: options made from their declarations, places to write to, deliveries.

Each option is a decorator, as click's own are; a command stacks those that it takes. Nothing here
imports torch.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from graphengine.config.declaration import Declaration, declarations
from graphengine.config.options import Options

Option = Callable[[Any], Any]


def _group(*options: Option) -> Option:
    """One decorator for several options, in the order in which help shows them."""

    def decorate(command: Any) -> Any:
        return functools.reduce(lambda inner, option: option(inner), reversed(options), command)

    return decorate


class IntList(click.ParamType):
    """`1,8,16` -> (1, 8, 16), as typed; with `distinct` each number once."""

    name = "N,N,.."

    def __init__(self, distinct: bool = False) -> None:
        self._distinct = distinct

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        try:
            numbers = tuple(int(part) if part.isdecimal() else 0 for part in parts)
        except ValueError as error:  # of more digits than Python reads
            self.fail(f"a number is too large ({error}); pass integers such as 1,8,16", param, ctx)
        if min(numbers) < 1:
            self.fail(f"{value!r}: pass integers from 1 up, such as 1,8,16", param, ctx)
        return tuple(dict.fromkeys(numbers)) if self._distinct else numbers


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


class Finite(click.FloatRange):
    """A number in a range; neither nan, which is in every one, nor inf, which JSON lacks."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value}: pass a finite number", param, ctx)
        return found


class Default(NamedTuple):
    """A command's own default of an option, and what help says of it ("": the value)."""

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
    elif declared.repeated:
        kind, extra = click.STRING, {"multiple": True, "metavar": declared.metavar}
    elif declared.parse is not None and declared.metavar:
        kind = Declared(declared)
        if declared.metavar.endswith(",.."):  # of several click would keep the last
            joined = functools.partial(_joined, kind, default)
            extra = {"multiple": True, "metavar": declared.metavar, "callback": joined}
            kind, default = click.STRING, None
    elif declared.choices:
        kind = click.Choice(declared.choices)
    else:
        is_list = any(isinstance(k, type) and issubclass(k, Sequence) for k in declared.kinds)
        # Buckets stay in the user's order, which is that of --num-speculative-tokens.
        kind = IntList(distinct=tuple in declared.kinds) if is_list else Declared(declared)
    shown = at.auto or shown
    text = f"{declared.text}  [default: {shown}]" if shown != "" else declared.text
    return click.option(names, declared.name, type=kind, default=default, help=text, **extra)


def _joined(
    kind: Declared, default: Any, ctx: click.Context, param: click.Parameter, value: Sequence[str]
) -> Any:
    """One value of an option that was given once, or several times."""
    return kind.convert(",".join(value), param, ctx) if value else default


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
    """The options of a kind, by name. Mutates: options, which lose them."""
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
"""The default of load_format in commands for which random weights do as well."""


def path(*names: str, text: str, metavar: str = "FILE", **kind: Any) -> Option:
    """An option that is a `Path`, of a kind as `click.Path` has them."""
    return click.option(*names, type=click.Path(path_type=Path, **kind), metavar=metavar, help=text)


def count(flag: str, default: int | None, text: str | None = None, low: int = 1) -> Option:
    """An option that is an integer from `low` up."""
    kind = click.IntRange(min=low)
    return click.option(flag, type=kind, default=default, show_default=True, help=text)


def as_json(text: str) -> Option:
    """`--json`, refused where stdout is closed."""

    def check(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
        if value and sys.stdout is None:
            raise click.BadParameter("stdout is closed; redirect it to a file", ctx, param)
        return value

    return click.option("--json", "as_json", is_flag=True, callback=check, help=text)


def prompt_file(text: str) -> Option:
    """`--prompt-file`, refused where it is given twice: click would drop the first file."""

    def only(ctx: click.Context, param: click.Parameter, value: tuple[Path, ...]) -> Path | None:
        if len(value) > 1:
            raise click.BadParameter("passed twice; put all prompts into one file", ctx, param)
        return value[0] if value else None

    how: dict[str, Any] = {"multiple": True, "callback": only, "metavar": "FILE.jsonl"}
    return click.option("--prompt-file", type=click.Path(path_type=Path), help=text, **how)


PLOT = functools.partial(path, "--plot", metavar="FILE.svg|png", dir_okay=False)
PROMPT_SEED = click.option(
    "--seed",
    type=click.IntRange(-(1 << 63), (1 << 64) - 1),  # torch.Generator's
    default=0,
    show_default=True,
    help="Of the random prompts.",
)
RESULT_FILE = _group(
    path("--output-json", dir_okay=False, text="Write the result file here."),
    click.option(
        "--commit", metavar="SHA", help="Commit to record where the checkout has no history."
    ),
)


def check_places(options: Mapping[str, Any]) -> None:
    """Checks the files to write, before minutes are spent on what goes into them.

    Raises:
        ValueError: with the option's name: a file cannot be written, is read by another option, or
            is that of two options; or there is a commit and no file to record it in.
    """
    from graphengine.profiles.pictures import check_picture

    if options.get("commit") is not None and options["output_json"] is None:
        raise ValueError("--commit is recorded by --output-json; pass that too, or leave it out")
    for name in ("output", "plot", "output_json"):
        option, file = f"--{name.replace('_', '-')}", options.get(name)
        if file is None:
            continue
        _check_place(option, file, makes_folders=name == "output_json")
        for source, read in (("--read", "file"), ("--prompt-file", "prompt_file")):
            other = options.get(read)
            if other is not None and os.path.realpath(other) == os.path.realpath(file):
                raise ValueError(
                    f"{option} {file}: would replace what {source} reads; choose another path"
                )
    plot, result = options.get("plot"), options.get("output_json")
    if plot is not None and result is not None and plot.resolve() == result.resolve():
        raise ValueError(
            f"--plot and --output-json are both {plot}, and the picture would replace the result; "
            "choose another path for one"
        )
    check_picture("--plot", options.get("plot"))


def _check_place(option: str, file: Path, makes_folders: bool) -> None:
    """Raises: ValueError: the file cannot be written."""
    real = os.path.realpath(file)  # Path.resolve raises for a link that leads to itself
    folder = file.absolute().parent
    if os.path.islink(file):  # what it leads to is written, beside which no folder is made
        folder = Path(real).parent
    elif makes_folders:
        folder = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if str(file) == "-":
        raise ValueError(f"{option} -: goes to a file, not to stdout; pass its path")
    text = f"{option} {file}: cannot be written"
    if not folder.is_dir():
        raise ValueError(f"{text} (no such folder); make it first")
    if os.path.islink(real):
        raise ValueError(f"{text} (a link that leads to itself); choose another path")
    # Another file takes a file's place, a device or pipe is written itself.
    written = [file] if file.exists() else []
    if not written or file.is_file():
        written.append(folder)
    if not all(os.access(path, os.W_OK) for path in written):
        raise ValueError(f"{text} (no permission); choose another path")


def deliver(
    options: Mapping[str, Any],
    kind: str,
    numbers: dict[str, Any],
    config: dict[str, Any],
    picture: Callable[[str], bytes],
) -> None:
    """Writes the result file and the picture, then prints the JSON where it was asked for; if one
    of them fails, the others are delivered all the same.

    Args:
        kind: of the result file; `numbers` and `config` are its content.
        picture: from a file's suffix to the picture.

    Raises:
        ClickException: naming the files that could not be written.
    """
    from graphengine.profiles.result_schema import environment, write_result, write_whole

    def write(path: Path) -> None:
        write_result(path, kind, numbers, config=config, env=environment(options["commit"]))

    def draw(path: Path) -> None:
        write_whole(path, picture(path.suffix))

    failed = []
    for path, put in ((options["output_json"], write), (options["plot"], draw)):
        try:
            if path is not None:
                put(path)
                click.echo(f"wrote {path}", err=True)
        except (OSError, ValueError) as error:
            text = str(error)
            failed.append(text if str(path) in text else f"{path}: {text}")
    if options["as_json"]:
        click.echo(json.dumps({"config": config, "numbers": numbers}))
    if failed:
        raise click.ClickException("; ".join(failed))


def longest_context(model: str, draft: str | None, wanted: int) -> int:
    """`wanted` tokens of context, or what the models allow."""
    from graphengine.startup.build import read_configs
    from graphengine.startup.options import speculation_limit

    return min(wanted, speculation_limit(*read_configs(model, draft)))


def out_of_memory(error: Exception) -> str | None:
    """What was lacking, for a message; None for any other error."""
    # torch's own type exists for CUDA alone; on the CPU it raises a bare RuntimeError.
    texts = ("out of memory", "not enough memory", "can't allocate memory")
    if not isinstance(error, MemoryError) and not any(text in str(error) for text in texts):
        return None
    return f"out of memory ({str(error).strip().partition(chr(10))[0] or 'on the host'})"
