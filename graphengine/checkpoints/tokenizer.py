"""Text to tokens and back: the checkpoint's own tokenizer and chat template.

The only importer of transformers. Detokenization is incremental: a token can end in the middle of
a UTF-8 character, so text is held back until its bytes are complete.
Invariant: what a message says never becomes a control token, and no template runs for long.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

from graphengine.checkpoints.messages import as_templates_read, check_unicode, plain
from graphengine.checkpoints.pairs import read_json
from graphengine.checkpoints.pieces import PieceEncoder
from graphengine.checkpoints.timed import NoThreadError, within
from graphengine.config.model import ModelConfig

REPLACEMENT = "\ufffd"
CONTEXT = 8  # tokens before a new one that its text may depend on; a character has at most 4
CUT = 3  # bytes, and so replacements, that a window may begin or end with within a character
_IMPORTING = Lock()  # transformers hands a second thread what it has not imported yet
_CUTS = range(CONTEXT, CONTEXT + CUT + 1)  # one of them is within no character
MAX_TEMPLATE_CHARS, MAX_TEMPLATE_S = 1 << 20, 5.0  # published ones: 20 thousand, milliseconds
_OF_A_PART = re.compile(r"""['"]text\\?['"]|\.text\b""")  # in a template that reads parts

Message = Mapping[str, str]
"""One chat turn: {"role": "user", "content": ".."}."""


class Tokenizer:
    """A Hugging Face tokenizer from a local directory; runs no code from it.

    `is_contextual`: a word's token lacks its space at the beginning of a text (Llama 2).
    `outside`: the text of each id that the embedding has no row for, which no prompt may have.
    """

    def __init__(self, directory: Path, num_rows: int = sys.maxsize) -> None:
        """Args: num_rows: of the model's embedding."""
        with _IMPORTING:
            from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

        remedy = "the directory needs tokenizer.json and tokenizer_config.json"
        with _told(f"{directory}: the tokenizer cannot be loaded", remedy):
            kind: Any = PreTrainedTokenizerFast
            how: dict[str, Any] = {}
            # AutoTokenizer would rebuild what a tokenizer.json says by the model_type's own rules.
            if not (directory / "tokenizer.json").is_file():
                # Of config.json the kind alone: it would build a model's whole config of it.
                model_type = read_json(directory / "config.json")[0].get("model_type") or ""
                kind, how = AutoTokenizer, {"config": AutoConfig.for_model(model_type)}
            self._hf: Any = kind.from_pretrained(
                directory,
                trust_remote_code=False,
                model_max_length=sys.maxsize,  # ours to refuse, with the remedy
                **how,
            )
            self._backend: Any = None
            if type(self._hf) is PreTrainedTokenizerFast:  # which asks it with more ado
                self._backend = self._hf.backend_tokenizer
            self._pieces = PieceEncoder(self._hf)
            self._front = self._put_in_front()
            word = self._pieces.encode(" a")
            self.is_contextual = self.decode(word * 2) != self.decode(word) * 2
        self._num_rows = num_rows
        self.outside = {i: t for t, i in self._hf.get_vocab().items() if i >= num_rows}
        self.directory, template = directory, self._hf.chat_template
        texts = [*template.values()] if isinstance(template, dict) else [template]
        for text in texts:
            if not isinstance(text, str | None):
                raise ValueError(
                    f"{directory}: chat_template holds {text!r}, expected text; fetch "
                    "tokenizer_config.json again"
                )
        if (num_chars := len(self.chat_template or "")) > MAX_TEMPLATE_CHARS:
            raise ValueError(
                f"{directory}: the chat template has {num_chars} characters, more than "
                f"{MAX_TEMPLATE_CHARS}; fetch the file again"
            )
        control = [t.content for t in self._hf.added_tokens_decoder.values() if t.special]
        # Its first character, also where one begins within another.
        names = "|".join(map(re.escape, control)) or "(?!)"
        self._control = re.compile(f"(?=(?:{names}))(?s:.)")
        # Private characters that can cut a spelled token in two: no template writes them.
        own = {*names, *"".join(filter(None, texts))}
        self._marks = [char for char in map(chr, range(0xE000, 0xF8FF)) if char not in own]

    @staticmethod
    def exists(directory: Path) -> bool:
        """Whether the directory has tokenizer files."""
        return any((directory / name).is_file() for name in ("tokenizer.json", "vocab.json"))

    def __len__(self) -> int:
        """Rows of an embedding that its ids need; some may have no token."""
        return 1 + max(self._hf.get_vocab().values(), default=-1)

    @property
    def added_ids(self) -> Set[int]:
        """Tokens beside those of its own vocabulary, such as a padding that a fine-tune added."""
        return self._hf.added_tokens_decoder.keys()

    def spells(self, token_id: int) -> bool:
        """Whether the id has a token, and its text is that token again."""
        text = self._hf.decode([token_id], skip_special_tokens=False)
        return self.encode(text) == [token_id]

    @property
    def chat_template(self) -> str | None:
        """The template's source; None where the checkpoint has none."""
        template = self._hf.chat_template
        return None if not template else template if isinstance(template, str) else str(template)

    def encode(self, text: str) -> list[int]:
        """Token ids of text, no special tokens added; one that the text spells is one.

        Raises:
            ValueError: a lone surrogate, which is how Python keeps a byte that is not UTF-8; a
                token that the embedding has no row for; or the tokenizer fails at the text.
        """
        check_unicode(text)
        remedy = "fetch tokenizer.json again"
        with _told(f"{self.directory}: the tokenizer cannot encode this text", remedy):
            ids = self._pieces.encode(text)
        return self._within(ids)

    def _within(self, ids: list[int]) -> list[int]:
        if self.outside and not self.outside.keys().isdisjoint(ids):
            token = next(token for token in ids if token in self.outside)
            raise ValueError(
                f"the text has {self.outside[token]!r}, token {token}, which lies outside the "
                f"model's vocabulary of {self._num_rows}; leave it out of the text and the chat "
                "template, or use weights with a row for it"
            )
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a text to continue, behind what the tokenizer puts in front of any text, as
        in training (Llama's <|begin_of_text|>), unless the text begins with that already. In a
        conversation the chat template writes it. Raises: as `encode`."""
        ids = self.encode(text)
        has_front = ids[: len(self._front)] == self._front
        return ids if has_front else self._within(self._front) + ids

    def _put_in_front(self) -> list[int]:
        plain = self._pieces.encode("a")
        ids = list(self._hf.encode("a"))
        begins = [i for i in range(len(ids)) if ids[i : i + len(plain)] == plain]
        return ids[: begins[0]] if begins else []

    def encode_word(self, word: str) -> list[list[int]]:
        """Token ids of a word at the beginning of a text and, where they are as many and begin with
        another token, those of it behind a space: how vLLM reads a bad word."""
        first, behind = (self.encode(space + word.lstrip()) for space in ("", " "))
        is_other = len(first) == len(behind) and first[:1] != behind[:1]
        return [ids for ids in (first, behind if is_other else []) if ids]

    def encode_chat(
        self, messages: Sequence[Message], template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Control tokens are the template's alone: one that a message spells stays text, or a user's
        turn could forge another's. Thinking is switched off where the template knows the switch:
        the published Qwen3 drafters are trained without it.

        Args: template_kwargs: what else the template is given, tools among it.

        Raises:
            ValueError: the checkpoint has no chat template, or it rejects the messages; or they
                hold what is no text.
        """
        templates = self._hf.chat_template
        if not templates:
            raise ValueError(
                f"{self.directory}: no chat template in the checkpoint; pass raw text (--raw)"
            )
        tools = (template_kwargs or {}).get("tools")
        fitting = {"default"} if tools is None else {"default", "tool_use"}
        if isinstance(templates, dict) and fitting.isdisjoint(templates):
            raise ValueError(
                f"{self.directory}: chat templates {sorted(templates)}, none of them the default; "
                "write the one that is meant to chat_template.jinja, or pass raw text (--raw)"
            )

        def apart(value: Any) -> Any:
            if isinstance(value, str):
                check_unicode(value)  # here, where it is as the caller has it
                return self._control.sub(rf"\g<0>{cut}", value)
            if isinstance(value, Mapping):
                return {apart(key): apart(inner) for key, inner in value.items()}
            return list(map(apart, value)) if isinstance(value, list) else value

        try:
            turns, kwargs = plain(messages), plain(template_kwargs or {})
            takes_parts = _takes_parts(self.chat_template or "")
            turns = [as_templates_read(message, takes_parts) for message in turns]
            # At it the text is cut, and its pieces are encoded apart.
            said = json.dumps([turns, kwargs], ensure_ascii=False, default=str)
            cut = next(char for char in self._marks if char not in said)
            kwargs = {"add_generation_prompt": True, "enable_thinking": False} | apart(kwargs)
            text = within(
                MAX_TEMPLATE_S,
                lambda: self._hf.apply_chat_template(apart(turns), tokenize=False, **kwargs),
            )
        except NoThreadError:
            raise
        except Exception as error:  # jinja raises whatever the template provokes, or they nest
            raise ValueError(
                f"the chat template rejects these messages: {_reason(error)}"
            ) from error
        first, *behind = str(text).split(cut)
        ids = self.encode(first)
        for piece in behind:
            ids += self._encode_behind(cut, piece)
        return ids

    def _encode_behind(self, cut: str, piece: str) -> list[int]:
        """Token ids of a text that goes on, without the space that Llama 2's tokenizer and others
        put in front of any: behind a character that joins nothing, whose tokens are left out."""
        if self.is_contextual:
            front, ids = self.encode(cut), self.encode(cut + piece)
            if ids[: len(front)] == front:
                return ids[len(front) :]
        return self.encode(piece)

    def as_json(self) -> str:
        """The tokenizer.json, added tokens included, for llguidance.

        Raises:
            ValueError: it is not of the kind that has one.
        """
        backend = getattr(self._hf, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"{self.directory}: grammars need a tokenizer.json; fetch it")
        return backend.to_str()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        if self._backend is not None:
            return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return self._hf.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )


def load_tokenizer(
    directory: Path, model: ModelConfig, stop_ids: Iterable[int]
) -> Tokenizer | None:
    """The tokenizer of these weights; None where the directory has none.

    Raises:
        ValueError: it is damaged, or another model's.
    """
    if not Tokenizer.exists(directory):
        return None
    tokenizer = Tokenizer(directory, model.vocab_size)
    if not tokenizer.outside.keys() <= tokenizer.added_ids:
        raise ValueError(
            f"{directory}: the tokenizer's ids go up to {len(tokenizer) - 1}, the embedding has "
            f"{model.vocab_size} rows; they belong to different models"
        )
    lost = [i for i in stop_ids if i < model.vocab_size and not tokenizer.spells(i)]
    if lost:
        raise ValueError(
            f"{directory}: no text becomes the tokens {lost}, which end an answer: the tokenizer "
            "has lost them; fetch tokenizer.json and tokenizer_config.json again"
        )
    return tokenizer


@lru_cache(maxsize=8)
def _takes_parts(template: str) -> bool:
    """Whether it reads a turn's text in parts. Templates are long, and asked for each time."""
    return bool(_OF_A_PART.search(template))


@contextmanager
def _told(what: str, remedy: str) -> Iterator[None]:
    """Turns what transformers and tokenizers raise, which is anything, into a ValueError."""
    try:
        yield
    except BaseException as error:
        # A Rust panic is no Exception, so that it ends a program.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what} ({_reason(error)}); {remedy}") from error


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


class Detokenizer:
    """Turns a growing list of tokens into a growing text, never taking text back.

    Held back are replacements at the very end, as many as bytes can still become one character.
    A tokenizer that falls back to bytes (Llama 2) decodes neighbouring bytes all to replacements
    while one of them is part of no character yet, even where the others' character was given out:
    then nothing is given out until they decode again or are too many to. Only a window of the last
    tokens is decoded, so bytes that never become a character cost no more than others.
    """

    def __init__(
        self, tokenizer: Tokenizer, behind: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        """Args: behind: the prompt that the text goes on from."""
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._window: list[int] = []
        self._out = ""  # what of the window's text is out
        self._num_whole = 0  # tokens of the window behind which nothing was held back
        for cut in _CUTS if behind and tokenizer.is_contextual else ():
            text = self._decode(tail := list(behind[-cut:]))
            if not text.endswith(REPLACEMENT):
                self._window, self._out, self._num_whole = tail, text, len(tail)
                break

    def feed(self, token_ids: Sequence[int], last: bool = False) -> str:
        """The new complete text. With `last`, what is incomplete is given out as it is."""
        text = self._decode([*self._window, *token_ids])
        if len(token_ids) > 1 and text.endswith(REPLACEMENT):  # which of them are a character?
            parts = [self.feed([token]) for token in token_ids]
            return "".join(parts) + (self.feed([], last=True) if last else "")
        self._window = [*self._window, *token_ids]  # a new list, for copies
        if not text.startswith(self._out):
            behind = self._window[self._num_whole :]
            if len(behind) <= CUT and text.endswith(REPLACEMENT) and not last:
                return ""
            self._window, self._out, self._num_whole = behind, "", 0
            text = self._decode(behind)
        num_held = min(len(text) - len(text.rstrip(REPLACEMENT)), 0 if last else CUT)
        end = max(len(text) - num_held, len(self._out))
        new, self._out = text[len(self._out) : end], text[:end]
        if end == len(text):
            self._num_whole = len(self._window)
        if len(self._window) > 2 * CONTEXT:
            self._shorten(text)
        return new

    def _shorten(self, text: str) -> None:
        """Forgets tokens that can change nothing any more, if the others tell where we are."""
        num_held = len(text) - len(self._out)
        for cut in _CUTS:
            window = self._window[-cut:]
            shorter = self._decode(window)
            is_same = len(shorter) >= num_held and text.endswith(shorter)
            if is_same:
                break
        if is_same or num_held == 0 or (len(shorter) > CUT and text.endswith(shorter[CUT:])):
            self._num_whole = max(self._num_whole - len(self._window) + len(window), 0)
            self._window, self._out = window, shorter[: max(len(shorter) - num_held, 0)]
