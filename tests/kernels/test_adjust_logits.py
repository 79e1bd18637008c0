"""adjust_logits against vLLM's definition, written token by token in Python's own numbers."""

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from graphengine.kernels import adjust_logits as module
from graphengine.kernels.accept import accept_and_advance_reference_
from graphengine.kernels.adjust_logits import (
    NOTHING,
    PROMPT,
    STOP,
    Tables,
    adjust_logits,
    advance_tables_,
)
from graphengine.kernels.interpreter import INTERPRET
from tests.support.examples import examples

MAX_EXAMPLES = examples(8 if INTERPRET else 80)
K, L = 4, 4
Row = dict[str, Any]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs a row."""
    monkeypatch.setattr(module, "CHUNK", 16)


def tables_of(rows: list[Row], V: int, device: str) -> Tables:
    """What is committed of each row: prompt, answer (its last token is the block's anchor)."""
    B = len(rows)
    seen = torch.zeros(B, V, dtype=torch.int32)
    bias, words = torch.zeros(B, V), torch.full((B, K, L), NOTHING, dtype=torch.int32)
    recent = torch.full((B, L - 1), NOTHING, dtype=torch.int32)
    for b, row in enumerate(rows):
        seen[b, list(set(row["prompt"]))] |= PROMPT
        seen[b, list(set(row["stops"]))] |= STOP
        for token in row["answer"]:
            seen[b, token] += 1
        for token, value in row["bias"].items():
            bias[b, token] = value
        for k, word in enumerate(row["words"]):
            words[b, k, L - len(word) :] = torch.tensor(word)
        before = row["answer"][:-1][-(L - 1) :]
        recent[b, L - 1 - len(before) :] = torch.tensor(before, dtype=torch.int32)

    def column(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([row[name] for row in rows], dtype=dtype)

    found = Tables(
        column("is_on", torch.int32),
        column("repetition"),
        column("presence"),
        column("frequency"),
        torch.tensor([len(row["prompt"]) - 1 + row["min_tokens"] for row in rows]),
        *(seen, bias, words, recent),
    )
    return Tables(*(x.to(device) for x in found))


def expected(z: list[float], row: Row, answer: list[int]) -> list[float]:
    """The logits behind prompt + answer."""
    out = []
    for v, x in enumerate(z):
        count = answer.count(v)
        x += row["bias"].get(v, 0.0)
        if count or v in row["prompt"]:
            x = x / row["repetition"] if x > 0 else x * row["repetition"]
        x -= row["frequency"] * count + row["presence"] * (count > 0)
        if v in row["stops"] and len(answer) < row["min_tokens"]:
            x = -math.inf
        for *prefix, last in row["words"]:
            behind = answer[len(answer) - len(prefix) :]
            if v == last and len(answer) >= len(prefix) and behind == prefix:
                x = -math.inf
        out.append(x)
    return out if row["is_on"] else z


@st.composite
def blocks(draw: Any) -> tuple[list[Row], list[list[int]], int]:
    """Rows, their blocks (anchor and drafts) and V; few tokens, so that they repeat."""
    V, G = draw(st.sampled_from([5, 17, 40])), draw(st.sampled_from([1, 2, 5, 16]))
    token, small = st.integers(0, min(V, 6) - 1), st.sampled_from([-2.0, -0.3, 0.0, 0.7, 2.0])
    rows, ids = [], []
    for _ in range(draw(st.integers(1, 3))):
        answer = draw(st.lists(token, min_size=1, max_size=8))
        row = {
            "is_on": draw(st.sampled_from([1, 1, 0])),
            "prompt": draw(st.lists(token, min_size=1, max_size=4)),
            "answer": answer,
            "stops": draw(st.lists(token, max_size=2)),
            "min_tokens": draw(st.integers(0, 12)),
            "repetition": draw(st.sampled_from([0.5, 1.0, 1.3, 3.0])),
            "presence": draw(small),
            "frequency": draw(small),
            "bias": draw(st.dictionaries(token, st.sampled_from([-100.0, -1.5, 0.25, 100.0]))),
            "words": draw(st.lists(st.lists(token, min_size=2, max_size=L), max_size=K)),
        }
        rows.append(row)
        ids.append([answer[-1], *draw(st.lists(token, min_size=G - 1, max_size=G - 1))])
    return rows, ids, V


# Its second row is the first that may end.
ENDING: Row = {"is_on": 1, "prompt": [1], "answer": [2], "stops": [3], "min_tokens": 2}
ENDING |= {"repetition": 1.0, "presence": 0.0, "frequency": 0.0, "bias": {}, "words": []}
# An older request's tables, where nothing is asked any more.
LEFT_OVER = ENDING | {"is_on": 0, "presence": 2.0, "bias": {1: 5.0}, "words": [[2, 0]]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(
    max_examples=MAX_EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(case=blocks(), seed=st.integers(0, 99))
@example(case=([ENDING], [[2, 0]], 5), seed=0)
@example(case=([LEFT_OVER], [[2, 1]], 5), seed=0)
def test_is_the_definition(device: str, dtype: torch.dtype, case: Any, seed: int) -> None:
    """Bug: a row counts its neighbour's drafts, its own token's successor, the prompt in a presence
    penalty, or the anchor twice; a bad word bans without its prefix, across the prompt, or for the
    row's next request; an end is ruled out one token too long."""
    rows, ids, V = case
    B, G = len(rows), len(ids[0])
    storage = torch.full((B * G, V + 3), torch.nan)
    storage[:, :V] = torch.randn(B * G, V, generator=torch.Generator().manual_seed(seed)) * 3
    logits = storage.to(device).to(dtype)[:, :V]
    starts = [len(row["prompt"]) + len(row["answer"]) - 1 for row in rows]
    positions = torch.tensor([start + i for start in starts for i in range(G)], device=device)
    block = torch.tensor(ids, device=device)
    found = adjust_logits(logits, block, positions, tables_of(rows, V, device))
    assert found.dtype == torch.float32 and found.shape == (B * G, V)
    for t in range(B * G):
        b, i = divmod(t, G)
        wanted = expected(logits[t].tolist(), rows[b], rows[b]["answer"] + ids[b][1 : i + 1])
        torch.testing.assert_close(found[t].cpu(), torch.tensor(wanted), rtol=1e-5, atol=1e-5)


@settings(
    max_examples=MAX_EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(case=blocks(), choices=st.data())
def test_counts_what_is_accepted(device: str, case: Any, choices: Any) -> None:
    """Bug: a rejected draft, a row behind the bonus, a padded row or one that asks for nothing is
    counted; an accepted one or the bonus is not, or a token said twice counts once."""
    rows, ids, V = case
    B, G = len(rows), len(ids[0])
    targets, said = [], []
    for row in ids:
        accepted = choices.draw(st.integers(0, G - 1))
        target = [*row[1:], choices.draw(st.integers(-1, min(V, 6) - 1))]
        if accepted < G - 1:
            target[accepted] = (row[accepted + 1] + 1) % V
        targets.append(target)
        said.append(target[: accepted + 1])
    is_live = [choices.draw(st.booleans()) for _ in rows]
    start = torch.tensor([9 * live for live in is_live], dtype=torch.int32, device=device)
    found = tables_of(rows, V, device)
    before = tables_of(rows, V, device)
    block, target = torch.tensor(ids, device=device), torch.tensor(targets, device=device)
    advance_tables_(block, target, start, found)
    moved = [
        row | {"answer": row["answer"] + ([t for t in new if t >= 0] if live else [])}
        for row, new, live in zip(rows, said, is_live, strict=True)
    ]
    wanted = tables_of(moved, V, device)
    for b, row in enumerate(rows):
        changes = bool(row["is_on"] and is_live[b])
        assert torch.equal(found.seen_BV[b], (wanted if changes else before).seen_BV[b])
        if said[b][-1] >= 0 or not changes:
            assert torch.equal(found.recent_BL[b], (wanted if changes else before).recent_BL[b])
    for name, one, other in zip(Tables._fields, found, before, strict=True):
        assert name in ("seen_BV", "recent_BL") or torch.equal(one, other)
    # By the rule of acceptance itself.
    state = torch.zeros(B, 9, dtype=torch.int32), block.cpu().clone()
    long = [torch.zeros(B * G, dtype=torch.int64) for _ in range(4)]
    results = torch.zeros(B, 2 * (G + 1), dtype=torch.int64)
    host = start.cpu().clone()
    step = torch.zeros(B, dtype=torch.int64)
    arguments: list[Any] = [block.cpu(), target.cpu(), host, *state, *long, step, results, 0, 4]
    accept_and_advance_reference_(*arguments)
    for b, live in enumerate(is_live):
        assert not live or int(host[b]) == 9 + len(said[b])


def test_every_token_of_a_word_counts(device: str) -> None:
    """Bug: of the longest word the first token is not compared: it is banned behind any other; or
    what stands in front of a shorter one is, so that a long answer may say it."""
    words = [[1, 2, 0, 4], [3, 2, 0, 1], [0, 3], [1, 0]]
    row = ENDING | {"answer": [2, 1, 2, 0], "min_tokens": 0, "words": words}
    block, positions = (torch.tensor(x, device=device) for x in ([[0]], [4]))
    logits = torch.zeros(1, 5, device=device)
    found = adjust_logits(logits, block, positions, tables_of([row], 5, device))
    assert found.tolist() == [[0.0, 0.0, 0.0, -math.inf, -math.inf]]


def test_no_token_counts_for_none(device: str) -> None:
    """Bug: a bonus that is no token, of logits that are not finite, counts as token 0."""
    tables = tables_of([ENDING], 5, device)
    before, start = tables.seen_BV[0].clone(), torch.tensor([9], dtype=torch.int32, device=device)
    block, target = (torch.tensor([x], device=device) for x in ([2, 0], [0, -1]))
    advance_tables_(block, target, start, tables)
    assert (tables.seen_BV[0] - before).tolist() == [1, 0, 0, 0, 0]


def test_all_of_a_block_of_five_is_counted(device: str) -> None:
    """Bug: of a block of no power of two, as with four drafts, the last rows are not counted: what
    was said there is said again in spite of a penalty."""
    tables = tables_of([ENDING], 5, device)
    before, start = tables.seen_BV[0].clone(), torch.tensor([9], dtype=torch.int32, device=device)
    block, target = (torch.tensor([x], device=device) for x in ([2, 0, 1, 3, 4], [0, 1, 3, 4, 2]))
    advance_tables_(block, target, start, tables)
    assert (tables.seen_BV[0] - before).tolist() == [1] * 5


def test_a_prompt_s_last_row(device: str) -> None:
    """Bug: the prompt's last token is counted as said, or completes a bad word's prefix."""
    row: Row = {
        "is_on": 1,
        "prompt": [3, 3],
        "answer": [],
        "stops": [1],
        "min_tokens": 1,
        "repetition": 2.0,
        "presence": 1.0,
        "frequency": 1.0,
        "bias": {0: 5.0},
        "words": [[3, 2]],
    }
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0, -1.0]], device=device)
    block = torch.tensor([[NOTHING]], device=device)
    found = adjust_logits(
        logits, block, torch.tensor([1], device=device), tables_of([row], 5, device)
    )
    assert found.tolist() == [[6.0, -math.inf, 3.0, 2.0, -1.0]]


def test_refusals(device: str) -> None:
    """Bug: a table of another batch, dtype or stride is read past its end."""
    row: Row = dict.fromkeys(("is_on", "min_tokens", "presence", "frequency"), 0) | {
        "prompt": [1],
        "answer": [1],
        "stops": [],
        "repetition": 1.0,
        "bias": {},
        "words": [],
    }
    tables = tables_of([row], 5, device)
    logits, ids = torch.zeros(2, 5, device=device), torch.zeros(1, 2, dtype=torch.int64)
    ids, positions = ids.to(device), torch.zeros(2, dtype=torch.int64, device=device)
    assert adjust_logits(logits, ids, positions, tables).eq(0).all()
    for name, bad in (
        ("seen_BV", tables.seen_BV.long()),
        ("bias_BV", tables.bias_BV[:, :4]),
        ("until_B", tables.until_B.int()),
        ("seen_BV", tables.seen_BV.repeat(1, 2)[:, ::2]),
    ):
        with pytest.raises(ValueError, match=name):
            adjust_logits(logits, ids, positions, tables._replace(**{name: bad}))
    for name, table in tables._asdict().items():
        with pytest.raises(ValueError, match=f"^{name} is torch.float64"):
            adjust_logits(logits, ids, positions, tables._replace(**{name: table.double()}))
    with pytest.raises(ValueError, match="positions"):
        adjust_logits(logits, ids, positions[:1], tables)
    with pytest.raises(ValueError, match="rows of floats, 2 of them"):
        adjust_logits(logits.repeat(2, 1), ids, positions.repeat(2), tables)
    for words in (tables.words_BKL[:, :3], tables.words_BKL[..., :1]):
        with pytest.raises(ValueError, match="powers of two"):
            adjust_logits(logits, ids, positions, tables._replace(words_BKL=words))
    with pytest.raises(ValueError, match="logits are"):
        adjust_logits(logits.t(), ids, positions, tables)
