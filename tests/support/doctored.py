"""What the tests of `doctor` share: a pair, ways to damage it, and what is found in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from graphengine.api import Engine
from graphengine.config.options import Options
from graphengine.doctor.doctor import Examination, examine
from graphengine.doctor.findings import Finding
from graphengine.doctor.host import read_host
from tests.support.checkpoints import edit_config, make_drafter, make_target

OPTIONS = Options(buckets=(1, 2), max_model_len=64, device="cpu")
HOST = read_host()
Edit = Callable[[dict[str, Any]], dict[str, Any]]


def make_pair(directory: Path) -> tuple[Path, Path]:
    """A target and its drafter that agree in everything."""
    target = make_target(directory / "target", layers=3)
    draft = make_drafter(
        directory / "draft", target, taps=(0, 2), rope={"rope_theta": 10000.0}, block_size=4
    )
    edit_config(target, lambda values: values | {"max_position_embeddings": 256})
    return target, draft


def make_copies(pair: tuple[Path, Path], directory: Path) -> tuple[Path, Path]:
    """The pair in `directory`, to damage."""
    for path in pair:
        shutil.copytree(path, directory / path.name)
    return directory / "target", directory / "draft"


def load(target: Path, draft: Path, **options: Any) -> Engine:
    asked = {"buckets": (1, 2), "max_model_len": 64, "device": "cpu"} | options
    return Engine.from_pretrained(target, draft, **asked)


def check(target: Path | str, draft: Path | str | None, **options: Any) -> Examination:
    return examine(target, draft, replace(OPTIONS, **options), HOST)


def named(found: Examination | list[Finding], name: str) -> list[Finding]:
    findings = found.findings if isinstance(found, Examination) else found
    return [finding for finding in findings if finding.name == name]


def errors(found: Examination) -> list[str]:
    return [finding.name for finding in found.findings if finding.level == "error"]


# --- damage ---


def drop_tensor(path: Path, name: str) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)


def put_tensor(path: Path, name: str, tensor: torch.Tensor) -> None:
    file = path / "model.safetensors"
    save_file(load_file(file) | {name: tensor}, file)


def dflash(**values: Any) -> Edit:
    return lambda config: config | {"dflash_config": config["dflash_config"] | values}
