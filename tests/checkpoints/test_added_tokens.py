"""Tokens that a fine-tune added to the tokenizer alone: the embedding has no row for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphengine import Engine
from graphengine.checkpoints.tokenizer import Tokenizer
from tests.support.checkpoints import CHAT_TEMPLATE, make_target
from tests.support.command_line import invoke, refused
from tests.support.doctored import check, named

VOCAB, PAD = 512, 512
OUTSIDE = rf"'\[PAD\]', token {PAD}, which lies outside the model's vocabulary of {VOCAB}; leave it"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a token for every row, and three more."""
    directory = make_target(tmp_path_factory.mktemp("added"), layers=1, vocab=VOCAB)
    tokenizer = Tokenizer(directory)
    hf = tokenizer._hf
    hf.add_tokens([f"<row {token}>" for token in range(len(tokenizer), VOCAB)])
    hf.add_special_tokens({"pad_token": "[PAD]"})
    hf.add_tokens(["<tool>", "plain word"])
    hf.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(directory, buckets=(1,), max_model_len=64) as engine:
        yield engine


def test_it_runs_without_them(engine: Engine) -> None:
    """Bug: a fine-tune that added a padding token is refused as a pair of different models, which
    transformers and vLLM run; or a message that spells its control token is."""
    (result,) = engine.generate("one [PAD] two", max_new_tokens=3, ignore_eos=True)
    assert len(result.token_ids) == 3


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("one [PAD] two", {"raw": True}),
        ("one", {"bad_words": ["[PAD]"]}),
    ],
)
def test_a_text_that_has_one(engine: Engine, prompt: Any, asked: dict[str, Any]) -> None:
    """Bug: the id indexes past the embedding, or the refusal names neither token nor remedy."""
    with pytest.raises(ValueError, match=OUTSIDE):
        engine.generate(prompt, max_new_tokens=3, **asked)
    with pytest.raises(ValueError, match=rf"'plain word', token {PAD + 2}, which lies outside"):
        engine.generate("a plain word", max_new_tokens=3)


def test_ids_that_have_one(engine: Engine) -> None:
    """Bug: the bound of the ids that a caller names grows with the tokenizer."""
    named_by: list[tuple[list[int], dict[str, Any]]] = [
        ([PAD], {}),
        ([5], {"stop_token_ids": [PAD]}),
        ([5], {"logit_bias": {PAD: 1.0}}),
    ]
    for prompt, asked in named_by:
        with pytest.raises(ValueError, match=rf"\[{PAD}\].* lie outside the vocabulary of {VOCAB}"):
            engine.generate(prompt, max_new_tokens=3, **asked)


def test_a_prompt_that_begins_with_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: what the tokenizer puts in front of a text is not looked at."""
    monkeypatch.setattr(engine.tokenizer, "_front", [PAD])
    with pytest.raises(ValueError, match=OUTSIDE):
        engine.generate("one", max_new_tokens=3, raw=True)


def test_a_chat_template_that_writes_one(directory: Path, tmp_path: Path) -> None:
    """Bug: a conversation runs with an id past the embedding, or doctor calls such a template
    fine."""
    for file in directory.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.jinja").write_text(f"[PAD]{CHAT_TEMPLATE}")
    with (
        Engine.from_pretrained(tmp_path, buckets=(1,), max_model_len=64) as engine,
        pytest.raises(ValueError, match=OUTSIDE),
    ):
        engine.generate("one", max_new_tokens=3)
    (found,) = named(check(tmp_path, None), "target.chat_template")
    assert found.level == "error" and "'[PAD]', token 512" in found.value


def test_a_grammar_goes_without_them(engine: Engine) -> None:
    """Bug: llguidance refuses a tokenizer of more tokens than logits, at the first grammar; or an
    answer spells one by an id that no mask has."""
    (result,) = engine.generate("one", choice=["[PAD]plain word"], max_new_tokens=40)
    assert (result.text, result.finish_reason) == ("[PAD]plain word", "stop")
    assert max(result.token_ids) < VOCAB
    with pytest.raises(ValueError, match='unknown special token: "<tool>"'):
        engine.generate("one", grammar="start: <tool>", max_new_tokens=3)


def test_a_grammar_where_the_vocabulary_has_them(directory: Path) -> None:
    """Bug: a token that stands among the added ones and in the vocabulary too is left there, and
    llguidance refuses the tokenizer."""
    from graphengine.config.constraint import Constraint
    from graphengine.decode.grammar import Grammars

    parts = json.loads(Tokenizer(directory).as_json())
    parts["model"]["vocab"]["[PAD]"] = PAD
    grammars = Grammars(lambda: json.dumps(parts), VOCAB, [2])
    assert grammars.matcher(Constraint("choice", '["[PAD]"]')).forced(9)


def test_doctor_names_them(directory: Path) -> None:
    """Bug: doctor refuses what runs, or keeps silent about prompts that will not."""
    found = check(directory, None)
    (finding,) = named(found, "target.tokenizer")
    assert finding.level == "info" and "'[PAD]' (512), '<tool>' (513)" in finding.remedy
    assert not [finding for finding in found.findings if finding.level == "error"]


def test_commands_name_them(directory: Path, tmp_path: Path) -> None:
    """Bug: `run` takes the tokenizer, and `verify` refuses it or loads all to refuse a prompt."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "[PAD]"}')
    for command in ("run", "verify"):
        arguments = (command, directory, "--raw", "--prompt-file", file, "--device", "cpu")
        refused(invoke(*arguments), "'[PAD]', token 512", "vocabulary of 512; leave it out")
