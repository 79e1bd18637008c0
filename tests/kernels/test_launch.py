"""How kernels are launched: what one thread is told to leave undone holds inside alone."""

import pytest

from graphengine.kernels.launch import compile_only, launch_nothing, on_grid


def test_an_error_ends_it() -> None:
    """Bug: a kernel that fails to compile leaves its thread compiling only: what it launches from
    then on does nothing, and outputs are what their memory held."""
    with pytest.raises(ValueError, match="not for this GPU"), compile_only():
        raise ValueError("not for this GPU")
    kernel = {(2, 3): lambda: "launched"}
    assert on_grid(kernel, (2, 3))() == "launched"


def test_a_launch_of_nothing() -> None:
    """Bug: who goes through a chain for its segments alone compiles every kernel on the way, one
    after another, or launches it before it is there."""

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> None:
            pytest.fail("launched")

        def warmup(self, *arguments: object, **options: object) -> None:
            pytest.fail("compiled")

    with launch_nothing():
        on_grid(Kernel(), (2, 3))(1, num_warps=4)
    with pytest.raises(pytest.fail.Exception, match="launched"):
        on_grid(Kernel(), (2, 3))
