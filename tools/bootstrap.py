#!/usr/bin/env python3
"""From a bare checkout and nothing but Python to a running graphengine, in one command.

What: makes `.venv` beside pyproject.toml, installs the checkout into it (editable, with the extra
`cuda` where an NVIDIA driver is present), then runs `graphengine run` or the tests in it.
Why: set-up is where a first try ends; every step says what it does and how long it took, and every
failure ends with what to do about it. Standard library only, since nothing is installed yet.
Invariant: `.venv/bootstrap.json` says what was installed, and is written last; when it agrees with
pyproject.toml nothing is installed again, so a second run needs no network and no time.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
MARKER = VENV / "bootstrap.json"
SUPPORTED = ((3, 11), (3, 12), (3, 13), (3, 14))  # pyproject.toml's requires-python
DEFAULT_PROMPT = (
    "Iris travels from Rome to Vienna by bike. First Iris moves 60 km per hour for 5 hours, "
    "then 30 km per hour for 5 hours. How far is it?"
)
HEARTBEAT_S = 20
# Unpacked size of what is installed plus pip's temporary copies; torch dominates both.
NEEDED_GIB = {False: 3, True: 12}

EXAMPLES = """examples:
  python3 tools/bootstrap.py run                           the bundled pair answers a prompt
  python3 tools/bootstrap.py run -- --help                 the options of `graphengine run`
  python3 tools/bootstrap.py test                          the tests, without the long ones
  python3 tools/bootstrap.py test --all                    all of them
  python3 tools/bootstrap.py test -- -k kernels            some of them
  python3 tools/bootstrap.py install --dev                 only the environment, with linters

pip's own settings apply (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, PIP_NO_INDEX, ...).
"""

# First match wins: a refused connection also makes pip say "no matching distribution".
REMEDIES = (
    (
        r"No space left on device|Errno 28",
        "the disk is full: free some space, or move pip's files with TMPDIR and PIP_CACHE_DIR",
    ),
    (
        r"NewConnectionError|name resolution|ConnectTimeout|Read timed out|ProxyError|Max retries",
        "the package index cannot be reached: check the network and proxy; without a network, put "
        "the wheels into a folder and set PIP_NO_INDEX=1 PIP_FIND_LINKS=<folder>",
    ),
    (
        r"SSLError|CERTIFICATE_VERIFY_FAILED",
        "the index's certificate is not trusted: set PIP_CERT to your certificate bundle",
    ),
    (
        r"No matching distribution found for flashinfer",
        "the index has no flashinfer: add --no-cuda to run without it (CPU, or torch attention)",
    ),
    (
        r"No matching distribution found",
        "the index lacks a package for this Python and platform (see the line above): check "
        "PIP_INDEX_URL and PIP_NO_INDEX",
    ),
    (
        r"ensurepip is not available|No module named (ensurepip|venv)",
        "this Python has no venv module: install it (Debian, Ubuntu: apt install python3-venv)",
    ),
    (r"Permission denied|Errno 13", "the checkout is not writable: work on a copy you own"),
    (r"Killed|MemoryError", "too little memory: close other programs"),
)


class SetupError(Exception):
    """A step that failed, with what to do about it."""


def say(text: str) -> None:
    print(f"[bootstrap] {text}", flush=True)


def diagnose(output: str) -> str:
    """What to do about a failed command, from what it printed."""
    for pattern, remedy in REMEDIES:
        if re.search(pattern, output):
            return remedy
    return "see the lines above; if .venv is broken, delete it and run this again"


def suitable_python() -> None:
    """Replaces this process by a supported Python if this one is not, or says what is missing."""
    here = sys.version_info[:2]
    if here in SUPPORTED:
        return
    for major, minor in reversed(SUPPORTED):
        found = shutil.which(f"python{major}.{minor}")
        # A version manager's shim may exist without the version behind it.
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            say(f"Python {here[0]}.{here[1]} is not supported; going on with {found}")
            os.execv(found, [found, *sys.argv])
    raise SetupError(
        f"Python {here[0]}.{here[1]} is not supported and none of python3.11 to python3.14 is on "
        "the PATH: install one of them, then run: python3.13 tools/bootstrap.py ..."
    )


def has_nvidia_driver() -> bool:
    if Path("/proc/driver/nvidia").exists():
        return True
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return False
    try:
        return subprocess.run([nvidia_smi, "-L"], capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def requirements_hash(pyproject: str) -> str:
    """Hash of all that decides an installation; the settings of linters and tests do not."""
    import tomllib  # Python 3.11: checked before

    parsed = tomllib.loads(pyproject)
    keys = ("dependencies", "optional-dependencies", "scripts", "requires-python", "name")
    relevant = [parsed["build-system"], {key: parsed["project"].get(key) for key in keys}]
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def identity(pyproject: str) -> dict[str, str]:
    """What an existing environment must agree with to be used as it is."""
    return {
        "requirements": requirements_hash(pyproject),
        "python": ".".join(map(str, sys.version_info[:3])),
        "root": str(ROOT),  # an editable install points here, so a moved checkout needs a new one
    }


def installed() -> dict:
    """The marker of the existing environment; empty when there is none that works."""
    if not (VENV / "bin" / "python").exists():
        return {}
    try:
        return json.loads(MARKER.read_text())
    except (OSError, ValueError):
        return {}


def command_output(command: list[str], what: str) -> None:
    """Runs a command, shows its progress, and raises SetupError with a remedy when it fails."""
    start = time.monotonic()
    last_line = collections.deque(maxlen=60)
    done = threading.Event()

    def heartbeat() -> None:
        while not done.wait(HEARTBEAT_S):
            now = last_line[-1].strip()[:80] if last_line else what
            say(f"  ... {time.monotonic() - start:.0f} s: {now}")

    threading.Thread(target=heartbeat, daemon=True).start()
    num_packages = 0
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=ROOT,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                last_line.append(line)
                text = line.strip()
                if text.startswith("Collecting "):
                    num_packages += 1
                elif text.startswith("Downloading ") and "MB)" in text:
                    name = text.split()[1].rsplit("/", 1)[-1]
                    say(f"  downloading {name} {text[text.rfind('(') :]}")
                elif text.startswith("Installing collected packages"):
                    say(f"  unpacking ({num_packages} packages)")
    except OSError as error:
        raise SetupError(f"{what} failed: {error}; {diagnose(str(error))}") from error
    finally:
        done.set()
    if process.returncode != 0:
        output = "".join(last_line)
        print(output, file=sys.stderr, flush=True)
        raise SetupError(f"{what} failed (exit {process.returncode}): {diagnose(output)}")
    say(f"  done in {time.monotonic() - start:.1f} s")


def check_disk(cuda: bool) -> None:
    free_gib = shutil.disk_usage(ROOT).free / 2**30
    if free_gib < NEEDED_GIB[cuda]:
        raise SetupError(
            f"{free_gib:.1f} GiB free below {ROOT}, about {NEEDED_GIB[cuda]} GiB needed: "
            "free some space, or move the checkout to a larger disk"
        )


def ensure_environment(wanted: set[str], cuda: bool) -> bool:
    """Makes `.venv` hold the checkout with the wanted extras; True when it already did.

    Extras only add up: an environment made for `dev` also serves `run`. A new Python or a moved
    checkout starts over; changed requirements are installed on top.
    """
    current = identity((ROOT / "pyproject.toml").read_text())
    marker = installed()
    have = set(marker.get("extras", []))
    same_base = all(marker.get(key) == current[key] for key in ("python", "root"))
    if same_base and marker.get("requirements") == current["requirements"] and wanted <= have:
        say("environment: .venv is up to date")
        return True

    if not same_base:
        check_disk(cuda)
        say(f"step 1 of 2: .venv with Python {current['python']}")
        command_output([sys.executable, "-m", "venv", "--clear", str(VENV)], "making .venv")
        have = set()
    else:
        say("step 1 of 2: .venv exists; its packages need an update")
    MARKER.unlink(missing_ok=True)
    extras = sorted(wanted | have)
    target = ".[{}]".format(",".join(extras)) if extras else "."
    size = "several GB with CUDA" if cuda else "CPU builds of torch: 0.2 GB, CUDA builds: 3 GB"
    say(f"step 2 of 2: pip install -e '{target}' (first time: minutes; {size})")
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    command_output([*pip, "-e", target], "pip install")
    MARKER.write_text(json.dumps({**current, "extras": extras}, indent=2) + "\n")
    return False


def command_for(
    action: str, rest: list[str], *, cuda: bool = False, everything: bool = False
) -> list[str]:
    """The command that an action runs inside the environment.

    Tests run in a process a core, up to four; with CUDA in one, since a GPU's memory is one.
    """
    if action == "run":
        rest = rest or ["--prompt", DEFAULT_PROMPT]
        return [str(VENV / "bin" / "graphengine"), "run", *rest]
    jobs = [] if cuda else ["-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"]
    chosen = [] if everything else ["-m", "not slow"]
    return [str(VENV / "bin" / "python"), "-m", "pytest", *jobs, *chosen, *rest]


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Splits at the first `--`: ours before it, graphengine's or pytest's after it."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="tools/bootstrap.py",
        description="Sets graphengine up in .venv and runs it, or its tests.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("run", "test", "install"))
    parser.add_argument("--dev", action="store_true", help="also install ruff, pyright and build")
    parser.add_argument("--all", action="store_true", help="test: the long ones (slow) too")
    parser.add_argument("--no-cuda", action="store_true", help="leave the extra `cuda` out")
    options, unknown = parser.parse_known_args(arguments[:split])
    if unknown:
        parser.error(f"{' '.join(unknown)}: options of graphengine or pytest come after --")
    rest = arguments[split + 1 :]
    if options.action == "install" and rest:
        parser.error("install takes no arguments after --")
    if options.action != "test" and options.all:
        parser.error(f"{options.action} takes no --all")
    return options, rest


def main(arguments: list[str]) -> int:
    options, rest = parse(arguments)
    start = time.monotonic()
    try:
        suitable_python()
        cuda = not options.no_cuda and has_nvidia_driver()
        say(
            f"graphengine {options.action}: Python {sys.version.split()[0]}, "
            + ("NVIDIA driver found" if cuda else "no NVIDIA driver in use: CPU")
        )
        wanted = {"cuda"} if cuda else set()
        if options.action == "test":
            wanted.add("test")
        if options.dev:
            wanted |= {"test", "dev"}
        ensure_environment(wanted, cuda)
        setup_s = time.monotonic() - start
        if options.action == "install":
            say(f"OK: .venv is ready ({setup_s:.1f} s)")
            return 0
        everything = options.all or "-m" in rest
        command = command_for(options.action, rest, cuda=cuda, everything=everything)
        say("+ " + shlex.join([Path(command[0]).name, *command[1:]]))
        # Test processes share the cores; each with torch's threads for all of them, they wait.
        threads = {"OMP_NUM_THREADS": "1"} if options.action == "test" and not cuda else {}
        code = subprocess.run(command, cwd=ROOT, env=threads | os.environ).returncode
    except SetupError as error:
        say(f"FAILED: {error}")
        return 1
    except OSError as error:
        say(f"FAILED: {error}: {diagnose(str(error))}")
        return 1
    except KeyboardInterrupt:
        say("stopped")
        return 130
    total_s = time.monotonic() - start
    verdict = "OK" if code == 0 else "FAILED"
    is_part = options.action == "test" and not everything
    left_out = "; the long tests did not run: --all runs them" if is_part else ""
    say(f"{verdict}: {options.action} ended with exit code {code} after {total_s:.1f} s{left_out}")
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
