"""Files and folders that a command writes to: what is refused at once, and what is told."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from graphengine.cli.options import check_places, deliver


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
