"""Reward from unit tests: runs the code of a response in a separate process, in a sandbox unless you switch it off.

Without a sandbox, the code can read and write the user's files and access the network. A run on a machine that does not
support the sandbox (`realign.rewards.sandbox`) therefore ends at launch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import override

from realign.errors import DataError
from realign.rewards.pool.functions import Prepared
from realign.rewards.sandbox import Bubblewrap, ProgramLimits, SandboxMode, choose_sandbox, runs_to_its_end
from realign.rewards.terms import RewardTerm
from realign.settings import Count, Positive

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_MARGIN_S = 10.0  # time of a call beyond that of its program: starting and ending processes on a busy machine


@dataclass(frozen=True)
class UnitTestsFunction(Prepared):
    """A reward function that runs the code of a response with the tests of its row."""

    limits: ProgramLimits = field(default_factory=ProgramLimits)
    """Limits of the program and its tests."""
    mode: SandboxMode = SandboxMode.required
    """Whether the program runs in a sandbox."""
    sandbox: Bubblewrap | None = None
    """The sandbox that `prepare` found. None: none, or each call of a function that is not prepared looks for it."""

    def prepare(self) -> UnitTestsFunction:
        """Return the function with the sandbox of this machine, so that no worker chooses another one."""
        sandbox = choose_sandbox(self.mode)
        return replace(self, sandbox=sandbox, mode=SandboxMode.off if sandbox is None else SandboxMode.required)

    @property
    @override
    def note(self) -> str:
        return "without a sandbox" if self.sandbox is None else "in a bubblewrap sandbox"

    def __call__(self, prompt: str, response: str, row: dict[str, Any]) -> float | None:
        """Return 1.0 if the last code block of the response, followed by `row["tests"]`, runs to its end, else 0.0.

        `row["tests"]` is Python source, such as assertions, or a list of such texts. Without tests, there is no reward
        (None). If the response has no code block, all of it is run as
        code. A program that takes longer than its time limit, or exits early with code 0, fails.

        Raises:
            ConfigError: there is no sandbox, but it is required.
            DataError: the tests are no text.
            RuntimeError: the sandbox did not start. The response then has no reward.
        """
        tests = _tests(row["tests"])
        if not tests.strip():
            return None
        sandbox = self.sandbox
        if sandbox is None and self.mode is not SandboxMode.off:
            sandbox = choose_sandbox(self.mode)
        blocks = _BLOCK.findall(response)
        code = blocks[-1] if blocks else response
        return float(runs_to_its_end(f"{code}\n\n{tests}\n", self.limits, sandbox))


def _tests(cell: Any) -> str:
    """Return the tests of a row as one text; empty without tests."""
    given = cell.tolist() if hasattr(cell, "tolist") else cell
    parts = [part for part in (given if isinstance(given, list | tuple) else [given]) if part is not None]
    if not all(isinstance(part, str) for part in parts):
        raise DataError(f"the tests are a {type(given).__name__}, expected a text or a list of texts.")
    return "\n".join(parts)


passes = UnitTestsFunction()
"""The reward function with its default limits, in a sandbox."""


@dataclass
class UnitTests(RewardTerm):
    """A reward term: 1 if the code of a response passes the tests of its row, in a sandbox."""

    sandbox: SandboxMode = SandboxMode.required
    """required | off. required ends the run before it loads a model if the machine does not support the bubblewrap
    sandbox. off runs programs with your rights, and with the limits of the reward workers only; in a YAML file,
    write it in quotes."""
    timeout_s: Positive = 10.0
    """Time limit of a program and its tests in seconds. In the sandbox, also the CPU time of each process."""
    memory_mb: Count = 1024
    """Address space of each process of a program in MiB. Only in the sandbox."""
    processes: Count = 16
    """Number of processes and threads of a program. Only in the sandbox."""
    disk_mb: Count = 64
    """Size of the file system of a program in MiB, which is in memory. Only in the sandbox."""

    @override
    def load(self) -> Callable[..., Any]:
        limits = ProgramLimits(self.timeout_s, self.memory_mb, self.processes, self.disk_mb)
        return UnitTestsFunction(limits, self.sandbox)

    @override
    def deadline_s(self, default: float) -> float:
        return max(default, self.timeout_s + _MARGIN_S)
