from __future__ import annotations

import pytest
import torch

from realign.api import SequenceSample
from realign.interfaces.components.response_cut import ResponseCut, cut_responses
from tests.data.chat_templates import KINDS, chat_tokenizer
from tests.tiny import tiny_tokenizer

END = 13


def batch(*groups: list[tuple[list[int], list[int]]]) -> SequenceSample:
    """Return sequences given as (prompt, response) by group."""
    ids = [[prompt + response for prompt, response in group] for group in groups]
    given = [[[True] * len(p) + [False] * len(r) for p, r in group] for group in groups]
    data = SequenceSample.from_sequences([f"p{g}" for g in range(len(groups))], {"input_ids": ids})
    return data.with_tokens(prompt_mask=given).with_metadata(row=[{"n": g} for g in range(len(groups))])


def remaining(cut: ResponseCut, data: SequenceSample) -> list[list[int]]:
    return [ids.tolist() for ids in cut_responses(cut, data, tiny_tokenizer()).data.sequences()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mark", [".", "\n", "<|im_end|>"])
def test_a_mark_that_is_a_text_is_found_within_a_response(kind, mark):
    tokenizer = chat_tokenizer(None, kind=kind)
    inside = tokenizer(f"Yes{mark}", add_special_tokens=False)["input_ids"][-1]
    assert ResponseCut(texts=[mark]).ids(tokenizer) == [inside]


@pytest.mark.parametrize(
    ("after", "response", "kept"),
    [
        (0, [13, 5, 13, 6], [13]),  # the end mark stays, and later tokens are removed
        (1, [13, 5, 13, 6], [13, 5, 13]),  # a mark before `after` is an ordinary token
        (2, [13, 5, 13, 6], [13, 5, 13]),  # the mark at position 2 counts
        (3, [13, 5, 13, 6], [13, 5, 13, 6]),  # no mark from position 3 on
        (0, [5, 6, 7], [5, 6, 7]),
        (0, [5, 6, 13], [5, 6, 13]),
        (0, [], []),
        (9, [13], [13]),
        (0, [14, 13], [14]),  # either mark ends the response
    ],
)
def test_a_response_is_cut_after_its_first_mark(after, response, kept):
    prompt = [END, 4, END]  # marks in a prompt do not count, and its tokens have no position
    kept_ids = remaining(ResponseCut([END, 14], after=after), batch([(prompt, response)]))
    assert kept_ids == [prompt + kept]


def test_packed_ragged_groups_keep_their_prompts_and_places():
    """Check for each slot whether it remains, and for each response whether its text is scored."""
    data = batch([([1], [5, 13, 6]), ([1, 2], [7])], [([13], []), ([1], [13, 13, 8])], [([3, 13], [13])])
    cut = cut_responses(ResponseCut([END], after=1, penalty=-1.0), data, tiny_tokenizer())
    #                            1  5  13  6   1  2  7   13   1  13 13  8   3 13 13
    assert cut.kept_T.tolist() == [1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1]
    assert cut.judged_S.tolist() == [True, False, False, True, False]
    assert [ids.tolist() for ids in cut.data.sequences()] == [[1, 5, 13], [1, 2, 7], [13], [1, 13, 13], [3, 13, 13]]
    assert cut.data.lengths["input_ids"].counts.tolist() == [2, 2, 1]
    assert cut.data["prompt_mask"].tolist() == [1, 0, 0, 1, 1, 0, 1, 1, 0, 0, 1, 1, 0]
    assert cut.data.metadata["row"] == ({"n": 0}, {"n": 1}, {"n": 2})
    assert cut.rewards(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).tolist() == [1.0, -1.0, -1.0, 4.0, -1.0]
    dense_T = cut.dense_rewards(torch.arange(1.0, 14.0), data)
    assert dense_T.tolist() == [0, 2, 3, 0, 0, 0, 0, 0, 0, 9, 10, 0, 0, 0, 0]
