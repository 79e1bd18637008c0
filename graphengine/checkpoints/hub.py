"""Turns a model name into a local directory: a path as it is, a hub id through the hub's cache.

Invariant: only files that an engine reads are fetched (JSON, tokenizer text, safetensors); no code
and no pickles.
"""

from __future__ import annotations

import stat
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "assets"
TINY_TARGET, TINY_DRAFT = (ASSETS / "tiny" / part for part in ("target", "draft"))
HYBRID_TARGET, HYBRID_DRAFT = (ASSETS / "tiny-hybrid" / part for part in ("target", "draft"))
BUNDLED = {"tiny": (TINY_TARGET, TINY_DRAFT), "tiny-hybrid": (HYBRID_TARGET, HYBRID_DRAFT)}
"""Trained pairs by name, each with its own drafter."""

TOY_PROMPTS = (
    "Compare the bee and the duck.",
    "Write a note: Emma thanks David for a green key.",
)
"""Prompts that both pairs answer as they were taught."""

PRESETS = Path(__file__).parents[1] / "presets"
"""Shapes of published models as config files alone, for --load-format dummy."""

_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
# The same weights once more in their makers' own format (Mistral's), and what lies in folders.
_NOT_READ = ["consolidated*.safetensors", "*/*.safetensors"]


def preset_names() -> list[str]:
    """Names that `resolve` takes beside directories and hub ids."""
    return sorted(path.parent.name for path in PRESETS.glob("*/config.json"))


def resolve(model: str | Path, *, local_only: bool = False) -> Path:
    """The directory that holds `model`'s config.json.

    Args:
        model: a directory, a hub id such as `Qwen/Qwen3-8B`, or a preset's name such as `qwen3-8b`.
        local_only: take a hub model from the local cache or not at all.

    Raises:
        ValueError: no such directory, or the hub id cannot be fetched.
    """
    name = str(model)
    if not name:
        raise ValueError("the model's name is empty; pass a directory or a hub id (owner/name)")
    try:
        path = Path(model).expanduser()
        mode, has_config = _mode(path), stat.S_ISREG(_mode(path / "config.json"))
    except (OSError, RuntimeError) as error:  # not allowed, too long, or ~ of nobody
        shown = name if len(name) <= 300 else name[:297] + "..."
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{shown}: {reason}; pass a directory with config.json, or a hub id (owner/name)"
        ) from error
    if stat.S_ISDIR(mode):
        whole = _whole(path)
        if not has_config:
            raise ValueError(
                f"{path}: no config.json in this directory; pass a Hugging Face model directory"
            )
        return whole
    if name in preset_names():
        return PRESETS / name
    looks_like_path = path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1
    if mode or looks_like_path:
        raise ValueError(
            f"{name}: no such model directory; pass a directory with config.json, a hub id "
            f"(owner/name), {' or '.join(BUNDLED)}, for a drafter ngram or none, or for random "
            f"weights one of {', '.join(preset_names())}"
        )
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(
            name,
            allow_patterns=_PATTERNS,
            ignore_patterns=_NOT_READ,
            local_files_only=local_only,
        )
    except Exception as error:  # the hub client raises a dozen unrelated types
        if local_only:
            raise ValueError(
                f"{name}: neither a local directory nor in the local Hugging Face cache; fetch it "
                f"first (hf download {name}), or pass a directory"
            ) from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{name}: neither a local directory nor a hub model that can be fetched ({reason}); "
            "check the name, the network and HF_HUB_OFFLINE, or pass a directory"
        ) from error
    return _whole(Path(path))


def _mode(path: Path) -> int:
    """What is there, 0 if nothing. Unlike `Path.is_dir`, which from Python 3.14 on says so as well
    of what cannot be looked at.

    Raises:
        OSError: the system refuses to look.
    """
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last: a null character
        return 0


def _whole(directory: Path) -> Path:
    """The directory, unless what it holds would silently be missed: a dangling link's file, or an
    adapter, which transformers adds to the weights beside it, or to those of another model."""
    if (adapter := directory / "adapter_config.json").exists():
        raise ValueError(
            f"{adapter}: adapters are not supported; merge it into its model (peft: "
            "merge_and_unload, then save_pretrained) and pass that, or remove it"
        )
    for pattern in _PATTERNS:
        for path in directory.glob(pattern):
            if not path.exists():
                raise ValueError(f"{path}: is a link to a file that is gone; fetch the model again")
    return directory
