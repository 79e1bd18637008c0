"""The GEMMs of a chunk, with SwiGLU and without, against torch's own products."""

import pytest
import torch
import torch.nn.functional as F

from graphengine.kernels import chunk_linear as module
from graphengine.kernels.chunk_linear import (
    LARGE,
    SMALL,
    WIDE,
    Tiles,
    chunk_linear,
    chunk_swiglu,
    pays,
    tiles_of,
)

BF16 = torch.bfloat16
# Rows short of a tile, one tile's, one behind; weight rows short of a tile; inputs short of a
# block; more tiles than multiprocessors, so that a CTA takes several; blocks fewer than stages.
SHAPES = [
    (1, 256, 64),
    (128, 256, 40),
    (129, 272, 136),
    (200, 48, 1000),
    (1024, 6144, 512),
    pytest.param(2048, 19456, 192, marks=pytest.mark.slow),
    (100, 4352, 200),  # wide tiles, and weight rows short of one
    (128, 34800, 512),
    (100, 36096, 64),  # more of them than multiprocessors
]
KINDS = pytest.mark.parametrize("tiles", [SMALL, LARGE], ids=["small", "large"])


def draw(device, T: int, J: int, D: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x whose rows stand in wider ones, and a weight."""
    x = torch.randn(T, D + 8, device=device).to(BF16)[:, :D]
    return x, (torch.randn(J, D, device=device) * D**-0.5).to(BF16)


@pytest.mark.parametrize(("T", "J", "D"), SHAPES)
def test_it_is_silu_of_the_gate_times_up(device, T, J, D) -> None:
    """Bug: a gate meets another's up or a large one overflows; a tile is left out or done twice;
    rows, outputs or inputs past the end are summed or written."""
    x, weight = draw(device, T, J, D)
    weight[0] *= 100  # a gate of some hundred
    gate, up = (x.float() @ weight.float().T).chunk(2, dim=-1)
    out = chunk_swiglu(x, weight)
    assert out.shape == (T, J // 2)
    assert out.is_contiguous()
    # One rounding of bf16, and of sums in another order.
    torch.testing.assert_close(out.float(), F.silu(gate) * up, rtol=5e-3, atol=2e-3)


@pytest.mark.parametrize(("T", "J", "D"), SHAPES)
def test_it_has_the_bits_of_a_linear(device, T, J, D) -> None:
    """Bug: half of a tile's rows are written where the other half stands, or before they left."""
    x, weight = draw(device, T, J, D)
    out = chunk_linear(x, weight)
    assert out.is_contiguous()
    torch.testing.assert_close(out.float(), x.float() @ weight.float().T, rtol=5e-3, atol=2e-3)
    if T >= 1024:  # cuBLAS splits sums of fewer rows
        assert torch.equal(out, torch.nn.functional.linear(x, weight))


@pytest.mark.gpu
def test_kinds_of_tiles_have_the_same_bits(monkeypatch) -> None:
    """Bug: what a prompt says depends on the length of its last chunk, for which other tiles are
    through first."""
    x, weight = draw("cuda", 1024, 6144, 1000)
    results = []
    for tiles in (SMALL, LARGE, WIDE):
        take(tiles, monkeypatch)
        results.append(chunk_swiglu(x[:128] if tiles is WIDE else x, weight))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0][:128], results[2])


def take(tiles: Tiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "tiles_of", lambda *shape: tiles)


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize(("T", "J", "D"), SHAPES)
def test_both_kinds_of_tiles(T, J, D, tiles, monkeypatch) -> None:
    """Bug: tiles that these shapes do not take are wrong: a consumer stores where another does, or
    a slot is filled before the slowest is done with it."""
    take(tiles, monkeypatch)
    test_it_is_silu_of_the_gate_times_up("cuda", T, J, D)


@pytest.mark.gpu
@KINDS
def test_a_row_does_not_depend_on_the_others(tiles, monkeypatch) -> None:
    """Bug: a row is summed in another order in a longer chunk, so that what a prompt says depends
    on how it is cut."""
    take(tiles, monkeypatch)
    x, weight = draw("cuda", 2048, 4096, 4096)
    for op in (chunk_swiglu, chunk_linear):
        assert torch.equal(op(x, weight)[:1100], op(x[:1100], weight))


@pytest.mark.gpu
@pytest.mark.parametrize("op", [chunk_swiglu, chunk_linear], ids=["swiglu", "linear"])
@pytest.mark.parametrize("tiles", [SMALL, LARGE, WIDE], ids=["small", "large", "wide"])
def test_it_follows_what_was_launched_before(tiles, op, monkeypatch) -> None:
    """Bug: launched before its predecessor's end it reads x too early, or writes its results while
    that still reads what stood there."""
    take(tiles, monkeypatch)
    T = 128 if tiles is WIDE else 2048
    x, weight = draw("cuda", T, 4096 if op is chunk_swiglu else 2048, 2048)
    weight *= 2
    expected = x
    for _ in range(4):
        expected = op(expected, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = x
        for _ in range(4):
            out = op(out, weight)
    for _ in range(20):
        graph.replay()
        assert torch.equal(out, expected)
    assert out.isfinite().all()


def test_when_it_pays() -> None:
    """Bug: a chunk takes it whose last round leaves most multiprocessors idle, or a short one."""
    assert pays(1024, 24576, 4096, 132, swiglu=True)
    assert pays(2048, 4096, 4096, 132, swiglu=True)  # 256 small tiles in two rounds
    assert not pays(2048, 2560, 4096, 132, swiglu=True)  # 160 in two
    assert not pays(512, 24576, 4096, 132, swiglu=True)
    assert pays(1024, 6144, 4096, 132, swiglu=False)  # 128 large ones in one
    assert not pays(2048, 4096, 4096, 132, swiglu=False)  # 176 in two
    assert not pays(512, 12288, 4096, 132, swiglu=False)
    assert pays(128, 34816, 5120, 132, swiglu=True)  # 128 wide ones in one
    assert not pays(128, 36096, 5120, 132, swiglu=True)  # 133
    assert not pays(128, 24576, 4096, 132, swiglu=True)  # 91
    assert not pays(64, 34816, 5120, 132, swiglu=True)
    assert not pays(129, 34816, 5120, 132, swiglu=True)


def test_tiles_that_are_through_first() -> None:
    """Bug: a shape takes tiles whose last round is nearly empty, as 4B's large ones are, or large
    ones stay unused where both kinds are through at once, or nearly so in long sums."""
    assert tiles_of(2048, 24576, 2560, 132) is LARGE  # 8 rounds of 3 to 12 of 2
    assert tiles_of(2048, 18432, 2560, 132) is LARGE  # 6 and 9
    assert tiles_of(1024, 19456, 2560, 132) is SMALL  # 4 and 5
    assert tiles_of(2048, 19456, 2560, 132) is SMALL  # 7 and 10
    assert tiles_of(2048, 34816, 5120, 132) is LARGE  # 12 and 17
    assert tiles_of(2048, 34816, 4096, 132) is LARGE
    assert tiles_of(2048, 34816, 4088, 132) is SMALL  # shorter sums
    assert tiles_of(2048, 28672, 4096, 132) is SMALL  # 10 and 14
    assert tiles_of(128, 34816, 5120, 132) is WIDE
    assert tiles_of(128, 34816, 5120, 114) is SMALL  # a wide one for each of 128 there are not
    for T, J, num_sms in ((1024, 17408, 132), (2048, 28672, 114), (4096, 12288, 132)):
        taken = tiles_of(T, J, 2560, num_sms).cost(T, J, num_sms)
        assert T * J / num_sms <= taken == min(k.cost(T, J, num_sms) for k in (SMALL, LARGE))


def test_refusals(device) -> None:
    """Bug: rows of another width are read past their end, or a gate has no up."""
    x, weight = draw(device, 8, 32, 64)
    for wrong in ((x[:, :56], weight), (x, weight[:31]), (x[0], weight)):
        with pytest.raises(ValueError, match=r"need \[T, D\]"):
            chunk_swiglu(*wrong)
    with pytest.raises(ValueError, match=r"need \[T, D\]"):
        chunk_linear(x[:, :56], weight)


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["dtype", "stride", "gates"])
def test_refusals_of_the_kernel(what) -> None:
    """Bug: what TMA cannot address ends in a fault of the device."""
    x, weight = draw("cuda", 8, 40 if what == "gates" else 32, 64)
    if what == "dtype":
        x, weight = x.half(), weight.half()
    if what == "stride":
        x = torch.zeros(8, 66, device="cuda", dtype=BF16)[:, :64]
    with pytest.raises(ValueError, match="needs bf16" if what == "dtype" else "TMA needs rows"):
        chunk_swiglu(x, weight)
