"""A Hopper GPU for launchers on a host without one: fake CUDA tensors go through them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from graphengine.kernels import launch
from graphengine.kernels.launch import supports_pdl

NUM_SMS = 132
SHARED_MEMORY_BYTES = 227 * 1024


class Launched(NamedTuple):
    """A launch that was noted in place of being made."""

    kernel: str
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@contextmanager
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launched]]:
    """Inside, kernels are neither compiled nor run."""
    found: list[Launched] = []

    def note(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        found.append(Launched(kernel.__name__, grid, arguments, options))

    with fake_hopper(monkeypatch), launch._instead(note):
        yield found


@contextmanager
def fake_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, what torch allocates on "cuda" is nowhere and begins at 4096."""
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda self: 4096, raising=False)
    # CPU builds of torch refuse to index what claims to be on a GPU.
    monkeypatch.setattr(FakeTensor, "__getitem__", lambda self, i: self.select(0, i))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    properties = SimpleNamespace(
        multi_processor_count=NUM_SMS, shared_memory_per_block_optin=SHARED_MEMORY_BYTES
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    supports_pdl.cache_clear()
    with FakeTensorMode():
        yield
    supports_pdl.cache_clear()
