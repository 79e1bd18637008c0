"""Prompt files: JSON Lines of single prompts or of conversations' user turns.

Invariant: a file is accepted whole or refused with the number of the line that is wrong, before
any model is loaded. Token ids as a prompt serve models without a tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Turn = str | list[int]
Conversation = list[Turn]
"""A user's turns in order; token ids stand alone."""

MAX_CHARS = 1 << 26  # /dev/zero and its like never end
_FORMAT = 'expected {"prompt": "text"} or {"turns": ["text", ..]}, and no other key'


def read_prompt_file(path: Path) -> list[Conversation]:
    """Conversations of a JSON Lines file, one per line; blank lines are skipped.

    Raises:
        ValueError: unreadable, empty, or a line of another form.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:  # a BOM is Windows' own
            text = file.read(MAX_CHARS + 1)
        if len(text) > MAX_CHARS:
            raise ValueError(f"{path}: more than {MAX_CHARS} characters; split it")
        lines = text.split("\n")  # not splitlines: JSON strings may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ValueError(f"{path}: {reason}; pass a JSON Lines file, {_FORMAT}") from error
    found: list[Conversation] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error}); {_FORMAT}") from error
        turns = _turns(entry)
        if turns is None:
            shown = line if len(line) <= 60 else line[:57] + "..."
            raise ValueError(f"{path}, line {number}: {shown}; {_FORMAT}")
        if (lone := lone_surrogate(turns)) is not None:
            raise ValueError(
                f"{path}, line {number}: {lone!r} is half of a character; write the whole character"
            )
        found.append(turns)
    if not found:
        raise ValueError(f"{path}: holds no prompt; {_FORMAT} on each line")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | None:
    """None where a key stands twice: json would drop the first without a word."""
    found = dict(pairs)
    return found if len(found) == len(pairs) else None


def _turns(entry: Any) -> Conversation | None:
    if not isinstance(entry, dict) or len(entry) != 1:  # an option there would go unread
        return None
    if "turns" in entry:
        turns = entry["turns"]
        right = isinstance(turns, list) and turns and all(isinstance(t, str) for t in turns)
        return turns if right else None
    prompt = entry.get("prompt")
    if isinstance(prompt, list):
        right = prompt and all(type(token) is int for token in prompt)
        return [prompt] if right else None
    return [prompt] if isinstance(prompt, str) else None


def lone_surrogate(turns: Conversation) -> str | None:
    """What JSON can spell and no tokenizer takes."""
    text = "".join(turn for turn in turns if isinstance(turn, str))
    return next((char for char in text if "\ud800" <= char <= "\udfff"), None)
