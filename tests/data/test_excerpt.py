import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from realign.data import Excerpt, PreferenceData, PromptData, SupervisedData
from realign.data.encoding import DroppedRow
from tests.data.text_tokenizer import characters, make_tokenizer


def excerpts(excerpt, *texts):
    replaced = [excerpt.replace({"prompt": text}, "prompt", make_tokenizer()) for text in texts]
    return [row["prompt"] for row in replaced if not isinstance(row, DroppedRow)]


def original(tokens, start, length, end):
    """Apply the steps of openai/lm-human-preferences to the tokens of a text. Return None if it skips the text."""
    if start is not None:
        if start not in tokens:
            return None
        following = tokens[tokens.index(start) + 1 :]
        tokens = following or tokens
    tokens = tokens[:length]
    if end is not None:
        while tokens and tokens[-1] != end:
            tokens = tokens[:-1]
        if not tokens:
            return None
    return tokens


@given(
    st.lists(st.text("ab.? ", max_size=12), min_size=1, max_size=4),
    st.sampled_from([None, ".", "?"]),
    st.integers(1, 8),
    st.sampled_from([None, ".", "a"]),
)
def test_an_excerpt_is_that_of_lm_human_preferences(texts, start, length, end):
    expected = [original(list(text), start, length, end) for text in texts]
    excerpt = Excerpt(start=start, max_tokens=length, end=end)
    assert excerpts(excerpt, *texts) == ["".join(words) for words in expected if words is not None]


def words():
    """Return a tokenizer with one token per word. Offsets exclude the preceding blank; dots are tokens alone or in
    threes."""
    vocabulary = {token: i for i, token in enumerate(["?", ".", "...", " .", "one", " two", " three", "two"])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\.\.\.| ?\.| ?[a-z]+"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?", eos_token="?")


@pytest.fixture
def path(tmp_path):
    rows = [
        {"prompt": "x.ab.c", "response": "1", "chosen": "1", "rejected": "2"},
        {"prompt": "xyz", "response": "2", "chosen": "2", "rejected": "1"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.mark.parametrize("source", [PromptData, SupervisedData, PreferenceData])
def test_prefix_and_suffix_stand_around_the_excerpt_and_left_out_rows_are_reported(path, source, caplog):
    data = source(path, prefix="q:", suffix="=", excerpt=Excerpt(start=".", end="."))
    with caplog.at_level(logging.WARNING):
        dataset = data.load(make_tokenizer())
    assert dataset.tokens.ids[:6].tolist() == characters("q:ab.=")
    assert (dataset.report.rows_read, dataset.report.rows_kept) == (2, 1)
    assert dataset.report.rows_dropped == {"without excerpt.start='.'": 1}
    assert "1 of 2 rows" in caplog.text
