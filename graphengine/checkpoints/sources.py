"""Where weights come from: safetensors files, a random generator, or shapes alone. The only file
that knows the safetensors format.

Why strict both ways: a tensor that is missing, unexpected or misshaped means that the file is not
the model that the config describes; loading it anyway costs acceptance or correctness silently.
Each tensor is read through a memory map, once for every weight that is part of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from graphengine.models.weight import Weight

Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all) after each tensor."""

_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_ONLY_FLOATS = "only unquantised float checkpoints are supported"


class TensorSource(Protocol):
    """Where tensors come from: a checkpoint, or a random generator.

    dtype: the run's. is_made: any tensor is made as it is asked for, so what files hold in parts is
    better asked for as one (35B-A3B has 30,720 matrices of experts in 80 stacks).
    """

    dtype: torch.dtype
    is_made: bool = False

    def take(self, weight: Weight) -> Tensor:
        """The tensor, on the device and in its dtype or the run's."""
        ...

    def has(self, name: str) -> bool:
        """Whether `name` exists."""
        return False

    def finish(self, skipped: tuple[str, ...] = ()) -> None:
        """Called once everything was taken; refuses left-overs whose names do not begin so."""


class Checkpoint(TensorSource):
    """A directory of safetensors files, single or sharded, read strictly."""

    def __init__(
        self,
        directory: Path,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None = None,
    ) -> None:
        self._directory, self._device, self.dtype = directory, device, dtype
        self._progress, self._loaded_bytes = progress, 0
        self._total_bytes = sum(file.stat().st_size for file in _weight_files(directory))
        self._handles = _open(directory, device)
        self._left = {name for name in self._handles if not name.endswith("rotary_emb.inv_freq")}

    def has(self, name: str) -> bool:
        return name in self._handles

    def take(self, weight: Weight) -> Tensor:
        tensor = self._read(weight.name, weight.shape)
        dtype = weight.dtype or self.dtype
        if dtype.is_floating_point and tensor.dtype not in _FLOATS:  # float8 means nothing unscaled
            raise self._refusal(weight.name, f"has dtype {tensor.dtype}; {_ONLY_FLOATS}")
        if not dtype.is_floating_point and (tensor.is_floating_point() or tensor.is_complex()):
            raise self._refusal(weight.name, f"has dtype {tensor.dtype}; expected integers")
        if dtype == torch.uint8 and tensor.dtype != dtype:  # codes, which are no numbers
            raise self._refusal(weight.name, f"has dtype {tensor.dtype}; expected uint8")
        # On the CPU it still lies in the file's memory map.
        return weight.made_of(tensor.to(dtype, copy=self._device.type == "cpu"))

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        handle = self._handles.get(name)
        if handle is None:
            raise self._refusal(
                name,
                "is missing; the checkpoint is incomplete or not the model that its config.json "
                "describes",
            )
        found = tuple(handle.get_slice(name).get_shape())
        if found != shape:
            raise self._refusal(name, f"has shape {list(found)}, the config implies {list(shape)}")
        try:
            tensor = handle.get_tensor(name)
        except SafetensorError as error:
            raise self._refusal(name, f"cannot be read ({error}); {_ONLY_FLOATS}") from error
        if name in self._left:  # several weights may be parts of it
            self._left.remove(name)
            self._loaded_bytes += tensor.numel() * tensor.element_size()
        if self._progress is not None:
            self._progress(self._loaded_bytes, self._total_bytes)
        return tensor

    def _refusal(self, name: str, text: str) -> ValueError:
        return ValueError(f"{self._directory}: tensor {name!r} {text}")

    def finish(self, skipped: tuple[str, ...] = ()) -> None:
        names = sorted(name for name in self._left if not name.startswith(skipped))
        if names:
            shown = ", ".join(names[:5]) + (", .." if len(names) > 5 else "")
            raise ValueError(
                f"{self._directory}: {len(names)} unexpected tensors ({shown}); this is not the "
                "architecture that config.json describes"
            )
        self._handles.clear()


class RandomSource(TensorSource):
    """Normal weights of standard deviation 0.02, norms of one: speed without a checkpoint.

    Args:
        is_uniform: everything uniform in +-1e-3 instead, norms too, as vLLM's dummy loader draws
            it. Then a row is little but its token's embedding and the rows of a block are alike,
            which takes less power: at its power limit a GPU is faster than with real weights.
    """

    is_made = True

    def __init__(
        self, device: torch.device, dtype: torch.dtype, seed: int = 0, is_uniform: bool = False
    ) -> None:
        self._device, self.dtype, self._is_uniform = device, dtype, is_uniform
        self._generator = torch.Generator(device).manual_seed(seed)

    def take(self, weight: Weight) -> Tensor:
        dtype = weight.dtype or self.dtype
        tensor = torch.empty(weight.shape, dtype=dtype, device=self._device)
        if weight.initialiser == "codes":
            return tensor.random_(0, 256, generator=self._generator)
        if weight.initialiser == "scales":  # so that the numbers are about as wide as the others
            return tensor.fill_(115 if self._is_uniform else 120)
        if not dtype.is_floating_point:  # a draft vocabulary of the target's first ids
            return tensor.zero_()
        if self._is_uniform:
            return weight.made_of(tensor.uniform_(-1e-3, 1e-3, generator=self._generator))
        if weight.initialiser == "normal":
            return weight.made_of(tensor.normal_(std=0.02, generator=self._generator))
        return weight.made_of(tensor.fill_(float(weight.initialiser == "ones")))


class ShapeSource(TensorSource):
    """Tensors without bytes (device meta), and a record of what a builder asked for.

    A plan or a check made with it cannot disagree with the loader: it is the loader.

    Args:
        names: tensors that a checkpoint has beyond what every one must have; none: there is none.
    """

    def __init__(self, dtype: torch.dtype, names: Collection[str] = ()) -> None:
        self.dtype, self._names = dtype, names
        self.is_made = not names
        self.asked: dict[str, tuple[int, ...]] = {}
        self.integers: dict[str, torch.dtype] = {}  # of those

    def has(self, name: str) -> bool:
        return name in self._names

    def take(self, weight: Weight) -> Tensor:
        self.asked[weight.name] = weight.shape
        dtype = weight.dtype or self.dtype
        if not dtype.is_floating_point:
            self.integers[weight.name] = dtype
        return torch.empty(weight.meant_shape, dtype=dtype, device="meta")


class TensorHeader(NamedTuple):
    """What a safetensors file says about a tensor before its bytes."""

    shape: tuple[int, ...]
    dtype: str  # the file's name for it: "BF16", "F32", ..


def read_headers(directory: Path) -> dict[str, TensorHeader]:
    """Names, shapes and dtypes of a checkpoint's tensors; no tensor is read.

    Raises:
        ValueError: no weight files, or one that is not readable.
    """
    parts = {name: handle.get_slice(name) for name, handle in _open(directory).items()}
    return {n: TensorHeader(tuple(p.get_shape()), str(p.get_dtype())) for n, p in parts.items()}


def _open(directory: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Each tensor's open file, by the tensor's name."""
    handles: dict[str, Any] = {}
    for file in _weight_files(directory):
        try:
            handle = safe_open(file, framework="pt", device=str(device))
            names = handle.keys()
        except (SafetensorError, OSError) as error:
            why = f"not a readable safetensors file ({error}); truncated or damaged, fetch it again"
            if not os.access(file, os.R_OK):  # which safetensors calls missing
                why = "cannot be read (no permission); make it readable"
            raise ValueError(f"{file}: {why}") from error
        for name in names:
            if name in handles:
                raise ValueError(f"{file}: tensor {name!r} is in two files; fetch them again")
            handles[name] = handle
    return handles


def _weight_files(directory: Path) -> list[Path]:
    index, whole = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except OSError as error:
            raise ValueError(
                f"{index}: cannot be read ({error.strerror}); make it readable"
            ) from error
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{index}: not a safetensors index ({error}); fetch the file again"
            ) from error
        outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
        if outside:
            raise ValueError(f"{index}: {outside[:3]} lie outside the directory; not read")
        files = [directory / name for name in names]
        if whole.is_file() and whole not in files:  # transformers leaves the one or the other
            raise ValueError(
                f"{directory}: {whole.name} lies beside an index that names {names[:1]}, not it, "
                f"and engines differ in which they read; remove {whole.name} or {index.name}"
            )
    else:
        # Beside it may lie the same in another form.
        files = [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))
    pickles = sorted(f.name for f in directory.iterdir() if f.suffix in _PICKLES)
    if pickles and not files:
        raise ValueError(
            f"{directory}: only {', '.join(pickles[:3])}, no safetensors; a pickle can run any "
            "code and is never read: convert it to safetensors, or fetch a revision that has them"
        )
    # os.path, not Path, which raises for a name that is too long
    missing = [file.name for file in files if not os.path.isfile(file)]
    if missing or not files:
        what = f"weight files {missing}" if missing else "model.safetensors"
        raise ValueError(
            f"{directory}: no {what}; fetch the checkpoint again (only safetensors are read), or "
            "take random weights (load_format dummy)"
        )
    return files
