from __future__ import annotations

import pytest
import torch

from realign.functional.pass_at_k import pass_at_k
from tests.formulas import by_enumeration


@pytest.mark.parametrize("n", range(1, 9))
def test_the_estimate_is_the_fraction_of_subsets_with_a_correct_response(n):
    correct = torch.arange(n + 1)
    for k in range(1, n + 1):
        expected = [by_enumeration(n, c, k) for c in range(n + 1)]
        assert pass_at_k(torch.full((n + 1,), n), correct, k).tolist() == pytest.approx(expected, abs=1e-12)


def test_a_prompt_with_too_few_responses_has_no_estimate():
    assert pass_at_k(torch.tensor([2, 4]), torch.tensor([2, 0]), 3).isnan().tolist() == [True, False]
