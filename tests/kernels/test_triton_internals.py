"""Names of Triton that changed between versions: the same kernels, keys and instructions of all."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import triton
from triton.runtime import build

from graphengine.kernels.argmax import _chunk_argmax_kernel, combine_argmax_kernel
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.triton_internals import (
    PACKAGE,
    _kernels,
    compiled_before,
    hinted,
    separate_launchers_,
)
from tests.kernels.test_interpreted import version

# A process a way, each a copy of one that has imported and asked for no key.
KEYS = """
import os
from graphengine.kernels import skinny_kernels, wide_linear
from graphengine.kernels.triton_internals import settle_cache_keys
for is_settled in (True, False):
    for is_turned in (False, True):
        if pid := os.fork():
            assert os.waitpid(pid, 0)[1] == 0
            continue
        kernels = [skinny_kernels.skinny_tma_kernel, wide_linear.wide_linear_kernel]
        if is_settled:
            settle_cache_keys()
        if is_turned:
            kernels.reverse()
        keys = {kernel.__name__: kernel.cache_key for kernel in kernels}
        print(sorted(keys.items()), flush=True)
        os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.skipif(INTERPRET, reason="interpreted kernels have no keys")
def test_keys_do_not_depend_on_the_order() -> None:
    """Bug: a start compiles kernels again that the one before has compiled, because another kernel
    came first."""
    line = [sys.executable, "-c", KEYS]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    settled, settled_and_turned, bare, turned = done.stdout.splitlines()
    assert settled == settled_and_turned
    # Triton 3.8 and later need no settling: delete it with 3.7.
    assert (bare == turned) == (version("triton") >= (3, 8))


@pytest.mark.skipif(INTERPRET, reason="interpreted kernels have no keys")
def test_kernels_are_asked_in_the_order_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: keys are asked for in the order in which a start happens to import its kernels, and one
    that imports otherwise finds none of what was compiled."""
    late = ModuleType(f"{PACKAGE}.a_module")
    vars(late).update(z_kernel=combine_argmax_kernel, a_kernel=_chunk_argmax_kernel, other=3)
    monkeypatch.setitem(sys.modules, late.__name__, late)  # the last one
    found = [kernel.__name__ for kernel in _kernels()]
    assert found[:2] == ["_chunk_argmax_kernel", "combine_argmax_kernel"]
    assert len(found) > 4


def test_who_looks_for_a_kernel_leaves_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: what was looked for in the cache and not found cannot be compiled any more, by anybody:
    a start ends in an error without a word."""

    class Source:
        def make_ir(self) -> str:
            return "first form"

    def compile_(src: Source, target: str) -> str:
        return "found" if target == "sm90" else src.make_ir()

    monkeypatch.setattr(triton, "compile", compile_)
    src = Source()
    assert compiled_before(src, target="sm100") is None
    assert triton.compile(src, target="sm100") == "first form"
    assert compiled_before(src, target="sm90") == "found"
    assert src.make_ir() == "first form"


LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, ""}, {NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&module); }
"""


def test_launchers_are_not_mixed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Bug: a kernel is launched with another signature's launcher ("function takes exactly 42
    arguments (22 given)"), where two threads load launchers that were loaded before."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    request.addfinalizer(lambda: sys.modules.pop("launcher", None))

    def load(number: int) -> Any:
        return build.compile_module_from_src(LAUNCHER.replace("NUMBER", str(number)), "launcher")

    monkeypatch.setattr(build, "_load_module_from_path", build._load_module_from_path)
    if not hasattr(build._load_module_from_path, "is_ours"):
        assert [load(1).launch(), load(2).launch()] == [1, 2]
        first, second = load(1), load(2)
        assert [first.launch(), second.launch()] == [2, 2]  # else drop `separate_launchers_`
    separate_launchers_()
    first, second = load(1), load(2)
    assert [first.launch(), second.launch()] == [1, 2]
    first, second = load(1), load(2)
    assert [first.launch(), second.launch()] == [1, 2]


LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
PTX = f"""
	mov.b64 	%rd4, a_kernel_param_0;
	mov.b64 	%rd5, a_kernel_param_5;
	cvta.param.u64 	%rd6, %rd5;
	cvta.param.u64 	%rd3, %rd4;
	mov.b32 	%r9, a_kernel_param_0;
	cvt.u64.u32 	%rd8, %r9;
	cvta.param.u64 	%rd7, %rd8;
	MARK
	@%p3 {LOAD} [%r31], [%rd3, {{%r78, %r164}}], [%r29];
	{LOAD} [%r32], [%rd6, {{%r78, %r79}}], [%r29];
	{LOAD} [%r33], [%rd7, {{%r1, %r2, %r3, %r4}}], [%r29];
"""


def test_loads_of_what_is_read_once_are_hinted() -> None:
    """Bug: the activations that every program reads leave L2 first as well, or of the weights those
    that a predicate holds back, or those whose address takes another way, do not."""
    marked = PTX.replace("MARK", "// read once, leaves L2 first: a_kernel_param_0")
    found = hinted(marked).splitlines()
    assert [".L2::cache_hint" in line for line in found[-3:]] == [True, False, True]
    policy = "{ .reg .b64 policy; mov.b64 policy, 0x12f0000000000000; "
    load = f"@%p3 {LOAD}.L2::cache_hint [%r31], [%rd3, {{%r78, %r164}}], [%r29], policy; }}"
    assert found[-3] == f"\t{policy}{load}"
    assert found[:-3] == marked.splitlines()[:-3]


def test_other_kernels_are_left_alone() -> None:
    """Bug: PTX without a mark, Inductor's or a user's own, is changed."""
    assert hinted(PTX) == PTX
