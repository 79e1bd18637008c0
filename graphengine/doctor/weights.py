"""Headers of weight files against the shapes that a config implies: names, shapes, dtypes, size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from graphengine.checkpoints.weights import TensorHeader
from graphengine.config.bytesize import format_bytes
from graphengine.doctor.files import ModelFiles
from graphengine.doctor.findings import Finding, error, info, ok, one_line

_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
_ID_MAPS = ("d2t", "t2d")
_INTEGERS = frozenset("BOOL I8 U8 I16 U16 I32 U32 I64 U64".split())


def weight_findings(
    name: str,
    files: ModelFiles,
    expected: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
) -> Iterator[Finding]:
    """Missing, unexpected and misshaped tensors, their dtypes and size."""
    headers = files.headers
    if headers is None:
        if files.is_preset:
            yield info(name, "none: a preset", "runs with --load-format dummy alone")
        else:
            yield error(name, files.problems.get("weights", "none"), "fetch the weights again")
        return
    used = {
        key: header for key, header in headers.items() if not key.endswith("rotary_emb.inv_freq")
    }
    missing = [key for key in expected if key not in used]
    unexpected = [key for key in used if key not in expected and key not in optional]
    shapes = {**optional, **expected}
    misshaped = [
        f"{key} {list(used[key].shape)} instead of {list(shape)}"
        for key, shape in shapes.items()
        if key in used and used[key].shape != shape
    ]
    remedy = "the files are incomplete or of another model than config.json; fetch both again"
    for what, names in (
        ("missing", missing),
        ("unexpected", unexpected),
        ("misshaped", misshaped),
    ):
        if names:
            shown = ", ".join(names[:3]) + (", .." if len(names) > 3 else "")
            yield error(name, one_line(f"{len(names)} {what}: {shown}"), remedy)
    yield from _dtypes(name, {key: used[key] for key in shapes if key in used})
    if not (missing or unexpected or misshaped):
        yield ok(name, f"{len(used)} tensors, {format_bytes(_size(used))}, none missing")


def _dtypes(name: str, headers: Mapping[str, TensorHeader]) -> Iterator[Finding]:
    found = {header.dtype for key, header in headers.items() if key not in _ID_MAPS}
    for key in _ID_MAPS:
        if key in headers and headers[key].dtype not in _INTEGERS:
            remedy = "an id map holds integers; fetch the weights again"
            yield error(f"{name}.dtype", f"{key} is {headers[key].dtype}", remedy)
    foreign = sorted(found - _BYTES.keys())
    if foreign:
        yield error(
            f"{name}.dtype", ", ".join(foreign), "only unquantised float weights are supported"
        )
    elif found:
        note = "float16 weights are run in bfloat16" if "F16" in found else ""
        finding = info if note else ok
        yield finding(f"{name}.dtype", ", ".join(sorted(found)), *([note] if note else []))


def _size(headers: Mapping[str, TensorHeader]) -> int:
    total = 0
    for header in headers.values():
        count = 1
        for side in header.shape:
            count *= side
        total += count * _BYTES.get(header.dtype, 1)
    return total
