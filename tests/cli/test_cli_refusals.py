"""What `graphengine run` refuses, and how: exit code 2, the value, the remedy, no traceback."""

import io
import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from graphengine.cli.main import main
from graphengine.cli.run import collect_prompts
from graphengine.config.declaration import declarations
from graphengine.config.options import Options, SamplingParams
from graphengine.prompts import read_prompt_file
from tests.support.checkpoints import edit_config, make_drafter, make_target
from tests.support.command_line import Run, refused


@pytest.mark.parametrize("value", ["0", "abc", "", "1,,8", "-1", "1.5"])
def test_bad_bucket(cli: Run, value: str) -> None:
    """Bug: a bucket that cannot exist is found after loading, or raises a traceback."""
    refused(cli("--prompt", "x", "--bucket", value, model=None), "--bucket", repr(value), "1,8,16")


@pytest.mark.parametrize("flag", ["--bucket", "--num-speculative-tokens"])
def test_a_number_of_more_digits_than_python_reads(cli: Run, flag: str) -> None:
    """Bug: a list with a number of 5,000 digits is a traceback."""
    refused(cli("--prompt", "x", flag, "9" * 5000), flag, "too large", "1,8,16")


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ["No such file", '{"prompt": "text"}']),
        ("", ["holds no prompt"]),
        ("\n \n", ["holds no prompt"]),
        ('{"prompt": "a"}\nhello\n', ["line 2", "not JSON"]),
        ('{"prompt": "a"}\n\n["b"]\n', ["line 3", "expected"]),
        ('{"text": "a"}\n', ["line 1", "expected"]),
        ('{"turns": []}\n', ["line 1", "expected"]),
        ('{"turns": ["a", 3]}\n', ["line 1", "expected"]),
        ('{"prompt": 3}\n', ["line 1", "expected"]),
        ("[" * 100_000, ["line 1", "not JSON"]),
        ('{"prompt": "a"}\n{"turns": ["a", "\\ud83d"]}\n', ["line 2", r"'\ud83d'"]),
        (b"\xff\xfe\x00", ["not UTF-8"]),
    ],
)
def test_bad_prompt_file(
    cli: Run, tmp_path: Path, content: str | bytes | None, parts: list[str]
) -> None:
    """Bug: one bad line among a thousand is reported without its number, or after loading."""
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(cli("--prompt-file", str(path), model=None), "--prompt-file", path, *parts)


@pytest.mark.parametrize("length", [60, 61])
def test_a_wrong_line_is_shown(tmp_path: Path, length: int) -> None:
    """Bug: a line of the file that fits is shown as if more followed, or a long one fills the
    screen, or is cut without a sign."""
    line = json.dumps({"prompt": "a", "of": "b" * (length - 25)})
    assert len(line) == length
    shown = line if length == 60 else line[:57] + "..."
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n')
    form = 'expected {"prompt": "text"} or {"turns": ["text", ..]}, and no other key'
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}, line 2: {shown}; {form}')}$"):
        read_prompt_file(path)


def test_two_prompt_files(cli: Run, tmp_path: Path) -> None:
    """Bug: as --prompt may be repeated --prompt-file is too, and the first one's prompts get no
    answer and no word."""
    for name in "ab":
        (tmp_path / name).write_text('{"prompt": "a"}\n')
    both = [f"--prompt-file={tmp_path / name}" for name in "ab"]
    refused(cli(*both, model=None), "--prompt-file", "passed twice", "into one file")


def test_a_byte_that_is_no_text(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a prompt with such a byte is refused behind the loading of the weights."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("graphengine.api.Engine.from_pretrained", load)
    refused(cli("--prompt", "x", "--prompt", "a\udcff"), "--prompt", r"'\udcff'", "convert it")


@pytest.mark.parametrize("flag", ["--logprobs", "--prompt-logprobs"])
def test_logprobs_that_nobody_sees(cli: Run, flag: str) -> None:
    """Bug: log-probabilities are worked out, as help's own example asks, and told nowhere."""
    refused(cli("--prompt", "x", flag, "2"), "in the JSON alone", "pass --json")


def test_a_folder_that_is_gone(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: from a folder that was removed a command ends in torch's library, with its words."""
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    refused(cli("--prompt", "x"), "the current folder was removed", "(cd)")


def test_prompt_file_of_windows(tmp_path: Path) -> None:
    """Bug: the byte-order mark that Windows' editors write makes the first line no JSON."""
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert read_prompt_file(path) == [["a"], ["b"]]


def test_prompts_with_line_ends_of_unicode(tmp_path: Path) -> None:
    """Bug: what ends a line for Python and none in JSON Lines cuts a prompt in two."""
    path, text = tmp_path / "prompts.jsonl", "a\u2028b\u0085c"
    path.write_text(json.dumps({"prompt": text}, ensure_ascii=False), encoding="utf-8")
    assert read_prompt_file(path) == [[text]]


def test_no_prompt(cli: Run) -> None:
    """Bug: an empty pipe makes the model answer nothing."""
    refused(cli(model=None, input="\n"), "--prompt", "--prompt-file", "stdin")


def test_no_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: where a service has closed stdin, `run` without a prompt is a traceback."""
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ValueError, match="no prompt: pass --prompt"):
        collect_prompts((), None)


def test_raw_has_no_turns(cli: Run, tmp_path: Path) -> None:
    """Bug: --raw silently drops the conversation between turns."""
    path = tmp_path / "turns.jsonl"
    path.write_text('{"turns": ["a", "b"]}')
    refused(cli("--raw", "--prompt-file", str(path), model=None), "--raw")


def test_json_is_no_chat(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: --json on a terminal begins a chat whose answers nobody sees before its end."""
    monkeypatch.setattr("graphengine.cli.run.collect_prompts", lambda *_: None)
    refused(cli("--json"), "--json needs the prompts beforehand", "--prompt-file")


def test_nvtx_without_its_package(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: --nvtx names nothing, and the profile that was to have ranges has none."""
    monkeypatch.setattr("graphengine.names.enable", lambda: False)
    refused(cli("--prompt", "x", "--nvtx"), "--nvtx", "install nvtx")


def test_long_prompt(cli: Run) -> None:
    """Bug: a prompt beyond the context is cut, or fails inside the attention."""
    refused(
        cli("--max-model-len", "32", "--prompt", "hi", "--prompt", "many words " * 50),
        *("prompt 2 of 2", "32", "--max-model-len"),
    )


def test_missing_directory(cli: Run, tmp_path: Path) -> None:
    """Bug: a mistyped path is sent to the hub, or named by half."""
    refused(cli("--prompt", "x", model=tmp_path / "none"), tmp_path / "none", "no such model")
    refused(cli("--prompt", "x", model=tmp_path), tmp_path, "config.json")


@pytest.mark.parametrize(
    ("model", "part"),
    [
        ("~nobody_of_this_name/model", "home directory"),
        ("x" * 5000, "too long"),
        ("", "name is empty"),
    ],
)
def test_model_that_is_no_name(cli: Run, model: str, part: str) -> None:
    """Bug: a path that the system refuses is its traceback, and an unset shell variable runs the
    bundled model instead of the one that was meant."""
    refused(CliRunner().invoke(main, ["run", model, "--prompt", "x"]), part)
    refused(cli("--prompt", "x", "--draft", model), part)


def test_empty_names_are_not_the_bundled_models() -> None:
    """Bug: an unset shell variable makes `doctor` examine the bundled pair, and drafts for it."""
    for command in (["doctor", ""], ["doctor", "tiny", "--draft", ""]):
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 1 and "name is empty" in done.stdout
    for pair in (["--draft", ""], ["tiny-hybrid", "--draft", ""]):
        refused(CliRunner().invoke(main, ["run", "--prompt", "x", *pair]), "name is empty")


def test_drafter_of_another_target(cli: Run, target: Path, tmp_path: Path) -> None:
    """Bug: a drafter of another size fails in a matmul, or drafts rubbish."""
    other = make_target(tmp_path / "other", hidden=32, layers=3)
    foreign = make_drafter(tmp_path / "draft", other)
    refused(cli("--prompt", "x", "--draft", str(foreign)), foreign)


def test_drafter_as_the_model(cli: Run, draft: Path) -> None:
    """Bug: a user who swaps the two, or leaves out the target, is told to fetch a tokenizer."""
    refused(cli("--prompt", "x", model=draft), draft, "not a target", f"--draft {draft}")


@pytest.mark.parametrize("which", ["target", "draft"])
def test_truncated_weights(cli: Run, tmp_path: Path, which: str) -> None:
    """Bug: half a download loads as zeros, or shows safetensors' traceback."""
    model = make_target(tmp_path / "target")
    drafter = make_drafter(tmp_path / "draft", model)
    path = tmp_path / which / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    refused(cli("--prompt", "x", "--draft", str(drafter), model=model), path, "fetch")


@pytest.mark.parametrize("key", ["rope_theta", "target_layer_ids"])
def test_incomplete_config(cli: Run, target: Path, tmp_path: Path, key: str) -> None:
    """Bug: a theta or taps that are guessed cost acceptance and nobody learns why."""
    drafter = make_drafter(tmp_path / "draft", target)

    def drop(config: dict[str, Any]) -> dict[str, Any]:
        (config["dflash_config"] if key in config["dflash_config"] else config).pop(key)
        return config

    edit_config(drafter, drop)
    refused(cli("--prompt", "x", "--draft", str(drafter)), drafter / "config.json", key)


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--graph-mode", "full", "--device", "cpu"], ["--graph-mode full", "none"]),
        (["--attention-backend", "flashinfer", "--device", "cpu"], ["flashinfer", "torch"]),
        (["--max-model-len", "999999"], ["--max-model-len 999999", "8192"]),
        (["--max-new-tokens", "0"], ["--max-new-tokens"]),
        (["--page-size", "0"], ["--page-size"]),
        (["--gpu-memory-utilization", "1.5"], ["--gpu-memory-utilization"]),
        (["--simulate-acceptance", "2"], ["--simulate-acceptance", "--draft"]),
        (["--acceptance-floor", "nan"], ["--acceptance-floor", "nan"]),  # is no JSON
        (["--bucket", "9" * 24], ["--bucket", "impossible size"]),
        (["--page-size", "99999999"], ["a context of", "--kv-cache-memory", "--page-size"]),
    ],
)
def test_options_that_cannot_work(cli: Run, args: list[str], parts: list[str]) -> None:
    """Bug: a refusal that does not name its option or what to do instead."""
    refused(cli("--prompt", "x", *args), *parts)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate"), RuntimeError("broken")],
)
def test_runtime_failures(cli: Run, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Bug: running out of memory looks like bad input, or a real fault is hidden as one."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("graphengine.cli.answers.run", fail)
    result = cli("--prompt", "x")
    assert result.exit_code == 1
    if str(error) == "broken":
        assert result.exception is error
    else:
        assert "--max-model-len" in result.stderr


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--temperature", "-1"], ["temperature is -1.0", "0 <= x"]),
        (["--temperature", "nan"], ["temperature is nan"]),
        (["--temperature", "1", "--top-p", "0"], ["top_p is 0.0", "0 < x <= 1"]),
        (["--temperature", "1", "--top-k", "-3"], ["top_k is -3", "from 0 up"]),
        (["--temperature", "1", "--seed", "-3"], ["seed is -3"]),
        (["--top-p", "0.9"], ["change nothing at temperature 0"]),
        (["--min-p", "0.9"], ["change nothing at temperature 0"]),
        (["--repetition-penalty", "0"], ["repetition_penalty is 0.0", "1e-06 <= x"]),
        (["--presence-penalty", "3"], ["presence_penalty is 3.0", "-2 <= x <= 2"]),
        (["--logit-bias", "5"], ["logit_bias has '5='", "50=-100,7=2.5"]),
        (["--logit-bias", "5=1,6=-200"], ["logit_bias has '6=-200'", "-100 to 100"]),
        (["--logit-bias", "1=1,7=2,1=2"], ["two numbers for token 1", "pass one"]),
        (["--logit-bias", "1=1", "--logit-bias", "1=2"], ["two numbers for token 1", "pass one"]),
        (["--logit-bias", "99999999=1"], ["logit_bias has [99999999]", "the vocabulary of"]),
        (["--stop-token-ids", "7,-1"], ["stop_token_ids is '7,-1'", "7,99"]),
        (["--stop-token-ids", "99999999"], ["stop_token_ids has [99999999]"]),
        (["--stop-token-ids", "-1", "--stop-token-ids", "7"], ["stop_token_ids is '-1,7'"]),
        (["--stop", ""], ["stop is ('',)", "none of them empty"]),
        (["--bad-words", ""], ["bad_words is ('',)"]),
        (["--min-tokens", "9", "--max-new-tokens", "8"], ["min_tokens is 9", "lower the one"]),
        (["--logprobs", "-1"], ["logprobs is -1", "from 0 up"]),
        (["--json-schema", "{"], ["json_schema is no JSON", "pass a schema"]),
        (["--json-schema", '{"type": 5}'], ["json_schema cannot be used", "correct it"]),
        (["--regex", "a("], ["regex cannot be used"]),
        (["--grammar", "start: x"], ["grammar cannot be used"]),
        (["--choice", ""], ["choice is ('',)"]),
        (["--choice", "a", "--regex", "b"], ["one of them"]),
        (["--choice", "a", "--ignore-eos"], ["ignore_eos is True", "leave it out"]),
    ],
)
def test_bad_sampling(cli: Run, args: list[str], parts: list[str]) -> None:
    """Bug: a bad value is found after loading, ignored, or draws something odd; or of an option
    that is given twice the first value is dropped."""
    refused(cli("--prompt", "x", *args), *parts)


@pytest.mark.parametrize("command", ["bench", "profile", "graphs", "compile"])
def test_a_pool_that_holds_no_request(command: str) -> None:
    """Bug: a --max-model-len is refused that nobody passed, or that the command does not have."""
    args = ["--device", "cpu", "--kv-cache-memory", "200KiB", "--page-size", "4"]
    done = CliRunner().invoke(main, [command, *args], env={"COLUMNS": "10000"})
    assert done.exit_code == 2 and "K/V for one request" in done.stderr, done.stderr
    assert "a context of" in done.stderr and "--max-model-len" not in done.stderr


@pytest.mark.parametrize("command", ["bench", "profile", "graphs", "compile"])
def test_what_would_take_less_memory(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: who is out of memory is told to lower --max-model-len, an option that the command does
    not have, and not the --input-len that it has."""
    monkeypatch.setattr("graphengine.api.build", lambda *_, **__: [0] * (1 << 62))
    args = [command, "--device", "cpu"]
    done = CliRunner().invoke(main, args, env={"COLUMNS": "10000"})
    assert done.exit_code == 1 and "out of memory" in done.stderr, done.stderr
    offered = {flag for param in main.commands[command].params for flag in param.opts}
    lower = set(re.findall("--[a-z-]+", done.stderr.rpartition("; lower")[2]))
    assert lower <= offered and "--kv-cache-memory" in lower
    assert lower >= offered & {"--max-model-len", "--input-len", "--bucket"}


@pytest.mark.parametrize("model", ["/no/such/model", "qwen3-8b", "without weights"])
@pytest.mark.parametrize("command", ["doctor", "verify"])
def test_a_model_without_weights(command: str, model: str, tmp_path: Path) -> None:
    """Bug: commands that lack --load-format advise --load-format dummy."""
    if " " in model:
        model = str(make_target(tmp_path, layers=1))
        (tmp_path / "model.safetensors").unlink()
    (tmp_path / "ids.jsonl").write_text('{"prompt": [5]}')
    args = [command, model, "--device", "cpu"]
    args += ["--prompt-file", str(tmp_path / "ids.jsonl")] * (command == "verify")
    done = CliRunner().invoke(main, args, env={"COLUMNS": "10000"})
    said = "load_format dummy" if "such" not in model else "for random weights one of gpt-oss"
    assert said in done.output and "--load-format" not in done.output


def test_every_command_offers_what_the_engine_knows() -> None:
    """Bug: an option, or a new value of one, is known to the engine and not offered by a command
    that is declared to take it."""
    for kind in (Options, SamplingParams):
        for name, declared in declarations(kind).items():
            for command in declared.commands:
                (param,) = [p for p in main.commands[command].params if p.name == name]
                assert param.opts[0] == declared.flag
                if declared.choices:
                    assert isinstance(param.type, click.Choice)
                    assert param.type.choices == declared.choices


def test_a_file_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: --prompt-file /dev/zero is read until memory ends."""
    monkeypatch.setattr("graphengine.prompts.MAX_CHARS", 1 << 16)
    with pytest.raises(ValueError, match="more than 65536 characters"):
        read_prompt_file(Path("/dev/zero"))


def test_a_pipe_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: `run < /dev/zero` is read until memory ends, or the longest prompt is refused too."""
    monkeypatch.setattr("graphengine.cli.run.MAX_CHARS", 1 << 16)
    with Path("/dev/zero").open() as zeros:
        monkeypatch.setattr("sys.stdin", zeros)
        with pytest.raises(ValueError, match="more than 65536 characters"):
            collect_prompts((), None)
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * (1 << 16)))
    assert collect_prompts((), None) == [["x" * (1 << 16)]]


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": [1, true]}',
        '{"prompt": "a", "turns": ["b"]}',
        '{"prompt": "a", "prompt": "b"}',
        '{"prompt": []}',
        '{"prompt": "\\ud800"}',
        '{"prompt": "\\udfff"}',
        "{}",
    ],
)
def test_lines_that_are_almost_right(tmp_path: Path, line: str) -> None:
    """Bug: true is taken for token 1, of two prompts in a line one is dropped, or half of a
    character, the first or last such one, ends in the tokenizer's traceback."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(ValueError, match="line 2"):
        read_prompt_file(path)
