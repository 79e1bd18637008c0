"""What compilers find in the environment: their tools, and a folder of their own."""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path

from graphengine.capture.cache_folder import others_can_write

NOT_USED = (
    "and is not used, for what lies there is executed: chmod 700 it if all in it is yours, or name "
    "another folder (GRAPHENGINE_CACHE, TORCHINDUCTOR_CACHE_DIR)"
)


def compiler_files() -> dict[str, str]:
    """Environment variable -> Triton's own ptxas and libdevice, for as many as there are.

    Triton's keys contain both. Inductor, once it compiles something, points Triton at torch's or
    CUDA's unless the environment names them: a start that found everything compiled looked for our
    kernels under other keys (22 of 30; 73 of 73 through the Python API; H200, torch 2.11).
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return {}
    folder = Path(spec.origin).parent / "backends" / "nvidia"
    found = {
        "TRITON_PTXAS_PATH": folder / "bin" / "ptxas",
        "TRITON_LIBDEVICE_PATH": folder / "lib" / "libdevice.10.bc",
    }
    return {name: str(path) for name, path in found.items() if path.is_file()}


def cpp_compiler() -> str | None:
    """Where Inductor finds its C++ compiler, which it needs for the CPU."""
    return shutil.which(os.environ.get("CXX", "g++"))


def name_compilers_() -> None:
    """Names `compiler_files`, Triton's folder and what it is to assume, unless the user has:
    Inductor, once it compiles something, names a folder of its own, and what lies in the one before
    is compiled again. Mutates: os.environ."""
    from graphengine.kernels.compile_worker import cache_folder  # imports triton

    for name, path in compiler_files().items():
        os.environ.setdefault(name, path)
    os.environ.setdefault("TRITON_CACHE_DIR", cache_folder())
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the default up to 3.9, which warns


def use_own_folder_() -> None:
    """Puts a new folder of this process in the place of Inductor's, by default a temporary one, if
    others may write into that; before anything is compiled. Mutates: os.environ."""
    from graphengine.capture.torch_internals import cache_folder  # imports torch

    folder = cache_folder()
    why = others_can_write(folder)
    if why is not None:
        fresh = os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="graphengine-")
        atexit.register(shutil.rmtree, fresh, ignore_errors=True)
        logging.getLogger(__name__).warning("%s %s %s", folder, why, NOT_USED)
