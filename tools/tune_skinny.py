"""Time kernels/skinny_linear.py against cuBLAS on Qwen3's shapes and print the winners' table.

How: compile and check every variant on a small problem in parallel processes (a variant that is
wrong, does not fit or hangs is dropped there); time each candidate in a CUDA graph of launches
over distinct weights; then run whole layers with the best candidates (skinny_layer.py).
Invariant: cuBLAS and the kernels see the same weights in the same harness, and each winner is
compared with a float64 product, in an output that was NaN.

    python tools/tune_skinny.py --seconds 150 --out profiles/results/skinny.json  # 8B, 4B, FP8 8B
    python tools/tune_skinny.py --cases 8b --rows 16 --no-layer
    python tools/tune_skinny.py --dry-run                                  # no GPU: what would run

The last line of stdout is one JSON object; "table" in it is the text of TUNED.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import time
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from skinny_layer import (
    LAYER,
    MIN_LAUNCHES,
    MODELS,
    PEAK_TBPS,
    Case,
    LayerBench,
    Operands,
    Pool,
    cases,
    graph_us,
    problem,
    run,
    swiglu,
)

from graphengine.kernels.fp8 import widened
from graphengine.kernels.skinny_config import (
    DEFAULT_SMS,
    PDL_EARLY,
    PDL_LATE,
    PDL_OFF,
    SkinnyConfig,
    choose_config,
    num_columns,
)
from graphengine.profiles import result_schema

SMEM_BYTES = 226 * 1024


class Timed(NamedTuple):
    us: float
    config: SkinnyConfig


def smem_bytes(case: Case, config: SkinnyConfig) -> int:
    cols = num_columns(case.T)
    tiles = config.rows * (2 if case.kind == "swiglu" else 1) * case.weight_bytes
    epilogue = min(config.rows * cols * 4, 16384)  # what the compiler takes to turn the layout
    # x in FP8 is hi and lo: as many bytes as in bf16
    return (tiles + 2 * cols) * config.block_k * config.num_stages + epilogue + 2048


def variants(case: Case) -> list[SkinnyConfig]:
    """What is compiled: tiles and stages; splits and the grid are arguments of the kernel."""
    swiglu = case.kind == "swiglu"
    found = {}
    wide = case.T > 64  # x is read once per tile of weight rows, so tiles must be tall
    for rows, block_k, budget in itertools.product(
        (64, 128, 256) if wide else (64, 128), (64, 128, 256), (52, 72, 104, 148, 200)
    ):
        if (case.weight_bytes == 1 and block_k == 64) or (swiglu and rows == 256):
            continue
        one = SkinnyConfig(rows=rows, block_k=block_k, num_stages=1)
        stage = smem_bytes(case, one) - smem_bytes(case, one._replace(num_stages=0))
        num_stages = min(12, budget * 1024 // stage)
        if num_stages < 2 or (swiglu and rows == 128 and block_k == 256):
            continue
        num_warps = 8 if rows == 256 or (rows == 128 and (swiglu or wide)) else 4
        config = one._replace(num_stages=num_stages, num_warps=num_warps)
        if smem_bytes(case, config) <= SMEM_BYTES:
            found[config] = None
    pointer = SkinnyConfig(rows=64, block_k=64 if swiglu else 128, num_stages=4, use_tma=0)
    return [*found] + ([pointer] if case.weight_bytes == 2 else [])


def candidates(case: Case, config: SkinnyConfig, num_sms: int) -> list[SkinnyConfig]:
    """A variant with every useful number of splits and grid."""
    outputs = case.E // 2 if case.kind == "swiglu" else case.E
    tiles = -(-outputs // config.rows)
    blocks = -(-case.D // config.block_k)
    found = []
    for num_splits in (1, 2, 3, 4, 5, 6) if case.kind == "partials" else (1,):
        items = tiles * num_splits
        waste = -(-blocks // num_splits) * num_splits / blocks
        for ctas_per_sm in (1, 2, 3, 4) if config.use_tma else (1,):
            grid = min(items, ctas_per_sm * num_sms)
            resident = ctas_per_sm * (smem_bytes(case, config) + 1024) <= SMEM_BYTES + 2048
            balance = items / (grid * -(-items // grid))
            enough = grid >= 0.6 * num_sms and grid * smem_bytes(case, config) > 5e6
            if not config.use_tma or (resident and balance > 0.85 and enough and waste < 1.1):
                found.append(config._replace(num_splits=num_splits, ctas_per_sm=ctas_per_sm))
            if grid == items:
                break  # more CTAs than items: the same launch
    return found


def relative_error(case: Case, config: SkinnyConfig, operands: Operands) -> float:
    """Norm of the error over norm of the float64 result; NaN if an element was not written."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is NaN
    got = run(case, config, operands).double()
    torch.use_deterministic_algorithms(False)
    got = got.sum(0) if case.kind == "partials" else got
    x, weight = widened(*operands)
    expected = torch.cat([x.double() @ rows.double().T for rows in weight.split(16384)], dim=1)
    if case.kind == "swiglu":
        gate, up = expected.chunk(2, dim=1)
        expected = F.silu(gate) * up
    return float((got - expected).norm() / expected.norm())


def is_right(case: Case, config: SkinnyConfig) -> bool:
    """A winner on its full shape, with fresh data."""
    error = relative_error(case, config, problem(case, case.E, case.D))
    print(f"    {case.name} {tuple(config)}: relative error {error:.1e}", flush=True)
    return error < 1e-2


def compile_and_check(job: tuple[Case, SkinnyConfig]) -> tuple[tuple[Case, SkinnyConfig], str]:
    """In a process of its own: the kernel on a small problem; "" if it is right."""
    case, config = job
    try:
        D = config.block_k * (2 * config.num_stages + 3)
        many = 2 * torch.cuda.get_device_properties(0).multi_processor_count + 5
        E = config.rows * many * (2 if case.kind == "swiglu" else 1)
        small = config._replace(ctas_per_sm=1, num_splits=3 if case.kind == "partials" else 1)
        error = relative_error(case, small, problem(case, E, D))
        torch.cuda.empty_cache()
        return job, "" if error < 1e-2 else f"wrong: relative error {error}"
    except Exception as problem_found:  # does not fit or does not compile: not a candidate
        return job, str(problem_found).splitlines()[0][:100]


def compile_all(jobs: list[tuple[Case, SkinnyConfig]], seconds: float) -> set[Any]:
    """The jobs that are right, keyed (kind, T, weight_bytes, config); stops at a hang."""
    good = set()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton", "graphengine.kernels.skinny_linear"])
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


def time_case(case: Case, pool: Pool, good: set[Any], deadline: float) -> tuple[float, list[Timed]]:
    """(cuBLAS us, candidates with the fastest first)."""
    weights = pool.weights(case)
    copies = min(MIN_LAUNCHES, pool.copies(case.E * case.D * case.weight_bytes))
    x, _, scales = problem(case, case.E, case.D)
    fused = torch.empty(case.T, case.E // 2, dtype=torch.bfloat16, device="cuda")

    def cublas() -> None:
        for i in range(copies):
            y = F.linear(x, weights(i))
            if case.kind == "swiglu":
                swiglu(y, fused)

    bf16 = case.weight_bytes == 2
    cublas_us = graph_us(cublas, copies) if bf16 else float("nan")
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    timed = []
    for variant in variants(case):
        if (case.kind, case.T, case.weight_bytes, variant) not in good:
            continue
        for config in candidates(case, variant, num_sms):
            if time.monotonic() > deadline:
                break

            def launches(config: SkinnyConfig = config) -> None:
                for i in range(copies):
                    run(case, config, (x, weights(i), scales))

            timed.append(Timed(graph_us(launches, copies), config))
    return cublas_us, sorted(timed)


def tune_layer(
    bench: LayerBench, best: dict[str, list[Timed]], deadline: float
) -> tuple[dict[str, float], dict[str, SkinnyConfig]]:
    """Times of whole layers by label, and the configs that are best together."""
    numbers: dict[str, float] = {}
    bf16 = bench.cases["qkv"].weight_bytes == 2
    if bf16:
        times = [bench.us(dict.fromkeys(LAYER), glue) for glue in (PDL_OFF, PDL_LATE)]
        numbers["cublas_us"] = min(times)
    chosen: dict[str, SkinnyConfig] = {n: best[n][0].config for n in LAYER}
    best_us, best_glue, best_configs = float("inf"), PDL_OFF, chosen
    for pdl, glue in itertools.product((PDL_OFF, PDL_LATE, PDL_EARLY), repeat=2):
        if time.monotonic() > deadline:
            break
        configs = {n: c._replace(pdl=pdl) for n, c in chosen.items()}
        us = numbers[f"skinny_pdl_{pdl}_glue_{glue}_us"] = bench.us({**configs}, glue)
        if us < best_us:
            best_us, best_glue, best_configs = us, glue, configs
    chosen = best_configs
    for name in LAYER:
        pdl = chosen[name].pdl
        others = [t.config for t in best[name][1:6]]
        modes = [chosen[name]._replace(pdl=p) for p in (PDL_LATE, PDL_EARLY) if p != pdl]
        for config in [*(c._replace(pdl=pdl) for c in others), *modes]:
            if time.monotonic() > deadline:
                break
            us = bench.us({**chosen, name: config}, best_glue)
            if us < best_us:
                best_us, chosen = us, {**chosen, name: config}
    numbers["skinny_best_us"] = best_us
    for name in LAYER:  # what each GEMM is worth in its place
        if bf16:
            replaced = bench.us({**chosen, name: None}, best_glue)
            numbers[f"skinny_best_but_{name}_by_cublas_us"] = replaced
    return numbers, chosen


def dry_run(todo: list[Case]) -> None:
    compiled = {(c.kind, c.T, c.weight_bytes, v) for c in todo for v in variants(c)}
    print(f"{len(compiled)} variants to compile")
    for case in todo:
        count = sum(len(candidates(case, v, DEFAULT_SMS)) for v in variants(case))
        print(
            f"{case.model:7} {case.name:8} T {case.T:3} [{case.E}, {case.D}] {count} candidates,"
            f" floor {case.us_at_peak:.1f} us, rule: "
            f"{choose_config(case.T, case.E, case.D, case.weight_bytes, case.kind == 'swiglu')}"
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
            cublas_us, timed = time_case(case, pool, good, deadline)
            if not timed:
                continue
            best[case.name] = timed
            baseline = {} if cublas_us != cublas_us else {"cublas_us": round(cublas_us, 2)}
            label[case.name] = baseline | {
                "floor_us": round(case.us_at_peak, 2),
                "skinny_us": round(timed[0].us, 2),
                "skinny_tbps": round(case.us_at_peak / timed[0].us * PEAK_TBPS, 3),
            }
            pointer = [t.us for t in timed if not t.config.use_tma]
            shown = f"cuBLAS {cublas_us:7.2f}  pointer {min(pointer, default=float('nan')):7.2f}"
            print(
                f"{model:7} T {T:3} {case.name:8} floor {case.us_at_peak:7.2f}  {shown}"
                f"  ({len(timed)} tried, {time.monotonic() - start:.0f} s)"
            )
            for us, config in timed[:3]:
                tbps = case.us_at_peak / us * PEAK_TBPS
                print(f"    {us:7.2f} us {tbps:5.2f} TB/s  {tuple(config)}", flush=True)
            faster = timed[0].us < cublas_us or case.weight_bytes == 1
            if is_right(case, timed[0].config) and faster:
                key = (case.E, case.D, case.weight_bytes, num_columns(T))
                table[key] = timed[0].config
        if args.layer and all(n in best for n in LAYER) and time.monotonic() < deadline:
            bench = LayerBench(model, T, pool)
            layer, chosen = tune_layer(bench, best, deadline)
            label["layer"] = {name: round(us, 2) for name, us in layer.items()}
            for name, us in layer.items():
                print(f"{model:7} T {T:3} layer {name:40} {us:7.2f}", flush=True)
            for name, config in chosen.items():
                case = bench.cases[name]
                if is_right(case, config):
                    table[case.E, case.D, case.weight_bytes, num_columns(T)] = config
    lines = [f"    {key}: SkinnyConfig{tuple(config)}," for key, config in table.items()]
    print("\n".join(lines), flush=True)
    return {"numbers": numbers, "table": lines, "seconds": round(time.monotonic() - start)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*MODELS, *(f"{m}-fp8" for m in MODELS)]
    parser.add_argument("--cases", nargs="+", choices=names, default=["8b", "4b", "8b-fp8"])
    parser.add_argument("--rows", nargs="+", type=int, default=[16], help="T, 1 to 128")
    parser.add_argument("--seconds", type=float, default=150, help="stop starting new work then")
    parser.add_argument("--gb", type=float, default=20, help="size of the weights' buffer")
    parser.add_argument("--no-layer", dest="layer", action="store_false")
    parser.add_argument("--dry-run", action="store_true", help="count what would run; no GPU")
    parser.add_argument("--out", help="also store the result as JSON here")
    parser.add_argument(
        "--commit", metavar="SHA", help="commit to record where the checkout has no history"
    )
    args = parser.parse_args()
    todo = cases(args.cases, args.rows)
    if args.dry_run:
        dry_run(todo)
        return
    if not torch.cuda.is_available():
        parser.error("no CUDA device: these are GPU timings; --dry-run shows what would run")
    torch.manual_seed(0)
    result = tune(todo, args)
    if args.out:
        config = {"cases": args.cases, "rows": args.rows, "peak_tbps": PEAK_TBPS}
        config |= {"table": result["table"]}
        env = result_schema.environment(args.commit)
        result_schema.write_result(
            args.out, "skinny_linear_tuning", result["numbers"], config=config, env=env
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
