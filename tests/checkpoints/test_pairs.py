"""Directories and names of models: the pair they mean, the hub, where answers end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from graphengine.checkpoints.hub import BUNDLED, PRESETS, resolve
from graphengine.checkpoints.pairs import named_pair, read_json, read_stop_ids
from graphengine.config.draft_formats import parse_draft
from tests.support.checkpoints import as_speculators, edit_config, make_drafter, make_target


def test_a_verifier_beside_the_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a relative path in a drafter's file is looked for where the command was typed."""
    target = make_target(tmp_path / "target", layers=1)
    draft = make_drafter(tmp_path / "draft", target, layers=1, taps=(0,))
    both = as_speculators(tmp_path / "both", draft, target)
    verifier = {"verifier": {"name_or_path": "../target"}}
    edit_config(both, lambda values: values | {"speculators_config": verifier})
    monkeypatch.chdir("/")
    found, drafter = named_pair(both, None)
    assert Path(found).resolve() == target and drafter == str(both)


def test_a_bundled_pairs_name_as_the_drafter(tmp_path: Path) -> None:
    """Bug: --draft tiny is refused with the advice to pass tiny."""
    target = make_target(tmp_path / "target", layers=1)
    for name, (_, drafter) in BUNDLED.items():
        assert named_pair(target, name)[1] == named_pair(name, name)[1] == str(drafter)


def test_a_name_that_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a mistyped directory is looked for on the hub, or who types NONE is told of presets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked"))
    for name in ("qwen3-8", "a/b/c", "./a/b", "./a", "../a"):
        with pytest.raises(ValueError, match=r"no such model dir.*a drafter ngram or none"):
            resolve(name)


@pytest.mark.parametrize("beside", [(), ("config.json", "model.safetensors")])
def test_an_adapter_is_not_passed_over(tmp_path: Path, beside: tuple[str, ...]) -> None:
    """Bug: a LoRA beside its model's weights is left out, where transformers adds it; of one alone
    the message asks for a config.json that nobody has."""
    for name in ("adapter_config.json", "adapter_model.safetensors", *beside):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=r"adapter_config.json: adapters are not.*merge_and_unl"):
        resolve(str(tmp_path))


def test_what_the_presets_drafters_are() -> None:
    """Bug: a preset's drafter reads other layers, or other rows, than the published one: what is
    timed with it is another model's."""
    found = {}
    for folder in sorted(PRESETS.glob("*dflash*")):
        draft = parse_draft(*read_json(folder / "config.json"))
        shape = draft.model.num_hidden_layers, draft.block_size, draft.mask_token_id
        found[folder.name] = (*shape, draft.target_layer_ids)
    assert found == {
        "gpt-oss-20b-dflash-b8": (8, 8, 200000, (1, 6, 11, 16, 21)),
        "llama-3.1-8b-dflash-b10": (5, 10, 128002, (1, 8, 15, 22, 29)),
        "qwen3-4b-dflash-b16": (5, 16, 151669, (1, 9, 17, 25, 33)),
        "qwen3-8b-dflash-b16": (5, 16, 151669, (1, 9, 17, 25, 33)),
        "qwen3.5-4b-dflash-b16": (6, 16, 248070, (1, 5, 9, 13, 17, 21, 25, 29)),
        "qwen3.5-9b-dflash-b16": (6, 16, 248070, (1, 5, 9, 13, 17, 21, 25, 29)),
        "qwen3.6-27b-dflash-b16": (5, 16, 248070, (1, 16, 31, 46, 61)),
        "qwen3.6-35b-a3b-dflash-b16": (6, 16, 248077, (1, 6, 11, 16, 22, 27, 32, 37)),
    }


def test_a_directory_with_a_preset_s_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: of a model that was fetched into ./qwen3-8b the preset's shapes are taken."""
    monkeypatch.chdir(tmp_path)
    assert resolve("qwen3-8b").parent == PRESETS
    (tmp_path / "qwen3-8b").mkdir()
    (tmp_path / "qwen3-8b" / "config.json").write_text("{}")
    assert resolve("qwen3-8b") == Path("qwen3-8b")


def test_a_directory_with_a_bundled_pair_s_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: of a model that was saved as ./tiny the bundled pair answers, and nobody is told; or it
    answers where no model is named."""
    bundled = named_pair(None, None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert named_pair("tiny", "tiny") == bundled
    make_target(tmp_path / "tiny", layers=1)
    assert named_pair("tiny", None) == ("tiny", None)
    assert named_pair("tiny-hybrid", "tiny")[1] == "tiny"
    assert named_pair(None, None) == bundled


def test_a_directory_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: `~` in a name that no shell has expanded, as in Python, is no such model directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert resolve("~/model") == resolve(Path("~/model")) == tmp_path / "model"


def test_what_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a file that a model needs stays on the hub, and it answers without its chat template or
    does not load; or code and pickles are fetched, or a Mistral's weights twice, in a format of
    their own."""
    read = "config.json generation_config.json tokenizer.json tokenizer_config.json vocab.json"
    read += " merges.txt chat_template.jinja model.safetensors model-00001-of-00002.safetensors"
    read += " model.safetensors.index.json"
    left = "modeling.py pytorch_model.bin model.pt model.pth model.gguf"
    left += " consolidated.safetensors consolidated-00001-of-00002.safetensors"
    left += " original/model.safetensors"

    def snapshot_download(name: str, **asked: Any) -> str:
        fetched = huggingface_hub.utils.filter_repo_objects(
            [*read.split(), *left.split()],
            allow_patterns=asked["allow_patterns"],
            ignore_patterns=asked.get("ignore_patterns"),
        )
        for file in fetched:
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert sorted(path.name for path in resolve("me/target").iterdir()) == sorted(read.split())


def test_a_hub_model_that_is_half_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: of a hub model, whose files are links into a cache, one that is gone counts as one that
    the model does not have: answers do not end, since their end stood there."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").symlink_to("gone")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ValueError, match=r"generation_config\.json: is a link to a file that is"):
        resolve("me/target")


def test_a_generation_config_without_ends(tmp_path: Path) -> None:
    """Bug: a generation_config.json that names no end takes away those of config.json, and every
    answer runs to its budget."""
    model: Any = SimpleNamespace(eos_token_ids=(7,), vocab_size=8)
    path = tmp_path / "generation_config.json"
    for text, found in (
        (None, ((7,), "config.json")),
        ("{}", ((7,), "config.json")),
        ('{"eos_token_id": [1, 2]}', ((1, 2), path.name)),
    ):
        if text is not None:
            path.write_text(text)
        assert read_stop_ids(tmp_path, model) == found


def test_an_end_that_the_tokenizer_alone_names(tmp_path: Path) -> None:
    """Bug: a checkpoint whose configs name no end, as re-saved ones, answers to its budget, though
    its tokenizer has an end; or the tokenizer's takes the place of one that they name; or a
    tokenizer without one, or damaged, ends the start."""
    model: Any = SimpleNamespace(eos_token_ids=(), vocab_size=8)
    named, vocabulary = tmp_path / "tokenizer_config.json", tmp_path / "tokenizer.json"
    vocabulary.write_text('{"added_tokens": [{"id": 3, "content": "<a>"}, {"content": "<b>"}, 1]}')
    for text, found in (
        ('{"eos_token": "<a>"}', (3,)),
        ('{"eos_token": {"content": "<a>"}}', (3,)),
        ('{"eos_token": "<b>"}', ()),
        ('{"eos_token": "<c>"}', ()),
        ('{"eos_token": null}', ()),
        ("{}", ()),
    ):
        named.write_text(text)
        name = named.name if found else "config.json"
        assert read_stop_ids(tmp_path, model) == (found, name), text
    named.write_text('{"eos_token": "<a>"}')
    vocabulary.write_text('{"added_tokens": [{"id": 8, "content": "<a>"}]}')
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: eos_token_id \[8\] .* write"):
        read_stop_ids(tmp_path, model)
    vocabulary.write_text("{}")
    assert read_stop_ids(tmp_path, model)[0] == ()
    model.eos_token_ids = (7,)
    assert read_stop_ids(tmp_path, model) == ((7,), "config.json")


def test_ends_outside_the_vocabulary(tmp_path: Path) -> None:
    """Bug: no end token can come up, and every answer runs to its budget; or one of several, or the
    last row of the embedding, is refused."""
    model: Any = SimpleNamespace(eos_token_ids=(8,), vocab_size=8)
    with pytest.raises(
        ValueError, match=r"config\.json: eos_token_id \[8\] .* vocab_size 8; write"
    ):
        read_stop_ids(tmp_path, model)
    path = tmp_path / "generation_config.json"
    path.write_text('{"eos_token_id": [9, 8]}')
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id \[9, 8\]"):
        read_stop_ids(tmp_path, model)
    path.write_text('{"eos_token_id": [8, 7]}')
    assert read_stop_ids(tmp_path, model)[0] == (8, 7)
