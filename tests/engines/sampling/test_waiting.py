from typing import Any

import pytest
import torch
from torch import Tensor

from realign.engines.sampling import waiting
from realign.engines.sampling.waiting import WaitingQueue


class CountingDecoder:
    """The state of a text is its first token; records the texts of each prefill."""

    reads_rows = False
    record_width = 0
    chosen_NW = torch.empty(0, 0)

    def __init__(self) -> None:
        self.passes: list[list[int]] = []

    def prefill(self, texts: Any) -> tuple[Tensor, list[Any]]:
        self.passes.append([int(text[0]) for text in texts])
        return torch.zeros(len(texts), 2), self.passes[-1]


def queue_of(*lengths: int, n: int = 2) -> WaitingQueue:
    queue = WaitingQueue()
    for i, length in enumerate(lengths):
        rows = torch.arange(i * n, (i + 1) * n)
        queue.add(torch.full((length,), i), rows, rows + 100)
    return queue


def begun(queue: WaitingQueue, most: int) -> tuple[Any, int, list[int], list[int]]:
    found = queue.begin(most)
    assert found is not None
    return found.read.state, found.length, found.sequences.tolist(), found.keys.tolist()


def test_responses_begin_in_order_and_a_group_can_begin_in_parts() -> None:
    queue, decoder = queue_of(3, 4, n=3), CountingDecoder()
    assert queue.begin(4) is None
    queue.prefill(decoder, 6)  # type: ignore[arg-type]
    assert queue.prefilled_state() == 0
    assert begun(queue, 2) == (0, 3, [0, 1], [100, 101])
    assert begun(queue, 2) == (0, 3, [2], [102])
    assert len(queue) == 3
    assert begun(queue, 9) == (1, 4, [3, 4, 5], [103, 104, 105])
    assert queue.begin(1) is None
    assert len(queue) == 0


def test_a_prefill_reads_only_the_wanted_prompts_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PREFILL_TOKENS", 7)
    queue, decoder = queue_of(9, 3, 4, 5), CountingDecoder()
    for wanted in (1, 3, 8, 8, 8):
        queue.prefill(decoder, wanted)  # type: ignore[arg-type]
    assert decoder.passes == [[0], [1], [2], [3]]
    queue.forget_prefills()
    assert queue.begin(1) is None


def test_a_removed_response_does_not_begin() -> None:
    queue, decoder = queue_of(3, 3), CountingDecoder()
    queue.remove(0)
    queue.prefill(decoder, 3)  # type: ignore[arg-type]
    assert begun(queue, 2) == (0, 3, [1], [101])
    queue.remove(2)
    queue.remove(3)
    assert len(queue) == 0
    assert queue.begin(1) is None
