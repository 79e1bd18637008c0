"""README.md says what works: its commands parse, its files exist, its Python example runs.

A README is the first thing run and the last thing updated; so what it shows is checked, not what
it should show.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
SETUP = ["python3 tools/bootstrap.py run", "python3 tools/bootstrap.py test"]
MAX_LINES = 150

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
# Up to the first # that begins a word outside quotes.
UNCOMMENTED = re.compile(r"""(?:"[^"]*"|'[^']*'|(?<=\S)#|[^#'"])*""")
SHELL = ("bash", "sh", "shell", "console")
# Types whose values depend on the reader's machine are not converted.
UNCHECKED_TYPES = (click.Path, click.File)


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of the fenced blocks."""
    return [(match[1], match[2]) for match in FENCE.finditer(text)]


def shell_commands(text: str) -> list[str]:
    """Commands of the shell blocks: continued lines joined, prompts and comments removed."""
    commands: list[str] = []
    for language, content in blocks(text):
        if language not in SHELL:
            continue
        for line in content.replace("\\\n", " ").splitlines():
            before_comment = UNCOMMENTED.match(re.sub(r"^\$ ", "", line))
            if before_comment and before_comment[0].strip():
                commands.append(before_comment[0].strip())
    return commands


def graphengine_arguments(command: str) -> list[list[str]]:
    """Arguments of each `graphengine ...` in a shell line, also behind nsys or a variable."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[list[str]] = []
    current: list[str] | None = None
    for token in lexer:
        if set(token) <= set("|&;<>()"):
            current = None
        elif current is not None:
            current.append(token)
        elif token.rsplit("/", 1)[-1] == "graphengine":
            current = []
            found.append(current)
    return found


def check_arguments(command: click.Command, arguments: list[str], name: str) -> None:
    """Raises click's usage error when the command tree does not know what is asked for."""
    context = click.Context(command, info_name=name)
    while isinstance(command, click.Group):
        if arguments and arguments[0] in ("--help", "--version"):
            assert arguments[0] == "--help" or any(
                "--version" in parameter.opts for parameter in command.params
            )
            return
        # A group's own options come before the subcommand.
        values, rest, _ = command.make_parser(context).parse_args(list(arguments))
        check_values(context, command, values)
        if not rest:
            return
        child = command.get_command(context, rest[0])
        if child is None:
            raise click.UsageError(f"no subcommand {rest[0]!r} in `{name}`")
        name, command, arguments = f"{name} {rest[0]}", child, rest[1:]
        context = click.Context(command, info_name=rest[0], parent=context)
    if "--help" in arguments:
        return
    values, rest, _ = command.make_parser(context).parse_args(list(arguments))
    if rest:
        raise click.UsageError(f"`{name}` takes no argument {rest[0]!r}")
    check_values(context, command, values)


def check_values(context: click.Context, command: click.Command, values: dict) -> None:
    """Converts the given values, and asks for required options that were left out."""
    for parameter in command.params:
        value = values.get(parameter.name or "")
        missing = value is None or repr(value) == "Sentinel.UNSET"
        if missing:
            if parameter.required:
                raise click.MissingParameter(ctx=context, param=parameter)
        elif not isinstance(parameter.type, UNCHECKED_TYPES):
            parameter.type_cast_value(context, value)


def tree_names(content: str) -> list[str]:
    """Paths of an annotated tree: indented names or box-drawing, the notes in a second column."""
    stack: list[tuple[int, str]] = []
    names: list[str] = []
    for line in content.splitlines():
        drawn = re.sub("[\u2500-\u257f]", " ", line)
        indent = len(drawn) - len(drawn.lstrip())
        first_column = re.split(r"\s{2,}|\s#", drawn.strip())[0]
        if not first_column:
            continue
        while stack and stack[-1][0] >= indent:
            stack.pop()
        parent = stack[-1][1] if stack else ""
        tokens = re.split(r",\s*|\s+", first_column.split("->")[0].strip())
        for position, token in enumerate(tokens):
            if not re.fullmatch(r"[\w.*/-]+(\.\w+|/)|\.?[A-Z]+|\.ci/run", token):
                break
            names.append(parent + token)
            if position == 0 and token.endswith("/"):
                stack.append((indent, parent + token))
    return names


def trees(text: str) -> list[list[str]]:
    """The annotated trees among the blocks: those that have a line naming graphengine/."""
    return [
        tree_names(content)
        for language, content in blocks(text)
        if language in ("", "text") and re.search(r"^\W*graphengine/", content, re.MULTILINE)
    ]


@pytest.fixture(scope="module")
def readme() -> str:
    return README.read_text()


@pytest.fixture(scope="module")
def cli() -> click.Command:
    from graphengine.cli.main import main

    return main


def test_set_up_is_two_commands(readme: str) -> None:
    """Bug: a reader finds a second way to set up, which nobody tests."""
    commands = shell_commands(readme)
    assert sorted({line for line in commands if "bootstrap" in line}) == sorted(SETUP)
    assert [line for line in commands if re.search(r"\b(pip|uv|conda|venv)\b", line)] == []


def test_length(readme: str) -> None:
    """Bug: the README grows until nobody reads it."""
    assert len(readme.splitlines()) <= MAX_LINES


def test_commands_parse(readme: str, cli: click.Command) -> None:
    """Bug: a renamed option or subcommand is still shown."""
    commands = [
        (line, each) for line in shell_commands(readme) for each in graphengine_arguments(line)
    ]
    assert commands, "the README shows no graphengine command"
    broken = {}
    for line, arguments in commands:
        try:
            check_arguments(cli, arguments, "graphengine")
        except click.UsageError as error:
            broken[line] = error.format_message()
    assert broken == {}


def test_bootstrap_default_parses(cli: click.Command) -> None:
    """Bug: `tools/bootstrap.py run` starts graphengine with an option that it does not have."""
    code = "import sys, tools.bootstrap as b; print('\\n'.join(b.command_for('run', [])[1:]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    check_arguments(cli, done.stdout.splitlines(), "graphengine")


def test_named_files_exist(readme: str) -> None:
    """Bug: the tree or a link names a file that was moved."""
    found = trees(readme)
    assert len(found) == 1, "expected one annotated tree"
    assert len(found[0]) > 10
    assert [name for name in found[0] if not list(ROOT.glob(name.rstrip("/")))] == []
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", readme)
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_rooms_say_what_they_hold(readme: str) -> None:
    """Bug: a new room is not in the tree, or a reader who opens it finds no word on what it is."""
    rooms = [path.parent for path in sorted(ROOT.glob("graphengine/*/__init__.py"))]
    assert [room.name for room in rooms if f"{room.name}/" not in readme] == []
    silent = [room.name for room in rooms if not (room / "__init__.py").read_text().startswith('"')]
    tops = ("kernels", "capture", "profiles", "tests", "tools")
    silent += [name for name in tops if not (ROOT / name / "README.md").is_file()]
    assert silent == []


@pytest.mark.parametrize("top", ["kernels", "capture", "profiles", "tools"])
def test_readmes_name_their_files(top: str) -> None:
    """Bug: a new file is missing in the table that readers choose from."""
    told = (ROOT / top / "README.md").read_text()
    files = [path.name for path in sorted((ROOT / top).glob("*.py"))]
    assert [name for name in files if name not in told and not name.endswith("_kernels.py")] == []


def test_python_example_runs(readme: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: the first lines that a user copies raise, or print nothing."""
    examples = [content for language, content in blocks(readme) if language == "python"]
    assert examples
    for example in examples:
        exec(example, {"__name__": "__main__"})
        assert capsys.readouterr().out.strip(), example


# The readers above, on a README with known content.

SAMPLE = """
```bash
python3 tools/bootstrap.py run    # first
$ graphengine run --prompt "a # b" \\
    --steps 3 | tee x.txt
nsys profile -o x graphengine bench --mode full && X=1 .venv/bin/graphengine run
```
```text
graphengine/          the engine
  config.py           frozen dataclasses
  models/layers.py    rms_norm, rope
kernels/              Triton only
\u251c\u2500\u2500 accept.py         the rule
LICENSE  .ci/run
```
"""


@click.group()
def sample_cli() -> None:
    """A command tree to check the reader with."""


@sample_cli.command("run")
@click.option("--prompt", required=True)
@click.option("--steps", type=int)
@click.option("--mode", type=click.Choice(["none", "full"]), default="full")
def sample_run(**_: object) -> None:
    """A leaf."""


def test_reader_of_commands() -> None:
    """Bug: a command behind a prompt, a pipe, a variable or nsys goes unchecked."""
    (first, *rest) = shell_commands(SAMPLE)
    assert first == SETUP[0]
    assert graphengine_arguments(first) == []
    assert [each for line in rest for each in graphengine_arguments(line)] == [
        ["run", "--prompt", "a # b", "--steps", "3"],
        ["bench", "--mode", "full"],
        ["run"],
    ]


@pytest.mark.parametrize(
    "line",
    [
        "walk",
        "run --prompt x --stepz 3",
        "run --prompt x --steps three",
        "run --prompt x --mode half",
        "run --steps 3",
        "run --prompt x y",
    ],
)
def test_reader_catches_broken_commands(line: str) -> None:
    """Bug: a command that click would refuse counts as right."""
    with pytest.raises(click.UsageError):
        check_arguments(sample_cli, shlex.split(line), "graphengine")


def test_reader_passes_right_commands() -> None:
    """Bug: a right command is refused, and the check is switched off."""
    for line in ("", "--help", "run --help", "run --prompt=x --steps 3 --mode none"):
        check_arguments(sample_cli, shlex.split(line), "graphengine")


def test_reader_of_trees() -> None:
    """Bug: the tree's reader takes notes for files, or loses the folder a file is in."""
    assert trees(SAMPLE) == [
        [
            "graphengine/",
            "graphengine/config.py",
            "graphengine/models/layers.py",
            "kernels/",
            "kernels/accept.py",
            "LICENSE",
        ]
    ]
