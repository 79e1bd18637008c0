"""Measures what profiles/RESULTS.md quotes of ours, and the evidence of a GPU, one file a job.

Why: a figure is worth what it takes to get it again. Each job is one of the project's own commands,
run as a user would type it; what it prints goes to DIR/<job>.log, what it measured to
DIR/<job>.json. Jobs run one after another, so that none disturbs another's times, and one that
fails or runs out of time does not stop the rest.

    python tools/measure.py --list
    python tools/measure.py --out /tmp/h200 8b-modes 8b-fp8
    python tools/measure.py --out /tmp/h200 --seconds 600      # every job, as far as time goes

The last line of stdout is one JSON object: job -> seconds, or why there are none; also after
SIGTERM, which ends the running job and begins no other. Exit code 1 if any job failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.05
ROOT = Path(__file__).resolve().parents[1]
GRAPHENGINE = (sys.executable, "-m", "graphengine")
PAIR_8B = "qwen3-8b --draft qwen3-8b-dflash-b16 --simulate-acceptance 6.35"
PAIR_4B = "qwen3-4b --draft qwen3-4b-dflash-b16 --simulate-acceptance 6.35"
HYBRID_4B = "qwen3.5-4b --draft qwen3.5-4b-dflash-b16"
FP8, DYNAMIC = "--draft-quantization fp8", "--draft-quantization fp8-dynamic"
PAIR_20B = f"gpt-oss-20b --draft gpt-oss-20b-dflash-b8 {FP8} --simulate-acceptance 4.5"
UNIFORM = "--load-format dummy-uniform"
FULL = "--compare full"
BATCHES = f"{FULL} --bucket 1,8,16"
SPEC_11 = f"{FULL} --bucket 16 --num-speculative-tokens 11"
FIRST_TOKENS = f"--prefill {FULL} --output-len 256"
LENGTHS = "--input-len 128,1024,8192,32000"


@dataclass(frozen=True, slots=True)
class Job:
    """A command without the places of its results.

    Attributes:
        output: its option for the result file.
        folder: its option for a folder of further files.
        tail: what follows all options.
    """

    command: tuple[str, ...]
    timeout_s: int = 300
    output: str = "--output-json"
    folder: str | None = None
    tail: tuple[str, ...] = ()


def _bench(args: str) -> Job:
    return Job((*GRAPHENGINE, "bench", *args.split()))


def _profile(args: str) -> Job:
    return Job((*GRAPHENGINE, "profile", *f"{PAIR_8B} {args}".split()), folder="--keep")


def _verify(args: str) -> Job:
    return Job((*GRAPHENGINE, "verify", *args.split()))


def _tool(name: str, args: str = "") -> Job:
    command = (sys.executable, str(ROOT / "tools" / name), *args.split())
    return Job(command, output="--out")


def _requests(target: str, args: str) -> Job:
    pair = f"--target {target} --draft {target}-dflash-b16 {UNIFORM} {DYNAMIC}"
    return _tool("measure_requests.py", f"{pair} --graph-mode full --seconds 230 {args}")


START = _bench(f"{PAIR_8B} {DYNAMIC} {UNIFORM} {BATCHES} --num-iters 20")
# In the order of their worth: whatever time is left goes to the later ones.
JOBS: dict[str, Job] = {
    "8b-start-cold": START,  # where caches are empty: first on a fresh machine
    "8b-start-warm": START,
    "8b-modes": _bench(f"{PAIR_8B} --compare piecewise,full --bucket 1,8,16 --baseline"),
    "8b-fp8": _bench(f"{PAIR_8B} {FP8} {BATCHES}"),
    "8b-fp8-dynamic": _bench(f"{PAIR_8B} {DYNAMIC} {BATCHES}"),
    "8b-spec-11": _bench(f"{PAIR_8B} {DYNAMIC} {SPEC_11}"),
    "8b-uniform-spec-11": _bench(f"{PAIR_8B} {DYNAMIC} {UNIFORM} {SPEC_11}"),
    "8b-uniform": _bench(f"{PAIR_8B} {UNIFORM} {BATCHES}"),
    "8b-uniform-fp8-dynamic": _bench(f"{PAIR_8B} {DYNAMIC} {UNIFORM} {BATCHES}"),
    # After 8b-modes on the same machine: the warm start.
    "8b-warm": _bench(f"{PAIR_8B} --compare piecewise,full --bucket 1,8,16 --num-iters 20"),
    "8b-8k": _bench(f"{PAIR_8B} {FULL} --input-len 8192"),
    "8b-8k-fp8": _bench(f"{PAIR_8B} {FP8} {FULL} --input-len 8192"),
    "8b-first-token": _bench(f"{PAIR_8B} {FIRST_TOKENS} --bucket 1,8,16"),
    "8b-first-token-32k": _bench(f"{PAIR_8B} {FIRST_TOKENS} --input-len 32000"),
    "8b-first-token-uniform": _bench(f"{PAIR_8B} {FP8} {UNIFORM} {FIRST_TOKENS} {LENGTHS}"),
    "8b-requests": _requests("qwen3-8b", "--baseline-engine"),
    "4b-hybrid-requests": _requests("qwen3.5-4b", "--only turns,join"),
    "4b-hybrid": _bench(f"{HYBRID_4B} {DYNAMIC} --simulate-acceptance 6 {BATCHES}"),
    "4b-hybrid-plain": _bench(f"qwen3.5-4b --draft none {FULL}"),
    "4b-hybrid-first-token": _bench(f"{HYBRID_4B} {FP8} --prefill {LENGTHS} {FULL}"),
    "4b-hybrid-first-token-uniform": _bench(
        f"{HYBRID_4B} {FP8} {UNIFORM} --prefill {LENGTHS} {FULL}"
    ),
    "35b-plain": _bench(f"qwen3.6-35b-a3b --draft none {FULL}"),
    "30b-plain": _bench(f"qwen3-30b-a3b --draft none {FULL}"),
    "gpt-oss-20b": _bench(f"{PAIR_20B} {BATCHES}"),
    "gpt-oss-20b-plain": _bench(f"gpt-oss-20b --draft none {FULL}"),
    "gpt-oss-20b-piecewise": _bench(f"{PAIR_20B} --compare piecewise"),
    "gpt-oss-20b-first-token": _bench(
        f"{PAIR_20B} --prefill {FULL} --input-len 16,128,512,1024,8192"
    ),
    "35b-drafted": _bench(
        f"qwen3.6-35b-a3b --draft qwen3.6-35b-a3b-dflash-b16 {FP8} --simulate-acceptance 5.4 {FULL}"
    ),
    "4b-first-token": _bench(f"{PAIR_4B} {FIRST_TOKENS} --input-len 16,128,512,1024,8192,32000"),
    "4b-first-token-uniform": _bench(
        f"{PAIR_4B} {FP8} {UNIFORM} {FIRST_TOKENS} --input-len 128,1024,8192"
    ),
    "4b-modes": _bench(f"{PAIR_4B} --compare piecewise,full --bucket 1,8,16 --baseline"),
    "4b-fp8": _bench(f"{PAIR_4B} {FP8} {FULL} --bucket 1"),
    "4b-fp8-dynamic": _bench(f"{PAIR_4B} {DYNAMIC} {BATCHES}"),
    "4b-uniform-fp8-dynamic": _bench(f"{PAIR_4B} {DYNAMIC} {UNIFORM} {BATCHES}"),
    "4b-uniform-spec-11": _bench(f"{PAIR_4B} {DYNAMIC} {UNIFORM} {SPEC_11}"),
    "4b-uniform": _bench(f"{PAIR_4B} {UNIFORM} {BATCHES}"),
    "8b-1k": _bench(f"{PAIR_8B} {FULL} --input-len 1024 --bucket 16"),
    "tiny-modes": _bench(
        "--compare none,piecewise,full:flashinfer,full:triton --bucket 1,8,16 --num-iters 60"
    ),
    "verify-matrix": _verify("--matrix --bucket 1,8,16"),
    "verify-sampled": _verify("--temperature 1"),
    "8b-profile-piecewise": _profile("--graph-mode piecewise"),
    "8b-profile-full": _profile("--graph-mode full"),
    "8b-profile-full-bs16": _profile("--graph-mode full --bucket 16"),
    "soak-piecewise": _tool("soak.py", "--device auto --graph-mode piecewise"),
    "soak-full": _tool("soak.py", "--device auto --graph-mode full"),
    "kernels": _tool("bench_kernels.py"),
    "attention-sweep": _tool(
        "bench_kernels.py", "--sweep block_attention --batch 8 16 --kv 400 1024 8192"
    ),
    "tune-16": _tool("tune_skinny.py", "--seconds 120"),
    "tune-128": _tool("tune_skinny.py", "--cases 8b --rows 128 --seconds 100"),
    "tune-192": _tool("tune_skinny.py", "--cases 8b --rows 192 --seconds 100"),
    "tune-256": _tool("tune_skinny.py", "--cases 8b --rows 256 --seconds 100"),
    "tune-4b-128": _tool("tune_skinny.py", "--cases 4b --rows 128 --seconds 80"),
    "tune-4b-256": _tool("tune_skinny.py", "--cases 4b --rows 256 --seconds 80"),
    "tune-4b-fp8": _tool("tune_skinny.py", "--cases 4b-fp8 --seconds 60"),
    "tests": Job(
        (sys.executable, str(ROOT / "tools/record_tests.py"), "--jobs", "15", "--timeout", "400"),
        timeout_s=420,
        output="--out",
        tail=("--", "-m", "gpu"),
    ),
}


@contextmanager
def noted_termination() -> Iterator[list[int]]:
    """Yields a list that grows by every SIGTERM instead of the process ending: `timeout` sends two,
    and the second must not interrupt what the first has begun."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)


def run(
    name: str,
    job: Job,
    directory: Path,
    commit: str | None,
    timeout_s: float,
    terminated: Sequence[int],
) -> str | None:
    """Runs a job until it ends, its time is up or `terminated` is not empty; returns what went
    wrong."""
    command = [*job.command, job.output, str(directory / f"{name}.json")]
    if job.folder:
        command += [job.folder, str(directory / name)]
    if commit:
        command += ["--commit", commit]
    command += job.tail
    with (directory / f"{name}.log").open("w") as log:
        print(" ".join(command), file=log, flush=True)
        # In a session of its own: whatever it has started ends with it, and later jobs' times are
        # not disturbed.
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )
        deadline = time.monotonic() + timeout_s
        try:
            while (code := process.poll()) is None:
                if terminated:
                    return "stopped by SIGTERM"
                if time.monotonic() >= deadline:
                    return f"stopped after {timeout_s:.0f} s"
                time.sleep(POLL_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return f"exit code {code}" if code else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="default: all")
    parser.add_argument("--list", action="store_true", help="print the jobs and their commands")
    parser.add_argument("--out", type=Path, help="folder of the result files and logs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all jobs")
    parser.add_argument(
        "--commit", metavar="SHA", help="commit to record where the checkout has no history"
    )
    args = parser.parse_args()
    if args.list:
        width = max(map(len, JOBS))
        for name, job in JOBS.items():
            print(f"{name:{width}}  {' '.join([*job.command[1:], *job.tail])}")
        return
    unknown = sorted(set(args.jobs) - set(JOBS))
    if unknown or args.out is None:
        parser.error(f"no such job: {unknown}; see --list" if unknown else "--out DIR is missing")
    if not args.seconds > 0:  # nan would be no limit at all
        parser.error(f"--seconds {args.seconds}: pass more than 0")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out}: no folder ({error})")
    deadline = time.monotonic() + args.seconds
    summary: dict[str, float | str] = {}
    failed = False
    with noted_termination() as terminated:
        for name in args.jobs or JOBS:
            began = time.monotonic()
            left_s = min(JOBS[name].timeout_s, deadline - began)
            problem = "no time left" if left_s < 1 else None
            if terminated:
                problem = "not begun: SIGTERM"
            if problem is None:
                problem = run(name, JOBS[name], args.out, args.commit, left_s, terminated)
            failed = failed or problem is not None
            summary[name] = problem or round(time.monotonic() - began, 1)
            print(f"{name}: {summary[name]}", flush=True)
        print(json.dumps(summary), flush=True)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
