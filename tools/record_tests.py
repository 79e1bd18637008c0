"""Run tests in parallel processes and store what passed: the evidence of a GPU run.

Why: GPU tests never run in CI, so that they passed is a claim, and a claim needs a file with GPU,
versions and commit. Parallel, because most of their time is compilation on the CPU.

    python tools/record_tests.py --jobs 14 --out profiles/results/gpu-tests.json -- -m gpu tests

The last line of stdout is one JSON object; the exit code is 1 if a test failed or did not end.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from graphengine.profiles import result_schema

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


def collect(arguments: list[str]) -> list[str]:
    """Node ids that pytest selects."""
    done = subprocess.run(
        [*PYTEST, "--collect-only", *arguments], capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    ids = [line for line in lines if line.partition("::")[0].endswith(".py") and "::" in line]
    if not ids:
        raise SystemExit(f"no test selected by {' '.join(arguments)}\n{done.stdout[-2000:]}")
    return ids


def deal(ids: list[str], num_jobs: int) -> list[list[str]]:
    """Neighbours go to different jobs: they take alike long."""
    return [ids[first::num_jobs] for first in range(min(num_jobs, len(ids)))]


def outcomes(report: Path) -> dict[str, str]:
    """Test -> passed, failed or skipped; empty if the job wrote no report."""
    if not report.is_file():
        return {}
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        failed = kinds & {"failure", "error"}
        outcome = "failed" if failed else "skipped" if "skipped" in kinds else "passed"
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return found


def run(ids: list[str], num_jobs: int, timeout_s: float) -> tuple[dict[str, str], str]:
    """(outcome of every test that ended, output of jobs that did not pass)."""
    found: dict[str, str] = {}
    said = []
    with tempfile.TemporaryDirectory() as directory:
        jobs = []
        for index, share in enumerate(deal(ids, num_jobs)):
            report, log = Path(directory, f"{index}.xml"), Path(directory, f"{index}.log")
            command = [*PYTEST, "--tb=short", f"--junitxml={report}", *share]
            with log.open("w") as output:
                process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            jobs.append((process, report, log))
        deadline = time.monotonic() + timeout_s
        for process, report, log in jobs:
            try:
                process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            found |= outcomes(report)
            if process.returncode:
                said.append(log.read_text()[-3000:])
    return found, "\n".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for all of it")
    parser.add_argument("--out", type=Path, help="store the result as JSON here")
    parser.add_argument("--commit", help="where the checkout has no history")
    parser.add_argument("pytest", nargs="*", help="after --: what pytest shall select")
    args = parser.parse_args()
    began = time.monotonic()
    ids = collect(args.pytest)
    found, said = run(ids, args.jobs, args.timeout)
    counts = Counter(found.values())
    numbers = {
        "num_selected": len(ids),
        "num_passed": counts["passed"],
        "num_failed": counts["failed"],
        "num_skipped": counts["skipped"],
        "num_unfinished": len(ids) - len(found),
        "wall_s": round(time.monotonic() - began, 1),
    }
    print(said)
    failed = sorted(name for name, outcome in found.items() if outcome == "failed")
    config = {"pytest": args.pytest, "jobs": args.jobs, "failed": failed}
    if args.out:
        env = result_schema.environment(args.commit)
        result_schema.write_result(args.out, "tests", numbers, config=config, env=env)
    print(json.dumps(numbers))
    raise SystemExit(0 if counts["passed"] + counts["skipped"] == len(ids) else 1)


if __name__ == "__main__":
    main()
