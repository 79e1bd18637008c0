"""Turns a model name into a local directory: a path as it is, a hub id through the hub's cache.

Invariant: only files that an engine reads are fetched (JSON, tokenizer text, safetensors); no code
and no pickles.
"""

from __future__ import annotations

from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
TINY_TARGET = ASSETS / "tiny" / "target"
TINY_DRAFT = ASSETS / "tiny" / "draft"

_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt"]


def resolve(model: str | Path) -> Path:
    """The directory that holds `model`'s config.json.

    Args:
        model: a directory, or a hub id such as `Qwen/Qwen3-8B`.

    Raises:
        ValueError: no such directory, or the hub id cannot be fetched.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"{path}: no config.json in this directory; pass a Hugging Face model directory"
            )
        return path
    name = str(model)
    looks_like_path = path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1
    if path.exists() or looks_like_path:
        raise ValueError(
            f"{name}: no such model directory; pass a directory with config.json or a hub id "
            "(owner/name)"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS))
    except Exception as error:  # the hub client raises a dozen unrelated types
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{name}: neither a local directory nor a hub model that can be fetched ({reason}); "
            "check the name, the network and HF_HUB_OFFLINE, or pass a directory"
        ) from error
