"""Tests without the mark `gpu` run on the CPU, also where there is a GPU."""

import os
import subprocess
import sys

import pytest
import torch

_ASK = [sys.executable, "-c", "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"]


@pytest.fixture(scope="module")
def seen_by_a_module() -> bool:
    return torch.cuda.is_available()


def test_auto_is_the_cpu(seen_by_a_module: bool) -> None:
    """Bug: "auto" is the GPU in a test that compares with float32 on the CPU."""
    assert not torch.cuda.is_available() and not seen_by_a_module
    assert subprocess.check_output(_ASK, text=True) == "''\n"


@pytest.mark.gpu
def test_the_mark_brings_it_back() -> None:
    """Bug: a GPU test after others finds no device, and what it proves is about the CPU."""
    assert torch.cuda.is_available() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    assert torch.ones(3, device="cuda").sum().item() == 3
