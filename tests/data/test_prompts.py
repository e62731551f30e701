import json
import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.data import (
    PackedTokens,
    PromptData,
    PromptDataset,
    Template,
    TooLong,
    batch_indices,
)
from realign.data.dataset import content_hash
from realign.errors import DataError
from tests.data.text_tokenizer import BOS, TURNS, characters, make_tokenizer

ROWS = [{"prompt": "1" * n, "answer": n, "deep": {"x": [n]}} for n in (1, 2, 3, 4, 5)]


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(file)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=8), st.data())
def test_packed_tokens_give_back_any_choice_of_texts(texts, data):
    packed = PackedTokens.pack(iter(texts))
    assert len(packed) == len(texts)
    rows = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=10)) if texts else []
    ids, lengths = packed.gather(np.array(rows, dtype=np.int64))
    assert ids.dtype == torch.int64
    assert ids.tolist() == [i for row in rows for i in texts[row]]
    assert lengths.as_tuples() == tuple((len(texts[row]),) for row in rows)
    assert packed.ids.dtype == np.int32


def test_a_sample_has_the_prompts_and_their_rows(path):
    dataset = PromptData(path, suffix="=").load(make_tokenizer(before=("<s>",)))
    assert len(dataset) == 5
    assert dataset.keys == ("prompt_ids", "row")
    sample = dataset.sample([(0, 2), (7, 0)])
    assert sample.keys == set(dataset.keys)
    assert sample.ids == ("2@0", "0@7")
    first, second = sample.sequences("prompt_ids")
    assert first.tolist() == [BOS, *characters("111=")]
    assert second.tolist() == [BOS, *characters("1=")]
    assert sample.metadata["row"] == (ROWS[2], ROWS[0])


def test_the_hash_of_the_contents_is_that_of_tokens_and_rows_wherever_they_lie(path, tmp_path):
    def hash_of(rows, name="other.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return content_hash(PromptData(str(tmp_path / name)).load(make_tokenizer()))

    first = content_hash(PromptData(path).load(make_tokenizer()))
    assert first == hash_of(ROWS)
    others = [ROWS[:-1], ROWS[::-1], [row | {"answer": 7} for row in ROWS], [row | {"prompt": "2"} for row in ROWS]]
    assert len({first, *map(hash_of, others)}) == 5
    assert content_hash(object()) is content_hash(PromptData(path)) is None


def test_trap_d11_a_dataset_smaller_than_a_batch_fills_it_with_distinct_prompts(path):
    dataset = PromptData(path).load(make_tokenizer())
    sample = dataset.sample(batch_indices(len(dataset), 12, step=0, seed=3, shuffle=True))
    assert len(sample) == 12
    answers = [row["answer"] for row in sample.metadata["row"]]
    assert sorted(answers[:5]) == sorted(answers[5:10]) == [1, 2, 3, 4, 5]
    assert [len(s) for s in sample.sequences("prompt_ids")] == answers


def test_rows_over_the_limit_are_dropped_and_reported(path, caplog):
    with caplog.at_level(logging.WARNING):
        dataset = PromptData(path, max_prompt_tokens=4).load(make_tokenizer(before=("<s>",)))
    assert [row["answer"] for row in dataset.rows] == [1, 2, 3]
    assert dataset.report.rows_read == 5
    assert dataset.report.rows_kept == 3
    assert dataset.report.rows_dropped == {"longer than max_prompt_tokens=4": 2}
    assert dataset.report.tokens == 2 + 3 + 4
    assert dataset.report.longest == 4
    assert "3 of 5 rows" in caplog.text
    assert "2 dropped (longer than max_prompt_tokens=4)" in caplog.text


def test_trap_a13_truncation_keeps_the_start_token_and_the_end_of_the_prompt(path):
    data = PromptData(path, prefix="ab", max_prompt_tokens=4, too_long=TooLong.truncate_left)
    dataset = data.load(make_tokenizer(before=("<s>",)))
    sample = dataset.sample([(0, row) for row in range(5)])
    assert [s.tolist() for s in sample.sequences("prompt_ids")] == [
        [BOS, *characters("ab1")],
        [BOS, *characters("b11")],
        *[[BOS, *characters("111")]] * 3,
    ]
    assert dataset.report.rows_truncated == 4
    assert "4 truncated on the left" in str(dataset.report)


def test_bad_rows_are_named_by_line(tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "1"}\n\n{"prompt": null}\n')
    with pytest.raises(DataError, match=r"bad.jsonl, line 3: the prompt is None"):
        PromptData(str(file)).load(make_tokenizer())
    file.write_text('{"prompt": "1"}\n{"prompt": ""}\n')
    with pytest.raises(DataError, match=r"bad.jsonl, line 2: the prompt has no tokens"):
        PromptData(str(file)).load(make_tokenizer())
    assert len(PromptData(str(file)).load(make_tokenizer(before=("<s>",)))) == 2
    with pytest.raises(DataError, match=r"line 1: no column 'question'; found \['prompt'\]"):
        PromptData(str(file), prompt_column="question").load(make_tokenizer())


def test_a_column_of_messages_goes_through_the_chat_template(tmp_path):
    file = tmp_path / "chat.json"
    file.write_text(json.dumps([{"messages": [{"role": "user", "content": "1"}]}]))
    data = PromptData(str(file), prompt_column="messages", template=Template.chat)
    tokenizer = make_tokenizer(chat_template=TURNS)
    dataset = data.load(tokenizer)
    assert tokenizer.decode(dataset.sample([(0, 0)])["prompt_ids"]) == "<|user|>1<|end|>\n<|assistant|>"


def test_prompts_of_your_own_are_a_dataset():
    dataset = PromptDataset.from_ids([[1, 2], [3]], [{"answer": "a"}, {"answer": "b"}], source="mine")
    sample = dataset.sample([(0, 1), (0, 0)])
    assert sample["prompt_ids"].tolist() == [3, 1, 2]
    assert [row["answer"] for row in sample.metadata["row"]] == ["b", "a"]
    assert str(dataset.report) == "mine: 2 of 2 rows, 3 tokens, longest 2"
    for prompts, rows in (([[1]], []), ([], [])):
        with pytest.raises(DataError, match="expected one row for each prompt"):
            PromptDataset.from_ids(prompts, rows)
