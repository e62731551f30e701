import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realign.data import Blocks, SupervisedData, Template, TextData, TooLong
from realign.data.supervised import cut
from realign.errors import DataError
from tests.data.text_tokenizer import BOS, EOS, TURNS, WITH_BOS, characters, make_tokenizer


@pytest.fixture
def write(tmp_path):
    def write(*pairs):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in pairs))
        return str(file)

    return write


def one(dataset):
    sample = dataset.sample([(0, 0)])
    return [sample[key].tolist() for key in ("input_ids", "prompt_mask", "loss_mask")]


def test_prompt_and_response_are_joined_as_ids(write):
    data = SupervisedData(write(("1+2=", "3"), ("4", "56")))
    dataset = data.load(make_tokenizer(before=("<s>",), after=("</s>",)))
    assert dataset.keys == ("input_ids", "prompt_mask", "loss_mask")
    sample = dataset.sample([(0, 1), (0, 0)])
    assert sample.keys == set(dataset.keys)
    assert sample["input_ids"].tolist() == [BOS, *characters("456"), EOS, BOS, *characters("1+2=3"), EOS]
    assert sample["prompt_mask"].tolist() == [True, True, False, False, False] + [True] * 5 + [False, False]
    assert torch.equal(sample["loss_mask"], ~sample["prompt_mask"])
    assert sample["loss_mask"].dtype == torch.bool
    assert sample.cu_seqlens().tolist() == [0, 5, 12]


def test_no_token_spans_the_border(write):
    """The tokenizer would merge `b` and `a` into one token if they were tokenized together."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    merging = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({"a": 0, "b": 1, "ba": 2, "</s>": 3}, [("b", "a")])), eos_token="</s>"
    )
    assert merging("ba")["input_ids"] == [2]
    ids, prompt, _ = one(SupervisedData(write(("b", "a"))).load(merging))
    assert ids == [1, 0, 3]
    assert prompt == [True, False, False]


@pytest.mark.parametrize(
    ("response", "append", "expected"),
    [
        ("1", True, [*characters("1"), EOS]),
        ("1", False, characters("1")),
        ("1</s>", True, [*characters("1"), EOS]),
        ("1</s> \n", True, [*characters("1"), EOS]),
        ("1</s> \n", False, [*characters("1"), EOS, *characters(" \n")]),
        ("1</s>2", True, [*characters("1"), EOS, *characters("2"), EOS]),
        ("", True, [EOS]),
    ],
)
def test_a_response_ends_with_one_eos(write, response, append, expected):
    ids, _, _ = one(SupervisedData(write(("0", response)), append_eos=append).load(make_tokenizer()))
    assert ids == characters("0") + expected


def test_trap_a13_a_chat_row_has_one_bos_and_ends_where_the_template_ends_a_turn(write):
    tokenizer = make_tokenizer(before=("<s>",), eos="<|end|>", chat_template=WITH_BOS)
    ids, prompt, trains = one(SupervisedData(write(("1", "2")), template=Template.chat).load(tokenizer))
    assert tokenizer.decode(ids) == "<s><|user|>1<|end|>\n<|assistant|>2<|end|>"
    assert tokenizer.decode([i for i, given in zip(ids, prompt, strict=True) if given]).endswith("<|assistant|>")
    assert tokenizer.decode([i for i, on in zip(ids, trains, strict=True) if on]) == "2<|end|>"


def test_a_chat_template_whose_turns_end_otherwise_gets_the_eos_too(write):
    tokenizer = make_tokenizer(chat_template=TURNS)
    ids, _, _ = one(SupervisedData(write(("1", "2")), template=Template.chat).load(tokenizer))
    assert tokenizer.decode(ids) == "<|user|>1<|end|>\n<|assistant|>2<|end|>\n</s>"


def test_length_limits_never_cut_a_response(write):
    path = write(("12345", "6"), ("1", "23"), ("123", "456789"))
    tokenizer = make_tokenizer(before=("<s>",))
    dropped = SupervisedData(path, max_tokens=5).load(tokenizer)
    assert [len(dropped), dropped.report.rows_dropped] == [1, {"longer than max_tokens=5": 2}]
    cut = SupervisedData(path, max_tokens=5, too_long=TooLong.truncate_left).load(tokenizer)
    assert one(cut)[0] == [BOS, *characters("456"), EOS]
    assert one(cut)[1] == [True, True, True, False, False]
    assert [len(cut), cut.report.rows_truncated, cut.report.rows_dropped] == [2, 1, {"longer than max_tokens=5": 1}]
    with pytest.raises(DataError, match=r"line 1: a sequence has 8 tokens, more than max_tokens=5"):
        SupervisedData(path, max_tokens=5, too_long=TooLong.error).load(tokenizer)


def test_bad_rows_are_named_by_line(write):
    tokenizer = make_tokenizer()
    with pytest.raises(DataError, match=r"line 2: the response is 3; expected a string"):
        SupervisedData(write(("1", "2"), ("1", 3))).load(tokenizer)
    with pytest.raises(DataError, match=r"line 2: the response has no token to train on"):
        SupervisedData(write(("1", "2"), ("1", "")), append_eos=False).load(tokenizer)
    with pytest.raises(DataError, match=r"line 1: the response has no token to train on"):
        SupervisedData(write(("", "")), append_eos=True).load(tokenizer)
    with pytest.raises(DataError, match=r"no column 'answer'"):
        SupervisedData(write(("1", "2")), response_column="answer").load(tokenizer)


@pytest.fixture
def write_texts(tmp_path):
    def write_texts(*texts, column="text"):
        file = tmp_path / "texts.jsonl"
        file.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
        return str(file)

    return write_texts


def blocks(dataset):
    return [row.tolist() for row in dataset.sample([(0, i) for i in range(len(dataset))]).sequences("input_ids")]


def test_joined_texts_are_cut_every_n_tokens_and_the_rest_is_dropped(write_texts):
    dataset = TextData(write_texts("abc", "de", "", "fghi"), block_tokens=5).load(make_tokenizer(before=("<s>",)))
    stream = [BOS, *characters("abc"), EOS, BOS, *characters("de"), EOS, BOS, EOS, BOS, *characters("fghi"), EOS]
    assert blocks(dataset) == [stream[:5], stream[5:10], stream[10:15]]
    assert dataset.report.rows_dropped == {"blocks shorter than 5 tokens": 1}
    assert (dataset.report.tokens, dataset.report.longest) == (15, 5)


@given(st.lists(st.lists(st.integers(0, 99), max_size=9), max_size=9), st.integers(1, 6))
def test_cutting_loses_and_adds_nothing(texts, size):
    stream = [token for text in texts for token in text]
    joined = list(cut(texts, size, Blocks.joined))
    assert [token for block in joined for token in block] == stream
    assert all(len(block) == size for block in joined[:-1])
    apart = list(cut(texts, size, Blocks.apart))
    assert apart == [text[i : i + size] for text in texts for i in range(0, len(text), size)]


def test_bad_rows_are_named(write_texts):
    with pytest.raises(DataError, match=r"texts\.jsonl, line 2: the text is a int; expected a string"):
        TextData(write_texts("a", 3)).load(make_tokenizer())
    with pytest.raises(DataError, match=r"no column 'text'; found \['txt'\]; did you mean 'txt'\?"):
        TextData(write_texts("a", column="txt")).load(make_tokenizer())
    with pytest.raises(DataError, match=r"no row is left of .*: 0 of 1 rows"):
        TextData(write_texts("abc")).load(make_tokenizer())
