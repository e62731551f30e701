"""`Host`: how a network reads the values of its tensors, and how its ranks agree on numbers.

Where Python needs a value, it comes through here. Memory is measured with tensors that have shapes but no values
(`torch._subclasses.FakeTensorMode`): a subclass then answers in their place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Host:
    """Reads values of this process, and of other ranks."""

    def numbers(self, x: Tensor) -> list[float]:
        """Return the numbers of a vector; waits for its device."""
        numbers: list[float] = x.tolist()
        return numbers

    def true_indices(self, mask_T: Tensor) -> Tensor:
        """Return the indices at which a mask is true, whose number is the shape of the result."""
        return mask_T.nonzero()[:, 0]

    def digest(self, x: Tensor) -> str:
        """Return the SHA-256 of a tensor's bytes."""
        return digest(x)

    def rows_of_ranks(self, sent: Tensor, received: Tensor, rows: int) -> tuple[list[int], list[int]]:
        """Return the numbers of rows that this process sends to each rank and receives from it; waits for its device.

        Args:
            sent: [ranks, experts] rows for each expert.
            received: [ranks, experts] rows from each rank.
            rows: sum of `sent`, which needs no wait.
        """
        there, here = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        return there, here

    def most(self, n: int) -> int:
        """Return the maximum over all ranks, without waiting for their devices."""
        x = torch.tensor(n)
        torch.distributed.all_reduce(x, torch.distributed.ReduceOp.MAX)
        return int(x)

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums over all ranks, without waiting for their devices."""
        x = torch.tensor(numbers)
        torch.distributed.all_reduce(x)
        return self.numbers(x)

    def gather(self, x: Any, group: Any = None) -> list[Any]:
        """Return the values of the ranks of a group, or of all ranks, in rank order."""
        values: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(values, x, group=group)
        return values


def digest(x: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    return hashlib.sha256(x.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
