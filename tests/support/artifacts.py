"""A store of compiled code that nobody compiled."""

import json
from pathlib import Path

from graphengine.startup import artifact

PARTS = {"torch": "2.13.0", "device": "cuda", "gpu": "NVIDIA H200", "machine": "x86_64"}
ENTRY = {"target": "8B", "buckets": "1,8"}


def filled(root: Path, parts: dict[str, str] = PARTS) -> artifact.Store:
    """A store with one file of each compiler; Triton's group names its files by absolute path."""
    store = artifact.store(root, parts)
    triton = store.folder / "triton" / "ABC"
    ops = "flashinfer/.cache/flashinfer/op.so"
    for path in (
        store.folder / "inductor/g6/graph.py",
        triton / "kernel.cubin",
        store.folder / ops,
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(path.name.encode() * 100)
    group = {"child_paths": {"kernel.cubin": str(triton / "kernel.cubin")}}
    (triton / "__grp__kernel.json").write_text(json.dumps(group))
    artifact.record_(store.folder, parts, ENTRY)
    return store
