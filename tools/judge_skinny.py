"""Judge entries of the GEMMs' table by what they are for: the step of an engine.

Why: a GEMM that is faster alone, or in tune_skinny.py's layers, may be slower in a step, where
power, attention and the kernels that overlap with it decide (profiles/LOG.md has both cases).
How: one engine; its bucket is built again with other entries, and graphengine bench's own case is
timed. First the table as it is, then each change alone, then one change after another beside the
best so far, each kept if the step is faster by more than --gain; at last the table again, which
shows how far the machine drifted. With --first-token it is a prompt's chunk that is captured
again, and the time from a prompt's arrival to its first token that is judged.

    python tools/judge_skinny.py changes.json --model qwen3-8b --draft qwen3-8b-dflash-b16 \\
        --bucket 1 --seconds 100 --out judged.json

changes.json: {"o": {"(4096, 4096, 2, 16)": [64, 256, 5, 2, 1, 4, 2, 1, 16, 1]}, ..}, a name, and
what it changes: (E, D, bytes of a weight, T) -> a SkinnyConfig's fields, or null for no entry.

The last line of stdout is one JSON object with the names that were kept.
"""

from __future__ import annotations

import argparse
import ast
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from result_file import add_result_file, parser_of, store

from graphengine.api import Engine
from graphengine.capture.compile import forget
from graphengine.kernels.skinny_config import TUNED, SkinnyConfig
from graphengine.measure.bench import Case, run_case
from graphengine.measure.first_token import PrefillCase, run_prefill
from graphengine.measure.rates import Rates

Key = tuple[int, int, int, int]
OUTPUT_LEN = 512  # of a request, in tokens
Changes = dict[str, dict[Key, SkinnyConfig | None]]


def read_changes(path: Path) -> Changes:
    """The file's changes.

    Raises:
        ValueError: the file, a key or a config is not what it should be.
    """
    try:
        found = json.loads(path.read_text())
        return {
            name: {_key(key): None if c is None else SkinnyConfig(*c) for key, c in change.items()}
            for name, change in found.items()
        }
    except (OSError, SyntaxError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: no changes of the table ({error}); see --help") from error


def _key(text: str) -> Key:
    key = ast.literal_eval(text)
    if not (isinstance(key, tuple) and len(key) == 4 and all(isinstance(n, int) for n in key)):
        raise ValueError(f"{text!r} is not (E, D, bytes of a weight, T)")
    return key


def judge(
    names: list[str], step_ms: Callable[[str, list[str]], float | None], gain: float
) -> tuple[list[str], float | None]:
    """The changes that are best together, and their step in milliseconds.

    Args:
        step_ms: called with a label and the names of the changes made; None where it failed or
            there was no time, which never wins.
        gain: share of the step by which a change must be faster to be kept.
    """
    best: list[str] = []
    best_ms = step_ms("table", [])
    alone = {name: step_ms(name, [name]) for name in names}
    for name in sorted(names, key=lambda name: alone[name] or float("inf")):
        together = [*best, name]
        ms = alone[name] if not best else step_ms("+".join(together), together)
        if ms is not None and best_ms is not None and ms < best_ms * (1 - gain):
            best, best_ms = together, ms
    step_ms("table again", [])
    return best, best_ms


class Steps:
    """Times steps of one engine with other entries in the table."""

    def __init__(self, engine: Engine, changes: Changes, args: argparse.Namespace) -> None:
        self.numbers: dict[str, dict[str, float]] = {}
        self._engine, self._changes, self._args = engine, changes, args
        self._table = dict(TUNED)
        self._deadline = time.monotonic() + args.seconds

    def ms(self, label: str, names: list[str]) -> float | None:
        """The median step with these changes."""
        if time.monotonic() > self._deadline:
            print(f"{label}: no time left", flush=True)
            return None
        changed: dict[Key, SkinnyConfig | None] = dict(self._table)
        for name in names:
            changed |= self._changes[name]
        TUNED.clear()
        TUNED.update({key: config for key, config in changed.items() if config is not None})
        try:
            forget()
            numbers = self._first_token() if self._args.first_token else self._step()
        except Exception as error:  # does not compile or fit: no candidate
            print(f"{label}: {(str(error).splitlines() or [repr(error)])[0][:150]}", flush=True)
            self._engine.built.loop.reset()
            return None
        finally:
            TUNED.clear()
            TUNED.update(self._table)
        self.numbers[label] = numbers
        name, ms = next(iter(numbers.items()))
        print(f"{label:40} {ms:.4f} ms {name}", flush=True)
        return ms

    def _step(self) -> dict[str, float]:
        """Of the bucket, built again."""
        self._engine.built.loop.first.rebuild()
        case = Case(
            bucket=self._args.bucket,
            input_len=self._args.input_len,
            output_len=OUTPUT_LEN,
            num_iters=self._args.num_iters,
            warmup=10,
            seed=1,
        )
        numbers = run_case(self._engine, case).numbers(1.0)
        kept = ("step_p50_ms", "step_p95_ms", "step_mean_ms", "mean_acceptance_length")
        return {key: numbers[key] for key in kept if key in numbers}

    def _first_token(self) -> dict[str, float]:
        """Of prompts that take one chunk, captured again."""
        loop, length = self._engine.built.loop, self._args.input_len
        chunks = [chunk for chunk in loop.prefill.fixed if chunk.size >= length][:1]
        if not chunks:
            raise ValueError(f"--input-len {length}: no chunk of a fixed size holds such a prompt")
        loop.first.builder.capture_chunks(chunks)
        case = PrefillCase(input_len=length, batch=1, num_iters=self._args.num_iters, seed=1)
        numbers = run_prefill(self._engine, case, Rates(0.0, 0.0))
        return {key: numbers[key] for key in ("first_p50_ms", "ttft_p50_ms", "host_p50_ms")}


def options(args: argparse.Namespace) -> dict[str, Any]:
    """What `Engine.from_pretrained` is called with besides the models."""
    names = ("simulate_acceptance", "draft_quantization", "num_speculative_tokens")
    drafts = {name: getattr(args, name) for name in names}
    return {
        "buckets": [args.bucket],
        "graph_mode": "full",
        "load_format": args.load_format,
        "max_model_len": args.input_len + OUTPUT_LEN + 256,
        "lazy_capture": True,
    } | (drafts if args.draft != "none" else {})


def positive(text: str) -> float:
    """An argument above 0."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text}: pass more than 0")
    return value


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("changes", type=Path)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--draft", default="qwen3-8b-dflash-b16", help="or none: plain decode")
    parser.add_argument("--bucket", type=int, default=1)
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a prompt")
    parser.add_argument(
        "--first-token", action="store_true", help="judge first tokens of such prompts, not steps"
    )
    parser.add_argument("--load-format", default="dummy", choices=["dummy", "dummy-uniform"])
    parser.add_argument("--simulate-acceptance", type=float, default=6.35)
    parser.add_argument("--draft-quantization", default="fp8-dynamic")
    parser.add_argument("--num-speculative-tokens", type=int)
    parser.add_argument(
        "--num-iters", type=int, default=200, help="steps, or prompts, of a variant"
    )
    parser.add_argument("--gain", type=float, default=0.001, help="share of the step; 0.001")
    parser.add_argument("--seconds", type=positive, default=120.0, help="begin no variant after it")
    add_result_file(parser)
    args = parser.parse_args(arguments)
    try:
        changes = read_changes(args.changes)
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        parser.error("no CUDA device: the table is for GPUs")
    with Engine.from_pretrained(args.model, draft=args.draft, **options(args)) as engine:
        steps = Steps(engine, changes, args)
        kept, best_ms = judge(list(changes), steps.ms, args.gain)
    numbers: Mapping[str, Any] = steps.numbers | ({"best_step_ms": best_ms} if best_ms else {})
    config = {
        "model": args.model,
        "changes": {n: {str(k): c for k, c in x.items()} for n, x in changes.items()},
        "kept": kept,
        "input_len": args.input_len,
        **options(args),
    }
    store(args, "skinny_linear_judged", numbers, config=config)
    print(json.dumps({"kept": kept, "best_step_ms": best_ms}), flush=True)


if __name__ == "__main__":
    main()
