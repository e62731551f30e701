"""Child processes and servers of tests, and waiting for them."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from realign.cli import commands as cli
from realign.config.files import experiments_dir
from realign.config.index import class_at

CHECKOUT = experiments_dir().parent
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.preload"])


class Command:
    """`python -m realign` in a forked process. It has the methods of `Popen` that tests use, and writes into files."""

    def __init__(self, folder: Path, *words: str, environment: Mapping[str, str] | None = None) -> None:
        self._files = tempfile.TemporaryDirectory()
        self._outputs = [Path(self._files.name, name) for name in ("stdout", "stderr")]
        for path in self._outputs:
            path.touch()
        given = dict(os.environ if environment is None else environment)
        self._process = FORKS.Process(target=_main, args=(folder, words, given, self._outputs))
        self._process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._process.join()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def output(self) -> tuple[str, str]:
        """Return what stdout and stderr have so far."""
        out, err = (path.read_text(errors="replace") for path in self._outputs)
        return out, err

    def communicate(self, timeout: float = 200) -> tuple[str, str]:
        """Return stdout and stderr of the whole command.

        Raises:
            TimeoutError: it takes longer.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(self.output())
        return self.output()


def _main(folder: Path, words: tuple[str, ...], environment: dict[str, str], outputs: list[Path]) -> None:
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ |= environment
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background inherit "ignore"
    torch.set_num_threads(1)
    sys.path.insert(0, "")
    sys.argv = ["realign", *words]
    try:
        code = cli.main()
    finally:
        # reward workers are closed at exit; multiprocessing skips exit functions, and nothing public runs them
        atexit._run_exitfuncs()
    sys.exit(code)


def python(code: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    everything = {**os.environ, "PYTHONPATH": str(CHECKOUT), **env}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, env=everything, capture_output=True, text=True, timeout=120, check=False)


def printed_without(modules: set[str], words: list[str], here) -> str:
    """Return the output of a command line. The command must not import any of the modules."""
    # after a change of its source, realign reads its classes again, for which it imports all
    class_at("realign.interfaces.grpo.GRPOActorInterface")
    code = (
        f"import sys; from realign.cli.commands import main; code = main({words!r})\n"
        f"sys.exit(code or bool({modules!r} & set(sys.modules)))"
    )
    done = python(code, here)
    assert done.returncode == 0, done.stderr
    return done.stdout


def gone(pid, within_s=60.0):
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


def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait until the condition is true. Fail if it takes longer than this."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.01)


@contextmanager
def served(server: ThreadingHTTPServer) -> Iterator[str]:
    """Run a server on loopback in a thread. Yield its URL."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
