"""What becomes of what a user asks for (`config.options`): every "auto" is decided here, once.

Refusals come before anything is loaded and name the option, its value and the remedy.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from graphengine.capture.torch_internals import has_function_modes
from graphengine.config.draft import DraftConfig, DraftSpec
from graphengine.config.draft_length import resolve_draft_lengths
from graphengine.config.engine import EngineConfig
from graphengine.config.model import ModelConfig
from graphengine.config.options import (
    AttentionBackend,
    DeviceName,
    DTypeName,
    GraphMode,
    Options,
)
from graphengine.decode.chunk_sizes import far_sizes_for, sizes_for
from graphengine.decode.flashinfer_attention import (
    FLASHINFER_HEAD_DIMS,
    flashinfer_can_window,
    flashinfer_missing,
)
from graphengine.decode.kvcache import keyed_layers_in
from graphengine.decode.simulate import acceptance_rate
from graphengine.kernels import chunk_attention
from graphengine.kernels.block_attention import HEAD_DIMS
from graphengine.kernels.qk_norm_rope import check_kernel_head_dim

# Tokens of a page where nobody says. Our attention looks up one number where a page holds a tile of
# keys, and a single stream has few pages to waste.
_PAGE_SIZES: dict[AttentionBackend, int] = {"flashinfer": 16, "triton": 128, "torch": 16}


_NEED_REAL_ACCEPTANCE = {
    "sampling": "--temperature",
    "adjustments": "penalties, --logit-bias, --bad-words and --min-tokens",
    "max_logprobs": "--logprobs and --prompt-logprobs",
    "structured_outputs": "--json-schema, --regex, --choice and --grammar",
}
MAX_LOGPROBS = 20  # alternatives of a token, where nobody says


def speculation_limit(target: ModelConfig, draft: DraftSpec | None) -> int:
    """Most tokens of a request that is drafted to its end: the fewest positions of the models, less
    a block."""
    if draft is None:
        return target.max_position_embeddings
    positions = min(m.max_position_embeddings for m in (target, *draft.models))
    return positions - draft.num_verify_rows


def check_default_device() -> None:
    """Refuses another default device of this thread, on which what the host prepares would lie.

    Raises: ValueError: with the remedy.
    """
    if has_function_modes() and (device := torch.get_default_device()).type != "cpu":
        raise ValueError(
            f"torch's default device is {device}; call torch.set_default_device('cpu') or leave "
            "the `with torch.device(..)`: an engine runs on its own option `device`"
        )


def resolve_options(options: Options, target: ModelConfig, draft: DraftSpec | None) -> EngineConfig:
    """Decides every "auto" and refuses what cannot work.

    Raises:
        ValueError: naming the option, its value and the remedy.
    """
    numbers = resolve_draft_lengths(options.num_speculative_tokens, options.buckets, draft)
    full_draft, draft = draft, draft.shortened(max(numbers)) if draft else None
    on_gpu = torch.cuda.is_available() and options.device != "cpu"
    if options.device == "cuda" and not on_gpu:
        raise ValueError("--device cuda: torch sees no CUDA device; use --device cpu")
    for model in (target, *(draft.models if draft else ())) if on_gpu else ():
        check_kernel_head_dim(model.head_dim)
    device: DeviceName = "cuda" if on_gpu else "cpu"
    natural: DTypeName = "bfloat16" if on_gpu else "float32"
    dtype: DTypeName = natural if options.dtype == "auto" else options.dtype
    mode = options.graph_mode
    if mode == "auto":
        mode = "piecewise" if on_gpu else "none"
    backend, prefill = _attentions(options, target, draft, mode, dtype, on_gpu)
    page_size = options.page_size or _PAGE_SIZES[backend]
    is_fixed = on_gpu and backend != "torch" and target.head_dim in HEAD_DIMS
    if is_fixed and _takes_long_chunks(dtype, target, page_size):
        prefill = "triton"
    if mode != "none" and not on_gpu:
        raise ValueError(
            f"--graph-mode {mode} captures CUDA graphs; on the CPU use --graph-mode none"
        )
    if mode == "full" and backend == "torch":
        raise ValueError(
            "--graph-mode full needs an attention that can be captured; use "
            "--attention-backend triton or flashinfer, or --graph-mode piecewise"
        )
    _check_drafting(options, full_draft, reachable=min(numbers, default=0) + 1)
    length = _context(options, target, draft)
    simulated = options.simulate_acceptance is not None
    logprobs = options.max_logprobs
    if logprobs is None:
        logprobs = MAX_LOGPROBS if mode == "none" else 0
    are_long, keyed_in = is_fixed and prefill == "triton", keyed_layers_in(target)
    may_pair = are_long and mode == "full" and _halves_pay(target, draft)
    far = far_sizes_for(length, are_long=are_long, keyed_in=keyed_in)
    fixed = sizes_for(
        length,
        are_long=are_long,
        are_paired=may_pair,
        keyed_in=keyed_in,
        has_experts=target.moe is not None,
    )
    asked = {field.name: getattr(options, field.name) for field in fields(Options)}
    decided: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "buckets": tuple(sorted(set(options.buckets))),
        "graph_mode": mode,
        "compile": on_gpu if options.compile is None else options.compile,
        "attention_backend": backend,
        "prefill_attention_backend": prefill,
        "prefill_sizes": fixed if is_fixed else (),
        "far_prefill_sizes": far,
        "page_size": page_size,
        "max_model_len": length,
        "num_speculative_tokens": numbers,
        "speculation_limit": speculation_limit(target, draft) if draft else None,
        "fallback": options.fallback and not simulated,
        "max_logprobs": 0 if simulated else logprobs,
    }
    if simulated or (draft and not draft.models):
        # Drawn acceptance says nothing about the drafter; look-up is often wrong by nature.
        decided["acceptance_floor"] = 0.0
    # Where nothing is captured they cost memory at most; simulated acceptance has one end.
    for name in ("sampling", "adjustments", "structured_outputs"):
        wanted = mode == "none" if asked[name] is None else asked[name]
        decided[name] = wanted and not simulated
    return EngineConfig(**asked | decided)


def _attentions(
    options: Options,
    target: ModelConfig,
    draft: DraftSpec | None,
    mode: GraphMode,
    dtype: DTypeName,
    on_gpu: bool,
) -> tuple[AttentionBackend, AttentionBackend]:
    """The attention of steps, and that of prefills where our own does not run long chunks."""
    head_dims = [model.head_dim for model in (target, *(draft.models if draft else ()))]
    why_not = None  # FlashInfer
    if not on_gpu:
        why_not = "needs a CUDA device; use torch on the CPU"
    elif flashinfer_missing():
        why_not = "is not installed; install the extra graphengine[cuda]"
    elif dtype != "bfloat16" or any(dim not in FLASHINFER_HEAD_DIMS for dim in head_dims):
        why_not = (
            f"runs bfloat16 and head_dim {FLASHINFER_HEAD_DIMS}, not {dtype} with head_dim "
            f"{head_dims}; use triton or torch"
        )
    prefill: AttentionBackend = "torch" if why_not else "flashinfer"
    backend = options.attention_backend
    windows = draft is None or flashinfer_can_window(draft.attention_rules, draft.block_size)
    if backend == "auto":
        # In one graph, attention that needs no plan leaves the host nothing to do in a step.
        open_ended = prefill == "flashinfer" and not windows
        return "triton" if mode == "full" or open_ended else prefill, prefill
    if backend == "flashinfer" and not windows:
        raise ValueError(
            "--attention-backend flashinfer has windows for non-causal rows only where the window "
            "reaches over a block of at most 16 rows; use triton for this drafter"
        )
    if backend == "flashinfer" and why_not:
        raise ValueError(f"--attention-backend flashinfer {why_not}")
    return backend, "torch" if backend == "torch" else prefill


def _check_drafting(options: Options, draft: DraftSpec | None, reachable: int) -> None:
    """Refuses options of drafting that cannot be met.

    Args: draft: with its own block. reachable: tokens of a step in the bucket with the shortest.
    """
    if options.simulate_acceptance is not None:
        if draft is None:
            raise ValueError("--simulate-acceptance needs a drafter; pass --draft")
        acceptance_rate(options.simulate_acceptance, draft.num_draft_tokens)
    if options.draft_quantization != "none" and not (draft and draft.models):
        raise ValueError(
            f"--draft-quantization {options.draft_quantization} needs a drafter that has weights; "
            "pass --draft, or leave it out"
        )
    for name, flag in _NEED_REAL_ACCEPTANCE.items():
        if getattr(options, name) and options.simulate_acceptance is not None:
            raise ValueError(
                f"{name} needs real acceptance; leave out --simulate-acceptance or {flag}"
            )
    if draft and options.acceptance_floor > reachable:
        raise ValueError(
            f"--acceptance-floor {options.acceptance_floor}: a mean acceptance length, at most "
            f"{reachable} tokens a step for this drafter; 0 turns the warning off"
        )


def _context(options: Options, target: ModelConfig, draft: DraftSpec | None) -> int:
    """Most tokens of a request: what is asked for, or what the models allow."""
    cap = drafted_cap = speculation_limit(target, draft)
    if options.finish_in_plain_decode:
        cap = target.max_position_embeddings
    elif cap < 2 and draft:
        raise ValueError(
            f"the drafter's block of {draft.block_size} verifies {draft.num_verify_rows} rows, and "
            f"the models have {cap + draft.num_verify_rows} positions: no request "
            "fits; check block_size and max_position_embeddings of the drafter's config.json, or "
            "pass --finish-in-plain-decode or --draft none"
        )
    length = options.max_model_len if options.max_model_len is not None else cap
    if not 2 <= length <= cap:
        text = f"--max-model-len {length}: between 2 and {cap} for this model"
        if draft and cap == drafted_cap:
            text += f" (its positions less a block of {draft.num_verify_rows}; with "
            text += "--finish-in-plain-decode all of them)"
        raise ValueError(text)
    return length


def _halves_pay(target: ModelConfig, draft: DraftSpec | None) -> bool:
    """Whether a long prompt comes sooner in halves beside each other: a recurrence gains nothing,
    experts were not tried, and of a tapped last layer both would have to run all."""
    taps = draft.target_layer_ids if isinstance(draft, DraftConfig) else ()
    is_last_tapped = target.num_hidden_layers - 1 in taps
    return set(target.layer_kinds) == {("attention", "swiglu")} and not is_last_tapped


def _takes_long_chunks(dtype: str, target: ModelConfig, page_size: int) -> bool:
    """Whether `chunk_attention` runs on this GPU."""
    is_hopper, dims = torch.cuda.get_device_capability()[0] == 9, chunk_attention.HEAD_DIMS
    fits = target.head_dim in dims and page_size in chunk_attention.PAGE_SIZES
    return is_hopper and fits and dtype == "bfloat16"
