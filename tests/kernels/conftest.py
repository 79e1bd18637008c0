"""Where the kernel tests run.

On the CPU every test but those of a Gluon kernel alone (`IN_GLUON`) runs twice: here against the
torch references, and in the subprocess of `test_interpreted.py`, which sets TRITON_INTERPRET=1
before triton is imported, against the Triton kernels. A subprocess, because triton reads the
variable when a kernel is decorated: setting it in this process would turn every other test module's
kernels into interpreted ones. On a GPU the compiled kernels run.
"""

import re
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from graphengine.kernels.interpreter import INTERPRET
from tests.support.races import watched

CPU_AND_GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


# Interpreted they take most of the time. Of each combination the others have every part: every way
# to merge, page size, window and dtype; small tiles are for matrices that one of the others holds.
LONG_IF_INTERPRETED = re.compile(
    r"test_every_number_of_live_splits\[cpu-6-launched"
    r"|test_(many_splits_of_few_rows|windows_merge)\[cpu-launched"
    r"|test_matches_sdpa\[cpu-\d+-.*-(True-dtype1|False-dtype0)"
    r"|test_page_sizes\[cpu-(3-40|24-None|32-40|64-None|128-40)"
    r"|test_windows_match_sdpa\[cpu-(1-False|4-True|40-False)"
    r"|test_elsewhere_it_goes_through_logits\[cpu-100"
    r"|test_rounds_the_normed_rows\[cpu-(65-12288|130-4096)"
    r"|test_requests_side_by_side\[cpu-dtype[12]"
    r"|test_equals_the_reference\[cpu-small tiles-shape2-(True-True|False-False)-dtype1"
    r"|test_every_count_of_a_block\[cpu-heads(0-4-dtype1|1-4-dtype0)"
    r"|test_equals_the_reference\[cpu-small tiles-shape([13]|2-(True-False|False-True))"
    r"|test_equals_the_reference\[cpu-tiles-shape[13]-\w+-\w+-dtype1"
    r"|test_is_the_weighted_sum\[cpu-shape([245]-(True-dtype1|False-dtype0)|6)"
    r"|test_a_gate_as_if_behind_it\[cpu-(launched-6|last-1)"
    r"|test_matches_the_formula\[cpu-(True-16-32-8-128-16-dtype1|False-16-32-8-128-16-dtype0)"
    r"|test_random_rows_with_padding_and_page_edges\[cpu-(1-3|4-16|7-3)"
    r"|test_rejected_rows_leave_no_trace\[cpu-10000"
    r"|test_takes_the_gemm_of_the_logits"  # launches no kernel
    r"|test_is_the_best_score\[cpu-(1|63|128|129)-dtype[12]"
    r"|test_follows_the_distribution\[cpu"
    r"|test_a_chain_of_blocks_is_single_steps|test_transformers_rule"
)


# Of nothing but a Gluon kernel, which no interpreter runs: the plain run has all that they can say.
IN_GLUON = ("test_chunk_attention.py", "test_chunk_linear.py")


@pytest.hookimpl(tryfirst=True)  # before those with a mark are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if INTERPRET else []:
        if item.path.name in IN_GLUON:
            item.add_marker(pytest.mark.skip(reason="Gluon: nothing to interpret"))
        if LONG_IF_INTERPRETED.match(item.name):
            item.add_marker(pytest.mark.slow)


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


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    """Interpreted kernels are watched."""
    with watched() if INTERPRET else nullcontext():
        yield
