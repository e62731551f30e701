"""The processes that torchrun started: they meet, one of them says what is to be done, and they join for it.

They meet at the launcher's store, a small key-value server, before anything is loaded: from then on one that fails ends
all (`realign.runtime.processes.watchdog`). They join as torch's default process group once it is known how long a call
may take.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import rendezvous  # type: ignore[attr-defined]

from realign.engines.distributed.ranks import Ranks
from realign.runtime.processes.watchdog import Describe, RankWatch

START = timedelta(minutes=10)
"""How long ranks wait for each other to start; machines may come one after the other."""
MARGIN = timedelta(minutes=1)
"""How much longer a collective may wait than a call may take: the watch, which knows more, speaks first."""
GONE = timedelta(seconds=30)
"""How long rank 0 waits for the others to leave."""
PLAN = "plan"
"""Key of the store: what rank 0 says is to be done."""
ASK_S = 0.1


class Meeting:
    """The ranks of a run that have met and not joined yet.

    Attributes:
        watch: over this rank.
    """

    def __init__(self, ranks: Ranks, describe: Describe) -> None:
        self.ranks = ranks
        store, _, _ = next(rendezvous("env://", ranks.rank, ranks.size, timeout=START))
        # the store of a launcher that starts its processes again (--max-restarts) has what was said in it before
        prefix = f"realign/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        own = dist.PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
        self.watch = RankWatch(ranks, own, describe)

    def plan(self, text: str | None = None) -> str:
        """What rank 0 gives here; the others wait for it, however long it takes.

        Raises:
            SystemExit: a rank ended before.
        """
        if text is not None:
            self._store.set(PLAN, text)
            return text
        try:
            while not self._store.check([PLAN]):
                self.watch.leave_if_ended()
                time.sleep(ASK_S)
            return self._store.get(PLAN).decode()
        except RuntimeError:  # rank 0 held the store, and has left
            self.watch.leave_if_ended()
            raise

    def part(self) -> None:
        """Leave, rank 0 last, since it may hold the store."""
        if not self.ranks.leader:
            self._store.set(f"left/{self.ranks.rank}", "")
            return
        with suppress(RuntimeError):  # one that does not come ends by what keeps it
            self._store.wait([f"left/{rank}" for rank in range(1, self.ranks.size)], GONE)

    @contextmanager
    def joined(self, minutes: float) -> Iterator[None]:
        """Inside this context the ranks are torch's default process group.

        gloo where there is no CUDA device; where there is, NCCL too, and the device of the local rank is the current
        one.

        Args:
            minutes: that a call of the graph may take on any rank.

        Raises:
            ValueError: this machine has fewer devices than ranks.
        """
        timeout = timedelta(minutes=minutes) + MARGIN
        store = dist.PrefixStore("group", self._store)  # type: ignore[attr-defined]
        dist.init_process_group(
            _backend(), store=store, rank=self.ranks.rank, world_size=self.ranks.size, timeout=timeout
        )
        try:
            self.watch.limit_s = 60 * minutes
            yield
            self.ranks.barrier()  # one that fails at the very end still ends all
        finally:
            dist.destroy_process_group()


@contextmanager
def met(ranks: Ranks, describe: Describe) -> Iterator[Meeting]:
    """Inside this context the `launched` ranks know of each other, and an error of one ends all.

    Args:
        ranks: what `launched` says.
        describe: how an error is shown, by the rank that is the first to meet one.
    """
    meeting = Meeting(ranks, describe)
    with meeting.watch, meeting.watch.telling():
        yield meeting
    meeting.part()


def _backend() -> str:
    if not torch.cuda.is_available():
        return "gloo"
    local, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= devices:
        raise ValueError(
            f"rank {local} of this machine has no device, since there are {devices}: start as many processes "
            f"(--nproc-per-node={devices}), or hide the devices (CUDA_VISIBLE_DEVICES=) to train on CPUs"
        )
    torch.cuda.set_device(local)
    return "cpu:gloo,cuda:nccl"
