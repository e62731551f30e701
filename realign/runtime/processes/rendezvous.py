"""Rendezvous of the processes that torchrun started.

The ranks connect to the launcher's store, a small key-value server, before they load anything. From then on, a failure
of one rank ends all ranks (`realign.runtime.processes.rank_watchdog`). Rank 0 publishes the plan of the run. When the
time limit of calls is known, the ranks join torch's default process group.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import rendezvous  # type: ignore[attr-defined]

from realign.engines.distributed.ranks import Ranks
from realign.errors import ConfigError, TransientError
from realign.runtime.processes.rank_watchdog import Describe, RankWatch

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

START = timedelta(minutes=10)
"""Time to wait for all ranks to start. Machines may start one after the other."""
MARGIN = timedelta(minutes=1)
"""Added to the time limit of a call to get the timeout of collectives, so that the watchdog reports first."""
GONE = timedelta(seconds=30)
"""Time that rank 0 waits for the other ranks to leave."""
PLAN = "plan"
"""Key of the store: the plan of rank 0."""
ASK_S = 0.1


class Meeting:
    """The ranks of a run that are connected to the store, but not to a process group.

    Attributes:
        watch: Watchdog of this rank.
    """

    def __init__(self, ranks: Ranks, describe: Describe) -> None:
        self.ranks = ranks
        store = _connected(ranks)
        # with --max-restarts, the launcher's store still contains the keys of earlier attempts
        prefix = f"realign/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        own = dist.PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
        self.watch = RankWatch(ranks, own, describe)

    def plan(self, text: str | None = None) -> str:
        """Publish the plan on rank 0, or wait for it on the other ranks without a timeout.

        Raises:
            SystemExit: A rank exited before.
            TransientError: Rank 0 was lost.
        """
        if text is not None:
            self._store.set(PLAN, text)
            return text
        try:
            while not self._store.check([PLAN]):
                self.watch.leave_if_ended()
                time.sleep(ASK_S)
            return self._store.get(PLAN).decode()
        except RuntimeError as error:  # rank 0 hosted the store, and has left
            self.watch.leave_if_ended()
            raise TransientError(
                f"rank {self.ranks.rank} of {self.ranks.size} lost rank 0 before the run started ({error}). Restart "
                "the run with resume=auto."
            ) from error

    def part(self) -> None:
        """Leave the store. Rank 0 leaves last, because it may host the store."""
        if not self.ranks.leader:
            self._store.set(f"left/{self.ranks.rank}", "")
            return
        with suppress(RuntimeError):  # a missing rank ends by its own error
            self._store.wait([f"left/{rank}" for rank in range(1, self.ranks.size)], GONE)

    @contextmanager
    def joined(self, minutes: float) -> Iterator[None]:
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
            self.watch.report_s = self.watch.limit_s = 60 * minutes
            yield
            self.ranks.barrier()  # a failure at the very end still ends all ranks
        finally:
            dist.destroy_process_group()


@contextmanager
def met(ranks: Ranks, describe: Describe) -> Iterator[Meeting]:
    """Connect the `launched` ranks inside this context; an error of one rank ends all of them.

    Args:
        ranks: Result of `launched`.
        describe: Formats an error. Only the first rank that fails prints it.
    """
    meeting = Meeting(ranks, describe)
    with meeting.watch, meeting.watch.telling():
        yield meeting
    meeting.part()


def _connected(ranks: Ranks) -> Store:
    """Connect to the launcher's store, and wait until all ranks are connected."""
    try:
        store, _, _ = next(rendezvous("env://", ranks.rank, ranks.size, timeout=START))
    except ValueError as error:  # an environment variable is missing
        raise ConfigError(f"WORLD_SIZE={ranks.size}: {error}. Start the ranks with torchrun.") from error
    except RuntimeError as error:
        raise TransientError(
            f"rank {ranks.rank} of {ranks.size} could not connect to the other ranks ({str(error).splitlines()[0]}). "
            "Check that all ranks run with the same MASTER_ADDR and MASTER_PORT."
        ) from error
    return store


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
