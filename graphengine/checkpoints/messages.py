"""A chat's turns as clients give them out, as chat templates read them: text and objects alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from numbers import Number
from typing import Any

# Types of parts that are text, in OpenAI's APIs, and where it stands.
_TEXT_KEYS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
_NOT_TEXT = set("image image_url video video_url audio audio_url input_audio file".split())


def check_unicode(text: str) -> None:
    """Refuses a lone surrogate, which no tokenizer takes. Raises: ValueError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text is not Unicode: {text[error.start]!r} at character {error.start}; pass "
            "UTF-8 text without lone surrogates"
        ) from error


def plain(value: Any) -> Any:
    """The same made of mappings, lists, text and numbers only: inside any other object a control
    token would go unseen, and transformers writes unknown objects as the names of their types.

    Raises:
        ValueError: another object cannot be turned into these.
    """
    if value is None or isinstance(value, str | Number):
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return list(map(plain, value))
    if callable(getattr(value, "model_dump", None)):  # of pydantic, as clients give out
        return plain(value.model_dump())
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    raise ValueError(f"a message holds a {type(value).__name__}; pass text in its place")


def as_templates_read(message: dict[str, Any], takes_parts: bool) -> dict[str, Any]:
    """A turn with its content as text and the arguments of calls as objects, which is what vLLM
    gives to templates. Clients send null, no content (beside calls), text in parts, JSON.

    Args: takes_parts: the template reads text in parts itself.
    Mutates: message.
    Raises: ValueError for a picture or sound: the template of a model that sees would write a
        placeholder, and the answer would be about something that was never seen. And, unless it
        takes parts, for any other part that is no text: a template would leave out the whole turn
        (Qwen3's) or print a Python list (Llama's).
    """
    content = message.get("content", None if message.get("tool_calls") else "")
    if isinstance(content, dict) and "type" in content:  # a part by itself
        content = [content]
    for part in content if isinstance(content, list) else []:
        if not isinstance(part, dict):
            continue
        for key in [key for key, value in part.items() if value is None]:
            del part[key]  # a table of parts has a column of every kind
        if kinds := _NOT_TEXT & {str(part.get("type")), *part}:
            raise ValueError(f"a message holds a part of type {min(kinds)}; pass its text alone")
    if content is None:
        message["content"] = ""
    elif isinstance(content, list):
        parts = message["content"] = [*map(_as_text, content)]
        typed = [part for part in parts if isinstance(part, dict) and "type" in part]
        for part in typed if not takes_parts else []:
            if part["type"] != "text" or not isinstance(part.get("text"), str):
                raise ValueError(
                    f"a message holds a part of type {part['type']}; pass its text alone"
                )
        if len(typed) == len(parts) and not takes_parts:
            message["content"] = "\n".join(part["text"] for part in typed)
    for key in [key for key, value in message.items() if value is None]:
        del message[key]  # as newer versions of transformers do
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        said = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(said, dict) and isinstance(said.get("arguments"), str | None):
            with suppress(ValueError):  # what a model wrote wrongly is told as it is
                said["arguments"] = json.loads(said.get("arguments") or "{}")
    return message


def _as_text(part: Any) -> Any:
    """A part of a turn as templates know it, where it is text under another name."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    key = _TEXT_KEYS.get(str(part.get("type"))) if isinstance(part, dict) else None
    return {"type": "text", "text": part.get(key)} if key is not None else part
