"""ends: which ends an engine has, which one a batch takes, and what they write."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from graphengine.capture.runners import run_chain
from graphengine.capture.steps import Host
from graphengine.decode import ends
from graphengine.decode.buffers import Arena, StepBuffers
from graphengine.decode.logprobs import Scores
from graphengine.decode.masks import take_grammar
from graphengine.decode.proposer import Pair
from graphengine.decode.sampling import GREEDY, Sampling
from graphengine.decode.segments import Segments
from graphengine.decode.simulate import Simulation
from graphengine.decode.stack import Target, no_tap
from tests.decode.test_request import a_request
from tests.decode.test_stack import load

HOT = Sampling(temperature=1.0, seed=3)
G, SIZE = 4, 4  # rows of a block, tokens of a page


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ("greedy",)),
        ({"sampling": True}, ("greedy", "sampled")),
        ({"adjustments": True}, ("greedy", "adjusted")),
        ({"sampling": True, "max_logprobs": 2}, ("greedy", "sampled", "scored")),
        ({"structured_outputs": True, "sampling": True}, ("greedy", "sampled", "constrained")),
        ({"simulate_acceptance": 2.0}, ("simulated",)),
        ({"simulate_acceptance": 2.0, "sampling": True}, ("simulated",)),
    ],
)
def test_an_engine_s_ends(options: dict[str, Any], names: tuple[str, ...]) -> None:
    """Bug: a simulated run compares real drafts, or sampling is captured where nobody samples."""
    offered = {"sampling", "adjustments", "max_logprobs", "structured_outputs"}
    asked = dict.fromkeys(offered, False) | options
    config: Any = type("Config", (), {"simulate_acceptance": None} | asked)
    assert ends.end_names(config) == names


@pytest.mark.parametrize(
    ("samplings", "name"),
    [([GREEDY, GREEDY], "greedy"), ([GREEDY, HOT], "sampled"), ([], "greedy")],
)
def test_one_request_that_draws_decides(samplings: list[Sampling], name: str) -> None:
    """Bug: the first request's temperature decides for the batch."""
    requests = [replace(a_request(), sampling=sampling) for sampling in samplings]
    assert ends.choose(("greedy", "sampled"), requests) == name


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load(tmp_path_factory.mktemp("ends") / "target", layers=1, tie=False)


def run(
    target: Target, name: str, drafts: Tensor | None = None, **own: Any
) -> tuple[Tensor, StepBuffers]:
    """The target's choices of two requests' rows, and the buffers behind acceptance. Args: own:
    more of the buffers."""
    arena = Arena(torch.device("cpu"), torch.float32)
    buffers = StepBuffers.take(arena, target.config, 2, G, 8)._replace(**own)
    buffers.start_B.copy_(torch.tensor([5, 9]))
    buffers.page_table_BW.copy_(torch.arange(1, 17).view(2, 8))
    buffers.positions_T.copy_(torch.tensor([5, 6, 7, 8, 9, 10, 11, 12]))
    if drafts is not None:
        buffers.draft_ids_BG.copy_(drafts)
    simulation = Simulation(torch.tensor([[2, 0]]), torch.zeros(1, dtype=torch.int64))
    generator = torch.Generator().manual_seed(0)
    h_TD, attn_TNH = (torch.randn(2 * G, *s, generator=generator) for s in ((64,), (4, 16)))
    seen: list[Tensor] = []
    real = ends.accept_and_advance_

    def spy(draft_ids: Tensor, target_ids: Tensor, *others: Any) -> None:
        seen.append(target_ids.clone())
        real(draft_ids, target_ids, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ends, "accept_and_advance_", spy)
        config, drafter = SimpleNamespace(page_size=SIZE), SimpleNamespace(mask_token_id=511)
        fakes: Any = (config, drafter)
        pair = Pair(fakes[0], target, fakes[1], 32, simulation)
        steps = ends.make_end(name, "verify", pair, buffers, no_tap, Segments())
        run_chain([step for step in steps if not isinstance(step, Host)], (h_TD, attn_TNH))
    return seen[0], buffers


def test_greedy_requests_draw_their_argmax(target: Target) -> None:
    """Bug: a greedy request beside one that samples gets other tokens than alone."""
    assert torch.equal(run(target, "greedy")[0], run(target, "sampled")[0])


def test_each_end_accepts_and_advances(target: Target) -> None:
    """Bug: an end compares with what another has left, or leaves the next block's inputs as they
    were."""
    chosen, _ = run(target, "greedy")
    drafts = chosen.roll(1, 1)
    drafts[1, 2] += 1  # the second request's second draft is wrong
    for name, accepted in (("greedy", [3, 1]), ("sampled", [3, 1]), ("simulated", [2, 0])):
        found, buffers = run(target, name, drafts)
        assert buffers.start_B.tolist() == [5 + accepted[0] + 1, 9 + accepted[1] + 1]
        anchors = [int(row[n]) for row, n in zip(found, accepted, strict=True)]
        assert buffers.block_ids_BG.tolist() == [[anchor, 511, 511, 511] for anchor in anchors]
        assert buffers.step_B.tolist() == [1, 1]


def test_scores_are_of_what_the_model_gave(target: Target) -> None:
    """Bug: without tables, which are a copy, the mask is laid over the logits that are scored: what
    the grammar rules out is told as impossible."""
    chosen, _ = run(target, "greedy")
    arena, vocab = Arena(torch.device("cpu"), torch.float32), target.config.vocab_size
    grammar = take_grammar(arena, 2, G, vocab)
    grammar.mask_TW.fill_(-1)
    for row, token in enumerate(chosen.flatten().tolist()):
        grammar.mask_TW[row, token // 32] ^= torch.tensor(1 << token % 32).int()
    grammar.is_on_B.fill_(1)
    found, buffers = run(
        target, "constrained_scored", scores=Scores.take(arena.take, 2, G, 2), grammar=grammar
    )
    assert buffers.scores is not None and not bool((found == chosen).any())
    told = buffers.scores.of_step(0)
    assert torch.equal(told.top_ids, torch.stack([chosen, found], dim=-1))
    torch.testing.assert_close(told.chosen, told.top[..., 1])
