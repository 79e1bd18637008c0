"""The residual add and norm against float64, and its FP8 rows against fp8.py."""

import pytest
import torch

from graphengine.kernels.add_rms_norm import add_rms_norm, add_rms_norm_round, add_rms_norm_split
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.skinny_linear import skinny_linear_partials
from tests.kernels.fp8_checks import check_near, check_split

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
    if device == "cpu":
        assert torch.equal(x, add_rms_norm(None, h_out, weight, EPS, early)[1])


def test_rows_alone_under_a_weight_in_float32(device) -> None:
    """Bug: a hybrid's embedded rows become float32, as the weights of its norms are."""
    rows, _, weight = inputs(device, torch.bfloat16, 3, 2560, 0)
    h_out, x = add_rms_norm(None, rows, weight.float() + 1e-3, EPS)
    assert x.dtype == torch.bfloat16 and torch.equal(h_out, rows)
    close(x, expected(None, rows, weight.float() + 1e-3)[1], torch.bfloat16)


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


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize(("T", "D", "Z"), [*SHAPES, (9, 4096, 2), (5, 12288, 1)])
def test_rounds_the_normed_rows(device, T, D, Z, adds) -> None:
    """Bug: as above with one row; the residual is rounded too; a row of zeros is 0 / 0."""
    h, update, weight = inputs(device, torch.bfloat16, T, D, Z)
    h[0], update.view(-1, T, D)[:, 0] = 0, 0
    residual = h if adds else None
    h_out, x = add_rms_norm(residual, update, weight, EPS)
    h_rounded, rows, scale_T = add_rms_norm_round(residual, update, weight, EPS)
    assert torch.equal(h_rounded, h_out)
    assert (rows.shape, rows.dtype, scale_T.shape) == ((T, D), torch.float8_e4m3fn, (T,))
    check_near(rows, scale_T, x)
    assert not bool(rows[0].float().any())


@pytest.mark.parametrize("add_rms_norm_fp8", [add_rms_norm_round, add_rms_norm_split])
def test_rows_that_are_not_finite(device, add_rms_norm_fp8) -> None:
    """Bug: NaN or infinity in the residual becomes a number, or spoils other rows."""
    h, update, weight = inputs(device, torch.bfloat16, 9, 200, 2)
    h[1, 3], h[4, 199] = torch.nan, torch.inf
    update[1, 7, 0] = -torch.inf
    _, rows, scale_T = add_rms_norm_fp8(h, update, weight, EPS)
    products = rows.float().view(-1, 9, 200).sum((0, 2)) * scale_T
    assert products.isnan().nonzero()[:, 0].tolist() == [1, 4, 7]


@pytest.mark.usefixtures("poisoned_outputs")
def test_writes_every_element(device) -> None:
    """Bug: columns behind the last full vector keep what the memory held before."""
    given = inputs(device, torch.bfloat16, 5, 1000, 2)
    for add_norm in (add_rms_norm, add_rms_norm_round, add_rms_norm_split):
        for out in add_norm(*given, EPS):
            assert bool(out.float().isfinite().all())


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
    with pytest.raises(ValueError, match="float32 for partial sums"):
        add_rms_norm(None, update.bfloat16(), weight, EPS)
    with pytest.raises(ValueError, match=r"need \[T, D\]"):
        add_rms_norm(h[:3], update, weight, EPS)
    if device != "cpu" or INTERPRET:
        with pytest.raises(ValueError, match="contiguous"):
            add_rms_norm(h.t().contiguous().t(), update, weight, EPS)
