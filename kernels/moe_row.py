"""A mixture of experts for one row, and the norm before it: what plain decoding runs, in three
launches.

    h' = h + sum_z update[z];  x = h' * rsqrt(mean(h'^2) + eps) * weight, each rounded
    l = router x, rounded;  chosen = the K largest of l (ties: the lower expert), p as in moe.py
    act[k] = silu(gate_e x) * up_e x,  out[k] = p_k * down_e act[k],  e = chosen[k]
    out[K] = sigmoid(g . x) * (shared expert of x)

and where there are biases, of the router and the experts, they are added to the products.

Why: one row of Qwen3.6-35B-A3B reads 57 MB a layer, 13 us of an H200, and took seven launches and
51 us through the kernels for a block; here, its norm aside, 19.5. A product is a matrix times a
vector, whose weights go straight to registers; every program of the router norms the row for
itself, and every other one finds its own expert from the logits, so no launch norms or chooses; the
shared expert is the last slot; `down` fetches its weights while `gate_up` still runs. 30B-A3B plain
takes 2.843 ms a step on an H100
(profiles/results/2026-11-27-h100-30b-plain-side-by-side-09d8910.json).

Invariant: an output element is summed by one program, with no atomics. Before its `gdc_wait` the
router reads weights alone, and `gate_up` the shared expert's. The router's first program writes h
and x. `gate_up` lets `down` start behind its own wait only, so that `down` may read logits,
complete by then, and weights before its own.

Legend: as in moe.py; S = K slots, and one more with a shared expert.
"""

# pyright: reportArgumentType=false

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton

from graphengine.kernels.add_rms_norm import add_rms_norm_reference
from graphengine.kernels.clamped_swiglu import Clamp, clamp_options
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import on_grid, pdl_options
from graphengine.kernels.moe import experts_reference
from graphengine.kernels.moe_row_kernels import (
    down_row_kernel,
    gate_up_row_kernel,
    norm_router_kernel,
    router_kernel,
)


class Shared(NamedTuple):
    """The expert of every row, and the row of its gate."""

    gate_up_JD: torch.Tensor
    down_DI: torch.Tensor
    gate_1D: torch.Tensor


class Biases(NamedTuple):
    """Of the router and of the experts' products, as the rows of their matrices."""

    router_E: torch.Tensor | None = None
    gate_up_EJ: torch.Tensor | None = None
    down_ED: torch.Tensor | None = None


NO_BIASES = Biases()


class RowTile(NamedTuple):
    """Elements of a matrix that a program holds at once, and the threads that hold them."""

    elements: int
    num_warps: int


ROUTER_TILE = RowTile(4096, 4)
GATE_UP_TILE = RowTile(4096, 4)  # of gate, and as many of up
DOWN_TILE = RowTile(2048, 1)
COPIED_EXPERTS = 128  # four keys a lane; with eight the registers cost more than the exchange


def runs_row(h_TD: torch.Tensor, shared: Shared | None, inter: int) -> bool:
    """Whether `experts_row` takes these: one row of 16 bits, a shared expert as wide as the
    others."""
    same = shared is None or shared.down_DI.shape[1] == inter
    return len(h_TD) == 1 and h_TD.element_size() == 2 and (h_TD.is_cuda or INTERPRET) and same


def experts_row_reference(
    h_1D: torch.Tensor,
    update: torch.Tensor,
    norm_D: torch.Tensor,
    eps: float,
    router_ED: torch.Tensor,
    gate_up_EJD: torch.Tensor,
    down_EDI: torch.Tensor,
    shared: Shared | None,
    top_k: int,
    normalise: bool,
    biases: Biases = NO_BIASES,
    clamp: Clamp | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`experts_row` in plain torch."""
    h_1D, x_1D = add_rms_norm_reference(h_1D, update, norm_D, eps)
    logits_1E = F.linear(x_1D, router_ED, biases.router_E)
    shared_1D = gate_11 = None
    if shared is not None:
        gate, up = F.linear(x_1D, shared.gate_up_JD).float().chunk(2, dim=-1)
        shared_1D = F.linear((F.silu(gate) * up).to(x_1D.dtype), shared.down_DI)
        gate_11 = F.linear(x_1D, shared.gate_1D)
    routed = (x_1D, logits_1E, gate_up_EJD, down_EDI, shared_1D, gate_11, top_k, normalise)
    return h_1D, experts_reference(*routed, biases.gate_up_EJ, biases.down_ED, clamp)


def experts_row(
    h_1D: torch.Tensor,
    update: torch.Tensor,
    norm_D: torch.Tensor,
    eps: float,
    router_ED: torch.Tensor,
    gate_up_EJD: torch.Tensor,
    down_EDI: torch.Tensor,
    shared: Shared | None,
    top_k: int,
    normalise: bool,
    biases: Biases = NO_BIASES,
    clamp: Clamp | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The row's norm, router, experts and shared expert, weighted, for a consumer that adds the
    parts.

    Args:
        h_1D: [1, D] bf16 or fp16, contiguous, as all that follow and of one dtype but for these:
        update: [1, D] in h's dtype, or float32 partial sums [Z, 1, D].
        norm_D: [D], h's dtype or float32.
        router_ED, gate_up_EJD, down_EDI: of each expert rows [gate | up].
        shared: matrices [2 I, D] and [D, I], and the gate's row [1, D].
        top_k, normalise: K, and whether the weights are divided by their sum.
        biases: [E], [E, 2 I] and [E, D], or none. clamp: as of `moe.experts`.

    Returns:
        (h_1D, float32 [S, 1, D]); the sum over S is the output. They equal `add_rms_norm` and
        `moe.experts` of the same logits but for the order of the sums.

    Raises:
        ValueError: shapes, dtypes or strides that do not belong together.
    """
    (T, D), (E, J, _) = h_1D.shape, gate_up_EJD.shape
    added = [x for x in biases if x is not None]
    if [tuple(x.shape) for x in added] not in ([], [(E,), (E, J), (E, D)]):
        raise ValueError(f"the biases need [{E}], [{E}, {J}] and [{E}, {D}], or there are none")
    matrices = (router_ED, gate_up_EJD, down_EDI, *(shared or ()))
    shapes = [tuple(x.shape) for x in (norm_D, update[-1:].reshape(1, -1), *matrices)]
    wanted = [(D,), (1, D), (E, D), (E, J, D), (E, D, J // 2), (J, D), (D, J // 2), (1, D)]
    wanted = wanted[: len(shapes)]
    if T != 1 or J % 2 or shapes != wanted or not 0 < top_k <= E:
        raise ValueError(f"h {(T, D)}, weights {shapes}, top {top_k}: need (1, {D}), {wanted}")
    partial = update.dim() == 3
    kinds = [x.dtype == h_1D.dtype for x in (*matrices, *added)]
    kinds += [update.dtype == (torch.float32 if partial else h_1D.dtype)]
    kinds += [norm_D.dtype in (h_1D.dtype, torch.float32)]
    all_tensors = (h_1D, update, norm_D, *matrices, *added)
    if not all(kinds) or not all(x.is_contiguous() for x in all_tensors):
        raise ValueError("all must be contiguous and of one dtype, partial sums in float32")
    of_shared = shared or (None, None, None)
    row = (h_1D, update, norm_D, eps, router_ED, gate_up_EJD, down_EDI, *of_shared)
    return torch.ops.graphengine.experts_row(*row, top_k, normalise, *biases, clamp)


def router_logits(
    x_TD: torch.Tensor,
    router_ED: torch.Tensor,
    gate_1D: torch.Tensor | None,
    bias_E: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`x @ router^T + bias` and `x @ gate^T` in one launch, for a few rows: each row reads the
    weights, 1 MB of 35B-A3B, from L2 for itself, and its bits hang on no other row.

    Args: x_TD [T, D], router_ED [E, D], gate_1D [1, D] or None, bias_E [E] or None; one dtype,
        contiguous.
    Returns: (logits_TE, gate_T1 or None) in x's dtype, summed in float32.
    Raises: ValueError for shapes, dtypes or strides that do not belong together.
    """
    tensors = (x_TD, router_ED, *(() if gate_1D is None else (gate_1D,)))
    if any(x.dim() != 2 or x.shape[1] != x_TD.shape[1] for x in tensors):
        raise ValueError(f"shapes {[tuple(x.shape) for x in tensors]}: need [T, D], [E, D], [1, D]")
    if bias_E is not None and bias_E.shape != router_ED.shape[:1]:
        raise ValueError(f"bias {tuple(bias_E.shape)}: need one for each of {len(router_ED)} rows")
    every = (*tensors, *(() if bias_E is None else (bias_E,)))
    if any(x.dtype != x_TD.dtype or not x.is_contiguous() for x in every):
        raise ValueError("all must be contiguous and of one dtype")
    logits_TE, *gate = torch.ops.graphengine.router_logits(x_TD, router_ED, gate_1D, bias_E)
    return logits_TE, gate[0] if gate else None


def launch_router(
    x_TD: torch.Tensor,
    router_ED: torch.Tensor,
    gate_1D: torch.Tensor | None,
    bias_E: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(logits_TE, gate_T1) in x's dtype; shapes are the caller's to check."""
    (T, D), E = x_TD.shape, len(router_ED)
    logits_TE = x_TD.new_empty((T, E))
    gate_T1 = None if gate_1D is None else x_TD.new_empty((T, 1))
    D_PAD = triton.next_power_of_2(D)
    rows = max(1, ROUTER_TILE.elements // D_PAD)
    on_grid(router_kernel, (triton.cdiv(E, rows) + (gate_1D is not None), T))(
        x_TD,
        router_ED,
        router_ED if gate_1D is None else gate_1D,
        bias_E,
        logits_TE,
        logits_TE if gate_T1 is None else gate_T1,
        E=E,
        ROWS=rows,
        D=D,
        D_PAD=D_PAD,
        **pdl_options(x_TD.device),
        num_warps=ROUTER_TILE.num_warps,
    )
    return logits_TE, gate_T1


def launch_row(
    h_1D: torch.Tensor,
    update: torch.Tensor,
    norm_D: torch.Tensor,
    eps: float,
    router_ED: torch.Tensor,
    gate_up_EJD: torch.Tensor,
    down_EDI: torch.Tensor,
    shared: Shared | None,
    top_k: int,
    normalise: bool,
    biases: Biases = NO_BIASES,
    clamp: Clamp | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(h_1D, float32 [S, 1, D]); shapes are the caller's to check."""
    (E, D), I = router_ED.shape, down_EDI.shape[2]  # noqa: E741
    S = top_k + (shared is not None)
    sizes = {"D": D, "D_PAD": triton.next_power_of_2(D)}
    pdls = pdl_options(h_1D.device)
    h_out, x_1D = torch.empty_like(h_1D), torch.empty_like(h_1D)
    logits_1E, gate_11 = h_1D.new_empty((1, E)), h_1D.new_empty((1, 1))
    rows = max(1, ROUTER_TILE.elements // sizes["D_PAD"])
    on_grid(norm_router_kernel, (triton.cdiv(E, rows) + (shared is not None),))(
        h_1D,
        update,
        norm_D,
        router_ED,
        router_ED if shared is None else shared.gate_1D,
        biases.router_E,
        h_out,
        x_1D,
        logits_1E,
        gate_11,
        eps,
        E=E,
        ROWS=rows,
        Z=update.shape[0] if update.dim() == 3 else 1,
        **sizes,
        **pdls,
        num_warps=ROUTER_TILE.num_warps,
    )
    act_SI = x_1D.new_empty((S, I))
    routes = {"E": E, "E_PAD": max(16, triton.next_power_of_2(E)), "K": top_k}
    rows = max(1, GATE_UP_TILE.elements // sizes["D_PAD"])
    on_grid(gate_up_row_kernel, (triton.cdiv(I, rows), S))(
        x_1D,
        logits_1E,
        gate_up_EJD,
        gate_up_EJD if shared is None else shared.gate_up_JD,
        biases.gate_up_EJ,
        act_SI,
        I=I,
        ROWS=rows,
        **routes,
        **sizes,
        **pdls,
        **clamp_options(clamp),
        COPIES=GATE_UP_TILE.num_warps if routes["E_PAD"] <= COPIED_EXPERTS else 1,
        num_warps=GATE_UP_TILE.num_warps,
    )
    out_S1D = torch.empty((S, 1, D), dtype=torch.float32, device=x_1D.device)
    I_PAD = triton.next_power_of_2(I)
    rows = max(1, min(DOWN_TILE.elements // I_PAD, sizes["D_PAD"]))
    on_grid(down_row_kernel, (triton.cdiv(D, rows), S))(
        act_SI,
        logits_1E,
        gate_11,
        down_EDI,
        down_EDI if shared is None else shared.down_DI,
        biases.down_ED,
        out_S1D,
        D=D,
        I=I,
        I_PAD=I_PAD,
        ROWS=rows,
        NORMALISE=normalise,
        **routes,
        **pdls,
        num_warps=DOWN_TILE.num_warps,
    )
    return h_out, out_S1D


# Custom ops: dynamo does not trace a launch with launch_pdl.
@torch.library.custom_op(
    "graphengine::router_logits",
    mutates_args=(),
    schema="(Tensor x, Tensor router, Tensor? gate, Tensor? bias=None) -> Tensor[]",
)
def _router_logits_op(x, router, gate, bias=None):
    if x.is_cuda or INTERPRET:
        return [y for y in launch_router(x, router, gate, bias) if y is not None]
    return [F.linear(x, router, bias), *([] if gate is None else [F.linear(x, gate)])]


@_router_logits_op.register_fake
def _(x, router, gate, bias=None):
    return [x.new_empty((len(x), len(w))) for w in (router, gate) if w is not None]


@torch.library.custom_op(
    "graphengine::experts_row",
    mutates_args=(),
    schema=(
        "(Tensor h, Tensor update, Tensor norm, float eps, Tensor router, Tensor gate_up, "
        "Tensor down, Tensor? shared_gate_up, Tensor? shared_down, Tensor? shared_gate, "
        "int top_k, bool normalise, Tensor? router_bias=None, Tensor? gate_up_bias=None, "
        "Tensor? down_bias=None, float[]? clamp=None) -> (Tensor, Tensor)"
    ),
)
def _experts_row_op(
    h,
    update,
    norm,
    eps,
    router,
    gate_up,
    down,
    shared_gate_up,
    shared_down,
    shared_gate,
    top_k,
    normalise,
    router_bias=None,
    gate_up_bias=None,
    down_bias=None,
    clamp=None,
):
    of_shared = shared_gate_up, shared_down, shared_gate
    shared = None if shared_gate_up is None else Shared(*of_shared)
    biases = Biases(router_bias, gate_up_bias, down_bias)
    row = h, update, norm, eps, router, gate_up, down, shared, top_k, normalise, biases, clamp
    return (launch_row if h.is_cuda or INTERPRET else experts_row_reference)(*row)


@_experts_row_op.register_fake
def _(h, update, norm, eps, router, gate_up, down, shared_gate_up, a, b, top_k, *rest):
    slots = top_k + (shared_gate_up is not None)
    return torch.empty_like(h), h.new_empty((slots, *h.shape), dtype=torch.float32)
