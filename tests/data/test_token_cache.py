"""Tokens of rows on disk: equal to those of the tokenizer, which is called for no row twice."""

from __future__ import annotations

import pytest

from realign.cache_folder import Cache
from realign.data import PreferenceData, PromptData, SupervisedData, UnpairedData
from realign.data.dataset import content_hash
from realign.data.encoding import RowEncoder
from realign.tokenization import Tokens
from tests.data.chat_templates import CHATML, assistant, chat_tokenizer, user
from tests.data.text_tokenizer import TURNS, WITH_BOS, make_tokenizer


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tokenized(monkeypatch):
    """Return the list of the texts of sequences that are tokenized."""
    texts, plain = [], Tokens.divide

    def counted(self, several):
        texts.extend(several)
        return plain(self, several)

    monkeypatch.setattr(Tokens, "divide", counted)
    return texts


PAIRS = [{"prompt": f"{i}+", "chosen": f"{i}", "rejected": "7"} for i in range(600)]
DATA = {
    "preferences": (PreferenceData, PAIRS),
    "rated": (PreferenceData, [{"prompt": "1", "responses": ["2", "3", "4"], "scores": [0.1, 3, 2]}]),
    "supervised": (
        SupervisedData,
        [{"prompt": "1+1=", "completion": "2"}, {"prompt": "1234567890", "completion": "2"}] * 4,
    ),
    "unpaired": (UnpairedData, [{"prompt": "1", "completion": "2", "label": i % 2 == 0} for i in range(3)]),
    "prompts": (PromptData, [{"prompt": "1+1=", "answer": {"x": [1, None, 0.5]}}, {"prompt": "2"}]),
}


@pytest.mark.parametrize("name", DATA)
def test_the_second_load_calls_the_tokenizer_for_no_row_and_has_the_same_content(name, write, tokenized):
    spec, rows = DATA[name]
    path = write(*rows)
    limit = {"max_tokens": 8} if name == "supervised" else {}  # drops rows
    plain = spec(path, **limit).load(make_tokenizer())
    tokenized.clear()
    first = spec(path, cache=True, **limit).load(make_tokenizer())
    assert tokenized
    tokenized.clear()
    second = spec(path, cache=True, **limit).load(make_tokenizer())
    assert not tokenized
    assert content_hash(plain) == content_hash(first) == content_hash(second)
    assert plain.report == first.report == second.report


def test_rows_that_are_appended_leave_the_earlier_chunks(write, tokenized):
    PreferenceData(write(*PAIRS), cache=True).load(make_tokenizer())
    tokenized.clear()
    PreferenceData(write(*PAIRS, PAIRS[0]), cache=True).load(make_tokenizer())
    assert len(tokenized) == 89 * 2  # rows 512 to 600: two sequences


@pytest.mark.parametrize(
    "change",
    [
        {"prefix": "1"},
        {"suffix": "1"},
        {"append_eos": False},
        {"max_tokens": 5},
        {"max_tokens": 4, "too_long": "truncate_left"},
        {"chosen_column": "rejected", "rejected_column": "chosen"},
        {"template": "chat"},
        {"template": "chat", "system": "1"},
        {"template": "chat", "template_options": {"bos_token": "1"}},
    ],
    ids=str,
)
def test_another_format_has_tokens_of_its_own(change, write):
    path, tokenizer = write(*PAIRS[:20]), make_tokenizer(chat_template=WITH_BOS)
    change = {"template": "plain"} | change
    PreferenceData(path, template="plain", cache=True).load(tokenizer)
    PreferenceData(path, template="chat", cache=True).load(tokenizer)
    cached = PreferenceData(path, cache=True, **change).load(tokenizer)
    assert content_hash(cached) == content_hash(PreferenceData(path, **change).load(tokenizer))


def test_another_tokenizer_or_template_has_tokens_of_its_own(write):
    path = write({"messages": [user("1"), assistant("2")]})
    hashes = set()
    for tokenizer in (
        make_tokenizer(chat_template=WITH_BOS),
        make_tokenizer(chat_template=TURNS),
        make_tokenizer(chat_template=TURNS, eos="<|end|>"),
        chat_tokenizer(CHATML),
    ):
        cached = SupervisedData(path, cache=True).load(tokenizer)
        assert content_hash(cached) == content_hash(SupervisedData(path).load(tokenizer))
        hashes.add(content_hash(cached))
    assert len(hashes) == 4


class OwnData(SupervisedData):
    """A class outside of the package, which may change between two runs."""


def test_tokens_of_a_users_class_are_not_kept(write, tokenized):
    for _ in range(2):
        tokenized.clear()
        OwnData(write({"prompt": "123 45", "completion": "2"}), cache=True).load(make_tokenizer())
        assert tokenized
    assert not Cache("tokens").folder.exists()


@pytest.mark.parametrize("at", [0, 31, 32, 100, -1])
def test_an_entry_with_a_flipped_byte_is_computed_again(at, write, tokenized):
    path = write(*PAIRS[:4])
    expected = content_hash(PreferenceData(path, cache=True).load(make_tokenizer()))
    (file,) = Cache("tokens").folder.iterdir()
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    for tokens in (True, False):
        tokenized.clear()
        assert content_hash(PreferenceData(path, cache=True).load(make_tokenizer())) == expected
        assert bool(tokenized) == tokens


def test_a_load_that_is_killed_keeps_its_complete_entries(write, tokenized, monkeypatch):
    path, encode, calls = write(*PAIRS), RowEncoder.encode, []

    def killed(self, rows):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return encode(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(RowEncoder, "encode", killed)
        with pytest.raises(KeyboardInterrupt):
            PreferenceData(path, cache=True).load(make_tokenizer())
    tokenized.clear()
    PreferenceData(path, cache=True).load(make_tokenizer())
    assert len(tokenized) == 88 * 2  # rows 512 to 599: two sequences
