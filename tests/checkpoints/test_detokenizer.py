"""Text that grows and is never taken back: chunks of it add up to the whole."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from graphengine.checkpoints.tokenizer import CONTEXT, REPLACEMENT, Detokenizer, Tokenizer


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


def feed_all(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    """Feeds ids in pieces that end at the cuts."""
    writer, chunks = Detokenizer(tokenizer), []
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
    """Bug: special tokens, or ids without a token, in the middle of a stream swallow text."""
    assert "".join(feed_all(tokenizer, ids, cuts)) == tokenizer.decode(ids)


def test_bytes_that_become_no_character(tokenizer: Tokenizer) -> None:
    """Bug: while the text ends in a replacement nothing comes out and all of it is decoded again:
    random weights stream nothing, and each step is slower than the last."""
    lone = [i for i in range(len(tokenizer)) if tokenizer.decode([i]) == REPLACEMENT]
    ids = [lone[i * 7 % len(lone)] for i in range(600)]
    writer, text = Detokenizer(tokenizer), ""
    for i, token in enumerate(ids):
        text += writer.feed([token])
        assert len(text) >= len(tokenizer.decode(ids[: i + 1])) - 1
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
