"""`graphengine profile`: the launch-gap report, of steps that it runs or of a file that it reads.

Where the times come from, best first: nsys (on a GPU, when it is on the PATH), torch.profiler (on a
GPU without it), the host's clock around each named range (CPU). The report is the same; the text
says which it was. Recording is in profile_run.py; options, tables and files are here.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from graphengine.cli import options as shared

if TYPE_CHECKING:
    from rich.console import Console

    from graphengine.profiles.launch_gaps import Report

_EPILOG = """\b
Examples:
  graphengine profile
  graphengine profile qwen3-8b --draft qwen3-8b-dflash-b16 --simulate-acceptance 6.35
  graphengine profile --tool nsys --preset node --keep out --plot step.svg
  graphengine profile qwen3-8b --draft qwen3-8b-dflash-b16 --prefill --input-len 1024
  graphengine profile --read out/graph.sqlite

\b
By hand, with the same names:
  nsys profile -t cuda,nvtx -s none --cpuctxsw=none \\
      graphengine run --nvtx --prompt "Count from 5 to 50 in steps of 5."
"""
# Options that mean something beside --read: always, and where MODEL says what bytes are read.
_OF_A_FILE = set("model file read_gbps prefill top plot output_json commit as_json".split())
_OF_ITS_BYTES = set("draft bucket dtype num_speculative_tokens draft_quantization".split())
_SOURCES = {
    "graph": "nsys, a CUDA graph as one interval (times are close to an unprofiled run's)",
    "node": "nsys, kernels inside CUDA graphs (small kernels read 30-60 % slow; for composition)",
    "torch": "torch.profiler, since nsys was not used (host and small kernels read slow)",
    "cpu": "the host's clock around each step: busy is time inside steps, idle the host between",
}


@click.command("profile", epilog=_EPILOG)
@shared.MODEL
@shared.DRAFT
@shared.path(
    "--read",
    "file",
    text="Report on a .nsys-rep, a .sqlite[.gz] of it, or a torch.profiler .json[.gz] instead of "
    "running. Bytes come from facts.json beside it, else from MODEL and --draft.",
)
@click.option(
    "--tool",
    type=click.Choice(["auto", "nsys", "torch"]),
    default="auto",
    help="auto: nsys where it is on the PATH, else torch.profiler.",
)
@click.option(
    "--preset",
    type=click.Choice(["graph", "node", "both"]),
    default="both",
    show_default=True,
    help="nsys: CUDA graphs as one interval (for times), their kernels (for composition), or one "
    "run of each.",
)
@click.option(
    "--prefill",
    is_flag=True,
    help="Report on first tokens instead: each step of the report is a prefill of --bucket fresh "
    "prompts of --input-len tokens.",
)
@shared.count("--bucket", 1)
@shared.count("--input-len", 128)
@shared.count("--num-steps", 30, "Steps in the report.")
@shared.count("--warmup", 10)
@shared.declared("profile", load_format=shared.PRESET)
@shared.PROMPT_SEED
@click.option(
    "--read-gbps",
    type=shared.Finite(min=0),
    help="Read bandwidth for the floor; 0 leaves it out.  [default: measured on the GPU]",
)
@shared.count("--top", 12, "Kernels.")
@shared.path(
    "--keep",
    metavar="DIR",
    file_okay=False,
    text="Keep the recorded files (.nsys-rep, .sqlite, .json) here.",
)
@shared.PLOT(text="Draw the mean step and a median one (extra `plot`).")
@shared.RESULT_FILE
@shared.as_json("The result as JSON on stdout.")
@click.option("--inside", type=click.Path(path_type=Path), hidden=True)
@click.pass_context
def profile(ctx: click.Context, model: str | None, draft: str | None, **options: Any) -> None:
    """Where a decode step of MODEL, or a prefill, waits: wall, busy, idle and the host's time by
    step, class and kernel."""
    from graphengine.measure import profile_run
    from graphengine.report import print_note, stderr_console

    console = stderr_console(quiet=False)
    shared.check_places(options)
    if options["file"] is not None:
        _refuse_idle(ctx, has_model=model is not None)
    try:
        if options["inside"] is not None:
            profile_run.run_inside_nsys(model, draft, options)
            return
        if options["file"] is not None:
            found = profile_run.read_file(model, draft, options)
        else:
            with _folder(options["keep"]) as folder:
                note = partial(print_note, console)
                found = profile_run.run(model, draft, options, Path(folder), note)
    except RuntimeError as error:
        if not str(error).startswith("nsys "):
            raise
        raise click.ClickException(str(error)) from error
    _deliver(console, *found, options)


def _refuse_idle(ctx: click.Context, has_model: bool) -> None:
    """Refuses what was typed beside --read and changes nothing there."""
    for param in ctx.command.params:
        name = param.name or ""
        if name in _OF_A_FILE or ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        if name not in _OF_ITS_BYTES:
            raise ValueError(f"{param.opts[0]} is of a run, --read makes none; leave it out")
        if not has_model:
            raise ValueError(
                f"{param.opts[0]} beside --read is for the bytes of MODEL; pass that too, or leave "
                "it out"
            )


def _folder(keep: Path | None) -> Any:
    """Where recorded files go: the user's folder, or one that is removed."""
    if keep is None:
        return tempfile.TemporaryDirectory(prefix="graphengine-")
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--keep {keep}: cannot be made ({error}); choose another path") from error
    return nullcontext(keep)


def _deliver(
    console: Console, reports: dict[str, Report], facts: dict[str, Any], options: dict[str, Any]
) -> None:
    from graphengine.measure.report import print_report, profile_picture

    numbers: dict[str, Any] = {
        label: found.numbers(facts.get("segment_bytes"), facts.get("read_gbps", 0.0))
        for label, found in reports.items()
    }
    simulated = facts.get("config", {}).get("simulate_acceptance")
    mark = f" (acceptance SIMULATED at {simulated})" if simulated else ""
    mark += "; each step is a prefill" if facts.get("prefill") else ""
    for label, found in numbers.items():
        print_report(console, _SOURCES.get(label, label) + mark, found, options["top"])
    if "unprofiled_step_ms" in facts:
        step, host = facts["unprofiled_step_ms"], facts["unprofiled_host_ms"]
        console.print(
            f"the same steps without a profiler: {step * 1e3:.1f} us each "
            f"(host busy {host * 1e3:.1f} us)",
            markup=False,
        )
        numbers["unprofiled"] = {"step_p50_ms": step, "host_p50_ms": host}
        if "mean_acceptance_length" in facts:  # a prefill has none
            numbers["unprofiled"]["mean_acceptance_length"] = facts["mean_acceptance_length"]
    document = {name: value for name, value in facts.items() if name != "segment_bytes"}
    document["sources"] = {label: _SOURCES.get(label, "a recorded file") for label in reports}
    shared.deliver(options, "profile", numbers, document, partial(profile_picture, reports, mark))
