"""The memory plan: what every part of a run takes, computed from the configs before anything loads.

    pool = what may be filled - (weights + fp8 copies + rope tables + recurrent states
                                 + step buffers + prefill + attention workspaces + activations
                                 + plain decode + margin)

Why before: a pair that cannot fit is refused in a second, not after 16 GB of weights, and the pool
never takes what a prefill or a capture needs later. Weights, rope tables and buffers are exact: the
loader's own builders run on tensors without bytes. Activations and graph pools are estimates from
above (`workspace`); `GPU_MARGIN_BYTES` covers what no shape tells.
Invariant: pages for a whole request are reserved at its admission, so a pool of any size that holds
one request runs every mix of requests to its end.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from graphengine.checkpoints import sources
from graphengine.checkpoints import weights as loading
from graphengine.config.bytesize import format_bytes
from graphengine.config.draft import DraftSpec, NgramConfig
from graphengine.config.engine import EngineConfig
from graphengine.config.model import ModelConfig
from graphengine.decode.buffers import Arena
from graphengine.decode.kvcache import page_bytes, pages_for
from graphengine.decode.lane import PIPELINE_DEPTH
from graphengine.decode.proposer import Proposer, step_buffers
from graphengine.decode.recurrence import num_slots, state_bytes
from graphengine.drafters.dflash import DFlash
from graphengine.drafters.ngram import Ngram
from graphengine.models.layers import quantize_fp8
from graphengine.startup import workspace
from graphengine.startup.workspace import META

CPU_POOL_BYTES = 4 << 30
# CUDA and Triton modules that load after the measurement, cuBLAS workspaces, fragmentation.
GPU_MARGIN_BYTES = 1 << 30


class DeviceMemory(NamedTuple):
    """A GPU's memory before anything is loaded, other processes' use included."""

    free_bytes: int
    total_bytes: int
    num_sms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes by purpose, and the pool that they leave room for.

    `budget_bytes`: what all parts together may take; None where nothing limits them (the CPU, whose
    pool has a fixed limit instead). `num_pages` counts the null page. `max_model_len` is the
    asked one, or the longest that the pool holds.
    """

    budget_bytes: int | None
    target_weight_bytes: int
    draft_weight_bytes: int
    quantized_weight_bytes: int
    rope_table_bytes: int
    recurrent_state_bytes: int
    step_buffer_bytes: int
    prefill_bytes: int
    attention_workspace_bytes: int
    activation_bytes: int
    """What lives only as long as a step, or in the pool of the graphs that hold it."""
    plain_decode_bytes: int
    """Buckets without drafts, which a drafting engine may build later to fall back to."""
    margin_bytes: int
    kv_page_bytes: int
    page_size: int
    num_pages: int
    max_model_len: int
    max_request_pages: int
    """Pages of a request of `max_model_len` tokens and the blocks that may reach past it."""

    @property
    def fixed_bytes(self) -> int:
        """Everything but the pool."""
        return sum(getattr(self, name) for name in _FIXED)

    @property
    def kv_pool_bytes(self) -> int:
        """The pool, both models."""
        return self.num_pages * self.kv_page_bytes

    @property
    def num_full_requests(self) -> float:
        """Requests of full length that the pool holds at once."""
        return (self.num_pages - 1) / self.max_request_pages

    def to_json(self) -> dict[str, Any]:
        """All fields and the derived sizes."""
        derived = ("fixed_bytes", "kv_pool_bytes", "num_full_requests")
        return asdict(self) | {name: getattr(self, name) for name in derived}

    def lines(self) -> list[str]:
        """The plan in two lines for people; parts that take nothing are left out."""
        parts = [
            f"{name.removesuffix('_bytes').replace('_', ' ')} {format_bytes(getattr(self, name))}"
            for name in _FIXED
            if getattr(self, name)
        ]
        budget = f" of {format_bytes(self.budget_bytes)}" if self.budget_bytes is not None else ""
        total = self.fixed_bytes + self.kv_pool_bytes
        return [
            f"memory plan: {', '.join(parts)}",
            f"K/V pool {format_bytes(self.kv_pool_bytes)} in {self.num_pages} pages of "
            f"{self.page_size} tokens: {self.num_full_requests:.1f} requests of "
            f"{self.max_model_len} tokens; {format_bytes(total)}{budget} in all",
        ]


_NAMES = [field.name for field in fields(MemoryPlan)]
_FIXED = _NAMES[_NAMES.index("target_weight_bytes") : _NAMES.index("kv_page_bytes")]


def device_memory(device: str) -> DeviceMemory | None:
    """The current GPU's memory as it is now, less torch's idle cache; None for the CPU."""
    if device != "cuda":
        return None
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return DeviceMemory(free, total, properties.multi_processor_count)


def host_memory_bytes() -> int:
    """The machine's memory, whoever uses it."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def num_positions(max_model_len: int, block: int) -> int:
    """Positions that a step can touch: blocks in flight when a request ends, and the next one's
    head, reach past the limit."""
    return max_model_len + (PIPELINE_DEPTH + 1) * block


def plan_memory(
    config: EngineConfig,
    target: ModelConfig,
    draft: DraftSpec | None,
    memory: DeviceMemory | None,
    *,
    length_is_explicit: bool,
    draft_names: Collection[str] = (),
) -> MemoryPlan:
    """Pages for every row of the largest bucket at full length, or as many as memory allows.

    Args:
        draft: as the bucket with the longest block runs it.
        memory: of the GPU before loading; None on the CPU.
        length_is_explicit: the user chose `config.max_model_len`; a default is lowered to what the
            pool holds, a choice is refused.
        draft_names: the drafter's tensors; an embedding and a head of its own count in full, even
            if they turn out to equal the target's.

    Raises:
        ValueError: the parts, or one request of that length, do not fit; with the numbers.
    """
    plan = _plan(config, target, draft, memory, draft_names)
    block = draft.num_verify_rows if draft else 1
    room = _pool_room(plan, config)
    affordable = room // plan.kv_page_bytes
    if affordable < plan.max_request_pages + 1:
        length = max(max(affordable - 1, 0) * config.page_size - block, 0)
        if length_is_explicit or length < 2:
            raise ValueError(_too_small(plan, config, room, length))
        shorter = replace(config, max_model_len=length)
        plan = _plan(shorter, target, draft, memory, draft_names)
        affordable = _pool_room(plan, config) // plan.kv_page_bytes
    useful = 1 + max(config.buckets) * plan.max_request_pages
    plan = replace(plan, num_pages=min(useful, affordable))
    needed = plan.fixed_bytes + plan.kv_pool_bytes
    if config.device == "cpu" and needed > (total := host_memory_bytes()):
        weights = plan.target_weight_bytes + plan.draft_weight_bytes
        lower = "lower it or the context, or " if weights < total else ""
        raise ValueError(
            f"--bucket {max(config.buckets)} needs {format_bytes(needed)}, "
            f"{format_bytes(weights)} of them for weights in {config.dtype}, this machine has "
            f"{format_bytes(total)}; {lower}take a smaller model or dtype"
        )
    return plan


def _pool_room(plan: MemoryPlan, config: EngineConfig) -> int:
    """Bytes that the pool may take."""
    asked = config.kv_cache_memory
    if plan.budget_bytes is None:
        return asked if asked is not None else CPU_POOL_BYTES
    left = plan.budget_bytes - plan.fixed_bytes
    if asked is not None and asked > left:
        raise ValueError(
            f"--kv-cache-memory {format_bytes(asked)}: {format_bytes(max(left, 0))} are left of "
            f"{format_bytes(plan.budget_bytes)} after {format_bytes(plan.fixed_bytes)} for weights "
            "and work space; lower it, or raise --gpu-memory-utilization"
        )
    return left if asked is None else asked


def _too_small(plan: MemoryPlan, config: EngineConfig, room: int, length: int) -> str:
    needed = (plan.max_request_pages + 1) * plan.kv_page_bytes  # and the null page
    remedy = f"the longest that fits is {length if length >= 2 else 0} tokens"
    if length < 2 and (config.kv_cache_memory is not None or plan.budget_bytes is None):
        remedy += "; raise --kv-cache-memory or lower --page-size"
    elif length < 2:
        remedy += "; free memory of the GPU, raise --gpu-memory-utilization, or lower the largest "
        remedy += "--bucket"
    if config.page_size > 16:
        remedy += "; smaller pages waste less: --page-size 16"
    return (
        f"a context of {plan.max_model_len} tokens needs {format_bytes(needed)} of K/V for one "
        f"request, {format_bytes(max(room, 0))} are left beside {format_bytes(plan.fixed_bytes)} "
        f"for weights and work space; {remedy}"
    )


def _plan(
    config: EngineConfig,
    target: ModelConfig,
    draft: DraftSpec | None,
    memory: DeviceMemory | None,
    draft_names: Collection[str],
) -> MemoryPlan:
    """Every part for `config.max_model_len`; the pool's pages are still to be filled in."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    block = draft.num_verify_rows if draft else 1
    positions = num_positions(config.max_model_len, block)
    num_sms, width = memory.num_sms if memory else 1, pages_for(positions, config.page_size)
    models = [target, *(draft.models if draft else ())]
    drafter, copies, proposer = (), (), Proposer()
    plain = 0
    try:
        weights = loading.target_weights(sources.ShapeSource(dtype), target, positions, META)
        ropes = [weights.rope_PH]
        if isinstance(draft, NgramConfig):
            proposer = Ngram(config=draft, num_positions=positions)
        elif draft is not None:
            source = sources.ShapeSource(dtype, draft_names)
            vocabulary = loading.draft_vocabulary_shapes(source, draft)
            layers = loading.draft_weights(source, draft, positions, META)
            drafter = vocabulary, layers
            ropes.append(layers.rope_PH)
            no = torch.empty(0, device=META)
            proposer = DFlash(config=draft, weights=layers, embed_VD=no, lm_head_VD=no, kv_pool=no)
            if config.draft_quantization != "none":
                head = weights.lm_head_VD if vocabulary[1] is None else vocabulary[1]
                copies = loading.quantized_draft_weights(layers), quantize_fp8(head)
        scratch = workspace.bucket_scratch_bytes(config, target, draft, width, num_sms)
        scratch += workspace.chunk_scratch_bytes(config, target, num_sms)
        buffers = _buffer_bytes(config, target, proposer, width)
        if draft is not None:
            plain = workspace.bucket_scratch_bytes(config, target, None, width, num_sms)
            plain += _buffer_bytes(config, target, Proposer(), width)
            plain += workspace.activation_bytes(config, target, None, dtype.itemsize)
    except (RuntimeError, TypeError) as error:  # a size past 2^63
        reason = str(error).partition("\n")[0]
        raise ValueError(
            "the configs, --bucket and --page-size describe tensors of impossible size "
            f"({reason}); lower what is huge"
        ) from error
    budget = None
    if memory is not None:
        unusable = (1 - config.gpu_memory_utilization) * memory.total_bytes
        budget = int(memory.free_bytes - unusable)
    draft_bytes = loading.tree_bytes(drafter)
    return MemoryPlan(
        budget_bytes=budget,
        target_weight_bytes=loading.tree_bytes(weights) - loading.tree_bytes(weights.rope_PH),
        draft_weight_bytes=draft_bytes - loading.tree_bytes(tuple(ropes[1:])),
        quantized_weight_bytes=loading.tree_bytes((drafter, copies)) - draft_bytes,
        rope_table_bytes=loading.tree_bytes(tuple(ropes)),
        recurrent_state_bytes=state_bytes(target, dtype.itemsize) * num_slots(config),
        step_buffer_bytes=buffers,
        prefill_bytes=workspace.prefill_bytes(config, target, draft, dtype.itemsize),
        attention_workspace_bytes=workspace.shared_scratch_bytes(config, target) + scratch,
        activation_bytes=workspace.activation_bytes(config, target, draft, dtype.itemsize),
        plain_decode_bytes=plain,
        margin_bytes=GPU_MARGIN_BYTES if config.device == "cuda" else 0,
        kv_page_bytes=sum(page_bytes(m, config.page_size, dtype.itemsize) for m in models),
        page_size=config.page_size,
        num_pages=0,
        max_model_len=config.max_model_len,
        max_request_pages=pages_for(config.max_model_len + block, config.page_size),
    )


def _buffer_bytes(config: EngineConfig, target: ModelConfig, proposer: Proposer, width: int) -> int:
    """What `BucketBuilder` allocates, by allocating it without bytes."""
    arena = Arena(META, getattr(torch, config.dtype))
    step_buffers(arena, target, proposer, max(config.buckets), width, config)
    return arena.num_bytes
