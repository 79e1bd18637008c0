"""Files of a user that are not what they should be: refused with a message, never a traceback.

Damaged, truncated, hostile or of another format; the loader may succeed or raise ValueError, which
the command shows as one sentence. Nothing else may come out, and no code of a checkpoint may run.
"""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from graphengine.api import Engine
from graphengine.checkpoints.hub import resolve
from graphengine.checkpoints.sources import Checkpoint
from graphengine.checkpoints.weights import target_weights
from graphengine.cli.main import main
from graphengine.config.model import ModelConfig
from tests.support.checkpoints import edit_config, make_drafter, make_target
from tests.support.examples import examples

CPU = torch.device("cpu")
FUZZ = settings(
    deadline=None,
    max_examples=examples(120),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An intact target and drafter; tests work on copies."""
    directory = tmp_path_factory.mktemp("pair")
    target = make_target(directory / "target", layers=1, max_positions=64)
    return target, make_drafter(directory / "drafter", target, layers=1, taps=(0,))


@pytest.fixture
def copies(pair: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    target, drafter = (Path(shutil.copytree(path, tmp_path / path.name)) for path in pair)
    return target, drafter


def opens(target: Path, drafter: Path | None = None) -> str | None:
    """None if the pair loads and decodes; else the refusal. Anything else is a failed test."""
    try:
        with Engine.from_pretrained(target, drafter, buckets=(1,), device="cpu") as engine:
            (result,) = engine.generate([5, 6], max_new_tokens=3, ignore_eos=True)
            assert result.finish_reason in ("length", "error")
    except ValueError as error:
        return str(error)
    return None


def test_intact(copies: tuple[Path, Path]) -> None:
    """Bug: everything below is refused for another reason than the damage."""
    assert opens(*copies) is None


# --- config.json and its kin ---

WRONG = [None, True, -1, 0, 1, 3, 1.5, 1e300, 2**40, 10**30, "", "x", [], [0], [-1], {}, {"a": 1}]


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_every_key_with_every_kind_of_value(copies: tuple[Path, Path], which: int) -> None:
    """Bug: a value of a wrong type or size is a TypeError, a MemoryError or an endless loop deep in
    the engine."""
    path = copies[which] / "config.json"
    intact = json.loads(path.read_text())
    keys = [(key, None) for key in intact]
    keys += [("dflash_config", key) for key in intact.get("dflash_config", ())]
    refused = 0
    for key, inner in keys:
        for value in WRONG:
            changed = json.loads(json.dumps(intact))
            if inner is None:
                changed[key] = value
            else:
                changed[key][inner] = value
            path.write_text(json.dumps(changed))
            refused += opens(*copies) is not None
    assert refused > 3 * len(keys)


JSON_DAMAGE: dict[str, bytes] = {
    "empty": b"",
    "truncated": b'{"model_type": "qwen3", ',
    "not-utf-8": b'{"model_type": "\xff\xfe"}',
    "list": b"[]",
    "number": b"3",
    "deep": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "digits": b'{"vocab_size": ' + b"9" * 5000 + b"}",
    "binary": bytes(range(256)) * 4,
}
JSON_FILES = [
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    "model.safetensors.index.json",
]


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize("damage", JSON_DAMAGE)
def test_damaged_json(copies: tuple[Path, Path], name: str, damage: str) -> None:
    """Bug: a file that is no JSON object is an error of the parser, without the file's name."""
    target, _ = copies
    (target / name).write_bytes(JSON_DAMAGE[damage])
    message = opens(target)
    assert message is not None and str(target) in message


@pytest.mark.parametrize("value", [*WRONG, [1, "x"], [[1]], 2**63])
def test_end_tokens(copies: tuple[Path, Path], value: Any) -> None:
    """Bug: an end token that is no token makes every answer endless, or ends in a TypeError."""
    edit_config(copies[0], lambda old: {"eos_token_id": value}, "generation_config.json")
    message = opens(*copies)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    right = all(type(token) is int and 0 <= token < 512 for token in ids)  # rows of its embedding
    assert (message is None) == right
    assert right or "eos_token_id" in (message or "")


@pytest.mark.parametrize(
    "weight_map",
    [None, [], 3, "x", {}, {"a": 1}, {"a": None}, {"a": ["x"]}, {"a": "missing.safetensors"}],
)
def test_damaged_index(copies: tuple[Path, Path], weight_map: Any) -> None:
    """Bug: the index decides which files exist, and nobody looks at its types."""
    target, _ = copies
    index = target / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    message = opens(target)
    assert message is not None and str(target) in message


# --- safetensors ---


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """A safetensors file's header and what follows it."""
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def join(header: bytes, body: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + body


def load(target: Path) -> str | None:
    """None if the weights load, all of them; else the refusal."""
    config = ModelConfig.from_hf(json.loads((target / "config.json").read_text()))
    try:
        weights = target_weights(Checkpoint(target, CPU, torch.float32), config, 16, CPU)
    except ValueError as error:
        return str(error)
    assert weights.embed_VD.shape == (config.vocab_size, config.hidden_size)
    assert len(weights.layers) == config.num_hidden_layers
    return None


@pytest.mark.parametrize("are_left", [True, False])
def test_an_index_beside_a_whole_file(tmp_path: Path, are_left: bool) -> None:
    """Bug: a model saved whole where its shards had been, whose index transformers leaves, is told
    to be fetched again; or, where the shards are left too, these old weights are read without a
    word, and by transformers the new ones."""
    target = make_target(tmp_path, tokenizer=False, sharded=True)
    shards = sorted(target.glob("*.safetensors"))
    whole = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    save_file(whole, target / "model.safetensors")
    for shard in shards if not are_left else []:
        shard.unlink()
    assert "model.safetensors lies beside an index that names" in (load(target) or "")
    (target / "model.safetensors.index.json").unlink()  # the remedy
    assert load(target) is None


ENTRIES = st.one_of(
    st.none(),
    st.integers(-(2**65), 2**65),
    st.text(max_size=4),
    st.lists(st.integers(-5, 2**64), max_size=4),
    st.sampled_from(["F64", "F32", "BF16", "I8", "U64", "BOOL", "F8_E4M3", "F4", "C64", "f32"]),
)


@FUZZ
@given(
    entry=st.integers(0, 30),
    field=st.sampled_from(["dtype", "shape", "data_offsets", "", "rename", "drop", "repeat"]),
    value=ENTRIES,
)
def test_fuzzed_headers(
    pair: tuple[Path, Path], tmp_path: Path, entry: int, field: str, value: Any
) -> None:
    """Bug: a header that lies about a tensor crashes the reader, reads other bytes, or leaves a
    weight at zero."""
    target = tmp_path / "target"
    if not target.exists():
        shutil.copytree(pair[0], target)
    header, body = split((pair[0] / "model.safetensors").read_bytes())
    intact = json.loads(json.dumps(header))
    names = [name for name in header if name != "__metadata__"]
    name = names[entry % len(names)]
    if field in ("dtype", "shape", "data_offsets"):
        header[name][field] = value
    elif field == "":
        header[name] = value
    elif field == "rename":
        header[str(value)] = header.pop(name)
    elif field == "drop":
        header.pop(name)
    else:
        header[names[(entry + 1) % len(names)]] = dict(header[name])
    (target / "model.safetensors").write_bytes(join(json.dumps(header).encode(), body))
    assert (load(target) is None) == (header == intact)


@FUZZ
@given(st.data())
def test_flipped_bytes(pair: tuple[Path, Path], tmp_path: Path, data: st.DataObject) -> None:
    """Bug: noise in the header, or in its length, is anything but a refusal."""
    target = tmp_path / "target"
    if not target.exists():
        shutil.copytree(pair[0], target)
    original = (pair[0] / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", original[:8])
    changed = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, 8 + size - 1))] = data.draw(st.integers(0, 255))
    (target / "model.safetensors").write_bytes(bytes(changed))
    message = load(target)
    assert message is None or str(target) in message


def test_a_dtype_that_torch_does_not_have(copies: tuple[Path, Path]) -> None:
    """Bug: a dtype that the format knows and torch does not is the reader's own error."""
    size = 512 * 64 * 6 // 8
    entry = {"dtype": "F6_E2M3", "shape": [512, 64], "data_offsets": [0, size]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    (copies[0] / "model.safetensors").write_bytes(join(header, bytes(size)))
    message = load(copies[0]) or ""
    assert "F6_E2M3" in message and "model.embed_tokens.weight" in message


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63 - 1, 2**64 - 1])
def test_lengths_of_the_header(copies: tuple[Path, Path], length: int) -> None:
    """Bug: a header that says it is huge allocates before it is refused."""
    path = copies[0] / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    assert "truncated or damaged" in (load(copies[0]) or "")


# --- formats that run code ---


class Mine:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickles_are_refused_by_name(copies: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    """Bug: a pickle is unpickled, which runs its code; or the user is told that nothing is
    there."""
    target, _ = copies
    mark = tmp_path / "mark"
    (target / name).write_bytes(pickle.dumps(Mine(mark)))
    assert opens(target) is None, "beside safetensors it is not looked at"
    (target / "model.safetensors").unlink()
    message = opens(target) or ""
    assert f"only {name}" in message and "convert it to safetensors" in message
    assert not mark.exists()
    done = CliRunner().invoke(main, ["run", str(target), "--prompt", "x", "--bucket", "1"])
    assert done.exit_code == 2 and name in done.stderr and "Traceback" not in done.output


def test_code_beside_the_weights_does_not_run(copies: tuple[Path, Path], tmp_path: Path) -> None:
    """Bug: auto_map and trust_remote_code let a checkpoint bring its own classes."""
    mark = tmp_path / "mark"
    auto_map = {"AutoConfig": "mine.C", "AutoModel": "mine.M", "AutoTokenizer": ["mine.T", None]}
    for directory in copies:
        (directory / "mine.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
        (directory / "modeling_dflash.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
        edit_config(directory, lambda values: values | {"auto_map": auto_map})
    edit_config(copies[0], lambda values: values | {"auto_map": auto_map}, "tokenizer_config.json")
    opens(*copies)
    assert not mark.exists()


def test_what_the_system_will_not_look_at(tmp_path: Path) -> None:
    """Bug: links in a circle are called a directory that is not there; or a null character, of
    which no directory is, ends in a traceback."""
    (tmp_path / "model").symlink_to(tmp_path / "model")
    with pytest.raises(ValueError, match="model: Too many levels of symbolic links; pass a dir"):
        resolve(tmp_path / "model")
    with pytest.raises(ValueError, match="no such model directory"):
        resolve("./a\0b")


def test_a_name_that_is_too_long() -> None:
    """Bug: of a prompt that is passed as the model's name all is shown, and again in the reason."""
    with pytest.raises(ValueError, match="too long") as refused:
        resolve("x" * 301)
    assert str(refused.value) == (
        f"{'x' * 297}...: File name too long; pass a directory with config.json, or a hub id "
        "(owner/name)"
    )
