"""The command line: options, prompts and exit codes; what runs is in `cli_run`.

Why apart: `graphengine --help` answers at once because nothing here imports torch at module level.
Streams: generated text (or one JSON object) goes to stdout, everything else to stderr, so that a
pipe gets text alone. Exit codes: 0 done, 1 failed while running, 2 refused (option, value and
remedy are named), 130 interrupted. Environment variables are read here and nowhere else.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from graphengine import __version__

STARTED_S = time.perf_counter()  # the start-up table counts from here

Turn = str | list[int]
Conversation = list[Turn]
"""A user's turns in order; token ids stand alone."""

_NO_PROMPT = (
    'no prompt: pass --prompt "some text", --prompt-file FILE.jsonl, or pipe text into stdin'
)
_LINE_FORMAT = 'expected {"prompt": "text"} or {"turns": ["text", ..]}'


class BucketList(click.ParamType):
    """Batch sizes as `1,8,16`."""

    name = "N,N,.."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        sizes = [part.strip() for part in str(value).split(",")]
        if not all(part.isdecimal() and int(part) > 0 for part in sizes):
            self.fail(
                f"{value!r} is no list of batch sizes; pass integers from 1 up, such as 1,8,16",
                param,
                ctx,
            )
        return tuple(sorted({int(part) for part in sizes}))


class Refusal(click.ClickException):
    """An input that cannot work; the message carries the value and the remedy."""

    exit_code = 2


def read_prompt_file(path: Path) -> list[Conversation]:
    """Conversations of a JSON Lines file, one per line; blank lines are skipped.

    Raises:
        click.BadParameter: unreadable, empty, or a line of another form (its number is named).
    """

    def refuse(what: str) -> click.BadParameter:
        return click.BadParameter(what, param_hint="'--prompt-file'")

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise refuse(f"{path}: {reason}; pass a JSON Lines file, each line {_LINE_FORMAT[9:]}")
    found: list[Conversation] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise refuse(f"{path}, line {number}: not JSON ({error}); {_LINE_FORMAT}") from error
        turns = _turns(entry)
        if turns is None:
            shown = line if len(line) <= 60 else line[:57] + "..."
            raise refuse(f"{path}, line {number}: {shown}; {_LINE_FORMAT}")
        found.append(turns)
    if not found:
        raise refuse(f"{path}: holds no prompt; {_LINE_FORMAT} on each line")
    return found


def _turns(entry: Any) -> Conversation | None:
    if not isinstance(entry, dict) or ("prompt" in entry) == ("turns" in entry):
        return None
    if "turns" in entry:
        turns = entry["turns"]
        right = isinstance(turns, list) and turns and all(isinstance(t, str) for t in turns)
        return turns if right else None
    prompt = entry["prompt"]
    if isinstance(prompt, list):  # token ids: for models without a tokenizer
        right = prompt and all(type(token) is int for token in prompt)
        return [prompt] if right else None
    return [prompt] if isinstance(prompt, str) else None


def collect_prompts(prompts: tuple[str, ...], file: Path | None) -> list[Conversation] | None:
    """What to answer: the options' prompts, else piped stdin; None asks on the terminal."""
    found: list[Conversation] = [[text] for text in prompts]
    if file is not None:
        found += read_prompt_file(file)
    if found:
        return found
    if sys.stdin is None:
        raise click.UsageError(_NO_PROMPT)
    if sys.stdin.isatty():
        return None
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"stdin is not UTF-8 text ({error}); convert it") from error
    if not text.strip():
        raise click.UsageError(_NO_PROMPT + " (stdin is empty)")
    return [[text.removesuffix("\n")]]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="graphengine")
def main() -> None:
    """Latency-critical LLM decode with DFlash block-diffusion speculative decoding."""


_EPILOG = """\b
Examples:
  graphengine run --prompt "Tom has 3 apples and buys 4 more. How many now?"
  graphengine run Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16
  echo "Write a haiku" | graphengine run --quiet
  graphengine run --prompt-file prompts.jsonl --bucket 8 --json > out.json

\b
Exit codes: 0 done, 1 failed while running, 2 refused input, 130 interrupted."""


@main.command("run", epilog=_EPILOG)
@click.argument("model", required=False)
@click.option(
    "--draft",
    metavar="PATH|none",
    help="DFlash drafter of MODEL: a hub id or a directory; none decodes plainly.  [default: the "
    "bundled drafter for the bundled model, else none]",
)
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="May be repeated.")
@click.option(
    "--prompt-file",
    type=click.Path(path_type=Path),
    metavar="FILE.jsonl",
    help='JSON Lines: {"prompt": "text"} or {"turns": ["text", ..]}; later turns are asked with '
    "the model's own answers in between.",
)
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the chat template.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--ignore-eos", is_flag=True, help="Do not stop at the model's end tokens.")
@click.option(
    "--bucket",
    type=BucketList(),
    default="1,8,16",
    show_default=True,
    help="Batch sizes to build; more prompts than the largest wait in order.",
)
@click.option(
    "--graph-mode",
    type=click.Choice(["auto", "none", "piecewise", "full"]),
    default="auto",
    help="How steps are launched: captured between attentions (piecewise, auto on a GPU), captured "
    "whole (full), or called one by one (none, auto on the CPU).",
)
@click.option(
    "--compile/--no-compile",
    "compile_",
    default=None,
    help="Inductor for the dense segments.  [default: on a GPU only]",
)
@click.option(
    "--attention-backend",
    type=click.Choice(["auto", "flashinfer", "triton", "torch"]),
    default="auto",
    help="auto: flashinfer on a GPU in bfloat16, else torch.",
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float32"]),
    default="auto",
    help="auto: bfloat16 on a GPU, float32 on the CPU.",
)
@click.option(
    "--page-size",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Tokens per K/V page.",
)
@click.option(
    "--max-model-len",
    type=click.IntRange(min=2),
    help="Most tokens of one request, prompt included.  [default: what the models allow]",
)
@click.option(
    "--load-format",
    type=click.Choice(["auto", "dummy"]),
    default="auto",
    help="dummy: random weights from config.json alone, for measuring speed.",
)
@click.option(
    "--gpu-memory-utilization",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.9,
    show_default=True,
    help="Share of the GPU's memory that may be filled.",
)
@click.option(
    "--simulate-acceptance",
    type=float,
    metavar="LENGTH",
    help="Draw this mean acceptance length instead of comparing drafts; measures speed without a "
    "trained drafter, the text is meaningless.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, at the end.")
@click.option("-q", "--quiet", is_flag=True, help="The text alone: no notes, progress or tables.")
@click.option(
    "--nvtx",
    is_flag=True,
    envvar="GRAPHENGINE_NVTX",
    show_envvar=True,
    help="Name every step in NVTX ranges, for nsys.",
)
@click.pass_context
def run(ctx: click.Context, model: str | None, draft: str | None, **options: Any) -> None:
    """Answer prompts with MODEL, a dense Qwen3: a hub id or a directory.

    Without MODEL the bundled tiny pair runs. Without prompts, text piped into stdin is one prompt,
    and on a terminal a chat begins (/reset forgets it, /quit or Ctrl-D ends it, Ctrl-C stops an
    answer).
    """
    conversations = collect_prompts(options.pop("prompts"), options.pop("prompt_file"))
    raw, as_json = options.pop("raw"), options.pop("as_json")
    if raw and any(len(turns) > 1 for turns in conversations or []):
        raise click.UsageError("--raw has no turns; give one prompt per line or leave out --raw")
    if as_json and conversations is None:
        raise click.UsageError("--json needs the prompts beforehand; " + _NO_PROMPT)
    try:
        from graphengine import cli_run
        from graphengine.hub import TINY_DRAFT, TINY_TARGET

        note = None
        if model is None and draft is None:
            draft = str(TINY_DRAFT)
        elif draft is None:
            note = (
                "decoding plainly; pass --draft with this model's DFlash drafter for speculative "
                "decoding, or --draft none to leave out this note"
            )
        options["compile"] = options.pop("compile_")
        options["buckets"] = options.pop("bucket")
        job = cli_run.Job(
            model=model or str(TINY_TARGET),
            draft=None if draft == "none" else draft,
            conversations=conversations,
            max_new_tokens=options.pop("max_new_tokens"),
            ignore_eos=options.pop("ignore_eos"),
            raw=raw,
            as_json=as_json,
            quiet=options.pop("quiet"),
            nvtx=options.pop("nvtx"),
            options=options,
            args={name: _plain(value) for name, value in ctx.params.items()},
            note=note,
        )
        cli_run.run(job, import_s=time.perf_counter() - STARTED_S)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        ctx.exit(130)
    except ValueError as error:
        raise Refusal(str(error)) from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, click.exceptions.Exit) or not cli_run.is_out_of_memory(error):
            raise
        raise click.ClickException(
            f"out of memory ({str(error).strip().splitlines()[0] if str(error) else 'host'}); lower "
            "--max-model-len, the largest --bucket or --gpu-memory-utilization"
        ) from error


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
