from __future__ import annotations

import torch

from realign.environments import Episode


def rows(*values):
    return torch.tensor(values, dtype=torch.int16)[:, None].expand(-1, 2)


def test_tokens_keep_the_experts_of_the_turn_that_recorded_them_first():
    episode = Episode("a/0", torch.tensor([5, 6]))
    assert episode.all_experts() is None
    episode.say(torch.tensor([7, 8]), torch.zeros(2), torch.zeros(2))
    episode.record(rows(1, 2, 3, -1))
    episode.observe([9])
    assert episode.all_experts()[:, 0].tolist() == [1, 2, 3, -1, -1]
    episode.say(torch.tensor([4]), torch.zeros(1), torch.zeros(1))
    episode.record(rows(11, 12, 13, 14, 15, -1))
    assert episode.all_experts()[:, 0].tolist() == [1, 2, 3, 14, 15, -1]
