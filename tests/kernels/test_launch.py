"""How kernels are launched: what one thread is told to leave undone holds inside alone."""

import pytest

from graphengine.kernels.launch import compile_only, on_grid


def test_an_error_ends_it() -> None:
    """Bug: a kernel that fails to compile leaves its thread compiling only: what it launches from
    then on does nothing, and outputs are what their memory held."""
    with pytest.raises(ValueError, match="not for this GPU"), compile_only():
        raise ValueError("not for this GPU")
    kernel = {(2, 3): lambda: "launched"}
    assert on_grid(kernel, (2, 3))() == "launched"
