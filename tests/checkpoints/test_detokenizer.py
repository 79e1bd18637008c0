"""Text that grows and is never taken back: chunks of it add up to the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from graphengine.checkpoints.stops import Writer
from graphengine.checkpoints.tokenizer import CONTEXT, CUT, REPLACEMENT, Detokenizer, Tokenizer
from tests.support.byte_tokens import FallsBackToBytes
from tests.support.checkpoints import make_target


def byte_tokens(tokenizer: Tokenizer) -> list[int]:
    """Token ids of the 256 single bytes, by their value."""
    from tokenizers.pre_tokenizers import ByteLevel

    # ByteLevel maps each byte to a printable character; recover the map from encodings.
    vocabulary = tokenizer._hf.get_vocab()
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    mapping, extra = {}, 0
    for byte in range(256):
        if byte in printable:
            mapping[byte] = chr(byte)
        else:
            mapping[byte] = chr(256 + extra)
            extra += 1
    assert set(mapping.values()) == set(ByteLevel.alphabet())
    return [vocabulary[mapping[byte]] for byte in range(256)]


def feed_all(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], behind: list[int] | None = None
) -> list[str]:
    """Feeds ids in pieces that end at the cuts."""
    writer, chunks = Detokenizer(tokenizer, behind or []), []
    edges = sorted({min(cut, len(ids)) for cut in cuts} | {len(ids)})
    done = 0
    for edge in edges:
        chunks.append(writer.feed(ids[done:edge], last=edge == edges[-1]))
        done = edge
    return chunks


@settings(deadline=None)
@given(text=st.text(max_size=20), cuts=st.lists(st.integers(0, 80), max_size=12))
@example(text="\U0001f469\u200d\U0001f4bb \u00e9\u4f60", cuts=list(range(30)))
@example(text="a\ufffd", cuts=[1, 2, 3, 4])
def test_chunks_add_up_for_text(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    """Bug: a character cut by a chunk's end comes out as replacement characters or twice."""
    of_byte = byte_tokens(tokenizer)
    ids = [of_byte[byte] for byte in text.encode("utf-8")]
    chunks = feed_all(tokenizer, ids, cuts)
    assert "".join(chunks) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in chunk for chunk in chunks)


@settings(deadline=None)
@given(raw=st.binary(max_size=80), cuts=st.lists(st.integers(0, 80), max_size=20))
@example(raw=b"\xf0\x9f\x98", cuts=[1, 2])
@example(raw=b"\xe4\xbd\x41\xff\xc3", cuts=[1, 2, 3, 4])
@example(raw=b"\xc3\xc3\xa9", cuts=[1, 2])
def test_chunks_add_up_for_any_bytes(tokenizer: Tokenizer, raw: bytes, cuts: list[int]) -> None:
    """Bug: invalid UTF-8 from a model makes the streamed text differ from the decoded whole."""
    of_byte = byte_tokens(tokenizer)
    ids = [of_byte[byte] for byte in raw]
    assert "".join(feed_all(tokenizer, ids, cuts)) == tokenizer.decode(ids)


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 511), max_size=80), cuts=st.lists(st.integers(0, 80)))
def test_chunks_add_up_for_any_ids(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> None:
    """Bug: special tokens, or ids without a token, in the middle of a stream swallow text; or they
    are there after a window has moved on alone."""
    assert "".join(feed_all(tokenizer, ids, cuts)) == tokenizer.decode(ids)
    writer = Detokenizer(tokenizer, (), False)
    text = "".join(writer.feed([token]) for token in ids) + writer.feed([], last=True)
    assert text == tokenizer.decode(ids, skip_special_tokens=False)


def test_bytes_that_become_no_character(tokenizer: Tokenizer) -> None:
    """Bug: while the text ends in a replacement nothing comes out and all of it is decoded again:
    random weights stream nothing, and each step is slower than the last."""
    lone = [i for i in range(len(tokenizer)) if tokenizer.decode([i]) == REPLACEMENT]
    ids = [lone[i * 7 % len(lone)] for i in range(600)]
    writer, text = Detokenizer(tokenizer), ""
    for i, token in enumerate(ids):
        text += writer.feed([token])
        assert len(text) >= len(tokenizer.decode(ids[: i + 1])) - CUT
        assert len(writer._window) <= 2 * CONTEXT
    assert text + writer.feed([], last=True) == tokenizer.decode(ids)


def test_a_lone_byte_before_end_tokens(tokenizer: Tokenizer) -> None:
    """Bug: tokens without a text push a held byte out of what is decoded, and it is lost."""
    end = tokenizer._hf.get_vocab()["<|im_end|>"]
    for count in range(2 * CONTEXT):
        ids = [*tokenizer.encode("a" * count), byte_tokens(tokenizer)[0xE4], *[end] * 3 * CONTEXT]
        writer = Detokenizer(tokenizer)
        text = "".join(writer.feed([token]) for token in ids)
        assert text + writer.feed([], last=True) == tokenizer.decode(ids)


@pytest.fixture(scope="module")
def by_bytes() -> Any:
    return FallsBackToBytes()


CUTS = st.lists(st.integers(0, 160), max_size=40)
CHARS = st.sampled_from("a \u00e9\u4f60\u20ac\U0001f600\u00df\U0001f44d")


@settings(deadline=None)
@given(text=st.text(CHARS, max_size=40), cuts=CUTS)
@example(text="\u20ac\U0001f600", cuts=list(range(9)))
@example(text="a \U0001f600", cuts=list(range(9)))
@example(text="\U0001f600\u20ac" * 20, cuts=list(range(160)))
def test_chunks_add_up_where_characters_are_bytes(
    by_bytes: Any, text: str, cuts: list[int]
) -> None:
    """Bug: a character of four bytes comes out as replacements, since only the last one is held
    back; one that is out is counted with the replacements that stand for it while the next one is
    incomplete; or a window that begins within a character never becomes one."""
    ids = by_bytes.encode(text)
    chunks = feed_all(by_bytes, ids, cuts)
    assert "".join(chunks) == by_bytes.decode(ids)
    assert not any(REPLACEMENT in chunk for chunk in chunks)


def test_emoji_come_out_one_by_one(by_bytes: Any) -> None:
    """Bug: where characters are bytes, a long row of them is held back to its end, or the window
    grows with it."""
    writer, text = Detokenizer(by_bytes), ""
    for i, token in enumerate(by_bytes.encode("\U0001f600\u20ac" * 200)):
        text += writer.feed([token])
        assert len(text) >= 2 * ((i + 1) // 7)
        assert len(writer._window) <= 2 * CONTEXT + CUT


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 262), max_size=60), cuts=st.lists(st.integers(0, 60)))
def test_any_bytes_where_characters_are_bytes(
    by_bytes: Any, ids: list[int], cuts: list[int]
) -> None:
    """Bug: bytes that become no character keep what follows them from coming out."""
    end = by_bytes.encode("a a")
    assert "".join(feed_all(by_bytes, ids + end, cuts)).endswith("a a")


@settings(deadline=None)
@given(before=st.text(CHARS, max_size=20), text=st.text(CHARS, max_size=20), cuts=CUTS)
@example(before="a", text=" b", cuts=[])
@example(before="", text=" b", cuts=[])
@example(before="\u00df\u20ac\U0001f44d", text="", cuts=[])
@example(before="b \u20ac", text="\U0001f600 b", cuts=list(range(9)))
def test_an_answer_goes_on_from_its_prompt(
    by_bytes: Any, before: str, text: str, cuts: list[int]
) -> None:
    """Bug: an answer lacks its first word's space, which the decoder takes from the beginning of a
    text: `Once upon a` goes on as `time`; or it repeats what it goes on from."""
    prompt, ids = by_bytes.encode(before), by_bytes.encode(text)
    whole, begun = by_bytes.decode(prompt + ids), by_bytes.decode(prompt)
    chunks = feed_all(by_bytes, ids, cuts, prompt)
    assert begun + "".join(chunks) == whole


def test_whose_tokens_lack_a_space(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Bug: every prompt's last tokens are decoded again for tokenizers that need none of it, or
    Llama 2's is not seen to be one that does."""
    writer = Detokenizer(tokenizer, tokenizer.encode("a b"))
    assert not tokenizer.is_contextual and writer._window == []
    make_target(tmp_path, layers=1)
    fast = FallsBackToBytes().fast
    fast.normalizer = normalizers.Replace(" ", "\u2581")
    fast.save(str(tmp_path / "tokenizer.json"))
    other = Tokenizer(tmp_path)
    assert other.is_contextual
    ids = other.encode("a b")
    assert Detokenizer(other, ids[:1]).feed(ids[1:]) == " b"
    assert Writer(other, (), False, 0, ids[:1]).feed(ids[1:]).text == " b"
