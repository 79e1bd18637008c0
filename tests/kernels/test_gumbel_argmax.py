"""gumbel_argmax against splitmix64 in Python's integers and logarithms in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from scipy import stats

from graphengine.kernels import gumbel_argmax as module
from graphengine.kernels.argmax import argmax_rows
from graphengine.kernels.gumbel_argmax import gumbel_argmax
from graphengine.kernels.interpreter import INTERPRET

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NOISE_ERROR = 1e-5  # of float32 noise; candidates this close may change places


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs a row, and several loads a program, at a size that can be interpreted."""
    monkeypatch.setattr(module, "CHUNK", 128)
    monkeypatch.setattr(module, "BLOCK", 64)


def draw(logits: torch.Tensor, temperature: Any, **other: Any) -> torch.Tensor:
    """One request a row unless told; positions and seeds count up."""

    def column(name: str, default: Any, dtype: torch.dtype) -> torch.Tensor:
        x = torch.as_tensor(other.get(name, default), dtype=dtype, device=logits.device)
        return x if x.dim() else x.expand(len(logits)).contiguous()

    T = len(logits)
    return gumbel_argmax(
        logits,
        argmax_rows(logits),
        column("threshold", -math.inf, torch.float32),
        column("positions", torch.arange(T), torch.int64),
        column("temperature", temperature, torch.float32),
        column("seeds", torch.arange(T), torch.int64),
    )


def exact_noise(seed: int, position: int, num_tokens: int) -> np.ndarray:
    """Of the token that stands at `position`."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    row = mix(mix(seed + golden & mask) ^ (position * golden & mask))
    bits = [mix(row + token * golden & mask) >> 24 for token in range(1, num_tokens + 1)]
    u = (np.array(bits, np.float64) + 0.5) * 2.0**-40
    return -np.log(-np.log1p(-np.minimum(u, 1 - 2.0**-24)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [1, 63, 128, 129, 333])
def test_is_the_best_score(device, dtype, V) -> None:
    """Bug: another hash, a tail lost, a temperature that scales the noise, a filtered token."""
    T = 6
    storage = torch.full((T, V + 7), torch.inf, device=device).to(dtype)
    logits = storage[:, :V]
    logits.copy_(torch.randn(T, V) * 2)
    seeds = [0, 1, 2**62 + 11, 2**63 - 1, 5, 5]
    positions = [0, 9, 2**20, 40959, 7, 7]
    threshold = [-math.inf, -0.5, 0.0, -math.inf, 1.0, -math.inf]
    threshold = [min(a, float(b)) for a, b in zip(threshold, logits.amax(-1), strict=True)]
    temperature = [1.0, 0.3, 2.5, 1e-38, 1e38, 1.0]
    found = draw(logits, temperature, threshold=threshold, positions=positions, seeds=seeds)
    for t in range(T):
        z = logits[t].double().cpu().numpy()
        scaled = np.maximum((z - z.max()) / max(temperature[t], 1e-30), -1e30)
        score = scaled + exact_noise(seeds[t], positions[t] + 1, V)
        score[z < threshold[t]] = -np.inf
        assert score[found[t]] >= score.max() - NOISE_ERROR
        again = draw(
            logits[t : t + 1].clone(),
            temperature[t],
            threshold=threshold[t],
            positions=positions[t],
            seeds=seeds[t],
        )
        assert again == found[t], "alone and in a batch"


@triton.jit
def _exponential_kernel(u, out):
    at = tl.arange(0, 4096)
    tl.store(out + at, module._exponential(tl.load(u + at)))


def test_the_noise_of_few_candidates(device) -> None:
    """Bug: the series is used where it is a logarithm no more: where few tokens are left, whose
    numbers are large, one is drawn too often, and another than on a CPU."""
    if device == "cpu" and not INTERPRET:
        pytest.skip("a kernel: interpreted, or on a GPU")
    u = torch.logspace(-12, 0, 4096, dtype=torch.float64).clamp(max=1 - 2.0**-24).float()
    found = torch.empty(4096, device=device)
    _exponential_kernel[(1,)](u.to(device), found)
    torch.testing.assert_close(found.cpu().double(), -torch.log1p(-u.double()), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_draw_nothing(device, dtype) -> None:
    """Bug: a greedy row gets noise or loses its tie; a NaN becomes a token; a mask is drawn."""
    logits = torch.randn(9, 200, device=device).to(dtype)
    logits[0] = 1.0
    logits[1, [4, 150]] = 9.0
    logits[2, 199] = torch.nan
    logits[3, 0] = torch.inf
    logits[4] = -torch.inf
    logits[5] = -torch.inf
    logits[5, 130] = -3.0  # one token is left
    logits[6, 3] = torch.nan
    logits[7:, 1:] = -torch.inf
    temperature = [0.0, 0.0, 1.0, 1.0, 1.0, 1e38, 0.0, 1e-38, 1.0]
    assert draw(logits, temperature).tolist() == [0, 4, -1, -1, -1, 130, -1, 0, 0]


def test_rows_of_a_request(device) -> None:
    """Bug: rows take the settings of another request, or all rows of one the same noise."""
    logits = torch.zeros(8, 150, device=device)
    grouped = draw(logits, [1.0, 0.0], seeds=[3, 4])
    single = draw(logits, [1.0] * 4 + [0.0] * 4, seeds=[3] * 4 + [4] * 4)
    assert torch.equal(grouped, single)
    assert len(set(grouped[:4].tolist())) > 1 and (grouped[4:] == 0).all()


def test_follows_the_distribution(device) -> None:
    """Bug: noise that is not Gumbel: its tail cut, its logarithm too coarse, or one of two."""
    count, V = (150 if INTERPRET else 20000), 12
    logits = torch.randn(V, generator=torch.Generator().manual_seed(5)).to(device)
    drawn = draw(logits.expand(count, -1), 0.8, seeds=torch.arange(count), positions=3)
    observed = torch.bincount(drawn, minlength=V).cpu().numpy()
    expected = (logits.double() / 0.8).softmax(-1).cpu().numpy() * count
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_refuses(device) -> None:
    """Bug: settings of other rows, or of another type, read as if they were right."""
    logits = torch.randn(4, 6, device=device)
    with pytest.raises(ValueError, match="4 rows are not of 3"):
        draw(logits, [1.0] * 3)
    for seeds in (torch.arange(2, device=device), torch.arange(8, device=device)[::2]):
        with pytest.raises(ValueError, match="seed"):
            draw(logits, 1.0, seeds=seeds)
    with pytest.raises(ValueError, match="logits"):
        gumbel_argmax(logits.int(), *(torch.zeros(4),) * 5)
    row, whole = torch.zeros(4, device=device), torch.zeros(4, device=device, dtype=torch.int64)
    given = {"best": whole, "threshold": row, "positions": whole, "temperature": row, "seed": whole}
    for name, x in given.items():
        with pytest.raises(ValueError, match=f"^{name} is torch.float64"):
            gumbel_argmax(logits, *(given | {name: x.double()}).values())


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "V"), [(1, 151936), (15, 151937), (16, 151936), (256, 8191)])
def test_vocabulary_size(monkeypatch: pytest.MonkeyPatch, T, V) -> None:
    """Bug: at the real size and chunk an index overflows, or the winner's noise is granular; an
    answer comes from unwritten memory."""
    monkeypatch.undo()
    logits = torch.randn(T, V, device="cuda").bfloat16()
    poison = [torch.full((1 << k,), 2**62, device="cuda") for k in range(6, 18)]
    del poison  # what the launcher allocates next
    found = draw(logits, 1.0)
    for t in range(0, T, 7):
        score = logits[t].double().cpu().numpy() + exact_noise(t, t + 1, V)
        assert score[found[t]] >= score.max() - NOISE_ERROR
