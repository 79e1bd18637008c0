"""Files and folders that a command writes to: what is refused at once, and what is told."""

from __future__ import annotations

import json
import os
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from graphengine.api import Engine
from graphengine.capture import cache_folder
from graphengine.cli import cache
from graphengine.cli.main import main
from graphengine.cli.options import check_places, deliver
from graphengine.startup import artifact
from graphengine.startup.compilers import NOT_USED
from tests.test_report import startup


def test_folders_are_made_for_results_alone(tmp_path: Path) -> None:
    """Bug: `compile --output` or `--plot` into a folder that is not there is refused behind minutes
    of work; or that of a result, which is made, is refused."""
    file = tmp_path / "new" / "file.svg"
    for name, option in (("output", "--output"), ("plot", "--plot")):
        text = f"{option} {file}: cannot be written (no such folder); make it first"
        with pytest.raises(ValueError, match=re.escape(text)):
            check_places({name: file})
    check_places({"output_json": file})


def test_a_file_is_named_once(tmp_path: Path) -> None:
    """Bug: the message of a result that could not be written begins with its path twice."""
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "x.json"
    options = {"as_json": False, "output_json": path, "plot": None, "commit": "a"}
    with pytest.raises(click.ClickException) as told:
        deliver(options, "profile", {"step_ms": 1.0}, {}, str.encode)
    assert told.value.message.startswith(f"{path}: its folder cannot be made")


def test_why_a_cache_folder_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: of a folder that is another user's the remedy is to make it writable."""
    monkeypatch.setenv("GRAPHENGINE_CACHE", str(tmp_path))
    platform = artifact.store(tmp_path, artifact.platform_parts("cpu")).folder
    (platform / "inductor").mkdir(parents=True)
    monkeypatch.setattr(cache_folder, "others_can_write", lambda folder: "belongs to user 5")
    monkeypatch.setattr(os, "access", lambda path, mode: path != platform / "inductor")
    with cache.compiled_code("cpu", None) as found:
        assert found is None
    assert capsys.readouterr().err == f"note: {platform} belongs to user 5 {NOT_USED}\n"


def test_what_compile_notes_is_in_its_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the JSON does not say that what was compiled lies in the user's own folder."""
    config = SimpleNamespace(buckets=(1,), max_model_len=64)
    built = SimpleNamespace(target=None, draft=None)
    engine = SimpleNamespace(config=config, startup=startup(), built=built)
    engine.generate = lambda *_, **__: None
    monkeypatch.setattr(Engine, "from_pretrained", lambda *_, **__: nullcontext(engine))
    monkeypatch.setattr(artifact, "engine_parts", lambda *_: {"code": "x"})
    env: dict[str, str | None] = dict.fromkeys(cache._CACHE_VARIABLES)
    env |= {"GRAPHENGINE_CACHE": str(tmp_path), cache.INDUCTOR_FOLDER: str(tmp_path / "own")}
    done = CliRunner().invoke(main, ["compile", "--device", "cpu", "--json"], env=env)
    assert done.exit_code == 0, done.output
    (note,) = json.loads(done.stdout)["notes"]
    assert note.startswith(f"TORCHINDUCTOR_CACHE_DIR is {tmp_path / 'own'}:")
    assert done.stderr.splitlines()[0] == note
