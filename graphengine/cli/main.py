"""The command line: its commands, and how each of them ends.

`graphengine --help` answers at once because nothing here imports torch at module level. Streams:
generated text (or one JSON object) goes to stdout, everything else to stderr, so that a pipe gets
text alone. Exit codes: 0 done, 1 failed while running, 2 refused (option, value and remedy are
named), and of a signal to end 128 + its number: 130 interrupted, 143 terminated, 129 hung up.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from graphengine import __version__
from graphengine.cli import options as shared
from graphengine.cli.bench import bench
from graphengine.cli.cache import INDUCTOR_FOLDER, compiled_code
from graphengine.cli.compile import compile_
from graphengine.cli.doctor import doctor
from graphengine.cli.graphs import graphs
from graphengine.cli.profile import profile
from graphengine.cli.run import run
from graphengine.cli.verify import verify

_COMPILERS = ("torch._dynamo", "torch._inductor")
_DEAF = (  # ends of names of functions in which an exception does not arrive, see _end
    ".__del__",
    ".__set_name__",
    "torch.distributed.<module>",
    "_get_module_lock.<locals>.cb",
    "ExtensionFileLoader.create_module",
    "ExtensionFileLoader.exec_module",
)
_MEMORY = "--max-model-len --input-len --output-len --bucket --gpu-memory-utilization".split()
_FULL, _REFUSES = "No space left on device", "the system refuses to go on"
_NO_PLACE = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)


class _Commands(click.Group):
    """The commands; a help or version that cannot be written ends as a command does."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            _drop_unwritten_()
            click.echo(f"Error: {_REFUSES}: {error}", err=True)
            sys.exit(1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="graphengine")
def main() -> None:
    """Latency-critical LLM decode with DFlash block-diffusion speculative decoding."""


def _drop_unwritten_() -> None:
    """Drops what a full stdout has not taken: Python would write it at its exit, fail again, and
    end with an exit code of its own."""
    if sys.stdout is None:  # closed by the shell
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _ends_are_told(command: click.Command) -> Iterator[None]:
    """Turns Ctrl-C, refused input (ValueError) and what the machine refuses into a line on stderr
    and an exit code."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread() and os.name == "posix":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves it
                before[number] = signal.signal(number, _end)
    # With 1 verify would say that it has found wrong tokens.
    failed = click.UsageError if command.name == "verify" else click.ClickException
    try:
        _check_folder()
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        click.get_current_context().exit(130)
    except OSError as error:
        if error.errno == errno.EPIPE and failed is click.ClickException:
            raise  # `| head -1`: click ends quietly, with 1
        _drop_unwritten_()
        text = f"{_REFUSES}: {error}"
        if error.errno in _NO_PLACE:
            text += "; set GRAPHENGINE_CACHE, HOME and TMPDIR to folders that can be written"
        raise failed(text) from error
    except (MemoryError, RuntimeError) as error:
        lacking = shared.out_of_memory(error)
        if lacking is None and type(error).__module__.startswith(_COMPILERS):
            raise failed(_compiler_failed(error)) from error
        if lacking is None:
            raise
        offered = [flag for flag in _MEMORY if any(flag in p.opts for p in command.params)]
        raise failed(f"{lacking}; lower {', '.join(offered)} or --kv-cache-memory") from error
    finally:
        for number, handler in before.items():  # nobody would tell a second signal from here on
            signal.signal(number, handler)
            signal.setitimer(signal.ITIMER_REAL, 0)  # see _end


def _check_folder() -> None:
    """Refuses a current folder that is gone, where oneMKL (in torch 2.13) ends the process."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ValueError(
            "the current folder was removed; change to one that exists (cd)"
        ) from error


def _end(number: int, frame: FrameType | None) -> None:
    """Ends the command, by whatever signal, as Ctrl-C does: what has been answered is reported.

    In functions of _DEAF an exception would be dropped, or C code that is starting up would answer
    it by a traceback or an abort (torch 2.13, Triton 3.7, numpy 2.4): it is raised 20 ms later.
    """
    while frame is not None and frame.f_code.co_filename != __file__:
        if f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}".endswith(_DEAF):
            signal.signal(signal.SIGALRM, lambda _, place: _end(number, place))
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            return
        frame = frame.f_back
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def _compiler_failed(error: Exception) -> str:
    # Dynamo's own line stands before what a backend says.
    reason = str(error).strip().removeprefix("backend='inductor' raised:\n").partition("\n")[0]
    remedy = "drop what is kept with `graphengine compile --fresh`, see `graphengine doctor`"
    if "CxxCompiler" in reason:
        remedy = "install g++"
    elif "[Errno" in reason or _FULL in str(error):
        reason = reason if "[Errno" in reason else _FULL  # of what g++ printed behind it
        remedy = (
            f"set {INDUCTOR_FOLDER} or GRAPHENGINE_CACHE to a folder that can be written and has "
            "room"
        )
    return f"compilation failed: {reason}; {remedy}, or run with --no-compile"


def _keeping_compiled_code(command: click.Command) -> click.Command:
    """The command, run inside `compiled_code`, its ends told; its context's `obj` is the store."""
    callback = command.callback
    assert callback is not None

    @functools.wraps(callback)
    def outer(*args: Any, **kwargs: Any) -> Any:
        context = click.get_current_context()
        device, artifact = kwargs.get("device", "auto"), kwargs.get("artifact")
        if artifact is not None and kwargs.get("fresh"):
            raise click.UsageError("--fresh would drop what --artifact adds; give one of them")
        with _ends_are_told(command), compiled_code(device, artifact) as context.obj:
            return callback(*args, **kwargs)

    command.callback = outer
    return command


for _command in (run, bench, profile, graphs, doctor, compile_, verify):
    main.add_command(_keeping_compiled_code(_command))
