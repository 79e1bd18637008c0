"""From a model name to a decode loop: resolve, check, load, size the pool, build the buckets.

What "auto" means is decided first (`options`). Refusals come before the weights are read.
Memory is planned before anything is loaded (`memory`): the K/V pool takes what the rest leaves.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from graphengine import names
from graphengine.capture.compile import CacheCounts, cache_counts
from graphengine.capture.torch_internals import begin_workers, import_dynamo, import_inductor
from graphengine.checkpoints import sources
from graphengine.checkpoints import weights as loading
from graphengine.checkpoints.hub import PRESETS, resolve
from graphengine.checkpoints.pairs import NGRAM, named_pair, read_json, read_stop_ids
from graphengine.checkpoints.tokenizer import Tokenizer, load_tokenizer
from graphengine.config.draft import DraftConfig, DraftSpec, NgramConfig
from graphengine.config.draft_formats import parse_draft
from graphengine.config.draft_length import longest_draft
from graphengine.config.engine import EngineConfig
from graphengine.config.model import ModelConfig
from graphengine.config.options import Options
from graphengine.decode.flashinfer_attention import compile_flashinfer_ahead
from graphengine.decode.grammar import Grammars
from graphengine.decode.kvcache import make_pool
from graphengine.decode.loop import DecodeLoop
from graphengine.decode.metrics import StartupMetrics
from graphengine.decode.proposer import Pair, Proposer
from graphengine.decode.recurrence import make_states, num_slots
from graphengine.decode.simulate import make_simulation
from graphengine.decode.stack import Target
from graphengine.decode.turns import short_turns
from graphengine.drafters.dflash import MAX_QUANTIZED_ROWS, DFlash
from graphengine.drafters.ngram import Ngram
from graphengine.kernels.compile_worker import is_cache_empty
from graphengine.kernels.triton_internals import load_driver, settle_cache_keys
from graphengine.models.layers import quantize_fp8
from graphengine.startup.compilers import name_compilers_, use_own_folder_
from graphengine.startup.decoding import build_loop
from graphengine.startup.memory import MemoryPlan, device_memory, num_positions, plan_memory
from graphengine.startup.options import check_default_device, resolve_options
from graphengine.startup.warmup import settle_vector_math, warm_up

MANY_OBJECTS = 100_000  # more than a start that compiles nothing makes
_LOG = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Called with (what is being done, share done in 0 .. 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A loaded pair, ready to decode; `draft` is as the longest block's bucket runs it."""

    config: EngineConfig
    target: ModelConfig
    draft: DraftSpec | None
    tokenizer: Tokenizer | None
    stop_ids: frozenset[int]
    grammars: Grammars | None
    """None without a tokenizer."""
    loop: DecodeLoop
    startup: StartupMetrics
    memory_plan: MemoryPlan


@contextmanager
def collected_behind() -> Iterator[None]:
    """Inside, no garbage is collected: imports and traces make so many lasting objects that the
    collector would look through all of them again and again. Afterwards it runs once, if many were
    made, so that no request waits for it. Mutates: the process's collector."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            num_made, *_ = gc.get_count()
            gc.enable()
            if num_made > MANY_OBJECTS:
                gc.collect()


@short_turns()
@collected_behind()
@torch.inference_mode(False)  # tensors made in a caller's would be of no use outside of it
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
    check_default_device()
    settle_vector_math()
    target_name, draft_name = named_pair(target_name, draft_name)
    target_config, draft_config = read_configs(target_name, draft_name)
    target_dir = resolve(target_name)
    draft_dir = resolve(draft_name) if draft_name and draft_name != NGRAM else None
    config = resolve_options(options, target_config, draft_config)
    num_draws = draft_config.num_draft_tokens if draft_config else 0  # of a simulated step
    draft_config = longest_draft(config, draft_config) if draft_config else None
    stop_ids, _ = read_stop_ids(target_dir, target_config)
    tokenizer, grammars = _load_tokenizer(target_dir, target_config, stop_ids, options)
    compilers = _prepare_compilers(config, target_config, draft_config)
    is_dummy = options.load_format != "auto"
    plan = plan_memory(
        config,
        target_config,
        draft_config,
        device_memory(config.device),
        length_is_explicit=options.max_model_len is not None,
        draft_names=() if draft_dir is None or is_dummy else sources.read_headers(draft_dir),
    )
    config = replace(config, max_model_len=plan.max_model_len)
    with names.range_("load"), torch.no_grad():
        source = partial(_open_source, config, options.load_format, progress)
        pair = _load_pair(config, source, target_dir, draft_dir, target_config, draft_config, plan)
        if config.simulate_acceptance is not None:
            mean, device = config.simulate_acceptance, torch.device(config.device)
            simulation = make_simulation(mean, max(config.buckets), num_draws, device)
            pair = replace(pair, simulation=simulation)
    load_s = time.perf_counter() - began
    for thread in compilers:
        thread.join()
    compiler_wait_s = time.perf_counter() - began - load_s
    counts = cache_counts() if config.compile else CacheCounts()
    loop, widths = build_loop(pair, options, plan.num_pages, progress)
    config = loop.config
    draft_config = longest_draft(config, draft_config) if draft_config else None
    ahead = tuple(loop.first.buckets)
    if options.prepare_plain_decode and loop.fallback is not None:
        loop.fallback.prepare()
    if config.compile:
        counts = cache_counts().since(counts)
    began = time.perf_counter()
    if config.device == "cuda":
        with names.range_("warmup"), torch.no_grad():
            warm_up(loop, grammars)
    builders = [lane.builder for lane in loop.lanes]
    startup = StartupMetrics(
        load_s=load_s,
        compile_s=compiler_wait_s + sum(part.compile_s for part in builders),
        compiler_wait_s=compiler_wait_s,
        capture_s=sum(part.capture_s for part in builders),
        warmup_s=time.perf_counter() - began,
        weight_bytes=loading.tree_bytes((pair.target.weights, pair.proposer.tensors)),
        kv_pool_bytes=plan.kv_pool_bytes,
        num_pages=plan.num_pages,
        num_graphs=sum(part.pool.num_graphs for part in builders if part.pool),
        num_compiled=counts.num_misses,
        num_cache_hits=counts.num_hits,
        buckets=ahead,
        draft_widths=widths,
    )
    return Built(
        config=config,
        target=target_config,
        draft=draft_config,
        tokenizer=tokenizer,
        stop_ids=frozenset(stop_ids),
        grammars=grammars,
        loop=loop,
        startup=startup,
        memory_plan=plan,
    )


def _load_tokenizer(
    directory: Path, target: ModelConfig, stop_ids: Collection[int], options: Options
) -> tuple[Tokenizer | None, Grammars | None]:
    """Raises: ValueError: there is none where real weights are wanted."""
    tokenizer = load_tokenizer(directory, target, stop_ids)
    if tokenizer is not None:
        grammars = Grammars(tokenizer.as_json, target.vocab_size, stop_ids)
        if options.structured_outputs:
            grammars.prepare()
        return tokenizer, grammars
    if options.load_format == "auto":
        remedy = "fetch the whole model directory"
        if directory.parent == PRESETS:
            remedy = "a preset has shapes alone; pass a hub id (owner/name), or load_format dummy"
        raise ValueError(f"{directory}: no tokenizer.json; {remedy}")
    return None, None


def _open_source(
    config: EngineConfig, load_format: str, progress: Progress, directory: Path, seed: int
) -> sources.TensorSource:
    """Where tensors come from: files, or a seed."""
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    if load_format != "auto":
        is_uniform = load_format == "dummy-uniform"
        return sources.RandomSource(device, dtype, seed, is_uniform=is_uniform)

    def loaded(done: int, total: int) -> None:
        progress(f"loading {directory.name}", done / total)

    return sources.Checkpoint(directory, device, dtype, loaded)


def _load_pair(
    config: EngineConfig,
    source: Callable[[Path, int], sources.TensorSource],
    target_dir: Path,
    draft_dir: Path | None,
    target_config: ModelConfig,
    draft_config: DraftSpec | None,
    plan: MemoryPlan,
) -> Pair:
    """Weights, then the pools in what they leave: a target and what drafts for it."""
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    block = draft_config.num_verify_rows if draft_config else 1
    positions = num_positions(config.max_model_len, block)
    weights = loading.target_weights(source(target_dir, 0), target_config, positions, device)
    dflash: Callable[..., DFlash] | None = None
    if draft_dir is not None and isinstance(draft_config, DraftConfig):
        of_draft = source(draft_dir, 1)
        vocabulary = loading.draft_vocabulary(of_draft, draft_config, weights)
        layers = loading.draft_weights(of_draft, draft_config, positions, device)
        quantized = None
        if config.draft_quantization != "none":
            of_layers = loading.quantized_draft_weights(layers)
            quantized = of_layers, quantize_fp8(vocabulary.lm_head_VD)
        dflash = partial(
            DFlash,
            config=draft_config,
            weights=layers,
            embed_VD=vocabulary.embed_VD,
            lm_head_VD=vocabulary.lm_head_VD,
            target_ids_V=vocabulary.target_ids_V,
            quantized=quantized,
            max_quantized_rows=MAX_QUANTIZED_ROWS[config.draft_quantization],
        )
    if device.type == "cuda":  # what loading has cached must not fragment the pool
        torch.cuda.empty_cache()

    def pool(model: ModelConfig) -> torch.Tensor:
        return make_pool(model, plan.num_pages, config.page_size, dtype, device)

    target = Target(
        config=target_config,
        weights=weights,
        kv_pool=pool(target_config),
        states=make_states(target_config, num_slots(config), dtype, device),
    )
    proposer = Proposer()
    if isinstance(draft_config, NgramConfig):
        proposer = Ngram(config=draft_config, num_positions=positions)
    elif dflash is not None and draft_config is not None:
        proposer = dflash(target=target, kv_pool=pool(draft_config.model))
    return Pair(config, target, proposer, positions)


def _prepare_compilers(
    config: EngineConfig, target: ModelConfig, draft: DraftSpec | None
) -> list[threading.Thread]:
    """Starts what compilers do before their first kernel, on threads while weights are read.

    One import after another: of two threads in the middle of one import each may see half a module.
    Cache keys and the driver import nothing that importing this module has not. What fails here
    fails again where a kernel is compiled, with a caller, if the start goes on.
    """
    if config.compile or config.device == "cuda":
        import_dynamo()  # in front of all threads: sizes in FP8 are worked out beside them
    if config.device == "cuda":
        name_compilers_()
    imports: list[Callable[[], object]] = [import_inductor] if config.compile else []
    if config.compile and config.device == "cuda" and is_cache_empty():
        imports.append(begin_workers)  # else with the first kernel that is missed
    if "flashinfer" in (config.attention_backend, config.prefill_attention_backend):
        # Prefills run the target's attention alone.
        drafter = draft if config.attention_backend == "flashinfer" else None
        imported = compile_flashinfer_ahead(getattr(torch, config.dtype), target, drafter)
        imports.insert(0, imported.wait)
    if config.compile:
        use_own_folder_()

    def run(steps: list[Callable[[], object]]) -> None:
        for step in steps:
            try:
                step()
            except Exception:
                _LOG.info("%s failed", step, exc_info=True)

    keys = [settle_cache_keys, load_driver] if config.device == "cuda" else []
    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in (imports, keys)]
    for thread in threads:
        thread.start()
    return threads


def read_configs(
    target_name: str | Path, draft_name: str | Path | None
) -> tuple[ModelConfig, DraftSpec | None]:
    """Parses both configs and checks that they belong together.

    Raises:
        ValueError: a file is missing or not understood, or the drafter is another target's.
    """
    target_name, draft_name = named_pair(target_name, draft_name)
    target = ModelConfig.from_hf(*read_json(resolve(target_name) / "config.json"))
    if draft_name == NGRAM:
        return target, NgramConfig()
    if draft_name is None:
        return target, None
    directory = resolve(draft_name)
    draft = parse_draft(*read_json(directory / "config.json"))
    draft.check_target(target, str(directory))
    return target, draft
