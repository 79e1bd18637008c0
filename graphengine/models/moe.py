"""The ffn of experts: each row takes the few that its router likes best, and one that all share.

    p = softmax(x @ router^T); the k largest, divided by their sum where the config says so
    y = sum over these of p_e * down_e(silu(gate_e(x)) * up_e(x)) + sigmoid(g . x) * shared(x)

gpt-oss's have no shared expert, biases everywhere, and another product (`config.moe.Clamp`).

Invariant: a row's result depends on that row alone. Its contributions are added in the order of its
own choice, so rows may come and go beside it and no bit of it changes.

Legend: T rows, D hidden, E experts, K of them a row, I expert width, J = 2 * I, Z = K, and one more
where there is a shared expert.
Source: Qwen3 technical report (arXiv 2505.09388); golden-tested against transformers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from graphengine.config.model import ModelConfig
from graphengine.config.moe import Clamp, MoeConfig
from graphengine.kernels.moe import experts
from graphengine.kernels.moe_kernels import STREAM_ROWS
from graphengine.kernels.moe_mxfp4 import experts_mxfp4
from graphengine.kernels.moe_row import Biases, Shared, experts_row, router_logits, runs_row
from graphengine.kernels.mxfp4 import BLOCK, Mxfp4
from graphengine.models.layers import add_rms_norm, linear, linear_swiglu
from graphengine.models.weight import (
    Experts,
    Fields,
    Stacked,
    Weight,
    norm,
    num_matrix_elements,
)


class MoeWeights(NamedTuple):
    """Fields in the order of use; the last three are no tensors."""

    post_norm_D: Tensor
    router_ED: Tensor
    router_bias_E: Tensor | None
    gate_up_EJD: Tensor | Mxfp4  # of each expert rows [gate | up]
    gate_up_bias_EJ: Tensor | None
    down_EDI: Tensor | Mxfp4
    down_bias_ED: Tensor | None
    shared_gate_up_JD: Tensor | None
    shared_down_DI: Tensor | None
    shared_gate_1D: Tensor | None
    num_experts_per_tok: int
    norm_topk_prob: bool
    clamp: Clamp | None


def weights(config: ModelConfig) -> Fields:
    """Names, shapes and shards of `MoeWeights`."""
    moe, hidden = _moe(config), config.hidden_size
    num, inter = moe.num_experts, moe.moe_intermediate_size
    if moe.clamp is not None:
        return _clamped(config, num, inter)
    shared, own = moe.shared_expert_intermediate_size, "mlp.shared_expert"
    gate_up, down = Stacked("mlp.experts.gate_up_proj", num), Stacked("mlp.experts.down_proj", num)
    return {
        "post_norm_D": norm("post_attention_layernorm.weight", hidden, config.has_offset_norms),
        "router_ED": (Weight("mlp.gate.weight", (num, hidden)),),
        "router_bias_E": (),
        "gate_up_EJD": tuple(
            Weight(f"mlp.experts.{e}.{name}_proj.weight", (inter, hidden), 0, stack=gate_up)
            for e in range(num)
            for name in ("gate", "up")
        ),
        "gate_up_bias_EJ": (),
        "down_EDI": tuple(
            Weight(f"mlp.experts.{e}.down_proj.weight", (hidden, inter), 1, stack=down)
            for e in range(num)
        ),
        "down_bias_ED": (),
        "shared_gate_up_JD": tuple(
            Weight(f"{own}.{name}_proj.weight", (shared, hidden), 0)
            for name in ("gate", "up")
            if shared
        ),
        "shared_down_DI": (Weight(f"{own}.down_proj.weight", (hidden, shared), 1),) * bool(shared),
        "shared_gate_1D": (Weight(f"{own}_gate.weight", (1, hidden)),) * bool(shared),
    }


def _clamped(config: ModelConfig, num: int, inter: int) -> Fields:
    hidden, name, is_mxfp4 = config.hidden_size, "mlp.experts.", _stays_mxfp4(config)
    halves, matrix = Experts(is_interleaved=True), Experts(is_transposed=True, is_mxfp4=is_mxfp4)
    both = matrix._replace(is_interleaved=True)
    gate_up, down = (num, hidden, 2 * inter), (num, inter, hidden)  # as unquantised files hold them
    return {
        "post_norm_D": norm("post_attention_layernorm.weight", hidden, config.has_offset_norms),
        "router_ED": (Weight("mlp.router.weight", (num, hidden)),),
        "router_bias_E": (Weight("mlp.router.bias", (num,)),),
        "gate_up_EJD": (Weight(f"{name}gate_up_proj", gate_up, experts=both),),
        "gate_up_bias_EJ": (Weight(f"{name}gate_up_proj_bias", (num, 2 * inter), experts=halves),),
        "down_EDI": (Weight(f"{name}down_proj", down, experts=matrix),),
        "down_bias_ED": (Weight(f"{name}down_proj_bias", (num, hidden), experts=Experts()),),
        "shared_gate_up_JD": (),
        "shared_down_DI": (),
        "shared_gate_1D": (),
    }


def constants(config: ModelConfig) -> dict[str, Any]:
    """Numbers that a compiled segment holds, since no shape of a tensor tells them."""
    moe = _moe(config)
    return {
        "num_experts_per_tok": moe.num_experts_per_tok,
        "norm_topk_prob": moe.norm_topk_prob,
        "clamp": moe.clamp,
    }


def num_read_elements(config: ModelConfig, fields: Fields, num_rows: int) -> int:
    """The experts that so many rows are expected to choose, and every other matrix once; what is in
    MXFP4 counts by its bits, 17 for four weights of 16."""
    moe = _moe(config)
    of_experts = num_matrix_elements((*fields["gate_up_EJD"], *fields["down_EDI"]))
    rest = sum(map(num_matrix_elements, fields.values())) - of_experts
    bits = 17 / 64 if _stays_mxfp4(config) else 1
    return rest + round(of_experts * bits * moe.num_distinct(num_rows) / moe.num_experts)


def row_bytes(config: ModelConfig, element_bytes: int) -> int:
    """Temporaries of a row: logits and their softmax, what every chosen expert's SwiGLU gives, its
    output in float32, and the shared expert's like a dense MLP's."""
    moe = _moe(config)
    num, shared = moe.num_experts_per_tok, moe.shared_expert_intermediate_size
    routing = moe.num_experts * (element_bytes + 4) + 4 * num * 4
    outputs = (num + bool(shared)) * config.hidden_size * 4
    of_shared = shared * (2 * element_bytes + 3 * 4) + bool(shared) * config.hidden_size * 4
    return routing + num * moe.moe_intermediate_size * element_bytes + outputs + of_shared


def run(layer: MoeWeights, h_TD: Tensor, update: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`h += update`, then the sum above of `rms_norm(h)` -> (h_TD, update_ZTD): partial sums in
    float32, a row's contributions in the order of its choice and the shared expert's last."""
    shared = None
    if layer.shared_gate_up_JD is not None:
        assert layer.shared_down_DI is not None and layer.shared_gate_1D is not None
        shared = Shared(layer.shared_gate_up_JD, layer.shared_down_DI, layer.shared_gate_1D)
    biases = Biases(layer.router_bias_E, layer.gate_up_bias_EJ, layer.down_bias_ED)
    gate_up, down = layer.gate_up_EJD, layer.down_EDI
    dense = (gate_up, down) if isinstance(gate_up, Tensor) and isinstance(down, Tensor) else None
    if dense is not None and runs_row(h_TD, shared, dense[1].shape[2]):
        return experts_row(
            h_TD,
            update,
            layer.post_norm_D,
            eps,
            layer.router_ED,
            *dense,
            shared,
            layer.num_experts_per_tok,
            layer.norm_topk_prob,
            biases,
            layer.clamp,
        )
    router = layer.router_ED, layer.router_bias_E
    h_TD, x_TD = add_rms_norm(h_TD, update, layer.post_norm_D, eps, *router)
    assert isinstance(x_TD, Tensor)
    gate_1D = None if shared is None else shared.gate_1D
    if len(x_TD) <= STREAM_ROWS:
        logits_TE, gate_T1 = router_logits(x_TD, layer.router_ED, gate_1D, layer.router_bias_E)
    else:
        logits_TE = linear(x_TD, *router)
        gate_T1 = None if gate_1D is None else linear(x_TD, gate_1D)
    choice = layer.num_experts_per_tok, layer.norm_topk_prob
    of_experts = layer.gate_up_bias_EJ, layer.down_bias_ED, layer.clamp
    if isinstance(gate_up, Mxfp4) and isinstance(down, Mxfp4):
        return h_TD, experts_mxfp4(x_TD, logits_TE, gate_up, down, *choice, *of_experts)
    assert dense is not None, "both matrices of an expert are in MXFP4, or neither"
    shared_TD = None
    if shared is not None:
        shared_TD = linear(linear_swiglu(x_TD, shared.gate_up_JD), shared.down_DI)
    of_shared = shared_TD, gate_T1
    return h_TD, experts(x_TD, logits_TE, *dense, *of_shared, *choice, *of_experts)


def _stays_mxfp4(config: ModelConfig) -> bool:
    """Whether bf16 runs multiply experts in four bits: files hold them so, and both matrices of one
    are whole blocks of the kernel's."""
    moe = _moe(config)
    return moe.is_mxfp4 and config.hidden_size % BLOCK == moe.moe_intermediate_size % BLOCK == 0


def _moe(config: ModelConfig) -> MoeConfig:
    assert config.moe is not None, "an ffn of experts without their config"
    return config.moe
