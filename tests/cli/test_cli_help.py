"""What `--help` says of each option, and where that cannot be written."""

import ast
import re
import subprocess

import click
import pytest

from graphengine.cli.main import main
from tests.support.command_line import COMMAND, ENV, ROOT


def shown_defaults(name: str) -> dict[str, str]:
    """Flag -> the default that help shows."""
    command = main.commands[name]
    context = click.Context(command, info_name=name)
    records = {param.opts[0]: param.get_help_record(context) for param in command.params}
    texts = {flag: record[1] for flag, record in records.items() if record is not None}
    found = {flag: re.search(r"\[default: ([^];]*)", text) for flag, text in texts.items()}
    return {flag: match[1] for flag, match in found.items() if match is not None}


@pytest.mark.parametrize("name", main.commands)
def test_defaults_that_are_numbers(name: str) -> None:
    """Bug: help does not say that the temperature is 0 where none is named, as of a default that
    counts as nothing; or it shows another command's."""
    due = {
        param.opts[0]: ",".join(map(str, default if isinstance(default, tuple) else (default,)))
        for param in main.commands[name].params
        for default in [param.default]
        if isinstance(default, int | float | tuple) and not isinstance(default, bool)
    }
    lists_of_none = {flag for flag, text in due.items() if not text}
    shown = shown_defaults(name)
    assert {flag: shown[flag] for flag in due} == due | dict.fromkeys(lists_of_none, "none")
    assert ("--temperature" in due) == (name in ("run", "verify"))


def test_every_option_that_is_named_is_there() -> None:
    """Bug: a refusal, a note or help advises an option that no command has."""
    params = [param for command in main.commands.values() for param in command.params]
    known = {flag for param in params for flag in (*param.opts, *param.secondary_opts)}
    known |= {"--help", "--no"}  # click's own, and what flags are made with
    known |= {"--type", "--cpuctxsw"}  # of nsys
    folders = [ROOT / name for name in ("graphengine", "capture", "profiles")]
    programs = [ROOT / "profiles" / name for name in ("nsys.py", "result_schema.py")]  # call others
    files = [path for folder in folders for path in folder.rglob("*.py") if path not in programs]
    assert len(files) > 100
    named = {
        (path.name, flag)
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", node.value)
    }
    assert len(named) > 100 and {(name, flag) for name, flag in named if flag not in known} == set()


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["run", "-h"]])
def test_a_help_that_cannot_be_written(args: list[str]) -> None:
    """Bug: a full disk behind `--help` is a traceback of click's."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, *args], cwd=ROOT, env=ENV, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: the system refuses to go on: [Errno 28] No space left")
    assert done.stderr.count("\n") == 1
