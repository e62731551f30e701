"""Reward from unit tests: runs the code of a response in a separate process, with the permissions of the user.

This is no sandbox. The code can read and write the user's files and access the network, so run it only on a machine
where this is harmless. The limits of the reward workers apply to it, and it inherits no variable that looks like a
secret.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from realign.rewards.pool.limits import without_secrets

TIMEOUT_S = 10.0
"""Time limit of a program and its tests, in seconds. `timeout_s` of the reward workers must be larger."""

# The runner reads a random token from stdin before the program runs, and prints it at the end. The token is in no file,
# so a program that exits early cannot pass.
_RUNNER = """\
import sys
done = sys.stdin.read()
with open(sys.argv[1], encoding="utf-8") as file:
    program = compile(file.read(), "program.py", "exec")
exec(program, {"__name__": "__main__"})
print(done)
"""
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def passes(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1.0 if the last code block of the response, followed by `row["tests"]`, runs to its end, else 0.0.

    `row["tests"]` is Python source, such as assertions. If the response has no code block, all of it is run as code. A
    program that takes longer than `TIMEOUT_S`, or exits early with code 0, fails.
    """
    blocks = _BLOCK.findall(response)
    code = blocks[-1] if blocks else response
    done = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(f"{code}\n\n{row['tests']}\n", encoding="utf-8")
        try:
            run = subprocess.run(
                [sys.executable, "-I", "-c", _RUNNER, str(program)],
                cwd=folder,
                env=without_secrets(os.environ),
                input=done.encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 0.0
    return float(run.returncode == 0 and run.stdout.decode(errors="replace").rstrip().endswith(done))
