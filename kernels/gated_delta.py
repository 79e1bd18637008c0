"""The recurrence of a Gated-DeltaNet layer over blocks: verify without writing, then commit.

    c_t  = silu(sum_j w_j m_{t-3+j})                   4 taps, depthwise, rounded once; [q | k | v]
    q, k <- q / |q| / sqrt(K), k / |k|                 |x|^2 = sum x^2 + 1e-6
    g_t  = -exp(A_log) softplus(a_t + dt_bias),  beta_t = sigmoid(b_t)
    S   <- exp(g_t) S;   S <- S + beta_t (v_t - S k_t) k_t^T;   o_t = S q_t
    out_t = o_t / rms(o_t) * w * silu(z_t)         o_t rounded before

Value head h reads with key head h // (N / key heads). All of it is float32 but the convolved
columns and the outputs, which are of the model's dtype.

Why two operations: rows of a block may be rejected, and a state cannot be taken back. `verify`
reads the committed state and window, writes neither, and records what each row adds; `commit`
applies exactly the accepted ones. A row's addition, delta_t k_t^T with delta_t the factor of k_t^T
above, does not depend on how many rows are accepted behind it, and both are recorded in float32:
the verify's own numbers (in bfloat16 they would cost 2e-3 of the state). A block of one row has
nothing to reject: its state advances at once, which saves its commit a state's read, and the
columns alone are recorded, since other heads still read the window.

Invariant: a row at or past the count, the null slot and free slots are never read into a live
state: rejected rows are left out, not multiplied by zero, since 0 * NaN is NaN.

Legend: B requests, G rows of a block, T = B * G, L layers, S slots, C channels, N / V value heads /
head dim, K key head dim (= V), E = C + N * V + 2 * N, X = 3 + G columns, J = width of all keys.
Source: Gated Delta Networks (arXiv 2412.06464); equal to transformers' torch_recurrent_gated_delta_
rule (tests).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from graphengine.kernels.gated_delta_kernels import commit_kernel, verify_kernel
from graphengine.kernels.gated_delta_step_kernels import step_kernel
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import on_grid, pdl_options
from graphengine.kernels.output_gate import output_gate, output_gate_reference
from graphengine.kernels.qk_norm_rope import sum_partials

NUM_TAPS = 4
FEW_STATES = 64  # of all heads of a batch
COMMIT_ROWS, COMMIT_WARPS = 16, 4  # of a state in a program of a commit, which only streams
EPS = 1e-6  # of the keys' and queries' norm; never rms_norm_eps


class Records(NamedTuple):
    """What a block leaves for its commit."""

    raw_BXC: torch.Tensor  # model dtype: the window, then the block's columns
    keys_BGJ: torch.Tensor  # float32: convolved and normed; these three unused of one row
    deltas_BGNV: torch.Tensor  # float32
    g_BGN: torch.Tensor  # float32

    @property
    def shape(self) -> tuple[int, int]:
        """(B, G)."""
        return self.raw_BXC.shape[-3], self.raw_BXC.shape[-2] - NUM_TAPS + 1


class Inputs(NamedTuple):
    """A layer's projection, taken apart."""

    columns_TC: torch.Tensor
    g_TN: torch.Tensor  # float32
    beta_TN: torch.Tensor  # float32


def take_apart(
    projected: torch.Tensor,
    a_log_N: torch.Tensor,
    dt_bias_N: torch.Tensor,
    num_channels: int,
    dtype: torch.dtype,
) -> Inputs:
    """Columns and gates of a projection [q | k | v | z | b | a] or its partial sums."""
    projected_TE = sum_partials(projected, dtype)
    b_TN, a_TN = projected_TE[:, -2 * len(a_log_N) :].float().chunk(2, 1)
    g_TN = -a_log_N.float().exp() * F.softplus(a_TN + dt_bias_N.float())
    return Inputs(projected_TE[:, :num_channels], g_TN, b_TN.sigmoid())


def convolve(columns_XC: torch.Tensor, conv_C4: torch.Tensor) -> torch.Tensor:
    """silu of the causal depthwise convolution: [.., 3 + n, C] -> [.., n, C], rounded once."""
    windows = columns_XC.float().unfold(-2, NUM_TAPS, 1)
    return F.silu((windows * conv_C4.float()).sum(-1)).to(columns_XC.dtype)


def heads_of(
    flat: torch.Tensor, num_heads: int, head_dim: int, is_normed: bool = True
) -> torch.Tensor:
    """[.., heads * K] -> float32 [.., N, K]: each head repeated for its value heads, normed."""
    x = flat.float().unflatten(-1, (-1, head_dim))
    if is_normed:
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
    return x.repeat_interleave(num_heads // x.shape[-2], -2)


def gated_delta_verify_(
    projected: torch.Tensor,
    conv_C4: torch.Tensor,
    a_log_N: torch.Tensor,
    dt_bias_N: torch.Tensor,
    windows_S3C: torch.Tensor,
    states_SNVK: torch.Tensor,
    slots_B: torch.Tensor,
    norm_V: torch.Tensor,
    eps: float,
    records: Records,
) -> torch.Tensor:
    """Gated outputs of every row of every block from the committed states.

    Args:
        projected: [T, E] in the model's dtype, or fp32 partial sums [Z, T, E].
        slots_B: int32.
    Returns: [T, N, V] in the model's dtype.
    Mutates: records, and of blocks of one row the states but the null slot's. Never the windows.
    """
    tensors = projected, conv_C4, a_log_N, dt_bias_N, windows_S3C, states_SNVK, slots_B
    num_splits = projected.shape[0] if projected.dim() == 3 else 1
    (N, K), (B, G), C = states_SNVK.shape[1:3], records.shape, windows_S3C.shape[-1]
    out_TNV = windows_S3C.new_empty(B * G, N, K)
    check_shapes(projected, windows_S3C, states_SNVK, out_TNV, B * G)
    if not (projected.is_cuda or INTERPRET):
        return gated_delta_verify_reference_(*tensors, norm_V, eps, records)
    dense = *tensors[1:], norm_V, *records
    if projected.stride(-1) != 1 or not all(x.is_contiguous() for x in dense):
        raise ValueError("all but projected must be contiguous, and projected in its last dim")
    strides = projected.stride(-2), projected.stride(0) if num_splits > 1 else 0
    shape = {"N": N, "NK": (C // K - N) // 2, "K": K, "Z": num_splits}
    shape |= pdl_options(projected.device)
    if G == 1:
        tile, num_warps = step_tile(K, B * N)
        on_grid(step_kernel, (N * (K // tile), B))(
            *(*tensors, norm_V, records.raw_BXC, out_TNV, *strides, K**-0.5, eps),
            BV=tile,
            num_warps=num_warps,
            **shape,
        )
        if tile == K:
            return out_TNV
    else:
        tile, num_warps = verify_tile(K, B * N)
        on_grid(verify_kernel, (N * (K // tile), B))(
            *(*tensors, *records, out_TNV, *strides, K**-0.5),
            G=G,
            BV=tile,
            ROWS=padded_rows(G),
            num_warps=num_warps,
            **shape,
        )
    return output_gate(out_TNV, projected, C, norm_V, eps).view_as(out_TNV)


def padded_rows(num_rows: int) -> int:
    """Rows of a matrix product."""
    return max(16, 1 << (num_rows - 1).bit_length())


def verify_tile(head_dim: int, num_states: int) -> tuple[int, int]:
    """Rows of a state in a verify's program, and its warps. Half a state where there are few, so
    that a batch of one has a program for half the multiprocessors of an H200 (32 heads: 64); all
    of it where there are many, since a program's work on the keys is the same whatever its rows.
    Tiles change no result: a row of a state is worked on alone."""
    if num_states <= FEW_STATES:
        return max(head_dim // 2, min(head_dim, 16)), 8
    return head_dim, 4


def step_tile(head_dim: int, num_states: int) -> tuple[int, int]:
    """The same of one row. Where there are few states a program has a whole one, whose output it
    can norm and gate; of many, small ones start beside the launch in front of them."""
    return (head_dim, 8) if num_states <= FEW_STATES else (min(head_dim, 32), 1)


def check_shapes(
    projected: torch.Tensor,
    windows_S3C: torch.Tensor,
    states_SNVK: torch.Tensor,
    out_TNV: torch.Tensor,
    num_rows: int,
) -> None:
    """Raises: ValueError for shapes and dtypes that do not belong together."""
    (T, N, V), C = out_TNV.shape, windows_S3C.shape[-1]
    if projected.shape[-2:] != (num_rows, C + N * V + 2 * N) or num_rows != T:
        raise ValueError(
            f"projected {tuple(projected.shape)}, out {tuple(out_TNV.shape)}: need {num_rows} rows "
            f"of {C + N * V + 2 * N} columns [q | k | v | z | b | a] for {C} channels"
        )
    if states_SNVK.shape[1:] != (N, V, V) or states_SNVK.dtype != torch.float32:
        raise ValueError(
            f"states are {states_SNVK.dtype} {tuple(states_SNVK.shape)}; need float32 "
            f"[S, {N}, {V}, {V}]"
        )
    wanted = torch.float32 if projected.dim() == 3 else windows_S3C.dtype
    if projected.dtype != wanted or out_TNV.dtype != windows_S3C.dtype:
        raise ValueError(
            f"projected {projected.dtype}, windows {windows_S3C.dtype}, out {out_TNV.dtype}: use "
            "one, outside of torch.autocast, or float32 for partial sums"
        )


def gated_delta_verify_reference_(
    projected: torch.Tensor,
    conv_C4: torch.Tensor,
    a_log_N: torch.Tensor,
    dt_bias_N: torch.Tensor,
    windows_S3C: torch.Tensor,
    states_SNVK: torch.Tensor,
    slots_B: torch.Tensor,
    norm_V: torch.Tensor,
    eps: float,
    records: Records,
) -> torch.Tensor:
    """`gated_delta_verify_` in plain torch."""
    (B, G), (N, V), C = records.shape, states_SNVK.shape[1:3], windows_S3C.shape[-1]
    columns_TC, g_TN, beta_TN = take_apart(projected, a_log_N, dt_bias_N, C, windows_S3C.dtype)
    slots, J = slots_B.long(), (C - N * V) // 2
    raw_BXC = torch.cat([windows_S3C[slots], columns_TC.unflatten(0, (B, G))], 1)
    q, k, v = convolve(raw_BXC, conv_C4).split([J, J, N * V], -1)
    q, keys, v = heads_of(q, N, V) * V**-0.5, heads_of(k, J // V, V), heads_of(v, N, V, False)
    k = keys.repeat_interleave(N * V // J, 2)
    g_BGN, beta_BGN = (x.unflatten(0, (B, G)) for x in (g_TN, beta_TN))
    state, out_BGNV, deltas_BGNV = states_SNVK[slots], torch.empty_like(v), torch.empty_like(v)
    for i in range(G):
        state = state * g_BGN[:, i].exp()[..., None, None]
        held_BNV = (state @ k[:, i, ..., None])[..., 0]
        deltas_BGNV[:, i] = beta_BGN[:, i, :, None] * (v[:, i] - held_BNV)
        state = state + deltas_BGNV[:, i, ..., None] * k[:, i, ..., None, :]
        out_BGNV[:, i] = (state @ q[:, i, ..., None])[..., 0]
    records.raw_BXC.copy_(raw_BXC)
    if G > 1:
        for record, found in zip(records[1:], (keys.flatten(2), deltas_BGNV, g_BGN), strict=True):
            record.copy_(found)
    else:
        states_SNVK[slots[slots > 0]] = state[slots > 0]
    out_TNV = out_BGNV.flatten(0, 1).to(windows_S3C.dtype)
    return output_gate_reference(out_TNV, projected, C, norm_V, eps).view_as(out_TNV)


def gated_delta_commit_(
    records_L: Records,
    windows_LS3C: torch.Tensor,
    states_LSNVK: torch.Tensor,
    slots_B: torch.Tensor,
    first_positions_B: torch.Tensor,
    start_B: torch.Tensor,
    kept_slots_B2: torch.Tensor | None = None,
    spacing: int = 0,
) -> None:
    """Applies rows 0 .. n - 1 of every request's records, n = start - first position; of blocks of
    one row to the windows alone.

    Where they pass a multiple of `spacing`, what is behind the last one, m, is kept as well, in the
    slot of column m / spacing % 2: the one before it is still there.

    Args:
        records_L: of all layers, a leading L on each tensor.
        first_positions_B: int64, position of the block's first row; stride free.
        start_B: int32, committed tokens now; n outside 0 .. G is cut to it.
        kept_slots_B2: int32; 0: of this request nothing is kept.
    Mutates: windows and states of the slots; those with n = 0 stay as they are, to the bit.
    """
    tensors, where = (windows_LS3C, states_LSNVK, slots_B), (first_positions_B, start_B)
    kept_slots_B2 = slots_B.new_zeros(len(slots_B), 2) if kept_slots_B2 is None else kept_slots_B2
    if not (states_LSNVK.is_cuda or INTERPRET):
        gated_delta_commit_reference_(records_L, *tensors, *where, kept_slots_B2, spacing)
        return
    if not all(x.is_contiguous() for x in (*records_L, *tensors, start_B, kept_slots_B2)):
        raise ValueError("records, windows, states, slots and start must be contiguous")
    (L, S, N, K), (B, G) = states_LSNVK.shape[:4], records_L.shape
    # What is kept first, from the state as it was, and in a launch of its own: in one launch 117
    # registers instead of 70 leave four programs a multiprocessor instead of seven.
    for own in (spacing, 0) if spacing else (0,):
        tile = min(K, COMMIT_ROWS) if G > 1 or own else K
        on_grid(commit_kernel, (L * N * (K // tile), B))(
            *records_L,
            *tensors,
            *where,
            kept_slots_B2,
            first_positions_B.stride(0),
            B,
            S,
            SPACING=own,
            G=G,
            N=N,
            NK=(windows_LS3C.shape[-1] // K - N) // 2,
            K=K,
            BV=tile,
            ROWS=padded_rows(G),
            num_warps=COMMIT_WARPS,
            **pdl_options(states_LSNVK.device),
        )


def gated_delta_commit_reference_(
    records_L: Records,
    windows_LS3C: torch.Tensor,
    states_LSNVK: torch.Tensor,
    slots_B: torch.Tensor,
    first_positions_B: torch.Tensor,
    start_B: torch.Tensor,
    kept_slots_B2: torch.Tensor,
    spacing: int,
) -> None:
    """`gated_delta_commit_` in plain torch."""
    raw, keys, deltas, g = records_L
    (N, V), G = states_LSNVK.shape[2:4], records_L.shape[1]
    counts_B = (start_B - first_positions_B).clamp(0, G)
    for b, (slot, count) in enumerate(zip(slots_B.tolist(), counts_B.tolist(), strict=True)):
        if not count:
            continue
        number = int(start_B[b]) // spacing if spacing else 0
        kept_rows = number * spacing - int(first_positions_B[b])
        kept = int(kept_slots_B2[b, number % 2])
        state = states_LSNVK[:, slot]
        for i in range(count):
            if G > 1:
                key_heads = keys[:, b, i].unflatten(-1, (-1, V))
                k = key_heads.repeat_interleave(N // key_heads.shape[-2], -2)
                state = state * g[:, b, i].exp()[..., None, None]
                state = state + deltas[:, b, i, ..., None] * k[..., None, :]
            if kept and i + 1 == kept_rows:
                states_LSNVK[:, kept] = state
                windows_LS3C[:, kept] = raw[:, b, i + 1 : i + NUM_TAPS]
        states_LSNVK[:, slot] = state
        windows_LS3C[:, slot] = raw[:, b, count : count + NUM_TAPS - 1]
