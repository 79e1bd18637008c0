"""Where the kernel tests run.

On the CPU every test runs twice: here against the torch references, and in the subprocess of
`test_interpreted.py`, which sets TRITON_INTERPRET=1 before triton is imported, against the Triton
kernels. A subprocess, because triton reads the variable when a kernel is decorated: setting it in
this process would turn every other test module's kernels into interpreted ones. On a GPU the
compiled kernels run.
"""

import pytest
import torch

CPU_AND_GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=CPU_AND_GPU)
def device(request: pytest.FixtureRequest) -> str:
    torch.manual_seed(0)
    return request.param
