"""What a user may ask for, and what becomes of it: every "auto" is decided here, once.

Refusals come before anything is loaded and name the option, its value and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal, get_args

import torch

from graphengine.config.draft import DraftConfig
from graphengine.config.draft_length import resolve_draft_lengths
from graphengine.config.engine import (
    AttentionBackend,
    DeviceName,
    DraftQuantization,
    DTypeName,
    EngineConfig,
    GraphMode,
)
from graphengine.config.model import ModelConfig
from graphengine.decode.attention import (
    FLASHINFER_HEAD_DIMS,
    flashinfer_can_window,
    flashinfer_missing,
)
from graphengine.decode.simulate import acceptance_rate

LoadFormat = Literal["auto", "dummy", "dummy-uniform"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user asked for, with "auto" (or None) where they did not say."""

    buckets: tuple[int, ...] = (1, 8, 16)
    graph_mode: GraphMode | Literal["auto"] = "auto"
    compile: bool | None = None
    attention_backend: AttentionBackend | Literal["auto"] = "auto"
    device: DeviceName | Literal["auto"] = "auto"
    dtype: DTypeName | Literal["auto"] = "auto"
    page_size: int | None = None
    max_model_len: int | None = None
    load_format: LoadFormat = "auto"
    gpu_memory_utilization: float = 0.9
    kv_cache_memory: int | None = None
    simulate_acceptance: float | None = None
    draft_quantization: DraftQuantization = "none"
    num_speculative_tokens: int | Sequence[int] | None = None
    """One number, or one for each of `buckets` in their order; None: all that the drafter has."""
    lazy_capture: bool = False
    first_batch: int = 1
    """With lazy_capture: how many requests come first; their bucket alone is built ahead."""
    sampling: bool | None = None
    acceptance_floor: float = 1.5
    fallback: bool = True
    finish_in_plain_decode: bool = False
    prepare_plain_decode: bool = False


_CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": ("auto", *get_args(DTypeName)),
    "device": ("auto", *get_args(DeviceName)),
    "graph_mode": ("auto", *get_args(GraphMode)),
    "attention_backend": ("auto", *get_args(AttentionBackend)),
    "draft_quantization": get_args(DraftQuantization),
    "load_format": get_args(LoadFormat),
}
_SWITCHES = (
    *("compile", "sampling", "lazy_capture", "fallback"),
    *("finish_in_plain_decode", "prepare_plain_decode"),
)


# Tokens of a page where nobody says. Our attention looks up one number where a page holds a tile of
# keys, and a single stream has few pages to waste.
_PAGE_SIZES: dict[AttentionBackend, int] = {"flashinfer": 16, "triton": 128, "torch": 16}


def speculation_limit(target: ModelConfig, draft: DraftConfig | None) -> int:
    """Most tokens of a request that is drafted to its end: the fewest positions of the models, less
    a block."""
    if draft is None:
        return target.max_position_embeddings
    positions = min(target.max_position_embeddings, draft.model.max_position_embeddings)
    return positions - draft.num_verify_rows


def resolve_options(
    options: Options, target: ModelConfig, draft: DraftConfig | None
) -> EngineConfig:
    """Decides every "auto" and refuses what cannot work.

    Raises:
        ValueError: naming the option, its value and the remedy.
    """
    for name, known in _CHOICES.items():
        value = getattr(options, name)
        if value not in known:
            shown = ", ".join(known)
            raise ValueError(f"--{name.replace('_', '-')} {value}: one of {shown}")
    for name in ("page_size", "max_model_len", "first_batch"):
        value = getattr(options, name)
        if not (isinstance(value, int) or (value is None and name != "first_batch")):
            raise ValueError(f"{name} is {value!r}; expected an integer")
    for name in ("gpu_memory_utilization", "acceptance_floor", "simulate_acceptance"):
        value = getattr(options, name)
        if not (isinstance(value, Real) or (value is None and name == "simulate_acceptance")):
            raise ValueError(f"{name} is {value!r}; expected a number")
    for name in _SWITCHES:
        value = getattr(options, name)
        if not (isinstance(value, bool) or (value is None and name in ("compile", "sampling"))):
            raise ValueError(f"{name} is {value!r}; expected True or False")
    sizes = options.buckets if isinstance(options.buckets, tuple) else ()
    if not sizes or any(type(size) is not int or size < 1 for size in sizes):
        shown = list(sizes) or options.buckets
        raise ValueError(f"--bucket {shown}: batch sizes are integers from 1 up")
    buckets = tuple(sorted(set(options.buckets)))
    numbers = resolve_draft_lengths(options.num_speculative_tokens, options.buckets, draft)
    full_draft, draft = draft, draft.shortened(max(numbers)) if draft else None
    has_cuda = torch.cuda.is_available()
    device: DeviceName = options.device if options.device != "auto" else _default_device()
    if device == "cuda" and not has_cuda:
        raise ValueError("--device cuda: torch sees no CUDA device; use --device cpu")
    on_gpu = device == "cuda"
    natural: DTypeName = "bfloat16" if on_gpu else "float32"
    dtype: DTypeName = natural if options.dtype == "auto" else options.dtype
    models = [target] + ([draft.model] if draft else [])
    head_dims = [model.head_dim for model in models]
    fits = all(dim in FLASHINFER_HEAD_DIMS for dim in head_dims) and dtype == "bfloat16"
    prefill: AttentionBackend = "torch"
    if on_gpu and fits and not flashinfer_missing():
        prefill = "flashinfer"
    mode = options.graph_mode
    if mode == "auto":
        mode = "piecewise" if on_gpu else "none"
    backend = options.attention_backend
    windows = draft is None or flashinfer_can_window(draft.attention_rules, draft.block_size)
    if backend == "auto":
        # In one graph, attention that needs no plan leaves the host nothing to do in a step.
        open_ended = prefill == "flashinfer" and not windows
        backend = "triton" if mode == "full" or open_ended else prefill
    elif backend == "flashinfer" and not windows:
        raise ValueError(
            "--attention-backend flashinfer has windows for non-causal rows only where the window "
            "reaches over a block of at most 16 rows; use triton for this drafter"
        )
    elif backend == "flashinfer" and prefill != "flashinfer":
        raise ValueError(f"--attention-backend flashinfer {_why_not(on_gpu, dtype, head_dims)}")
    elif backend == "torch":
        prefill = "torch"
    if mode != "none" and not on_gpu:
        raise ValueError(
            f"--graph-mode {mode} captures CUDA graphs; on the CPU use --graph-mode none"
        )
    if mode == "full" and backend == "torch":
        raise ValueError(
            "--graph-mode full needs an attention that can be captured; use "
            "--attention-backend triton or flashinfer, or --graph-mode piecewise"
        )
    if options.simulate_acceptance is not None:
        if full_draft is None:
            raise ValueError("--simulate-acceptance needs a drafter; pass --draft")
        acceptance_rate(options.simulate_acceptance, full_draft.num_draft_tokens)
    if options.draft_quantization != "none" and draft is None:
        raise ValueError(
            f"--draft-quantization {options.draft_quantization} needs a drafter; pass --draft"
        )
    if options.sampling and options.simulate_acceptance is not None:
        raise ValueError(
            "sampling needs real acceptance; leave out --simulate-acceptance or --temperature"
        )
    if options.page_size is not None and options.page_size < 1:
        raise ValueError(f"--page-size {options.page_size}: at least 1 token")
    if options.first_batch < 1:
        raise ValueError(f"first_batch is {options.first_batch}; at least 1 request")
    if not 0 < options.gpu_memory_utilization <= 1:
        raise ValueError(
            f"gpu_memory_utilization is {options.gpu_memory_utilization}; expected 0 < x <= 1"
        )
    if options.kv_cache_memory is not None and options.kv_cache_memory < 1:
        raise ValueError(
            f"kv_cache_memory is {options.kv_cache_memory}; expected bytes, such as 2GiB"
        )
    cap = drafted_cap = speculation_limit(target, draft)
    if options.finish_in_plain_decode:
        cap = target.max_position_embeddings
    reachable = min(numbers, default=0) + 1
    floor = options.acceptance_floor
    if not (0 <= floor <= reachable if draft else floor >= 0):  # NaN is neither
        raise ValueError(
            f"--acceptance-floor {floor}: a mean acceptance length, at most {reachable} tokens a "
            "step for this drafter; 0 turns the warning off"
        )
    if cap < 2 and draft and not options.finish_in_plain_decode:
        raise ValueError(
            f"the drafter's block of {draft.block_size} verifies {draft.num_verify_rows} rows, and "
            f"the models have {cap + draft.num_verify_rows} positions: no request "
            "fits; check block_size and max_position_embeddings of the drafter's config.json, or "
            "pass --draft none"
        )
    length = options.max_model_len if options.max_model_len is not None else cap
    if not 2 <= length <= cap:
        raise ValueError(
            f"--max-model-len {length}: between 2 and {cap} for this model"
            + (
                f" (its positions less a block of {draft.num_verify_rows}; with "
                "--finish-in-plain-decode all of them)"
                if draft and cap == drafted_cap
                else ""
            )
        )
    # Drawn acceptance says nothing about the drafter.
    simulated = options.simulate_acceptance is not None
    return EngineConfig(
        device=device,
        dtype=dtype,
        buckets=buckets,
        graph_mode=mode,
        compile=on_gpu if options.compile is None else options.compile,
        attention_backend=backend,
        prefill_attention_backend=prefill,
        page_size=options.page_size or _PAGE_SIZES[backend],
        max_model_len=length,
        gpu_memory_utilization=options.gpu_memory_utilization,
        kv_cache_memory=options.kv_cache_memory,
        simulate_acceptance=options.simulate_acceptance,
        draft_quantization=options.draft_quantization,
        num_speculative_tokens=numbers,
        speculation_limit=drafted_cap if draft else None,
        acceptance_floor=0.0 if simulated else options.acceptance_floor,
        fallback=options.fallback and not simulated,
        # Free where nothing is captured; simulated acceptance has no second verify chain.
        sampling=options.simulate_acceptance is None and (options.sampling or mode == "none"),
    )


def _why_not(on_gpu: bool, dtype: str, head_dims: list[int]) -> str:
    if not on_gpu:
        return "needs a CUDA device; use torch on the CPU"
    if flashinfer_missing():
        return "is not installed; install the extra graphengine[cuda]"
    return (
        f"runs bfloat16 and head_dim {FLASHINFER_HEAD_DIMS}, not {dtype} with head_dim "
        f"{head_dims}; use triton or torch"
    )


def _default_device() -> DeviceName:
    return "cuda" if torch.cuda.is_available() else "cpu"
