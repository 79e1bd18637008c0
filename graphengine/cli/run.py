"""`graphengine run`: the options and the prompts; what is done with them is in answers.py."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from graphengine.cli import options as shared
from graphengine.config.constraint import constraint_of
from graphengine.config.options import SamplingParams, adjusts
from graphengine.prompts import MAX_CHARS, Conversation, lone_surrogate, read_prompt_file

STARTED_S = time.perf_counter()  # the start-up table counts from here

_NO_PROMPT = (
    'no prompt: pass --prompt "some text", --prompt-file FILE.jsonl, or pipe text into stdin'
)

_EPILOG = """\b
Examples:
  graphengine run --prompt "Count from 20 to 146 in steps of 6."
  graphengine run Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16
  echo "Compare the bee and the duck." | graphengine run --quiet
  graphengine run --prompt-file prompts.jsonl --bucket 8 --logprobs 2 --json > out.json
  graphengine run --prompt "Count from 20 to 146 in steps of 6." --stop ", 50"
  graphengine run --prompt "Count from 5 to 50 in steps of 5." --regex "[0-9, ]+"

\b
Exit codes: 0 done, 1 failed while running, 2 refused input, 130 interrupted."""


def collect_prompts(prompts: tuple[str, ...], file: Path | None) -> list[Conversation] | None:
    """What to answer: the options' prompts, else piped stdin; None asks on the terminal."""
    found: list[Conversation] = [[_checked("--prompt", text)] for text in prompts]
    if file is not None:
        try:
            found += read_prompt_file(file)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="'--prompt-file'") from error
    if found:
        return found
    if sys.stdin is None:
        raise ValueError(_NO_PROMPT)
    if sys.stdin.isatty():
        return None
    try:
        text = sys.stdin.read(MAX_CHARS + 1)
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin is not UTF-8 text ({error}); convert it") from error
    if len(text) > MAX_CHARS:
        raise ValueError(f"stdin holds more than {MAX_CHARS} characters; pass a shorter prompt")
    if not text.strip():
        raise ValueError(_NO_PROMPT + " (stdin is empty)")
    return [[_checked("stdin", text.removesuffix("\n").removesuffix("\r"))]]


def _checked(where: str, text: str) -> str:
    """The text, unless it holds bytes that are no text in this locale, as Python keeps them."""
    if (lone := lone_surrogate([text])) is not None:
        raise ValueError(f"{where}: {lone!r} is a byte that is not UTF-8 text; convert it")
    return text


@click.command("run", epilog=_EPILOG)
@shared.MODEL
@shared.DRAFT
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="May be repeated.")
@shared.prompt_file(
    text='JSON Lines: {"prompt": "text"} or {"turns": ["text", ..]}; later turns are asked with '
    "the model's own answers in between. A prompt may be a list of token ids."
)
@shared.declared("run", SamplingParams)
@shared.declared(
    "run", lazy_capture=shared.Default(None, "for one conversation, which needs no other")
)
@shared.path(
    "--artifact",
    text="Start with what `graphengine compile --output FILE` has compiled. Only your own: it is "
    "executed.",
)
@shared.as_json("One JSON object on stdout, at the end.")
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
    """Answer prompts with MODEL: a hub id or a directory.

    Without MODEL the bundled tiny pair runs; tiny-hybrid is another. Without prompts, text piped
    into stdin is one prompt, and on a terminal a chat begins (/reset forgets it, /quit or Ctrl-D
    ends it, Ctrl-C stops an answer).
    """
    if sys.stdout is None:
        raise ValueError("stdout is closed, so no answer could be read; redirect it to a file")
    conversations = collect_prompts(options["prompts"], options["prompt_file"])
    if options["raw"] and any(len(turns) > 1 for turns in conversations or []):
        raise ValueError("--raw has no turns; give one prompt per line or leave out --raw")
    if options["as_json"] and conversations is None:
        raise ValueError("--json needs the prompts beforehand; " + _NO_PROMPT)
    sampling = SamplingParams(**shared.taken(options, SamplingParams))
    if sampling.num_logprobs is not None and not options["as_json"]:
        raise ValueError(
            "log-probabilities are told in the JSON alone; pass --json, or leave out --logprobs "
            "and --prompt-logprobs"
        )
    from graphengine.checkpoints.hub import BUNDLED, TOY_PROMPTS
    from graphengine.checkpoints.pairs import NO_DRAFT, named_pair
    from graphengine.cli import answers

    note = None
    target, drafter = named_pair(model, draft)
    if drafter is None and draft != NO_DRAFT:
        note = (
            "decoding plainly; pass --draft with this model's drafter for speculative decoding, "
            "or --draft none to leave out this note"
        )
    elif Path(target) in (pair[0] for pair in BUNDLED.values()):
        note = f"a toy that knows a few kinds of questions, such as: {' '.join(TOY_PROMPTS)}"
    asked = shared.taken(options)
    asked["sampling"] = True if sampling.temperature else None
    asked["adjustments"] = True if adjusts(sampling) else None
    asked["structured_outputs"] = True if constraint_of(sampling) else None
    if sampling.num_logprobs is not None:
        asked["max_logprobs"] = max(sampling.num_logprobs, 1)
    asked["first_batch"] = len(conversations) if conversations else 1
    if asked["lazy_capture"] is None:
        asked["lazy_capture"] = asked["first_batch"] == 1
    job = answers.Job(
        model=target,
        draft=drafter,
        conversations=conversations,
        sampling=sampling,
        options=asked,
        args=_as_typed(ctx),
        note=note,
        store=ctx.obj,
        **{name: options[name] for name in ("as_json", "quiet", "nvtx")},
    )
    if answers.run(job, STARTED_S):
        ctx.exit(1)


def _as_typed(context: click.Context) -> dict[str, Any]:
    """The command's parameters under their options' names, fit for JSON."""
    typed = {}
    for param in context.command.params:
        value = context.params[param.name or ""]
        name = param.opts[0].lstrip("-").replace("-", "_")
        typed[name] = str(value) if isinstance(value, Path) else value
    return typed
