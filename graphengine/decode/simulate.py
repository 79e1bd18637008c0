"""Simulated acceptance: speed without a trained drafter.

With random weights no draft is ever right, so a step would commit one token. Here the number of
accepted drafts is drawn to a given mean instead of compared; every other part of the step runs for
real, on the same shapes. Results made this way are marked as simulated wherever they are shown.

The mean is that of the drafter's own block. A bucket that drafts fewer tokens cuts the same draws
off at its last draft, as it would cut off what a trained drafter gets right, so it commits fewer.

Legend: B requests, G block length, R rows of the table of draws.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NUM_DRAWS = 4096


class Simulation(NamedTuple):
    """Draws made ahead, walked one row a step on the device, so graphs can replay it."""

    accepted_RB: Tensor  # int64
    step_1: Tensor  # int64, the next row


def acceptance_rate(mean_acceptance_length: float, num_draft_tokens: int) -> float:
    """The per-position rate p with `1 + sum_{j=1..n} p^j == mean_acceptance_length`.

    Raises:
        ValueError: the mean lies outside [1, n + 1].
    """
    if not 1.0 <= mean_acceptance_length <= num_draft_tokens + 1:
        raise ValueError(
            f"--simulate-acceptance {mean_acceptance_length}: a block of {num_draft_tokens} drafts "
            f"commits between 1 and {num_draft_tokens + 1} tokens a step"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        if 1 + sum(rate**j for j in range(1, num_draft_tokens + 1)) < mean_acceptance_length:
            low = rate
        else:
            high = rate
    return (low + high) / 2


def make_simulation(
    mean_acceptance_length: float, num_requests: int, num_draft_tokens: int, device: torch.device
) -> Simulation:
    """Draws accepted counts: each draft is right with one rate, up to the first wrong one.

    Args: num_draft_tokens: of the drafter's own block, whatever a bucket drafts.
    """
    rate = acceptance_rate(mean_acceptance_length, num_draft_tokens)
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_DRAWS, num_requests, num_draft_tokens)
    right = torch.rand(shape, generator=generator) < rate
    accepted = right.long().cumprod(-1).sum(-1)
    return Simulation(accepted.to(device), torch.zeros(1, dtype=torch.int64, device=device))


def force_acceptance_(simulation: Simulation, draft_ids_BG: Tensor, target_ids_BG: Tensor) -> None:
    """Rewrites the target's choices so that comparing them gives the drawn counts, or all of the
    block's drafts where more were drawn.

    Mutates: target_ids_BG, simulation.step_1.
    """
    batch, block = target_ids_BG.shape
    row = simulation.step_1 % simulation.accepted_RB.shape[0]
    accepted_B1 = simulation.accepted_RB[:, :batch].index_select(0, row).view(-1, 1)
    drafted = torch.cat([draft_ids_BG[:, 1:], target_ids_BG[:, -1:]], dim=1)
    position = torch.arange(block, device=target_ids_BG.device)
    other = torch.where(target_ids_BG > 0, target_ids_BG - 1, 1)
    wrong = torch.where(target_ids_BG == drafted, other, target_ids_BG)
    target_ids_BG.copy_(torch.where(position < accepted_B1, drafted, wrong))
    simulation.step_1.add_(1)
