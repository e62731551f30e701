import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realign.data import Blocks, Split, TextData
from realign.data.supervised import cut
from realign.errors import DataError, SettingsError
from tests.data.text_tokenizer import BOS, EOS, characters, make_tokenizer


@pytest.fixture
def write(tmp_path):
    def write(*texts, column="text"):
        file = tmp_path / "texts.jsonl"
        file.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
        return str(file)

    return write


def blocks(dataset):
    return [row.tolist() for row in dataset.sample([(0, i) for i in range(len(dataset))]).sequences("input_ids")]


def test_joined_texts_are_cut_every_n_tokens_and_the_rest_is_dropped(write):
    dataset = TextData(write("abc", "de", "", "fghi"), block_tokens=5).load(make_tokenizer(before=("<s>",)))
    stream = [BOS, *characters("abc"), EOS, BOS, *characters("de"), EOS, BOS, EOS, BOS, *characters("fghi"), EOS]
    assert blocks(dataset) == [stream[:5], stream[5:10], stream[10:15]]
    assert dataset.report.rows_dropped == {"blocks shorter than 5 tokens": 1}
    assert (dataset.report.tokens, dataset.report.longest) == (15, 5)


def test_texts_apart_keep_their_short_ends(write):
    path = write("abcde", "f", "")
    dataset = TextData(path, block_tokens=3, blocks=Blocks.apart).load(make_tokenizer())
    assert blocks(dataset) == [characters("abc"), [*characters("de"), EOS], [*characters("f"), EOS]]
    assert dataset.report.rows_dropped == {"blocks shorter than 2 tokens": 1}  # the EOS of the empty text
    whole = TextData(path, block_tokens=3, blocks="apart", append_eos=False).load(make_tokenizer())
    assert blocks(whole) == [characters("abc"), characters("de")]


def test_all_tokens_of_a_block_train_but_the_first(write):
    sample = TextData(write("abcdef"), block_tokens=3).load(make_tokenizer()).sample([(0, 1), (2, 0)])
    assert sample.keys == {"input_ids", "prompt_mask", "loss_mask"}
    assert sample["loss_mask"].tolist() == [False, True, True] * 2
    assert not sample["prompt_mask"].any()
    assert sample["input_ids"].tolist() == characters("defabc")


@given(st.lists(st.lists(st.integers(0, 99), max_size=9), max_size=9), st.integers(1, 6))
def test_cutting_loses_and_adds_nothing(texts, size):
    stream = [token for text in texts for token in text]
    joined = list(cut(texts, size, Blocks.joined))
    assert [token for block in joined for token in block] == stream
    assert all(len(block) == size for block in joined[:-1])
    apart = list(cut(texts, size, Blocks.apart))
    assert apart == [text[i : i + size] for text in texts for i in range(0, len(text), size)]


def test_parts_of_a_file_and_other_columns(write):
    path = write("ab", "cd", "ef", "gh", column="body")
    parts = [
        TextData(path, limit=4, split=Split(part, [1, 1]), text_column="body", block_tokens=2, append_eos=False)
        for part in (0, 1)
    ]
    found = [block for part in parts for block in blocks(part.load(make_tokenizer()))]
    assert sorted(found) == [characters(text) for text in ("ab", "cd", "ef", "gh")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_tokens": 1}, "block_tokens=1: must be at least 2"),
        ({"limit": 0}, "limit=0: must be at least 1"),
        ({"blocks": "together"}, r"blocks='together': unknown choice \(valid: joined, apart\)"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(SettingsError, match=message):
        TextData("x.jsonl", **settings)


def test_bad_rows_are_named(write):
    with pytest.raises(DataError, match=r"texts\.jsonl, line 2: the text is a int; expected a string"):
        TextData(write("a", 3)).load(make_tokenizer())
    with pytest.raises(DataError, match=r"no column 'text'; found \['txt'\]; did you mean 'txt'\?"):
        TextData(write("a", column="txt")).load(make_tokenizer())
    with pytest.raises(DataError, match=r"no row is left of .*: 0 of 1 rows"):
        TextData(write("abc")).load(make_tokenizer())
