"""Text to tokens and back: the checkpoint's own tokenizer and chat template.

The only importer of transformers. Detokenization is incremental: a token can end in the middle of
a UTF-8 character, so text is held back until its bytes are complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPLACEMENT = "\ufffd"
CONTEXT = 8  # tokens before a new one that its text may depend on; a character has at most 4
CUT = 3  # bytes, and so characters, that a window may begin with in the middle of a character

Message = Mapping[str, str]
"""One chat turn: {"role": "user", "content": ".."}."""


class Tokenizer:
    """A Hugging Face tokenizer from a local directory; runs no code from it."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._hf: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        except Exception as error:  # transformers raises whatever a broken file provokes
            raise ValueError(
                f"{directory}: the tokenizer cannot be loaded ({error}); the directory needs "
                "tokenizer.json and tokenizer_config.json"
            ) from error
        self.directory = directory

    @staticmethod
    def exists(directory: Path) -> bool:
        """Whether the directory has tokenizer files."""
        return any((directory / name).is_file() for name in ("tokenizer.json", "vocab.json"))

    def __len__(self) -> int:
        return len(self._hf)

    @property
    def chat_template(self) -> str | None:
        """The template's source; None where the checkpoint has none."""
        template = self._hf.chat_template
        return None if not template else template if isinstance(template, str) else str(template)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, no special tokens added.

        Raises:
            ValueError: a lone surrogate, which is how Python keeps a byte that is not UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text is not Unicode: {text[error.start]!r} at character {error.start}; pass "
                "UTF-8 text without lone surrogates"
            ) from error
        return self._hf.encode(text, add_special_tokens=False)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Thinking is switched off where the template knows the switch: the published Qwen3 drafters
        are trained without it.

        Raises:
            ValueError: the checkpoint has no chat template, or it rejects the messages.
        """
        if not self._hf.chat_template:
            raise ValueError(
                f"{self.directory}: no chat template in the checkpoint; pass raw text (--raw)"
            )
        try:
            text = self._hf.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
        except Exception as error:  # jinja raises whatever the template provokes
            raise ValueError(f"the chat template rejects these messages: {error}") from error
        return self.encode(str(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self._hf.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


class Detokenizer:
    """Turns a growing list of tokens into a growing text, never taking text back.

    Held back is the last character alone, and only while it is a replacement: bytes at the very end
    can still become a character, those before it cannot. What is decoded is a window of the last
    tokens, so a stream of bytes that never become one costs no more than any other.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_out = 0  # characters of the window's text that are out

    def feed(self, token_ids: Sequence[int], last: bool = False) -> str:
        """The new complete text. With `last`, what is incomplete is given out as it is."""
        self._window += token_ids
        text = self._tokenizer.decode(self._window)
        end = len(text) - (text.endswith(REPLACEMENT) and not last)
        new = text[self._num_out : end]
        self._num_out = max(self._num_out, end)
        if len(self._window) > 2 * CONTEXT:
            self._shorten(text)
        return new

    def _shorten(self, text: str) -> None:
        """Forgets tokens that can change nothing any more, if the others tell where we are."""
        window = self._window[-CONTEXT:]
        shorter = self._tokenizer.decode(window)
        num_held = max(len(text) - self._num_out, 0)
        is_same = len(shorter) > CUT and text.endswith(shorter[CUT:])
        if num_held == 0 or is_same:
            self._window, self._num_out = window, len(shorter) - num_held
