"""The import rules, as data, and their reader: who may import whom, and one door per dependency.

Why: a file can be read, tested and deleted alone only while its imports point downwards. If
`capture` learned about models, or a second file called flashinfer, every change of a version or of
a model would spread over the tree.

How: a file's syntax tree, not its text, so that strings and comments never count. Names are
resolved through the file's own imports (`from torch import cuda as c; c.CUDAGraph` is seen).
"""

import ast
from collections.abc import Iterator
from pathlib import Path

SELF = "graphengine"

# room (a folder, or a file directly in graphengine/) -> the rooms below it that it may import.
# torch_internals imports nothing of ours: torch's private names, which every room may need.
_MODELS = "config kernels capture.torch_internals"
_DECODE = f"{_MODELS} models capture names"
_DRAFTERS = f"{_DECODE} decode checkpoints"
_STARTUP = f"{_DRAFTERS} drafters"
_API = f"{_STARTUP} startup results handles inputs"
_TOOLS = f"{_API} api prompts report profiles"
ROOMS: dict[str, str] = {
    **dict.fromkeys(("names", "config", "prompts"), ""),
    "kernels": "capture.torch_internals",
    **dict.fromkeys(("capture", "profiles"), "names"),
    "models": _MODELS,
    "checkpoints": f"{_MODELS} models",
    "decode": _DECODE,  # of drafters, the protocol alone
    "drafters": _DRAFTERS,
    "startup": _STARTUP,
    "results": _DRAFTERS,
    "handles": f"{_STARTUP} results",
    "inputs": f"{_STARTUP} startup",
    "api": _API,
    "async_engine": "api config results",
    "": "api async_engine checkpoints config",  # graphengine/__init__.py
    "report": f"{_API} api prompts",
    **dict.fromkeys(("verify", "measure"), _TOOLS),
    "doctor": f"{_TOOLS} measure",
    **dict.fromkeys(("cli", "__main__"), f"{_TOOLS} verify measure doctor cli"),
}

# dependency -> the modules (or folders) that may import it
DOORS: dict[str, set[str]] = {
    "flashinfer": {"decode.flashinfer_attention", "decode.flashinfer_internals"},
    "safetensors": {"checkpoints.sources"},
    "transformers": {"checkpoints.tokenizer"},
    "huggingface_hub": {"checkpoints"},
    "triton": {"kernels"},
    "nvtx": {"names"},
    "llguidance": {"decode.grammar"},
    "matplotlib": {"profiles.pictures"},
    "click": {"cli", "verify.report"},
}

# full dotted name (and all below it) -> the modules that may use it
NAMES: dict[str, set[str]] = {
    "torch.compile": {"capture"},
    "torch._dynamo": {"capture.torch_internals"},
    "torch._inductor": {"capture.torch_internals"},
    "torch.cuda.CUDAGraph": {"capture"},
    "torch.cuda.graph": {"capture"},
    "torch.cuda.graphs": {"capture"},
    "torch.cuda.make_graphed_callables": {"capture"},
    "torch.cuda.graph_pool_handle": {"capture"},
    # compilers: what Inductor would set later; compile_worker: what another process is to set;
    # torch_internals: what torch asks there whenever it compiles
    "os.environ": {
        "startup.compilers",
        "kernels.compile_worker",
        "capture.torch_internals",
        "cli",
    },
    "os.environb": {"cli"},
    "os.getenv": {"cli"},
    "os.putenv": {"cli"},
    "os.unsetenv": {"cli"},
}

KERNEL_IMPORTS = {"torch", "triton"}
TOP_FOLDERS = ("kernels", "capture", "profiles")


def is_within(name: str, parents: set[str]) -> bool:
    """True when a dotted name is one of the parents or below one."""
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


def rule_for(module: str) -> set[str] | None:
    """The rooms that a module may import, its own among them; None for an unknown room."""
    room = module.split(".")[0]
    return None if room not in ROOMS else {room, *ROOMS[room].split()}


def imports(tree: ast.AST) -> Iterator[tuple[int, str, str | None]]:
    """(line, dotted name imported, local name it is bound to) of every import in a file.

    `from a import b` counts as `a.b`: whether b is a module or a name cannot be told from one file,
    and the rules hold for both. `importlib.import_module("a")` and `__import__("a")` count too.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.split(".")[0]
                yield node.lineno, alias.name, local if alias.asname else None
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                name = base + alias.name if base.endswith(".") else f"{base}.{alias.name}"
                yield node.lineno, name, alias.asname or alias.name
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else None
            called = node.func.id if isinstance(node.func, ast.Name) else called
            argument = node.args[0]
            if (
                called in ("import_module", "__import__")
                and isinstance(argument, ast.Constant)
                and isinstance(argument.value, str)
            ):
                yield node.lineno, argument.value, None


def used_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of every imported name and every attribute chain on one."""
    bound: dict[str, str] = {}
    for line, name, local in imports(tree):
        yield line, name
        if local is not None:
            bound[local] = name
        else:
            bound.setdefault(name.split(".")[0], name.split(".")[0])
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in bound:
            yield inner.lineno, ".".join([bound[inner.id], *reversed(parts)])


def violations(module: str, source: str, stdlib: frozenset[str]) -> list[str]:
    """Broken rules of one file, each as "line N: what; why not".

    Args:
        module: dotted name below graphengine; "" for graphengine/__init__.py.
        source: the file's text.
        stdlib: names of the standard library's modules.
    """
    tree = ast.parse(source)
    found: set[tuple[int, str]] = set()
    allowed = rule_for(module)
    if allowed is None:
        found.add((1, f"{module} is in no room of ROOMS (tests/house/layering.py)"))
        allowed = set(ROOMS)
    for line, name, _ in imports(tree):
        top = name.split(".")[0]
        if name.startswith("."):
            found.add((line, f"relative import {name}: import graphengine.x absolutely"))
        elif top in TOP_FOLDERS:
            found.add((line, f"{name}: import it as graphengine.{name}"))
        elif top == SELF:
            below = name[len(SELF) + 1 :]
            # `from graphengine.config import X` arrives as config.X, which is within `config`.
            if below == "__version__":
                continue
            if below and not is_within(below, allowed):
                may = ", ".join(sorted(allowed)) or "nothing of graphengine"
                found.add((line, f"{module or '__init__'} imports {name}; it may import {may}"))
        elif top in DOORS and not is_within(module, DOORS[top]):
            door = ", ".join(sorted(DOORS[top]))
            found.add((line, f"{module or '__init__'} imports {name}; the door is {door}"))
        elif is_within(module, {"kernels"}) and top not in KERNEL_IMPORTS | stdlib:
            found.add((line, f"{module} imports {name}; kernels import only torch and triton"))
    for line, name in used_names(tree):
        for guarded, users in NAMES.items():
            if is_within(name, {guarded}) and not is_within(module, users):
                door = ", ".join(sorted(users))
                found.add((line, f"{module or '__init__'} uses {guarded}; the door is {door}"))
    return [f"line {line}: {text}" for line, text in sorted(found)]


def module_files(root: Path) -> Iterator[tuple[str, Path]]:
    """(module name below graphengine, file) of every Python file of the package."""
    package = root / SELF
    for folder in (package, *(root / name for name in TOP_FOLDERS)):
        prefix = "" if folder == package else folder.name
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder)
            if prefix == "" and relative.parts[0] in TOP_FOLDERS:
                continue  # reached through a symlink; read at its real place
            parts = [*([prefix] if prefix else []), *relative.with_suffix("").parts]
            if parts[-1] == "__init__":
                parts.pop()
            yield ".".join(parts), path
