"""tools/tune_skinny.py: what would run, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_dry_run(tmp_path: Path) -> None:
    """Bug: the tool does not find its own module from another folder, or a case has nothing to try:
    told on the GPU, minutes before its time is over."""
    line = [sys.executable, str(ROOT / "tools/tune_skinny.py"), "--dry-run"]
    line += ["--cases", "8b", "4b-fp8", "--rows", "16", "64"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert len(rows) == 2 * 2 * 6
    counts = [int(row[row.index("candidates,") - 1]) for row in rows]
    assert min(counts) > 0
