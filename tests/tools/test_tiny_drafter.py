"""tools/tiny_drafter.py: the loop that measures the tiny pair, on random weights."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch

from tools import tiny_hybrid, tiny_pair, train_tiny_hybrid
from tools.tiny_drafter import Drafter, Shape, Target, decode, rope

SHAPE = Shape(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
)
LIMIT, NO_TOKEN = 12, 99


def pair() -> tuple[Target, Drafter]:
    """One with weights so wide that texts differ."""
    torch.manual_seed(0)
    target, drafter = Target(SHAPE), Drafter(replace(SHAPE, num_hidden_layers=1), 1, 4)
    for parameter in (*target.parameters(), *drafter.parameters()):
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.5)
    return target, drafter


def decoded(
    *prompts: list[int], stop: int, limit: int = LIMIT
) -> tuple[list[list[int]], torch.Tensor]:
    told = {"mask_token": 23, "stop": stop, "limit": limit}
    return decode(*pair(), [0], [*prompts], **told)[:2]


def test_a_stop_token_that_is_not_said_ends_nothing() -> None:
    """Bug: an answer ends in the middle where the target would say the stop token behind a wrong
    draft."""
    (whole,), _ = decoded([1, 2, 3], stop=NO_TOKEN)
    assert len(whole) == LIMIT
    for stop in range(SHAPE.vocab_size):
        (answer,), _ = decoded([1, 2, 3], stop=stop)
        assert answer == (whole[: whole.index(stop) + 1] if stop in whole else whole)


def test_a_prompt_that_has_ended_accepts_nothing() -> None:
    """Bug: steps of answers that have ended beside a longer one count, and the acceptance that the
    pair is known by is that of rows which nobody reads."""
    prompts = [1, 2, 3], [4, 5]
    (first, second), _ = decoded(*prompts, stop=NO_TOKEN)
    stop = next(token for token in second if token not in first)
    answers, accepted = decoded(*prompts, stop=stop)
    assert [len(answer) for answer in answers] == [LIMIT, second.index(stop) + 1]
    assert answers[1][-1] == stop and len(answers[1]) < LIMIT // 2
    alone = [decoded(prompt, stop=stop)[1] for prompt in prompts]
    assert accepted.tolist() == (alone[0] + alone[1]).tolist()


def test_the_prefill_s_token_is_no_step_s() -> None:
    """Bug: the pair's tokens per step are those of steps and of the prefill, more than it has."""
    told = {"mask_token": 23, "stop": NO_TOKEN, "limit": LIMIT}
    answers, _, produced = decode(*pair(), [0], [[1, 2, 3], [4, 5]], **told)
    assert [len(answer) for answer in answers] == [LIMIT, LIMIT]
    assert produced == 2 * (LIMIT - 1)


def test_a_step_that_reaches_the_limit_is_the_last() -> None:
    """Bug: an answer that a step ends exactly at the limit takes one more, which no engine runs,
    and the pair's acceptance counts it."""
    _, accepted = decoded([1, 2, 3], stop=NO_TOKEN)
    reached = 1 + int((accepted * torch.arange(1, 5)).sum())
    _, again = decoded([1, 2, 3], stop=NO_TOKEN, limit=reached)
    assert LIMIT <= reached < LIMIT + 4 and again.tolist() == accepted.tolist()


@torch.no_grad()
def test_a_hybrid_begins_as_the_dense_target() -> None:
    """Bug: what a gate that is still closed halves is not doubled behind it, or the gate stands in
    the queries' place: the training of the hybrid begins far from the dense target."""
    torch.manual_seed(0)
    dense: Any = Target(tiny_pair.TARGET)
    hybrid, width = tiny_hybrid.begin(dense), tiny_pair.TARGET.head_dim
    place = tiny_hybrid.LAYER_TYPES.index("full_attention")
    ours, known = hybrid.model.layers[place].self_attn, dense.model.layers[place].self_attn
    ours.q_proj.weight.unflatten(0, (-1, 2 * width))[:, width:] = 0  # a gate of one half
    x = torch.randn(1, 9, tiny_pair.TARGET.hidden_size)
    cos_sin = rope(torch.arange(9)[None], tiny_pair.TARGET)
    wanted = known.attend(known.q(x, cos_sin), *known.kv(x, cos_sin), None)
    torch.testing.assert_close(ours.mix(x, cos_sin), wanted)


def test_a_hybrid_learns_answers_alone() -> None:
    """Bug: the hybrid learns the token behind an answer, and not its first."""
    tokens = torch.arange(40)
    none = torch.zeros(1, dtype=torch.int64)
    stream = tiny_pair.Stream(tokens, (tokens >= 5) & (tokens < 10), none, none + 5, none + 10)
    args = argparse.Namespace(rows=2, width=16)
    ids, labels = next(train_tiny_hybrid.batches(stream, args, seed=0))
    assert ids.tolist() == [list(range(16))] * 2
    assert labels.tolist() == [[-100] * 4 + [5, 6, 7, 8, 9] + [-100] * 7] * 2
