"""Start several processes of a run, with torchrun or with the same environment variables."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np

from realign.cli import commands as cli
from realign.config.files import experiments_dir
from tests.checkpoint_runs import untimed
from tests.processes import Command

CHECKOUT = experiments_dir().parent
MARK = "REALIGN_TEST_MARK"


def free_port() -> int:
    """Return a free port of this machine, below those that systems give to connections and to port 0 of other tests."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            return port


class Ranks:
    """Two ranks of `python -m realign` started without torchrun, so that each has its own exit code."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.mark = secrets.token_hex(8)
        launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        given = environment(folder, self.mark) | launched
        self.processes = [
            Command(folder, *words, environment={**given, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(2)
        ]

    def wait_for(self, path: Path, lines: int) -> None:
        """Wait until the file has this number of lines. Fail with the output of the ranks if one ends before."""
        deadline = time.monotonic() + 200
        while not path.exists() or len(path.read_bytes().splitlines()) < lines:
            assert all(process.poll() is None for process in self.processes), self.ended()
            assert time.monotonic() < deadline, self.ended(0)
            time.sleep(0.02)

    def ended(self, seconds: float = 200) -> tuple[list[int | None], list[str]]:
        """Wait for all ranks. Return their exit codes and stderr."""
        with ExitStack() as stack:
            stack.callback(end, self.mark)
            for process in self.processes:
                stack.enter_context(process)
            said = [process.communicate(timeout=seconds)[1] for process in self.processes]
        return [process.returncode for process in self.processes], said

    def succeeded(self) -> str:
        """Wait for all ranks, and fail if one does not succeed. Return the stdout of rank 0."""
        codes, said = self.ended()
        assert codes == [0, 0], said
        return self.processes[0].output()[0]


def torchrun(
    folder: Path, *words: str, options: Sequence[str] = ()
) -> tuple[subprocess.CompletedProcess[str], list[int]]:
    """Run `torchrun -m realign` with two processes. End processes that it left behind, and return their ids."""
    mark = secrets.token_hex(8)
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    done = subprocess.run(
        [*start, *options, "-m", "realign", *words],
        cwd=folder,
        env=environment(folder, mark),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done, end(mark)


def environment(folder: Path, mark: str) -> dict[str, str]:
    """Return the environment of a single-threaded process with a mark, which can import tests and modules in
    `folder`."""
    path = f"{CHECKOUT}{os.pathsep}{folder}"
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", MARK: mark}


def end(mark: str) -> list[int]:
    """End the processes with this mark, and return their ids."""
    pids: Sequence[int] = marked(mark)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return list(pids)


def marked(mark: str) -> list[int]:
    """Return the processes with this mark."""
    wanted, pids = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    pids.append(int(entry.name))
            except OSError:  # it has ended, or belongs to another user
                continue
    return pids


STEPS = 40


ARGS = (
    "--config-dir=conf",
    "experiment=bigram",
    f"steps={STEPS}",
    "data.n=6",
    "evaluation.reward._target_=tests.config_parts.CountThrees",
    "evaluation.data={_target_: tests.config_parts.Prompts, n: 3}",
    "evaluation.every_steps=7",
    "interfaces.reward._target_=slow.Slow",
    "checkpoint.every_steps=1",
)


def assert_same_as_whole(out: str) -> None:
    assert cli.main([*ARGS, "output_dir=whole"]) == 0
    for name in ("metrics", "samples", "eval_samples"):
        assert untimed(Path(out, f"{name}.jsonl")) == untimed(Path("whole", f"{name}.jsonl")), name
    actual, expected = (np.load(Path(folder, "final/actor/bigram.npz")) for folder in (out, "whole"))
    assert actual.files == expected.files
    assert all(actual[name].tobytes() == expected[name].tobytes() for name in expected.files)
