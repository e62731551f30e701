from __future__ import annotations

import pytest
import torch

from realign.engines.distributed.consistency import Facts, check_same_slices, check_same_weights, facts_of, weight_facts
from realign.errors import DataError
from realign.ranks import Ranks
from tests.tiny import random_sample


def facts(method: str = "forward", seed: int = 0, **keys: torch.Tensor) -> Facts:
    data = random_sample([[4, 2], [3]], seed=seed)
    defaults = {"loss_mask": torch.arange(9) > 2, "advantages": torch.linspace(-1, 1, 9)}
    return facts_of(method, data.with_tokens(**{**defaults, **keys}))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (facts(), ""),
        (facts("generate"), "different ids or lengths"),
        (facts_of("forward", random_sample([[4, 2], [4]])), "different ids or lengths"),
        (facts(seed=1), "different 'input_ids'"),
        (facts(loss_mask=torch.arange(9) > 3), "different 'loss_mask'"),
        (facts(advantages=torch.linspace(-1, 1, 9).flip(0)), "different 'advantages'"),
        (facts(advantages=torch.linspace(-1, 1, 9) + 1e-2), "different 'advantages'"),
        (facts(advantages=torch.linspace(-1, 1, 9) + 1e-7), ""),  # rounding differences between processors
        # the replaced value is 0
        (facts(advantages=torch.linspace(-1, 1, 9).where(torch.arange(9) != 4, torch.nan)), ""),
        (facts(advantages=torch.linspace(-1, 1, 9).where(torch.arange(9) != 3, torch.nan)), "different 'advantages'"),
        (facts(advantages=torch.arange(9)), "different 'advantages'"),
        (facts(more=torch.zeros(9)), "different ids or lengths"),
    ],
)
def test_what_differs_is_named_from_either_side(other: Facts, said: str) -> None:
    assert facts().difference(other) == said
    assert other.difference(facts()) == said


WEIGHTS = {
    "a": torch.linspace(-1, 1, 100_000),
    "steps": torch.tensor(3),
    "mask": torch.tensor([True, False]),
    "nan": torch.tensor([torch.nan]),
}


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        ({}, ""),
        ({"a": WEIGHTS["a"].where(torch.arange(100_000) != 7, 0.5)}, "a"),
        ({"a": WEIGHTS["a"].view(100, 1000)}, "a"),
        ({"steps": torch.tensor(4)}, "steps"),
        ({"mask": torch.tensor([True, True])}, "mask"),
        ({"more": torch.zeros(())}, "more"),
    ],
)
def test_weights_that_differ_between_ranks_are_named(monkeypatch, other, differs) -> None:
    for pair in ((WEIGHTS, WEIGHTS | other), (WEIGHTS | other, WEIGHTS)):
        facts = [weight_facts(weights) for weights in pair]
        monkeypatch.setattr(Ranks, "gather", lambda self, x, facts=facts: facts)
        if not differs:
            check_same_weights("actor", Ranks(1, 2), pair[1])
            continue
        message = rf"^models\.actor: weight '{differs}' of rank 1 differs from that of rank 0"
        with pytest.raises(DataError, match=message):
            check_same_weights("actor", Ranks(1, 2), pair[1])


def test_ranks_that_read_other_slices_than_their_neighbors_are_named():
    same = ({"w": "0"}, {"w": "1"}), ({"w": "1"}, {"w": "2"}), ({"w": "2"}, {"w": "0"})
    check_same_slices("actor", same)
    other = (same[0], ({"w": "9"}, {"w": "2"}), same[2])
    with pytest.raises(DataError, match=r"models\.actor: weight 'w' of rank 1 differs from that of rank 0"):
        check_same_slices("actor", other)
    with pytest.raises(DataError, match="weight 'more' of rank 0 differs from that of rank 2"):
        check_same_slices("actor", (*same[:2], ({"w": "2"}, {"w": "0", "more": "3"})))
