"""What doctor reads: JSON files, safetensors headers, the tokenizer; never a tensor, never a hub.

Invariant: reading never raises. A part that cannot be read is None, and the reason stands in
`problems` under the part's name, so that one broken file does not hide what the others say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from graphengine.checkpoints.hub import PRESETS, resolve
from graphengine.checkpoints.pairs import read_json, read_stop_ids
from graphengine.checkpoints.sources import TensorHeader, read_headers
from graphengine.checkpoints.tokenizer import Message, Tokenizer, load_tokenizer
from graphengine.config.model import ModelConfig
from graphengine.doctor.findings import reason

T = TypeVar("T")
# A conversation that every chat template has to render.
CONVERSATION: list[Message] = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "good day"},
    {"role": "user", "content": "what is new"},
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model's files as far as they could be read.

    `tokenizer` is None also where there is no such file (then without an entry in `problems`).
    `stop_ids`: what ends an answer, and the file that says so; like the tokenizer, a target's.
    `rendered`: what the chat template makes of `CONVERSATION`.
    """

    name: str
    directory: Path | None = None
    config: Mapping[str, Any] | None = None
    headers: Mapping[str, TensorHeader] | None = None
    stop_ids: tuple[tuple[int, ...], str] | None = None
    tokenizer: Tokenizer | None = None
    rendered: str | None = None
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_preset(self) -> bool:
        """Whether this is a shape without weights, meant for --load-format dummy."""
        return self.directory is not None and self.directory.parent == PRESETS

    @property
    def source(self) -> str:
        """How messages call its config."""
        return str(self.directory / "config.json") if self.directory else self.name


def read_model_files(name: str | Path, *, with_tokenizer: bool) -> ModelFiles:
    """Reads what is there, by the functions that a start reads it with.

    Args:
        name: a directory, a preset, or a hub id whose files are in the local cache.
        with_tokenizer: False for a drafter, which uses the target's. Where config.json is refused
            no tokenizer is loaded either.
    """
    problems: dict[str, str] = {}

    def attempt(part: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except Exception as problem:  # whatever a damaged file provokes
            problems[part] = reason(problem)
            return None

    directory = attempt("directory", lambda: resolve(name, local_only=True))
    if directory is None:
        return ModelFiles(name=str(name), problems=problems)
    config = attempt("config", lambda: read_json(directory / "config.json")[0])
    stop_ids = tokenizer = model = rendered = None
    with suppress(Exception):  # `parse_target` says why
        model = ModelConfig.from_hf(config or {})
    if with_tokenizer and model is not None:
        stop_ids = attempt("stop_tokens", lambda: read_stop_ids(directory, model))
        ends = stop_ids[0] if stop_ids else ()
        tokenizer = attempt("tokenizer", lambda: load_tokenizer(directory, model, ends))
        if tokenizer is not None and tokenizer.chat_template:
            attempt("chat_template", lambda: tokenizer.encode_chat(CONVERSATION[:1]))
            rendered = attempt(
                "conversation", lambda: tokenizer.decode(tokenizer.encode_chat(CONVERSATION))
            )
    return ModelFiles(
        name=str(name),
        directory=directory,
        config=config,
        headers=attempt("weights", lambda: read_headers(directory)),
        stop_ids=stop_ids,
        tokenizer=tokenizer,
        rendered=rendered,
        problems=problems,
    )
