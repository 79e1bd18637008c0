"""Stored measurements: one JSON file per claim, with what is needed to believe and repeat it.

What: `environment()` says on what a number was measured, `write_result` stores numbers with it,
`validate` is the schema. Why: a speed without its GPU, versions, commit and command cannot be
compared with the next one, so a performance change could not be judged later.
Invariant: every number's key ends in its unit (`step_us`, `kv_read_gbps`), so no reader has to
guess; tests/profiles/test_result_schema.py holds every file in profiles/results/ to it.

Only the standard library at import; torch is asked lazily, for the GPU's name.
"""

import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1

REQUIRED = ("schema_version", "kind", "date_utc", "command", "environment", "config", "numbers")
REQUIRED_ENVIRONMENT = (
    "gpu_name",
    "num_gpus",
    "driver_version",
    "cuda_version",
    "gpu_clocks",
    "cpu_name",
    "versions",
    "commit",
    "commit_dirty",
)
PACKAGES = ("torch", "triton", "flashinfer-python", "transformers", "nvtx", "graphengine")

# A key's last word is its unit. Counts begin with num_; the two acceptance lengths are in tokens;
# output_throughput is vLLM's name for tokens per second.
UNITS = (
    *("us", "ms", "s", "bytes", "mb", "gb", "kib", "mib", "gib", "gbps", "tbps", "tflops"),
    *("mhz", "w", "c", "tokens", "rows", "percent", "ratio", "fraction", "nats"),
)
UNITLESS = re.compile(
    r"^(num_\w+|mean_acceptance_length|mean_accepted_draft_tokens|output_throughput|\w+_per_s)$"
)

_CLOCKS = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "clocks.max.sm": "max_sm_mhz",
    "clocks.max.mem": "max_memory_mhz",
    "power.limit": "power_limit_w",
    "temperature.gpu": "temperature_c",
}


def _output(command: Sequence[str], cwd: Path | None = None) -> str | None:
    """A command's stdout; None when it is missing, fails, or takes over 20 s."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _gpu_query(fields: Sequence[str], gpu: str) -> list[str | None]:
    """A GPU's values of nvidia-smi fields; None for what it does not answer.

    Args: gpu: its UUID, or its number among all, of which a process may see others or fewer.
    """
    query = "--query-gpu=" + ",".join(fields)
    text = _output(["nvidia-smi", query, "--format=csv,noheader,nounits", f"--id={gpu}"])
    values = [value.strip() for value in (text or "").split(",")]
    if len(values) != len(fields):
        return [None] * len(fields)
    return [None if not value or value.startswith("[") else value for value in values]


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def environment(commit: str | None = None) -> dict[str, Any]:
    """On what a number is measured: hardware, clocks, versions, commit.

    Args:
        commit: the commit where the checkout has no git history (a copied tree; whether that was
            clean is then not known); default: asked of git, None where that fails.

    Returns:
        A dict with REQUIRED_ENVIRONMENT's keys. `gpu_clocks` are those at the moment of the call,
        so call it right after the measurement, while the GPU is warm.
    """
    import torch

    gpu = torch.cuda.get_device_properties() if torch.cuda.is_available() else None
    read = _gpu_query(list(_CLOCKS), f"GPU-{gpu.uuid}") if gpu else ()
    clocks = dict(zip(_CLOCKS.values(), map(_number, read), strict=False))
    # Resolved, since this folder is reached through a symlink; an installed copy has no history.
    root = Path(__file__).resolve().parent.parent
    is_checkout = commit is None and (root / ".git").exists()
    found = _output(["git", "rev-parse", "HEAD"], cwd=root) if is_checkout else commit
    status = _output(["git", "status", "--porcelain"], cwd=root) if is_checkout else None
    return {
        "gpu_name": gpu.name if gpu else None,
        "num_gpus": torch.cuda.device_count(),
        "driver_version": _gpu_query(["driver_version"], "0")[0],
        "cuda_version": torch.version.cuda,
        "gpu_clocks": clocks or None,
        "cpu_name": _cpu_name(),
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in PACKAGES},
        },
        "commit": found,
        "commit_dirty": bool(status) if status is not None else None,
    }


def command_line(arguments: Sequence[str] | None = None) -> str:
    """The command as a reader would type it: names of files, not where they lie on one machine."""
    program, *rest = sys.argv if arguments is None else arguments
    path = Path(program)
    name = path.parent.name if path.name == "__main__.py" else path.name
    shown = [re.sub(r"(^|=)/\S*/([^/\s]+)/?$", r"\1\2", argument) for argument in rest]
    quoted = [f"'{text}'" if re.search(r"\s", text) else text for text in shown]
    return " ".join([name, *quoted])


def _check_numbers(numbers: Mapping[str, Any], where: str) -> list[str]:
    """Problems of a tree of numbers whose leaves are named with their unit."""
    problems: list[str] = []
    for key, value in numbers.items():
        name = f"{where}.{key}"
        if isinstance(value, Mapping):
            problems += _check_numbers(value, name)
            continue
        if key.rsplit("_", 1)[-1] not in UNITS and not UNITLESS.match(key):
            problems.append(f"{name}: no unit; end it in one of {', '.join(UNITS)}, or num_*")
        leaves = value if isinstance(value, list) else [value]
        for leaf in leaves:
            if isinstance(leaf, bool) or not isinstance(leaf, int | float):
                problems.append(f"{name}: {leaf!r} is no number; put it into config")
            elif not math.isfinite(leaf):
                problems.append(f"{name}: {leaf!r} is not finite")
    return problems


def validate(result: Any) -> list[str]:
    """What is wrong with a result, one sentence each; empty when it is valid."""
    if not isinstance(result, Mapping):
        return ["a result is a JSON object"]
    problems = [f"missing key {key}" for key in REQUIRED if key not in result]
    if problems:
        return problems
    if result["schema_version"] != SCHEMA_VERSION:
        problems.append(f"schema_version is {result['schema_version']!r}, not {SCHEMA_VERSION}")
    if not isinstance(result["kind"], str) or not re.fullmatch(r"[a-z0-9_]+", result["kind"]):
        problems.append(f"kind {result['kind']!r}: lower-case words joined by _")
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", str(result["date_utc"])):
        problems.append(f"date_utc {result['date_utc']!r}: expected 2026-01-31T12:00:00Z")
    for key in ("environment", "config", "numbers"):
        if not isinstance(result[key], Mapping):
            problems.append(f"{key} is no object")
    if problems:
        return problems
    problems += [
        f"missing key environment.{key}"
        for key in REQUIRED_ENVIRONMENT
        if key not in result["environment"]
    ]
    if not result["numbers"]:
        problems.append("numbers is empty")
    return problems + _check_numbers(result["numbers"], "numbers")


def write_result(
    path: Path | str,
    kind: str,
    numbers: Mapping[str, Any],
    *,
    config: Mapping[str, Any],
    notes: str = "",
    env: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes one measurement as validated JSON and returns it.

    Args:
        path: the file, by convention profiles/results/<date>-<gpu>-<kind>.json.
        kind: what was measured, e.g. "decode", "kernels", "startup".
        numbers: key with its unit -> number or list of numbers, nested by label at will, e.g.
            {"batch_1": {"step_us": 812.5, "tokens_per_s": 1510.0}}.
        config: what was run: models, graph mode, batch, prompt set, seeds; any JSON.
        notes: what a reader must know to not misread the numbers.
        env: default: `environment()`.

    Raises:
        ValueError: the result breaks the schema, or the file cannot be written; what was there
            before stays.
    """
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "date_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": command_line(),
        "environment": dict(environment() if env is None else env),
        "config": dict(config),
        "numbers": dict(numbers),
        **({"notes": notes} if notes else {}),
    }
    problems = validate(result)
    if problems:
        raise ValueError("not a valid result: " + "; ".join(problems))
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{path}: its folder cannot be made ({error})") from error
    write_whole(Path(path), text)
    return result


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file whole or not at all; a device or pipe is written as it is.

    Raises:
        ValueError: it cannot be written; what was there before stays.
    """
    content = content.encode() if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)  # where /dev/stdout leads is no path, if it is a pipe
            return
        goal = path.resolve()
        part = goal.with_name(f".{os.getpid()}.part")
        try:
            part.write_bytes(content)
            part.replace(goal)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error}); choose another path") from error
