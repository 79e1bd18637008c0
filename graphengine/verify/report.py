"""What `graphengine verify` reports: the table, the places that differ, the verdict and the JSON.

The table, the JSON object and the stored result show the same numbers. stdout carries the verdict,
or the JSON object alone; the rest goes to the console, which is stderr.
"""

from __future__ import annotations

import json
import math
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Column, Table

from graphengine.checkpoints.tokenizer import Tokenizer
from graphengine.profiles.result_schema import environment, write_result
from graphengine.report import named, print_table, writable
from graphengine.verify.check import Place
from graphengine.verify.run import CellResult, numbers

NUM_CONTEXT_TOKENS = 12


def describe(result: CellResult, place: Place, tokenizer: Tokenizer | None) -> str:
    """A token that is not the plain model's first choice, with the text around it."""
    transcript = result.transcripts[place.request]

    def text(ids: list[int]) -> str:
        return repr(tokenizer.decode(ids)) if tokenizer else str(ids)

    low = max(place.index - NUM_CONTEXT_TOKENS, 0)
    kind = "first divergence" if place is result.report.first_true else "first benign tie"
    role = "accepted draft" if place.row + 1 < place.num_committed else "the target's own token"
    where = f"step {place.step}, row {place.row} of {place.num_committed} committed, {role}"
    if place.step == 0:
        where = "the prefill's token"
    return (
        f"{result.cell}: {kind} at request {place.request}, token {place.index} ({where}): "
        f"{text([place.emitted_id])} (p {math.exp(place.logprob):.4f}) instead of "
        f"{text([place.best_id])}, regret {place.regret_nats:.4g} nats; "
        f"after {text(transcript.output_ids[low : place.index])}, "
        f"then {text(transcript.output_ids[place.index + 1 :][:NUM_CONTEXT_TOKENS])}"
    )


def report_cells(
    model: str,
    draft: str | None,
    results: list[CellResult],
    texts: list[str],
    options: dict[str, Any],
    console: Console,
) -> bool:
    """The verdict over all cells; True: PASS."""
    failures = [f"{r.cell}: {name}: {text}" for r in results for name, text in r.failed.items()]
    print_table(console, _table(results))
    for text in texts:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    num_tokens = sum(r.report.num_tokens for r in results)
    mixed = ""
    if options["all_options"]:
        mixed = ", all options mixed"
        if not options["texts"]:
            mixed += " but grammars and stop strings (this model has no tokenizer)"
        elif not options["grammars"]:
            mixed += ' but grammars (install them: pip install "graphengine[grammar]")'
    verdict = "FAIL" if failures else "PASS"
    told = f"{verdict}: {len(results)} runs, {num_tokens} tokens judged{mixed}"
    told = "\n".join([*(f"FAIL {failure}" for failure in failures), told])
    finish(model, draft, failures, texts, numbers(results), told, options, console)
    return not failures


class _Unwritten(click.ClickException):
    exit_code = 2  # which is no FAIL


def finish(
    model: str,
    draft: str | None,
    failures: list[str],
    texts: list[str],
    measured: dict[str, Any],
    told: str,
    options: dict[str, Any],
    console: Console,
) -> None:
    """Writes the result file where asked for, then prints the verdict or the JSON object.

    Raises:
        ClickException: the file could not be written.
    """
    document = {
        "verdict": "FAIL" if failures else "PASS",
        "failures": failures,
        "divergences": texts,
        **named(model, draft),
        **{
            name: list(value) if isinstance(value, tuple) else value
            for name, value in options.items()
            if name not in ("prompt_file", "output_json", "commit", "as_json", "quiet")
        },
        "prompt_file": options["prompt_file"].name if options["prompt_file"] else "bundled",
    }
    unwritten = None
    if (path := options["output_json"]) is not None:
        try:
            env = environment(options["commit"])
            write_result(path, "verify", measured, config=document, env=env)
            console.print(f"wrote {path}", markup=False, highlight=False)
        except (OSError, ValueError) as error:
            unwritten = _Unwritten(f"--output-json {path}: {error}")
    if options["as_json"]:
        told = json.dumps({"config": document, "numbers": measured})
    click.echo(writable(told))
    if unwritten is not None:
        raise unwritten


def _table(results: list[CellResult]) -> Table:
    counts = ("tokens", "identical", "ties", "over", "max regret", "mean", "accept", "least")
    numeric = [Column(name, justify="right") for name in (*counts, "= plain")]
    title = "every token against the plain model"
    table = Table("mode", "bucket", "mix", *numeric, "verdict", title=title, box=box.SIMPLE)
    for result in results:
        report, cell, accept = result.report, result.cell, ("-", "-")
        if report.acceptance.num_draft_tokens > 0:
            means = [mean for mean in report.acceptance_per_prompt if mean]
            accept = (
                f"{report.acceptance.mean_acceptance_length:.2f}",
                f"{min(means, default=0):.2f}",
            )
        table.add_row(
            *(cell.mode, str(cell.bucket), cell.mix, str(report.num_tokens)),
            *(f"{report.identical_fraction:.2%}", str(len(report.ties)), str(report.num_true)),
            *(f"{report.max_regret_nats:.2g}", f"{report.mean_regret_nats:.2g}", *accept),
            "-" if (same := result.same_as_plain) is None else f"{same}/{len(result.transcripts)}",
            "[red]FAIL[/] " + " ".join(result.failed) if result.failed else "pass",
        )
    return table
