"""What commands share: options, each defined once, so that a name means the same in all of them.

Each is a decorator, as click's own are; a command stacks those that it takes. Nothing here imports
torch.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from graphengine.config.bytesize import parse_bytes
from graphengine.config.engine import DraftQuantization

Option = Callable[[Any], Any]


def _group(*options: Option) -> Option:
    """One decorator for several options, in the order in which help shows them."""

    def decorate(command: Any) -> Any:
        return functools.reduce(lambda inner, option: option(inner), reversed(options), command)

    return decorate


class IntList(click.ParamType):
    """`1,8,16` -> (1, 8, 16), as typed."""

    name = "N,N,.."

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            self.fail(f"{value!r}: pass integers from 1 up, such as 1,8,16", param, ctx)
        return tuple(int(part) for part in parts)


class DistinctInts(IntList):
    """The same, each once."""

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        return tuple(dict.fromkeys(super().convert(value, param, ctx)))


class ByteSize(click.ParamType):
    """`2GiB` -> 2147483648."""

    name = "SIZE"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        try:
            return parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Rate(click.FloatRange):
    """A number from 0 up; neither nan, which is in every range, nor inf, which JSON lacks."""

    def __init__(self) -> None:
        super().__init__(min=0)

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value}: pass a finite number", param, ctx)
        return found


MODEL = click.argument("model", required=False)
DRAFT = click.option(
    "--draft",
    metavar="MODEL|none",
    help="DFlash drafter of MODEL: a hub id, a directory or a preset; none decodes plainly.  "
    "[default: the bundled drafter for the bundled model, else none]",
)


def bucket(default: str, text: str = "Batch sizes.") -> Option:
    """`--bucket 1,8,16`, in the user's order, which is that of --num-speculative-tokens."""
    return click.option(
        "--bucket", type=DistinctInts(), default=default, show_default=True, help=text
    )


# --- how it runs ---

GRAPH_MODE = click.option(
    "--graph-mode",
    type=click.Choice(["auto", "none", "piecewise", "full"]),
    default="auto",
    help="How steps are launched: captured between attentions (piecewise, auto on a GPU), captured "
    "whole (full), or called one by one (none, auto on the CPU).",
)
COMPILE = click.option(
    "--compile/--no-compile",
    "compile_",
    default=None,
    help="Inductor for the dense segments.  [default: on a GPU only]",
)
ATTENTION_BACKEND = click.option(
    "--attention-backend",
    type=click.Choice(["auto", "flashinfer", "triton", "torch"]),
    default="auto",
    help="auto: triton with --graph-mode full, flashinfer on a GPU in bfloat16, else torch.",
)
DEVICE = click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
DTYPE = click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float32"]),
    default="auto",
    help="auto: bfloat16 on a GPU, float32 on the CPU.",
)
PAGE_SIZE = click.option(
    "--page-size",
    type=click.IntRange(min=1),
    help="Tokens per K/V page; default 16, with our own attention (triton) 128.",
)
DRAFT_QUANTIZATION = click.option(
    "--draft-quantization",
    type=click.Choice(get_args(DraftQuantization)),
    default="none",
    help="fp8: round the drafter's weights, in forwards of up to 64 rows; fp8-dynamic: in all, and "
    "in larger ones its activations too. Verification keeps the output what the target says.",
)
NUM_SPECULATIVE_TOKENS = click.option(
    "--num-speculative-tokens",
    type=IntList(),
    help="Tokens drafted and verified a step: one number, or one for each --bucket in its order. "
    "In large batches fewer can be faster.  [default: all of the drafter's block]",
)
EXECUTION = _group(GRAPH_MODE, COMPILE, ATTENTION_BACKEND, DEVICE, DTYPE, PAGE_SIZE)

# --- memory ---

MAX_MODEL_LEN = click.option(
    "--max-model-len",
    type=click.IntRange(min=2),
    help="Most tokens of one request, prompt included.  [default: what the models allow]",
)
GPU_MEMORY_UTILIZATION = click.option(
    "--gpu-memory-utilization",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.9,
    show_default=True,
    help="Share of the GPU's memory that may be filled.",
)
KV_CACHE_MEMORY = click.option(
    "--kv-cache-memory",
    type=ByteSize(),
    help="Most bytes of the K/V pool, such as 2GiB.  [default: what the memory plan leaves]",
)

# --- measuring ---

SIMULATE_ACCEPTANCE = click.option(
    "--simulate-acceptance",
    type=float,
    metavar="LENGTH",
    help="Draw this mean acceptance length instead of comparing drafts (random weights accept "
    "nothing); the text is meaningless, and results say so. It is the mean of the drafter's own "
    "block: --num-speculative-tokens cuts draws off.",
)


def load_format(default: str | None, suffix: str) -> Option:
    """`--load-format auto|dummy|dummy-uniform`."""
    return click.option(
        "--load-format",
        type=click.Choice(["auto", "dummy", "dummy-uniform"]),
        default=default,
        help="dummy: random weights from a config.json or a preset's name alone; dummy-uniform: "
        f"drawn as by vLLM's dummy loader, to compare with it.{suffix}",
    )


LOAD_FORMAT = load_format("auto", "")
LOAD_FORMAT_OR_PRESET = load_format(None, "  [default: dummy for a preset]")
PROMPT_SEED = click.option(
    "--seed",
    type=click.IntRange(-(1 << 63), (1 << 64) - 1),  # torch.Generator's
    default=0,
    show_default=True,
    help="Of the random prompts.",
)
RESULT_FILE = _group(
    click.option(
        "--output-json",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Write the result file here.",
    ),
    click.option(
        "--commit", metavar="SHA", help="Commit to record where the checkout has no history."
    ),
)


def check_place(option: str, file: Path | None, *, makes_folders: bool = False) -> None:
    """Refuses a file that cannot be written, before minutes are spent on what goes into it.

    Raises:
        ValueError: with the option's name.
    """
    if file is None:
        return
    folder = file.absolute().parent
    if makes_folders:
        folder = next(path for path in (folder, *folder.parents) if path.exists())
    if not folder.is_dir():
        raise ValueError(f"{option} {file}: cannot be written (no such folder); make it first")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise ValueError(f"{option} {file}: cannot be written (no permission); choose another path")


def as_json(text: str) -> Option:
    """`--json`."""
    return click.option("--json", "as_json", is_flag=True, help=text)


def out_of_memory(error: Exception) -> str | None:
    """What was lacking, for a message; None for any other error."""
    # torch's own type exists for CUDA alone; on the CPU it raises a bare RuntimeError.
    texts = ("out of memory", "not enough memory", "can't allocate memory")
    if not isinstance(error, MemoryError) and not any(text in str(error) for text in texts):
        return None
    return f"out of memory ({str(error).strip().partition(chr(10))[0] or 'on the host'})"
