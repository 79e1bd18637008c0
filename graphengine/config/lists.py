"""Options that hold several values: from what a user may write, a flag's text among it, to them.

Each raises ValueError with the option's name, the value and what was expected.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import isfinite
from numbers import Integral, Real
from typing import Any

MAX_BIAS = 100  # as in OpenAI's API
# Of transformers' apply_chat_template, and of what it calls: no template is given one.
_OF_THE_CALL = {"chat_template", "conversation", "conversations", "messages", "self", "tokenize"}
_OF_THE_CALL |= {"max_length", "padding", "return_assistant_tokens_mask", "return_dict"}
_OF_THE_CALL |= {"return_tensors", "sanitize_control_tokens", "tokenizer_kwargs", "truncation"}


def parse_texts(name: str, value: Any) -> tuple[str, ...]:
    """One text, or several; None, vLLM's default, is none."""
    if value is None:
        return ()
    texts = (value,) if isinstance(value, str) else value
    found = tuple(texts) if isinstance(texts, Iterable) else ()
    wrong = not isinstance(texts, Iterable) or isinstance(texts, Mapping | bytes)
    if wrong or any(not isinstance(text, str) or not text for text in found):
        raise ValueError(f"{name} is {value!r}; expected a text or several, none of them empty")
    return found


def parse_choice(value: Any) -> tuple[str, ...]:
    """What an answer is one of. A list without a text leaves no answer; `()` and None ask for
    nothing."""
    found = parse_texts("choice", value)
    if not found and value is not None and value != ():
        raise ValueError(f"choice is {value!r}; expected one text at least, or leave it out")
    return found


def parse_token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Numbers, or "7,99"; None, vLLM's default, is none."""
    if value is None:
        return ()
    items = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if isinstance(items, Iterable) and not isinstance(items, Mapping | bytes):
        found = [_token_id(item) for item in items]
        if None not in found:
            return tuple(id for id in dict.fromkeys(found) if id is not None)
    raise ValueError(f"{name} is {value!r}; expected token ids from 0 up, such as 7,99")


def parse_allowed(name: str, value: Any) -> tuple[int, ...] | None:
    """As `parse_token_ids`, but None allows all, and an empty list is refused."""
    found = parse_token_ids(name, value)
    if value is not None and not found:
        raise ValueError(f"{name} is {value!r}, which leaves no token; None allows all")
    return found or None


def parse_bias(name: str, value: Any) -> dict[int, float]:
    """A mapping, or "50=-100,7=2.5"."""
    pairs = value.items() if isinstance(value, Mapping) else None
    if isinstance(value, str):
        pairs = [part.partition("=")[::2] for part in value.split(",")]
    found: dict[int, float] = {}
    for token, bias in pairs or ():
        id, number = _token_id(token), _number(bias)
        if id is None or number is None or not abs(number) <= MAX_BIAS:
            pairs = None
            value = f"{token}={bias}"
            break
        if id in found:
            raise ValueError(f"{name} has two numbers for token {id}; pass one")
        found[id] = number
    if pairs is None:
        raise ValueError(
            f"{name} has {value!r}; expected token ids with numbers from -{MAX_BIAS} to "
            f"{MAX_BIAS}, such as 50=-100,7=2.5"
        )
    return found


def parse_template_kwargs(name: str, value: Any) -> dict[str, Any]:
    """A mapping, or one in JSON."""
    try:
        found = value if isinstance(value, Mapping) else json.loads(value)
    except (TypeError, ValueError, RecursionError):
        found = None
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise ValueError(
            f'{name} is {value!r}; expected a JSON object, such as {{"enable_thinking": true}}'
        )
    if ours := sorted(_OF_THE_CALL & found.keys()):
        raise ValueError(f"{name} has {ours[0]}, which is not the caller's to choose; leave it out")
    return dict(found)


def is_integer(value: Any) -> bool:
    """Whether it is one, of numpy too; True is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _token_id(value: Any) -> int | None:
    if isinstance(value, str):
        value = int(value) if value.strip().isdecimal() else None
    return int(value) if is_integer(value) and value >= 0 else None


def _number(value: Any) -> float | None:
    try:
        number = float(value) if isinstance(value, str | Real) else None
    except (ValueError, OverflowError):  # an integer past any float
        return None
    return number if number is not None and isfinite(number) else None
