"""Where a command's compiled code lies: every compiler is pointed at this platform's folder.

Environment variables are read here; those of the compilers also by compilers.py, GRAPHENGINE_NVTX
by run.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from graphengine.startup.artifact import Store

INDUCTOR_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
# Where each compiler keeps its code -> its folder in an artifact.
_CACHE_VARIABLES = {
    INDUCTOR_FOLDER: "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}


def _cache_root() -> Path | None:
    """Where compiled code of every platform is kept; None: nowhere."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    named = os.environ.get("GRAPHENGINE_CACHE", f"{base}/graphengine")
    try:
        root = Path(named).expanduser().absolute()
    except (OSError, RuntimeError):  # no home directory
        return None
    return root if named and _can_write(root) else None


def _can_write(folder: Path) -> bool:
    """Whether it is, or can become, a folder to write in."""
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError:  # not allowed to look
        return False
    return existing.is_dir() and os.access(existing, os.W_OK)


@contextmanager
def compiled_code(device: str, artifact: Path | None) -> Iterator[Store | None]:
    """Points every compiler at this platform's folder while a command runs.

    The folder lies below GRAPHENGINE_CACHE, by default ~/.cache/graphengine; an empty value, or a
    place that cannot be written, leaves the compilers' own defaults (None). What the user has set
    for one compiler stays.
    """
    from graphengine.capture.cache_folder import others_can_write
    from graphengine.startup import artifact as artifacts
    from graphengine.startup.compilers import NOT_USED, compiler_files

    root = _cache_root()
    store = root and artifacts.store(root, artifacts.platform_parts(device))
    if root is None and (named := os.environ.get("GRAPHENGINE_CACHE")):
        click.echo(f"note: {named} (GRAPHENGINE_CACHE) cannot be written and is not used", err=True)
    if store is not None:
        why = others_can_write(store.folder)
        why = f"{why} {NOT_USED}" if why else ""
        # Another user may have made a part of it.
        if not all(_can_write(store.folder / part) for part in ("", *_CACHE_VARIABLES.values())):
            why = why or "cannot be written and is not used"
        if why:
            click.echo(f"note: {store.folder} {why}", err=True)
            store = None
    if store is None:
        if artifact is not None:
            raise ValueError(
                f"--artifact {artifact} needs a folder to be unpacked in; set GRAPHENGINE_CACHE "
                "to one that can be written"
            )
        yield None
        return
    if artifact is not None and (found := artifacts.unpack(artifact, store)):
        store.notes.append(
            f"{artifact} does not fit and is not used; compiling anew. " + "; ".join(found)
        )
    ours = {name: str(store.folder / part) for name, part in _CACHE_VARIABLES.items()}
    ours |= compiler_files()
    if (elsewhere := os.environ.get(INDUCTOR_FOLDER)) is not None:
        store = store._replace(segments=elsewhere)
    ours = {name: value for name, value in ours.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield store
    finally:
        for name in ours:
            os.environ.pop(name, None)
