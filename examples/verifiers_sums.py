"""Taskset of verifiers for `adapters.py`: sums of two numbers up to 4. It runs in the environment of verifiers."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    """A sum."""

    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    """A sum to answer."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Return 1 for the right answer."""
        return float(trace.last_reply.strip() == self.data.answer)


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    """All sums of two numbers up to 4."""

    def load(self) -> Iterator[SumTask]:
        """Yield the tasks."""
        for a in range(5):
            for b in range(5):
                yield SumTask(SumData(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task)
