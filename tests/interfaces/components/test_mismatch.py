from __future__ import annotations

import numpy as np
import pytest
import torch

from realign.api import MicroBatchSpec, Model, SequenceSample
from realign.interfaces.components.mismatch import mismatched, response_logprobs
from realign.testing import BigramEngine, random_preferences


def test_every_prompt_gets_the_response_of_another_prompt_and_every_response_is_used_once():
    ids = [[[10 * i + 1, 10 * i + 2, 10 * i + 3]] for i in range(6)]
    data = SequenceSample.from_sequences("abcdef", {"input_ids": ids})
    first = torch.tensor([True, False, False] * 6)
    data = data.with_tokens(prompt_mask=first, loss_mask=torch.tensor([False, False, True] * 6))
    other = mismatched(data)
    assert other.ids == data.ids
    found = other.sequences("input_ids")
    assert [int(x[0]) for x in found] == [1, 11, 21, 31, 41, 51]
    answers = [x[1:].tolist() for x in found]
    assert sorted(answers) == [[10 * i + 2, 10 * i + 3] for i in range(6)]
    assert all(answer[0] // 10 != i for i, answer in enumerate(answers))
    assert other["loss_mask"].tolist() == data["loss_mask"].tolist()


def test_mismatched_pairs_do_not_depend_on_the_order_of_the_batch():
    data = random_preferences(3, n_prompts=6)
    order = np.random.default_rng(0).permutation(6)
    expected, found = mismatched(data).take(order), mismatched(data.take(order))
    assert found.ids == expected.ids
    assert found.lengths["input_ids"] == expected.lengths["input_ids"]
    for key in ("input_ids", "loss_mask"):
        assert torch.equal(found[key], expected[key])


def test_several_responses_follow_the_next_prompt_and_are_cut_to_the_longest_sequence():
    ids = {"input_ids": [[[1, 2, 3, 4, 5, 6], [1, 7]], [[11, 12, 13, 14]]]}
    data = SequenceSample.from_sequences("ab", ids)
    given = torch.tensor([True] * 4 + [False] * 2 + [True, False] + [True] + [False] * 3)
    other = mismatched(data.with_tokens(prompt_mask=given, loss_mask=~given))
    rows = [x.tolist() for x in other.sequences("input_ids")]
    assert rows == [[1, 2, 3, 4, 12, 13], [1, 12, 13, 14], [11, 5, 6]]
    assert [x.sum().item() for x in other.sequences("loss_mask")] == [2, 3, 2]


def test_one_prompt_has_no_other():
    data = random_preferences().take([0])
    other = mismatched(data)
    assert not other["loss_mask"].any()
    assert other.lengths["loss_mask"] == data.lengths["loss_mask"]


def test_response_logprobs_are_sums_over_the_trained_tokens():
    engine, data = BigramEngine(), random_preferences(2)
    found = response_logprobs(Model("actor", engine), data, MicroBatchSpec(n_microbatches=2), 0.7)
    logp_VV = (engine.logits_VV / 0.7).log_softmax(-1)
    rows = zip(data.sequences("input_ids"), data.sequences("loss_mask"), strict=True)
    expected = [sum(float(logp_VV[x[t - 1], x[t]]) for t in range(1, len(x)) if m[t]) for x, m in rows]
    assert found.tolist() == pytest.approx(expected, rel=1e-10)
