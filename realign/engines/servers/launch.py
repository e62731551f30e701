"""Servers that the run starts and stops."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from realign.errors import ConfigError

_GUARD = Path(__file__).with_name("guard.py")
_END_S = 15.0
_LAST_LINES = 12


class LaunchedServer:
    """A server process. It ends when this process ends, also by SIGKILL; see `guard`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start the command.

        Args:
            command: program and arguments.
            environment: further environment variables.
            log: file for its output.

        Raises:
            ConfigError: the program cannot be started.
        """
        self.log = log
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, str(_GUARD), *command],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment},
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError(f"the server cannot be started: {error}") from error

    @property
    def ended(self) -> bool:
        """Whether the server ended."""
        return self._process.poll() is not None

    def last_lines(self) -> str:
        """Return the last lines of its output."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(line[:300] for line in lines[-_LAST_LINES:])

    def stop(self) -> None:
        """End the server and all its processes, and wait until they ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def free_port() -> int:
    """Return a port of this machine that no process uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
