"""`graphengine bench`: the options, and the loop over modes, contexts and buckets.

The measuring itself is in measure/bench.py and, of first tokens, measure/first_token.py; tables and
pictures are in measure/report.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import click

from graphengine.cli import options as shared
from graphengine.config.declaration import declarations, made
from graphengine.config.options import Options, without_drafter

if TYPE_CHECKING:
    from rich.console import Console

    from graphengine.api import Engine
    from graphengine.measure.report import CaseRow


class ModeList(click.ParamType):
    """`piecewise,full:triton` -> (("piecewise", "auto"), ("full", "triton"))."""

    name = "MODE[:ATTENTION],.."
    MODES = click.Choice(declarations(Options)["graph_mode"].choices[1:])  # each a run: no "auto"
    BACKENDS = click.Choice(declarations(Options)["attention_backend"].choices)

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[tuple[str, str], ...]:
        found = []
        for part in value.split(","):
            mode, _, backend = part.partition(":")
            backend = self.BACKENDS.convert(backend or "auto", param, ctx)
            found.append((self.MODES.convert(mode, param, ctx), backend))
        return tuple(found)


_EPILOG = """\b
Examples:
  graphengine bench qwen3-8b --draft qwen3-8b-dflash-b16 --simulate-acceptance 6.35
  graphengine bench qwen3-8b --draft qwen3-8b-dflash-b16 --simulate-acceptance 6.35 \\
      --baseline --context 1024,8192 --plot step.svg
  graphengine bench qwen3-8b --draft qwen3-8b-dflash-b16 --simulate-acceptance 6.35 \\
      --prefill --bucket 1,8 --output-len 256
  graphengine bench qwen3-4b --draft none --bucket 1
  graphengine bench --device cpu --num-iters 20 --bucket 1,4
"""
_SHARED_BY_CASES = ("output_len", "num_iters", "seed")


@click.command("bench", epilog=_EPILOG)
@shared.MODEL
@shared.DRAFT
@click.option(
    "--prefill",
    is_flag=True,
    help="Time first tokens instead of steps: fresh random prompts of each --input-len, as many at "
    "once as --bucket says.",
)
@click.option(
    "--input-len",
    type=shared.IntList(distinct=True),
    help="Prompt tokens; several are several cases.  [default: 128; with --prefill 16, 128, 512, "
    "1024 and 8192, as far as the context goes]",
)
@click.option(
    "--context",
    type=shared.IntList(distinct=True),
    help="Instead of --input-len: tokens of context half-way through a round, prompt included; the "
    "prompt then has half of --output-len less.",
)
@shared.count(
    "--output-len",
    None,
    "Tokens per request of a round; with --prefill whole requests of so many are timed too.  "
    "[default: 512; with --prefill none]",
    low=8,
)
@shared.count(
    "--num-iters",
    None,
    "Steps, with --prefill calls, counted per case.  [default: 200; with --prefill 5]",
)
@shared.count("--warmup", None, "Steps left out first.  [default: 10]", low=0)
@click.option(
    "--compare",
    type=ModeList(),
    help="Graph modes, each a run of its own.  [default: the device's]",
)
@click.option(
    "--baseline",
    is_flag=True,
    help="Time plain decoding (no drafter) of the same cases too, and print the speedup over it.",
)
@shared.declared("bench", buckets=(1,), load_format=shared.PRESET)
@shared.PROMPT_SEED
@shared.PLOT(text="Draw each case's step times and what a step is made of (extra `plot`).")
@shared.RESULT_FILE
@shared.as_json("The result as JSON on stdout.")
def bench(model: str | None, draft: str | None, **options: Any) -> None:
    """Time decode steps of MODEL: a preset (random weights), hub id or directory.

    Steps of full buckets only, prefill excluded; p50 / p95 / p99 of the time between steps. With
    --prefill first tokens, beside the roofline.
    """
    from graphengine.checkpoints.pairs import named_pair
    from graphengine.measure.bench import timed_options
    from graphengine.measure.report import compare_modes, first_token_table, picture
    from graphengine.report import named, print_table, stderr_console

    console = stderr_console(quiet=False)
    asked = shared.taken(options)
    model, draft = named_pair(model, draft)
    asked |= timed_options(model, asked["load_format"])
    prefill = options["prefill"]
    _settle(options)
    if options["baseline"] and draft is None:
        raise ValueError("--baseline compares with plain decoding; pass --draft to have a drafter")
    shared.check_places(options)
    options["input_lens"], asked["max_model_len"] = _lengths(model, draft, options)
    numbers, configs, rows = _time_modes(model, draft, asked, options, console)
    simulated = asked["simulate_acceptance"]
    document = {
        **named(model, draft),
        "simulated_acceptance": simulated,
        "options": asked,
        "modes": configs,
        **{name: options[name] for name in _SHARED_BY_CASES},
    }
    if prefill:
        print_table(console, first_token_table(numbers, simulated))
    else:
        document |= compare_modes(rows, simulated, console) | {"warmup": options["warmup"]}
    draw = partial(picture, rows, simulated)
    kind = "bench_first_token" if prefill else "bench_latency"
    shared.deliver(options, kind, numbers, document, draw)


def _settle(options: dict[str, Any]) -> None:
    """Fills in the defaults, which depend on --prefill. Mutates: options.

    Raises:
        ValueError: one that --prefill does not go with.
    """
    defaults = {"output_len": 512, "num_iters": 200, "warmup": 10}
    if options["prefill"]:
        defaults = {"num_iters": 5}
        remedies = {
            "baseline": "plain decoding's first token is --draft none's",
            "plot": "the table and --output-json have its numbers",
            "context": "pass the prompt's length as --input-len",
            "warmup": "one call goes before each case",
        }
        for name, remedy in remedies.items():
            if options[name] is not None and options[name] is not False:
                raise ValueError(f"--{name} is of steps, --prefill times none: {remedy}")
    options |= {name: default for name, default in defaults.items() if options[name] is None}


def _lengths(model: str, draft: str | None, options: dict[str, Any]) -> tuple[tuple[int, ...], int]:
    """Prompt lengths of the cases, from --input-len or from --context, and the engines' context.

    Raises:
        ValueError: a prompt past the context, before anything is measured, which would be lost.
    """
    from graphengine.measure.first_token import FIRST_REQUEST_TOKENS, INPUT_LENS

    prefill, name = options["prefill"], "context" if options["context"] else "input_len"
    typed, output_len = options[name], options["output_len"] or FIRST_REQUEST_TOKENS
    lengths = typed or (INPUT_LENS if prefill else (128,))
    if name == "context":
        if options["input_len"] is not None:
            raise ValueError("--context and --input-len both set the prompt's length; give one")
        half = output_len // 2
        short = [length for length in lengths if length <= half]
        if short:
            raise ValueError(
                f"--context {short[0]}: a round of --output-len {output_len} already has "
                f"{half} tokens half-way; pass more than {half} or a smaller --output-len"
            )
        lengths = tuple(length - half for length in lengths)
    first = FIRST_REQUEST_TOKENS if prefill else 0
    context = shared.longest_context(model, draft, max(lengths) + max(output_len, first))
    if prefill and typed is None:
        lengths = tuple(n for n in lengths if n + output_len <= context) or (1,)
    least = (options["output_len"] or 1) if prefill else 1
    behind = f" and --output-len {least}" if least > 1 else ""
    for given, length in zip(typed or lengths, lengths, strict=True):
        if length + least > context:
            raise ValueError(
                f"--{name.replace('_', '-')} {given}: prompts of {length} tokens{behind} do not "
                f"fit, these models have a context of {context}; pass less"
            )
    return lengths, context


def _runs(
    draft: str | None, asked: dict[str, Any], options: dict[str, Any]
) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """What is timed: its drafter, and an engine's options."""
    drafters = [None, draft] if options["baseline"] else [draft]
    for (mode, backend), drafter in product(options["compare"] or (("auto", "auto"),), drafters):
        run = asked if drafter == draft else without_drafter(asked)
        yield drafter, run | {"graph_mode": mode, "attention_backend": backend}


def _check_run(model: str, draft: str | None, asked: dict[str, Any]) -> None:
    """Raises: ValueError: an engine with these options cannot run here, or has no room."""
    from graphengine.config.draft_length import longest_draft
    from graphengine.startup.build import read_configs
    from graphengine.startup.memory import device_memory, plan_memory
    from graphengine.startup.options import resolve_options

    target, drafter = read_configs(model, draft)
    config = resolve_options(made(Options, asked), target, drafter)
    longest = longest_draft(config, drafter) if drafter is not None else None
    memory = device_memory(config.device)
    plan_memory(config, target, longest, memory, length_is_explicit=True)


def _time_modes(
    model: str,
    draft: str | None,
    asked: dict[str, Any],
    options: dict[str, Any],
    console: Console,
) -> tuple[dict[str, Any], dict[str, Any], list[CaseRow]]:
    """Times an engine of each mode, with --baseline one without the drafter too.

    Returns: (rates, and numbers by the engine's label, configs by it, all cases of steps).
    Raises: ValueError: one of the modes cannot run here, or has no room.
    """
    import torch

    from graphengine.api import Engine
    from graphengine.measure.bench import gpu_memory
    from graphengine.measure.first_token import run_prefills
    from graphengine.measure.rates import Rates, matmul_tflops, read_bandwidth_gbps

    prefill, runs = options["prefill"], list(_runs(draft, asked, options))
    for drafter, run in runs:  # before another is timed, which would be lost
        _check_run(model, drafter, run)
    rates = Rates(0.0, 0.0)  # what is timed on the CPU has no floor of the GPU beside it
    if asked["device"] != "cpu":
        rates = Rates(read_bandwidth_gbps(), matmul_tflops() if prefill else 0.0)
    numbers: dict[str, Any] = {"read_bandwidth_gbps": rates.read_gbps}
    if prefill:
        numbers["matmul_tflops"] = rates.matmul_tflops
    configs: dict[str, Any] = {}
    rows: list[CaseRow] = []
    for drafter, run in runs:
        began = time.perf_counter()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        with Engine.from_pretrained(model, drafter, **run) as engine:
            startup = {"startup_s": time.perf_counter() - began} | asdict(engine.startup)
            label = f"{engine.config.graph_mode}_{engine.config.attention_backend}"
            label += "" if drafter == draft else "_plain"
            if label in configs:  # two spellings would share a place in the result
                mode = f"{run['graph_mode']}:{run['attention_backend']}"
                console.print(f"{mode} is {label} again: left out")
                continue
            configs[label] = asdict(engine.config)
            del startup["buckets"], startup["num_pages"], startup["draft_widths"]
            for width in engine.startup.draft_widths:
                console.print(f"{label:22}{width.line()}")
                startup[f"draft_width_bucket_{width.bucket}"] = width.to_json()
            if prefill:
                cases = {name: options[name] for name in ("input_lens", *_SHARED_BY_CASES)}
                note = partial(console.print, f"{label:22}")
                measured = run_prefills(engine, rates, note, **cases)
            else:
                found = _time_steps(engine, label, options, rates.read_gbps, console)
                rows += found
                measured = {row.key: row.numbers for row in found}
            numbers[label] = {"startup": startup} | measured | {"memory": gpu_memory()}
    return numbers, configs, rows


def _time_steps(
    engine: Engine, label: str, options: dict[str, Any], read_gbps: float, console: Console
) -> list[CaseRow]:
    """All cases of one engine."""
    from graphengine.measure.bench import Case, check_pool, run_case
    from graphengine.measure.report import CaseRow

    rows: list[CaseRow] = []
    of_all = {name: options[name] for name in ("warmup", *_SHARED_BY_CASES)}
    cases = list(product(options["input_lens"], engine.config.buckets))
    for input_len, bucket in cases:
        check_pool(engine, bucket, input_len, options["output_len"])
    for input_len, bucket in cases:
        result = run_case(engine, Case(bucket=bucket, input_len=input_len, **of_all))
        numbers = dict(result.numbers(read_gbps))
        rows.append(CaseRow(label, f"bucket_{bucket}_input_{input_len}", result, numbers))
        console.print(
            f"{label:22} bucket {bucket:3} input {input_len:6}  "
            f"step {numbers['step_p50_ms']:.3f} ms  host {numbers['host_p50_ms']:.3f} ms"
        )
    return rows
