"""`doctor` on damaged files: what the engine refuses is found before anything loads."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphengine.doctor.files import read_model_files
from tests.support.checkpoints import edit_config
from tests.support.doctored import (
    check,
    dflash,
    drop_tensor,
    errors,
    load,
    named,
    put_tensor,
)


def truncate(path: Path, name: str = "model.safetensors") -> None:
    file = path / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


KIND = "PreTrainedTokenizerFast"
DAMAGES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "missing tensor": (lambda t, d: drop_tensor(d, "fc.weight"), "draft.weights"),
    "unexpected tensor": (lambda t, d: put_tensor(t, "x", torch.ones(2)), "target.weights"),
    "misshaped tensor": (
        lambda t, d: put_tensor(d, "norm.weight", torch.ones(2)),
        "draft.weights",
    ),
    "integer weights": (
        lambda t, d: put_tensor(d, "norm.weight", torch.ones(64, dtype=torch.int64)),
        "draft.weights.dtype",
    ),
    "map of complex numbers": (
        lambda t, d: put_tensor(d, "d2t", torch.zeros(512, dtype=torch.complex64)),
        "draft.weights.dtype",
    ),
    "map in float8": (
        lambda t, d: put_tensor(d, "d2t", torch.zeros(512).to(torch.float8_e4m3fn)),
        "draft.weights.dtype",
    ),
    "shard with a long name": (
        lambda t, d: (d / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"fc.weight": "x" * 5000}})
        ),
        "draft.weights",
    ),
    "truncated weights": (lambda t, d: truncate(t), "target.weights"),
    "no weights": (lambda t, d: (d / "model.safetensors").unlink(), "draft.weights"),
    "truncated config": (lambda t, d: truncate(t, "config.json"), "target.config"),
    "truncated tokenizer": (lambda t, d: truncate(t, "tokenizer.json"), "target.tokenizer"),
    "config is a list": (lambda t, d: (d / "config.json").write_text("[]"), "draft.config"),
    "deep config": (lambda t, d: (d / "config.json").write_text("[" * 99999), "draft.config"),
    "no config": (lambda t, d: (d / "config.json").unlink(), "draft.directory"),
    "no tokenizer": (lambda t, d: (t / "tokenizer.json").unlink(), "target.tokenizer"),
    "no theta": (lambda t, d: edit_config(d, lambda c: c | {"rope_theta": None}), "draft.config"),
    "other hidden": (
        lambda t, d: edit_config(d, lambda c: c | {"hidden_size": 32}),
        "pair.hidden_size",
    ),
    "other vocabulary": (
        lambda t, d: edit_config(d, lambda c: c | {"vocab_size": 500}),
        "pair.vocabulary",
    ),
    "other depth": (lambda t, d: edit_config(d, dflash(num_target_layers=9)), "pair.num_layers"),
    "taps past the target": (
        lambda t, d: edit_config(d, dflash(num_target_layers=None, target_layer_ids=[0, 7])),
        "pair.taps",
    ),
    "duplicate taps": (
        lambda t, d: edit_config(d, dflash(target_layer_ids=[1, 1])),
        "draft.config",
    ),
    "mask outside": (lambda t, d: edit_config(d, dflash(mask_token_id=512)), "pair.mask_token"),
    "no mask": (lambda t, d: edit_config(d, dflash(mask_token_id=None)), "draft.config"),
    "layers past reason": (
        lambda t, d: edit_config(t, lambda c: c | {"num_hidden_layers": 10**9}),
        "target.config",
    ),
    "a number past any float": (
        lambda t, d: edit_config(t, lambda c: c | {"rms_norm_eps": 10**400}),
        "target.config",
    ),
    "small embedding": (
        lambda t, d: edit_config(t, lambda c: c | {"vocab_size": 100}),
        "target.tokenizer",
    ),
    "bad stop tokens": (
        lambda t, d: edit_config(t, lambda c: {"eos_token_id": "x"}, "generation_config.json"),
        "target.stop_tokens",
    ),
    "stop tokens that link to nowhere": (
        lambda t, d: (
            (t / "generation_config.json").unlink(),
            (t / "generation_config.json").symlink_to("gone"),
        ),
        "target.directory",
    ),
    "no control tokens": (
        lambda t, d: (
            edit_config(t, lambda c: c | {"added_tokens": []}, "tokenizer.json"),
            edit_config(
                t,
                lambda c: (
                    {k: v for k, v in c.items() if "token" not in k} | {"tokenizer_class": KIND}
                ),
                "tokenizer_config.json",
            ),
        ),
        "target.tokenizer",
    ),
    "another kind of model": (
        lambda t, d: edit_config(t, lambda c: c | {"model_type": "mamba"}),
        "target.config",
    ),
    "no drafter": (lambda t, d: shutil.rmtree(d), "draft.directory"),
    "no target": (lambda t, d: shutil.rmtree(t), "target.directory"),
    "swapped": (
        lambda t, d: (t.rename(t.with_name("x")), d.rename(t), t.with_name("x").rename(d)),
        "target.config",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_before_loading(copies: tuple[Path, Path], damage: str) -> None:
    """Bug: doctor passes a pair that the engine refuses, or names the wrong file for it."""
    change, name = DAMAGES[damage]
    change(*copies)
    found = check(*copies)
    assert name in errors(found), [str(f) for f in found.findings if f.level != "ok"]
    for finding in found.findings:
        if finding.level in ("warning", "error"):
            assert finding.value
            assert finding.remedy
    with pytest.raises(ValueError, match=r"."):
        load(*copies)


@pytest.mark.parametrize("template", ["{% for a in messages", "{{ messages[0].content.x() }}"])
def test_a_template_that_no_prompt_survives(copies: tuple[Path, Path], template: str) -> None:
    """Bug: no errors are found, and every prompt is refused."""
    (copies[0] / "chat_template.jinja").write_text(template)
    found = check(*copies)
    assert errors(found) == ["target.chat_template"]
    with load(*copies) as engine, pytest.raises(ValueError, match="chat template"):
        engine.generate("hello")


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{# nothing #}", "'hello', 'good day', 'what is new'"),
        ("{% for m in messages %}{{ m.role }}:{% endfor %}", "'hello', 'good day', 'what is new'"),
        ("{{ messages[0].content }}", "['good day', 'what is new']"),
        ("{{ messages[0].content if messages | length == 1 else raise_exception('one') }}", "one"),
    ],
)
def test_a_template_that_loses_what_is_said(
    copies: tuple[Path, Path], template: str, why: str
) -> None:
    """Bug: a template that renders nothing, or not what the user says, is called present."""
    (copies[0] / "chat_template.jinja").write_text(template)
    (finding,) = named(check(*copies), "target.chat_template")
    assert finding.level == "warning" and why in finding.value and "--raw" in finding.remedy


def test_a_template_that_keeps_what_is_said(copies: tuple[Path, Path]) -> None:
    """Bug: a good template is warned about."""
    assert [found.level for found in named(check(*copies), "target.chat_template")] == ["ok"]


def test_the_files_are_read_without_transformers(
    copies: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: where a package is missing that reads one of the files, doctor, which is to say so, ends
    in a traceback."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    found = check(*copies)
    assert errors(found) == ["target.tokenizer"]
    assert "transformers" in named(found, "target.tokenizer")[0].value


def test_a_key_of_the_config_is_no_fault_of_the_tokenizer(copies: tuple[Path, Path]) -> None:
    """Bug: the tokenizer is loaded, for minutes, by a config.json that was refused, and blamed."""
    edit_config(copies[0], lambda c: c | {"initializer_range": 0})
    assert not check(*copies).has_errors
    edit_config(copies[0], lambda c: c | {"num_hidden_layers": 10**12})
    found = check(*copies)
    assert [name for name in errors(found) if name.startswith("target")] == ["target.config"]
    assert "num_hidden_layers" in named(found, "target.config")[0].value


def test_float16_weights_are_noted(copies: tuple[Path, Path]) -> None:
    """Bug: float16 weights are taken without saying that they run as bfloat16."""
    file = copies[1] / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file)
    found = check(*copies)
    (finding,) = named(found, "draft.weights.dtype")
    assert (finding.value, finding.level) == ("F16", "info")
    assert not found.has_errors


def test_a_hub_model_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: to look at a model that is not there, 16 GB of it are fetched first."""
    asked: list[bool] = []

    def snapshot_download(name: str, *, local_files_only: bool, **_: object) -> str:
        asked.append(local_files_only)
        raise OSError(name)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    found = read_model_files("nobody/nothing", with_tokenizer=False)
    assert asked == [True] and "hf download nobody/nothing" in found.problems["directory"]


def test_nothing_more_is_said_of_files_that_are_not_there(tmp_path: Path) -> None:
    """Bug: behind the error that names the folder stand others of its config and weights, in the
    words of Python."""
    found = read_model_files(tmp_path / "nowhere", with_tokenizer=True)
    assert list(found.problems) == ["directory"] and found.directory is None


def test_what_is_skipped_is_not_unexpected(copies: tuple[Path, Path]) -> None:
    """Bug: what the loader passes over, a table that old versions stored, is told as an error."""
    put_tensor(copies[0], "model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(8))
    assert not errors(check(*copies))


@pytest.mark.parametrize("count", [3, 4])
def test_as_many_faulty_tensors_as_a_line_holds(copies: tuple[Path, Path], count: int) -> None:
    """Bug: where three are missing there are said to be more, or of four none is said to be left
    out; or they are told as unexpected ones."""
    names = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    names.append("model.norm.weight")
    for name in names[:count]:
        drop_tensor(copies[0], name)
    (found,) = [f for f in check(*copies).findings if f.name == "target.weights"]
    assert found.value == f"{count} missing: {', '.join(names[:3])}" + ", .." * (count > 3)


def test_what_is_skipped_has_no_size(copies: tuple[Path, Path]) -> None:
    """Bug: the size of the weights counts a table, or a part for pictures, that no start loads."""
    before = named(check(*copies), "target.weights")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    put_tensor(copies[0], name, torch.zeros(1 << 20))
    assert named(check(*copies), "target.weights") == before


def test_a_tied_head_that_is_stored_too(copies: tuple[Path, Path]) -> None:
    """Bug: a tied checkpoint that holds its table twice, which a start takes, is told as wrong; or
    such a head of another shape, which it refuses, is not."""
    table = load_file(copies[0] / "model.safetensors")["model.embed_tokens.weight"]
    put_tensor(copies[0], "lm_head.weight", table.clone())
    assert not errors(check(*copies))
    put_tensor(copies[0], "lm_head.weight", table[1:].clone())
    assert errors(check(*copies)) == ["target.weights"]


@pytest.mark.parametrize("part", [0, 1])
def test_the_file_that_is_refused_is_named(copies: tuple[Path, Path], part: int) -> None:
    """Bug: a wrong value is told of the model's directory, which has several files, or of the other
    model."""
    edit_config(copies[part], lambda c: c | {"hidden_size": "wide"})
    (finding,) = named(check(*copies), ("target.config", "draft.config")[part])
    assert finding.level == "error"
    assert finding.value.startswith(f"{copies[part] / 'config.json'}: hidden_size ")


def test_which_shape_is_wrong(copies: tuple[Path, Path]) -> None:
    """Bug: the shape that a tensor has is told as the one that it should have."""
    put_tensor(copies[1], "norm.weight", torch.ones(2))
    (finding,) = named(check(*copies), "draft.weights")
    assert finding.value == "1 misshaped: norm.weight [2] instead of [64]"


def test_weights_have_their_own_remedy(copies: tuple[Path, Path]) -> None:
    """Bug: of weights that lie there twice it says "fetch the weights again", which helps nobody
    who saved them: which file to remove is lost in the line above."""
    (copies[0] / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x"}}')
    (finding,) = named(check(*copies), "target.weights")
    assert finding.level == "error" and finding.value.endswith("engines differ in which they read")
    assert finding.remedy == "remove model.safetensors or model.safetensors.index.json"
