"""Run a decode loop for very long: requests come and go, fork, and want all sorts.

Why: leaks of pages, states or memory, and contents that only a rare order of events corrupts, show
after thousands of steps and never in a short test (crashes after 11,000 steps were reported of
other engines). The models are `soak_pair`'s, requests are `soak_requests`'. What must hold is
`soak_checks`': every token and log-probability is the one-page step's, under the same grammar,
shared pages keep their bits and hold what their tokens say, every page and state has its owners. In
bfloat16 differing texts are only counted: ties depend on the batch, and a log-probability is
rounded.
Invariant: everything random comes from the seed; nothing depends on measured time.

    python tools/soak.py                                     # 20,000 steps, about 10 minutes
    python tools/soak.py --steps 500 --seed 7 --hybrid
    python tools/soak.py --device cuda --dtype float32 --graph-mode full --out soak.json

Exit code 1 and a message when something is wrong. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from result_file import add_result_file, parser_of, store
from soak_checks import Leak, Page, Published, check_balance, kept_places
from soak_pair import BLOCK, END, LIKELY_TOKENS, VOCAB, Options, make_pair, open_engine
from soak_requests import a_prompt, a_request

from graphengine.decode.grammar import Grammars, Matcher
from graphengine.decode.loop import DecodeLoop, StepOutput
from graphengine.decode.request import Request

BUCKETS = (1, 2, 4, 8)
NUM_TEXTS = 12  # that new ones may begin like
MAX_RSS_GROWTH = 32 << 20
MAX_GPU_GROWTH = 1 << 20
MAX_STATE_ERROR = 1e-5
CHECK_EVERY = 5
NUM_COMPARED = 4  # shared pages, whenever the loop is empty
PROMPT_ROWS = 16, 40, 100  # between two steps, every other time
NOTES = (
    "A passed run: every page and state returned, shared pages unchanged, memory within the bounds "
    "of tools/soak.py, in float32 every token and log-probability that of the one-page step, under "
    "the same grammar where a request has one (num_constrained). num_resets counts the loop "
    "dropped with a step in flight, num_handed_over requests that left speculation, "
    "num_compared_pages shared pages held against a computation of their whole text; "
    "max_state_error_ratio by quarters of the run."
)


@dataclass(kw_only=True)
class Soak:
    """One run: the loop, what it is held against, and what was counted."""

    loop: DecodeLoop
    grammars: Grammars
    page: Page
    rng: random.Random
    must_match: bool
    counts: Counter[str] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    active: list[Request] = field(default_factory=list)
    texts: deque[list[int]] = field(default_factory=lambda: deque(maxlen=NUM_TEXTS))
    state_errors: list[tuple[int, float]] = field(default_factory=list)
    matchers: dict[Request, Matcher] = field(default_factory=dict)  # as their answers begin
    wanted: int = 0

    def __post_init__(self) -> None:
        self.published = Published(self.loop)

    @torch.no_grad()
    def step(self) -> None:
        """Some events, then one step. Mutates: self."""
        rng, loop = self.rng, self.loop
        if rng.random() < 0.02:
            self.wanted = rng.choice([0, 1, 1, 2, 3, 5, 8, 11])
        while len(self.active) < max(self.wanted, 1):
            self._submit()
        if rng.random() < 0.02:
            self._end_early()
        assert loop.fallback is not None
        if rng.random() < 0.01 and loop.first.running:
            loop.fallback.leave([rng.choice(loop.first.running)], "the soak says so")
        is_piecewise = bool(loop.running) and rng.random() < 0.5
        outputs = loop.admit_next(rng.choice(PROMPT_ROWS)) if is_piecewise else loop.admit()
        loop.launch()
        if rng.random() < 0.02:
            self._end_early()  # in flight
        if rng.random() < 0.0005:
            loop.reset()
            self.active.clear()
            self.matchers.clear()
            self.published.serials.clear()  # they are given anew
            self.counts["resets"] += 1
            return
        self._collect(outputs)

    def _submit(self) -> None:
        texts = [*self.texts, *(request.token_ids for request in self.active)]
        prompt = a_prompt(self.rng, texts, VOCAB)
        options = a_request(self.rng, VOCAB, LIKELY_TOKENS, self.grammars, [END])
        matcher = options["matcher"]
        self.active.append(
            self.loop.submit(prompt, **options | {"matcher": matcher and matcher.copy()})
        )
        if matcher is not None:
            self.matchers[self.active[-1]] = matcher
        self.counts["requests"] += 1

    def _collect(self, outputs: list[StepOutput]) -> None:
        collected = self.loop.collect()
        self.counts["steps"] += bool(collected)
        said = [o for o in outputs + collected if o.token_ids and o.request.finish_reason is None]
        if said and self.rng.random() < 0.01:  # a stop string somewhere in what is new
            request, new = self.rng.choice(said)
            self.loop.end_at(request, "the soak says so", self.rng.randrange(len(new)))
            self.counts["stopped_by_text"] += 1
        for request in [request for request in self.active if request.finish_reason is not None]:
            self.active.remove(request)
            self._check(request)

    def _end_early(self) -> None:
        if self.active:
            self.loop.cancel(self.rng.choice(self.active))
            self.counts["cancelled"] += 1

    def _check(self, request: Request) -> None:
        counts, reason = self.counts, request.finish_reason
        counts[f"ended_by_{reason}"] += 1
        counts["tokens"] += len(request.output_ids)
        counts["prompt_tokens"] += len(request.prompt_ids)
        counts["cached_tokens"] += request.num_cached_tokens
        counts["hits"] += request.num_cached_tokens > 0
        counts["plain_steps"] += request.num_plain_steps
        counts["handed_over"] += request.num_plain_steps > 0
        self.accepted.update(dict(enumerate(request.acceptance.steps_by_accepted)))
        matcher = self.matchers.pop(request, None)
        counts["constrained"] += matcher is not None
        if reason == "error" and matcher is None:
            raise Leak(f"a request failed: {request.error}")
        if reason == "length" and request.budget != 0:
            raise Leak(f"a request ended {request.budget} tokens before its budget")
        wrong = self.page.check(request, matcher)
        if wrong is not None:
            counts["differing"] += 1
            if self.must_match:
                raise Leak(wrong)
        self.texts.append(request.token_ids)

    @torch.no_grad()
    def check(self) -> None:
        """All that must hold between two steps.

        Raises:
            Leak: what does not.
        """
        check_balance(self.loop)
        self.published.check()
        for lane in self.loop.lanes:
            running = [] if lane.in_flight else lane.running
            if running and self.loop.prefill.pair.target.states is not None:
                request = self.rng.choice(running)
                ids = request.token_ids[: request.start]
                self._note(self.page.state_error(self.loop, request.state_slot, ids))

    def _note(self, state_error: float) -> None:
        self.state_errors.append((self.counts["steps"], state_error))
        if self.must_match and not state_error <= MAX_STATE_ERROR:
            raise Leak(f"a recurrent state is wrong by {state_error:.1e}")

    def state_errors_by_quarter(self) -> list[float]:
        """The largest in each quarter of the run, of the norm of a layer's state."""
        quarter = self.counts["steps"] // 4 + 1
        return [
            max((error for step, error in self.state_errors if step // quarter == i), default=0.0)
            for i in range(4)
        ]

    @torch.no_grad()
    def drain(self) -> None:
        """Lets all requests end; then nobody may hold a page, and some shared ones are compared
        with what their tokens say."""
        while self.loop.has_work:
            outputs = self.loop.admit()
            self.loop.launch()
            self._collect(outputs)
        self.check()
        if self.loop.allocator.num_free != self.loop.allocator.num_usable:
            raise Leak("an idle loop holds pages")
        if self.loop.state_slots.num_free != self.loop.state_slots.num_usable:
            raise Leak("an idle loop holds recurrent states")
        whole = [(page, self.loop.config.page_size) for page in self.loop.allocator._keys]
        for places in (whole, kept_places(self.loop)):
            if not self.must_match:
                break  # of other numbers of rows, in bf16
            for place in self.rng.sample(places, min(NUM_COMPARED, len(places))):
                self._note(self.published.compare(place, self.page))
                self.counts["compared_pages"] += 1


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
    with tempfile.TemporaryDirectory() as directory:
        pair = make_pair(Path(directory), is_hybrid)
        # Few states are then kept at the end of a page, most in the middle of one.
        options = options | {"page_size": 5 * BLOCK if is_hybrid else BLOCK}
        alone = options | {"enable_prefix_caching": False}
        with open_engine(*pair, alone) as page, open_engine(*pair, options) as engine:
            is_float32, loop = engine.config.dtype == "float32", engine.built.loop
            rng = random.Random(seed)
            grammars = engine.built.grammars
            assert grammars is not None
            run = Soak(
                loop=loop, grammars=grammars, page=Page(page), rng=rng, must_match=is_float32
            )
            return _run(run, steps, progress, is_hybrid)


def _run(run: Soak, steps: int, progress: Callable[[str], None], is_hybrid: bool) -> dict[str, Any]:
    began = time.perf_counter()
    rss: list[int] = []
    gpu: list[int] = []
    every = max(steps // 40, 100)  # a drain costs up to 100 steps of one request
    while run.counts["steps"] < steps:
        before = run.counts["steps"]
        run.step()
        if run.counts["steps"] % CHECK_EVERY == 0:
            run.check()
        if run.counts["steps"] // every > before // every:
            run.drain()
            rss.append(rss_bytes())
            gpu.append(gpu_bytes())
            mib = f"{rss[-1] / 2**20:.1f} MiB"
            progress(f"{run.counts['steps']:6} steps, {run.counts['requests']} requests, {mib}")
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
        "num_evicted_pages": run.published.num_evicted,
        "num_blocks_by_accepted": [run.accepted[a] for a in range(BLOCK)],
        "mean_acceptance_length": sum((a + 1) * n for a, n in run.accepted.items()) / blocks,
        **({"max_state_error_ratio": run.state_errors_by_quarter()} if is_hybrid else {}),
        "duration_s": round(time.perf_counter() - began, 3),
        "rss_settled_bytes": rss[settled],
        "rss_end_bytes": rss[-1],
        "rss_max_bytes": max(rss),
        "rss_growth_bytes": growth,
        "gpu_settled_bytes": gpu[settled],
        "gpu_end_bytes": gpu[-1],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="decode steps (20000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    modes, backends = ["none", "piecewise", "full"], ["flashinfer", "triton", "torch"]
    parser.add_argument("--graph-mode", choices=["auto", *modes], default="auto")
    parser.add_argument("--attention-backend", choices=["auto", *backends], default="auto")
    parser.add_argument(
        "--dtype",
        choices=["auto", "bfloat16", "float32"],
        default="auto",
        help="in float32 everything must match, on a GPU too",
    )
    parser.add_argument("--hybrid", action="store_true", help="every other layer is recurrent")
    add_result_file(parser)
    args = parser.parse_args(arguments)
    if args.steps < 100:
        parser.error(f"--steps {args.steps}: at least 100, or nothing is measured")
    taken = ("device", "dtype", "graph_mode", "attention_backend")
    options: Options = {"buckets": BUCKETS} | {name: getattr(args, name) for name in taken}
    try:
        say = partial(print, flush=True)
        numbers = soak(args.steps, args.seed, options, say, args.hybrid)
    except Leak as leak:
        print(f"FAILED: {leak}", file=sys.stderr)
        print(json.dumps({"passed": False, "reason": str(leak), "seed": args.seed}))
        return 1
    config = {"seed": args.seed, "block_length": BLOCK, "likely_tokens": LIKELY_TOKENS} | options
    config["is_hybrid"] = args.hybrid
    store(args, "soak", numbers, config=config, notes=NOTES)
    print(json.dumps({"passed": True, "config": config, "numbers": numbers}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
