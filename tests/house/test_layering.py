"""Import rules of the package, and the three top folders that arrive through symlinks.

The rules and their reader are in layering.py beside this file. Half of these tests break a rule in
a snippet and expect it to be caught: a check that cannot fail is no check.
"""

import ast
import graphlib
import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# tests/ is no package (importlib mode), so the reader is loaded by its path.
_spec = importlib.util.spec_from_file_location("layering", Path(__file__).with_name("layering.py"))
assert _spec is not None and _spec.loader is not None
layering = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(layering)

STDLIB = frozenset(sys.stdlib_module_names)
FILES = dict(layering.module_files(ROOT))


@pytest.mark.parametrize("module", sorted(FILES), ids=lambda name: name or "__init__")
def test_imports_point_downwards(module: str) -> None:
    """Bug: a file imports upwards, or a second file touches a dependency that has one door."""
    assert layering.violations(module, FILES[module].read_text(), STDLIB) == []


@pytest.mark.parametrize("name", layering.TOP_FOLDERS)
def test_symlinks_are_relative_and_right(name: str) -> None:
    """Bug: an absolute link works on one machine alone; a copied folder drifts from its origin."""
    link = ROOT / "graphengine" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"
    assert link.resolve() == (ROOT / name).resolve()


@pytest.mark.parametrize("name", layering.TOP_FOLDERS)
def test_top_folders_are_no_packages(name: str) -> None:
    """Bug: `kernels/__init__.py` makes a package `kernels` of the checkout, which shadows Hugging
    Face's package of that name and makes transformers' import of Qwen3 fail."""
    assert not (ROOT / name / "__init__.py").exists()


def test_the_reader_finds_the_real_files() -> None:
    """Bug: a moved folder or an unfollowed symlink leaves the rules with nothing to check."""
    assert {"", "config.model", "names"} <= set(FILES)
    assert any(module.startswith("kernels.") for module in FILES)
    assert any(module.startswith("models.") for module in FILES)
    assert all("graphengine/kernels" not in path.as_posix() for path in FILES.values())


def test_no_circles() -> None:
    """Bug: two files import each other, so neither can be read, tested or deleted alone."""
    graph = {
        module: {
            found
            for _, name, _ in layering.imports(ast.parse(path.read_text()))
            if (found := _module(name)) is not None
        }
        for module, path in FILES.items()
    }
    assert list(graphlib.TopologicalSorter(graph).static_order())


def _module(name: str) -> str | None:
    """The module below graphengine that an imported name lies in."""
    if not name.startswith("graphengine."):
        return None
    below = name.removeprefix("graphengine.")
    return (
        below
        if below in FILES
        else next((m for m in [below.rpartition(".")[0]] if m in FILES), None)
    )


SEEDED = [
    ("models.decoder", "from graphengine.decode.attention import attend"),
    ("models.decoder", "from graphengine import capture"),
    ("models.decoder", "import graphengine.decode.kvcache as pool"),
    ("models.decoder", "from graphengine.decode.loop import step"),
    ("models.decoder", "from .layers import linear"),
    ("models.decoder", "def f():\n    import graphengine.decode.loop"),
    ("capture.graphs", "from graphengine.models import qwen3"),
    ("capture.graphs", "from graphengine.kernels.accept import next_block"),
    ("capture.graphs", "from graphengine.decode.attention import plan"),
    ("kernels.accept", "from graphengine.config.model import ModelConfig"),
    ("kernels.accept", "import numpy"),
    ("kernels.accept", "from graphengine.names import range_"),
    ("kernels.accept", "import kernels.argmax"),
    ("names", "from graphengine.config.model import ModelConfig"),
    ("config.model", "from graphengine.models import layers"),
    ("decode.kvcache", "import graphengine.profiles.nsys"),
    ("decode.chains", "from graphengine.profiles.result_schema import write_result"),
    ("decode.loop", "from graphengine.api import Engine"),
    ("api", "import graphengine.cli.main"),
    ("", "from graphengine.cli.main import main"),
    ("brandnew", "import math"),
    ("decode.loop", "import flashinfer"),
    ("decode.loop", "from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper"),
    ("decode.loop", "import importlib\nimportlib.import_module('flashinfer')"),
    ("decode.loop", "__import__('flashinfer.prefill')"),
    ("models.decoder", "from safetensors.torch import load_file"),
    ("checkpoints.weights", "import transformers"),
    ("decode.loop", "from transformers import AutoTokenizer"),
    ("api", "import huggingface_hub"),
    ("decode.attention", "import triton"),
    ("decode.loop", "import nvtx"),
    ("api", "import click"),
    ("decode.chains", "import torch\nf = torch.compile(lambda x: x)"),
    ("decode.chains", "from torch import compile"),
    ("decode.chains", "import torch\n@torch.compile\ndef f(x): return x"),
    ("decode.chains", "import torch\ng = torch.cuda.CUDAGraph()"),
    ("decode.chains", "from torch import cuda as c\nwith c.graph(None): pass"),
    ("decode.loop", "import torch.cuda as c\nc.make_graphed_callables"),
    ("decode.loop", "from torch.cuda.graphs import CUDAGraph"),
    ("kernels.accept", "import torch\ntorch._inductor.config.freezing = True"),
    ("decode.loop", "import os\nos.environ['X'] = '1'"),
    ("decode.loop", "import os as o\no.environ.get('X')"),
    ("api", "from os import environ"),
    ("kernels.accept", "from os import getenv as g"),
    ("profiles.result_schema", "import os\nos.getenv('HOME')"),
]


@pytest.mark.parametrize(("module", "source"), SEEDED)
def test_a_seeded_violation_is_caught(module: str, source: str) -> None:
    """Bug: the reader misses a spelling of a forbidden import."""
    assert layering.violations(module, source, STDLIB)


ALLOWED = [
    ("kernels.accept", "import math\nimport torch\nimport triton.language as tl"),
    ("kernels.context_kv", "from graphengine.kernels.qk_norm_rope import reference"),
    ("capture.graphs", "import torch\ntorch.compile(f)\ntorch.cuda.CUDAGraph()"),
    ("capture.graphs", "from graphengine.names import range_"),
    ("models.decoder", "from graphengine.models.layers import linear"),
    ("api", "from graphengine import __version__"),
    ("models.decoder", "'import flashinfer'  # os.environ"),
    ("decode.chains", "from graphengine import models, names"),
    ("decode.flashinfer_attention", "def f():\n    import flashinfer"),
    ("cli.main", "import os\nos.environ\nfrom graphengine.profiles import result_schema"),
    ("decode.loop", "import os, torch\nos.path.join\ntorch.cuda.Event()\nself.torch.compile"),
    ("checkpoints.tokenizer", "from transformers import AutoTokenizer"),
]


@pytest.mark.parametrize(("module", "source"), ALLOWED)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    """Bug: a rule so wide that it forbids what the design allows."""
    assert layering.violations(module, source, STDLIB) == []
