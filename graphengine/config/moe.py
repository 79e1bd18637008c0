"""The mixture of experts of a checkpoint: how many, how wide, how a row's choice is weighted.

Why read or refused by name: transformers fills in sizes silently, and `norm_topk_prob` has another
default in each family; a wrong one scales every layer's output without any error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from graphengine.config.values import RawConfig

MAX_EXPERTS, MAX_CLAMP = 1 << 16, 1e30  # past them a file is damaged
_CLAMP = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # gpt-oss's; its published file lacks alpha


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeKeys:
    """What a model_type says beyond the keys of its file.

    `norm_topk_prob`: what counts where the file does not say; `reads_norm_key`: False for a family
    whose code knows no such key. `has_shared_expert`: every layer has one beside its experts.
    `is_clamped`: experts are gpt-oss's: biases everywhere, SwiGLU of a `Clamp`, and the width is
    the key intermediate_size.
    """

    norm_topk_prob: bool
    reads_norm_key: bool = True
    has_shared_expert: bool = False
    is_clamped: bool = False


class Clamp(NamedTuple):
    """gpt-oss's SwiGLU: `(min(max(up, -limit), limit) + 1) * g * sigmoid(alpha * g)`, of
    `g = min(gate, limit)`."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """The experts of every layer.

    `norm_topk_prob`: a row's weights are divided by their sum. `shared_expert_intermediate_size`:
    width of the expert that every row takes; 0 is none. `clamp`: None is plain SwiGLU. `is_mxfp4`:
    files hold the experts' matrices in four bits, as bf16 runs multiply them.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    shared_expert_intermediate_size: int = 0
    clamp: Clamp | None = None
    is_mxfp4: bool = False

    @classmethod
    def from_raw(cls, raw: RawConfig, keys: MoeKeys) -> MoeConfig:
        """Reads the keys of a layer stack in which every layer is sparse.

        Raises:
            ValueError: a size is missing, two spellings disagree, or some layers are dense.
        """
        either = raw.over({"num_experts": raw.get("num_local_experts")})
        num_experts = _integer(either, "num_experts", "num_local_experts", MAX_EXPERTS)
        per_token = _integer(raw, "num_experts_per_tok", "experts_per_token", num_experts)
        if raw.get("decoder_sparse_step") not in (None, 1):
            raise raw.refusal(
                f"decoder_sparse_step {raw.get('decoder_sparse_step')!r} is not supported; every "
                "layer must have experts (1)"
            )
        if raw.get("mlp_only_layers"):
            raise raw.refusal(
                f"mlp_only_layers {raw.get('mlp_only_layers')!r} is not supported; every layer "
                "must have experts"
            )
        normalises = raw.flag("norm_topk_prob", default=keys.norm_topk_prob)
        if not keys.reads_norm_key and normalises != keys.norm_topk_prob:
            raise raw.refusal(
                f"norm_topk_prob {normalises} has no meaning for this model_type, whose code "
                f"always takes {keys.norm_topk_prob}; remove the key"
            )
        shared = 0
        if keys.has_shared_expert:
            shared = raw.integer("shared_expert_intermediate_size")
        elif raw.get("shared_expert_intermediate_size"):
            raise raw.refusal(
                "shared_expert_intermediate_size is set, and this model_type has no shared expert"
            )
        clamp, width = None, "moe_intermediate_size"
        if keys.is_clamped:
            clamp = Clamp(*(_bounded(raw.over(_CLAMP), key) for key in _CLAMP))
            width = "intermediate_size"
        return cls(
            num_experts=num_experts,
            num_experts_per_tok=per_token,
            moe_intermediate_size=raw.integer(width),
            norm_topk_prob=normalises,
            shared_expert_intermediate_size=shared,
            clamp=clamp,
            is_mxfp4=raw.section("quantization_config").get("quant_method") == "mxfp4",
        )

    def num_distinct(self, num_rows: int) -> float:
        """Experts of a layer that a forward of so many rows is expected to read.

        `E * (1 - (1 - k / E)^rows)`: rows choose independently and uniformly. Rows of one text
        choose alike, so that fewer are read: an upper estimate (25.4 instead of 29.5 GB at 16 rows
        of 256 experts, top 8, if neighbours share a quarter of their choice).
        """
        missed = (1 - self.num_experts_per_tok / self.num_experts) ** num_rows
        return self.num_experts * (1 - missed)


def _bounded(raw: RawConfig, key: str) -> float:
    if (value := raw.number(key)) > MAX_CLAMP:
        raise raw.refusal(
            f"{key} is {value:g}, expected at most {MAX_CLAMP:g}; the file is damaged"
        )
    return value


def _integer(raw: RawConfig, key: str, alias: str, maximum: int) -> int:
    """What a file has under a name, and under another alike if at all."""
    number, other = raw.integer(key, maximum=maximum), raw.get(alias)
    if other is not None and other != number:
        raise raw.refusal(
            f"{key} {number} and {alias} {other!r} disagree; remove the one that is not meant"
        )
    return number
