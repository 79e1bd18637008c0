"""The command line: options, prompts and exit codes; what runs is in `cli_run`.

Why apart: `graphengine --help` answers at once because nothing here imports torch at module level.
Streams: generated text (or one JSON object) goes to stdout, everything else to stderr, so that a
pipe gets text alone. Exit codes: 0 done, 1 failed while running, 2 refused (option, value and
remedy are named), 130 interrupted. Environment variables are read here, those of the
compilers also by artifact.py.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphengine import __version__
from graphengine.cli import options as shared
from graphengine.cli.bench import bench
from graphengine.cli.compile import compile_
from graphengine.cli.doctor import doctor
from graphengine.cli.graphs import graphs
from graphengine.cli.profile import profile
from graphengine.cli.verify import verify
from graphengine.prompts import Conversation, read_prompt_file

if TYPE_CHECKING:
    from graphengine.startup.artifact import Store

STARTED_S = time.perf_counter()  # the start-up table counts from here

_NO_PROMPT = (
    'no prompt: pass --prompt "some text", --prompt-file FILE.jsonl, or pipe text into stdin'
)
_COMPILERS = ("torch._dynamo", "torch._inductor")
_INDUCTOR_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
# Where each compiler keeps its code -> its folder in an artifact.
_CACHE_VARIABLES = {
    _INDUCTOR_FOLDER: "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}


class Refusal(click.ClickException):
    """An input that cannot work; the message carries the value and the remedy."""

    exit_code = 2


def collect_prompts(prompts: tuple[str, ...], file: Path | None) -> list[Conversation] | None:
    """What to answer: the options' prompts, else piped stdin; None asks on the terminal."""
    found: list[Conversation] = [[text] for text in prompts]
    if file is not None:
        try:
            found += read_prompt_file(file)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="'--prompt-file'") from error
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


def _cache_root() -> Path | None:
    """Where compiled code of every platform is kept; None: nowhere."""
    named = os.environ.get("GRAPHENGINE_CACHE")
    try:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        root = Path(f"{base}/graphengine" if named is None else named).expanduser().absolute()
        return root if named != "" and _can_write(root) else None
    except (OSError, RuntimeError):  # not allowed to look, or no home directory
        return None


def _can_write(folder: Path) -> bool:
    """Whether it is, or can become, a folder to write in. Raises: OSError: not allowed to look."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return existing.is_dir() and os.access(existing, os.W_OK)


def _all_can_be_written(folder: Path) -> bool:
    """Another user may have made a part of it."""
    try:
        return all(_can_write(folder / part) for part in ("", *_CACHE_VARIABLES.values()))
    except OSError:
        return False


@contextmanager
def compiled_code(device: str, artifact: Path | None) -> Iterator[Store | None]:
    """Points every compiler at this platform's folder while a command runs.

    The folder lies below GRAPHENGINE_CACHE, by default ~/.cache/graphengine; an empty value, or a
    place that cannot be written, leaves the compilers' own defaults (None). What the user has set
    for one compiler stays.
    """
    from graphengine.startup import artifact as artifacts

    root = _cache_root()
    store = root and artifacts.store(root, artifacts.platform_parts(device))
    if store is not None and (why := artifacts.others_can_write(store.folder)):
        click.echo(f"note: {store.folder} {why} {artifacts.NOT_USED}", err=True)
        store = None
    if store is not None and not _all_can_be_written(store.folder):
        click.echo(f"note: {store.folder} cannot be written and is not used", err=True)
        store = None
    if store is None:
        if artifact is not None:
            raise Refusal(
                f"--artifact {artifact} needs a folder to be unpacked in; set GRAPHENGINE_CACHE "
                "to one that can be written"
            )
        yield None
        return
    if artifact is not None:
        try:
            found = artifacts.unpack(artifact, store)
        except ValueError as error:
            raise Refusal(str(error)) from error
        if found:
            store.notes.append(
                f"{artifact} does not fit and is not used; compiling anew. " + "; ".join(found)
            )
    ours = {name: str(store.folder / part) for name, part in _CACHE_VARIABLES.items()}
    ours |= artifacts.compiler_files()
    if (elsewhere := os.environ.get(_INDUCTOR_FOLDER)) is not None:
        store = store._replace(segments=elsewhere)
    ours = {name: value for name, value in ours.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield store
    finally:
        for name in ours:
            os.environ.pop(name, None)


@contextmanager
def _ends_are_told() -> Iterator[None]:
    """Turns Ctrl-C and what the machine refuses into a line on stderr and an exit code."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        click.get_current_context().exit(130)
    except OSError as error:
        if error.errno == errno.EPIPE:  # `| head -1`: click ends quietly
            raise
        raise click.ClickException(f"the system refuses to go on: {error}") from error
    except (MemoryError, RuntimeError) as error:
        lacking = shared.out_of_memory(error)
        if lacking is None and type(error).__module__.startswith(_COMPILERS):
            raise click.ClickException(_compiler_failed(error)) from error
        if lacking is None:
            raise
        raise click.ClickException(
            f"{lacking}; lower --max-model-len, the largest --bucket, --gpu-memory-utilization or "
            "--kv-cache-memory"
        ) from error


def _compiler_failed(error: Exception) -> str:
    reason = str(error).strip().partition("\n")[0]
    remedy = "drop what is kept with `graphengine compile --fresh`, see `graphengine doctor`"
    if "CxxCompiler" in reason:
        remedy = "install g++"
    elif "[Errno" in reason:
        remedy = f"set {_INDUCTOR_FOLDER} or GRAPHENGINE_CACHE to a folder that can be written"
    return f"compilation failed: {reason}; {remedy}, or run with --no-compile"


def _keeping_compiled_code(command: click.Command) -> click.Command:
    """The command, run inside `compiled_code`, its ends told; its context's `obj` is the store."""
    callback = command.callback
    assert callback is not None

    @functools.wraps(callback)
    def outer(*args: Any, **kwargs: Any) -> Any:
        context = click.get_current_context()
        params = context.params
        device, artifact = params.get("device", "auto"), params.get("artifact")
        if artifact is not None and params.get("fresh"):
            raise click.UsageError("--fresh would drop what --artifact adds; give one of them")
        with _ends_are_told(), compiled_code(device, artifact) as context.obj:
            return callback(*args, **kwargs)

    command.callback = outer
    return command


@main.command("run", epilog=_EPILOG)
@shared.MODEL
@shared.DRAFT
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="May be repeated.")
@click.option(
    "--prompt-file",
    type=click.Path(path_type=Path),
    metavar="FILE.jsonl",
    help='JSON Lines: {"prompt": "text"} or {"turns": ["text", ..]}; later turns are asked with '
    "the model's own answers in between. A prompt may be a list of token ids.",
)
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the chat template.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--ignore-eos", is_flag=True, help="Do not stop at the model's end tokens.")
@shared.bucket("1,8,16", "Batch sizes to build; more prompts than the largest wait in order.")
@shared.EXECUTION
@shared.MAX_MODEL_LEN
@shared.LOAD_FORMAT
@shared.GPU_MEMORY_UTILIZATION
@shared.KV_CACHE_MEMORY
@shared.SIMULATE_ACCEPTANCE
@shared.DRAFT_QUANTIZATION
@shared.NUM_SPECULATIVE_TOKENS
@click.option(
    "--lazy-capture/--no-lazy-capture",
    default=None,
    help="Build the first batch's bucket alone ahead, each other one at its first use.  [default: "
    "for one conversation, which needs no other]",
)
@click.option(
    "--artifact",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Start with what `graphengine compile --output FILE` has compiled. Only your own: it is "
    "executed.",
)
@click.option(
    "--acceptance-floor",
    type=click.FloatRange(min=0),
    default=1.5,
    show_default=True,
    metavar="LENGTH",
    help="Warn when fewer tokens a step are accepted (mean acceptance length); 0 never.",
)
@click.option(
    "--fallback/--no-fallback",
    default=True,
    show_default=True,
    help="Decode plainly where speculation is measured to be slower; the text is the same.",
)
@click.option(
    "--finish-in-plain-decode",
    is_flag=True,
    help="Use the target's whole context: the last block of it is decoded without the drafter.",
)
@click.option(
    "--temperature",
    type=float,
    default=0.0,
    show_default=True,
    help="0 takes the most likely token, above 0 draws one. What the model's "
    "generation_config.json suggests is not applied; pass it here.",
)
@click.option("--top-p", type=float, default=1.0, show_default=True, help="1 keeps all tokens.")
@click.option("--top-k", type=int, default=0, show_default=True, help="0 keeps all tokens.")
@click.option(
    "--seed",
    type=int,
    help="Makes draws repeatable, with a drafter or without; prompt i draws with seed + i."
    "  [default: a new one]",
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
    """Answer prompts with MODEL, a dense Qwen3: a hub id or a directory.

    Without MODEL the bundled tiny pair runs. Without prompts, text piped into stdin is one prompt,
    and on a terminal a chat begins (/reset forgets it, /quit or Ctrl-D ends it, Ctrl-C stops an
    answer).
    """
    if sys.stdout is None:
        raise Refusal("stdout is closed, so no answer could be read; redirect it to a file instead")
    conversations = collect_prompts(options.pop("prompts"), options.pop("prompt_file"))
    raw, as_json = options.pop("raw"), options.pop("as_json")
    if raw and any(len(turns) > 1 for turns in conversations or []):
        raise click.UsageError("--raw has no turns; give one prompt per line or leave out --raw")
    if as_json and conversations is None:
        raise click.UsageError("--json needs the prompts beforehand; " + _NO_PROMPT)
    try:
        from graphengine.checkpoints.pairs import NO_DRAFT, named_pair
        from graphengine.cli import run as cli_run

        note = None
        target, drafter = named_pair(model, draft)
        if drafter is None and draft != NO_DRAFT:
            note = (
                "decoding plainly; pass --draft with this model's DFlash drafter for speculative "
                "decoding, or --draft none to leave out this note"
            )
        draws = {name: options.pop(name) for name in ("temperature", "top_p", "top_k", "seed")}
        options["sampling"] = True if draws["temperature"] else None
        options["compile"] = options.pop("compile_")
        options["buckets"] = options.pop("bucket")
        options.pop("artifact")
        options["first_batch"] = len(conversations) if conversations else 1
        if options["lazy_capture"] is None:
            options["lazy_capture"] = options["first_batch"] == 1
        job = cli_run.Job(
            model=target,
            draft=drafter,
            conversations=conversations,
            max_new_tokens=options.pop("max_new_tokens"),
            ignore_eos=options.pop("ignore_eos"),
            raw=raw,
            as_json=as_json,
            quiet=options.pop("quiet"),
            nvtx=options.pop("nvtx"),
            options=options,
            args=_as_typed(ctx.params),
            note=note,
            store=ctx.obj,
            **draws,
        )
        if cli_run.run(job, import_s=time.perf_counter() - STARTED_S):
            ctx.exit(1)
    except ValueError as error:
        raise Refusal(str(error)) from error


def _as_typed(params: dict[str, Any]) -> dict[str, Any]:
    """The command's parameters under their options' names, fit for JSON."""
    names = {"as_json": "json", "compile_": "compile", "prompts": "prompt"}
    return {
        names.get(name, name): str(value) if isinstance(value, Path) else value
        for name, value in params.items()
    }


_keeping_compiled_code(run)
for _command in (bench, profile, graphs, doctor, compile_, verify):
    main.add_command(_keeping_compiled_code(_command))
