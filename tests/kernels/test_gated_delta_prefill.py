"""The recurrence over prompts: chunks are steps, whatever the pieces."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from graphengine.kernels.gated_delta_kernels import inverse_of
from graphengine.kernels.gated_delta_prefill import CHUNK, FEW_ROWS, Pieces, gated_delta_prefill_
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import on_grid
from tests.kernels import test_gated_delta
from tests.kernels.test_gated_delta import HALF, Layer, close, make, oracle, project

HEADS = (1, 2)
# Of a chunk's border; interpreted, each costs a second or more.
LENGTHS = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5]


def run(layer: Layer, projected: Tensor, pieces: list[tuple[int, ...]]) -> Tensor:
    """Args: pieces: (begin, end, position of the first row, slot, rows to keep, their slot)."""
    pieces = [(*piece, 0, 0)[:6] for piece in pieces]
    shape = projected.shape[-2], *layer.states_SNVK.shape[1:3]
    device = projected.device
    out = layer.windows_S3C.new_full(shape, float("nan"))
    columns = torch.tensor(pieces, dtype=torch.int32, device=device).T.contiguous()
    gated_delta_prefill_(projected, *layer, Pieces(*columns), out)
    return out


def fresh(layer: Layer) -> Layer:
    """What a prompt begins with."""
    zeros = (torch.zeros_like(x) for x in layer[3:])
    return Layer(*layer[:3], *zeros)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_one_piece(device: str, dtype: torch.dtype, length: int) -> None:
    """Bug: a chunk's last rows, the solve or what fades between two chunks is wrong; a prompt
    begins with what its slot held before (H19)."""
    if INTERPRET and dtype == HALF and length not in (1, CHUNK + 1):
        pytest.skip("interpreted, the others take long")
    layer = make(HEADS, 3, device, dtype)
    for pool in (layer.windows_S3C, layer.states_SNVK):
        pool[2] = float("nan")
    projected = project(length, HEADS, device, dtype, seed=length)
    out = run(layer, projected, [(0, length, 0, 2)])
    expected, state, window = oracle(fresh(layer), 2, projected, length)
    close(out, expected, 3e-6 if dtype == torch.float32 else 4e-3)
    close(layer.states_SNVK[2], state, 4e-6 if dtype == torch.float32 else 2e-5)
    assert torch.equal(layer.windows_S3C[2], window)


def test_channels_of_no_whole_program(device: str) -> None:
    """Bug: of channels that are no multiple of what a program convolves the last ones are left out:
    their head's values are what the memory held before."""
    heads, length = (1, 15), 5
    layer = make(heads, 2, device, torch.float32)
    projected = project(length, heads, device, torch.float32, seed=2)
    out = run(layer, projected, [(0, length, 30, 1)])
    expected, state, _ = oracle(make(heads, 2, device, torch.float32), 1, projected, length)
    close(out, expected, 3e-6)
    close(layer.states_SNVK[1], state, 4e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(2008, 200, 1, 33), (70, 24, 1, 33)], ids=["many", "few"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_heads_as_published(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, lengths: tuple[int, ...]
) -> None:
    """Bug: another stage of the ring, tile of a state or key head is read, rows of the next piece
    are, or nothing is kept; a thread's row of the inverse is another's, or another warp's."""
    monkeypatch.setattr(test_gated_delta, "K", 128)
    assert (sum(lengths) <= FEW_ROWS) == (lengths[0] < FEW_ROWS)
    heads, keep = (2, 6), min(3, lengths[0] // CHUNK) * CHUNK
    layer = make(heads, 9, "cuda", dtype)
    projected = project(sum(lengths), heads, "cuda", dtype, seed=5)
    begin, pieces = 0, list[tuple[int, ...]]()
    for slot, length in enumerate(lengths, 1):
        kept = (keep, slot + 4) if length > keep else (0, 0)
        pieces.append((begin, begin + length, slot == 2, slot, *kept))
        begin += length
    before = Layer(*(x.clone() for x in layer))
    out = run(layer, projected, pieces)
    for begin, end, position, slot, rows, kept in pieces:
        own = before if position else fresh(before)
        for count, place in ((end - begin, slot), (rows, kept)):
            if count:
                expected, state, window = oracle(own, slot, projected[begin:end], count)
                close(out[begin:end], expected, 3e-6 if dtype == torch.float32 else 4e-3)
                close(layer.states_SNVK[place], state, 2e-5)
                assert torch.equal(layer.windows_S3C[place], window)


def test_pieces_of_a_prompt_are_the_whole(device: str) -> None:
    """Bug (H08): a piece begins with a stale window, a short one loses columns of the window
    before, or a position that is not 0 begins from zero."""
    length = CHUNK + 9
    projected = project(length, HEADS, device, torch.float32, seed=1)
    whole = make(HEADS, 2, device, torch.float32)
    expected = run(whole, projected, [(0, length, 0, 1)])
    for cuts in ([1, 2, 3], [CHUNK], [5, CHUNK + 6]):
        layer = make(HEADS, 2, device, torch.float32)
        ends, outs = [*cuts, length], []
        for begin, end in zip([0, *cuts], ends, strict=True):
            rows = projected[begin:end]
            outs.append(run(layer, rows, [(0, end - begin, begin, 1)]))
        close(torch.cat(outs), expected, 3e-6)
        close(layer.states_SNVK[1], whole.states_SNVK[1])
        assert torch.equal(layer.windows_S3C[1], whole.windows_S3C[1])


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "width"),
    [(torch.float32, test_gated_delta.K), pytest.param(HALF, 128, marks=pytest.mark.gpu)],
)
def test_windows_of_short_pieces(
    device: str, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int, length: int
) -> None:
    """Bug: what a short piece keeps of its window is written in place by one warp before another
    has read it: on an H100 most runs lost columns, and the text behind a hit was another."""
    monkeypatch.setattr(test_gated_delta, "K", width)
    num_pieces, repeats = (16, 50) if device == "cuda" else (2, 1)
    pieces = [(i * length, (i + 1) * length, 40, i + 1) for i in range(num_pieces)]
    layer = make(HEADS, num_pieces + 1, device, dtype)
    for seed in range(repeats):
        before = Layer(*(x.clone() for x in layer))
        projected = project(num_pieces * length, HEADS, device, dtype, seed)
        out = run(layer, projected, pieces)
        window = before.windows_S3C
        new = projected[:, : window.shape[-1]].unflatten(0, (num_pieces, length))
        assert torch.equal(layer.windows_S3C[1:], torch.cat([window[1:], new], 1)[:, -3:])
        if not seed:
            rows = projected[:length]
            close(out[:length], oracle(before, 1, rows, length)[0], 3e-6 if width < 128 else 4e-3)


def test_a_state_is_kept_on_the_way(device: str) -> None:
    """Bug: what is kept is another chunk's state or window, or a kept slot of another piece moves;
    or keeping changes the piece's own outputs or state."""
    length, keep = 2 * CHUNK + 5, CHUNK
    layer = make(HEADS, 5, device, torch.float32)
    plain = Layer(*(x.clone() for x in layer))
    projected = project(length + 9, HEADS, device, torch.float32, seed=8)
    second = (length, length + 9, 70, 2)
    out = run(layer, projected, [(0, length, 0, 1, keep, 3), second])
    assert torch.equal(out, run(plain, projected, [(0, length, 0, 1), second]))
    _, state, window = oracle(fresh(layer), 1, projected[:keep], keep)
    close(layer.states_SNVK[3], state)
    assert torch.equal(layer.windows_S3C[3], window)
    for pool, other in ((layer.states_SNVK, plain.states_SNVK), (layer[3], plain[3])):
        assert torch.equal(pool[[0, 1, 2, 4]], other[[0, 1, 2, 4]])
        assert not torch.equal(pool[3], other[3])


def test_prompts_side_by_side(device: str) -> None:
    """Bug (H18, H29): a prompt's rows or states leak into the one behind it; an empty piece or a
    row of no piece is run; the state of a slot that nobody named moves."""
    layer = make(HEADS, 5, device, torch.float32)
    before = layer.states_SNVK.clone(), layer.windows_S3C.clone()
    continued = Layer(*(x.clone() for x in layer))
    projected = project(24, HEADS, device, torch.float32, seed=6)
    projected[7:16] = float("nan")
    pieces = [(0, 7, 0, 3), (16, 24, 40, 1), (0, 0, 0, 0), (16, 16, 3, 4)]
    out = run(layer, projected, pieces)
    for (begin, end, start, slot), known in ((pieces[0], fresh(layer)), (pieces[1], continued)):
        expected, state, window = oracle(known, slot, projected[begin:end], end - begin)
        assert (start == 0) == (known is not continued)
        close(out[begin:end], expected, 3e-6)
        close(layer.states_SNVK[slot], state)
        assert torch.equal(layer.windows_S3C[slot], window)
    assert out[7:16].isnan().all()
    for slot in (0, 2, 4):
        assert torch.equal(layer.states_SNVK[slot], before[0][slot])
        assert torch.equal(layer.windows_S3C[slot], before[1][slot])


@pytest.mark.parametrize("width", [test_gated_delta.K, pytest.param(128, marks=pytest.mark.gpu)])
def test_partial_sums(device: str, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Bug (H07): a prompt's rows are rounded otherwise than a step's."""
    monkeypatch.setattr(test_gated_delta, "K", width)
    parts = torch.stack([project(9, HEADS, device, torch.float32, seed) for seed in range(2)])
    found = []
    for projected in (parts, parts.sum(0).to(HALF)):
        layer = make(HEADS, 2, device, HALF)
        out = run(layer, projected, [(0, 9, 0, 1)])
        found.append((out, layer.states_SNVK[1], layer.windows_S3C[1]))
    for (a, b), bound in zip(zip(*found, strict=True), (4e-3, 1e-6, 0.0), strict=True):
        close(a, b.double(), bound)  # the window to the bit; unrounded rows would cost 1e-3


@triton.jit
def invert(below, out, ROWS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    tl.store(out + at, inverse_of(tl.load(below + at), ROWS))


@pytest.mark.parametrize("rows", [16, 32])
def test_the_inverse_of_a_block(device: str, rows: int) -> None:
    """Bug: rows that many others came before are solved as if their blocks were two."""
    if device == "cpu" and not INTERPRET:
        pytest.skip("a kernel: interpreted, or on a GPU")
    below = torch.randn(rows, rows, device=device).tril(-1) / 2
    out = torch.empty_like(below)
    on_grid(invert, (1,))(below, out, ROWS=rows)
    expected = (below.double() + torch.eye(rows, device=device)).inverse()
    assert (out - expected).norm() < 3e-6 * expected.norm()
