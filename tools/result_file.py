"""What tools have in common: help that is the tool's docstring, and where a result is stored."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphengine.profiles import result_schema


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help shows a docstring as it is written."""
    how = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=how)


def add_result_file(parser: argparse.ArgumentParser) -> None:
    """Adds `--out` and `--commit`, which `store` reads."""
    parser.add_argument("--out", type=Path, help="store the result as JSON here")
    text = "commit to record where the checkout has no history"
    parser.add_argument("--commit", metavar="SHA", help=text)


def store(args: argparse.Namespace, kind: str, numbers: Mapping[str, Any], **parts: Any) -> None:
    """Writes the result file if one was asked for; `parts` as in `write_result`."""
    if args.out:
        env = result_schema.environment(args.commit)
        result_schema.write_result(args.out, kind, numbers, env=env, **parts)
