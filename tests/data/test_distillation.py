from __future__ import annotations

import json

import pytest

from realign.data import PromptData, PromptsWithResponses, SupervisedData, TextData
from realign.errors import DataError, SettingsError
from tests.data.text_tokenizer import EOS, TURNS, characters, make_tokenizer


@pytest.fixture
def write(tmp_path):
    def write(*rows):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(file)

    return write


def pairs(*texts):
    return [{"prompt": p, "response": r} for p, r in texts]


def test_prompts_come_with_the_given_sequence(write):
    path = write(*pairs(("1+2=", "3"), ("4", "56"), ("7+8=", "15")))
    data = PromptsWithResponses(SupervisedData(path)).load(make_tokenizer())
    assert data.keys == ("prompt_ids", "data_input_ids", "data_prompt_mask", "data_loss_mask")
    sample = data.sample([(0, 1), (1, 0)])
    assert sample.keys == set(data.keys)
    assert sample.ids == ("1@0", "0@1")
    assert [x.tolist() for x in sample.sequences("prompt_ids")] == [characters("4"), characters("1+2=")]
    assert [x.tolist() for x in sample.sequences("data_input_ids")] == [
        [*characters("456"), EOS],
        [*characters("1+2=3"), EOS],
    ]
    given, loss = sample.sequences("data_prompt_mask"), sample.sequences("data_loss_mask")
    assert [x.tolist() for x in given] == [[True, False, False, False], [True] * 4 + [False] * 2]
    assert [x.tolist() for x in loss] == [[False, True, True, True], [False] * 4 + [True] * 2]
    assert (len(data), data.longest_sequence, data.longest_text) == (3, 4, 7)
    assert len(data.sample([])) == 0


def test_the_prompt_of_a_conversation_ends_before_the_first_turn_of_the_assistant(write):
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    path = write({"messages": [{"role": role, "content": text} for role, text in turns]})
    tokenizer = make_tokenizer(chat_template=TURNS)
    sample = PromptsWithResponses(SupervisedData(path)).load(tokenizer).sample([(0, 0)])
    assert tokenizer.decode(sample["prompt_ids"]) == "<|user|>a<|end|>\n<|assistant|>"
    each = PromptsWithResponses(SupervisedData(path, train_on_turns="each"))
    with pytest.raises(DataError, match=r"row 0 has 2 sequences.*Set responses\.train_on_turns=all or last"):
        each.load(tokenizer)


def test_rows_without_prompt_and_other_data_are_refused(write):
    path = write(*pairs(("1", "2"), ("", "3")))
    with pytest.raises(DataError, match="row 1 has no token before its response"):
        PromptsWithResponses(SupervisedData(path)).load(make_tokenizer())
    path = write({"prompt": "1", "text": "2"})
    with pytest.raises(DataError, match=r"Use realign\.data\.SupervisedData"):
        PromptsWithResponses(PromptData(path)).load(make_tokenizer())
    with pytest.raises(DataError, match="row 0 has no token before its response"):
        PromptsWithResponses(TextData(path, block_tokens=2)).load(make_tokenizer())
    with pytest.raises(SettingsError, match=r"responses\.streaming=true"):
        PromptsWithResponses(SupervisedData(path, streaming=True, max_tokens=8))


def test_a_missing_file_is_named_by_its_key(tmp_path):
    with pytest.raises(DataError, match=r"data\.responses"):
        PromptsWithResponses(SupervisedData(str(tmp_path / "none.jsonl"))).check("data")
