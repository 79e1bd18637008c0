"""tools/train_tiny.py: what it tells of a pair, on the bundled one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from graphengine import TINY_DRAFT, TINY_TARGET
from tools import tiny_pair, train_tiny


def test_what_is_told_of_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the acceptance that the bundled pair is known by counts a token twice or not at all, or
    the whole has another mean than its parts."""
    histogram = torch.zeros(train_tiny.BLOCK_SIZE, dtype=torch.int64)
    histogram[0] = histogram[-1] = 1  # two steps: no draft, and all of them

    def decode(target: Any, drafter: Any, taps: Any, prompts: Any, **told: Any) -> Any:
        return [[told["stop"]] * 3 for _ in prompts], histogram, train_tiny.BLOCK_SIZE + 1

    monkeypatch.setattr(train_tiny, "decode", decode)
    count = len(train_tiny.CATEGORIES)  # one of each
    found: Any = train_tiny.evaluate(TINY_TARGET.parent, "cpu", count, 8, 0)
    mean = (1 + train_tiny.BLOCK_SIZE) / 2
    for row in (found, *found["categories"].values()):
        assert (row["mean_acceptance_length"], row["tokens_per_step"]) == (mean, mean)
        assert row["exact_answers"] == 0
    assert found["per_position"] == [0.5] * (train_tiny.BLOCK_SIZE - 1)
    assert (found["steps"], found["ties"]["tokens"]) == (2 * count, 3 * count)
    assert {row["mean_tokens"] for row in found["categories"].values()} == {3}


def test_what_is_told_of_right_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the share of exact answers is that of the last category, or over tokens."""
    tokenizer = Tokenizer.from_file(str(TINY_TARGET / "tokenizer.json"))
    count = 2 * len(train_tiny.CATEGORIES)
    sums = [ex for ex in train_tiny.heldout_set()[:count] if ex.category == "math"]
    right = iter([[tokenizer.encode(ex.answer).ids for ex in sums]])  # the first category's

    def decode(target: Any, drafter: Any, taps: Any, prompts: Any, **told: Any) -> Any:
        histogram = torch.ones(train_tiny.BLOCK_SIZE, dtype=torch.int64)
        return next(right, [[told["stop"]]] * len(prompts)), histogram, 1

    monkeypatch.setattr(train_tiny, "decode", decode)
    found: Any = train_tiny.evaluate(TINY_TARGET.parent, "cpu", count, 8, 0)
    shares = {name: row["exact_answers"] for name, row in found["categories"].items()}
    assert shares == dict.fromkeys(train_tiny.CATEGORIES, 0.0) | {"math": 1.0}
    assert found["exact_answers"] == 0.2


def test_answers_alone_are_learnt() -> None:
    """Bug: the target learns prompts too, or an answer without its end, or the newline behind."""
    tokenizer = Tokenizer.from_file(str(TINY_TARGET / "tokenizer.json"))
    corpus = list(train_tiny.heldout_set()[:20])
    stream = tiny_pair.make_stream(tokenizer, corpus, seed=0)
    said = [f"{ex.answer}{tiny_pair.IM_END}" for ex in corpus]
    spans = zip(stream.answers.tolist(), stream.ends.tolist(), strict=True)
    assert [
        tokenizer.decode(stream.tokens[a:b].tolist(), skip_special_tokens=False) for a, b in spans
    ] == said
    learnt = stream.tokens[stream.is_answer].tolist()
    assert tokenizer.decode(learnt, skip_special_tokens=False) == "".join(said)
    begins = zip(stream.starts.tolist(), stream.answers.tolist(), corpus, strict=True)
    for start, first, ex in begins:
        asked = tokenizer.decode(stream.tokens[start:first].tolist(), skip_special_tokens=False)
        assert asked.endswith(tiny_pair.prompt_text(ex.prompt))


def test_the_first_slots_of_a_block_weigh_most() -> None:
    """Bug: the last slots, which are hardly ever reached, decide what the drafter learns; or slots
    behind an answer count."""
    logits, labels = torch.zeros(1, 1, 3, 4), torch.tensor([[[0, 1, -100]]])
    logits[..., 0, 0] = 50.0  # the first slot is sure and right
    weight = math.exp(-1 / train_tiny.GAMMA)
    expected = math.log(4) * weight / (1 + weight)
    assert train_tiny.block_loss(logits, labels).item() == pytest.approx(expected)


def test_a_pair_that_is_trained_anew_has_the_same_files(tmp_path: Path) -> None:
    """Bug: the next pair has another context, end or padding than the bundled one, and nobody sees
    it before it is bundled."""
    tokenizer = Tokenizer.from_file(str(TINY_TARGET / "tokenizer.json"))
    stop = tiny_pair.token_id(tokenizer, tiny_pair.IM_END)
    tiny_pair.save_tokenizer(tokenizer, tmp_path)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert len(written) == 4
    for name, text in written.items():
        known = (TINY_TARGET / name).read_text()
        assert text == known if name.endswith("jinja") else json.loads(text) == json.loads(known)
    for folder, shape, architecture in (
        (TINY_TARGET, tiny_pair.TARGET, "Qwen3ForCausalLM"),
        (TINY_DRAFT, tiny_pair.DRAFT, "DFlashDraftModel"),
    ):
        bundled = json.loads((folder / "config.json").read_text())
        made = tiny_pair.flat_config(shape, architecture, stop)
        assert {key: bundled[key] for key in made} == made


def test_what_an_optimizer_changes() -> None:
    """Bug: the embedding decays with the matrices, or is in neither group; or the first step of a
    schedule changes nothing, or its last one is as long as the others."""
    model = train_tiny.Drafter(tiny_pair.DRAFT, len(train_tiny.TAPS), train_tiny.BLOCK_SIZE)
    model.embed = torch.nn.Embedding(3, 4)
    optimizer = train_tiny.optimizer_for(model, 1.0, "cpu")
    decay, rest = ({id(p) for p in group["params"]} for group in optimizer.param_groups)
    assert (optimizer.param_groups[0]["weight_decay"], len(decay & rest)) == (0.1, 0)
    assert decay | rest == {id(p) for p in model.parameters()} and id(model.fc.weight) in decay
    assert {id(model.embed.weight), id(model.norm.weight)} <= rest
    rates = [optimizer.param_groups[1]["lr"] for _ in train_tiny.schedule(optimizer, 1.0, 1e9, 40)]
    assert len(rates) == 40 and rates[0] == pytest.approx(0.25) and rates[39] < 0.01
    assert max(rates) > 0.95


def test_each_category_has_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a category without one ends the evaluation, behind all the training."""
    count = len(train_tiny.CATEGORIES) - 1
    monkeypatch.setattr("sys.argv", ["train_tiny.py", "--eval-prompts", str(count)])
    with pytest.raises(SystemExit, match="2"):
        train_tiny.main()


def test_ties_are_those_of_the_answer() -> None:
    """Bug: the shares of near ties, by which texts of two engines may differ, are of the tokens
    behind an answer's own."""
    margins = torch.tensor([0.0, 0.0, 0.1, 5.0, 5.0])  # of what follows each of five tokens

    class Ties:
        model = SimpleNamespace(embed_tokens=SimpleNamespace(weight=margins))

        def __call__(self, ids: torch.Tensor) -> tuple[torch.Tensor, None]:
            return margins[ids], None

        def head(self, rows: torch.Tensor) -> torch.Tensor:
            return torch.stack([rows, 0 * rows], dim=-1)

    target: Any = Ties()
    found = train_tiny.near_ties(target, [([0, 1], [2, 3, 4])])
    assert found == {"tokens": 3, "equal": 1 / 3, "closer_than_0.25": 2 / 3}
