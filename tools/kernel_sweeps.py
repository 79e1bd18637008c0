"""Other sizes for a kernel: tiles, splits and launches of attention, constants of the others."""

import argparse
import itertools
import multiprocessing
import os
import statistics
from collections.abc import Iterator
from typing import Any

from kernel_cases_attention import AttentionCase, ChunkCase, default_splits
from kernel_cases_logits import bench_argmax, bench_filter_threshold, bench_gumbel_argmax
from kernel_cases_rows import bench_context_kv, bench_qk_norm_rope
from kernel_timing import G, Numbers

from graphengine.kernels import (
    argmax,
    block_attention,
    chunk_attention,
    context_kv,
    filter_threshold,
    gumbel_argmax,
    qk_norm_rope,
)
from graphengine.kernels.arrival_kernels import MAX_SPLITS


def sweep_chunks(args: argparse.Namespace) -> Iterator[tuple[str, str, Numbers]]:
    cases = [ChunkCase(kv) for kv in args.kv]
    tiles = ((128, 2), (128, 3), (64, 4), (64, 6))
    for (tile, stages), pdl in itertools.product(tiles, (True, False)):
        config = chunk_attention.LaunchConfig(tile, stages, pdl)
        label = "_".join(f"{name}_{int(value)}" for name, value in config._asdict().items())
        times = {f"kv_{case.kv}_tflops": case.tflops(case.ours_us(config)) for case in cases}
        yield "chunk_attention", label, times


Candidate = tuple[int, block_attention.LaunchConfig]


def compile_candidate(candidate: Candidate) -> str | None:
    """In a worker: compiles (to triton's cache on disk) by one small launch; the error, if any."""
    num_splits, config = candidate
    try:
        AttentionCase(1, 2 * G, causal=True).ours_us(num_splits, config)
    except Exception as error:  # too much shared memory: not a candidate
        return str(error).splitlines()[0][:80]
    return None


def tile_candidates(B: int) -> list[Candidate]:
    """The default, then every tile that fits, with its chunks, warps and stages."""
    Z = default_splits(B)
    base = block_attention.choose_config(Z)
    sizes = [(64, c, 4, s) for c in (64, 128, 256) for s in (2, 3, 4)]
    sizes += [(128, c, w, s) for c in (128, 256) for w in (4, 8) for s in (2, 3)]
    names = ("kv_tile", "chunk", "num_warps", "num_stages")
    configs = [base._replace(**dict(zip(names, size, strict=True))) for size in sizes]
    # Several programs share a multiprocessor: small stages, and nobody waits to merge.
    shared = [
        (z, base._replace(kv_tile=64, chunk=c, num_stages=s, one_split=0, polls=0))
        for z in (2 * Z, 4 * Z, 8 * Z)
        if z <= MAX_SPLITS
        for c in (64, 128)
        for s in (1, 2)
    ]
    return [*((Z, config) for config in dict.fromkeys([base, *configs])), *shared]


def launch_candidates(Z: int, base: block_attention.LaunchConfig) -> list[Candidate]:
    """One thing changed at a time: who merges, when the launch starts, how far keys are split."""
    changes: list[dict[str, Any]] = [{"pdl": False}, {"prefetch": not base.prefetch}]
    changes += [{"one_split": n} for n in (0, 256, 384, 512, 1024, 2048)]
    changes += [{"polls": 0}]
    splits = sorted({max(1, Z // 2), min(32, 2 * Z), min(32, 4 * Z)} - {Z})
    everything = [(z, base._replace(one_split=n)) for z in splits for n in (0, base.one_split)]
    return [*everything, *((Z, base._replace(**change)) for change in changes)]


def sweep_attention(args: argparse.Namespace) -> Iterator[tuple[str, str, Numbers]]:
    """First tiles at the default splits; then, around the best two of them, splits and launch.

    All candidates are compiled by a pool of processes before any is timed.
    """
    num_workers = max(1, min(12, (os.cpu_count() or 2) - 2))
    best: dict[tuple[int, int], list[tuple[float, str]]] = {}
    with multiprocessing.get_context("spawn").Pool(num_workers) as pool:
        candidates = {B: tile_candidates(B) for B in args.batch}
        cases: dict[int, list[AttentionCase]] = {}
        for phase in range(2):
            flat = list(dict.fromkeys(itertools.chain(*candidates.values())))
            errors = dict(zip(flat, pool.map(compile_candidate, flat, chunksize=1), strict=True))
            for B in args.batch:
                cases = {B: cases.get(B) or [AttentionCase(B, kv, True) for kv in args.kv]}
                rows: list[tuple[float, Candidate]] = []
                for num_splits, config in candidates[B]:
                    label = f"batch_{B}_splits_{num_splits}_" + "_".join(
                        f"{name}_{int(value)}" for name, value in config._asdict().items()
                    )
                    if error := errors[num_splits, config]:
                        print(f"{label}: {error}", flush=True)
                        continue
                    us = [case.ours_us(num_splits, config) for case in cases[B]]
                    rows.append((statistics.geometric_mean(us), (num_splits, config)))
                    for kv, one in zip(args.kv, us, strict=True):
                        best.setdefault((B, kv), []).append((one, label))
                    keys = [f"kv_{kv}_us" for kv in args.kv]
                    yield "block_attention", label, dict(zip(keys, us, strict=True))
                if phase == 0:
                    winners = [candidate for _, candidate in sorted(rows)[:2]]
                    around = itertools.chain(*(launch_candidates(*w) for w in winners))
                    candidates[B] = list(dict.fromkeys(around))
    for (B, kv), timed in best.items():
        for us, label in sorted(timed)[:3]:
            print(f"best at batch {B}, kv {kv}: {us:7.2f} us  {label}", flush=True)


def sweep_constants(kernel: str, args: argparse.Namespace) -> Iterator[tuple[str, str, Numbers]]:
    """Every combination of a module's CAPITAL sizes, at each batch."""
    heads = {"HEADS_PER_PROGRAM": (2, 4, 8, 16)}
    chunks = {"CHUNK": (2048, 4096, 8192, 16384), "BLOCK": (1024, 2048)}
    search = {"PROGRAMS": (396, 660, 1320), "LANES": (128, 256), "UNROLL": (2, 4, 8)}
    module, run, grid = {
        "qk_norm_rope": (qk_norm_rope, bench_qk_norm_rope, heads),
        "context_kv": (context_kv, bench_context_kv, heads),
        "argmax": (argmax, bench_argmax, chunks),
        "filter_threshold": (filter_threshold, bench_filter_threshold, search),
        "gumbel_argmax": (gumbel_argmax, bench_gumbel_argmax, chunks | {"BLOCK": (256, 512, 1024)}),
    }[kernel]
    grid |= {"NUM_WARPS": (1, 2, 4, 8)}
    for values in itertools.product(*grid.values()):
        for name, value in zip(grid, values, strict=True):
            setattr(module, name, value)
        label = "_".join(f"{name.lower()}_{x}" for name, x in zip(grid, values, strict=True))
        times = {f"rows_{B * G}_us": run(B * G, baseline=False)["kernel_us"] for B in args.batch}
        yield kernel, label, times
