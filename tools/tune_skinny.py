"""Time kernels/skinny_linear.py against cuBLAS on Qwen3's shapes and print the winners' table.

How: compile and check every variant (skinny_variants.py) on a small problem in parallel processes
(a variant that is wrong, does not fit or hangs is dropped there); time each candidate in a CUDA
graph of launches over distinct weights, above 64 rows in bursts that alternate with cuBLAS's,
because power sets the clocks there; then run whole layers with the best candidates, or cuBLAS in a
GEMM's place (skinny_layer.py).
Invariant: cuBLAS and the kernels see the same weights in the same harness, and each winner is
compared with a float64 product, in an output that was NaN. A head is timed with its argmax.

    python tools/tune_skinny.py --seconds 150 --out profiles/results/skinny.json  # 8B, 4B, FP8 8B
    python tools/tune_skinny.py --cases 8b --rows 16 --no-layer
    python tools/tune_skinny.py --cases 8b --rows 256 --seconds 100
    python tools/tune_skinny.py --cases 8b --rows 256 --names lm_head      # with its argmax
    python tools/tune_skinny.py --dry-run                                  # no GPU: what would run

The last line of stdout is one JSON object; "table" in it is the text of TUNED.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import time
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from result_file import add_result_file, parser_of, store
from skinny_layer import (
    LABELS,
    LAYER,
    MIN_LAUNCHES,
    MODELS,
    PEAK_TBPS,
    SHAPES,
    Case,
    Configs,
    LayerBench,
    Operands,
    Pool,
    bursts_us,
    captured,
    cases,
    graph_us,
    library,
    problem,
    run,
    swiglu,
)
from skinny_variants import candidates, variants

from graphengine.kernels.argmax import argmax_rows
from graphengine.kernels.fp8 import widened
from graphengine.kernels.head_argmax import skinny_argmax_reference
from graphengine.kernels.skinny_config import (
    DEFAULT_SMS,
    PDL_EARLY,
    PDL_LATE,
    PDL_OFF,
    SKINNY_T,
    SkinnyConfig,
    choose_config,
    table_rows,
)


class Timed(NamedTuple):
    us: float
    config: SkinnyConfig


def relative_error(case: Case, config: SkinnyConfig, operands: Operands) -> float:
    """Norm of the error over norm of the float64 result; NaN if an element was not written.

    Of an argmax: how far below a row's largest value the chosen one is, over the largest.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is NaN
    got = run(case, config, operands)
    torch.use_deterministic_algorithms(False)
    x, weight = widened(*operands)
    expected = torch.cat([x.double() @ rows.double().T for rows in weight.split(16384)], dim=1)
    if case.kind == "argmax":
        chosen = expected.gather(1, got[:, None].clamp(min=0))[:, 0]
        best = expected.amax(1)
        return float(((best - chosen) / best).max())
    if case.kind == "swiglu":
        gate, up = expected.chunk(2, dim=1)
        expected = F.silu(gate) * up
    got = got.double().sum(0) if case.kind == "partials" else got.double()
    return float((got - expected).norm() / expected.norm())


def is_small(case: Case, error: float) -> bool:
    """Whether rounding explains it: an argmax compares two values of bf16, 2^-8 off each."""
    return error < (2e-2 if case.kind == "argmax" else 1e-2)


def is_right(case: Case, config: SkinnyConfig) -> bool:
    """A winner on its full shape, with fresh data."""
    error = relative_error(case, config, problem(case, case.E, case.D))
    print(f"    {case.name} {tuple(config)}: relative error {error:.1e}", flush=True)
    return is_small(case, error)


def compile_and_check(job: tuple[Case, SkinnyConfig]) -> tuple[tuple[Case, SkinnyConfig], str]:
    """In a process of its own: the kernel on a small problem; "" if it is right."""
    case, config = job
    try:
        D = config.block_k * (2 * config.num_stages + 3)
        many = 2 * torch.cuda.get_device_properties(0).multi_processor_count + 5
        E = config.rows * many * (2 if case.kind == "swiglu" else 1) + 8 * bool(config.consumers)
        # Where a CTA has one tile: three of them, and a part of one.
        if config.cols and (not config.consumers or case.kind == "swiglu"):
            E = 3 * config.rows + 48
        small = config._replace(ctas_per_sm=1, num_splits=3 if case.kind == "partials" else 1)
        error = relative_error(case, small, problem(case, E, D))
        torch.cuda.empty_cache()
        return job, "" if is_small(case, error) else f"wrong: relative error {error}"
    except Exception as problem_found:  # does not fit or does not compile: not a candidate
        return job, str(problem_found).splitlines()[0][:100]


def compile_all(jobs: list[tuple[Case, SkinnyConfig]], seconds: float) -> set[Any]:
    """The jobs that are right, keyed (kind, T, weight_bytes, config); stops at a hang."""
    good = set()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton", "graphengine.kernels.head_argmax"])
    deadline = time.monotonic() + seconds
    with context.Pool(min(os.cpu_count() or 1, 16, len(jobs))) as pool:
        results = pool.imap_unordered(compile_and_check, jobs)
        for _ in jobs:
            try:
                (case, config), problem_found = results.next(deadline - time.monotonic())
            except multiprocessing.TimeoutError:
                print(f"compiling: stopped after {seconds:.0f} s (or a kernel hangs)", flush=True)
                break
            if problem_found:
                print(f"dropped {case.kind} {config}: {problem_found}", flush=True)
            else:
                good.add((case.kind, case.T, case.weight_bytes, config))
        pool.terminate()
    return good


def time_case(
    case: Case, pool: Pool, good: set[Any], deadline: float
) -> tuple[dict[str, float], list[Timed]]:
    """(times of what candidates compete with, candidates with the fastest first).

    They compete with `cublas_us`, where cuBLAS has such a product; an argmax also with `logits_us`,
    the fastest candidate that stores logits for an argmax of its own.
    """
    weights = pool.weights(case)
    copies = min(MIN_LAUNCHES, pool.copies(case.E * case.D * case.weight_bytes))
    x, _, scales = problem(case, case.E, case.D)
    fused = torch.empty(case.T, case.E // 2, dtype=torch.bfloat16, device="cuda")

    def cublas() -> None:
        for i in range(copies):
            y = library((x, weights(i), scales))
            if case.kind == "swiglu":
                swiglu(y, fused)
            elif case.kind == "argmax":
                argmax_rows(y)

    def ours(config: SkinnyConfig) -> None:
        for i in range(copies):
            run(case, config, (x, weights(i), scales))

    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    configs = [
        config
        for variant in variants(case)
        if (case.kind, case.T, case.weight_bytes, variant) in good
        for config in candidates(case, variant, num_sms)
    ]
    beside = {}
    if case.T > SKINNY_T:
        graphs = [captured(cublas), *(captured(partial(ours, config)) for config in configs)]
        beside["cublas_us"], *times = bursts_us(graphs, copies)
        timed = sorted(map(Timed, times, configs))
    else:
        if case.has_library:
            beside["cublas_us"] = graph_us(cublas, copies)
        timed = []
        for config in configs:
            if time.monotonic() > deadline:
                break
            timed.append(Timed(graph_us(partial(ours, config), copies), config))
        timed.sort()
    if case.kind == "argmax" and timed:

        def through_logits() -> None:
            for i in range(copies):
                skinny_argmax_reference(x, weights(i), timed[0].config, scales)

        (beside["logits_us"],) = bursts_us([captured(through_logits)], copies)
    return beside, timed


def tune_layer(
    bench: LayerBench, best: dict[str, list[Timed]], deadline: float
) -> tuple[dict[str, float], dict[str, SkinnyConfig | None]]:
    """(times of whole layers by label, configs that are best together; None: cuBLAS)."""
    has_library = bench.cases["qkv"].has_library
    modes = list(itertools.product((PDL_OFF, PDL_LATE, PDL_EARLY), repeat=2))
    fastest = {n: best[n][0].config for n in LAYER}
    times = bench.us(*(({n: fastest[n]._replace(pdl=p) for n in LAYER}, g) for p, g in modes))
    numbers = {f"skinny_pdl_{p}_glue_{g}_us": us for (p, g), us in zip(modes, times, strict=True)}
    _, (pdl, glue) = min(zip(times, modes, strict=True))
    chosen: dict[str, SkinnyConfig | None] = {n: fastest[n]._replace(pdl=pdl) for n in LAYER}
    for name in LAYER:
        if time.monotonic() > deadline:
            break
        options = [t.config._replace(pdl=pdl) for t in best[name][:6]]
        options += [fastest[name]._replace(pdl=p) for p in (PDL_LATE, PDL_EARLY) if p != pdl]
        options += [None] if has_library else []
        times = bench.us(*(({**chosen, name: option}, glue) for option in options))
        chosen[name] = options[times.index(min(times))]
    paths: dict[str, tuple[Configs, int]] = {"skinny_best_us": (chosen, glue)}
    if has_library:
        paths |= {f"cublas_glue_{g}_us": (dict.fromkeys(LAYER), g) for g in (PDL_OFF, PDL_LATE)}
        for name in LAYER:  # what each GEMM is worth in its place
            paths[f"skinny_best_but_{name}_by_cublas_us"] = ({**chosen, name: None}, glue)
    paths["table_now_us"] = ({n: config_now(case) for n, case in bench.cases.items()}, PDL_LATE)
    return numbers | dict(zip(paths, bench.us(*paths.values()), strict=True)), chosen


def config_now(case: Case) -> SkinnyConfig | None:
    """What the engine runs today."""
    return choose_config(case.T, case.E, case.D, case.weight_bytes, case.kind == "swiglu")


def dry_run(todo: list[Case]) -> None:
    compiled = {(c.kind, c.T, c.weight_bytes, v) for c in todo for v in variants(c)}
    print(f"{len(compiled)} variants to compile")
    for case in todo:
        count = sum(len(candidates(case, v, DEFAULT_SMS)) for v in variants(case))
        print(
            f"{case.model:7} {case.name:8} T {case.T:3} [{case.E}, {case.D}] {count} candidates,"
            f" floor {case.us_at_peak:.1f} us, now: {config_now(case)}"
        )


def tune(todo: list[Case], args: argparse.Namespace) -> dict[str, Any]:
    start = time.monotonic()
    deadline = start + args.seconds
    jobs = {(c.kind, c.T, c.weight_bytes, v): (c, v) for c in reversed(todo) for v in variants(c)}
    good = compile_all(list(jobs.values())[::-1], seconds=0.4 * args.seconds)
    print(f"{len(good)} of {len(jobs)} variants, {time.monotonic() - start:.0f} s", flush=True)
    pool = Pool(int(args.gb * 1e9))
    numbers: dict[str, Any] = {}
    table: dict[tuple[int, int, int, int], SkinnyConfig] = {}
    for (model, T), group in itertools.groupby(todo, key=lambda c: (c.model, c.T)):
        best: dict[str, list[Timed]] = {}
        label = numbers.setdefault(f"{model}_rows_{T}", {})
        for case in group:
            if time.monotonic() > deadline:
                break
            beside, timed = time_case(case, pool, good, deadline)
            if not timed:
                continue
            best[case.name] = timed
            label[case.name] = {name: round(us, 2) for name, us in beside.items()} | {
                "floor_us": round(case.us_at_peak, 2),
                "skinny_us": round(timed[0].us, 2),
                "skinny_tbps": round(case.us_at_peak / timed[0].us * PEAK_TBPS, 3),
            }
            pointer = [t.us for t in timed if not t.config.use_tma]
            others = beside | ({"pointer_us": min(pointer)} if pointer else {})
            shown = "".join(f"  {name} {us:7.2f}" for name, us in others.items())
            print(
                f"{model:7} T {T:3} {case.name:8} floor {case.us_at_peak:7.2f}{shown}"
                f"  ({len(timed)} tried, {time.monotonic() - start:.0f} s)"
            )
            for us, config in timed[:3]:
                tbps = case.us_at_peak / us * PEAK_TBPS
                print(f"    {us:7.2f} us {tbps:5.2f} TB/s  {tuple(config)}", flush=True)
            faster = timed[0].us < beside.get("cublas_us", float("inf"))
            if is_right(case, timed[0].config) and faster:
                key = (case.E, case.D, case.weight_bytes, table_rows(T))
                table[key] = timed[0].config
        is_layer = model not in SHAPES and all(n in best for n in LAYER)
        if args.layer and is_layer and time.monotonic() < deadline:
            bench = LayerBench(model, T, pool)
            layer, chosen = tune_layer(bench, best, deadline)
            label["layer"] = {name: round(us, 2) for name, us in layer.items()}
            for name, us in layer.items():
                print(f"{model:7} T {T:3} layer {name:40} {us:7.2f}", flush=True)
            for name, config in chosen.items():
                case = bench.cases[name]
                key = (case.E, case.D, case.weight_bytes, table_rows(T))
                table.pop(key, None)
                if config is not None and is_right(case, config):
                    table[key] = config
    lines = [f"    {key}: SkinnyConfig{tuple(config)}," for key, config in table.items()]
    print("\n".join(lines), flush=True)
    return {"numbers": numbers, "table": lines, "seconds": round(time.monotonic() - start)}


def main() -> None:
    parser = parser_of(__doc__)
    names = [*MODELS, *(f"{m}-fp8" for m in MODELS), *SHAPES]
    parser.add_argument("--cases", nargs="+", choices=names, default=["8b", "4b", "8b-fp8"])
    parser.add_argument("--rows", nargs="+", type=int, default=[16], help="T, 1 to 256")
    parser.add_argument("--names", nargs="+", choices=LABELS, default=LABELS, help="of the GEMMs")
    parser.add_argument("--seconds", type=float, default=150, help="begin no shape after it")
    parser.add_argument("--gb", type=float, default=20, help="size of the weights' buffer")
    parser.add_argument("--no-layer", dest="layer", action="store_false")
    parser.add_argument("--dry-run", action="store_true", help="count what would run; no GPU")
    add_result_file(parser)
    args = parser.parse_args()
    if wrong := [rows for rows in args.rows if not 1 <= rows <= 256]:
        parser.error(f"--rows {wrong[0]}: pass 1 to 256")
    todo = cases(args.cases, args.rows, args.names)
    if args.dry_run:
        dry_run(todo)
        return
    if not torch.cuda.is_available():
        parser.error("no CUDA device: these are GPU timings; --dry-run shows what would run")
    torch.manual_seed(0)
    result = tune(todo, args)
    config = {"cases": args.cases, "rows": args.rows, "names": args.names}
    config |= {"peak_tbps": PEAK_TBPS, "table": result["table"]}
    store(args, "skinny_linear_tuning", result["numbers"], config=config)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
