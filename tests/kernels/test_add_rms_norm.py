"""The residual add, norm and FP8 split against float64."""

import pytest
import torch

from graphengine.kernels.add_rms_norm import add_rms_norm, add_rms_norm_split, split_rows
from graphengine.kernels.fp8 import split_rows_fp8
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.skinny_linear import skinny_linear_partials

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 64, 0), (7, 48, 2), (16, 2560, 3), (3, 4096, 1), (5, 100, 7)]  # T, D, Z; 0: [T, D]


def inputs(device: str, dtype: torch.dtype, T: int, D: int, Z: int):
    h = torch.randn(T, D, device=device).to(dtype)
    shape, kind = ((Z, T, D), torch.float32) if Z else ((T, D), dtype)
    update = torch.randn(shape, device=device).to(kind)
    return h, update, (1 + 0.3 * torch.randn(D, device=device)).to(dtype)


def expected(h, update, weight) -> tuple[torch.Tensor, torch.Tensor]:
    """(h, x) in float64; x of the rounded h."""
    total = update.double().sum(0) if update.dim() == 3 else update.double()
    total = (total if h is None else h.double() + total).to(weight.dtype)
    x = total.double()
    return total, x / (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + EPS).sqrt() * weight.double()


def close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    # One rounding: half an ulp, and where a sum lies between two numbers its neighbour. The
    # interpreter truncates to bf16.
    ulp = 1e-5 if dtype == torch.float32 else 2**-6 if INTERPRET else 2**-7
    torch.testing.assert_close(got.double(), wanted.double(), rtol=ulp, atol=ulp)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "D", "Z"), SHAPES)
@pytest.mark.parametrize(("adds", "early"), [(True, False), (True, True), (False, False)])
def test_matches_the_formula(device, dtype, T, D, Z, adds, early) -> None:
    """Bug: a partial sum left out or read from another row, the mean taken over the padded width,
    the norm of the update instead of the sum, or the residual overwritten in place."""
    h, update, weight = inputs(device, dtype, T, D, Z)
    before = h.clone()
    h_out, x = add_rms_norm(h if adds else None, update, weight, EPS, early)
    assert torch.equal(h, before)
    assert (h_out.shape, x.shape, h_out.dtype, x.dtype) == ((T, D), (T, D), dtype, dtype)
    wanted_h, _ = expected(h if adds else None, update, weight)
    close(h_out, wanted_h, dtype)
    _, wanted_x = expected(None, h_out, weight)  # of the sum as it was rounded
    close(x, wanted_x, dtype)


@pytest.mark.parametrize(("T", "D", "Z"), SHAPES)
def test_split_holds_the_normed_rows(device, T, D, Z) -> None:
    """Bug: hi and lo exchange places, a row gets its neighbour's scale, or the split is of values
    that were not rounded to the model's dtype, so that FP8 and bf16 drafts see different inputs."""
    h, update, weight = inputs(device, torch.bfloat16, T, D, Z)
    h_out, x = add_rms_norm(h, update, weight, EPS)
    h_split, rows, scale_T = add_rms_norm_split(h, update, weight, EPS)
    assert torch.equal(h_split, h_out)
    assert rows.shape == (2, T, D)
    check_split(rows, scale_T, x)


@pytest.mark.parametrize(("T", "D"), [(1, 64), (16, 12288), (3, 100), (130, 2560)])
def test_split_rows(device, T, D) -> None:
    """Bug: as above; and a row of zeros is divided by zero."""
    x = (torch.randn(T, D, device=device) * torch.logspace(-3, 3, T, device=device)[:, None]).to(
        torch.bfloat16
    )
    x[0] = 0
    rows, scale_T = split_rows(x)
    check_split(rows, scale_T, x)


@pytest.mark.skipif(INTERPRET, reason="the interpreter's rounding to FP8 makes a number of NaN")
@pytest.mark.parametrize(("T", "D"), [(1, 64), (130, 2560)])
def test_split_rows_keeps_nan(device, T, D) -> None:
    """Bug: a NaN becomes a number, or spoils other rows through a scale that they share."""
    x = torch.randn(T, D, device=device).to(torch.bfloat16)
    x[T // 2, 3] = torch.nan
    rows, scale_T = split_rows(x)
    again = rows.float().sum(0) * scale_T[:, None]
    assert bool(again[T // 2].isnan().any())
    assert not bool(again[torch.arange(T) != T // 2].isnan().any())


def check_split(rows: torch.Tensor, scale_T: torch.Tensor, x: torch.Tensor) -> None:
    torch.testing.assert_close(scale_T, split_rows_fp8(x)[1], rtol=1e-6, atol=0)
    error = (rows.float().sum(0) * scale_T[:, None] - x.float()).abs()
    bound = torch.maximum(x.float().abs() * 2**-8, scale_T[:, None] * 2**-10)
    assert bool((error <= bound * (8 if INTERPRET else 1.01)).all())  # interpreted, it truncates


@pytest.mark.usefixtures("poisoned_outputs")
def test_writes_every_element(device) -> None:
    """Bug: columns behind the last full vector keep what the memory held before."""
    h_out, x = add_rms_norm(*inputs(device, torch.bfloat16, 5, 1000, 2), EPS)
    assert bool(h_out.isfinite().all())
    assert bool(x.isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True])
def test_a_captured_chain_reads_this_replay(early) -> None:
    """Bug: a kernel that starts before the one in front of it has ended reads what an earlier
    replay left: the GEMM behind a norm, or the norm behind a GEMM."""
    generator = torch.Generator("cuda").manual_seed(0)
    weights = [torch.randn(2048, 2048, generator=generator, device="cuda") for _ in range(6)]
    layers = [(weight / 2048**0.5).bfloat16() for weight in weights]
    _, _, norm = inputs("cuda", torch.bfloat16, 1, 2048, 0)
    x = torch.randn(16, 2048, generator=generator, device="cuda").bfloat16()

    def chain() -> torch.Tensor:
        h, y = x, x
        for layer in layers:
            h, y = add_rms_norm(h, skinny_linear_partials(y, layer, 3), norm, EPS, early)
        return h

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for sign in (1, -1) * 20:
        x.mul_(sign)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, chain())


def test_refusals(device) -> None:
    """Bug: partial sums in bf16, or rows of another width, are read as something else."""
    h, update, weight = inputs(device, torch.bfloat16, 4, 64, 2)
    with pytest.raises(ValueError, match="float32 for partial sums"):
        add_rms_norm(h, update.bfloat16(), weight, EPS)
    with pytest.raises(ValueError, match=r"need \[T, D\]"):
        add_rms_norm(h[:3], update, weight, EPS)
    if device != "cpu" or INTERPRET:
        with pytest.raises(ValueError, match="contiguous"):
            add_rms_norm(h.t().contiguous().t(), update, weight, EPS)
