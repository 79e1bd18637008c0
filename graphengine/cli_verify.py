"""`graphengine verify`: the options, the table and the verdict.

The judging is in verify.py, the runs in verify_run.py, the sampled comparison in two_sample.py.
stdout carries the verdict (or one JSON object), tables go to stderr. Exit codes: 0 PASS, 1 FAIL,
2 refused input. torch is imported inside the command, so that help is quick.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphengine.cli_bench import IntList
from graphengine.cli_bench import _longest as longest_context
from graphengine.prompts import read_prompt_file

if TYPE_CHECKING:
    from rich.console import Console

    from graphengine.api import Engine
    from graphengine.prompts import Turn
    from graphengine.tokenizer import Tokenizer
    from graphengine.verify import Limits, Mix, Place
    from graphengine.verify_run import CellResult, Mode

PROMPTS = Path(__file__).parent / "assets" / "verify_prompts.jsonl"
# Mean acceptance length of the bundled pair on the bundled prompts; measured 14.4 in float32 and
# in bfloat16, 128 new tokens.
BUNDLED_MIN_ACCEPTANCE = 13.5
BUNDLED_MIN_NEW_TOKENS = 64
NUM_CONTEXT_TOKENS = 12

_EPILOG = """\b
Examples:
  graphengine verify
  graphengine verify --matrix --output-json verify.json
  graphengine verify Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16 --min-acceptance 4
  graphengine verify --temperature 1 --num-samples 400

\b
Exit codes: 0 PASS, 1 FAIL, 2 refused input. What each check means: graphengine/docs/lossless.md."""


@click.command("verify", epilog=_EPILOG)
@click.argument("model", required=False)
@click.option("--draft", metavar="PATH|none", help="Drafter; the bundled one without MODEL.")
@click.option(
    "--prompt-file",
    type=click.Path(path_type=Path),
    metavar="FILE.jsonl",
    help="Single prompts as for `graphengine run`.  [default: 20 bundled ones]",
)
@click.option("--raw", is_flag=True, help="Take text as it is, without the chat template.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--bucket", type=IntList(), default="1,8", show_default=True, help="Batch sizes.")
@click.option("--matrix", is_flag=True, help="Every graph mode of the device x bucket x batch mix.")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    help="Nats that a token may lie below the plain model's first choice.  [default: 0.20]",
)
@click.option(
    "--min-identical",
    type=click.FloatRange(0, 1),
    help="Share of tokens that must be its first choice.  [default: 0.999 float32, 0.95 bfloat16]",
)
@click.option(
    "--min-acceptance",
    type=click.FloatRange(min=1),
    help="Least mean acceptance length: the only check of the drafter.  [default: 13.5 for the "
    "bundled pair and prompts, else none]",
)
@click.option(
    "--graph-mode", type=click.Choice(["auto", "none", "piecewise", "full"]), default="auto"
)
@click.option("--compile/--no-compile", "compile_", default=None)
@click.option(
    "--attention-backend",
    type=click.Choice(["auto", "flashinfer", "triton", "torch"]),
    default="auto",
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--dtype", type=click.Choice(["auto", "bfloat16", "float32"]), default="auto")
@click.option("--page-size", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--max-model-len", type=click.IntRange(min=2))
@click.option("--gpu-memory-utilization", type=click.FloatRange(0, 1, min_open=True), default=0.9)
@click.option("--draft-quantization", type=click.Choice(["none", "fp8"]), default="none")
@click.option("--output-json", type=click.Path(path_type=Path), help="Write a result file.")
@click.option("--commit", metavar="SHA", help="Commit to record where the checkout has no history.")
@click.option("--json", "as_json", is_flag=True, help="The verdict as one JSON object on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No tables and notes.")
@click.pass_context
def verify(ctx: click.Context, model: str | None, draft: str | None, **options: Any) -> None:
    """Check that MODEL with its drafter says what MODEL alone would say.

    Decodes prompts speculatively, then feeds the output to the plain model and compares every
    token with its first choice. Without MODEL the bundled pair.
    """
    if options["matrix"] and (
        options["graph_mode"] != "auto" or options["attention_backend"] != "auto"
    ):
        raise click.UsageError(
            "--matrix runs every graph mode; leave out --graph-mode and --attention-backend"
        )
    try:
        passed = _verify(model, draft, options)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        ctx.exit(130)
    ctx.exit(0 if passed else 1)


def _verify(model: str | None, draft: str | None, options: dict[str, Any]) -> bool:
    from graphengine.hub import TINY_DRAFT, TINY_TARGET
    from graphengine.report import stderr_console
    from graphengine.verify_run import Mode, matrix_modes

    bundled = model is None and draft is None
    model = model or str(TINY_TARGET)
    draft = str(TINY_DRAFT) if bundled else draft
    draft = None if draft == "none" else draft
    if draft is None and options["min_acceptance"] is not None:
        raise ValueError("--min-acceptance needs a drafter; pass --draft")
    conversations = read_prompt_file(options["prompt_file"] or PROMPTS)
    if any(len(turns) != 1 for turns in conversations):
        raise ValueError("--prompt-file: verify takes single prompts, not conversations")
    at_home = bundled and options["prompt_file"] is None and not options["raw"]
    if at_home and options["max_new_tokens"] >= BUNDLED_MIN_NEW_TOKENS:
        options["min_acceptance"] = options["min_acceptance"] or BUNDLED_MIN_ACCEPTANCE
    console = stderr_console(options["quiet"] or options["as_json"])
    modes = [Mode(options["graph_mode"], options["attention_backend"])]
    if options["matrix"]:
        modes = matrix_modes(options["device"], options["dtype"])
    prompts = [turns[0] for turns in conversations]
    results, texts = _run_modes(model, draft, prompts, modes, options, console)
    return _report(model, draft, results, texts, options, console)


def _run_modes(
    model: str,
    draft: str | None,
    prompts: list[Turn],
    modes: list[Mode],
    options: dict[str, Any],
    console: Console,
) -> tuple[list[CellResult], list[str]]:
    """All cells, and what to say about places where the output is not the first choice."""
    from graphengine.hub import resolve
    from graphengine.tokenizer import Tokenizer
    from graphengine.verify_run import PLAIN, compare_with_plain, encode, mixes_of, verify_mode

    directory = resolve(model)
    tokenizer = Tokenizer(directory) if Tokenizer.exists(directory) else None
    ids = encode(tokenizer, prompts, options["raw"])
    if options["max_model_len"] is None:
        wanted = max(map(len, ids)) + options["max_new_tokens"]
        options["max_model_len"] = longest_context(model, draft, wanted)
    buckets = sorted(set(options["bucket"]))
    cells: list[tuple[int, Mix]] = [(b, "alone" if b == 1 else "together") for b in buckets]
    if options["matrix"]:
        cells = [(bucket, mix) for bucket in buckets for mix in mixes_of(bucket)]
    texts: list[str] = []

    def run(mode: Mode, drafter: str | None, before: list[CellResult]) -> list[CellResult]:
        with _engine(model, drafter, mode, options) as engine:
            config = engine.config
            name = f"{config.graph_mode} {config.attention_backend}"
            found = verify_mode(
                engine.built,
                name if drafter or draft is None else PLAIN,
                ids,
                cells,
                max_new_tokens=options["max_new_tokens"],
                limits=_limits(options, config.dtype, drafter),
                first=[r for r in before if r.cell.mode.split()[1:] == name.split()[1:]],
                progress=lambda cell: console.print(
                    f"{cell.mode}: bucket {cell.bucket}, {cell.mix}", style="dim"
                ),
            )
        for result in found:
            place = result.report.first_true or next(iter(result.report.ties), None)
            if place is not None:
                texts.append(_describe(result, place, tokenizer))
        return found

    results: list[CellResult] = []
    for mode in modes:
        # The first of each attention is what the other graph modes must equal.
        results += run(mode, draft, _firsts(results))
    if options["matrix"] and draft is not None:
        plain = run(modes[0], None, [])
        results = plain + compare_with_plain(results, plain)
    return results, texts


def _firsts(results: list[CellResult]) -> list[CellResult]:
    kept: dict[tuple[str, int, str], CellResult] = {}
    for result in results:
        cell = result.cell
        kept.setdefault((cell.mode.split()[1], cell.bucket, cell.mix), result)
    return list(kept.values())


def _engine(model: str, draft: str | None, mode: Mode, options: dict[str, Any]) -> Engine:
    from graphengine.api import Engine

    return Engine.from_pretrained(
        model,
        draft,
        buckets=options["bucket"],
        graph_mode=mode.graph_mode,  # type: ignore[arg-type]
        attention_backend=mode.attention_backend,  # type: ignore[arg-type]
        compile=options["compile_"],
        draft_quantization=options["draft_quantization"] if draft else "none",
        **{name: options[name] for name in ("device", "dtype", "page_size", "max_model_len")},
        gpu_memory_utilization=options["gpu_memory_utilization"],
    )


def _limits(options: dict[str, Any], dtype: str, draft: str | None) -> Limits:
    from graphengine.verify import DEFAULT_TOLERANCE_NATS, MIN_IDENTICAL, Limits

    tolerance, identical = options["tolerance"], options["min_identical"]
    return Limits(
        tolerance_nats=DEFAULT_TOLERANCE_NATS if tolerance is None else tolerance,
        min_identical=MIN_IDENTICAL[dtype] if identical is None else identical,
        min_acceptance=options["min_acceptance"] if draft else None,
    )


def _describe(result: CellResult, place: Place, tokenizer: Tokenizer | None) -> str:
    """A token that is not the plain model's first choice, with the text around it."""
    import math

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
        f"{result.cell.mode} bucket {result.cell.bucket} {result.cell.mix}: {kind} at request "
        f"{place.request}, token {place.index} ({where}): {text([place.emitted_id])} "
        f"(p {math.exp(place.logprob):.4f}) instead of {text([place.best_id])}, regret "
        f"{place.regret_nats:.4g} nats; after {text(transcript.output_ids[low : place.index])}, "
        f"then {text(transcript.output_ids[place.index + 1 :][:NUM_CONTEXT_TOKENS])}"
    )


def _report(
    model: str,
    draft: str | None,
    results: list[CellResult],
    texts: list[str],
    options: dict[str, Any],
    console: Console,
) -> bool:
    from graphengine.profiles.result_schema import environment, write_result
    from graphengine.verify_run import numbers

    failures = [
        f"{r.cell.mode} bucket {r.cell.bucket} {r.cell.mix}: {check}: {text}"
        for r in results
        for check, text in r.failed.items()
    ]
    console.print(_table(results))
    for text in texts:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    document = {
        "verdict": "FAIL" if failures else "PASS",
        "failures": failures,
        "divergences": texts,
        "model": Path(model).name,
        "draft": Path(draft).name if draft else None,
        **{
            name: list(value) if isinstance(value, tuple) else value
            for name, value in options.items()
            if name not in ("prompt_file", "output_json", "commit", "as_json", "quiet")
        },
        "prompt_file": options["prompt_file"].name if options["prompt_file"] else "bundled",
    }
    measured = numbers(results)
    if options["output_json"]:
        env = environment(options["commit"])
        write_result(options["output_json"], "verify", measured, config=document, env=env)
        console.print(f"wrote {options['output_json']}", highlight=False)
    if options["as_json"]:
        click.echo(json.dumps({"config": document, "numbers": measured}))
    else:
        for failure in failures:
            click.echo(f"FAIL {failure}")
        num_tokens = sum(r.report.num_tokens for r in results)
        click.echo(f"{document['verdict']}: {len(results)} runs, {num_tokens} tokens judged")
    return not failures


def _table(results: list[CellResult]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title="every token against the plain model", box=box.SIMPLE)
    for name in ("mode", "bucket", "mix"):
        table.add_column(name)
    for name in ("tokens", "identical", "ties", "over", "max regret", "mean", "accept", "least"):
        table.add_column(name, justify="right")
    table.add_column("= plain", justify="right")
    table.add_column("verdict")
    for result in results:
        report, cell = result.report, result.cell
        drafting = report.acceptance.num_draft_tokens > 0
        steps = [mean for mean in report.acceptance_per_prompt if mean]
        table.add_row(
            cell.mode,
            str(cell.bucket),
            cell.mix,
            str(report.num_tokens),
            f"{report.identical_fraction:.2%}",
            str(len(report.ties)),
            str(report.num_true),
            f"{report.max_regret_nats:.2g}",
            f"{report.mean_regret_nats:.2g}",
            f"{report.acceptance.mean_acceptance_length:.2f}" if drafting else "-",
            f"{min(steps, default=0):.2f}" if drafting else "-",
            "-" if result.same_as_plain is None else f"{result.same_as_plain}/{result.num_prompts}",
            "[red]FAIL[/] " + " ".join(result.failed) if result.failed else "pass",
        )
    return table
