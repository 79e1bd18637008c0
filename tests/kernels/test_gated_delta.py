"""The recurrence over blocks: against a float64 step-by-step oracle and transformers, and what it
must never read or write.

Under the interpreter the kernels run; else, on a CPU, the references.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graphengine.kernels import gated_delta
from graphengine.kernels.gated_delta import Records, gated_delta_commit_, gated_delta_verify_
from graphengine.kernels.interpreter import INTERPRET

K, EPS = 16, 1e-6
HEADS = [(1, 3), (2, 4)]  # key heads, value heads
# The interpreter cuts bfloat16 off where a GPU rounds it.
HALF = torch.float16 if INTERPRET else torch.bfloat16


class Layer(NamedTuple):
    """Weights of a layer, and a pool of slots in use."""

    conv_C4: Tensor
    a_log_N: Tensor
    dt_bias_N: Tensor
    windows_S3C: Tensor
    states_SNVK: Tensor


def make(
    heads: tuple[int, int], slots: int, device: str, dtype: torch.dtype, seed: int = 0
) -> Layer:
    """Decays from fast to hardly any; states that are not symmetric."""
    nk, n = heads
    torch.manual_seed(seed)
    channels = (2 * nk + n) * K
    layer = Layer(
        torch.randn(channels, 4).to(dtype) * 0.6,
        torch.linspace(1, -6, n),
        torch.randn(n) * 0.5,
        torch.randn(slots, 3, channels).to(dtype),
        torch.randn(slots, n, K, K) * torch.linspace(0.5, 1.5, K),
    )
    return Layer(*(x.to(device) for x in layer))


def project(
    rows: int, heads: tuple[int, int], device: str, dtype: torch.dtype, seed: int
) -> Tensor:
    """In wider rows, whose other columns are NaN."""
    nk, n = heads
    generator = torch.Generator().manual_seed(seed)
    columns = (2 * nk + n) * K + n * K + 2 * n
    x = torch.randn(rows, columns, generator=generator).to(dtype)
    return F.pad(x, (0, 8), value=torch.nan).to(device)[:, :columns]


def empty_records(layers: int, requests: int, block: int, layer: Layer) -> Records:
    n, channels = layer.states_SNVK.shape[1], layer.windows_S3C.shape[-1]
    shape, nan = (layers, requests), float("nan")
    sizes, rows = (((channels - n * K) // 2,), (n, K), (n,)), block if block > 1 else 0
    return Records(
        layer.windows_S3C.new_full((*shape, 3 + block, channels), nan),
        *(layer.states_SNVK.new_full((*shape, rows, *size), nan) for size in sizes),
    )


def oracle(layer: Layer, slot: int, projected: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(outputs of all rows, state and window behind `count` of them), row by row in float64."""
    n = layer.states_SNVK.shape[1]
    channels = layer.windows_S3C.shape[-1]
    nk = (channels // K - n) // 2
    window, state = layer.windows_S3C[slot], layer.states_SNVK[slot].double()
    out, kept = [], (state, window)
    for i, row in enumerate(projected):
        columns = torch.cat([window, row[None, :channels]])
        summed = (columns.double() * layer.conv_C4.double().T).sum(0)
        c = F.silu(summed).to(projected.dtype).double()
        q, k, v = (x.view(-1, K) for x in c.split([nk * K, nk * K, n * K]))
        q = F.normalize(q, dim=-1, eps=0).repeat_interleave(n // nk, 0) * K**-0.5
        k = F.normalize(k, dim=-1, eps=0).repeat_interleave(n // nk, 0)
        b, a = row[-2 * n :].double().chunk(2)
        g = -layer.a_log_N.double().exp() * F.softplus(a + layer.dt_bias_N.double())
        state = state * g.exp()[:, None, None]
        delta = b.sigmoid()[:, None] * (v - torch.einsum("nvk,nk->nv", state, k))
        state = state + torch.einsum("nv,nk->nvk", delta, k)
        out.append(torch.einsum("nvk,nk->nv", state, q))
        window = columns[1:]
        if i + 1 == count:
            kept = state, window
    return torch.stack(out), *kept


def verify(layer: Layer, slots: Tensor, projected: Tensor, records: Records) -> Tensor:
    return gated_delta_verify_(projected, *layer, slots, norm_of(layer), EPS, records)


def gated(out: Tensor, projected: Tensor, layer: Layer) -> Tensor:
    """The oracle's outputs behind their gates."""
    n, channels = layer.states_SNVK.shape[1], layer.windows_S3C.shape[-1]
    z = projected[:, channels : -2 * n].double().view(-1, n, K)
    return F.rms_norm(out, (K,), norm_of(layer).double(), EPS) * F.silu(z)


def norm_of(layer: Layer) -> Tensor:
    return torch.linspace(0.5, 2, K, device=layer.a_log_N.device)


def close(found: Tensor, expected: Tensor, bound: float = 2e-6) -> None:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error <= bound, float(error)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("heads", HEADS)
def test_every_count_of_a_block(
    device: str, heads: tuple[int, int], block: int, dtype: torch.dtype
) -> None:
    """Bug (H03, H04, H07, H08, H23, H24): the state after some count is another row's, the window
    is a column off or holds unrounded values, the query is not scaled, a value head reads with the
    wrong key head, or a verify writes what only a commit may."""
    layer = make(heads, 4, device, dtype)
    slots = torch.tensor([3, 1], dtype=torch.int32, device=device)
    for count in range(block // 2 + 1):  # the other request has the rest of the block
        counts = [count, block - count] if block > 1 else [1, 1]
        projected = project(2 * block, heads, device, dtype, seed=count)
        records = empty_records(1, 2, block, layer)
        before = layer.windows_S3C.clone(), layer.states_SNVK.clone()
        expected = [
            oracle(layer, int(slots[b]), projected[b * block : (b + 1) * block], counts[b])
            for b in range(2)
        ]
        out = verify(layer, slots, projected, Records(*(x[0] for x in records)))
        assert torch.equal(before[0], layer.windows_S3C)
        if block > 1:
            assert torch.equal(before[1], layer.states_SNVK)
        outputs = gated(torch.cat([o for o, _, _ in expected]), projected, layer)
        close(out, outputs, 2e-6 if dtype == torch.float32 else 4e-3)
        first = torch.tensor([[5, 0], [900, 0]], device=device)[:, 0]
        start = (first + torch.tensor(counts, device=device)).int()
        pools = layer.windows_S3C[None], layer.states_SNVK[None]
        gated_delta_commit_(records, *pools, slots, first, start)
        for b, (_, state, window) in enumerate(expected):
            slot = int(slots[b])
            close(layer.states_SNVK[slot], state)
            assert torch.equal(layer.windows_S3C[slot], window)
            if not counts[b]:
                assert torch.equal(layer.states_SNVK[slot], before[1][slot])
        for slot in (0, 2):
            assert torch.equal(layer.states_SNVK[slot], before[1][slot])
            assert torch.equal(layer.windows_S3C[slot], before[0][slot])


@pytest.mark.parametrize("fill", [float("nan"), 1e4])
def test_rejected_rows_leave_no_trace(device: str, fill: float) -> None:
    """Bug (H05, H32): a rejected row's record is multiplied by zero instead of left out, the null
    slot's or a free one's content reaches a live row, or a count outside the block does."""
    heads, block = (1, 2), 4
    for count in (0, 1, block) if INTERPRET else range(block + 1):
        states = []
        for poisoned in (False, True):
            layer = make(heads, 4, device, torch.float32)
            slots = torch.tensor([2, 0], dtype=torch.int32, device=device)
            if poisoned:
                for pool in (layer.windows_S3C, layer.states_SNVK):
                    pool[[0, 1, 3]] = fill
            projected = project(2 * block, heads, device, torch.float32, seed=9)
            records = empty_records(1, 2, block, layer)
            out = verify(layer, slots, projected, Records(*(x[0] for x in records)))
            if poisoned:
                records.raw_BXC[0, 0, 3 + count :] = fill
                for record in records[1:]:
                    record[0, 0, count:] = fill
            first = torch.tensor([7, 0], device=device)
            start = torch.tensor([7 + count, 0], dtype=torch.int32, device=device)
            pools = layer.windows_S3C[None], layer.states_SNVK[None]
            gated_delta_commit_(records, *pools, slots, first, start)
            states.append((layer.states_SNVK[2], layer.windows_S3C[2], out[:block]))
        for clean, dirty in zip(*states, strict=True):
            assert torch.equal(clean, dirty)


def test_a_step_leaves_other_slots_alone(device: str) -> None:
    """Bug: what padding holds reaches a live row's state or output, or padding, of which there may
    be many rows, writes into its slot, each over the others."""
    layer = make((1, 2), 4, device, torch.float32)
    projected = project(3, (1, 2), device, torch.float32, seed=9)
    out, state, window = oracle(layer, 2, projected[:1], 1)
    for pool in (layer.windows_S3C, layer.states_SNVK):
        pool[[1, 3]], pool[0] = float("nan"), 1e4
    slots = torch.tensor([2, 0, 0], dtype=torch.int32, device=device)
    records = empty_records(1, 3, 1, layer)
    found = verify(layer, slots, projected, Records(*(x[0] for x in records)))
    pools = layer.windows_S3C[None], layer.states_SNVK[None]
    start = torch.tensor([8, 0, 0], dtype=torch.int32, device=device)
    gated_delta_commit_(records, *pools, slots, torch.tensor([7, 0, 0], device=device), start)
    out = gated(out, projected[:1], layer)
    for x, expected in ((found[:1], out), (layer.states_SNVK[2], state)):
        close(x, expected)
    assert torch.equal(layer.windows_S3C[2], window)
    for pool in (layer.windows_S3C, layer.states_SNVK):
        assert (pool[0] == 1e4).all()
        assert pool[[1, 3]].isnan().all()


def test_tiles_of_a_step(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: where a program has part of a head, as of many states, its output is another row's, is
    gated by the norm of the part, or the keys' columns are recorded by none or by each."""
    found = []
    for tile in (K, K // 2):
        monkeypatch.setattr(gated_delta, "step_tile", lambda *_, tile=tile: (tile, 1))
        layer = make((2, 4), 3, device, HALF)
        projected = project(2, (2, 4), device, HALF, seed=5)
        one = Records(*(x[0] for x in empty_records(1, 2, 1, layer)))
        slots = torch.tensor([2, 1], dtype=torch.int32, device=device)
        found.append((verify(layer, slots, projected, one), layer.states_SNVK, one.raw_BXC))
    for whole, parts in zip(*found, strict=True):
        # Both rounded before the norm: one that is not is off by a fifth of eps.
        close(whole, parts, torch.finfo(HALF).eps / 10 if whole.dtype == HALF else 1e-6)


def test_tiles_by_states() -> None:
    """Bug: as many states as few are get the tiles of many, or one fewer of many those of few."""
    assert [gated_delta.step_tile(128, n) for n in (1, 64, 65)] == [(128, 8), (128, 8), (32, 1)]
    assert [gated_delta.verify_tile(128, n) for n in (1, 64, 65)] == [(64, 8), (64, 8), (128, 4)]
    assert gated_delta.step_tile(16, 65) == (16, 1) and gated_delta.verify_tile(16, 1) == (16, 8)


def test_a_chain_of_blocks_is_single_steps(device: str) -> None:
    """Bug (H10, H11): each commit loses a little, or replays with other numbers than the verify
    used: after many blocks the state is not that of plain decoding."""
    heads, block, rows = (1, 3), 8, 24 if INTERPRET else 60
    generator = torch.Generator().manual_seed(3)
    tokens = project(rows, heads, device, HALF, seed=4)
    blocks = make(heads, 2, device, HALF)
    single = Layer(*(x.clone() for x in blocks))
    slots = torch.ones(1, dtype=torch.int32, device=device)
    done = 0
    for layer, size in ((blocks, block), (single, 1)):
        done = 0
        while done + size <= rows:
            count = int(torch.randint(1, size + 1, (), generator=generator)) if size > 1 else 1
            records = empty_records(1, 1, size, layer)
            one = Records(*(x[0] for x in records))
            verify(layer, slots, tokens[done : done + size], one)
            first = torch.tensor([done], device=device)
            pools = layer.windows_S3C[None], layer.states_SNVK[None]
            gated_delta_commit_(records, *pools, slots, first, (first + count).int())
            done += count
            if layer is blocks and done + size > rows:
                rows = done  # where the blocks ended
    close(blocks.states_SNVK[1], single.states_SNVK[1], 1e-6)
    assert torch.equal(blocks.windows_S3C[1], single.windows_S3C[1])


@pytest.mark.parametrize("block", [5, 1])
def test_what_is_kept_of_pages(device: str, block: int) -> None:
    """Bug: the state kept behind a page holds rows behind it, is kept where no page ends, goes into
    the slot of the page before it, or changes what the request itself goes on with."""
    heads, spacing = (1, 2), 8
    kept = torch.tensor([[3, 4], [0, 0]], dtype=torch.int32, device=device)
    slots = torch.tensor([1, 2], dtype=torch.int32, device=device)
    counts = (1,) if block == 1 else (1, 5) if INTERPRET else (0, 1, 4, 5)
    for position in (3, 8, 15):
        for count in counts:
            layer = make(heads, 5, device, torch.float32)
            projected = project(2 * block, heads, device, torch.float32, seed=count)
            records = empty_records(1, 2, block, layer)
            before = layer.windows_S3C.clone(), layer.states_SNVK.clone()
            expected = {}
            for b in range(2):
                rows = projected[b * block : (b + 1) * block]
                expected[b + 1] = oracle(layer, b + 1, rows, count)[1:]
                number = (position + count) // spacing
                if b == 0 and number * spacing > position:
                    inside = number * spacing - position
                    expected[3 + number % 2] = oracle(layer, 1, rows, inside)[1:]
            verify(layer, slots, projected, Records(*(x[0] for x in records)))
            for record in records[1:]:
                record[:, :, count:] = float("nan")
            first = torch.tensor([position] * 2, device=device)
            pools = layer.windows_S3C[None], layer.states_SNVK[None]
            gated_delta_commit_(records, *pools, slots, first, (first + count).int(), kept, spacing)
            for slot in range(5):
                state, window = expected.get(slot, (before[1][slot], before[0][slot]))
                close(layer.states_SNVK[slot], state)
                assert torch.equal(layer.windows_S3C[slot], window)


def test_layers_are_committed_apart(device: str) -> None:
    """Bug (H18): one launch for all layers gives a layer another's records or states."""
    heads, block = (2, 4), 3
    layers = [make(heads, 3, device, torch.float32, seed) for seed in range(3)]
    records = empty_records(3, 2, block, layers[0])
    slots = torch.tensor([1, 2], dtype=torch.int32, device=device)
    windows = torch.stack([layer.windows_S3C for layer in layers])
    pools = windows, torch.stack([layer.states_SNVK for layer in layers])
    projected = [project(2 * block, heads, device, torch.float32, seed) for seed in range(3)]
    for i, layer in enumerate(layers):
        verify(layer, slots, projected[i], Records(*(x[i] for x in records)))
    first = torch.tensor([4, 9], device=device)
    counts = torch.tensor([2, 3], device=device)
    gated_delta_commit_(records, *pools, slots, first, (first + counts).int())
    for i, layer in enumerate(layers):
        for b in range(2):
            rows = projected[i][b * block : (b + 1) * block]
            _, state, window = oracle(layer, b + 1, rows, int(counts[b]))
            close(pools[1][i, b + 1], state)
            assert torch.equal(pools[0][i, b + 1], window)


def test_partial_sums_are_rounded_as_the_model_rounds(device: str) -> None:
    """Bug (H07): what is recorded and used is the unrounded sum, so that a replay, or another
    split of the GEMM, is another state."""
    heads, block = (1, 2), 4
    layer = make(heads, 2, device, HALF)
    slots = torch.ones(1, dtype=torch.int32, device=device)
    parts = torch.stack([project(block, heads, device, torch.float32, seed) for seed in range(3)])
    outs = []
    for projected in (parts, parts.sum(0).to(HALF)):
        records = empty_records(1, 1, block, layer)
        one = Records(*(x[0] for x in records))
        outs.append((verify(layer, slots, projected, one), *one))
    for a, b in zip(*outs, strict=True):
        assert torch.equal(a, b)


def test_a_head_that_forgets_slowly(device: str) -> None:
    """Bug: a small e^x is cut off beside 1, so such a head forgets in steps of 1e-7, or never."""
    block = 4
    layer = make((1, 2), 2, device, torch.float32)
    projected = project(block, (1, 2), device, torch.float32, seed=1)
    projected[:, -2:] = torch.linspace(-18, -6, 2 * block).view(block, 2)
    one = Records(*(x[0] for x in empty_records(1, 1, block, layer)))
    verify(layer, torch.ones(1, dtype=torch.int32, device=device), projected, one)
    a = projected[:, -2:].double() + layer.dt_bias_N.double()
    expected = -layer.a_log_N.double().exp() * F.softplus(a)
    torch.testing.assert_close(one.g_BGN[0].double(), expected, rtol=1e-5, atol=0)


def test_transformers_rule(device: str) -> None:
    """Bug: the rule is ours alone: oracle and kernel agree, and transformers' differs."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    heads, block = (1, 2), 6
    layer = make(heads, 2, device, torch.float32)
    projected = project(block, heads, device, torch.float32, seed=2)
    records = empty_records(1, 1, block, layer)
    one = Records(*(x[0] for x in records))
    slots = torch.ones(1, dtype=torch.int32, device=device)
    out = verify(layer, slots, projected, one)
    inputs = gated_delta.take_apart(
        projected, layer.a_log_N, layer.dt_bias_N, layer.windows_S3C.shape[-1], torch.float32
    )
    columns = torch.cat([layer.windows_S3C[1], inputs.columns_TC])
    q, k, v = gated_delta.convolve(columns, layer.conv_C4).split([K, K, 2 * K], -1)
    q, k = (x.view(1, block, 1, K).repeat_interleave(2, 2) for x in (q, k))
    expected, _ = theirs.torch_recurrent_gated_delta_rule(
        q,
        k,
        v.view(1, block, 2, K),
        g=inputs.g_TN[None],
        beta=inputs.beta_TN[None],
        initial_state=layer.states_SNVK[1:].mT,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    gate = theirs.Qwen3_5RMSNormGated(K, EPS).to(device)
    gate.weight.data = norm_of(layer)
    z = projected[:, layer.windows_S3C.shape[-1] : -4].view(block, 2, K)
    close(out, gate(expected[0], z))


def test_refusals(device: str) -> None:
    """Bug: columns in another order, or a state of another layout, are taken for these."""
    layer = make((1, 2), 2, device, torch.float32)
    records = Records(*(x[0] for x in empty_records(1, 1, 2, layer)))
    slots = torch.ones(1, dtype=torch.int32, device=device)
    projected = project(2, (1, 2), device, torch.float32, 0)
    with pytest.raises(ValueError, match="need 2 rows of 100 columns"):
        verify(layer, slots, projected[:, :-1], records)
    wrong = layer._replace(states_SNVK=layer.states_SNVK.double())
    with pytest.raises(ValueError, match="need float32"):
        verify(wrong, slots, projected, records)
    with pytest.raises(ValueError, match="use one"):
        verify(layer, slots, projected.half(), records)
    if device != "cpu" or INTERPRET:
        with pytest.raises(ValueError, match="projected in its last dim"):
            verify(layer, slots, projected.repeat_interleave(2, 1)[:, ::2], records)
