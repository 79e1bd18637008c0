"""What another process compiles by: the variables of who asks, and a cache that is there or not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import triton

from graphengine.kernels import compile_worker
from graphengine.kernels.compile_worker import compile_job, is_cache_empty, job_of


class Source(NamedTuple):
    """As far as a job asks what Triton's compiler is given."""

    fn: str
    signature: dict[str, str]
    constants: dict[str, int]
    attrs: dict[str, str]


def test_a_job_has_the_variables_of_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a worker compiles under variables that it was started with, so who asks finds nothing
    under its own key and compiles again; or a worker without a driver ends at the launcher."""
    given: list[Any] = []

    def compile_(src: Source, **named: Any) -> str:
        ours = ("TRITON_BOTH", "TRITON_OF_WORKER", "OTHER_OF_WORKER")
        given.extend([src, named, [os.environ.get(name) for name in ours]])
        return "compiled"

    def refuse(compiled: str) -> None:
        given.append(compiled)
        raise RuntimeError("no driver")

    src = Source("kernel", {"x": "*fp32"}, {"N": 4}, {"x": "16"})
    monkeypatch.setenv("TRITON_BOTH", "asks")
    job = job_of(src, {"target": "sm90"})
    for name in ("TRITON_BOTH", "TRITON_OF_WORKER", "OTHER_OF_WORKER"):
        monkeypatch.setenv(name, "works")
    assert job_of(src, {"target": "sm90"}) != job
    monkeypatch.setattr(triton, "compile", compile_)
    monkeypatch.setattr(compile_worker, "build_launcher", refuse)
    monkeypatch.setattr(compile_worker, "settle_cache_keys", lambda: given.append("settled"))
    compile_job(job)
    found = ["settled", src, {"target": "sm90"}, ["asks", None, "works"], "compiled"]
    assert given == found
    monkeypatch.setenv("OTHER_OF_WORKER", "asks otherwise")
    assert job_of(src, {"target": "sm90"}) == job  # it knows Triton's alone


def test_when_a_cache_is_empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bug: a first start, whose folder is not there yet, is taken for one that finds its kernels,
    or ends in an error."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    assert is_cache_empty()
    folder.mkdir()
    assert is_cache_empty()
    (folder / "kernel").touch()
    assert not is_cache_empty()
