"""Programs judged by tests: the code of a response runs in a process of its own, with the user's rights.

No sandbox: what a model writes can read and write what the user can, and reach the network. Run it where that does no
harm. The limits of the reward workers hold for it too, and it inherits no variable that looks like a secret.
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
"""Seconds that a program and its tests may take; `timeout_s` of the reward workers must be larger."""

# The word that says "done" is read before the program runs and stands in no file, so that ending early does not pay.
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
    """1.0 if the last code block of the response, followed by `row["tests"]`, runs to its end; 0.0 if it does not.

    `row["tests"]` is Python source, such as assertions. A response without a block is taken as code as a whole. A
    program that takes longer than `TIMEOUT_S`, or ends early with success, has failed.
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
