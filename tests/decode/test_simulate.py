"""simulate: drawn acceptance has the mean asked for, and a comparison gives what was drawn."""

from __future__ import annotations

import pytest
import torch

from graphengine.decode.simulate import (
    Simulation,
    acceptance_rate,
    force_acceptance_,
    make_simulation,
)
from graphengine.kernels.accept import count_accepted

CPU = torch.device("cpu")


@pytest.mark.parametrize("drafts", [1, 7, 15])
def test_rate_is_the_inverse_of_the_mean(drafts: int) -> None:
    """Bug: the sum leaves out the bonus token or the last draft, so that a run asked for 6.35
    tokens a step measures another number."""
    for rate in (0.0, 0.3, 0.83, 1.0):
        mean = 1 + sum(rate**j for j in range(1, drafts + 1))
        assert acceptance_rate(mean, drafts) == pytest.approx(rate, abs=1e-9)
    for mean in (0.99, drafts + 1.01):
        with pytest.raises(ValueError, match=f"simulate-acceptance {mean}: .* 1 and {drafts + 1}"):
            acceptance_rate(mean, drafts)


def test_draws_have_their_mean() -> None:
    """Bug: drafts behind the first wrong one count, or requests draw alike."""
    drawn = make_simulation(6.35, 4, 15, CPU).accepted_RB
    assert 1 + drawn.double().mean() == pytest.approx(6.35, abs=0.1)
    assert (drawn >= 0).all() and (drawn <= 15).all()
    assert all((drawn[:, 0] != drawn[:, other]).any() for other in (1, 2, 3))


@pytest.mark.parametrize("alike", [True, False])
def test_comparing_gives_what_was_drawn(alike: bool) -> None:
    """Bug: a count is one off, a draft that is right by itself is accepted beyond the draw, the
    draws are not walked, or start again one row late."""
    counts = torch.tensor([[0, 3], [1, 2], [9, 0]])  # 9: more than this block drafts
    simulation = Simulation(counts, torch.zeros(1, dtype=torch.int64))
    for step in range(7):
        drafts = torch.tensor([[5, 0, 1, 2], [6, 7, 0, 9]])
        target = drafts.roll(-1, 1) if alike else torch.full((2, 4), 3)
        force_acceptance_(simulation, drafts, target)
        drawn = counts[step % 3].clamp(max=3).tolist()
        assert count_accepted(drafts, target).tolist() == drawn
        assert (target >= 0).all()
    assert simulation.step_1.item() == 7
