"""Run a decode loop for very long: requests come, are cancelled, change buckets, leave speculation.

Why: leaks of pages, buffers or memory, and state that only a rare order of events corrupts, show
after thousands of steps and never in a short test (crashes after 11,000 steps were reported of
other engines). A small pair with random weights is made for it; its head favours a few tokens, so
that drafts are right by luck and every acceptance length comes up. Its prefixes are known from
plain decoding, so tokens are checked as well: all of them on the CPU in float32, while on a GPU
differences are only counted (bf16 ties depend on the batch).
Invariant: everything random comes from the seed; nothing depends on measured time.

    python tools/soak.py                                     # 20,000 steps, about 3 minutes
    python tools/soak.py --steps 500 --seed 7 --hybrid
    python tools/soak.py --device cuda --graph-mode full --out profiles/results/soak.json

Exit code 1 and a message when something leaked. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graphengine.api import Engine
from graphengine.decode.loop import DecodeLoop, StepOutput
from graphengine.decode.request import Request
from graphengine.profiles import result_schema

BUCKETS = (1, 2, 4, 8)
BLOCK, VOCAB, LIKELY_TOKENS = 8, 256, 3
TARGET_POSITIONS, DRAFT_POSITIONS = 160, 112
NUM_PROMPTS, LONGEST_PROMPT, LONGEST_ANSWER = 24, 70, 85
MAX_RSS_GROWTH = 32 << 20
MAX_GPU_GROWTH = 1 << 20
CHECK_EVERY = 25
PROMPT_ROWS = 16  # between two steps, every other time
HYBRID: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}
Options = dict[str, Any]


class Leak(Exception):
    """What was found, with the step."""


def make_pair(directory: Path, is_hybrid: bool) -> tuple[Path, Path]:
    """The config.json of a small target and its drafter; weights are random at load."""
    model = {
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": TARGET_POSITIONS,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    }
    dflash = {"target_layer_ids": [0, 1], "mask_token_id": VOCAB - 1, "block_size": BLOCK}
    draft = model | {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 1,
        "max_position_embeddings": DRAFT_POSITIONS,
        "dflash_config": dflash,
    }
    if is_hybrid:
        model |= HYBRID
    paths = directory / "target", directory / "drafter"
    for path, config in zip(paths, (model, draft), strict=True):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
    return paths


def open_engine(target: Path, drafter: Path | None, options: Options) -> Engine:
    """An engine on the pair, its head narrowed to a few tokens."""
    engine = Engine.from_pretrained(
        target,
        drafter,
        load_format="dummy",
        page_size=4,
        finish_in_plain_decode=True,
        prepare_plain_decode=True,
        fallback=False,  # judged by measured times, which no seed decides
        acceptance_floor=0.0,
        **options,
    )
    head: Any = engine.built.loop.prefill.pair.target.weights.lm_head_VD
    head[LIKELY_TOKENS:] *= 0.02
    return engine


@dataclass(kw_only=True)
class Soak:
    """One run: the loop, what is known of its prompts, and what was counted."""

    loop: DecodeLoop
    truth: dict[tuple[int, ...], list[int]]
    rng: random.Random
    must_match: bool
    counts: Counter[str] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    active: list[Request] = field(default_factory=list)
    ballast: list[int] = field(default_factory=list)
    wanted: int = 0

    def take_ballast(self) -> None:
        """Holds a share of the pages, so that requests wait for pages and not for rows alone."""
        self.ballast = self.loop.allocator.allocate(int(self.loop.allocator.num_usable * 0.4))

    @torch.no_grad()
    def step(self) -> None:
        """Some events, then one step. Mutates: self."""
        rng, loop, counts = self.rng, self.loop, self.counts
        if rng.random() < 0.02:
            self.wanted = rng.choice([0, 1, 1, 2, 3, 5, 8, 11])
        while len(self.active) < max(self.wanted, 1):
            prompt = rng.choice(list(self.truth))
            budget = rng.randint(1, LONGEST_ANSWER)
            self.active.append(loop.submit(list(prompt), budget, ()))
            counts["requests"] += 1
        if rng.random() < 0.02:
            self._cancel()
        assert loop.fallback is not None
        if rng.random() < 0.02 and loop.first.running:
            loop.fallback.leave([rng.choice(loop.first.running)], "the soak says so")
        is_piecewise = bool(loop.running) and rng.random() < 0.5
        outputs = loop.admit_next(PROMPT_ROWS) if is_piecewise else loop.admit()
        loop.launch()
        if rng.random() < 0.02:
            self._cancel()  # in flight
        if rng.random() < 0.0005:
            loop.reset()
            self.active.clear()
            self.take_ballast()
            counts["resets"] += 1
            return
        self._collect(outputs)
        self.active = [request for request in self.active if request.finish_reason is None]

    def _collect(self, outputs: list[StepOutput]) -> None:
        collected = self.loop.collect()
        self.counts["steps"] += bool(collected)
        # A request may be in both: its first token, then its last. Cancelled ones say no more.
        for request in {o.request.request_id: o.request for o in outputs + collected}.values():
            if request.finish_reason not in (None, "abort"):
                self._check(request)

    def _cancel(self) -> None:
        if self.active:
            self.loop.cancel(self.rng.choice(self.active))
            self.counts["cancelled"] += 1

    def _check(self, request: Request) -> None:
        counts = self.counts
        counts["finished"] += 1
        counts["tokens"] += len(request.output_ids)
        counts["plain_steps"] += request.num_plain_steps
        counts["handed_over"] += request.num_plain_steps > 0
        self.accepted.update(dict(enumerate(request.acceptance.steps_by_accepted)))
        known = self.truth[tuple(request.prompt_ids)][: len(request.output_ids)]
        if request.finish_reason != "length":
            raise Leak(f"a request ended by {request.finish_reason}: {request.error}")
        if request.output_ids != known:
            counts["differing"] += 1
            if self.must_match:
                raise Leak(f"after {counts['steps']} steps: {request.output_ids} is not {known}")

    def check_pages(self) -> None:
        """Every page has its owners: requests that run, the ballast, or the free list.

        Raises:
            Leak: pages are missing or shared.
        """
        running = [*self.loop.running, *self.loop.prefilling]
        held = [page for request in running for page in request.pages] + self.ballast
        allocator = self.loop.allocator
        users = Counter(held)
        is_wrong = any(allocator.num_users(page) != number for page, number in users.items())
        if is_wrong or len(users) + allocator.num_free != allocator.num_usable:
            raise Leak(
                f"after {self.counts['steps']} steps: {len(held)} pages held, {allocator.num_free} "
                f"free of {allocator.num_usable}"
            )

        slots = self.loop.state_slots
        if slots.num_free > slots.num_usable - len(running):
            raise Leak(f"{len(running)} requests run, {slots.num_free} states are free")

    @torch.no_grad()
    def drain(self) -> None:
        """Lets all requests end; then no page but the ballast may be held."""
        while self.loop.has_work:
            outputs = self.loop.admit()
            self.loop.launch()
            self._collect(outputs)
        self.active.clear()
        self.check_pages()
        if self.loop.allocator.num_free + len(self.ballast) != self.loop.allocator.num_usable:
            raise Leak("an idle loop holds pages")
        if self.loop.state_slots.num_free != self.loop.state_slots.num_usable:
            raise Leak("an idle loop holds recurrent states")


def rss_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def gpu_bytes() -> int:
    """Allocated GPU memory; 0 without a GPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def soak(
    steps: int,
    seed: int,
    options: Options,
    progress: Callable[[str], None] = lambda line: None,
    is_hybrid: bool = False,
) -> dict[str, Any]:
    """Runs it.

    Returns:
        Numbers, each key with its unit.

    Raises:
        Leak: pages, memory or tokens are not as they must be.
    """
    rng = random.Random(seed)
    prompts = [
        tuple(rng.randrange(VOCAB - 1) for _ in range(rng.randint(1, LONGEST_PROMPT)))
        for _ in range(NUM_PROMPTS)
    ]
    with tempfile.TemporaryDirectory() as directory:
        target, drafter = make_pair(Path(directory), is_hybrid)
        with open_engine(target, None, options) as plain:
            results = plain.generate(prompts, max_new_tokens=LONGEST_ANSWER, ignore_eos=True)
        truth = {p: r.token_ids for p, r in zip(prompts, results, strict=True)}
        with open_engine(target, drafter, options) as engine:
            is_float32, loop = engine.config.dtype == "float32", engine.built.loop
            run = Soak(loop=loop, truth=truth, rng=rng, must_match=is_float32)
            return _run(run, steps, progress)


def _run(run: Soak, steps: int, progress: Callable[[str], None]) -> dict[str, Any]:
    began = time.perf_counter()
    run.take_ballast()
    rss: list[int] = []
    gpu: list[int] = []
    every = max(steps // 40, 100)  # a drain costs up to 100 steps of one request
    while run.counts["steps"] < steps:
        before = run.counts["steps"]
        run.step()
        if run.counts["steps"] % CHECK_EVERY == 0:
            run.check_pages()
        if run.counts["steps"] // every > before // every:
            run.drain()
            rss.append(rss_bytes())
            gpu.append(gpu_bytes())
            mib = f"{rss[-1] / 2**20:.1f} MiB"
            progress(f"{run.counts['steps']:6} steps, {run.counts['finished']} requests, {mib}")
    run.drain()
    # Allocators settle in the first fifth; from then on the process must not grow.
    settled = len(rss) // 5
    window = max(len(rss) // 10, 1)
    growth = int(statistics.median(rss[-window:]) - statistics.median(rss[settled:][:window]))
    gpu_growth = gpu[-1] - gpu[settled]
    if growth > MAX_RSS_GROWTH:
        raise Leak(f"the process grew by {growth / 2**20:.1f} MiB in the last four fifths")
    if gpu_growth > MAX_GPU_GROWTH:
        raise Leak(f"GPU memory grew by {gpu_growth / 2**20:.1f} MiB in the last four fifths")
    blocks = sum(run.accepted.values())
    return {
        **{f"num_{name}": run.counts[name] for name in sorted(run.counts)},
        "num_differing": run.counts["differing"],
        "num_blocks_by_accepted": [run.accepted[a] for a in range(BLOCK)],
        "mean_acceptance_length": sum((a + 1) * n for a, n in run.accepted.items()) / blocks,
        "duration_s": round(time.perf_counter() - began, 3),
        "rss_settled_bytes": rss[settled],
        "rss_end_bytes": rss[-1],
        "rss_max_bytes": max(rss),
        "rss_growth_bytes": growth,
        "gpu_settled_bytes": gpu[settled],
        "gpu_end_bytes": gpu[-1],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20_000, help="decode steps (20000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--graph-mode", choices=["auto", "none", "piecewise", "full"])
    parser.add_argument("--attention-backend", choices=["auto", "flashinfer", "triton", "torch"])
    parser.add_argument("--hybrid", action="store_true", help="every other layer is recurrent")
    parser.add_argument("--out", help="also store the result as JSON here")
    parser.add_argument(
        "--commit", metavar="SHA", help="commit to record where the checkout has no history"
    )
    args = parser.parse_args(arguments)
    if args.steps < 100:
        parser.error(f"--steps {args.steps}: at least 100, or nothing is measured")
    options: Options = {
        "buckets": BUCKETS,
        "device": args.device,
        "graph_mode": args.graph_mode or "auto",
        "attention_backend": args.attention_backend or "auto",
    }
    try:
        say = partial(print, flush=True)
        numbers = soak(args.steps, args.seed, options, say, args.hybrid)
    except Leak as leak:
        print(f"FAILED: {leak}", file=sys.stderr)
        print(json.dumps({"passed": False, "reason": str(leak), "seed": args.seed}))
        return 1
    config = {"seed": args.seed, "block_length": BLOCK, "likely_tokens": LIKELY_TOKENS} | options
    config["is_hybrid"] = args.hybrid
    if args.out:
        notes = (
            "A passed run: every page returned, memory within the bounds of tools/soak.py, in "
            "float32 every token as in plain decoding. num_resets counts the loop dropped with a "
            "step in flight, num_handed_over the requests that left speculation."
        )
        env = result_schema.environment(args.commit)
        result_schema.write_result(args.out, "soak", numbers, config=config, notes=notes, env=env)
    print(json.dumps({"passed": True, "config": config, "numbers": numbers}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
