"""Where the kernel tests run.

On the CPU every test runs twice: here against the torch references, and in the subprocess of
`test_interpreted.py`, which sets TRITON_INTERPRET=1 before triton is imported, against the Triton
kernels. A subprocess, because triton reads the variable when a kernel is decorated: setting it in
this process would turn every other test module's kernels into interpreted ones. On a GPU the
compiled kernels run.
"""

from collections.abc import Iterator

import pytest
import torch

CPU_AND_GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=CPU_AND_GPU)
def device(request: pytest.FixtureRequest) -> str:
    torch.manual_seed(0)
    return request.param


@pytest.fixture
def poisoned_outputs() -> Iterator[None]:
    """torch.empty returns NaN, so an element that a kernel does not write is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
