"""The recurrence of a Gated-DeltaNet layer over prompts, in chunks of rows instead of one by one.

With G the running sum of g in a chunk and D_ij = exp(G_i - G_j) for j <= i, from state S0:

    A = strictly lower part of beta_i (k_i . k_j) D_ij
    U = (I + A)^-1 beta (v - exp(G) S0 k)
    O = exp(G) S0 q + ((q k^T) * D) U
    S = exp(G_last) S0 + sum_j exp(G_last - G_j) u_j k_j^T

which is what gated_delta.py has row by row, in seven products of matrices and one triangular
solve. Chunks are counted from a piece's beginning.

Invariant: a piece that begins a prompt (start 0) begins from zero, whatever its slot holds.

Legend as in gated_delta.py; R pieces.
Source: Gated Delta Networks (arXiv 2412.06464), section 3.3; equal to transformers'
torch_chunk_gated_delta_rule (tests).
"""

from typing import NamedTuple

import torch

from graphengine.kernels.gated_delta import NUM_TAPS, check_shapes, convolve, heads_of, take_apart
from graphengine.kernels.gated_delta_prefill_kernels import (
    convolve_kernel,
    prepare_kernel,
    scan_kernel,
)
from graphengine.kernels.gated_delta_prepare_kernels import delta_prepare_kernel
from graphengine.kernels.gated_delta_scan_kernels import STATE_ROWS, delta_scan_kernel
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import on_grid, on_hopper, pdl_options

CHUNK = 32  # 64 took 1.5 times as long on an H200: what a chunk solves goes by its cube
CONVOLVED_ROWS, CONVOLVED_COLUMNS = 8, 512  # of a program; of few rows half as many columns
SCANNED_ROWS = 16  # of a state in a program: as many as a product has rows at least
FEW_ROWS = 256  # whose chunks leave multiprocessors idle: two warps prepare one


class Pieces(NamedTuple):
    """Runs of prompts' rows, int32, in their order; one that ends where it begins is none.

    A piece also keeps the state and window behind its first `keep_R` rows, a multiple of CHUNK, in
    the slot `kept_slot_R`; 0: none.
    """

    begin_R: torch.Tensor  # rows of T
    end_R: torch.Tensor
    start_R: torch.Tensor  # position of the first row
    slot_R: torch.Tensor
    keep_R: torch.Tensor
    kept_slot_R: torch.Tensor


def gated_delta_prefill_(
    projected: torch.Tensor,
    conv_C4: torch.Tensor,
    a_log_N: torch.Tensor,
    dt_bias_N: torch.Tensor,
    windows_S3C: torch.Tensor,
    states_SNVK: torch.Tensor,
    pieces: Pieces,
    out_TNV: torch.Tensor,
) -> None:
    """Outputs of every piece's rows, and its slot's window and state behind them.

    Three launches whatever the pieces are, so that a graph can hold them: the convolution; what
    every chunk leaves for the scan, and the windows behind the pieces; the scan of the chunks.

    Args: as for `gated_delta_verify_`; rows of no piece are left alone. No two pieces share a slot,
        nor does one that is kept.
    Mutates: out_TNV, windows and states of the pieces' slots.
    """
    (T, N, K), C = out_TNV.shape, windows_S3C.shape[-1]
    num_splits = projected.shape[0] if projected.dim() == 3 else 1
    check_shapes(projected, windows_S3C, states_SNVK, out_TNV, T)
    weights, pools = (conv_C4, a_log_N, dt_bias_N), (windows_S3C, states_SNVK)
    if not (projected.is_cuda or INTERPRET):
        gated_delta_prefill_reference_(projected, *weights, *pools, pieces, out_TNV)
        return
    if not all(x.is_contiguous() for x in (*weights, *pools, *pieces, out_TNV)):
        raise ValueError("weights, windows, states, pieces and out must be contiguous")
    R = len(pieces.begin_R)
    convolved_TC = windows_S3C.new_empty(T, C)
    # Of a head's chunk: what solves its updates (16 bits and their rest), what its outputs see of
    # them; factors of known values, of late updates, of queries and of the state.
    num_blocks = T // CHUNK + R
    tiles_XN3 = out_TNV.new_empty(num_blocks, N, 3, CHUNK, CHUNK)
    factors_XN4 = states_SNVK.new_empty(num_blocks, N, 4, CHUNK)
    chunked = convolved_TC, tiles_XN3, factors_XN4
    strides = projected.stride(-2), projected.stride(0) if num_splits > 1 else 0
    pdl = pdl_options(projected.device)
    common = {"Z": num_splits, **pdl}
    shape = {"N": N, "NK": (C // K - N) // 2, "K": K, "CHUNK": CHUNK}
    columns = min(C & -C, CONVOLVED_COLUMNS // (1 + (T <= FEW_ROWS)))
    on_grid(convolve_kernel, ((T + CONVOLVED_ROWS - 1) // CONVOLVED_ROWS, C // columns, R))(
        *(projected, conv_C4, windows_S3C, *pieces[:4], convolved_TC, *strides),
        C=C,
        ROWS=CONVOLVED_ROWS,
        COLUMNS=columns,
        num_warps=4,
        **common,
    )
    # The kernels for Hopper take 16 bits and heads of 128.
    is_hopper = on_hopper(out_TNV) and out_TNV.element_size() == 2 and K == 128
    prepare = delta_prepare_kernel if is_hopper else prepare_kernel
    on_grid(prepare, ((T + CHUNK - 1) // CHUNK + 1, N, R))(
        *(projected, a_log_N, dt_bias_N, windows_S3C, *pieces, *chunked, *strides, K**-0.5),
        **shape,
        num_warps=1 if is_hopper and T > FEW_ROWS else 2,
        **common,
    )
    scanned = states_SNVK, *pieces, *chunked, out_TNV
    if is_hopper:
        grid = N * (K // STATE_ROWS.value), R
        on_grid(delta_scan_kernel, grid)(*scanned, **shape, num_warps=4, **pdl)
        return
    tile = min(K, SCANNED_ROWS)
    on_grid(scan_kernel, (N * (K // tile), R))(
        *scanned,
        **shape,
        BV=tile,
        num_warps=4,
        num_stages=2,
        **pdl,
    )


def gated_delta_prefill_reference_(
    projected: torch.Tensor,
    conv_C4: torch.Tensor,
    a_log_N: torch.Tensor,
    dt_bias_N: torch.Tensor,
    windows_S3C: torch.Tensor,
    states_SNVK: torch.Tensor,
    pieces: Pieces,
    out_TNV: torch.Tensor,
) -> None:
    """`gated_delta_prefill_` in plain torch."""
    (N, V), C = out_TNV.shape[1:], windows_S3C.shape[-1]
    keys = (C - N * V) // 2
    inputs = take_apart(projected, a_log_N, dt_bias_N, C, windows_S3C.dtype)
    columns_of = zip(*(part.tolist() for part in pieces), strict=True)
    for begin, end, start, slot, keep, kept_slot in columns_of:
        if end <= begin:
            continue
        columns, g, beta = (part[begin:end] for part in inputs)
        window, state = windows_S3C[slot], states_SNVK[slot]
        if not start:
            window, state = torch.zeros_like(window), torch.zeros_like(state)
        columns = torch.cat([window, columns])
        q, k, v = convolve(columns, conv_C4).split([keys, keys, N * V], -1)
        q, k, v = heads_of(q, N, V) * V**-0.5, heads_of(k, N, V), heads_of(v, N, V, False)
        parts = (x.split(CHUNK) for x in (q, k, v, g, beta))
        found = []
        for i, chunk in enumerate(zip(*parts, strict=True), 1):
            out, state = _chunk(state, *(x.transpose(0, 1) for x in chunk))
            found.append(out.transpose(0, 1))
            if i * CHUNK == keep:
                states_SNVK[kept_slot] = state
                windows_S3C[kept_slot] = columns[keep : keep + NUM_TAPS - 1]
        out_TNV[begin:end] = torch.cat(found).to(out_TNV.dtype)
        windows_S3C[slot] = columns[1 - NUM_TAPS :]
        states_SNVK[slot] = state


def _chunk(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [N, n, V] and the state behind a chunk; q, k, v [N, n, K], g and beta [N, n]."""
    total = g.cumsum(-1)
    order = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).tril()
    decay = torch.where(order, total[:, :, None] - total[:, None, :], -torch.inf).exp()
    fading = total.exp()[..., None]
    behind = (beta[..., None] * (k @ k.mT) * decay).tril(-1)
    wanted = beta[..., None] * (v - fading * (k @ state.mT))
    update = torch.linalg.solve_triangular(behind, wanted, upper=False, unitriangular=True)
    out = fading * (q @ state.mT) + ((q @ k.mT) * decay) @ update
    left = (total[:, -1:] - total).exp()[..., None]
    return out, fading[:, -1:] * state + (left * update).mT @ k
