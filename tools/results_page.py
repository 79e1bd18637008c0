"""Writes what the documents say of speed from the stored results: README's table, the results page
(profiles/RESULTS.md) and the picture (profiles/step.svg).

Why: a number that is typed by hand drifts from its file. Tokens a second are those measured
(`output_throughput`), never a length times a step. Of each measurement the newest file counts, so a
new run of tools/measure.py needs no change here; tests/tools/test_results_page.py regenerates the
text and compares.

    python tools/results_page.py            # after adding files to profiles/results/
    python tools/results_page.py --check    # writes nothing; exit code 1 where a document is stale
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from result_file import parser_of

from graphengine.profiles.pictures import Panel, render

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "profiles" / "results"
README, PAGE, PICTURE = ROOT / "README.md", ROOT / "profiles/RESULTS.md", ROOT / "profiles/step.svg"
BLOCK = re.compile(r"(?<=<!-- tools/results_page.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
BATCHES = (1, 8, 16)
PROMPTS = (128, 1024, 8192, 32000)
PEER = "peers-vllm-0.33"
# What README shows: weights drawn as vLLM's dummy ones, so that both multiply the same numbers.
OURS = {"all bf16": "8b-uniform", "FP8 drafter": "8b-uniform-fp8-dynamic"}
BENCHES = tuple(
    "8b-modes 8b-fp8-dynamic 8b-uniform 8b-uniform-fp8-dynamic 8b-spec-11 8b-uniform-spec-11 8b-8k "
    "8b-8k-fp8 4b-modes 4b-fp8-dynamic 4b-uniform-fp8-dynamic 4b-uniform-spec-11".split()
)
# Of `bench --prefill`, later names before earlier ones; the first was noted by hand.
FIRST_TOKENS = tuple(
    "first-token 8b-first-token 8b-first-token-32k 4b-first-token 8b-first-token-uniform "
    "4b-first-token-uniform 4b-hybrid-first-token-uniform".split()
)
STARTS = {"caches empty": "8b-start-cold", "caches full": "8b-start-warm"}
COLORS, WIDTH = ("#9a9a9a", "#2f6f9f", "#3b8132"), 0.27  # of a bar

TLDR = (
    "TL;DR: every measurement that counts today, written by `python tools/results_page.py` from "
    "`results/`; do not edit. What was tried on the way is in `LOG.md`."
)
METHOD = (
    "Random weights of the real shapes, greedy, acceptance **simulated** at 6.35 tokens a step for "
    "15 drafts; what a run drew stands beside it, and tokens/s are what that run committed. Times "
    "are of 200 steps (plain decoding 499), prefill excluded; machines of one kind differ by 3 to "
    "4 %. The floor is the bytes that a step must read (weights once a forward, K/V once) over "
    "the read bandwidth measured in the same process, 4.4 to 4.5 TB/s; at batch 16 arithmetic and "
    "power set a higher one. Weights as vLLM's are drawn like its dummy ones (`--load-format "
    "dummy-uniform`), which cost less power than ordinary ones. `fp8` and `fp8-dynamic` round the "
    "drafter alone."
)

Table = Sequence[Sequence[str]]


def stored(name: str) -> list[Path]:
    """The results of a measurement."""
    pattern = re.compile(rf"\d{{4}}-\d\d-\d\d-h200-{re.escape(name)}(-[0-9a-f]{{7}})?\.json")
    return [path for path in RESULTS.glob("*.json") if pattern.fullmatch(path.name)]


def newest(name: str) -> tuple[str, dict[str, Any]]:
    """The latest result of a measurement: file name and content."""
    found = {path.name: json.loads(path.read_text()) for path in stored(name)}
    if not found:
        raise ValueError(f"no result called {name} in {RESULTS}")
    return max(found.items(), key=lambda item: (item[1]["date_utc"], item[0]))


def first_token_files() -> list[str]:
    """Those of FIRST_TOKENS that there are."""
    return [name for name in FIRST_TOKENS if stored(name)]


def first_tokens() -> dict[str, dict[str, Any]]:
    """Model -> our numbers, by case; of a case in several files, those of the later name."""
    found: dict[str, dict[str, Any]] = {}
    for name in first_token_files():
        config, numbers = (newest(name)[1][key] for key in ("config", "numbers"))
        by_model = {config["model"]: cases(name)} if "modes" in config else numbers
        for model, of_model in by_model.items():
            found[model] = found.get(model, {}) | of_model
    return found


def cases(name: str) -> dict[str, dict[str, float]]:
    """`bucket_1_input_128` -> numbers, of the one mode of a bench."""
    modes = [n for n in newest(name)[1]["numbers"].values() if isinstance(n, dict)]
    (found,) = modes
    return found


def markdown(rows: Table) -> str:
    """The first row is the header; the first column is text, the rest numbers."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---|" + "---:|" * (len(rows[0]) - 1))
    return "\n".join(lines) + "\n"


def in_words(milliseconds: float) -> str:
    """About three digits: 4.59, 12.3, 38, 1,751."""
    digits = 2 if milliseconds < 10 else 1 if milliseconds < 30 else 0
    return f"{milliseconds:,.{digits}f}"


def first_token(numbers: dict[str, Any], prompt: int) -> str:
    """The median, or the range where each host had one."""
    found = numbers.get(f"first_token_input_{prompt}", {})
    if "ttft_p50_ms" in found:
        return in_words(found["ttft_p50_ms"])
    values = found.get("ttft_ms", ())
    return f"{in_words(min(values))} to {in_words(max(values))}" if values else "-"


def step_table() -> Table:
    """8B, per batch: a step and what it commits, ours, the floor and the peer's."""
    peer = newest(PEER)[1]["numbers"]["qwen3-8b"]
    keys = [f"bucket_{batch}_input_128" for batch in BATCHES]
    rows = [["Qwen3-8B, one H200", *(f"batch {batch}" for batch in BATCHES)]]
    rows.append(["**ms a step:** vLLM 0.33", *(f"{peer[key]['step_mean_ms']:.2f}" for key in keys)])
    ours = {label: cases(name) for label, name in OURS.items()}
    for what, number in (("graphengine", "step_p50_ms"), ("floor", "floor_ms")):
        for label, found in ours.items():
            rows.append([f"{what}, {label}", *(f"{found[key][number]:.2f}" for key in keys)])
    for who, found in (("vLLM 0.33", peer), ("graphengine, FP8 drafter", ours["FP8 drafter"])):
        cells = [
            f"{found[k]['output_throughput']:,.0f} ({found[k]['mean_acceptance_length']:.2f})"
            for k in keys
        ]
        rows.append([f"**tokens/s** (tokens a step): {who}", *cells])
    return rows


def first_token_table() -> Table:
    peer, ours = newest(PEER)[1]["numbers"]["qwen3-8b"], first_tokens()["qwen3-8b"]
    return [
        ["ms to the first token, prompt of", *(f"{prompt:,}" for prompt in PROMPTS)],
        ["vLLM 0.33", *(first_token(peer, prompt) for prompt in PROMPTS)],
        ["graphengine", *(first_token(ours, prompt) for prompt in PROMPTS)],
    ]


def readme_block() -> str:
    """What stands between README's marks."""
    return f"\n{markdown(step_table())}\n{markdown(first_token_table())}\n"


def bench_rows() -> Iterator[list[str]]:
    for name in BENCHES:
        config, numbers = (newest(name)[1][key] for key in ("config", "numbers"))
        config |= config.get("options", {})  # where later files have what the engine was asked for
        model = config["model"].removeprefix("qwen3-").upper()
        weights = "as vLLM's" if config["load_format"] == "dummy-uniform" else "ordinary"
        for mode, found in numbers.items():
            for key, case in found.items() if isinstance(found, dict) else ():
                if not key.startswith("bucket_"):
                    continue
                _, bucket, _, prompt = key.split("_")
                drafts = config["modes"][mode]["num_speculative_tokens"]
                fp8 = config["draft_quantization"]
                drafter = "none" if not drafts else "bf16" if fp8 == "none" else fp8
                yield [
                    f"{model}, {mode.removesuffix('_plain').replace('_', ' ')}",
                    *(drafter, str(drafts[0]) if drafts else "-", weights, bucket, prompt),
                    *(f"{case[f'step_{part}_ms']:.3f}" for part in ("p50", "p95")),
                    *(f"{case['floor_ms']:.3f}", f"{case['over_floor_ratio']:.2f}"),
                    f"{case.get('gpu_idle_percent', 0):.1f}",
                    f"{case['mean_acceptance_length']:.2f}",
                    f"{case['output_throughput']:,.0f}",
                ]


def peer_rows() -> Iterator[list[str]]:
    ours = first_tokens()
    for model, found in newest(PEER)[1]["numbers"].items():
        for key, numbers in found.items():
            beside = ours.get(model, {}).get(key, {})
            if key.startswith("first_token"):
                prompt = int(key.rsplit("_", 1)[1])
                own = first_token(ours.get(model, {}), prompt)
                cells = ["first token", "1", f"{prompt:,}", first_token(found, prompt), own, "-"]
            elif key.startswith("bucket"):
                _, bucket, _, prompt = key.split("_")
                own = f"{beside['step_p50_ms']:.2f}" if beside else "-"
                rate = f"{numbers['output_throughput']:,.0f}"
                cells = ["step", bucket, f"{int(prompt):,}", f"{numbers['step_mean_ms']:.2f}"]
                cells += [own, rate]
            else:
                cells = ["start, s", "-", "-", f"{numbers['startup_s']:.1f}", "-", "-"]
            yield [model.replace("_", " "), *cells]


def start_rows() -> Iterator[list[str]]:
    for label, name in STARTS.items():
        start = cases(name)["startup"]
        parts = ("startup", "load", "compile", "capture", "warmup")
        counts = (f"{start['num_compiled']:.0f}", f"{start['num_cache_hits']:.0f}")
        yield [label, *(f"{start[f'{part}_s']:.1f}" for part in parts), *counts]


def conditions(names: Sequence[str]) -> str:
    """On what the files were measured, a line for those that agree."""
    found: dict[str, list[str]] = {}
    for file, result in map(newest, names):
        env = result["environment"]
        shown = ("torch", "triton", "flashinfer-python", "vllm")
        versions = [
            f"{name} {env['versions'][name]}" for name in shown if env["versions"].get(name)
        ]
        parts = [env["gpu_name"], f"driver {env['driver_version']}", *versions]
        parts += [f"commit {env['commit']}"] if env["commit"] else []
        found.setdefault(", ".join(parts), []).append(f"`{file}`")
    return "\n".join(f"* {parts}: {', '.join(files)}" for parts, files in found.items())


def page() -> str:
    """The text of profiles/RESULTS.md."""
    header = "model, mode|drafter|drafts|weights|batch|prompt|p50 ms|p95 ms|floor ms|/floor|idle %"
    bench = [[*header.split("|"), "tokens a step", "tokens/s"], *bench_rows()]
    peer_header = "model|what|batch|prompt|vLLM 0.33|graphengine|vLLM tokens/s"
    starts = "8B, buckets 1, 8, 16, full|s|load|compile|capture|warm up|compiled|found"
    files = [*BENCHES, *STARTS.values(), *first_token_files(), PEER]
    notes = " ".join(newest(name)[1].get("notes", "") for name in first_token_files()).strip()
    return f"""# Results

{TLDR}

{METHOD}

## Decode

{markdown(bench)}
## Beside vLLM 0.33

{newest(PEER)[1]["notes"]} In labels that end in fp8 target and drafter are quantised.

Our first tokens are those of the files below, by weights drawn as vLLM's where there are
such; our steps at 8,192 and 32,000 tokens are older: {notes} Batches of 128-token prompts are
above.

{markdown([peer_header.split("|"), *peer_rows()])}
## Start

Seconds, of a process of its own.

{markdown([starts.split("|"), *start_rows()])}
## Conditions

{conditions(files)}
"""


def draw_steps(axes: Any) -> None:
    """Bars per batch, each with its number; the floor as a line across ours."""
    peer = newest(PEER)[1]["numbers"]["qwen3-8b"]
    keys = [f"bucket_{batch}_input_128" for batch in BATCHES]
    times = {"vLLM 0.33, all bf16": [peer[key]["step_mean_ms"] for key in keys]}
    floors: list[tuple[float, float]] = []
    for index, (label, name) in enumerate(OURS.items()):
        found = [cases(name)[key] for key in keys]
        times[f"graphengine, {label}"] = [case["step_p50_ms"] for case in found]
        floors += [(group + index * WIDTH, case["floor_ms"]) for group, case in enumerate(found)]
    for index, (label, values) in enumerate(times.items()):
        places = [group + (index - 1) * WIDTH for group in range(len(BATCHES))]
        axes.bar(places, values, 0.92 * WIDTH, color=COLORS[index], label=label)
        for place, value in zip(places, values, strict=True):
            axes.text(place, value + 0.12, f"{value:.2f}", ha="center", fontsize=9)
    places, heights = zip(*floors, strict=True)
    ends = [[place + side * WIDTH / 2 for place in places] for side in (-1, 1)]
    label = "floor: bytes of a step / read bandwidth"
    axes.hlines(heights, *ends, color="#d9534f", linewidth=2.5, label=label)
    for place, floor in floors:
        axes.text(place, floor - 0.5, f"{floor:.2f}", ha="center", fontsize=9, color="white")
    axes.set_xticks(range(len(BATCHES)), [f"batch {batch}" for batch in BATCHES])
    axes.set(title="Qwen3-8B + DFlash on one H200: ms a step (lower is better)", ylabel="ms")
    axes.legend(loc="upper left", frameon=False)


def picture() -> bytes:
    return render([Panel(draw_steps, 4.2)], PICTURE.suffix)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where stale")
    args = parser.parse_args()
    wanted = {
        README: BLOCK.sub(lambda _: readme_block(), README.read_text()),
        PAGE: page(),
    }
    stale = [p for p, text in wanted.items() if not p.exists() or p.read_text() != text]
    if not args.check:
        for path in stale:
            path.write_text(wanted[path])
        PICTURE.write_bytes(picture())
    names = [str(path.relative_to(ROOT)) for path in stale]
    print(json.dumps({"stale" if args.check else "written": names}))
    raise SystemExit(1 if args.check and stale else 0)


if __name__ == "__main__":
    main()
