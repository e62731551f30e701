"""Child processes of tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from realign.config.files import experiments_dir

CHECKOUT = experiments_dir().parent


def python(code: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    everything = {**os.environ, "PYTHONPATH": str(CHECKOUT), **env}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, env=everything, capture_output=True, text=True, timeout=120, check=False)


def printed_without(modules: set[str], words: list[str], here) -> str:
    """Return the output of a command line. The command must not import any of the modules."""
    code = (
        f"import sys; from realign.cli.commands import main; code = main({words!r})\n"
        f"sys.exit(code or bool({modules!r} & set(sys.modules)))"
    )
    done = python(code, here)
    assert done.returncode == 0, done.stderr
    return done.stdout


def gone(pid, within_s=10.0):
    """Return whether the process ends in time. A zombie counts as ended."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False
