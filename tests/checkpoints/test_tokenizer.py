"""Text in: encoding, damaged tokenizers, and which ones belong to a model."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphengine.checkpoints.hub import TINY_TARGET
from graphengine.checkpoints.pairs import read_json
from graphengine.checkpoints.tokenizer import Tokenizer, load_tokenizer
from graphengine.config.model import ModelConfig
from tests.support.checkpoints import SPECIALS, edit_config, make_target
from tests.support.command_line import ENV
from tests.support.submitting import soon


@settings(deadline=None)
@given(text=st.text(max_size=40))
def test_text_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    """Bug: clean-up of spaces, added special tokens or a lossy normaliser change plain text."""
    if not any(special in text for special in SPECIALS):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None)
@given(data=st.data(), skips=st.booleans())
def test_ids_become_text_at_once(tokenizer: Tokenizer, data: st.DataObject, skips: bool) -> None:
    """Bug: transformers looks at each token of a window before it asks the tokenizer: 5 us for each
    row of each step, as long again as the text takes; or what is asked instead says another."""
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 2), max_size=20))
    how = {"skip_special_tokens": skips, "clean_up_tokenization_spaces": False}
    wanted, asked = tokenizer._hf.decode(ids, **how), list[str]()

    class Slow:
        def decode(self, *args: object, **how: object) -> str:
            asked.append("transformers")
            return wanted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "_hf", Slow())
        assert tokenizer.decode(ids, skips) == wanted and not asked


def test_lone_surrogates_are_named(tokenizer: Tokenizer) -> None:
    """Bug: a byte that is not UTF-8, or half a pair in JSON, is a TypeError about
    TextEncodeInput; or its place is told as of the whole conversation's text."""
    text = "ab\ud800"
    with pytest.raises(ValueError, match=r"'\\ud.* at character 2; pass UTF-8"):
        tokenizer.encode(text)
    with pytest.raises(ValueError, match=r"'\\ud.* at character 2; pass UTF-8"):
        tokenizer.encode_chat([{"role": "user", "content": text}])


def test_a_grammar_needs_the_whole_tokenizer(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the first request with a grammar is a traceback where transformers' tokenizer is one of
    its own in Python."""
    tokenizer = Tokenizer(directory)
    monkeypatch.setattr(tokenizer, "_hf", object())
    with pytest.raises(ValueError, match=r"need a tokenizer\.json; fetch it"):
        tokenizer.as_json()


@pytest.mark.slow
def test_two_threads_load_the_first_tokenizer(directory: Path) -> None:
    """Bug: where several threads of a new process load a model, all but one fail at an import of
    transformers'."""
    script = """if True:
        import sys
        from concurrent.futures import ThreadPoolExecutor
        from pathlib import Path
        from graphengine.checkpoints.tokenizer import Tokenizer
        with ThreadPoolExecutor(4) as threads:
            assert len([*threads.map(Tokenizer, [Path(sys.argv[1])] * 4)]) == 4"""
    subprocess.run([sys.executable, "-c", script, str(directory)], check=True, env=ENV, timeout=120)


def test_an_interrupt_is_no_damage(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: Ctrl-C within a tokenizer's work is told as a damaged file, with exit code 2."""

    def encode(text: str) -> list[int]:
        raise KeyboardInterrupt

    tokenizer = Tokenizer(directory)
    monkeypatch.setattr(tokenizer, "_pieces", SimpleNamespace(encode=encode))
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("a")


@pytest.mark.parametrize("front", ["", "<|im_start|> ", "<|im_start|> <|endoftext|> "])
def test_a_prompt_begins_as_its_model_was_trained(tmp_path: Path, front: str) -> None:
    """Bug: a text that Llama is to continue lacks <|begin_of_text|>, which transformers and vLLM
    put in front of it; or it is there twice, or within a conversation and in front of bad words."""
    from transformers import AutoTokenizer

    directory = make_target(tmp_path, layers=1)
    plain = Tokenizer(directory)
    file = directory / "tokenizer.json"
    parts = json.loads(file.read_text())
    ids = {token["content"]: token["id"] for token in parts["added_tokens"]}
    names = front.split()
    parts["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": name, "type_id": 0}} for name in names]
        + [{"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {n: {"id": n, "ids": [ids[n]], "tokens": [n]} for n in names},
    }
    file.write_text(json.dumps(parts))
    tokenizer, reference = Tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    for text in ("One, two", " a", ""):
        assert tokenizer.encode_prompt(text) == reference(text)["input_ids"]
        assert tokenizer.encode(text) == plain.encode(text)
    begun = "".join(names) + "One"
    assert tokenizer.encode_prompt(begun) == reference("One")["input_ids"]
    asked = [{"role": "user", "content": "One"}]
    assert tokenizer.encode_chat(asked) == plain.encode_chat(asked)


def test_broken_tokenizer_names_the_directory(tmp_path: Path) -> None:
    """Bug: a damaged tokenizer.json is an exception of the tokenizers library."""
    directory = make_target(tmp_path, layers=1)
    assert Tokenizer.exists(directory)
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="the tokenizer cannot be loaded"):
        Tokenizer(directory)
    (directory / "tokenizer.json").unlink()
    assert not Tokenizer.exists(directory)


def test_a_tokenizer_in_two_files(tmp_path: Path) -> None:
    """Bug: a model that was saved with vocab.json and merges.txt alone has no tokenizer."""
    directory = make_target(tmp_path, layers=1)
    expected = Tokenizer(directory).encode("One, two")
    file = directory / "tokenizer.json"
    model = json.loads(file.read_text())["model"]
    file.unlink()
    (directory / "vocab.json").write_text(json.dumps(model["vocab"]))
    (directory / "merges.txt").write_text("\n".join(map(" ".join, model["merges"])))
    how = {"tokenizer_class": "Qwen2Tokenizer"}
    edit_config(directory, lambda c: c | how, "tokenizer_config.json")
    assert Tokenizer.exists(directory)
    assert Tokenizer(directory).encode("One, two") == expected


def test_the_tokenizer_goes_by_its_own_files(tmp_path: Path) -> None:
    """Bug: a key of config.json that nothing reads, or a length that is no number, is called a
    damaged tokenizer, or keeps it busy for ever; transformers warns of lengths that we refuse."""
    directory = make_target(tmp_path, layers=1)
    edit_config(directory, lambda c: c | {"num_hidden_layers": 10**12, "initializer_range": 0})
    edit_config(directory, lambda c: c | {"model_max_length": "x"}, "tokenizer_config.json")
    assert Tokenizer(directory).encode("a b")


def test_what_tokenizer_json_says_counts(tmp_path: Path) -> None:
    """Bug: of a Qwen2 that is another's fine-tune, with a tokenizer of its own, digits are grouped
    and characters composed as Qwen's are: transformers takes its own rules for the model_type."""
    directory = make_target(tmp_path, model_type="qwen2", layers=1)
    path = directory / "tokenizer.json"
    parts = json.loads(path.read_text())
    path.write_text(json.dumps(parts | {"normalizer": {"type": "Lowercase"}}))
    tokenizer = Tokenizer(directory)
    assert tokenizer.encode("The Dog") == tokenizer.encode("the dog")


def test_a_tekken_file_beside_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: where mistral-common is installed, as vLLM does, a Mistral with a tekken.json ends in an
    AttributeError: transformers takes that file's own kind of tokenizer, which is unlike others."""
    from transformers import AutoTokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: object())
    assert Tokenizer(directory).encode("hi")


def test_an_embedding_without_rows_to_spare(directory: Path) -> None:
    """Bug: a tokenizer with a token for every row is called another model's, or one with a token
    more is taken; or an end token behind the last row is called one that it has lost."""
    model = ModelConfig.from_hf(*read_json(directory / "config.json"))
    tokenizer = Tokenizer(directory)
    exact = replace(model, vocab_size=len(tokenizer))
    assert load_tokenizer(directory, exact, (exact.vocab_size,)) is not None
    with pytest.raises(ValueError, match="different models"):
        load_tokenizer(directory, replace(model, vocab_size=len(tokenizer) - 1), ())


def test_an_id_past_the_embedding(tmp_path: Path) -> None:
    """Bug: a tokenizer of fewer tokens than there are rows, but with ids past the last, is taken;
    the first text that has one ends everybody's requests, and on a GPU the engine."""
    directory = make_target(tmp_path, layers=1)
    path = directory / "tokenizer.json"
    raw = json.loads(path.read_text())
    vocab = raw["model"]["vocab"]
    model = ModelConfig.from_hf(*read_json(directory / "config.json"))
    vocab[max(vocab, key=vocab.__getitem__)] = model.vocab_size
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=f"up to {model.vocab_size}.* different models"):
        load_tokenizer(directory, model, ())
    assert load_tokenizer(directory, replace(model, vocab_size=model.vocab_size + 1), ())


def test_a_tokenizer_that_begins_each_text(tmp_path: Path) -> None:
    """Bug: the token that Llama's files put in front of a text stands in the middle of a prompt,
    in front of each piece of a chat and of each word."""
    directory = make_target(tmp_path, layers=1)
    plain = Tokenizer(directory)
    path = directory / "tokenizer.json"
    raw = json.loads(path.read_text())
    first = {"id": SPECIALS[0], "type_id": 0}
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": first}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
        "special_tokens": {SPECIALS[0]: {"id": SPECIALS[0], "ids": [0], "tokens": [SPECIALS[0]]}},
    }
    path.write_text(json.dumps(raw))
    beginning = Tokenizer(directory)
    assert beginning._hf.encode("hi") == [0, *plain.encode("hi")], "the test would be vacuous"
    assert beginning.encode("hi") == plain.encode("hi")
    message = {"role": "user", "content": f"a {SPECIALS[1]} b"}
    assert beginning.encode_chat([message]) == plain.encode_chat([message])


def test_panics_of_the_library(tmp_path: Path) -> None:
    """Bug: a Rust panic, which is no Exception, ends a start in a traceback, or whatever the
    library raises at a text does so at the prompt."""
    directory = make_target(tmp_path, layers=1)
    path = directory / "tokenizer.json"
    intact = json.loads(path.read_text())
    at_file = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
    at_text = {"normalizer": {"type": "Prepend", "prepend": ""}}
    lacking = {"model": {"type": "WordLevel", "unk_token": "?", "vocab": {"a": 0}}}
    for change in (at_file, at_text, lacking):
        path.write_text(json.dumps(intact | change))
        with pytest.raises(ValueError, match=r"the tokenizer cannot be loaded \(.*tokenizer\.json"):
            Tokenizer(directory)
    intact["added_tokens"][0]["lstrip"] = True  # "a" alone is tried when it is loaded
    lacking["model"]["vocab"] = {"a": 0, "\u0120a": 1}
    path.write_text(json.dumps(intact | lacking))
    with pytest.raises(ValueError, match=r"cannot encode this text \(.*; fetch tokenizer\.json"):
        Tokenizer(directory).encode("hello")


def test_a_tokenizer_that_nobody_holds_is_freed() -> None:
    """Bug: the thread that has rendered a chat keeps its text and the tokenizer of a closed engine
    for as long as no other chat comes."""
    tokenizer = Tokenizer(TINY_TARGET)
    tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    left = weakref.ref(tokenizer)
    del tokenizer
    soon(lambda: (gc.collect(), left() is None)[1])


def test_a_control_token_that_begins_with_a_lines_end(tmp_path: Path) -> None:
    """Bug: a message spells it, and so ends its own turn."""
    directory = make_target(tmp_path, layers=1)
    hf = Tokenizer(directory)._hf
    hf.add_special_tokens({"additional_special_tokens": ["\n<|x|>"]})
    hf.save_pretrained(directory)
    tokenizer = Tokenizer(directory)
    (control,) = tokenizer.encode("\n<|x|>")
    assert control not in tokenizer.encode_chat([{"role": "user", "content": "a\n<|x|>"}])


def test_templates_without_a_default(tmp_path: Path) -> None:
    """Bug: of a checkpoint that has several it says to pass one as an argument, which is refused;
    or those that do fit are refused too."""
    directory = make_target(tmp_path, layers=1)
    text = (directory / "chat_template.jinja").read_text()
    (directory / "chat_template.jinja").unlink()
    several = [{"name": "rag", "template": "R"}, {"name": "tool_use", "template": "U"}]
    edit_config(directory, lambda c: c | {"chat_template": several}, "tokenizer_config.json")
    turns, tool = [{"role": "user", "content": "hi"}], {"type": "function"}
    tokenizer = Tokenizer(directory)
    with pytest.raises(ValueError, match=r"\['rag', 'tool_use'\], none .* chat_template\.jinja"):
        tokenizer.encode_chat(turns)
    assert tokenizer.encode_chat(turns, {"tools": [tool]}) == tokenizer.encode("U")
    (directory / "chat_template.jinja").write_text(text)  # the remedy
    assert Tokenizer(directory).decode(Tokenizer(directory).encode_chat(turns))
