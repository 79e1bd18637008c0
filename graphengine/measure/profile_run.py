"""Where `graphengine profile` gets its trace: nsys, torch.profiler, the host's clock, or a file.

Under nsys the command runs itself again as a child: one process that does not fork and marks its
steps with cudaProfilerStart / Stop. What a trace cannot say (bytes per segment, bandwidth, times
without a profiler) the run writes beside it as facts.json.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from graphengine import names
from graphengine.api import Engine
from graphengine.checkpoints.pairs import named_pair
from graphengine.config.declaration import declarations
from graphengine.config.draft_length import resolve_draft_lengths
from graphengine.config.options import Options
from graphengine.measure.bench import timed_options
from graphengine.measure.profiled_steps import (
    Workload,
    cuda_profiler_range,
    run_prefills,
    run_steps,
)
from graphengine.measure.rates import read_bandwidth_gbps
from graphengine.measure.segment_bytes import bucket_bytes
from graphengine.profiles import host_trace, nsys, torch_trace
from graphengine.profiles.launch_gaps import Report, report
from graphengine.profiles.trace import Trace
from graphengine.report import named
from graphengine.startup.build import read_configs
from graphengine.startup.options import speculation_limit

Found = tuple[dict[str, Report], dict[str, Any]]
"""Reports by label, and the facts of the run."""

_FACTS = "facts.json"


def read_file(model: str | None, draft: str | None, options: dict[str, Any]) -> Found:
    """Reports on a trace that exists; facts from MODEL, else from facts.json beside the file.

    Raises:
        ValueError: the file cannot be read, or recorded no steps.
        RuntimeError: nsys failed; the text begins with "nsys ".
    """
    file: Path = options["file"]
    trace = _read_trace(file)
    facts: dict[str, Any] = {}
    beside = file.parent / _FACTS
    if model is not None:
        target, drafter = read_configs(model, draft)
        size, bucket = 4 if options["dtype"] == "float32" else 2, options["bucket"]
        numbers = resolve_draft_lengths(options["num_speculative_tokens"], (bucket,), drafter)
        own = drafter.shortened(*numbers) if drafter is not None else None
        quantization = options["draft_quantization"]
        facts["segment_bytes"] = bucket_bytes(target, own, size, quantization, bucket)
    elif beside.is_file():
        facts = _read_facts(beside)
    if options["read_gbps"] is not None:
        facts["read_gbps"] = options["read_gbps"]
    if options["prefill"]:
        facts["prefill"] = True
    return {file.name.split(".")[0]: report(trace, _unit(facts))}, facts


def _read_trace(file: Path) -> Trace:
    """By the file's name: of torch.profiler, of nsys, or an export of that."""
    name = file.name.removesuffix(".gz")
    if name.endswith(".json"):
        return torch_trace.read_chrome_trace(file)
    if not name.endswith(".nsys-rep"):
        return nsys.read_export(file)
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
        return nsys.read_export(exported)


def _unit(facts: dict[str, Any]) -> str:
    """The host's range that is a step."""
    return "prefill" if facts.get("prefill") else names.STEP


def _read_facts(file: Path) -> dict[str, Any]:
    """What a run has written beside its trace, checked as far as it is used.

    Raises:
        ValueError: it is something else.
    """
    unprofiled = ("unprofiled_step_ms", "unprofiled_host_ms")
    try:
        facts = json.loads(file.read_text())
        used = [*facts.get("segment_bytes", {}).values(), facts.get("read_gbps", 0.0)]
        if any(name in facts for name in unprofiled):
            used += [facts[name] for name in unprofiled]
            used.append(facts.get("mean_acceptance_length", 0.0))
        if not all(math.isfinite(number) for number in used):
            raise ValueError("a number is not finite")
        facts.get("config", {}).get("simulate_acceptance")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{file}: not the facts of a profile ({error!r}); pass MODEL, or move it away"
        ) from error
    return facts


def run(
    model: str | None,
    draft: str | None,
    options: dict[str, Any],
    folder: Path,
    note: Callable[[str], None],
) -> Found:
    """Records decode steps with the best source there is.

    Args:
        options: the command's.
        folder: where recorded files and facts.json go.
        note: told what is being done.

    Raises:
        ValueError: an option that cannot work here.
        RuntimeError: nsys failed; the text begins with "nsys ".
    """
    model, draft = named_pair(model, draft)
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
        reports, facts = _under_nsys(program, presets, model, draft, options, folder, note)
    elif on_gpu:
        note("nsys is not used: falling back to torch.profiler")
        file = folder / "torch.json"
        facts = _record(model, draft, options, torch_trace.record(file))
        reports = {"torch": report(torch_trace.read_chrome_trace(file), _unit(facts))}
    else:
        if options.get("keep") is not None:
            note("--keep gets facts.json alone: on the CPU steps are timed, and nothing recorded")
        recorder = host_trace.HostRecorder()
        asked = options | {"read_gbps": options["read_gbps"] or 0.0}
        facts = _record(model, draft, asked, host_trace.record(recorder))
        reports = {"cpu": report(recorder.trace(), _unit(facts))}
    try:
        (folder / _FACTS).write_text(json.dumps(facts))
    except OSError as error:  # the report needs it no more
        note(f"{folder / _FACTS} cannot be written ({error})")
    return reports, facts


def _under_nsys(
    program: str,
    presets: tuple[nsys.Preset, ...],
    model: str,
    draft: str | None,
    options: dict[str, Any],
    folder: Path,
    note: Callable[[str], None],
) -> Found:
    """Runs this command once per preset inside nsys; facts are those of the first run."""
    reports: dict[str, Report] = {}
    facts: dict[str, Any] = {}
    for preset in presets:
        note(f"running under nsys, preset {preset}")
        recorded, exported = folder / f"{preset}.nsys-rep", folder / f"{preset}.sqlite"
        inside = folder / f"{preset}-{_FACTS}"
        child = [sys.executable, "-m", "graphengine", "profile", model]
        child += ["--draft", draft or "none", "--inside", str(inside)]
        child += ["--prefill"] * options["prefill"]
        for name in Workload._fields:
            child += [f"--{name.replace('_', '-')}", str(options[name])]
        for name, declared in declarations(Options).items():
            if options.get(name) != declared.default:
                child += declared.arguments(options.get(name))
        known_gbps = facts.get("read_gbps", options["read_gbps"])
        if known_gbps is not None:
            child += ["--read-gbps", str(known_gbps)]
        nsys.run(nsys.profile_command(program, preset, recorded, child))
        nsys.run(nsys.export_command(program, recorded, exported))
        found = json.loads(inside.read_text())
        reports[preset] = report(nsys.read_export(exported), _unit(found))
        facts = facts or found
        facts[f"{preset}_profiled_step_ms"] = found["profiled_step_ms"]
    return reports, facts


def run_inside_nsys(model: str | None, draft: str | None, options: dict[str, Any]) -> None:
    """The child's part: the steps inside a cudaProfiler range, the facts into a file.

    Raises:
        ValueError: there is no GPU to record.
    """
    if options["device"] == "cpu" or not torch.cuda.is_available():
        raise ValueError(
            "--inside is for the child that nsys watches, which records a GPU, and there is none; "
            "leave it out"
        )
    facts = _record(*named_pair(model, draft), options, cuda_profiler_range())
    options["inside"].write_text(json.dumps(facts))


def _record(
    model: str, draft: str | None, options: dict[str, Any], profiler: AbstractContextManager[Any]
) -> dict[str, Any]:
    """Runs the steps inside `profiler`; the facts, of random weights where MODEL is a preset."""
    read_gbps = options["read_gbps"]
    if read_gbps is None:  # before the engine takes the memory
        read_gbps = read_bandwidth_gbps()
        torch.cuda.empty_cache()
    workload = Workload(**{name: options[name] for name in Workload._fields})
    target, drafter = read_configs(model, draft)
    block = drafter.num_verify_rows if drafter else 1
    output_len = 1 if options["prefill"] else workload.output_len(block)
    wanted = workload.input_len + output_len + block
    asked = {name: value for name, value in options.items() if name in declarations(Options)}
    asked |= timed_options(model, asked["load_format"]) | {
        "buckets": (workload.bucket,),
        "max_model_len": min(wanted, speculation_limit(target, drafter)),
    }
    with Engine.from_pretrained(model, draft, **asked) as engine:
        run = run_prefills if options["prefill"] else run_steps
        facts = run(engine, workload, profiler)
    return facts | named(model, draft) | {"read_gbps": read_gbps}
