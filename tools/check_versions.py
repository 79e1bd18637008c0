"""The CPU suite with the oldest and with the newest versions that pyproject.toml allows.

Why: a bound is a claim, and pip hands a user whatever lies within. Environments are made beside the
checkout and kept, so a second run only tests; what each had installed is in the result.

    python tools/check_versions.py --out profiles/results/versions.json -- -m "not slow" tests
    python tools/check_versions.py --env oldest=/envs/old -- tests/kernels

The last line of stdout is one JSON object; the exit code is 1 if a test failed or did not end.
"""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from result_file import parser_of

from graphengine.profiles import result_schema

ROOT = Path(__file__).resolve().parent.parent
LABELS = ("oldest", "newest")
COLUMNS = ("num_passed", "num_failed", "num_skipped", "num_unfinished", "wall_s")


def constraints(label: str) -> list[str]:
    """pip's constraints: the lower bounds of what changes under us, for `newest` none."""
    if label == "newest":
        return []
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pairs = [line.partition(";")[0].partition(",")[0].split(">=") for line in lines]
    held = ("torch", "transformers", "triton")
    return [f"{pair[0]}~={pair[1]}.0" for pair in pairs if pair[0] in held]


def make(label: str, folder: Path) -> Path:
    """An environment's Python, installed anew where there is none."""
    python = folder / "bin" / "python"
    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(constraints(label)))
            file.flush()
            install = [str(python), "-m", "pip", "install", "-q", "-c", file.name]
            subprocess.run([*install, "-e", f"{ROOT}[test]"], check=True)
    return python


def run_tests(python: Path, jobs: int, timeout_s: float, arguments: list[str]) -> dict[str, Any]:
    """What tools/record_tests.py stores of a run with that Python."""
    with tempfile.TemporaryDirectory() as folder:
        stored = Path(folder) / "tests.json"
        tool = [str(python), str(ROOT / "tools" / "record_tests.py"), "--out", str(stored)]
        limits = ["--jobs", str(jobs), "--timeout", str(timeout_s)]
        done = subprocess.run(
            [*tool, *limits, "--", *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if not stored.is_file():
            raise SystemExit(f"{python}: no test ran\n{done.stdout[-2000:]}")
        return json.loads(stored.read_text())


def table(results: dict[str, dict[str, Any]]) -> str:
    """A line per environment."""
    lines = [f"{'':8}{'versions':64}" + "".join(f"{name:>16}" for name in COLUMNS)]
    for label, result in results.items():
        found = result["environment"]["versions"]
        names = ("python", "torch", "triton", "transformers")
        what = ", ".join(f"{name} {found[name]}" for name in names)
        numbers = result["numbers"]
        lines.append(f"{label:8}{what:64}" + "".join(f"{numbers[name]:>16}" for name in COLUMNS))
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--env", action="append", default=[], metavar="oldest|newest=FOLDER")
    parser.add_argument("--folder", type=Path, default=ROOT / ".versions", help="for the others")
    parser.add_argument("--jobs", type=int, default=1, help="test processes at a time")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for each")
    parser.add_argument("--out", type=Path, help="store the result as JSON here")
    parser.add_argument("pytest", nargs="*", help="after --: what pytest shall select")
    args = parser.parse_args()
    given = dict(text.partition("=")[::2] for text in args.env)
    if not set(given) <= set(LABELS) or not all(given.values()):
        parser.error(f"--env {' '.join(args.env)}: pass oldest=FOLDER or newest=FOLDER")
    results = {}
    for label in LABELS:
        python = make(label, Path(given.get(label, args.folder / label)))
        results[label] = run_tests(python, args.jobs, args.timeout, args.pytest or ["tests"])
    print(table(results))
    numbers = {label: result["numbers"] for label, result in results.items()}
    config = {
        label: {
            "versions": result["environment"]["versions"],
            **{key: result["config"][key] for key in ("pytest", "failed", "unfinished")},
        }
        for label, result in results.items()
    }
    if args.out:
        result_schema.write_result(args.out, "versions", numbers, config=config)
    print(json.dumps(numbers))
    bad = [n["num_failed"] + n["num_unfinished"] for n in numbers.values()]
    raise SystemExit(1 if any(bad) else 0)


if __name__ == "__main__":
    main()
