"""Rows are converted one by one, wherever they come from."""

from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerBase

from realign.data import Excerpt, PreferenceData, PromptData, SupervisedData, TooLong, UnpairedData
from realign.data.encoding import DroppedRow
from realign.errors import DataError
from tests.data.text_tokenizer import BOS, EOS, characters, make_tokenizer


def test_a_row_is_converted_without_a_file():
    tokenizer = make_tokenizer(before=("<s>",))
    row = {"prompt": "1+", "response": "2", "chosen": "2", "rejected": "3", "label": True}
    (sequence,) = SupervisedData("none.jsonl").encoder(tokenizer)(row).sequences
    assert sequence.ids == [BOS, *characters("1+2"), EOS]
    assert sequence.trained == bytes([0, 0, 0, 1, 1])
    assert (sequence.prompt, sequence.start) == (3, 1)
    pair = PreferenceData("none.jsonl").encoder(tokenizer)(row)
    assert [s.ids[3:-1] for s in pair.sequences] == [characters("2"), characters("3")]
    assert (pair.labels, pair.margins, pair.row) == ((1, 0), (0, 0), row)
    assert UnpairedData("none.jsonl").encoder(tokenizer)(row).labels == (1,)
    (prompt,) = PromptData("none.jsonl").encoder(tokenizer)(row).sequences
    assert (prompt.ids, prompt.prompt) == ([BOS, *characters("1+")], 3)


def test_a_row_that_is_left_out_says_why():
    tokenizer = make_tokenizer()
    row = {"prompt": "123", "chosen": "4", "rejected": "4"}
    assert PromptData("none.jsonl", max_prompt_tokens=2).encoder(tokenizer)(row) == DroppedRow(
        "longer than max_prompt_tokens=2"
    )
    assert PreferenceData("none.jsonl").encoder(tokenizer)(row) == DroppedRow("chosen equals rejected")
    excerpt = Excerpt(start=".")
    assert PromptData("none.jsonl", excerpt=excerpt).encoder(tokenizer)(row) == DroppedRow("without excerpt.start='.'")


@pytest.fixture
def tokenized(monkeypatch):
    """The lengths of the texts that a tokenizer gets."""
    lengths: list[int] = []
    call = PreTrainedTokenizerBase.__call__

    def counting(self, text, **options):
        lengths.extend([len(text)] if isinstance(text, str) else map(len, text))
        return call(self, text, **options)

    monkeypatch.setattr(PreTrainedTokenizerBase, "__call__", counting)
    return lengths


HUGE = "1+" * 5_000_000


@pytest.mark.parametrize(
    ("data", "row"),
    [
        (PromptData("none.jsonl", max_prompt_tokens=100), {"prompt": HUGE}),
        (SupervisedData("none.jsonl", max_tokens=100), {"prompt": "1", "response": HUGE}),
        (
            SupervisedData("none.jsonl", max_tokens=100, too_long=TooLong.truncate_left),
            {"prompt": "1", "response": HUGE},
        ),
        (PreferenceData("none.jsonl", max_tokens=100), {"prompt": "1", "chosen": "2", "rejected": HUGE}),
    ],
)
def test_a_row_of_10_mb_is_dropped_before_all_of_it_is_tokenized(data, row, tokenized):
    limit = data.length_limit()
    assert data.encoder(make_tokenizer())(row) == DroppedRow(f"longer than {limit.setting}=100")
    assert sum(tokenized) < 20_000
    with pytest.raises(DataError, match=rf"far too many tokens, more than {limit.setting}=100"):
        replace(data, too_long=TooLong.error).encoder(make_tokenizer())(row)


@pytest.mark.parametrize("rest", ["", "3"])
def test_a_prompt_of_10_mb_keeps_the_end_that_fits(rest, tokenized):
    tokenizer, text = make_tokenizer(before=("<s>",)), HUGE + "12345"
    if rest:
        data = SupervisedData("none.jsonl", max_tokens=100, too_long=TooLong.truncate_left)
    else:
        data = PromptData("none.jsonl", max_prompt_tokens=100, too_long=TooLong.truncate_left)
    row = data.encoder(tokenizer)({"prompt": text, "response": rest})
    kept = 98 - len(rest) if rest else 99
    ending = [*characters(rest), EOS] if rest else []
    assert row.truncated
    assert row.sequences[0].ids == [BOS, *characters(text[-kept:]), *ending]
    assert sum(tokenized) < 20_000
