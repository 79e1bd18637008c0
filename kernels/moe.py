"""A mixture of experts for a few rows: a stream over the weights of the experts that are chosen.

    chosen_T = the K largest of logits_T (ties: the lower expert), p = softmax(logits) at them
    out[k, t] = p[t, k] * down_e(silu(gate_e(x_t)) * up_e(x_t)),  e = chosen[t, k]
    out[K, t] = sigmoid(g_t) * shared_t

Of gpt-oss each product has a bias, and `clamped_swiglu.py` says what becomes of gate and up.

Why: 16 rows of Qwen3-30B-A3B are 128 pairs of row and expert over about 82 experts, 1.6 rows an
expert: no grouped GEMM but 770 MB of weights a layer. Three launches: `route` (choices, and which
experts have which rows), `gate_up` (with SwiGLU) and `down`, whose sum over k the next norm takes,
since it reads them anyway. No launch waits for the host: the grid has a slot for every expert that
so many rows can choose, and programs of empty slots end at once.

Invariant: a row's result is a function of that row. An output element is summed by one program in
rising order, no atomics; experts are chosen by logits alone, and a logit that is not a number comes
last, so that a poisoned row still names experts that exist and harms nobody.

Cost: 3 I D elements of each chosen expert. Legend: T rows, D hidden, E experts, K of them a row,
P = T * K pairs (t * K + k), S slots, I expert width, J = 2 * I, Z = K (+ 1 with a shared expert).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from graphengine.kernels.clamped_swiglu import Clamp, activate_reference
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.moe_kernels import (
    STREAM_ROWS,
    launch_down,
    launch_gate_up,
    launch_route,
    num_slots,
)


class Routing(NamedTuple):
    """Who goes where.

    `slots_S3`: expert, and begin and end of its pairs in `pairs_P`; begin = end is an empty slot.
    `pairs_P`: all pairs, an expert's next to each other in rising order.
    """

    expert_TK: torch.Tensor  # int32
    weight_TK: torch.Tensor  # float32, rounded to the logits' dtype
    slots_S3: torch.Tensor  # int32
    pairs_P: torch.Tensor  # int32


def choose_reference(
    logits_TE: torch.Tensor, top_k: int, normalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(expert_TK int32, weight_TK float32) in plain torch."""
    logits = logits_TE.float()
    order = torch.where(logits.isnan(), -torch.inf, logits)
    expert_TK = order.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weight_TK = logits.softmax(-1).gather(1, expert_TK)
    if normalise:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    return expert_TK.int(), weight_TK.to(logits_TE.dtype).float()


def route_reference(logits_TE: torch.Tensor, top_k: int, normalise: bool) -> Routing:
    """`route` in plain torch."""
    (T, E), device = logits_TE.shape, logits_TE.device
    expert_TK, weight_TK = choose_reference(logits_TE, top_k, normalise)
    flat_P = expert_TK.flatten()
    pairs_P = flat_P.sort(stable=True).indices
    counts_E = torch.zeros(E, dtype=torch.int64, device=device)
    counts_E.scatter_add_(0, flat_P.long(), torch.ones_like(flat_P, dtype=torch.int64))
    ends_E = counts_E.cumsum(0)
    slots_E3 = torch.stack([torch.arange(E, device=device), ends_E - counts_E, ends_E], 1)
    slots_S3 = torch.zeros(num_slots(T, E, top_k), 3, dtype=torch.int32, device=device)
    live = slots_E3 if T > STREAM_ROWS else slots_E3[counts_E > 0]
    slots_S3[: len(live)] = live.int()
    return Routing(expert_TK, weight_TK, slots_S3, pairs_P.int())


def gate_up_reference(
    x_TD: torch.Tensor,
    gate_up_EJD: torch.Tensor,
    expert_TK: torch.Tensor,
    bias_EJ: torch.Tensor | None = None,
    clamp: Clamp | None = None,
) -> torch.Tensor:
    """`activate` of every pair, [P, I]; pair by pair, so that no product's blocking depends on who
    else is there."""
    top_k = expert_TK.shape[1]
    rows = []
    for pair, e in enumerate(expert_TK.flatten().tolist()):
        bias_J = None if bias_EJ is None else bias_EJ[e]
        gate, up = F.linear(x_TD[pair // top_k], gate_up_EJD[e], bias_J).chunk(2)
        rows.append(activate_reference(gate.float(), up.float(), clamp).to(x_TD.dtype))
    return torch.stack(rows) if rows else x_TD.new_empty(0, gate_up_EJD.shape[1] // 2)


def down_reference(
    act_PI: torch.Tensor,
    down_EDI: torch.Tensor,
    expert_TK: torch.Tensor,
    weight_TK: torch.Tensor,
    shared_TD: torch.Tensor | None,
    shared_gate_T1: torch.Tensor | None,
    bias_ED: torch.Tensor | None = None,
) -> torch.Tensor:
    """`down` of every pair, weighted, and the shared expert's gated output: float32 [Z, T, D]."""
    T, K = expert_TK.shape
    rows = []
    for pair, e in enumerate(expert_TK.flatten().tolist()):
        bias_D = None if bias_ED is None else bias_ED[e]
        rows.append(F.linear(act_PI[pair], down_EDI[e], bias_D).float())
    out_PD = torch.stack(rows) if rows else act_PI.new_empty(0, down_EDI.shape[1]).float()
    out_ZTD = (out_PD.view(T, K, -1) * weight_TK[:, :, None]).transpose(0, 1)
    if shared_TD is not None and shared_gate_T1 is not None:
        # Row by row: the end of a tensor goes through another exponential than its vectors.
        gates = [gate.float().sigmoid() for gate in shared_gate_T1]
        out_ZTD = torch.cat([out_ZTD, (torch.stack(gates) * shared_TD.float())[None]])
    return out_ZTD.contiguous()


def experts_reference(
    x_TD: torch.Tensor,
    logits_TE: torch.Tensor,
    gate_up_EJD: torch.Tensor,
    down_EDI: torch.Tensor,
    shared_TD: torch.Tensor | None,
    shared_gate_T1: torch.Tensor | None,
    top_k: int,
    normalise: bool,
    gate_up_bias_EJ: torch.Tensor | None = None,
    down_bias_ED: torch.Tensor | None = None,
    clamp: Clamp | None = None,
) -> torch.Tensor:
    """`experts` in plain torch."""
    expert_TK, weight_TK = choose_reference(logits_TE, top_k, normalise)
    act_PI = gate_up_reference(x_TD, gate_up_EJD, expert_TK, gate_up_bias_EJ, clamp)
    shared = shared_TD, shared_gate_T1
    return down_reference(act_PI, down_EDI, expert_TK, weight_TK, *shared, down_bias_ED)


def route(logits_TE: torch.Tensor, top_k: int, normalise: bool) -> Routing:
    """Each row's experts and weights, and each expert's rows."""
    if not (logits_TE.is_cuda or INTERPRET):
        return route_reference(logits_TE, top_k, normalise)
    return Routing(*launch_route(logits_TE, top_k, normalise))


# A custom op: dynamo does not trace a launch with launch_pdl, nor Inductor what the data decides.
@torch.library.custom_op(
    "graphengine::experts",
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor logits, Tensor gate_up, Tensor down, Tensor? shared, "
        "Tensor? shared_gate, int top_k, bool normalise, Tensor? gate_up_bias=None, "
        "Tensor? down_bias=None, float[]? clamp=None) -> Tensor"
    ),
)
def experts(
    x_TD: torch.Tensor,
    logits_TE: torch.Tensor,
    gate_up_EJD: torch.Tensor,
    down_EDI: torch.Tensor,
    shared_TD: torch.Tensor | None,
    shared_gate_T1: torch.Tensor | None,
    top_k: int,
    normalise: bool,
    gate_up_bias_EJ: torch.Tensor | None = None,
    down_bias_ED: torch.Tensor | None = None,
    clamp: Clamp | None = None,
) -> torch.Tensor:
    """Each row's experts, weighted, for a consumer that adds the parts.

    Args:
        x_TD: [T, D] bf16, fp16 or fp32, contiguous, as all that follow; T of any size.
        logits_TE: [T, E], of the router.
        gate_up_EJD, down_EDI: x's dtype; of each expert rows [gate | up].
        shared_TD, shared_gate_T1: the shared expert's output, and its gate before the sigmoid.
        top_k, normalise: K, and whether a row's weights are divided by their sum.
        gate_up_bias_EJ, down_bias_ED: added to the products; [E, J] as the rows, [E, D].
        clamp: alpha and limit of `activate`.

    Returns:
        float32 [Z, T, D]; the sum over Z is the output.

    Raises:
        ValueError: shapes, dtypes or strides that do not belong together.
    """
    (T, D), (E, J, _) = x_TD.shape, gate_up_EJD.shape
    shapes = logits_TE.shape == (T, E) and gate_up_EJD.shape[2] == D and J % 2 == 0
    if not shapes or down_EDI.shape != (E, D, J // 2) or not 0 < top_k <= E:
        raise ValueError(
            f"x {(T, D)}, logits {tuple(logits_TE.shape)}, gate_up {tuple(gate_up_EJD.shape)}, "
            f"down {tuple(down_EDI.shape)}, top {top_k}: need [T, D], [T, E], [E, 2 I, D], "
            "[E, D, I], and at most E"
        )
    shared = [x for x in (shared_TD, shared_gate_T1) if x is not None]
    if [tuple(x.shape) for x in shared] not in ([], [(T, D), (T, 1)]):
        raise ValueError("the shared expert is [T, D] with a gate [T, 1], or neither")
    biases = [x for x in (gate_up_bias_EJ, down_bias_ED) if x is not None]
    if [tuple(x.shape) for x in biases] not in ([], [(E, J), (E, D)]):
        raise ValueError("the biases are [E, 2 I] and [E, D], or neither")
    tensors = (x_TD, logits_TE, gate_up_EJD, down_EDI)
    if any(x.dtype != x_TD.dtype or not x.is_contiguous() for x in (*tensors, *shared, *biases)):
        raise ValueError("all must be contiguous and of one dtype")
    of_shared, of_experts = (shared_TD, shared_gate_T1), (gate_up_bias_EJ, down_bias_ED, clamp)
    if not (x_TD.is_cuda or INTERPRET) or not T:
        return experts_reference(*tensors, *of_shared, top_k, normalise, *of_experts)
    routing = route(logits_TE, top_k, normalise)
    where = routing.slots_S3, routing.pairs_P
    act_PI = launch_gate_up(x_TD, gate_up_EJD, *where, top_k, gate_up_bias_EJ, clamp)
    return launch_down(act_PI, down_EDI, routing.weight_TK, *where, *of_shared, down_bias_ED)


@experts.register_fake
def _(x_TD, logits_TE, gate_up_EJD, down_EDI, shared_TD, shared_gate_T1, top_k, *rest):
    return x_TD.new_empty((top_k + (shared_TD is not None), *x_TD.shape), dtype=torch.float32)
