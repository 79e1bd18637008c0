"""What `graphengine run` shows while it answers, with an engine that is made up."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from graphengine import report
from graphengine.api import Chunk, PromptError
from graphengine.cli import answers
from graphengine.config.options import SamplingParams
from graphengine.decode.guards import EngineWarning
from graphengine.prompts import Conversation
from tests.support.artifacts import filled
from tests.support.command_line import invoke
from tests.test_report import answer


def job(conversations: list[Conversation] | None, **changes: Any) -> answers.Job:
    told: dict[str, Any] = {"as_json": False, "quiet": False, "nvtx": False}
    told |= {"options": {}, "args": {}, "sampling": SamplingParams()}
    return answers.Job(model="m", draft=None, conversations=conversations, **(told | changes))


def test_a_batch_counts_its_turns() -> None:
    """Bug: the bar of conversations is full at half of their turns, or counts chunks; or it tells
    the tokens of the last chunk alone."""

    def stream_many(prompts: Any, sampling: Any) -> Iterator[Chunk]:
        for i in range(len(prompts)):
            yield Chunk(index=i, text="x", token_ids=[1, 2])
            yield Chunk(index=i, text="y", token_ids=[3], result=answer().result)

    screen = io.StringIO()
    console = Console(width=100, file=screen, force_terminal=True, color_system=None)
    engine: Any = SimpleNamespace(stream_many=stream_many)
    asked: list[Conversation] = [["a", "b"], ["c"]]
    answers._Session(job(asked, as_json=True), engine, console, []).run()
    last = screen.getvalue().split("answering")[-1]
    assert "3/3" in last and "9 tokens" in last, last


def test_a_warning_that_comes_again_is_shown_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: of a chat's answers that fell back the first alone is warned of."""
    with answers._shown_warnings(report.stderr_console(quiet=False)) as texts:
        for _ in range(2):
            warnings.warn("it fell back", EngineWarning, stacklevel=1)
    assert texts == ["it fell back"] * 2
    assert capsys.readouterr().err == "warning: it fell back\n" * 2


def test_an_answer_of_several_keeps_its_indent(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: code that is continued loses the spaces in front of its first line."""
    result = replace(answer().result, text="    return x\n    y \n\n")

    def stream_many(prompts: Any, sampling: Any) -> Iterator[Chunk]:
        return (Chunk(index=i, text="", token_ids=[1], result=result) for i in range(len(prompts)))

    engine: Any = SimpleNamespace(stream_many=stream_many)
    quiet = report.stderr_console(quiet=True)
    answers._Session(job([["a"], ["b"]]), engine, quiet, []).run()
    shown = "    return x\n    y\n"
    assert capsys.readouterr().out == f"[1] {shown}[2] {shown}"


def test_what_is_typed_in_a_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a question that begins with a path is taken for a command, or a line of code loses its
    indent; a command is asked; or all answers are told as the first."""
    typed = ["/etc/hosts is what?", "  x = 1", " ", "/reset ", "/help", "on", "/quit", "never"]
    lines, asked = iter(typed), list[list[str]]()

    def stream_many(prompts: Any, sampling: Any) -> Iterator[Chunk]:
        asked.append([message["content"] for message in prompts[0]])
        yield Chunk(index=0, text="ok", token_ids=[1], result=answer().result)

    monkeypatch.setattr(answers, "_ask", lambda quiet: next(lines))
    engine: Any = SimpleNamespace(stream_many=stream_many)
    session = answers._Session(job(None), engine, report.stderr_console(quiet=False), [])
    session.run()
    assert asked == [typed[:1], [typed[0], "ok", "  x = 1"], ["on"]]
    found = [(told.index, told.prompt) for told in session.answers]
    assert found == [(0, typed[0]), (1, "  x = 1"), (2, "on")]
    out, err = capsys.readouterr()
    assert out == "ok\n" * 3
    assert [line for line in err.splitlines() if not line.startswith("[")] == [
        "/reset forgets the chat, /quit or Ctrl-D ends, Ctrl-C stops answers",
        "the chat is forgotten",
        "/help is no command; there are /reset and /quit",
    ]


@pytest.mark.parametrize(
    ("end", "out", "err"),
    [
        (None, "half\n", ""),
        (KeyboardInterrupt(), "half", "\nstopped\n"),
        (ValueError("too long"), "", "too long (/reset starts over)\n"),
    ],
)
def test_how_an_answer_of_a_chat_ends(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    end: BaseException | None,
    out: str,
    err: str,
) -> None:
    """Bug: the line of an answer that Ctrl-C stopped ends twice, or that of a whole one not at all;
    or nobody is told how to go on where the chat has outgrown the context."""

    def stream_many(prompts: Any, sampling: Any) -> Iterator[Chunk]:
        if not isinstance(end, ValueError):
            yield Chunk(index=0, text="half", token_ids=[1])
        if end is not None:
            raise end
        yield Chunk(index=0, text="", token_ids=[2], result=answer().result)

    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    engine: Any = SimpleNamespace(stream_many=stream_many)
    session = answers._Session(job(None), engine, report.stderr_console(quiet=False), [])
    told = session._reply("x")
    assert told == (out.strip(), None if end else answer().result)
    assert capsys.readouterr() == (out, err)


def test_a_turn_that_cannot_be_asked() -> None:
    """Bug: it is told with another turn's prompt, reason or place, or costs the other conversation
    its own."""

    def stream_many(prompts: Any, sampling: Any) -> Iterator[Chunk]:
        for i, prompt in enumerate(prompts):
            if prompt[-1]["content"] == "long":
                raise PromptError(i, len(prompts), "it is too long")
        chunks = [Chunk(index=i, text="", token_ids=[], result=told) for i in range(len(prompts))]
        return (chunk for chunk in chunks)

    told = answer().result
    engine: Any = SimpleNamespace(stream_many=stream_many)
    asked: list[Conversation] = [["a", "b"], ["c", "long", "never"]]
    quiet = report.stderr_console(quiet=True)
    session = answers._Session(job(asked, as_json=True), engine, quiet, [])
    session.run()
    found = [(a.index, a.turn, a.prompt, a.result.error) for a in session.answers]
    reason = "it is too long; neither this turn nor those behind it were asked"
    assert found == [
        (0, 0, "a", None),
        (0, 1, "b", None),
        (1, 0, "c", None),
        (1, 1, "long", reason),
    ]


def test_why_a_start_was_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a start that compiled anew says so without the reason, or with another one's; or a start
    that compiled nothing says that it did."""
    apart = ["buckets: 1 there, 8 here", "dtype: float32 there, bfloat16 here"]
    monkeypatch.setattr(answers, "engine_parts", lambda *parts: {})
    monkeypatch.setattr(answers, "nearest", lambda folder, parts: apart)
    store = filled(tmp_path)._replace(notes=["x.tar.gz does not fit"])
    started = job([["a"]], store=store, args={"artifact": None})

    def notes(num_compiled: int) -> list[str]:
        config = SimpleNamespace(device="cuda", compile=True)
        startup = SimpleNamespace(num_compiled=num_compiled)
        built = SimpleNamespace(startup=startup, config=config, target=None, draft=None)
        engine: Any = SimpleNamespace(built=built)
        return answers._cache_notes(started, engine)

    assert notes(0) == ["x.tar.gz does not fit"]
    why = "compiled anew, what was compiled ahead differs: " + "; ".join(apart)
    assert notes(3) == ["x.tar.gz does not fit", why]


@pytest.mark.parametrize(
    ("is_terminal", "quiet", "asked", "err"),
    [
        (True, False, "> ", ""),
        (True, True, "", ""),
        (False, False, "", "> "),
        (False, True, "", ""),
    ],
)
def test_where_a_question_is_typed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_terminal: bool,
    quiet: bool,
    asked: str,
    err: str,
) -> None:
    """Bug: `graphengine run | tee chat.txt` has the marks of the prompt among the answers, or shows
    none; or --quiet shows them."""
    shown: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": shown.append(text) or "hello")
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    assert answers._ask(quiet) == "hello"
    assert shown == [asked]
    assert capsys.readouterr() == ("", err)


def test_what_a_run_notes_of_its_models(
    target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: who runs a toy is told one of the questions that it knows, who decodes plainly without
    having asked for it is not told so, or who did is."""
    jobs: list[answers.Job] = []
    monkeypatch.setattr(answers, "run", lambda job, started_s: jobs.append(job))
    for pair in ([], ["--draft", "none"], [target], [target, "--draft", "none"]):
        assert invoke("run", *pair, "--prompt", "x").exit_code == 0
    assert invoke("run", target, "--draft", draft, "--prompt", "x").exit_code == 0
    toy = (
        "a toy that knows a few kinds of questions, such as: Compare the bee and the duck. Write "
        "a note: Emma thanks David for a green key."
    )
    plain = (
        "decoding plainly; pass --draft with this model's drafter for speculative decoding, or "
        "--draft none to leave out this note"
    )
    assert [job.note for job in jobs] == [toy, toy, plain, None, None]
