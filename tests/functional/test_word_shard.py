"""Test a head whose rows several processes have; here they are threads that exchange tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from realign.functional.logprobs import LMHead, Support, WordShard, token_logprobs

N, H, V = 9, 5, 12


class Exchange:
    """Gathers the tensors of a number of threads."""

    def __init__(self, threads: int) -> None:
        self._given: list[Tensor | None] = [None] * threads
        self._barrier = threading.Barrier(threads)

    def gather(self, thread: int, x: Tensor) -> Tensor:
        self._given[thread] = x
        self._barrier.wait()
        stacked = torch.stack([x for x in self._given if x is not None])
        self._barrier.wait()  # before a thread gives its next tensor
        return stacked

    def shard(self, thread: int, rows: int) -> WordShard:
        return WordShard(
            thread * rows,
            rows,
            V,
            gather=lambda x: self.gather(thread, x),
            sum=lambda x: self.gather(thread, x).sum(0),
            complete=lambda x: self.gather(thread, x).flatten(0, 1),
        )


def in_threads(threads: int, run: Callable[[int, WordShard], Any]) -> list[Any]:
    exchange = Exchange(threads)
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda thread: run(thread, exchange.shard(thread, V // threads)), range(threads)))


def make() -> tuple[Tensor, LMHead, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*n, generator=generator, dtype=torch.float64) for n in ((N, H), (V, H), (V,)))
    bias[:4] = -torch.inf  # the first of three threads has impossible words only
    return hidden, LMHead(weight, bias, scale=0.7, softcap=None), torch.randint(4, V - 1, (N,), generator=generator)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("words", [V, V - 1])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("limited", [False, True])
def test_logprobs_entropy_and_gradients_are_those_of_all_rows_in_one_process(
    threads: int, words: int, with_entropy: bool, limited: bool
) -> None:
    hidden, head, targets = make()
    sets = [[int(target), 4, 9] if i % 2 else [] for i, target in enumerate(targets)]
    support = Support(torch.tensor([len(ids) for ids in sets]), torch.tensor([i for ids in sets for i in ids]))

    def run(head: LMHead) -> tuple[list[Tensor], list[Tensor]]:
        leaves = [hidden.clone().requires_grad_(), head.weight_VH.clone().requires_grad_()]
        used = replace(head, weight_VH=leaves[1]).first(words)
        outputs = token_logprobs(
            leaves[0],
            used,
            targets,
            temperature=0.6,
            chunk_size=4,
            with_entropy=with_entropy,
            support=support if limited else None,
        )
        values = [x for x in outputs if x is not None]
        weighted = sum((x * torch.linspace(-1, 2 + i, N, dtype=x.dtype)).sum() for i, x in enumerate(values))
        return [x.detach() for x in values], list(torch.autograd.grad(weighted, leaves))

    def of_thread(thread: int, shard: WordShard) -> tuple[list[Tensor], list[Tensor]]:
        rows = slice(shard.start, shard.start + shard.rows)
        assert head.bias_V is not None
        return run(replace(head, weight_VH=head.weight_VH[rows], bias_V=head.bias_V[rows], shard=shard))

    values, gradients = run(head)
    assert all(x.isfinite().all() for x in (*values, *gradients))
    for thread, (own_values, (hidden_gradient, weight_gradient)) in enumerate(in_threads(threads, of_thread)):
        rows = slice(thread * (V // threads), (thread + 1) * (V // threads))
        for own, value in zip(own_values, values, strict=True):
            torch.testing.assert_close(own, value)
        torch.testing.assert_close(hidden_gradient, gradients[0])
        torch.testing.assert_close(weight_gradient, gradients[1][rows])
