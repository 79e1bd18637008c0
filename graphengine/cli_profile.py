"""`graphengine profile`: the launch-gap report, with the steps run by ourselves or read from a file.

Where the times come from, best first: nsys (on a GPU, when it is on the PATH), torch.profiler (on a
GPU without it), the host's clock around each named range (CPU). The report is the same; the text
says which it was. Under nsys this command runs itself again as a child: one process, no fork, that
marks its steps with cudaProfilerStart / Stop.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from graphengine.api import Engine
    from graphengine.profiles.launch_gaps import Report

_EPILOG = """\b
Examples:
  graphengine profile
  graphengine profile qwen3-8b --draft qwen3-8b-dflash-b16 --simulate-acceptance 6.35
  graphengine profile --tool nsys --preset node --keep out --svg step.svg
  graphengine profile --read out/graph.sqlite

\b
By hand, with the same names:
  nsys profile -t cuda,nvtx -s none --cpuctxsw=none graphengine run --nvtx --prompt Hi
"""
_FACTS = "facts.json"
_SOURCES = {
    "graph": "nsys, a CUDA graph as one interval (times are close to an unprofiled run's)",
    "node": "nsys, kernels inside CUDA graphs (small kernels read 30-60 % slow; for composition)",
    "torch": "torch.profiler, since nsys was not used (host and small kernels read slow)",
    "cpu": "the host's clock around each step: busy is time inside steps, idle the host between",
}
# Options that a child under nsys gets as they are.
_FORWARDED = (
    *("bucket", "input_len", "num_steps", "warmup", "graph_mode", "attention_backend", "dtype"),
    *("page_size", "simulate_acceptance", "load_format", "seed"),
)


@click.command("profile", epilog=_EPILOG)
@click.argument("model", required=False)
@click.option("--draft", metavar="MODEL|none", help="Drafter; the bundled one without MODEL.")
@click.option(
    "--read",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Report on a .nsys-rep, a .sqlite[.gz] of it, or a torch.profiler .json[.gz] instead of "
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
@click.option("--bucket", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--input-len", type=click.IntRange(min=1), default=128, show_default=True)
@click.option(
    "--num-steps",
    type=click.IntRange(min=1),
    default=30,
    show_default=True,
    help="Steps in the report.",
)
@click.option("--warmup", type=click.IntRange(min=1), default=10, show_default=True)
@click.option(
    "--graph-mode",
    type=click.Choice(["auto", "none", "piecewise", "full"]),
    default="auto",
)
@click.option(
    "--attention-backend",
    type=click.Choice(["auto", "flashinfer", "triton", "torch"]),
    default="auto",
)
@click.option("--compile/--no-compile", "compile_", default=None)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--dtype", type=click.Choice(["auto", "bfloat16", "float32"]), default="auto")
@click.option("--page-size", type=click.IntRange(min=1), default=16, show_default=True)
@click.option(
    "--simulate-acceptance",
    type=float,
    metavar="LENGTH",
    help="Draw this mean acceptance length (random weights accept nothing).",
)
@click.option(
    "--load-format",
    type=click.Choice(["auto", "dummy"]),
    default=None,
    help="dummy: random weights.  [default: dummy for a preset]",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random prompts.")
@click.option(
    "--read-gbps",
    type=click.FloatRange(min=0),
    help="Read bandwidth for the floor; 0 leaves it out.  [default: measured on the GPU]",
)
@click.option("--top", type=click.IntRange(min=1), default=12, show_default=True, help="Kernels.")
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Keep the recorded files (.nsys-rep, .sqlite, .json) here.",
)
@click.option("--svg", type=click.Path(path_type=Path), help="Write the picture here.")
@click.option("--output-json", type=click.Path(path_type=Path), help="Write the result file here.")
@click.option("--commit", metavar="SHA", help="Commit to record where the checkout has no history.")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON on stdout.")
@click.option("--inside", type=click.Path(path_type=Path), hidden=True)
def profile(model: str | None, draft: str | None, **options: Any) -> None:
    """Where a decode step of MODEL waits: wall, busy and idle time by step, class and kernel."""
    from graphengine.report import stderr_console

    console = stderr_console(quiet=False)
    try:
        if options["inside"] is not None:
            _run_inside_nsys(model, draft, options)
        elif options["file"] is not None:
            reports, facts = _read(model, draft, options)
            _deliver(console, reports, facts, options)
        else:
            with _folder(options["keep"]) as folder:
                reports, facts = _run(model, draft, options, Path(folder), console)
            _deliver(console, reports, facts, options)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except RuntimeError as error:
        if not str(error).startswith("nsys "):
            raise
        raise click.ClickException(str(error)) from error


def _folder(keep: Path | None) -> Any:
    """Where recorded files go: the user's folder, or one that is removed."""
    if keep is None:
        return tempfile.TemporaryDirectory(prefix="graphengine-")
    keep.mkdir(parents=True, exist_ok=True)
    return nullcontext(keep)


# --- a file that exists ---


def _read(
    model: str | None, draft: str | None, options: dict[str, Any]
) -> tuple[dict[str, Report], dict[str, Any]]:
    from graphengine.build import read_configs
    from graphengine.profiles import nsys, torch_trace
    from graphengine.profiles.launch_gaps import report
    from graphengine.profiles.segment_bytes import segment_bytes

    file: Path = options["file"]
    name = file.name.removesuffix(".gz")
    if name.endswith(".json"):
        trace = torch_trace.read_chrome_trace(file)
    elif name.endswith(".nsys-rep"):
        program = nsys.find_nsys()
        if program is None:
            raise ValueError(
                f"{file}: reading a .nsys-rep needs nsys, which is not on the PATH; run nsys "
                "export --type sqlite where it is, and pass the .sqlite"
            )
        if not file.is_file():
            raise ValueError(f"{file}: no such file")
        with tempfile.TemporaryDirectory(prefix="graphengine-") as folder:
            exported = Path(folder) / "report.sqlite"
            nsys.run(nsys.export_command(program, file, exported))
            trace = nsys.read_export(exported)
    else:
        trace = nsys.read_export(file)
    facts: dict[str, Any] = {}
    beside = file.parent / _FACTS
    if model is not None:
        target, drafter = read_configs(model, None if draft in (None, "none") else draft)
        itemsize = 4 if options["dtype"] == "float32" else 2
        facts["segment_bytes"] = segment_bytes(target, drafter, itemsize)
    elif beside.is_file():
        facts = json.loads(beside.read_text())
    if options["read_gbps"] is not None:
        facts["read_gbps"] = options["read_gbps"]
    label = name.split(".")[0]
    return {label: report(trace)}, facts


# --- a run ---


def _resolve(
    model: str | None, draft: str | None, options: dict[str, Any]
) -> tuple[str, str | None, str]:
    """Target, drafter and load format, with the bundled pair and presets as defaults."""
    from graphengine.hub import TINY_DRAFT, TINY_TARGET, preset_names

    if model is None:
        model, draft = str(TINY_TARGET), draft or str(TINY_DRAFT)
    load_format = options["load_format"] or ("dummy" if model in preset_names() else "auto")
    return model, None if draft == "none" else draft, load_format


def _run(
    model: str | None, draft: str | None, options: dict[str, Any], folder: Path, console: Console
) -> tuple[dict[str, Report], dict[str, Any]]:
    import torch

    from graphengine.profiles import host_trace, nsys, torch_trace
    from graphengine.profiles.launch_gaps import report
    from graphengine.profiles.profiled_steps import run_steps

    model, draft, load_format = _resolve(model, draft, options)
    on_gpu = options["device"] != "cpu" and torch.cuda.is_available()
    program = nsys.find_nsys() if options["tool"] != "torch" else None
    if options["tool"] != "auto" and not on_gpu:
        raise ValueError(
            f"--tool {options['tool']} records a GPU and torch sees none; leave it out to time "
            "the CPU"
        )
    if options["tool"] == "nsys" and program is None:
        raise ValueError("--tool nsys: nsys is not on the PATH; install it or use --tool torch")
    if program is not None and on_gpu:
        presets = nsys.PRESETS if options["preset"] == "both" else (options["preset"],)
        return _under_nsys(program, presets, model, draft, options, folder, console)
    if on_gpu:
        console.print("nsys is not used: falling back to torch.profiler", markup=False)
        read_gbps = _read_gbps(options)
        with _engine(model, draft, load_format, options) as engine:
            file = folder / "torch.json"
            facts = run_steps(engine, _workload(options), torch_trace.record(file))
        reports = {"torch": report(torch_trace.read_chrome_trace(file))}
    else:
        read_gbps = options["read_gbps"] or 0.0
        with _engine(model, draft, load_format, options) as engine:
            recorder = host_trace.HostRecorder()
            facts = run_steps(engine, _workload(options), host_trace.record(recorder))
        reports = {"cpu": report(recorder.trace())}
    facts |= {"model": Path(model).name, "draft": Path(draft).name if draft else None}
    facts["read_gbps"] = read_gbps
    (folder / _FACTS).write_text(json.dumps(facts))
    return reports, facts


def _under_nsys(
    program: str,
    presets: tuple[str, ...],
    model: str,
    draft: str | None,
    options: dict[str, Any],
    folder: Path,
    console: Console,
) -> tuple[dict[str, Report], dict[str, Any]]:
    """Runs this command once per preset inside nsys; facts are those of the first run."""
    from graphengine.profiles import nsys
    from graphengine.profiles.launch_gaps import report

    reports: dict[str, Report] = {}
    facts: dict[str, Any] = {}
    for preset in presets:
        console.print(f"running under nsys, preset {preset}", markup=False)
        recorded, exported = folder / f"{preset}.nsys-rep", folder / f"{preset}.sqlite"
        inside = folder / f"{preset}-{_FACTS}"
        child = [sys.executable, "-m", "graphengine", "profile", model]
        child += ["--draft", draft or "none", "--inside", str(inside)]
        for name in _FORWARDED:
            if options[name] is not None:
                child += [f"--{name.replace('_', '-')}", str(options[name])]
        if options["compile_"] is not None:
            child.append("--compile" if options["compile_"] else "--no-compile")
        known_gbps = facts.get("read_gbps", options["read_gbps"])
        if known_gbps is not None:
            child += ["--read-gbps", str(known_gbps)]
        nsys.run(nsys.profile_command(program, preset, recorded, child))  # type: ignore[arg-type]
        nsys.run(nsys.export_command(program, recorded, exported))
        reports[preset] = report(nsys.read_export(exported))
        found = json.loads(inside.read_text())
        facts = facts or found
        facts[f"{preset}_profiled_step_ms"] = found["profiled_step_ms"]
    (folder / _FACTS).write_text(json.dumps(facts))
    return reports, facts


def _run_inside_nsys(model: str | None, draft: str | None, options: dict[str, Any]) -> None:
    """The child's part: the steps inside a cudaProfiler range, the facts into a file."""
    from graphengine.profiles.profiled_steps import cuda_profiler_range, run_steps

    model, draft, load_format = _resolve(model, draft, options)
    read_gbps = _read_gbps(options)
    with _engine(model, draft, load_format, options) as engine:
        facts = run_steps(engine, _workload(options), cuda_profiler_range())
    facts |= {"model": Path(model).name, "draft": Path(draft).name if draft else None}
    facts["read_gbps"] = read_gbps
    options["inside"].write_text(json.dumps(facts))


def _workload(options: dict[str, Any]) -> Any:
    from graphengine.profiles.profiled_steps import Workload

    names = ("bucket", "input_len", "num_steps", "warmup", "seed")
    return Workload(**{name: options[name] for name in names})


def _read_gbps(options: dict[str, Any]) -> float:
    """As asked, else measured; before the engine takes the memory."""
    import torch

    from graphengine.bench import read_bandwidth_gbps

    if options["read_gbps"] is not None:
        return options["read_gbps"]
    found = read_bandwidth_gbps()
    torch.cuda.empty_cache()
    return found


def _engine(model: str, draft: str | None, load_format: str, options: dict[str, Any]) -> Engine:
    from graphengine.api import Engine
    from graphengine.build import read_configs

    target, drafter = read_configs(model, draft)
    block = drafter.block_size if drafter else 1
    models = [target] + ([drafter.model] if drafter else [])
    cap = min(m.max_position_embeddings for m in models) - (block if drafter else 0)
    wanted = options["input_len"] + _workload(options).output_len(block) + block
    return Engine.from_pretrained(
        model,
        draft,
        buckets=(options["bucket"],),
        graph_mode=options["graph_mode"],
        attention_backend=options["attention_backend"],
        compile=options["compile_"],
        device=options["device"],
        dtype=options["dtype"],
        page_size=options["page_size"],
        max_model_len=min(wanted, cap),
        load_format=load_format,  # type: ignore[arg-type]
        simulate_acceptance=options["simulate_acceptance"] if draft else None,
    )


# --- what the user gets ---


def _deliver(
    console: Console, reports: dict[str, Report], facts: dict[str, Any], options: dict[str, Any]
) -> None:
    from graphengine.profiles.report_text import picture, print_report

    numbers: dict[str, Any] = {
        label: found.numbers(facts.get("segment_bytes"), facts.get("read_gbps", 0.0))
        for label, found in reports.items()
    }
    for label, found in numbers.items():
        print_report(console, _SOURCES.get(label, label), found, options["top"])
    if "unprofiled_step_ms" in facts:
        console.print(
            f"the same steps without a profiler: {facts['unprofiled_step_ms'] * 1e3:.1f} us each "
            f"(host busy {facts['unprofiled_host_ms'] * 1e3:.1f} us)",
            markup=False,
        )
        numbers["unprofiled"] = {
            "step_p50_ms": facts["unprofiled_step_ms"],
            "host_p50_ms": facts["unprofiled_host_ms"],
            "mean_acceptance_length": facts["mean_acceptance_length"],
        }
    if options["svg"] is not None:
        options["svg"].write_text(picture(reports))
        console.print(f"wrote {options['svg']}", markup=False)
    document = {name: value for name, value in facts.items() if name != "segment_bytes"}
    document["sources"] = {label: _SOURCES.get(label, "a recorded file") for label in reports}
    if options["output_json"] is not None:
        from graphengine.profiles.result_schema import environment, write_result

        env = environment(options["commit"])
        write_result(options["output_json"], "profile", numbers, config=document, env=env)
        console.print(f"wrote {options['output_json']}", markup=False)
    if options["as_json"]:
        click.echo(json.dumps({"config": document, "numbers": numbers}))
