"""Which two checkpoints are meant: a target and a drafter, by what a user named and a file says.

A speculators checkpoint names its target (`speculators_config.verifier`), so it can stand alone as
MODEL. Invariant: what a user names wins over the file, `none` for the drafter included.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from graphengine.checkpoints.hub import BUNDLED, resolve
from graphengine.config.draft_formats import ARCHITECTURES, parse_draft
from graphengine.config.model import ModelConfig
from graphengine.config.values import RawConfig

NO_DRAFT, NGRAM = "none", "ngram"
"""What may stand for a drafter: decode plainly, whatever the model's file says; look drafts up in
the text so far (`drafters.ngram`)."""


def bundled_names(
    model: str | Path | None, draft: str | Path | None
) -> tuple[str | Path, str | Path | None]:
    """The same with the directories that names of `BUNDLED` stand for.

    Args:
        model: None for the first of them; where it is one its own drafter is the default.
        draft: one of them stands for that pair's drafter.
    """
    model, own = ("tiny", BUNDLED["tiny"]) if model is None else (model, _bundled(model))
    if own is not None:
        model, draft = own[0], own[1] if draft is None else draft
    named = None if draft is None else _bundled(draft)
    return model, draft if named is None else named[1]


def _bundled(name: str | Path) -> tuple[Path, Path] | None:
    """The pair that a name stands for, unless it is a model's directory, as with a preset's."""
    is_own = os.path.isfile(os.path.join(name, "config.json"))
    return None if is_own else BUNDLED.get(str(name))


def named_pair(model: str | Path | None, draft: str | Path | None) -> tuple[str, str | None]:
    """Names of the target and its drafter (None: plain decoding), for `hub.resolve`.

    Args: model, draft: as of `bundled_names`.

    Raises:
        ValueError: no such model, a drafter alone, or a speculators checkpoint that names no
            verifier.
    """
    model, draft = bundled_names(model, draft)
    directory = resolve(model)
    config, source = read_json(directory / "config.json")
    if "speculators_model_type" not in config:
        architectures = config.get("architectures")
        if isinstance(architectures, list) and any(name in ARCHITECTURES for name in architectures):
            raise ValueError(
                f"{source}: a drafter, not a target; pass its target as MODEL and --draft {model}"
            )
        return str(model), None if draft in (None, NO_DRAFT) else str(draft)
    verifier = parse_draft(config, source).verifier
    if verifier is None:
        raise ValueError(
            f"{source}: a drafter whose speculators_config names no verifier; pass its target as "
            f"MODEL and --draft {model}"
        )
    draft = model if draft is None else draft
    return verifier_of(directory, verifier), None if draft == NO_DRAFT else str(draft)


def verifier_of(directory: Path, name: str) -> str:
    """A verifier's name for `hub.resolve`: a relative path is the file's, not the shell's."""
    beside = directory / name
    return str(beside) if os.path.isdir(beside) else name  # Path.is_dir raises for a long name


def read_stop_ids(directory: Path, model: ModelConfig) -> tuple[tuple[int, ...], str]:
    """The tokens that end an answer, and the file that names them: generation_config.json, or
    config.json where that names none, or the tokenizer's, which is one.

    Raises:
        ValueError: the file is damaged, or none of them is of the vocabulary.
    """
    path = directory / "generation_config.json"
    ids = read_json(path).integers("eos_token_id") if path.is_file() else ()
    ids, name = (ids, path.name) if ids else (model.eos_token_ids, "config.json")
    if not ids and (end := _end_of_tokenizer(directory)) is not None:
        ids, name = (end,), "tokenizer_config.json"
    if ids and min(ids) >= model.vocab_size:
        raise ValueError(
            f"{directory / name}: eos_token_id {list(ids)} lies outside vocab_size "
            f"{model.vocab_size}; write the ids of the end tokens, or fetch the file again"
        )
    return ids, name


def _end_of_tokenizer(directory: Path) -> int | None:
    """The id of the tokenizer's `eos_token`, which its files name by its text."""
    path, vocabulary = directory / "tokenizer_config.json", directory / "tokenizer.json"
    if not (path.is_file() and vocabulary.is_file()):
        return None
    end = read_json(path)[0].get("eos_token")
    text = end.get("content") if isinstance(end, dict) else end
    added = read_json(vocabulary)[0].get("added_tokens")
    for token in added if text and isinstance(added, list) else []:
        if isinstance(token, dict) and token.get("content") == text:
            return token["id"] if isinstance(token.get("id"), int) else None
    return None


def read_json(path: Path) -> RawConfig:
    """A JSON object, named for messages by its path.

    Raises:
        ValueError: not readable, or not an object.
    """
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); make it readable") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not readable JSON ({error}); fetch the file again") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{path}: holds {type(parsed).__name__}, expected a JSON object")
    return RawConfig(parsed, str(path))
