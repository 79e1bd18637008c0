"""moe.py's experts where their matrices are in MXFP4.

    out[k, t] = p[t, k] * (down_e(activate(gate_e(x_t), up_e(x_t))) + bias),  e = chosen[t, k]

Choices, slots, biases and invariants are those of moe.py; eight rows of gpt-oss-20b read some 280
MB of experts a layer instead of 1,050. Legend: as there; matrices [E, 2 I, D], rows `in_turn`, and
[E, D, I].
"""

import torch

from graphengine.kernels import moe_mxfp4_kernels, moe_mxfp4_stream
from graphengine.kernels.clamped_swiglu import Clamp
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.moe import experts_reference, route
from graphengine.kernels.mxfp4 import BLOCK, HALF_WORDS, SCALES, Mxfp4, out_of_turn


def experts_mxfp4(
    x_TD: torch.Tensor,
    logits_TE: torch.Tensor,
    gate_up: Mxfp4,
    down: Mxfp4,
    top_k: int,
    normalise: bool,
    gate_up_bias_EJ: torch.Tensor | None = None,
    down_bias_ED: torch.Tensor | None = None,
    clamp: Clamp | None = None,
) -> torch.Tensor:
    """Each row's experts, weighted, for a consumer that adds the parts.

    Args:
        x_TD: [T, D] bf16, contiguous, as all that follow; T of any size.
        logits_TE: [T, E], of the router.
        gate_up, down: of each expert rows `in_turn` of [gate | up]; D and I are multiples of 64.
        top_k, normalise: K, and whether a row's weights are divided by their sum.
        gate_up_bias_EJ, down_bias_ED: [E, 2 I] and [E, D], or neither.
        clamp: alpha and limit of `activate`.

    Returns:
        float32 [K, T, D]; the sum over K is the output.

    Raises:
        ValueError: shapes, dtypes or strides that do not belong together.
    """
    (T, D), (E, blocks, *_) = x_TD.shape, gate_up.codes.shape
    I, shapes = blocks * BLOCK // 2, [tuple(x.shape) for x in (logits_TE, *gate_up, *down)]  # noqa: E741 (moe.py's width)
    of_gate_up, of_down = (E, blocks, D // BLOCK), (E, D // BLOCK, I // BLOCK)
    wanted = [(T, E)]
    wanted += [(*of, size) for of in (of_gate_up, of_down) for size in (HALF_WORDS, SCALES)]
    if shapes != wanted or D % BLOCK or I % BLOCK or not 0 < top_k <= E:
        raise ValueError(
            f"x {(T, D)}, then {shapes}, top {top_k}: need {wanted}, D and I multiples of {BLOCK}"
        )
    biases = [x for x in (gate_up_bias_EJ, down_bias_ED) if x is not None]
    if [tuple(x.shape) for x in biases] not in ([], [(E, 2 * I), (E, D)]):
        raise ValueError("the biases are [E, 2 I] and [E, D], or neither")
    floats, integers = (x_TD, logits_TE, *biases), (*gate_up, *down)
    kinds = {x.dtype for x in floats} == {torch.bfloat16}
    kinds = kinds and [x.dtype for x in integers] == [torch.int16, torch.uint8] * 2
    if not kinds or not all(x.is_contiguous() for x in (*floats, *integers)):
        raise ValueError("all must be contiguous, weights as `pack_mxfp4` gives them, others bf16")
    rest = (top_k, normalise, gate_up_bias_EJ, down_bias_ED, clamp)
    return torch.ops.graphengine.experts_mxfp4(x_TD, logits_TE, *gate_up, *down, *rest)


# A custom op: dynamo does not trace a launch with launch_pdl, nor Inductor what the data decides.
@torch.library.custom_op(
    "graphengine::experts_mxfp4",
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor logits, Tensor gate_up, Tensor gate_up_scales, Tensor down, "
        "Tensor down_scales, int top_k, bool normalise, Tensor? gate_up_bias, "
        "Tensor? down_bias, float[]? clamp) -> Tensor"
    ),
)
def _experts_mxfp4_op(x, logits, gate_up, gate_up_scales, down, down_scales, top_k, *rest):
    normalise, gate_up_bias, down_bias, clamp = rest
    first, second = Mxfp4(gate_up, gate_up_scales), Mxfp4(down, down_scales)
    if not (x.is_cuda or INTERPRET) or not len(x):
        dense = out_of_turn(first.dense(x.dtype)), second.dense(x.dtype)
        return experts_reference(x, logits, *dense, None, None, top_k, *rest)
    routing = route(logits, top_k, normalise)
    where = routing.slots_S3, routing.pairs_P
    streams = moe_mxfp4_stream.takes(x, second.codes.shape[2] * BLOCK)
    kernels = moe_mxfp4_stream if streams else moe_mxfp4_kernels
    act_PI = kernels.launch_gate_up(x, first, *where, top_k, gate_up_bias, clamp)
    return kernels.launch_down(act_PI, second, routing.weight_TK, *where, down_bias)


@_experts_mxfp4_op.register_fake
def _(x, logits, gate_up, gate_up_scales, down, down_scales, top_k, *rest):
    return x.new_empty((top_k, *x.shape), dtype=torch.float32)
