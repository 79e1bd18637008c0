"""The chat of `graphengine run`: what a line does, and where an answer ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from graphengine import report
from graphengine.api import Chunk
from graphengine.cli import answers
from graphengine.config.options import SamplingParams
from tests.test_report import answer, startup


def chatted(
    monkeypatch: pytest.MonkeyPatch,
    lines: Sequence[str | Exception],
    stream_many: Callable[..., Iterator[Chunk]],
    quiet: bool = False,
) -> report.Outcome:
    """What a chat of these lines reports, with an engine that answers so."""
    left = [*lines, EOFError()]
    told: list[report.Outcome] = []
    lane = SimpleNamespace(built_late_s={4: 0.5})
    engine = SimpleNamespace(
        startup=startup(),
        built=SimpleNamespace(loop=SimpleNamespace(first=lane)),
        config=None,
        memory_plan=None,
        stream_many=stream_many,
    )

    def ask(quiet: bool) -> str:
        line = left.pop(0)
        if isinstance(line, Exception):
            raise line
        return line

    monkeypatch.setattr(answers, "_ask", ask)
    monkeypatch.setattr(answers, "_load", lambda *_: nullcontext(engine))
    monkeypatch.setattr(report, "print_heading", lambda *_: None)
    monkeypatch.setattr(report, "print_memory_plan", lambda *_: None)
    monkeypatch.setattr(report, "print_tables", lambda console, found, cache: told.append(found))
    job = answers.Job(
        model="m",
        draft=None,
        conversations=None,
        sampling=SamplingParams(),
        as_json=False,
        quiet=quiet,
        nvtx=False,
        options={},
        args={},
    )
    assert answers.run(job, 0.0) == 0
    (outcome,) = told
    return outcome


def test_typing_is_nobody_s_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the time in which a user of the chat thinks and types slows the answers down; or the
    wait for a bucket that was built late is not told."""

    def stream_many(prompts: Any, sampling: Any) -> Iterator[Chunk]:
        yield Chunk(index=0, text="x", token_ids=[1], result=answer().result)

    outcome = chatted(monkeypatch, ["one", "two"], stream_many)
    assert len(outcome.answers) == 2 and outcome.generate_s == 4.0
    assert outcome.built_late_s == {4: 0.5}


@pytest.mark.parametrize(
    ("end", "history"), [(KeyboardInterrupt(), ["one", "half"]), (ValueError("too long"), [])]
)
def test_what_the_next_question_goes_on_from(
    monkeypatch: pytest.MonkeyPatch, end: BaseException, history: list[str]
) -> None:
    """Bug: what stands on the screen of an answer that Ctrl-C stopped is not in the history, nor
    is its question, and "go on" has nothing to go on from; or a question that was refused is in
    it, and the next one, though short enough, is refused for it."""
    asked: list[Any] = []

    def stream_many(prompts: Any, sampling: Any) -> Iterator[Chunk]:
        asked.extend(prompts)
        yield Chunk(index=0, text="half", token_ids=[1])
        raise end

    assert not chatted(monkeypatch, ["one", "go on"], stream_many).answers
    assert [message["content"] for message in asked[1]] == [*history, "go on"]


def test_which_lines_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a question that begins with a path is taken for a command; a mistyped command, or an
    empty line, is asked; or bytes that are no text end the chat."""
    asked: list[Any] = []

    def stream_many(prompts: Any, sampling: Any) -> Iterator[Chunk]:
        asked.extend(message["content"] for message in prompts[0])
        yield Chunk(index=0, text="x", token_ids=[1], result=answer().result)

    no_text = UnicodeDecodeError("utf-8", b"caf\xe9\n", 3, 4, "invalid continuation byte")
    lines = [no_text, "/rest", " ", "/etc/hosts holds what?", "/quit", "more"]
    chatted(monkeypatch, lines, stream_many)
    assert asked == ["/etc/hosts holds what?"]


@pytest.mark.parametrize("where", ["print_answer_line", "print_note"])
def test_ctrl_c_just_behind_an_answer(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Bug: Ctrl-C that comes a millisecond after an answer's end, or a second one, ends the chat
    with all that was said in it."""
    asked: list[Any] = []

    def stream_many(prompts: Any, sampling: Any) -> Iterator[Chunk]:
        asked.extend(prompts)
        yield Chunk(index=0, text="all", token_ids=[1], result=answer().result)
        if where == "print_note" and len(asked) == 1:
            interrupt_next()
            raise KeyboardInterrupt

    def interrupt_next() -> None:
        real = getattr(report, where)

        def interrupted(*args: Any) -> None:
            monkeypatch.setattr(report, where, real)
            raise KeyboardInterrupt

        monkeypatch.setattr(report, where, interrupted)

    if where == "print_answer_line":
        interrupt_next()
    chatted(monkeypatch, ["one", "go on"], stream_many)
    said = [message["content"] for message in asked[1]]
    assert said[-1] == "go on" and (where == "print_note" or said[:-1] == ["one", "all"])


@pytest.mark.parametrize(("is_terminal", "quiet"), [(False, False), (True, True), (True, False)])
def test_a_stopped_answer_ends_its_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_terminal: bool,
    quiet: bool,
) -> None:
    """Bug: where the note that an answer was stopped is not beside it, in a file or with --quiet,
    the next answer goes on in its line."""
    ends = [KeyboardInterrupt, None]

    def stream_many(prompts: Any, sampling: Any) -> Iterator[Chunk]:
        yield Chunk(index=0, text="half", token_ids=[1])
        if (end := ends.pop(0)) is not None:
            raise end
        yield Chunk(index=0, text="", token_ids=[1], result=answer().result)

    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    chatted(monkeypatch, ["one", "two"], stream_many, quiet)
    out, err = capsys.readouterr()
    is_noted = is_terminal and not quiet  # the note begins with the line's end
    assert out == ("halfhalf\n" if is_noted else "half\nhalf\n")
    assert ("\nstopped" in err) == (not quiet)


@pytest.mark.parametrize(
    ("text", "is_terminal", "has_readline", "is_cut"),
    [
        ("x" * 4094, False, False, False),
        ("x" * 4095, False, True, True),  # which is not asked where stdout is no terminal
        ("\u00e9" * 2048, True, False, True),
        ("x" * 9000, True, True, False),
    ],
)
def test_a_line_that_the_terminal_cuts(
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    is_terminal: bool,
    has_readline: bool,
    is_cut: bool,
) -> None:
    """Bug: of a long question that is pasted where readline does not read it the first 4,095 bytes
    are answered, without a word; or a line of which nothing lacks is refused."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    monkeypatch.setitem(sys.modules, "readline", SimpleNamespace())
    if not has_readline:
        monkeypatch.delitem(sys.modules, "readline")
    monkeypatch.setattr("builtins.input", lambda *_: text)
    with pytest.raises(answers._CutError) if is_cut else nullcontext():
        assert answers._ask(quiet=True) == text


def test_a_line_that_is_cut_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: it ends the chat, or nobody is told why there is no answer."""

    def stream_many(prompts: Any, sampling: Any) -> Iterator[Chunk]:
        yield Chunk(index=0, text="x", token_ids=[1], result=answer().result)

    found = chatted(monkeypatch, [answers._CutError(), "one"], stream_many)
    assert [told.prompt for told in found.answers] == ["one"]
    assert "behind 4095 bytes; pass the text by --prompt-file" in capsys.readouterr().err
