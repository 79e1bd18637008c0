"""What `graphengine run` shows while it answers, with an engine that is made up."""

from __future__ import annotations

import io
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from graphengine import report
from graphengine.api import Chunk
from graphengine.cli import answers
from graphengine.config.options import SamplingParams
from graphengine.prompts import Conversation
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


@pytest.mark.parametrize(
    ("end", "out", "err"),
    [
        (None, "half\n", ""),
        (KeyboardInterrupt(), "half", "\nstopped\n"),
        (ValueError("too long"), "", "too long (/reset starts over)\n"),
    ],
)
def test_how_an_answer_of_a_chat_ends(
    capsys: pytest.CaptureFixture[str], end: BaseException | None, out: str, err: str
) -> None:
    """Bug: the line of an answer that Ctrl-C stopped ends twice, or that of a whole one not at all;
    or nobody is told how to go on where the chat has outgrown the context."""

    def stream_many(prompts: Any, sampling: Any) -> Iterator[Chunk]:
        if not isinstance(end, ValueError):
            yield Chunk(index=0, text="half", token_ids=[1])
        if end is not None:
            raise end
        yield Chunk(index=0, text="", token_ids=[2], result=answer().result)

    engine: Any = SimpleNamespace(stream_many=stream_many)
    session = answers._Session(job(None), engine, report.stderr_console(quiet=False), [])
    told = session._reply("x")
    assert told == (out.strip(), None if end else answer().result)
    assert capsys.readouterr() == (out, err)
