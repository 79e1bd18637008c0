"""Private names of torch, Triton and FlashInfer: in their library's one file, and still there."""

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.house.test_layering import FILES, ROOT, layering

LIBRARIES = ("torch", "triton", "flashinfer")
INTERNALS = ("capture.torch_internals", "kernels.triton_internals", "decode.flashinfer_internals")
# Modules without promises whose names do not say so.
PRIVATE_MODULES = {"triton.runtime", "triton.compiler", "triton.backends", "flashinfer.jit"}
TOOLS = {f"tools.{path.stem}": path for path in (ROOT / "tools").glob("*.py")}

# What our internals files use -> what to do when it is gone. The first of several that is there is
# used. Attributes of objects are written as the class's.
DYNAMO = "see torch/_dynamo/config.py for the setting's new name"
WORKERS = "find Inductor's processes that compile, or have `compile_workers` say None"
REMEDIES = {
    "torch._dynamo.config.enable_aot_compile": f"{DYNAMO}; delete the line if it is always on",
    "torch._dynamo.config.recompile_limit": DYNAMO,
    "torch._dynamo.config.accumulated_recompile_limit": DYNAMO,
    "torch._dynamo.config.disable": DYNAMO,
    "torch._dynamo.eval_frame._stance": "find where torch.compiler.set_stance keeps the stance",
    "torch._C._dynamo.guards.GlobalStateGuard": "list the settings in `global_state` by hand",
    "torch._dynamo.aot_compile.AOTCompiledFunction.serialize": "use save_compiled_function",
    "torch.compiler.load_compiled_function": "find what reads AOTCompiledFunction.serialize",
    "torch.compiler.skip_all_guards_unsafe": "pass a guard_filter_fn that drops all guards",
    "torch._inductor.config.fx_graph_cache": "see torch/_inductor/config.py",
    "torch._inductor.config.force_disable_caches": "see torch/_inductor/config.py",
    "torch._inductor.compiler_bisector.CompilerBisector.bisection_enabled": (
        "see what codecache.py asks before it keeps a graph"
    ),
    "torch._inductor.config.save_config_portable": "hash the settings' names and values by hand",
    "torch._functorch.config.enable_autograd_cache": "see torch/_functorch/config.py",
    "torch._inductor.runtime.cache_dir_utils.cache_dir": "read TORCHINDUCTOR_CACHE_DIR, or find it",
    "torch._inductor.runtime.cache_dir_utils.default_cache_dir": "see _HEADER_DIR in codecache.py",
    "torch._inductor.config.cpp_cache_precompile_headers": "see torch/_inductor/config.py",
    "torch._inductor.config.patch": "set compile_threads, and set it back",
    "torch._inductor.utils.clear_caches": "clear codecache.py's caches, or drop the call",
    "torch._inductor.async_compile.AsyncCompile.process_pool": WORKERS,
    "torch._inductor.async_compile.AsyncCompile.use_process_pool": WORKERS,
    "torch._inductor.async_compile.AsyncCompile.wait_pool_ready": WORKERS,
    "torch._inductor.compile_fx": "import what torch.compile's first call imports (-X importtime)",
    "torch._inductor.codecache.torch_key": "drop the call; a cold start reads torch's files later",
    "torch.overrides.get_overridable_functions": "drop the call if nothing is printed twice",
    "torch.distributed.tensor.experimental._func_map": "drop the import if Dynamo needs it no more",
    "torch.utils._python_dispatch.TorchDispatchMode": "find the class in torch.utils",
    "torch.utils._python_dispatch._disable_current_modes": "pop `dispatched_to`'s mode",
    "torch.utils._python_dispatch._push_mode": "`with mode`, if it no longer sets global flags",
    "torch.utils._python_dispatch._pop_mode": "`with mode`, if it no longer sets global flags",
    "torch.utils._pytree.tree_map": "torch.utils.pytree or optree",
    "torch.utils._pytree.tree_leaves": "torch.utils.pytree or optree",
    "torch.ops.aten.add.Tensor._schema": "find an operator's schema in torch/_ops.py",
    "torch.overrides._pop_mode_temporarily": "find what takes a function mode off its stack",
    "torch._C._len_torch_function_stack": "ask torch.get_default_device each time",
    "torch._scaled_mm": "torch.nn.functional.scaled_mm; measure it on a GPU",
    "torch.cuda._sleep": "queue a long kernel, as a product of large matrices",
    "triton.backends.nvidia.compiler.CUDABackend.make_ptx": "find what makes PTX, for `hinted`",
    "triton.compiler.compiler.ASTSource.make_ir": "have `compiled_before` look into Triton's cache",
    "triton.runtime.build._load_module_from_path": "drop `separate_launchers_` with triton 3.6",
    "triton.runtime.cache.triton_key": "drop the call; threads then read Triton's files each",
    "triton.runtime.driver": "find the active driver in triton/runtime",
    "triton.runtime.jit.JITFunction.cache_key": "drop `settle_cache_keys` with triton 3.7",
    "triton.experimental.gluon._runtime.GluonJITFunction.create_binder": (
        "see whether `bind_kernels` is still needed where threads compile one Gluon kernel"
    ),
    "triton.experimental.gluon.language._core.builtin": "find how Gluon marks its own functions",
    "triton.experimental.gluon.language._core.shared_memory_descriptor.reinterpret"
    "|triton.experimental.gluon.language._core.shared_memory_descriptor._reinterpret": (
        "find how Gluon gives shared memory another type"
    ),
    "triton.experimental.gluon.language.nvidia.hopper.tma.async_load"
    "|triton.experimental.gluon.language.nvidia.hopper.tma.async_copy_global_to_shared": (
        "find TMA's load in Gluon's tma.py"
    ),
    "triton.experimental.gluon.language.nvidia.hopper.tma.async_store"
    "|triton.experimental.gluon.language.nvidia.hopper.tma.async_copy_shared_to_global": (
        "find TMA's store in Gluon's tma.py"
    ),
    "flashinfer.prefill._gen_batch_prefill_primary_module"
    "|flashinfer.prefill.gen_batch_prefill_module": (
        "see what get_batch_prefill_module in flashinfer/prefill.py builds"
    ),
}


def find(name: str) -> Any:
    """What a dotted name means. Raises: AttributeError, ImportError."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for at, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:at]))
        found = getattr(found, part)
    return found


def is_private(name: str) -> bool:
    parts = name.split(".")
    if parts[0] not in LIBRARIES or name.startswith("torch.__"):
        return False
    hidden = any(part.startswith("_") and not part.endswith("__") for part in parts)
    return hidden or layering.is_within(name, PRIVATE_MODULES)


@pytest.mark.parametrize("names", REMEDIES)
def test_private_names_are_there(names: str) -> None:
    """Bug: a new version has moved a name, and a user is the first to know."""
    library = names.partition(".")[0]
    if library == "flashinfer":
        pytest.importorskip(library)
    for name in names.split("|"):
        try:
            find(name)
        except (AttributeError, ImportError):
            continue
        return
    pytest.fail(f"{names} is gone from this {library}: {REMEDIES[names]}")


@pytest.mark.parametrize("module", sorted(set(FILES) - set(INTERNALS)) + sorted(TOOLS))
def test_private_names_have_one_file(module: str) -> None:
    """Bug: the next version breaks a file that nobody thought of."""
    tree = ast.parse((FILES | TOOLS)[module].read_text())
    used = [*layering.used_names(tree)]
    private = {f"line {line}: {name}" for line, name in used if is_private(name)}
    attributes = {name.rpartition(".")[2] for names in REMEDIES for name in names.split("|")}
    hidden = {name for name in attributes if name.startswith("_")}
    private |= {
        f"line {node.lineno}: .{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in hidden | {"aot_compile", "launcher_cls"}
    }
    assert not private, f"move them to one of {', '.join(INTERNALS)}: {sorted(private)}"


def test_every_private_name_has_a_remedy() -> None:
    """Bug: a name is added, and who finds it gone finds no word about it."""
    known = "|".join(REMEDIES).split("|")
    for module in INTERNALS:
        tree = ast.parse(Path(FILES[module]).read_text())
        for line, name in layering.used_names(tree):
            covered = any(name == one or one.startswith(f"{name}.") for one in known)
            below = layering.is_within(name, set(known))
            assert not is_private(name) or covered or below, f"{module} line {line}: {name}"


def test_a_private_name_is_seen() -> None:
    """Bug: the reader lets one through."""
    seen = layering.used_names
    for source in (
        "import torch\ntorch._C._get_tracing_state()",
        "from torch._dynamo import config",
        "import triton.runtime.jit as j\nj.JITFunction",
        "from torch.utils._pytree import tree_map",
        "from flashinfer.jit import gen_batch_prefill_module",
    ):
        assert any(is_private(name) for _, name in seen(ast.parse(source))), source
    for source in ("import torch\ntorch.__version__", "from triton import knobs"):
        assert not any(is_private(name) for _, name in seen(ast.parse(source))), source
