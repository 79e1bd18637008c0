"""A tokenizer as Llama 2 has one."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models

WORDS = ["\u2581", "a", "\u2581b", "\u00e9", "\u4f60", "\u2581\u2581", "<s>"]


class FallsBackToBytes:
    """As Llama 2's: characters without a token are tokens of bytes, and bytes beside each other of
    which one is part of no character are all replacements."""

    def __init__(self) -> None:
        names = [f"<0x{byte:02X}>" for byte in range(256)] + WORDS
        bpe: Any = Fast(models.BPE({t: i for i, t in enumerate(names)}, [], byte_fallback=True))
        strip = decoders.Strip(" ", 1, 0)
        parts = decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip
        bpe.decoder = decoders.Sequence(list(parts))
        bpe.add_special_tokens(["<s>"])
        self.fast, self.decode = bpe, bpe.decode
        self.is_contextual = True

    @staticmethod
    def encode(text: str) -> list[int]:
        """Words' tokens where they fit, bytes elsewhere."""
        ids = list[int]()
        for char in text.replace(" ", "\u2581"):
            ids += [256 + WORDS.index(char)] if char in WORDS else char.encode()
        return ids

    def encode_special(self, name: str) -> int:
        return self.fast.token_to_id(name)
