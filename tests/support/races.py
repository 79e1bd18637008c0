"""Finds memory races of interpreted Triton kernels.

The interpreter runs one program after another, and in a program one operation after another on
whole tensors; on a GPU neither is so. Between two barriers a thread may write what another thread,
or program, has yet to read. A thread is taken to be a place in a tensor: element i of two tensors
of one shape is the same thread's. One warp issues its operations in order, so that programs of one
are only held against each other. Behind an atomic operation a program may read what others have
written: that they told it so is not checked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest

PAGE_BITS = 12


class Race(AssertionError):
    """Two accesses of one address that a GPU may run in either order, one of them a store."""


class Access(NamedTuple):
    """An operation's live elements."""

    program: tuple[int, ...]
    epoch: int  # barriers and atomics that its program had passed
    is_told: bool  # behind an atomic
    shape: tuple[int, ...]
    addresses: np.ndarray
    places: np.ndarray  # in the tensor

    def meets(self, store: Access) -> bool:
        """Whether another thread, or a program, has an address of the store's."""
        shared = np.isin(self.addresses, store.addresses)
        if not shared.any():
            return False
        if self.program != store.program:
            return not self.is_told
        if self.epoch != store.epoch:
            return False
        if self.shape != store.shape:
            return True
        order = np.argsort(store.addresses)
        found = np.searchsorted(store.addresses, self.addresses[shared], sorter=order)
        return bool((store.places[order[found]] != self.places[shared]).any())


class Watch:
    """The accesses of one launch."""

    def __init__(self, num_warps: int = 4) -> None:
        self.num_warps = num_warps
        self.program: tuple[int, ...] = ()
        self.epoch, self.is_told = 0, False
        self.loads: dict[int, list[Access]] = defaultdict(list)  # by page
        self.stores: dict[int, list[Access]] = defaultdict(list)

    def note(self, pointers: Any, mask: Any, is_store: bool) -> None:
        """Raises: Race."""
        live = np.broadcast_to(mask.data, pointers.data.shape).ravel().astype(bool)
        addresses = pointers.data.ravel()[live]
        if not len(addresses):
            return
        epoch = self.epoch if self.num_warps > 1 else -1 - is_store  # in order: never the same
        where = pointers.data.shape, addresses, np.flatnonzero(live)
        access = Access(self.program, epoch, self.is_told, *where)
        pages = np.unique(addresses >> PAGE_BITS).tolist()
        for page in pages:
            for store in self.stores.get(page, ()):
                if not is_store and access.meets(store):
                    raise Race(f"{access.shape} reads what {store.shape} wrote, without a barrier")
            for load in self.loads.get(page, ()) if is_store else ():
                if load.meets(access):
                    raise Race(f"{access.shape} writes what {load.shape} reads, without a barrier")
            (self.stores if is_store else self.loads)[page].append(access)


@contextmanager
def watched() -> Iterator[None]:
    """Launches in here raise Race. Triton's interpreter has to be on."""
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    names = (
        *("set_grid_idx", "create_barrier", "create_atomic_rmw"),
        *("create_masked_load", "create_masked_store"),
    )
    enter_, barrier_, atomic_, load_, store_ = (getattr(InterpreterBuilder, x) for x in names)
    launch_, patch_ = GridExecutor.__call__, interpreter._patch_lang
    watch, patched = Watch(), set[Any]()

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal watch
        watch = Watch(kwargs.get("num_warps", 4))
        patched.clear()
        launch_(self, *args, **kwargs)

    def patch_language(function: Any) -> Any:
        """Once a launch, not at every call of a kernel's helper: a quarter of the time."""
        if function in patched:
            return interpreter._LangPatchScope()
        patched.add(function)
        return patch_(function)

    def enter(self: Any, *place: int) -> None:
        watch.program, watch.epoch, watch.is_told = place, 0, False
        enter_(self, *place)

    def barrier(self: Any) -> None:
        watch.epoch += 1
        barrier_(self)

    def atomic(self: Any, *args: Any) -> Any:
        watch.epoch, watch.is_told = watch.epoch + 1, True
        return atomic_(self, *args)

    def boolean(mask: Any) -> Any:
        """Triton 3.9 compares a scalar, spreads the answer over a block as the scalar's own type,
        and then refuses it as a mask; 3.6 to 3.8 take any type."""
        return interpreter.TensorHandle(mask.data.astype(bool), mask.dtype)

    def load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        watch.note(ptrs, mask, False)
        return load_(self, ptrs, boolean(mask), *rest)

    def store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        watch.note(ptrs, mask, True)
        return store_(self, ptrs, value, boolean(mask), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", launch)
        patch.setattr(interpreter, "_patch_lang", patch_language)
        # Half of what remains: seven operations for a check whose result `debug=False` throws away.
        patch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *_: None)
        for name, new in zip(names, (enter, barrier, atomic, load, store), strict=True):
            patch.setattr(InterpreterBuilder, name, new)
        yield
