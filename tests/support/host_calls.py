"""What the host does between two launches, seen on the CPU: a graph stands for one call, whatever
is in it, and every torch op outside of one is a call of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphengine.capture.runners import Graph, run_chain
from graphengine.capture.steps import Carry, Chain
from graphengine.decode.attention import BlockAttention, ChunkAttention, TorchAttention

LAUNCH, ATTENTION, SYNC = "launch", "attention", "sync"
READS = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")


class HostCalls(TorchDispatchMode):
    """A GraphPool whose graphs are called again, and the log of the host's calls.

    `log`: LAUNCH for a graph, ATTENTION for one that is called between two graphs, SYNC for reading
    a tensor's values, else the name of a torch op. `copies`: of the ops, the storages written by
    copying.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.copies: list[int] = []
        self.num_graphs = 0
        self._is_inside = False

    def capture(self, steps: Chain, carry: Carry) -> tuple[Graph, Carry]:
        """As `GraphPool.capture`; what a replay leaves is where the capture left it."""
        self.num_graphs += 1
        with self.inside():
            left = run_chain(steps, carry)

        def replay() -> None:
            self.log.append(LAUNCH)
            with self.inside():
                for old, new in zip(left, run_chain(steps, carry), strict=True):
                    if old is not new:
                        old.copy_(new)

        handle: Any = SimpleNamespace(replay=replay)
        return Graph(handle, 0, 0), left

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What runs here is the device's."""
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before

    def note(self, call: str) -> bool:
        """Whether it is the host's."""
        if not self._is_inside:
            self.log.append(call)
        return not self._is_inside

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        is_read = name in ("_local_scalar_dense", "nonzero", "is_nonzero")
        if self.note(SYNC if is_read else name) and name == "copy_":
            self.copies.append(args[0].untyped_storage().data_ptr())
        return func(*args, **(kwargs or {}))


def watched(monkeypatch: pytest.MonkeyPatch) -> HostCalls:
    """Notes reads of values and attentions too, until the test is over."""
    calls = HostCalls()

    def reads(method: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            calls.note(SYNC)
            with calls.inside():
                return method(self, *args, **kwargs)

        return read

    def attends(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any) -> Any:
            calls.note(ATTENTION)
            with calls.inside():
                return method(self, *args)

        return run

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, reads(getattr(torch.Tensor, name)))
    for kind in (BlockAttention, ChunkAttention, TorchAttention):
        monkeypatch.setattr(kind, "run", attends(kind.run))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return calls
