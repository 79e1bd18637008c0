"""Measures requests as users send them: what options, turns, newcomers and a busy host cost.

Why: these are promises about a running engine that no benchmark of equal steps shows. One engine
with every end built runs all parts; whatever is compared runs by turns, so that a machine that
drifts moves both sides.

    options  a step at batch 1 with each option, over a greedy one beside it
    turns    first token of a second turn, cold and behind what the first has left; a chat's cache
    texts    first token of a new text, and what of it is encoding
    join     gaps of a running stream while a long prompt comes in, and that prompt's first token
    hit      tokens, drafts and K/V behind cached pages against those without
    busy     greedy steps beside a Python thread that never rests; last: it takes what time is left

    python tools/measure_requests.py --turns 8 --busy-steps 500      # the bundled pair, on a CPU
    python tools/measure_requests.py --target qwen3-8b --draft qwen3-8b-dflash-b16 \\
        --load-format dummy-uniform --draft-quantization fp8-dynamic --graph-mode full \\
        --baseline-engine --seconds 230 --out requests.json
    python tools/measure_requests.py --target qwen3.5-4b --draft qwen3.5-4b-dflash-b16 \\
        --load-format dummy-uniform --draft-quantization fp8-dynamic --graph-mode full \\
        --only turns,join --out hybrid.json

Acceptance is real, since drawn acceptance has one end alone: random weights accept next to nothing,
and milliseconds a step do not depend on it. A part that fails is told and the others go on; what is
measured is stored after each part. Exit code 1 if a part failed or had no time; a bar that is
missed is a finding, told as one. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from request_hits import hit
from request_joins import join
from request_parts import Measurement, Numbers, busy, options, turns
from request_texts import texts
from result_file import add_result_file, parser_of, store

from graphengine import TINY_DRAFT, TINY_TARGET
from graphengine.api import Engine
from graphengine.checkpoints.tokenizer import Tokenizer
from graphengine.decode.grammar import Grammars
from graphengine.startup.build import read_configs
from graphengine.startup.options import speculation_limit

# In the order of running: handles' thread has the loop from `join` on, and busy takes the rest.
PARTS = {
    "options": options,
    "turns": turns,
    "texts": texts,
    "join": join,
    "hit": hit,
    "busy": busy,
}
BUCKETS = (1, 8)
SIZES = {
    "rounds": (5, "rounds of every option"),
    "steps": (60, "steps of an option in a round"),
    "repeats": (3, "second turns, texts and newcomers, of each kind"),
    "turn-tokens": (18_000, "of the first turn"),
    "turns": (50, "of the chats"),
    "answer-tokens": (64, "of each turn"),
    "newcomer-tokens": (32_000, "of the prompt that joins"),
    "hit-tokens": (2_345, "of the prompt that is run behind cached pages"),
    "busy-steps": (10_000, "steps beside the busy thread, and a quarter without it"),
}
NOTES = (
    "Batch 1 but where a newcomer joins; acceptance is real. Options run by turns; over_greedy is "
    "the median of the rounds' ratios. cached_tokens: of all tokens that a turn repeats; "
    "cached_pages: of the whole pages that these fill, the last token apart. Gaps: a reader's."
)


def run_parts(m: Measurement, chosen: Sequence[str], done: Callable[[Numbers], None]) -> None:
    """Runs them; `done` is told all numbers after each. Mutates: m.problems."""
    numbers: Numbers = {}
    for name in [part for part in PARTS if part in chosen]:
        began = time.monotonic()
        if began >= m.deadline:
            m.problems[name] = "no time left"
        else:
            try:
                m.settle()
                found = PARTS[name](m)
                numbers[name] = found | {"wall_s": time.monotonic() - began}
                done(numbers)
            except Exception as error:  # its own, or its numbers cannot be stored
                numbers.pop(name, None)
                m.fail(name, error)
        show(name, numbers.get(name) or {f"FAILED: {m.problems[name]}": {}})
        if name in m.problems:
            done(numbers)


def show(part: str, numbers: Numbers) -> None:
    """Prints a part's numbers, a line a label."""
    for label, row in numbers.items():
        shown = row.items() if isinstance(row, dict) else [("", row)]
        print(f"{part:8}{label:18}" + "  ".join(f"{k} {v:.5g}".strip() for k, v in shown))
    print(flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """What was typed; `only`, `sizes` and `budgets` are checked and taken apart."""
    parser = parser_of(__doc__)
    parser.add_argument("--target", default=str(TINY_TARGET), help="default: the bundled one")
    parser.add_argument("--draft", help="default: the bundled one with the bundled target")
    parser.add_argument("--tokenizer", help="of a target that has none: a directory")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--draft-quantization", default="none")
    parser.add_argument("--graph-mode", default="auto")
    parser.add_argument("--max-model-len", type=int, default=33_000, help="or what models allow")
    parser.add_argument("--kv-cache-memory", default="12GiB", help="of an engine; 12GiB")
    parser.add_argument("--baseline-engine", action="store_true", help="build a plain one as well")
    parser.add_argument("--max-num-batched-tokens", default="256,1024", help="for join, beside 512")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,..")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing later")
    parser.add_argument("--seed", type=int, default=0)
    for name, (size, text) in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"{text} ({size})")
    add_result_file(parser)
    args = parser.parse_args(arguments)
    args.only = args.only.split(",")
    if unknown := sorted(set(args.only) - set(PARTS)):
        parser.error(f"--only {','.join(unknown)}: no such part; there are {', '.join(PARTS)}")
    args.sizes = {name: getattr(args, name.replace("-", "_")) for name in SIZES}
    if low := [f"--{name} {n}" for name, n in args.sizes.items() if n < 1 + (name == "turns")]:
        parser.error(f"{low[0]}: pass more, or nothing is measured")
    typed = [rows for rows in args.max_num_batched_tokens.split(",") if rows]
    args.budgets = [int(rows) if rows.isdecimal() else 0 for rows in typed]
    if min(args.budgets, default=16) < 16:
        told = f"--max-num-batched-tokens {args.max_num_batched_tokens}"
        parser.error(f"{told}: pass integers from 16 up, such as 256,1024")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Measures. Returns the exit code."""
    args = parse(arguments)
    deadline = time.monotonic() + args.seconds
    draft = args.draft or (str(TINY_DRAFT) if args.target == str(TINY_TARGET) else None)
    limit = speculation_limit(*read_configs(args.target, draft))
    asked: dict[str, Any] = {
        "buckets": BUCKETS,
        "load_format": args.load_format,
        "draft_quantization": args.draft_quantization,
        "graph_mode": args.graph_mode,
        "max_model_len": min(args.max_model_len, limit),
        "kv_cache_memory": args.kv_cache_memory,
        "fallback": False,  # random weights lose against plain decoding, and steps are timed
        "acceptance_floor": 0.0,
    }
    ends = {"sampling": True, "adjustments": True, "max_logprobs": 5, "structured_outputs": True}

    def open_plain() -> Engine:
        without = dict.fromkeys(ends, False) | {"max_logprobs": 0, "buckets": (1,)}
        return Engine.from_pretrained(args.target, draft, **asked | without)

    began = time.monotonic()
    with Engine.from_pretrained(args.target, draft, **asked | ends) as engine:
        startup_s = time.monotonic() - began
        print(f"started in {startup_s:.1f} s; context {engine.config.max_model_len}", flush=True)
        grammars, vocab_size = engine.built.grammars, engine.built.target.vocab_size
        tokenizer = engine.tokenizer
        if args.tokenizer:
            tokenizer = Tokenizer(Path(args.tokenizer))
            grammars = Grammars(tokenizer.as_json, vocab_size, [0])
        m = Measurement(
            engine=engine,
            grammars=grammars,
            tokenizer=tokenizer,
            open_plain=open_plain if args.baseline_engine else None,
            sizes=args.sizes,
            budgets=args.budgets,
            deadline=deadline,
            generator=torch.Generator().manual_seed(args.seed),
        )
        config: dict[str, Any] = {
            "target": Path(args.target).name,
            "draft": Path(draft).name if draft else None,
            "seed": args.seed,
            "sizes": args.sizes,
            "engine": asdict(engine.config),
        }
        result: Numbers = {}

        def done(numbers: Numbers) -> None:
            bars = {name: bar._asdict() | {"held": bar.held} for name, bar in m.bars.items()}
            result["numbers"] = {"startup_s": startup_s} | numbers
            result["config"] = config | {"bars": bars, "problems": m.problems}
            store(args, "requests", **result, notes=NOTES)

        run_parts(m, args.only, done)
    for name, bar in m.bars.items():
        least = f"at least {bar.at_least:.4g}" if bar.at_least is not None else ""
        most = f"at most {bar.at_most:.4g}" if bar.at_most is not None else ""
        print(f"{'held' if bar.held else 'MISSED':8}{name:36}{bar.measured:10.4f}  {most}{least}")
    print(json.dumps(result))
    return 1 if m.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
