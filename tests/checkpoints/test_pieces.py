"""pieces: whatever was encoded before, a text's ids are the tokenizer's own of the whole."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from graphengine.checkpoints import pieces as module
from graphengine.checkpoints.pieces import PieceEncoder

CONTROL = ("<|a|>", "<|b|>")
TEXT = "the quick brown fox, 7 apples and 42 more; the end is the beginning of <|a|>"
FRAGMENTS = (
    *CONTROL,
    "<|a",
    "|>",
    "<|",
    "a",
    "the",
    " the",
    " ",
    "  ",
    "\n",
    "7",
    "42",
    "\u00e9",
    "X",
)


def made(*added: Any, metaspace: bool = False, normalizer: Any = None) -> PreTrainedTokenizerFast:
    """A tokenizer with these added tokens beside two plain ones."""
    bpe: Any = Tokenizer(models.BPE(unk_token="<unk>" if metaspace else None))
    beginning = pre_tokenizers.Metaspace(prepend_scheme="first")
    bpe.pre_tokenizer = beginning if metaspace else pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    if normalizer is not None:
        bpe.normalizer = normalizer
    alphabet = [*"\u2581\u00e9X\n<|>"] if metaspace else pre_tokenizers.ByteLevel.alphabet()
    special = [*CONTROL, *(["<unk>"] if metaspace else [])]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([TEXT] * 3, trainer)
    bpe.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


KINDS: dict[str, tuple[PreTrainedTokenizerFast, bool]] = {
    "bytes": (made(), True),
    "one within another": (made(AddedToken("<|a|>the", normalized=False), "the 7"), True),
    "takes spaces": (made(AddedToken("<|c|>", lstrip=True, rstrip=True, normalized=False)), False),
    "a word": (made(AddedToken("the", single_word=True, normalized=False)), False),
    # Among several a word has less beside it in what is tried, spaces and a line's end here.
    "a word among others": (
        made(
            AddedToken("<|cc|>", normalized=False),
            AddedToken("the", single_word=True, normalized=False),
        ),
        False,
    ),
    "normalised": (
        made(AddedToken("THE", normalized=True), normalizer=normalizers.Lowercase()),
        True,
    ),
    "composed": (made(AddedToken("THE", normalized=True), normalizer=normalizers.NFC()), True),
    "a beginning": (made(metaspace=True), False),
}
CUT = {name: PieceEncoder(tokenizer) for name, (tokenizer, _) in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(parts=st.lists(st.sampled_from([*FRAGMENTS, "<|c|>", "THE"]), max_size=12))
@example(parts=["THE", "\u0301"])
def test_ids_are_those_of_the_whole_text(kind: str, parts: list[str]) -> None:
    """Bug: a piece is cut where the tokenizer would not cut it, as at a token whose last letter
    is another with the accent behind it; takes a space that belongs to a token beside it, is
    encoded as if it began the text, or is remembered as another's."""
    tokenizer, is_cut = KINDS[kind]
    text = "".join(parts)
    assert CUT[kind].encode(text) == tokenizer.encode(text, add_special_tokens=False)
    assert bool(CUT[kind]._ids) == is_cut


def asked_of(pieces: PieceEncoder, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that the tokenizer is asked for from now on."""
    asked, real = list[str](), pieces._whole

    def whole(text: str) -> list[int]:
        asked.append(text)
        return real(text)

    monkeypatch.setattr(pieces, "_whole", whole)
    return asked


def test_what_was_said_is_not_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: each turn of a chat encodes all the turns before it."""
    pieces = PieceEncoder(made())
    asked, said = asked_of(pieces, monkeypatch), ""
    for turn in range(4):
        said += f"<|a|>turn {turn}<|b|>"
        pieces.encode(said)
        assert asked == [f"turn {i}" for i in range(turn + 1)]
    for text in (said, "turn 0"):
        pieces.encode(text).clear()  # a caller's list is the caller's
    assert pieces.encode(said) and pieces.encode("turn 0") == pieces._whole("turn 0")


def test_what_is_remembered_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a server's memory grows with every text; one long text drives out all others; or what
    was asked for last goes first."""
    monkeypatch.setattr(module, "MAX_CHARS", 24)
    pieces = PieceEncoder(made())
    asked = asked_of(pieces, monkeypatch)
    texts = ["one 1", "two 2", "three", "four4", "five5", "a long text", "two 2"]
    for text in (*texts[:3], "one 1", *texts[3:6], "one 1", *texts[6:]):
        assert pieces.encode(text) == KINDS["bytes"][0].encode(text, add_special_tokens=False)
        assert sum(map(len, pieces._kept)) == pieces._num_chars <= 24
    assert asked == texts


def test_long_new_pieces_are_encoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: one core encodes a long chat while the others stand idle, ids go to another piece, or
    each piece gets what the tokenizer puts in front of a whole text."""
    tokenizer: Any = made()
    front = [("<|b|>", tokenizer.convert_tokens_to_ids("<|b|>"))]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<|b|> $A", None, front
    )
    pieces, counts = PieceEncoder(tokenizer), list[int]()
    texts = [f"{'turn 7 ' * 900}{i}" for i in range(4)]
    known, batch = pieces.encode(texts[1]), pieces._batch

    def counted(texts: list[str]) -> list[list[int]]:
        counts.append(len(texts))
        return batch(texts)

    monkeypatch.setattr(pieces, "_batch", counted)
    said = "<|a|>".join([*texts, texts[0]])
    assert pieces.encode(said) == made().encode(said, add_special_tokens=False)
    assert counts == [3]
    assert pieces.encode(texts[1]) == known
    assert pieces.encode(said) and counts == [3]


QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LINES = (
    "\n",
    "\n\n",
    "\r\n",
    " \n",
    "\n ",
    "\t",
    "  ",
    "a",
    "The",
    "I'm",
    "7",
    "42",
    ".",
    "!=",
    "\u00e9",
)
BY_LINES = {
    "Qwen's words": (QWEN, None, True),
    "composed": (QWEN, normalizers.NFC(), True),
    "spaces that hang on what follows": (r" ?\p{L}+| ?\p{N}+|\s+(?!\S)|\s+|.", None, False),
    "a line's end with its next word": (r"\n?\p{L}+|\p{N}|\s|.", None, False),
    "a line's end with its next number": (r"\n?\p{N}+|\p{L}+|\s|.", None, False),
    "no words": (None, None, False),
}


def by_words(pattern: str | None, normalizer: Any) -> PreTrainedTokenizerFast:
    """A tokenizer that cuts a text into such words first, or does not cut it."""
    bpe: Any = Tokenizer(models.BPE())
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        bpe.pre_tokenizer = pre_tokenizers.Sequence([split, last])
    if normalizer is not None:
        bpe.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet() + ["\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[*CONTROL], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(["".join(LINES) * 2, "the end.\nThe end\n42\n\n  7"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


LINEWISE = {name: by_words(*kind[:2]) for name, kind in BY_LINES.items()}


@pytest.mark.parametrize("kind", BY_LINES)
@settings(deadline=None)
@given(parts=st.lists(st.sampled_from(LINES), max_size=30))
@example(parts=["7", "\n", "a", "\n"] * 2)  # parts that are equal
def test_a_long_piece_is_cut_where_the_tokenizer_cuts(kind: str, parts: list[str]) -> None:
    """Bug: one core encodes a long text (36 ms for 12,000 tokens) while the others stand idle; or
    it is cut where a token would go on, or where spaces hang on the line behind them."""
    tokenizer, is_cut = LINEWISE[kind], BY_LINES[kind][2]
    pieces, text, asked = PieceEncoder(tokenizer), "".join(parts), list[str]()
    batch = pieces._batch

    def told(texts: list[str]) -> list[list[int]]:
        asked.extend(texts)
        return batch(texts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_batch", told)
        patch.setattr(module, "SHARED_CHARS", 2)
        patch.setattr(module, "PART_CHARS", 1)
        assert pieces.encode(text) == tokenizer.encode(text, add_special_tokens=False)
    assert pieces._cuts_lines == is_cut and (not asked or "".join(asked) == text)
    if is_cut and re.search("[^\n]\n[0-9A-Za-z]", text):
        assert len(asked) > 1


def test_an_added_token_over_a_lines_beginning() -> None:
    """Bug: a long text is cut in parts within it, and it becomes two tokens there."""
    tokenizer: Any = by_words(QWEN, None)
    tokenizer.add_tokens([AddedToken("\n7", normalized=True)])  # so it is within pieces
    text = "a\n7" * 2000
    wanted = tokenizer.encode(text, add_special_tokens=False)
    assert PieceEncoder(tokenizer).encode(text) == wanted and len(wanted) == 4000


@pytest.mark.parametrize("kind", ["cut off", "filled up", "cut off at each call"])
def test_a_text_is_encoded_as_transformers_does(kind: str) -> None:
    """Bug: asked past transformers, a tokenizer cuts texts off or fills them up as its file says;
    or one that transformers makes say something else says what it says itself."""
    tokenizer: Any = made()
    backend = tokenizer.backend_tokenizer
    if kind == "cut off":
        backend.enable_truncation(4)
    elif kind == "filled up":
        backend.enable_padding(length=99)
    else:
        encode = tokenizer.encode
        tokenizer.encode = lambda text, **options: encode(text, **options)[:4]
    pieces, text = PieceEncoder(tokenizer), "the quick brown fox and 42 apples"
    wanted = tokenizer.encode(text, add_special_tokens=False)
    assert pieces.encode(text) == wanted and (pieces._backend is None) == ("each" in kind)
    assert (len(wanted) == 4) == ("each" in kind) and len(wanted) < 99


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: two threads that encode one text count its characters twice, or drop what a third one
    is reading."""
    monkeypatch.setattr(module, "MAX_CHARS", 40)
    pieces, texts = PieceEncoder(made()), [f"<|a|>{i % 7} apples<|b|>" for i in range(400)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(pieces.encode, texts))
    assert found == [KINDS["bytes"][0].encode(text, add_special_tokens=False) for text in texts]
    assert sum(map(len, pieces._kept)) == pieces._num_chars <= 40


def test_one_text_of_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a text that another thread has encoded meanwhile is counted twice, until nothing is left
    to forget and every text is an error."""
    pieces = PieceEncoder(made())
    real = pieces._each

    def each(texts: list[str]) -> list[list[int]]:
        monkeypatch.undo()
        pieces.encode(texts[0])  # as another thread
        return real(texts)

    monkeypatch.setattr(pieces, "_each", each)
    assert pieces.encode("7 apples") == pieces.encode("7 apples")
    assert pieces._num_chars == sum(map(len, pieces._kept))
