"""How a pair is run: the options with every value decided, see `startup.options`."""
# Below, fields lose their default, since all are decided:
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

from graphengine.config.options import AttentionBackend, DeviceName, DTypeName, GraphMode, Options


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Options):
    """The options of a run, no "auto" left; those that are not named here stay as asked.

    `buckets` ascend. `num_speculative_tokens`: drafts a step, one number a bucket (see
    `draft_length`); empty: all that the drafter has, if there is one. `prefill_chunk`: rows of an
    eager prefill forward; `prefill_sizes`: of those of a fixed size, if there are any;
    `far_prefill_sizes`: of those behind a long text.
    `speculation_limit`: the last position at which a block may begin; from there a request decodes
    plainly.
    """

    device: DeviceName
    dtype: DTypeName
    graph_mode: GraphMode
    compile: bool
    attention_backend: AttentionBackend
    prefill_attention_backend: AttentionBackend
    page_size: int
    max_model_len: int
    num_speculative_tokens: tuple[int, ...] = ()
    sampling: bool = False
    adjustments: bool = False
    max_logprobs: int = 0
    structured_outputs: bool = False
    prefill_chunk: int = 2048
    prefill_sizes: tuple[int, ...] = ()
    far_prefill_sizes: tuple[int, ...] = ()
    speculation_limit: int | None = None

    @property
    def shares_prefixes(self) -> bool:
        """Whether pages are kept for other requests: not those of drawn acceptance, whose text is
        meaningless."""
        return self.enable_prefix_caching and not self.simulate_acceptance

    @property
    def plans_attention(self) -> bool:
        """Whether attention needs the lengths on the host before each forward."""
        return self.attention_backend != "triton"
