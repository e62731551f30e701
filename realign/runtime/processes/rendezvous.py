"""Rendezvous of the processes that torchrun started.

The ranks connect to the launcher's store, a small key-value server, before they load anything. From then on, a failure
of one rank ends all ranks (`realign.runtime.processes.watchdog`). Rank 0 waits for all ranks, compares their
versions, and sends the config of the run. When the time limit of calls is known, the ranks join torch's default
process group.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from realign.console import write_stderr
from realign.endpoint.server import is_loopback
from realign.errors import ConfigError, TransientError
from realign.ranks import LAUNCHED, Ranks
from realign.runtime.processes.agreement import by_rank, check_same, software
from realign.runtime.processes.watchdog import Describe, RankWatch

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

START = timedelta(minutes=10)
"""Time to wait for all ranks to start. Machines may start one after the other."""
MARGIN = timedelta(minutes=1)
"""Added to the time limit of a call to get the timeout of collectives, so that the watchdog reports first."""
_GONE = timedelta(seconds=30)
"""Time that rank 0 waits for the other ranks to leave."""
TEXT = "text"
"""Key of the store: the text that rank 0 sends, see `Rendezvous.broadcast`."""
_ATTEMPT = "attempt"
"""Key of the store: a random id of this attempt of the run, the same on all ranks."""
NEARBY = timedelta(seconds=60)
"""The same for ranks at a loopback address that torchrun didn't start: all of them are on this machine."""
PATIENCE_S = 10.0
"""Seconds after which a wait for ranks is announced."""
_ASK_S = 0.1
ANSWER_S = 10.0
"""Timeout of one connection attempt, in seconds."""


class Rendezvous:
    """The ranks of a run that are connected to the store, but not to a process group.

    Attributes:
        watch: Watch of this rank.
        attempt: Random id of this attempt of the run, the same on all ranks.
    """

    def __init__(self, ranks: Ranks, describe: Describe) -> None:
        self.ranks = ranks
        store = _open_store(ranks)
        # with --max-restarts, the launcher's store still contains the keys of earlier attempts
        prefix = f"realign/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        own = dist.PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
        self.watch = RankWatch(ranks, own, describe)
        # differs between two processes that were started with the same rank, which `compare_versions` notices by it
        self._token = secrets.token_hex(8)
        # whoever comes first sets the id of the attempt, and all others read it
        self.attempt = self._store.compare_set(_ATTEMPT, "", self._token).decode()

    def compare_versions(self) -> None:
        """Publish the versions of this process. Rank 0 waits for the versions of all ranks, and compares them.

        Raises:
            ConfigError: Another process has the same rank, or versions differ between ranks.
            TransientError: A rank did not connect within `START`.
        """
        mine = json.dumps([self._token, {**software(), "WORLD_SIZE": str(self.ranks.size)}])
        if self._store.compare_set(f"versions/{self.ranks.rank}", "", mine).decode() != mine:
            raise ConfigError(
                f"RANK={self.ranks.rank}: another process has the same rank. Start the ranks with torchrun."
            )
        if self.ranks.leader:
            self._wait_for_versions()
            versions = [json.loads(self._store.get(f"versions/{rank}"))[1] for rank in range(self.ranks.size)]
            check_same(by_rank(versions))

    def _wait_for_versions(self) -> None:
        # polls instead of `store.wait`, which neither a signal nor the end of another rank could interrupt
        absent, wait = list(range(self.ranks.size)), _Wait(self.ranks)
        while absent := [rank for rank in absent if not self._store.check([f"versions/{rank}"])]:
            self.watch.exit_if_ended()
            names = f"rank {', '.join(map(str, absent))} of {self.ranks.size}"
            if wait.is_over(names):
                raise TransientError(
                    f"WORLD_SIZE={self.ranks.size}: {names} did not connect within {wait.limit}. Check the machines of "
                    f"these ranks, and restart the run with resume=auto. {wait.cure}"
                )

    def broadcast(self, text: str = "") -> str:
        """Return the text of rank 0, for which the other ranks wait without a timeout.

        Raises:
            SystemExit: A rank exited before.
            TransientError: Rank 0 was lost.
        """
        if self.ranks.leader:
            self._store.set(TEXT, text)
            return text
        try:
            while not self._store.check([TEXT]):
                self.watch.exit_if_ended()
                time.sleep(_ASK_S)
            return self._store.get(TEXT).decode()
        except RuntimeError as error:  # rank 0 hosted the store, and has left
            self.watch.exit_if_ended()
            raise TransientError(
                f"rank {self.ranks.rank} of {self.ranks.size} lost rank 0 before the run started ({error}). Restart "
                "the run with resume=auto."
            ) from error

    def disconnect(self) -> None:
        """Leave the store. Rank 0 leaves last, because it may host the store."""
        if not self.ranks.leader:
            self._store.set(f"left/{self.ranks.rank}", "")
            return
        with suppress(RuntimeError):  # a missing rank ends by its own error
            self._store.wait([f"left/{rank}" for rank in range(1, self.ranks.size)], _GONE)

    @contextmanager
    def process_group(self, minutes: float) -> Iterator[None]:
        """Join torch's default process group inside this context.

        The backend is gloo, plus NCCL for CUDA tensors if there are CUDA devices. Each rank then selects the CUDA
        device of its local rank.

        Args:
            minutes: Time limit of a call of the graph on any rank.

        Raises:
            ConfigError: This machine has fewer CUDA devices than ranks.
        """
        timeout = timedelta(minutes=minutes) + MARGIN
        store = dist.PrefixStore("group", self._store)  # type: ignore[attr-defined]
        dist.init_process_group(
            _backend(), store=store, rank=self.ranks.rank, world_size=self.ranks.size, timeout=timeout
        )
        try:
            self.watch.minutes = minutes
            yield
            self.ranks.barrier()  # a failure at the very end still ends all ranks
        finally:
            dist.destroy_process_group()


@contextmanager
def connect(ranks: Ranks, describe: Describe) -> Iterator[Rendezvous]:
    """Connect the ranks of the launcher inside this context, and compare their versions; an error of one rank ends all.

    Args:
        ranks: Result of `ranks_of_launcher`.
        describe: Formats an error. Only the first rank that fails prints it.

    Raises:
        SystemExit: A rank failed inside of the context, and has printed why.
    """
    rendezvous = Rendezvous(ranks, describe)
    try:
        with rendezvous.watch, rendezvous.watch.report_errors():
            rendezvous.compare_versions()
            yield rendezvous
    except BaseException as error:
        raise SystemExit(rendezvous.watch.code) from error
    # not after an error: then `RankWatch.__exit__` has waited for the other ranks
    rendezvous.disconnect()


def _open_store(ranks: Ranks) -> Store:
    """Connect to the launcher's store. Without a launcher that hosts a store, rank 0 hosts it."""
    host, port = os.environ["MASTER_ADDR"], _port()
    hosts = ranks.leader and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not hosts:
        _wait_for_server(host, port, ranks)
    try:
        # `wait_for_workers` would block inside of C++, without a message about the missing ranks
        options = {"is_master": hosts, "wait_for_workers": False, "multi_tenant": True}
        return dist.TCPStore(host, port, timeout=START, **options)  # type: ignore[attr-defined]
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        doing = "listen for the other ranks at" if hosts else "connect to"
        raise TransientError(
            f"rank {ranks.rank} of {ranks.size} could not {doing} MASTER_ADDR={host}, MASTER_PORT={port} ({first}). "
            "Choose a free port, and restart the run with resume=auto."
        ) from error


def _port() -> int:
    text = os.environ["MASTER_PORT"]
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise ConfigError(f"MASTER_PORT={text!r}: must be a port number. Start the run with torchrun.")
    return int(text)


def _wait_for_server(host: str, port: int, ranks: Ranks) -> None:
    """Wait until a process listens at the address. In contrast to torch, a signal can end the wait.

    Raises:
        TransientError: No process listened within `START`.
    """
    wait = _Wait(ranks)
    while True:
        try:
            socket.create_connection((host, port), timeout=ANSWER_S).close()
            return
        except OSError as error:
            if wait.is_over(f"rank 0 of {ranks.size} at MASTER_ADDR={host}, MASTER_PORT={port}"):
                raise TransientError(
                    f"rank {ranks.rank} of {ranks.size} could not connect to MASTER_ADDR={host}, MASTER_PORT={port} "
                    f"within {wait.limit} ({error}). Check that rank 0 runs, and that all ranks have its address. "
                    f"{wait.cure}"
                ) from error


class _Wait:
    """A wait for other ranks, which says what it waits for: maybe nobody has started them."""

    cure = f"If you didn't start several ranks, unset {' '.join(LAUNCHED)}."

    def __init__(self, ranks: Ranks) -> None:
        """Start to wait."""
        nearby = is_loopback(os.environ["MASTER_ADDR"]) and "TORCHELASTIC_RUN_ID" not in os.environ
        limit = NEARBY if nearby else START
        self.limit = f"{limit.total_seconds():g} seconds" if nearby else f"{limit.total_seconds() / 60:g} minutes"
        self._started = time.monotonic()
        self._seconds = limit.total_seconds()
        self._silent = os.environ.get("LOCAL_RANK", "0") == "0"

    def is_over(self, waits_for: str) -> bool:
        """Pause, and return whether the time is up. Announce a wait that takes long, once for each machine."""
        seconds = time.monotonic() - self._started
        if self._silent and seconds > PATIENCE_S:
            self._silent = False
            write_stderr(f"waiting for {waits_for}, up to {self.limit}. {self.cure}\n")
        time.sleep(_ASK_S)
        return seconds > self._seconds


def _backend() -> str:
    if not torch.cuda.is_available():
        return "gloo"
    local, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= devices:
        raise ConfigError(
            f"LOCAL_RANK={local}: this machine has only {devices} CUDA devices. Start {devices} processes "
            f"(--nproc-per-node={devices}), or set CUDA_VISIBLE_DEVICES= to train on CPUs."
        )
    torch.cuda.set_device(local)
    return "cpu:gloo,cuda:nccl"
