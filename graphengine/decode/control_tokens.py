"""Control tokens apart from text, for llguidance.

Where a grammar leaves no choice, llguidance writes the text with the tokenizer of a tokenizer.json,
which takes the name of a control token in a text for that token: `choice=["<|im_end|>"]` ended at
once, with nothing said. So llguidance is given names that no text has, and a Lark grammar's own
`<think>` its number, which Lark may spell too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

# Of a Lark grammar, what may hold a name that is none, before what may be one.
_LARK = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|<[^<>\n]+>')


def hidden(tokenizer_json: str, vocab_size: int) -> tuple[str, dict[str, int]]:
    """A tokenizer.json whose control tokens no text is taken for, and their ids by name.

    Control tokens are the special ones, and what llguidance takes for such: `<tool_call>`. Added
    tokens behind the logits, which llguidance refuses, are left out: no answer has them.
    """
    found: dict[str, Any] = json.loads(tokenizer_json)
    ids: dict[str, int] = {}
    unseen: dict[str, str] = {}  # what stands for a control token's name
    added = [t for t in found.get("added_tokens") or () if t["id"] < vocab_size]
    found["added_tokens"] = added
    for token in added:
        name = token["content"]
        if token["special"] or re.fullmatch(r"<.*>", name):
            ids[name], unseen[name] = token["id"], f"\0{name}"
            token |= {"content": unseen[name], "special": True}
    model: dict[str, Any] = found["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):  # else an added token would get a new id
        model["vocab"] = {unseen.get(t, t): i for t, i in vocab.items() if i < vocab_size}
    else:
        model["vocab"] = [[unseen.get(t, t), score] for t, score in vocab[:vocab_size]]
    if model.get("unk_token") in unseen:
        model["unk_token"] = unseen[model["unk_token"]]
    return json.dumps(found), ids


def numbered(lark: str, ids: Mapping[str, int]) -> str:
    """A Lark grammar with control tokens by number: `<think>` is `<[151667]>`."""

    def number(found: re.Match[str]) -> str:
        name = found[0]
        return f"<[{ids[name]}]>" if name in ids else name

    return _LARK.sub(number, lark)
