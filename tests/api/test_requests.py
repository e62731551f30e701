from __future__ import annotations

from concurrent.futures import CancelledError

import pytest
import torch

from realign.api import GenerationConfig, Request
from realign.api.requests import Completion, FutureHandle, Tokens

CONFIG = GenerationConfig(n=3, max_new_tokens=6)


def completion(*ids: int, truncated: bool = False) -> Completion:
    n = len(ids)
    return Completion(torch.tensor(ids), torch.full((n,), -0.5), torch.full((n,), 4, dtype=torch.int32), truncated)


def test_the_seed_of_a_response_follows_from_seed_id_and_index():
    ids = torch.tensor([1])
    seeds = {
        Request(i, j, ids, CONFIG, seed).response_seed for i in ("a", "b", 1) for j in range(3) for seed in range(2)
    }
    assert len(seeds) == 18
    assert Request("1", 0, ids, CONFIG, 0).response_seed == Request(1, 0, ids, CONFIG, 0).response_seed
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_handle_around_a_future_shows_tokens_at_the_end():
    handle = FutureHandle(Request("a", 0, torch.tensor([1, 2]), CONFIG, 0))
    assert (handle.done, len(handle.tokens().ids)) == (False, 0)
    with pytest.raises(TimeoutError):
        handle.result(0.01)
    handle.future.set_result(completion(3))
    assert (handle.done, handle.tokens().ids.tolist(), handle.cancel()) == (True, [3], False)
    cancelled = FutureHandle(handle.request)
    assert cancelled.cancel()
    assert not cancelled.cancel()
    assert len(cancelled.tokens().ids) == 0
    with pytest.raises(CancelledError):
        cancelled.result()


def test_tokens_of_a_response_that_has_not_begun_are_empty_and_typed():
    none = Tokens.none(torch.tensor([1, 2]))
    assert (none.ids.dtype, none.logprobs.dtype, none.versions.dtype) == (torch.int64, torch.float32, torch.int32)
