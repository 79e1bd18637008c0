"""Runs one command in two checkouts by turns on one machine, and compares what they measured.

Why: machines differ by 3 % and a machine by 1 % from minute to minute; a change of half a percent
is seen only where both sides run beside each other, by turns, on fresh processes. The first pair of
runs fills the caches and is left out.

    python tools/side_by_side.py --before ../old --runs 3 --out ab.json -- \\
        bench qwen3-8b --draft qwen3-8b-dflash-b16 --simulate-acceptance 6.35 --bucket 1,8,16

For each row of the result files: the median of the runs' `step_p50_ms` before and after, their
ratio, and whether the tokens are the same; for each mode how long both sides took to start, in the
first pair (cold) and after it (warm). The last line of stdout is that as one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from result_file import parser_of

from graphengine.profiles.result_schema import environment, write_result

ROOT = Path(__file__).resolve().parents[1]


def run(checkout: Path, command: list[str], caches: Path, out: Path) -> dict[str, Any]:
    """One run's result file. Its compiled code lies apart from the other side's."""
    paths = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    places = {name: str(caches / name) for name in ("inductor", "triton", "graphengine")}
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "GRAPHENGINE_CACHE": places["graphengine"],
        "TORCHINDUCTOR_CACHE_DIR": places["inductor"],
        "TRITON_CACHE_DIR": places["triton"],
    }
    whole = [sys.executable, "-m", "graphengine", *command, "--output-json", str(out)]
    subprocess.run(whole, cwd=checkout, env=env, check=True, stdout=subprocess.DEVNULL)
    return json.loads(out.read_text())


def steps(result: dict[str, Any]) -> dict[str, float]:
    """Row of a bench's result file -> its median step, ms."""
    return {
        f"{mode}_{row}": numbers["step_p50_ms"]
        for mode, rows in result["numbers"].items()
        if isinstance(rows, dict)
        for row, numbers in rows.items()
        if isinstance(numbers, dict) and "step_p50_ms" in numbers
    }


def compare(sides: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Row -> medians, ratio and whether the tokens agree, of every run but the first."""
    found = {}
    for row in steps(sides["before"][0]):
        times = {side: [steps(r)[row] for r in results[1:]] for side, results in sides.items()}
        before, after = (statistics.median(times[side]) for side in ("before", "after"))
        digests = {r["config"]["token_digests"][row] for results in sides.values() for r in results}
        found[row] = {
            "before_p50_ms": before,
            "after_p50_ms": after,
            "after_over_before_ratio": after / before,
            "spread_before_ms": max(times["before"]) - min(times["before"]),
            "spread_after_ms": max(times["after"]) - min(times["after"]),
            "num_token_digests": len(digests),
        }
    return found


def starts(sides: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Mode -> seconds to start: of the first run, and the median of the others."""
    found: dict[str, dict[str, float]] = {}
    for side, results in sides.items():
        for mode, rows in results[0]["numbers"].items():
            if isinstance(rows, dict) and "startup" in rows:
                cold, *warm = (r["numbers"][mode]["startup"]["startup_s"] for r in results)
                seconds = {f"{side}_cold_s": cold, f"{side}_warm_s": statistics.median(warm)}
                found.setdefault(f"{mode}_start", {}).update(seconds)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Runs both sides by turns. Returns the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--before", type=Path, required=True, help="another checkout")
    parser.add_argument("--after", type=Path, default=ROOT, help="default: this one")
    parser.add_argument("--runs", type=int, default=3, help="of each side, besides the first")
    parser.add_argument("--out", type=Path, required=True, help="the result file")
    parser.add_argument("--commit", help="of --after, where it has no history")
    parser.add_argument("command", nargs="+", help="of graphengine; it takes --output-json")
    args = parser.parse_args(arguments)
    if args.runs < 1:
        parser.error(f"--runs {args.runs}: there is a median of 1 or more")
    sides: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
    for side in sides:
        if not (checkout := getattr(args, side)).is_dir():
            parser.error(f"--{side} {checkout}: no such folder; pass a checkout")
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.runs + 1):
            for side, results in sides.items():
                checkout = getattr(args, side).resolve()
                out = Path(folder) / "result.json"
                results.append(run(checkout, args.command, Path(folder) / side, out))
                print(side, *(f"{ms:.3f}" for ms in steps(results[-1]).values()), flush=True)
        numbers = compare(sides)
    for row, found in numbers.items():
        ratio = found["after_over_before_ratio"]
        before, after = found["before_p50_ms"], found["after_p50_ms"]
        print(f"{row}: {before:.4f} -> {after:.4f} ms ({ratio:.4f})")
    numbers |= starts(sides)
    config = {"command": args.command, "num_runs": args.runs, "before": str(args.before.name)}
    write_result(
        args.out, "side_by_side", numbers, config=config, env=environment(commit=args.commit)
    )
    print(json.dumps(numbers))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
