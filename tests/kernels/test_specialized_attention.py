"""specialized_attention against torch's scaled_dot_product_attention over gathered keys."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from graphengine.kernels import block_attention as attention
from graphengine.kernels.block_attention import block_attention, choose_num_splits, workspace
from graphengine.kernels.qk_norm_rope import qk_norm_rope_write_
from graphengine.kernels.specialized_attention import SpecializedConfig, launch
from graphengine.kernels.specialized_attention_kernels import share_of
from tests.kernels.test_block_attention import TOLERANCE, make, run, sdpa
from tests.kernels.test_block_attention_on_gpu import check_replays, check_streams

# Of 64 packed rows, of 44, of two row tiles whose second is half empty, of narrow blocks.
SHAPES = [(32, 8, 16, 128), (32, 8, 11, 16), (24, 4, 16, 64), (64, 8, 7, 32)]
H = 128


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 4, 300])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("N", "K", "G", "S"), SHAPES)
def test_matches_sdpa(N, K, G, S, causal, window) -> None:
    """Bug: a tile taken from its neighbour's slot, a consumer without tiles that is not neutral, a
    key of the block read before it is written, NaN from stale memory, a head of another group."""
    for num_splits, starts in (
        (1, [1, 0, 63, 64, 400, 1500]),
        (16, [48]),
        (16, [3000]),
        (3, [1000, 0, 513, 2047]),
    ):
        W = (max(starts) + G) // S + 2
        made = make("cuda", torch.bfloat16, starts, G, N, K, H, S, W)
        expected = sdpa(*made, G, causal, window)
        for changes in ({}, {"split_keys": 64}, {"split_keys": 64, "polls": 0}):
            config = SpecializedConfig()._replace(**changes)
            found = run(*made, G, causal, num_splits, config, window=window)
            torch.testing.assert_close(found.double(), expected, **TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_one_capture_serves_every_length(causal) -> None:
    """Bug: something of the length baked into the captured graph; arrivals of one replay counted
    in the next."""
    G, N, K, S, W = 16, 32, 8, 128, 33
    made = make("cuda", torch.bfloat16, [4000], G, N, K, H, S, W)
    lengths = (1, 47, 48, 49, 240, 241, 500, 1000, 1008, 1009, 2047, 3999, 30)
    check_replays(made, G, causal, 16, lengths)


@pytest.mark.gpu
def test_keys_that_the_kernel_in_front_writes() -> None:
    """Bug: a tile with the block's own keys is asked for before the rotation, which may still run
    when this kernel begins, has written them; the keys of the replay before are attended to."""
    G, N, K, S, W, LAYERS = 16, 32, 8, 128, 8, 6
    made = make("cuda", torch.bfloat16, [700], G, N, K, H, S, W)
    table, start = made[2], made[3]
    caches = [made[1].clone() for _ in range(LAYERS)]
    qkv = torch.zeros(G, (N + 2 * K) * H, device="cuda", dtype=torch.bfloat16)
    ones = torch.ones(H, device="cuda", dtype=torch.bfloat16)
    rope = torch.cat([torch.ones(G, H // 2), torch.zeros(G, H // 2)], 1).cuda()  # turns nothing
    rows = torch.arange(G, device="cuda")
    slots = table[0, (700 + rows) // S].long() * S + (700 + rows) % S
    buffers = workspace(1, G, N, H, choose_num_splits(1, K, 132), "cuda")
    outs = [torch.empty(G, N, H, device="cuda", dtype=torch.bfloat16) for _ in caches]
    weights = torch.eye(qkv.shape[1], device="cuda", dtype=torch.bfloat16)

    def step() -> list[torch.Tensor]:
        queries = []
        for cache, out in zip(caches, outs, strict=True):
            projected = qkv @ weights  # an ordinary launch in front, as a GEMM in a step
            q = qk_norm_rope_write_(projected, ones, ones, rope, rows, slots, cache, 1e-6)
            block_attention(q, cache, table, start, G, True, out, buffers)
            queries.append(q)
        return queries

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        queries = step()
    for _ in range(20):
        qkv.normal_()
        graph.replay()
        for q, cache, out in zip(queries, caches, outs, strict=True):
            expected = sdpa(q, cache, table, start, G, True)
            torch.testing.assert_close(out.double(), expected, **TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
def test_two_streams_at_once() -> None:
    """Bug: splits that wait for splits which cannot start, when other grids hold the
    multiprocessors, and do not give up."""
    G, N, K, S, W = 16, 32, 8, 128, 65
    made = make("cuda", torch.bfloat16, [8000], G, N, K, H, S, W)
    check_streams(made, G, 16, SpecializedConfig())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"G": 11}, True),
        ({"num_splits": 4}, False),  # programs are many
        ({"G": 1}, False),
        ({"G": 17}, False),
        ({"G": 4}, False),
        ({"G": 5}, True),
        ({"head_dim": 64}, False),
        ({"S": 256}, False),
        ({"dtype": torch.float16}, False),
        ({"padded": -1}, False),  # a prompt's: its other blocks' keys are written in front
        ({"gate": True}, False),
        ({"offset": 4}, False),  # TMA begins at 16 bytes
        ({"N": 48, "G": 10}, False),  # 60 packed rows are a tile there and two here
        ({"capability": (10, 0)}, False),
    ],
)
def test_who_is_attended_so(changes, expected, monkeypatch) -> None:
    """Bug: what the kernel cannot do, or does slower, is given to it."""
    has: dict[str, Any] = {"G": 16, "N": 32, "S": 128, "head_dim": H, "num_splits": 16}
    has |= {
        "dtype": torch.bfloat16,
        "padded": 0,
        "gate": False,
        "capability": (9, 0),
        "offset": 0,
    } | changes
    called = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: has["capability"])
    monkeypatch.setattr(attention, "launch", lambda *arguments: called.append("specialised"))

    def on_grid(kernel: Any, grid: Any) -> Any:
        return lambda *arguments, **options: called.append("other")

    monkeypatch.setattr(attention, "on_grid", on_grid)
    monkeypatch.setattr(attention, "_smem_bytes", lambda device: attention.HOPPER_SMEM_BYTES)
    monkeypatch.setattr(attention, "supports_pdl", lambda device: True)
    G, N, K = has["G"], has["N"], 8
    with FakeTensorMode():
        size = (G, N, has["head_dim"])
        q = torch.empty(2 * math.prod(size), dtype=has["dtype"], device="cuda")
        q = q.narrow(0, has["offset"], math.prod(size)).view(size)
        planes = torch.empty(2, 9, has["S"], K, has["head_dim"], dtype=has["dtype"], device="cuda")
        monkeypatch.setattr(FakeTensor, "__getitem__", lambda self, i: self.select(0, i))
        table = torch.empty(1, 9, dtype=torch.int32, device="cuda")
        start = torch.empty(1, dtype=torch.int32, device="cuda")
        gate = torch.empty(G, N * has["head_dim"], dtype=has["dtype"], device="cuda")
        buffers = workspace(1, G, N, has["head_dim"], has["num_splits"], "cuda")
        rest = {"padded": has["padded"], "gate_TE": gate if has["gate"] else None}
        made = q, planes, table, start, G, True, torch.empty_like(q), buffers
        block_attention(*made, **rest)
        assert called == ["specialised" if expected else "other"]
        if not expected and has["num_splits"] > 4:
            with pytest.raises(ValueError, match="use a LaunchConfig"):
                block_attention(*made, SpecializedConfig(), **rest)


@given(
    start=st.integers(-1, 700),
    max_kv=st.sampled_from([128, 640, 100_000]),
    G=st.integers(5, 16),
    split_tiles=st.integers(1, 5),
    num_splits=st.integers(1, 7),
    is_causal=st.booleans(),
    window=st.sampled_from([0, 1, 4, 70, 300]),
)
@example(48, 640, 16, 1, 1, False, 4)  # a narrow window ends in front of the block's last key
def test_every_tile_is_one_split_s(
    start, max_kv, G, split_tiles, num_splits, is_causal, window
) -> None:
    """Bug: a tile that a row sees is nobody's, or two splits'; a split that others wait for has
    none; the last one has more than another; in a tile that is not masked stands a key that its
    first row does not see."""
    TILE, shape = 64, (G, 64, split_tiles, num_splits, is_causal, window)
    position = start + torch.arange(G)[:, None]
    key = torch.arange(min(start + G, max_kv) if start > 0 else 0)[None]
    seen = (key <= position) if is_causal else torch.ones(G, key.shape[1], dtype=torch.bool)
    if window:
        seen &= (key - position).abs() < window
    kv_len, live, *_ = share_of.fn(start, max_kv, 0, *shape)
    assert kv_len == key.shape[1]
    dealt, counts = [], []
    for split in range(live):
        _, _, first, count, num_unmasked = share_of.fn(start, max_kv, split, *shape)
        counts.append(count)
        assert count > 0 or not seen.any()
        dealt += range(first, first + count)
        for tile in range(first, min(first + count, num_unmasked)):
            reach = key[:, : (tile + 1) * TILE][:, tile * TILE :]
            assert seen[:, reach[0]].all() or (window and (reach < position + window).all())
    assert dealt == sorted(set(dealt)) and counts[-1] == min(counts)
    assert set(dealt) >= {n // TILE for n in seen.any(0).nonzero().flatten().tolist()}


def test_a_launch_is_of_whole_tiles() -> None:
    """Bug: a split of half a tile is none at all: 0 tiles, a division by zero on the device."""
    none, config = torch.empty(0), SpecializedConfig(split_keys=32)
    with pytest.raises(ValueError, match="split_keys 32"):
        launch(none, none, none, none, 16, True, none, (none, none, none), config, None)
