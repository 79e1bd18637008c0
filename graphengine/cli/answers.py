"""What `graphengine run` does once its options are read: load, answer, report.

Three ways to answer, one per situation: one conversation streams to stdout, several run in one
batch and are printed in order, a terminal without prompts chats. Invariant: stdout carries
generated text alone, or with `as_json` exactly one JSON object; notes, progress and tables go to
stderr and vanish with `quiet`, where only what failed is named.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from graphengine import names, report
from graphengine.api import Chunk, Engine, GenerationResult, Prompt, PromptError
from graphengine.checkpoints.tokenizer import Message
from graphengine.config.options import SamplingParams
from graphengine.decode.guards import EngineWarning
from graphengine.prompts import Conversation
from graphengine.report import Answer
from graphengine.startup.artifact import Store, engine_parts, nearest

MAX_LINE_BYTES = 4095  # what Linux keeps of a line that is typed or pasted into a terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of the command. `conversations`: turns of each; None chats on the terminal.

    `options` are keyword arguments of `Engine.from_pretrained`; `args` is what was typed, for JSON;
    `store` is where compiled code is kept.
    """

    model: str
    draft: str | None
    conversations: list[Conversation] | None
    sampling: SamplingParams
    as_json: bool
    quiet: bool
    nvtx: bool
    options: dict[str, Any]
    args: dict[str, Any]
    note: str | None = None
    store: Store | None = None


def run(job: Job, started_s: float) -> int:
    """Loads the pair, answers everything and reports.

    Args:
        started_s: when the command began, by `time.perf_counter`.

    Returns:
        How many answers ended in an error.

    Raises:
        ValueError: something that cannot run, with the remedy.
        KeyboardInterrupt: Ctrl-C anywhere but in the chat; SystemExit: a signal to
            end. As after a failure of the device, answers that were finished are reported first.
    """
    import_s = time.perf_counter() - started_s
    console = report.stderr_console(job.quiet)
    if job.nvtx and not names.enable():
        raise ValueError("--nvtx: the nvtx package is missing; install nvtx")
    with _shown_warnings(console) as texts, _load(job, console) as engine:
        ready_s = time.perf_counter() - started_s
        report.print_heading(console, job.model, job.draft, engine.config)
        report.print_memory_plan(console, engine.memory_plan)
        widths = [width.line() for width in engine.startup.draft_widths]
        for note in [job.note, *widths, *_cache_notes(job, engine)]:
            if note:
                report.print_note(console, note)
        began = time.perf_counter()
        session = _Session(job, engine, console, [])
        answers = session.answers
        stopped: KeyboardInterrupt | RuntimeError | SystemExit | None = None
        try:
            session.run()
        except (KeyboardInterrupt, RuntimeError, SystemExit) as error:
            if not answers:
                raise
            stopped = error
        generate_s = time.perf_counter() - began
        if job.conversations is None:  # a user's thinking and typing is nobody's throughput
            generate_s = report.answering_seconds(answers)
        startup_s = report.startup_seconds(import_s, ready_s, engine.startup, answers)
        built_late_s = engine.built.loop.first.built_late_s
        outcome = report.Outcome(startup_s, engine.startup, answers, generate_s, built_late_s)
        report.print_tables(console, outcome, cache=job.store.segments if job.store else None)
        report.print_failures(answers)
        if job.as_json:
            values = report.json_object(
                outcome,
                engine.config,
                engine.memory_plan,
                args=job.args,
                model=job.model,
                draft=job.draft,
                warnings=texts,
                is_complete=stopped is None,
            )
            _write(json.dumps(values) + "\n")
        if stopped is not None:
            raise stopped
    return sum(answer.result.finish_reason == "error" for answer in answers)


@contextmanager
def _shown_warnings(console: Console) -> Iterator[list[str]]:
    """Our own warnings as lines on stderr, where Python would add a file and a source line; gives
    their texts."""
    texts: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", EngineWarning)
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
            if not issubclass(category, EngineWarning):
                others(message, category, *rest)
                return
            texts.append(str(message))
            report.print_warning(console, str(message))

        warnings.showwarning = show
        yield texts


def _progress(job: Job, console: Console, *columns: Any) -> Progress:
    off = not console.is_terminal or job.quiet  # a bar in a file is noise
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=off)


def _load(job: Job, console: Console) -> Engine:
    what = TextColumn("{task.description}", markup=False)  # a folder's name has its brackets
    with _progress(job, console, what, BarColumn()) as bar:
        task = bar.add_task("loading", total=None)

        def show(what: str, share: float) -> None:
            bar.update(task, description=what, total=1.0 if share else None, completed=share)

        return Engine.from_pretrained(job.model, job.draft, progress=show, **job.options)


def _cache_notes(job: Job, engine: Engine) -> list[str]:
    """The store's notes, and why code was compiled although some had been compiled ahead."""
    if job.store is None:
        return []
    notes, built = list(job.store.notes), engine.built
    if built.startup.num_compiled:
        apart = nearest(job.store.folder, engine_parts(built.config, built.target, built.draft))
        if apart:
            notes.append("compiled anew, what was compiled ahead differs: " + "; ".join(apart))
    config = built.config
    if job.args["artifact"] is not None and config.device == "cpu" and not config.compile:
        notes.append("--artifact changes nothing: on the CPU code is compiled by --compile alone")
    return notes


def _write(text: str) -> None:
    """Text to stdout at once."""
    sys.stdout.write(report.writable(text))
    sys.stdout.flush()


class _Session(NamedTuple):
    """A loaded pair and what it has answered."""

    job: Job
    engine: Engine
    console: Console
    answers: list[Answer]

    def run(self) -> None:
        """Answers everything. Mutates: answers, in the order in which they end."""
        conversations = self.job.conversations
        if conversations is None:
            self._chat()
        elif len(conversations) == 1 and not self.job.as_json:
            self._answer(conversations, _print_chunk)
        else:
            self._batch(conversations)

    def _chunks(self, prompts: list[Prompt]) -> closing[Generator[Chunk, None, None]]:
        """The batch's chunks; leaving the `with` cancels what is unfinished."""
        chunks = self.engine.stream_many(prompts, self.job.sampling)
        return closing(cast("Generator[Chunk, None, None]", chunks))

    def _answer(self, conversations: list[Conversation], on_chunk: Callable[[Chunk], None]) -> None:
        """Answers all conversations: a turn of each is one batch, answers are fed back in between.

        A later turn that cannot be asked, since the conversation has outgrown the context, ends its
        conversation with an error and costs nobody an answer.
        """
        histories: list[list[Message]] = [[] for _ in conversations]
        active = list(range(len(conversations)))
        for turn in range(max(map(len, conversations))):
            active = [i for i in active if turn < len(conversations[i])]
            prompts: list[Prompt] = []
            for i in active:
                prompt = conversations[i][turn]
                if isinstance(prompt, str) and not self.job.sampling.raw:
                    histories[i].append({"role": "user", "content": prompt})
                    prompt = list(histories[i])
                prompts.append(prompt)
            started = None
            while prompts and started is None:
                try:
                    started = self._chunks(prompts)
                except PromptError as error:
                    if turn == 0:  # nothing has been answered
                        raise
                    i = active.pop(error.index)
                    prompts.pop(error.index)
                    asked = conversations[i][turn]
                    self.answers.append(report.refused(i, turn, asked, error.reason))
            if started is None:
                break
            with started as chunks:
                for chunk in chunks:
                    on_chunk(chunk)
                    if chunk.result is not None:
                        i = active[chunk.index]
                        histories[i].append({"role": "assistant", "content": chunk.result.text})
                        self.answers.append(Answer(i, turn, conversations[i][turn], chunk.result))

    def _batch(self, conversations: list[Conversation]) -> None:
        """Several conversations: a bar while they run, then `[i] text`, numbered from 1; what is
        finished is printed although the rest was stopped."""
        num_tokens = 0
        columns = (
            "answering",
            BarColumn(),
            MofNCompleteColumn(),
            "{task.fields[num_tokens]} tokens",
        )
        with _progress(self.job, self.console, *columns) as bar:
            task = bar.add_task("", total=sum(map(len, conversations)), num_tokens=0)

            def on_chunk(chunk: Chunk) -> None:
                nonlocal num_tokens
                num_tokens += len(chunk.token_ids)
                bar.update(task, advance=chunk.result is not None, num_tokens=num_tokens)

            try:
                self._answer(conversations, on_chunk)
            finally:
                bar.stop()
                self.answers.sort(key=lambda answer: (answer.index, answer.turn))
                if not self.job.as_json:
                    for label, answer in report.labelled(self.answers):
                        _write(f"[{label}] {answer.result.text.rstrip()}\n")

    def _chat(self) -> None:
        """A chat on the terminal. With `raw`, each line is continued by itself."""
        with suppress(ImportError):  # gives `input` line editing and a history
            import_module("readline")
        note = partial(report.print_note, self.console)
        note("/reset forgets the chat, /quit or Ctrl-D ends, Ctrl-C stops answers")
        history: list[Message] = []
        is_open = True
        while is_open:
            try:
                is_open = self._turn(history)
            except KeyboardInterrupt:  # at the prompt, or as an answer's line is told
                note("\n/quit or Ctrl-D ends the chat")

    def _turn(self, history: list[Message]) -> bool:
        """Asks for a line and does what it says; whether the chat goes on. Mutates: history."""
        note = partial(report.print_note, self.console)
        try:
            line = _ask(self.job.quiet)
        except EOFError:
            return False
        except UnicodeDecodeError as error:
            note(f"the line is not asked: it is not text ({error})")
            return True
        except _CutError:
            note(
                f"the line is not asked: a terminal drops what is behind {MAX_LINE_BYTES} bytes; "
                "pass the text by --prompt-file"
            )
            return True
        command = line.strip()
        if command == "/quit":
            return False
        if command == "/reset":
            history.clear()
            note("the chat is forgotten")
        elif command.startswith("/") and " " not in command:
            note(f"{command} is no command; there are /reset and /quit")
        elif command:
            asked: Message = {"role": "user", "content": line}
            raw = self.job.sampling.raw
            text, result = self._reply(line if raw else [*history, asked])
            if text and not raw:
                history += [asked, {"role": "assistant", "content": text}]
            if result is not None:
                self.answers.append(Answer(len(self.answers), 0, line, result))
                report.print_answer_line(self.console, result)
        return True

    def _reply(self, prompt: Prompt) -> tuple[str, GenerationResult | None]:
        """Streams an answer; (text so far, result or None when it was stopped or refused)."""
        text, result = "", None
        try:
            with self._chunks([prompt]) as chunks:
                for chunk in chunks:
                    text, result = text + chunk.text, chunk.result
                    _write(chunk.text)
            if result is not None and not text.endswith("\n"):
                _write("\n")
        except KeyboardInterrupt:
            report.print_note(self.console, "\nstopped")
            is_ended = sys.stdout.isatty() and not self.job.quiet  # its line, by the note
            if text and not text.endswith("\n") and not is_ended:
                _write("\n")
        except ValueError as error:  # most likely the chat has outgrown the context
            report.print_note(self.console, f"{error} (/reset starts over)")
            return "", None
        return text, result


def _print_chunk(chunk: Chunk) -> None:
    """Text is out as soon as it is decoded; each answer ends its line."""
    ends = chunk.result is not None and not chunk.result.text.endswith("\n")
    if chunk.text or ends:
        _write(chunk.text + ("\n" if ends else ""))


class _CutError(Exception):
    """A line whose end may be missing."""


def _ask(quiet: bool) -> str:
    if sys.stdout.isatty():
        line = input("" if quiet else "> ")
        if "readline" in sys.modules:  # which reads every key itself
            return line
    else:
        if not quiet:
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = input()
    if len(os.fsencode(line)) >= MAX_LINE_BYTES:
        raise _CutError
    return line
