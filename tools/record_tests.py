"""Run tests in parallel processes and store what passed: the evidence of a GPU run.

Why: GPU tests never run in CI, so that they passed is a claim, and a claim needs a file with GPU,
versions and commit. Parallel, because most of their time is compilation on the CPU; tests that
judge measured times or the GPU's free memory run after the others, alone.

    python tools/record_tests.py --jobs 14 --out profiles/results/gpu-tests.json -- -m gpu tests

The last line of stdout is one JSON object; the exit code is 1 if a test failed or did not end.
SIGTERM ends the jobs, and what they have said by then is stored.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from measure import POLL_S, noted_termination
from result_file import add_result_file, parser_of, store

# This module is a plugin of the jobs' pytest too.
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", Path(__file__).stem]
TOOLS = Path(__file__).parent
ALONE = "test_busy_is_less_than_the_step|test_memory_on_gpu"  # judge time, the GPU's free memory
OUTCOME = re.compile(r"^(\S+\.py::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
REASON = re.compile(r"^BECAUSE (\S+\.py::.+?) - (.*)$", re.MULTILINE)


class Ran(NamedTuple):
    """What jobs said."""

    outcomes: dict[str, str]  # of every test that ended
    reasons: dict[str, str]  # why tests failed, in a line each
    tails: str  # of the jobs that did not pass


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first: the time limit would cut off one that begins last. Mutates: items."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(trylast=True)  # behind the line that says FAILED
def pytest_runtest_logreport(report: Any) -> None:
    """Prints why a test failed at once: a job that is ended early has no summary."""
    if report.failed:
        lines = str(report.longrepr).splitlines() or [""]
        told = [line[1:].strip() for line in lines if line.startswith("E ")]
        print(f"\nBECAUSE {report.nodeid} - {(told or lines[-1:])[0]}")
        print("\n".join(lines[-30:]), flush=True)


def collect(arguments: list[str]) -> list[str]:
    """Node ids that pytest selects. A module that cannot be imported ends the run: its tests would
    be missing from the evidence without a word."""
    done = subprocess.run(
        [*PYTEST, "-q", "--collect-only", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment(1),
    )
    lines = done.stdout.splitlines()
    ids = [line for line in lines if line.partition("::")[0].endswith(".py") and "::" in line]
    if done.returncode or not ids:
        raise SystemExit(f"pytest cannot select {' '.join(arguments)}\n{done.stdout[-2000:]}")
    return ids


def deal(ids: list[str], num_jobs: int) -> list[list[str]]:
    """Neighbours go to different jobs: they take alike long."""
    return [ids[first::num_jobs] for first in range(min(num_jobs, len(ids)))]


def environment(num_jobs: int) -> dict[str, str]:
    """Each job's share of the cores. Alone, every one would take all of them: for torch's threads,
    for Inductor's workers and for the ninja that builds FlashInfer."""
    share = str(max(1, (os.cpu_count() or 1) // num_jobs))
    shares = {"OMP_NUM_THREADS": share, "TORCHINDUCTOR_COMPILE_THREADS": share, "MAX_JOBS": "8"}
    path = os.pathsep.join(filter(None, [str(TOOLS), os.environ.get("PYTHONPATH")]))
    return shares | os.environ | {"PYTHONPATH": path}


def run(ids: list[str], num_jobs: int, timeout_s: float, terminated: Sequence[int]) -> Ran:
    """Runs tests until they end, their time is up or `terminated` is not empty."""
    outcomes: dict[str, str] = {}
    reasons: dict[str, str] = {}
    tails = []
    env = environment(num_jobs)
    with tempfile.TemporaryDirectory() as directory:
        jobs = []
        for index, share in enumerate(deal(ids, num_jobs)):
            log = Path(directory, f"{index}.log")
            with log.open("w") as output:
                command = [*PYTEST, "-v", "--tb=short", "--show-capture=no", *share]
                process = subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, env=env
                )
            jobs.append((process, log))
        deadline = time.monotonic() + timeout_s
        while any(process.poll() is None for process, _ in jobs):
            if terminated or time.monotonic() >= deadline:
                break
            time.sleep(POLL_S)
        for process, log in jobs:
            process.kill()  # no effect on one that has ended
            process.wait()
            text = log.read_text()
            outcomes |= dict(OUTCOME.findall(text))
            reasons |= dict(REASON.findall(text))
            if process.returncode:
                tails.append(text[-4000:])
    return Ran(outcomes, reasons, "\n".join(tails))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for all of it")
    parser.add_argument("--alone", default=ALONE, help="regex of tests to run after the others")
    add_result_file(parser)
    parser.add_argument("pytest", nargs="*", help="after --: what pytest shall select")
    args = parser.parse_args()
    if args.jobs < 1 or not args.timeout > 0:
        parser.error(f"--jobs {args.jobs} --timeout {args.timeout}: pass more than 0")
    try:
        re.compile(args.alone)
    except re.error as error:
        parser.error(f"--alone {args.alone}: no regular expression ({error})")
    began = time.monotonic()
    ids = collect(args.pytest)
    apart = [name for name in ids if re.search(args.alone, name)]
    with noted_termination() as terminated:
        ran = run([name for name in ids if name not in apart], args.jobs, args.timeout, terminated)
        left_s = args.timeout - (time.monotonic() - began)
        if apart and left_s > 0 and not terminated:
            alone = run(apart, 1, left_s, terminated)
            ran = Ran(
                ran.outcomes | alone.outcomes,
                ran.reasons | alone.reasons,
                ran.tails + alone.tails,
            )
    found = ran.outcomes
    unfinished = sorted(set(ids) - set(found))
    counts = Counter(found.values())
    numbers = {
        "num_selected": len(ids),
        "num_passed": counts["PASSED"],
        "num_failed": counts["FAILED"] + counts["ERROR"],
        "num_skipped": counts["SKIPPED"],
        "num_unfinished": len(unfinished),
        "wall_s": round(time.monotonic() - began, 1),
    }
    print(ran.tails)
    failed = sorted(name for name, outcome in found.items() if outcome in ("FAILED", "ERROR"))
    config = {
        "pytest": args.pytest,
        "jobs": args.jobs,
        "failed": failed,
        "reasons": ran.reasons,
        "unfinished": unfinished,
    }
    store(args, "tests", numbers, config=config)
    print(json.dumps(numbers))
    raise SystemExit(0 if counts["PASSED"] + counts["SKIPPED"] == len(ids) else 1)


if __name__ == "__main__":
    main()
