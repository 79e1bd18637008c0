"""From a model name to a decode loop: resolve, check, load, size the pool, build the buckets.

Everything that "auto" can mean is decided here once. Refusals come before the weights are read.
Memory is planned before anything is loaded (`memory`): the K/V pool takes what the rest leaves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch

from graphengine.artifact import name_compilers_
from graphengine.attention import (
    FLASHINFER_HEAD_DIMS,
    compile_flashinfer_ahead,
    flashinfer_can_window,
    flashinfer_missing,
    make_workspace,
)
from graphengine.buckets import Bucket, build_buckets, prefill_attention
from graphengine.buffers import StepBuffers
from graphengine.capture.compile import CacheCounts, cache_counts
from graphengine.config import (
    AttentionBackend,
    DeviceName,
    DraftConfig,
    DraftQuantization,
    DTypeName,
    EngineConfig,
    GraphMode,
    ModelConfig,
)
from graphengine.config_values import token_ids
from graphengine.draft_length import longest_draft, resolve_draft_lengths
from graphengine.engine import DecodeLoop
from graphengine.fallback import FallbackLoop
from graphengine.forward import MAX_QUANTIZED_ROWS, Drafter, Target
from graphengine.hub import resolve
from graphengine.kernels.cache_keys import settle_cache_keys
from graphengine.kvcache import PageAllocator, make_pool, pages_for
from graphengine.memory import MemoryPlan, device_memory, num_positions, plan_memory
from graphengine.metrics import StartupMetrics
from graphengine.models.layers import quantize_fp8
from graphengine.pairs import named_pair, read_json
from graphengine.prefill import Prefill
from graphengine.profiles import ranges
from graphengine.simulate import acceptance_rate, make_simulation
from graphengine.tokenizer import Tokenizer
from graphengine.warmup import prompt_lengths, warm_up
from graphengine.weights import (
    Checkpoint,
    RandomSource,
    draft_vocabulary,
    draft_weights,
    quantized_draft_weights,
    read_headers,
    target_weights,
    tree_bytes,
)

LoadFormat = Literal["auto", "dummy", "dummy-uniform"]
Progress = Callable[[str, float], None]
"""Called with (what is being done, share done in 0 .. 1)."""


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


# Tokens of a page where nobody says. Our attention looks up one number where a page holds a tile of
# keys, and a single stream has few pages to waste.
_PAGE_SIZES: dict[AttentionBackend, int] = {"flashinfer": 16, "triton": 128, "torch": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A loaded pair, ready to decode; `draft` is as the longest block's bucket runs it."""

    config: EngineConfig
    target: ModelConfig
    draft: DraftConfig | None
    tokenizer: Tokenizer | None
    stop_ids: frozenset[int]
    loop: DecodeLoop
    startup: StartupMetrics
    memory_plan: MemoryPlan


def build(
    target_name: str | Path,
    draft_name: str | Path | None,
    options: Options,
    progress: Progress = lambda what, share: None,
) -> Built:
    """Loads a target and, if named, its drafter.

    Raises:
        ValueError: anything that does not fit, with the value and the remedy.
    """
    began = time.perf_counter()
    target_name, draft_name = named_pair(target_name, draft_name)
    target_config, draft_config = read_configs(target_name, draft_name)
    target_dir = resolve(target_name)
    draft_dir = resolve(draft_name) if draft_name is not None else None
    config = resolve_options(options, target_config, draft_config)
    num_draws = draft_config.num_draft_tokens if draft_config else 0  # of a simulated step
    draft_config = longest_draft(config, draft_config) if draft_config else None
    device = torch.device(config.device)
    dtype = getattr(torch, config.dtype)
    block = draft_config.num_verify_rows if draft_config else 1
    tokenizer = Tokenizer(target_dir) if Tokenizer.exists(target_dir) else None
    is_dummy = options.load_format != "auto"
    if tokenizer is None and not is_dummy:
        raise ValueError(f"{target_dir}: no tokenizer.json; fetch the whole model directory")
    if tokenizer is not None and len(tokenizer) > target_config.vocab_size:
        raise ValueError(
            f"{target_dir}: the tokenizer has {len(tokenizer)} tokens, the embedding "
            f"{target_config.vocab_size} rows; they belong to different models"
        )

    flashinfer = None
    keys = threading.Thread(target=settle_cache_keys, name="cache-keys", daemon=True)
    if config.device == "cuda":
        name_compilers_()
        keys.start()
    if "flashinfer" in (config.attention_backend, config.prefill_attention_backend):
        # Prefills run the target's attention alone.
        decodes = config.attention_backend == "flashinfer"
        flashinfer = compile_flashinfer_ahead(
            dtype, target_config, draft_config if decodes else None
        )
    plan = plan_memory(
        config,
        target_config,
        draft_config,
        device_memory(config.device),
        length_is_explicit=options.max_model_len is not None,
        draft_names=read_headers(draft_dir) if draft_dir is not None and not is_dummy else (),
    )
    config = replace(config, max_model_len=plan.max_model_len)

    def source(directory: Path, seed: int) -> Checkpoint | RandomSource:
        if is_dummy:
            return RandomSource(
                device, dtype, seed, is_uniform=options.load_format == "dummy-uniform"
            )
        what = f"loading {directory.name}"
        return Checkpoint(
            directory, device, dtype, lambda done, total: progress(what, done / total)
        )

    positions = num_positions(config.max_model_len, block)
    with ranges.range_("load"), torch.no_grad():
        weights = target_weights(source(target_dir, 0), target_config, positions, device)
        drafter_weights = vocabulary = None
        if draft_dir is not None and draft_config is not None:
            drafter_source = source(draft_dir, 1)
            vocabulary = draft_vocabulary(drafter_source, draft_config, weights)
            drafter_weights = draft_weights(drafter_source, draft_config, positions, device)
        quantized = quantized_head = None
        max_quantized_rows = MAX_QUANTIZED_ROWS[config.draft_quantization]
        if max_quantized_rows and drafter_weights is not None and vocabulary:
            quantized = quantized_draft_weights(drafter_weights)
            quantized_head = quantize_fp8(vocabulary.lm_head_VD)
        trees = (weights, vocabulary, drafter_weights, quantized, quantized_head)
        if device.type == "cuda":  # what loading has cached must not fragment the pool
            torch.cuda.empty_cache()
        num_pages = plan.num_pages
        target = Target(
            config=target_config,
            weights=weights,
            kv_pool=make_pool(target_config, num_pages, config.page_size, dtype, device),
        )
        drafter = None
        if draft_config is not None and drafter_weights is not None and vocabulary is not None:
            drafter = Drafter(
                config=draft_config,
                weights=drafter_weights,
                embed_VD=vocabulary.embed_VD,
                lm_head_VD=vocabulary.lm_head_VD,
                target_ids_V=vocabulary.target_ids_V,
                quantized=quantized,
                quantized_lm_head_VD=quantized_head,
                max_quantized_rows=max_quantized_rows,
                kv_pool=make_pool(draft_config.model, num_pages, config.page_size, dtype, device),
            )
        buffers = StepBuffers.make(
            target_config,
            draft_config,
            max(config.buckets),
            pages_for(positions, config.page_size),
            dtype,
            device,
        )
        simulation = None
        if config.simulate_acceptance is not None:
            simulation = make_simulation(
                config.simulate_acceptance, max(config.buckets), num_draws, device
            )
    if flashinfer is not None:
        flashinfer.imported.wait()
    if config.device == "cuda":
        keys.join()
    load_s = time.perf_counter() - began
    counts = cache_counts() if config.compile else CacheCounts()
    workspace = make_workspace(device) if config.attention_backend == "flashinfer" else None
    prefill = Prefill(
        target,
        drafter,
        prefill_attention(config, target_config, dtype, device),
        config.page_size,
        config.prefill_chunk,
    )
    with ranges.range_("capture"), torch.no_grad():
        buckets = build_buckets(
            config,
            target,
            drafter,
            buffers,
            dtype,
            device,
            simulation,
            lambda what: progress(what, 0.0),
            _built_ahead(options, config.buckets),
            workspace,
            [partial(prefill.run_padding, length) for length in prompt_lengths(config)],
        )
    if config.compile:
        counts = cache_counts().since(counts)

    def build_plain() -> tuple[dict[int, Bucket], StepBuffers]:
        """The same buckets with one row a request: the same weights and K/V, no drafter."""
        began = time.perf_counter()
        width = buffers.page_table_BW.shape[1]
        plain = StepBuffers.make(target_config, None, max(config.buckets), width, dtype, device)
        with ranges.range_("capture"), torch.no_grad():
            built = build_buckets(config, target, None, plain, dtype, device, workspace=workspace)
        logging.getLogger(__name__).info(
            "plain decode built in %.2f s", time.perf_counter() - began
        )
        return built.ready, plain

    parts = (config, buckets.ready, buffers, prefill, PageAllocator(num_pages))
    if draft_config is None:
        loop = DecodeLoop(*parts, 0, buckets.build)
    else:
        loop = FallbackLoop(*parts, draft_config.mask_token_id, buckets.build, build_plain)
        if options.prepare_plain_decode:
            loop.prepare_plain_decode()
    began = time.perf_counter()
    if device.type == "cuda":
        with ranges.range_("warmup"), torch.no_grad():
            warm_up(loop)
    startup = StartupMetrics(
        load_s=load_s,
        compile_s=buckets.times.compile_s,
        capture_s=buckets.times.capture_s,
        warmup_s=time.perf_counter() - began,
        weight_bytes=tree_bytes(trees),
        kv_pool_bytes=plan.kv_pool_bytes,
        num_pages=num_pages,
        num_graphs=buckets.pool.num_graphs if buckets.pool else 0,
        num_compiled=counts.num_misses,
        num_cache_hits=counts.num_hits,
        buckets=tuple(sorted(buckets.ready)),
    )
    return Built(
        config=config,
        target=target_config,
        draft=draft_config,
        tokenizer=tokenizer,
        stop_ids=_stop_ids(target_dir, target_config),
        loop=loop,
        startup=startup,
        memory_plan=plan,
    )


def read_configs(
    target_name: str | Path, draft_name: str | Path | None
) -> tuple[ModelConfig, DraftConfig | None]:
    """Parses both configs and checks that they belong together.

    Raises:
        ValueError: a file is missing or not understood, or the drafter is another target's.
    """
    target_name, draft_name = named_pair(target_name, draft_name)
    target = ModelConfig.from_hf(*read_json(resolve(target_name) / "config.json"))
    if draft_name is None:
        return target, None
    directory = resolve(draft_name)
    draft = DraftConfig.from_hf(*read_json(directory / "config.json"))
    draft.check_target(target, str(directory))
    return target, draft


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
    if any(type(size) is not int or size < 1 for size in options.buckets) or not options.buckets:
        raise ValueError(f"--bucket {list(options.buckets)}: batch sizes are integers from 1 up")
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


def _built_ahead(options: Options, buckets: tuple[int, ...]) -> tuple[int, ...]:
    """Which of the ascending sizes are built before the first request."""
    if not options.lazy_capture:
        return buckets
    return (next((size for size in buckets if size >= options.first_batch), buckets[-1]),)


def _default_device() -> DeviceName:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _stop_ids(directory: Path, config: ModelConfig) -> frozenset[int]:
    """generation_config.json's end tokens; config.json's where it names none."""
    path = directory / "generation_config.json"
    if path.is_file():
        values, source = read_json(path)
        ids = token_ids(values.get("eos_token_id"), "eos_token_id", source)
        if ids:
            return frozenset(ids)
    return frozenset(config.eos_token_ids)
