"""`graphengine doctor`: the options, the table and the exit code; the checks are in `doctor`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from graphengine.cli import options as shared
from graphengine.config.options import Options

if TYPE_CHECKING:
    from graphengine.doctor.doctor import Examination

_EPILOG = """\b
Examples:
  graphengine doctor
  graphengine doctor Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16
  graphengine doctor qwen3-8b --draft qwen3-8b-dflash-b16 --bucket 1,16 --json

\b
Exit codes: 0 no error (there may be warnings), 1 errors found, 2 wrong usage."""
_STYLES = {"ok": "green", "info": "cyan", "warning": "yellow", "error": "bold red"}


@click.command("doctor", epilog=_EPILOG)
@shared.MODEL
@shared.DRAFT
@shared.declared("doctor", lazy_capture=shared.Default(True, "as in graphengine run"))
@shared.as_json("The findings as JSON on stdout.")
@click.pass_context
def doctor(ctx: click.Context, model: str | None, draft: str | None, **options: Any) -> None:
    """Examine MODEL and its drafter before loading: formats, shapes, rope, memory, machine.

    MODEL: a directory, a hub id in the local cache, a preset, or tiny-hybrid; without it the
    bundled tiny pair.
    Reads config files and the headers of the weights. Options of the engine as in `graphengine
    run`, but for --load-format; those of prompts and answers are not taken.
    """
    from graphengine.checkpoints.pairs import bundled_names
    from graphengine.doctor.doctor import examine

    as_json = options.pop("as_json")
    found = examine(*bundled_names(model, draft), Options(**options))
    if as_json:
        click.echo(json.dumps(found.to_json()))
    else:
        _print(found)
    ctx.exit(1 if found.has_errors else 0)


def _print(found: Examination) -> None:
    """A block per part; remedies under their line."""
    from rich.console import Console
    from rich.text import Text

    from graphengine.doctor.findings import one_line
    from graphengine.report import PIPE_WIDTH, writable

    # No line is wrapped, whatever the width; of COLUMNS=0 rich would show nothing.
    console = Console(highlight=False, soft_wrap=True, width=PIPE_WIDTH)
    console.begin_capture()
    console.print(Text(one_line(f"{found.target}, drafter {found.draft or 'none'}")))
    part = None
    for finding in found.findings:
        group, _, name = finding.name.partition(".")
        if group != part:
            part = group
            console.print(Text(f"\n{group}", style="bold"))
        line = Text("  ")
        line.append(f"{finding.level:8}", style=_STYLES[finding.level])
        line.append(f"{name or group:18} {finding.value}")
        console.print(line)
        if finding.remedy and finding.level != "ok":
            console.print(Text(f"{'':29}-> {finding.remedy}", style="dim"))
    counts = found.num_by_level
    verdict = "errors: this pair will not run as it is" if counts["error"] else "no errors"
    console.print(f"\n{verdict} ({', '.join(f'{n} {level}' for level, n in counts.items())})")
    click.echo(writable(console.end_capture()), nl=False)
