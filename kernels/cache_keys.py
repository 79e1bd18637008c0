"""Triton's cache keys of our kernels, made the same in every process.

A kernel's key covers the constants of the functions it calls, but only of those whose own key was
asked for before (triton 3.6 and 3.7: `DependenciesFinder._update_hash` merges what a function uses
before it asks for its key). So the key depends on which kernel a process happened to compile first,
and a start with kernels on threads missed 35 of 76 that the one before had compiled (one H200).
"""

import sys

from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

PACKAGE = __name__.rpartition(".")[0]


def settle_cache_keys() -> None:
    """Asks for the key of every kernel and helper imported so far, in the order of their names.

    Before the first is compiled. Also reads Triton's own files for the part of the key that is
    theirs, half a second to one and a half, which threads that begin together would each do.
    Mutates: Triton's memory of keys.
    """
    triton_key()
    imported = list(sys.modules)  # a copy, because other threads may be importing
    for module in sorted(name for name in imported if name.startswith(f"{PACKAGE}.")):
        for _, value in sorted(vars(sys.modules[module]).items()):
            if isinstance(value, JITFunction):
                value.cache_key  # noqa: B018 (a property that remembers)
