"""How a pair is run: every value is decided (no "auto" left), see `startup.options`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GraphMode = Literal["none", "piecewise", "full"]
AttentionBackend = Literal["flashinfer", "triton", "torch"]
DeviceName = Literal["cpu", "cuda"]
DTypeName = Literal["bfloat16", "float32"]
DraftQuantization = Literal["none", "fp8", "fp8-dynamic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How to run a pair; every value is resolved (no "auto" left).

    `buckets`: ascending batch sizes that are captured. `num_speculative_tokens`: drafts a step, one
    number a bucket (see `draft_length`); empty: all that the drafter has, if there is one.
    `max_model_len`: most tokens (prompt and generated) of one request. `prefill_chunk`: rows of one
    prefill forward. `kv_cache_memory`: most bytes of the K/V pool; None takes what memory allows.
    `simulate_acceptance`: a mean acceptance length to draw instead of comparing drafts (measuring
    speed only).
    `draft_quantization`: "fp8" rounds the drafter's matrices, "fp8-dynamic" in large batches its
    activations too; the output stays the target's.
    `speculation_limit`: the last position at which a block may begin; from there a request decodes
    plainly. `acceptance_floor`: mean acceptance length below which is warned; 0 never.
    `fallback`: decode plainly where speculation is measured to lose.
    `sampling`: requests may have a temperature (a second verify chain is built).
    """

    device: DeviceName
    dtype: DTypeName
    buckets: tuple[int, ...]
    graph_mode: GraphMode
    compile: bool
    attention_backend: AttentionBackend
    prefill_attention_backend: AttentionBackend
    page_size: int
    max_model_len: int
    prefill_chunk: int = 2048
    gpu_memory_utilization: float = 0.9
    kv_cache_memory: int | None = None
    simulate_acceptance: float | None = None
    draft_quantization: DraftQuantization = "none"
    num_speculative_tokens: tuple[int, ...] = ()
    speculation_limit: int | None = None
    acceptance_floor: float = 0.0
    fallback: bool = False
    sampling: bool = False

    @property
    def plans_attention(self) -> bool:
        """Whether attention needs the lengths on the host before each forward."""
        return self.attention_backend != "triton"
