"""Texts have the tokens of the whole, which are divided where the model takes over."""

import warnings
from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from realign.data import PreferenceData, PromptData, SupervisedData, UnpairedData
from realign.data.unpaired import RewardedData
from realign.tokenization import Tokens
from tests.data.chat_templates import CHATML, KINDS, assistant, chat_tokenizer, user

PIECES = ["hi", "hello", "Yes", " ", "  ", "\n", "\n\n", ".", "1", "1+1", "<|im_end|>", "<think>", "be ", "~~", "||"]
PIECES += ["é", "\u0301", "🙂", "👩‍👩‍👧", "日本", "'t", "\t", "12345", "<", "▁"]
TEXT = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
PARTS = st.lists(st.tuples(TEXT, st.booleans()), min_size=1, max_size=5)


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def words_of(tokenizer, parts):
    return [tokenizer.convert_ids_to_tokens(part) for part in parts]


def slow(tokenizer):
    """Return a tokenizer without offsets."""

    def encode(texts, **_):
        return {"input_ids": [ids_of(tokenizer, text) for text in texts]}

    class Slow(SimpleNamespace):
        def __call__(self, *args, **options):
            return encode(*args, **options)

    added, unknown = tokenizer.added_tokens_decoder, tokenizer.unk_token_id
    return Slow(added_tokens_decoder=added, unk_token_id=unknown, is_fast=False, decode=tokenizer.decode)


@cache
def metaspace(scheme):
    """Return a tokenizer with a blank before each text or the first one, and an added token for unknown characters."""
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=scheme == "always")
    core.decoder = decoders.Metaspace(prepend_scheme=scheme)
    special = ["<unk>", "<|im_end|>", "<think>"]
    core.train_from_iterator(["hi hello Yes. 1+1 be don't 12345"] * 2, trainers.BpeTrainer(special_tokens=special))
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<|im_end|>")


def tokenizer_of(kind):
    return chat_tokenizer(None, kind=kind) if kind in KINDS else metaspace(kind)


@pytest.mark.parametrize("kind", [*KINDS, "always", "first"])
@given(PARTS)
def test_the_context_of_a_part_that_the_model_writes_is_that_of_generation(kind, parts):
    """And if all contexts are the beginning of the whole text's tokens, the row has exactly these."""
    tokenizer = tokenizer_of(kind)
    (divided,) = Tokens(tokenizer).divide([parts])
    (same,) = Tokens(slow(tokenizer)).divide([parts])
    ids = [i for part in divided.parts for i in part]
    whole = ids_of(tokenizer, "".join(text for text, _ in parts))
    borders = [n for n in range(1, len(parts)) if parts[n][1]]
    contexts = [ids_of(tokenizer, "".join(text for text, _ in parts[:n])) for n in borders]
    assert len(divided.parts) == len(parts)
    if all(whole[: len(context)] == context for context in contexts):
        assert ids == whole
        assert not divided.joined
        for n, context in zip(borders, contexts, strict=True):
            assert [i for part in divided.parts[:n] for i in part] == context
    elif borders:
        assert divided.joined or not parts[borders[0] - 1][0]
        first = [i for part in divided.parts[: borders[0]] for i in part]
        assert borders[0] > 1 or first == contexts[0]
    assert [i for part in same.parts for i in part] == ids


@pytest.mark.parametrize("kind", KINDS)
@given(TEXT, TEXT)
def test_the_text_of_tokens_after_others_is_the_text_that_they_came_from(kind, before, text):
    tokenizer = chat_tokenizer(None, kind=kind)
    tokens = Tokens(tokenizer)
    context = ids_of(tokenizer, before)
    if tokenizer.decode(context) != before or not context or text.startswith(("\u0301", "~~")) or "||" in before + text:
        return
    ids = tokens.encode_following(text, context[-1])
    if "~~" not in text and "▁" not in text:
        assert tokens.decode(ids, context) == text


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (["1+1=", "2"], [["▁", "1", "+", "1", "="], ["2"]]),
        (["1+1=", " Yes"], [["▁", "1", "+", "1", "="], ["▁Yes"]]),
        # generation sees the blank, after which the model writes the word without one
        (["1+1= ", "Yes"], [["▁", "1", "+", "1", "=", "▁"], ["Yes"]]),
        (["<|im_start|>", "Yes"], [["<|im_start|>"], ["▁Yes"]]),
        (["", "Yes"], [[], ["▁Yes"]]),
        (["1 ", ""], [["▁", "1", "▁"], []]),
    ],
)
def test_a_blank_is_put_before_a_text_but_not_before_its_parts(parts, expected):
    tokenizer = chat_tokenizer(None, kind="blank")
    (divided,) = Tokens(tokenizer).divide([[(text, index > 0) for index, text in enumerate(parts)]])
    assert words_of(tokenizer, divided.parts) == expected


def test_a_token_that_crosses_the_end_of_a_written_part_belongs_to_it():
    core = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2, "bc": 3}, [("b", "c")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    (divided,) = Tokens(tokenizer).divide([[("a", False), ("ab", True), ("ca", False)]])
    assert words_of(tokenizer, divided.parts) == [["a"], ["a", "bc"], ["a"]]
    assert not divided.joined


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ["1 ", "1", "\n", "hello", "<|im_end|>\n"])
def test_a_long_context_is_divided_like_a_short_one(kind, end):
    """Only its last tokens are tokenized again."""
    tokenizer = chat_tokenizer(None, kind=kind)
    tokens, before = Tokens(tokenizer), "hi hello 1+1 é\n" * 40
    for answer in ("Yes.", " Yes.", "\nYes", "12", "\u0301"):
        (divided,) = tokens.divide([[(before + end, False), (answer, True)]])
        context, whole = ids_of(tokenizer, before + end), ids_of(tokenizer, before + end + answer)
        assert divided.parts[0] == context
        if whole[: len(context)] == context:
            assert divided.parts[1] == whole[len(context) :]


ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
CONTENT = st.lists(st.sampled_from([p for p in PIECES if p.strip()]), min_size=1, max_size=4).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [ZEPHYR, MISTRAL, LLAMA2, CHATML])
@settings(deadline=None, max_examples=12)
@given(st.lists(CONTENT, min_size=4, max_size=4))
def test_each_turn_of_a_row_follows_the_context_that_generation_sees(kind, template, contents):
    tokenizer = chat_tokenizer(template, kind=kind)
    first, yes, second, no = contents
    messages = [user(first), assistant(yes), user(second), assistant(no)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (row,) = SupervisedData("rows.jsonl").encoder(tokenizer)({"messages": messages}).sequences
    whole = ids_of(tokenizer, tokenizer.apply_chat_template(messages, tokenize=False))
    contexts = [PromptData("rows.jsonl").encoder(tokenizer)({"prompt": messages[:n]}).sequences[0].ids for n in (1, 3)]
    starts = [n for n in range(1, len(row.ids)) if row.trained[n] > row.trained[n - 1]]
    assert row.ids[: starts[0]] == contexts[0]
    if all(whole[: len(context)] == context for context in contexts):
        assert [row.ids[:n] for n in starts] == contexts
        assert row.ids == whole[: len(row.ids)]
    assert row.ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("given_", "answer"), [("1+1=", "2"), ("1+1= ", "hello"), ("", "Yes"), ("hi", " é🙂")])
def test_all_kinds_of_rows_have_the_prompt_of_generation(kind, given_, answer):
    tokenizer = chat_tokenizer(None, kind=kind)
    row = {"prompt": given_, "completion": answer, "chosen": answer, "rejected": answer + ".", "label": True}
    specs = [SupervisedData("r"), PreferenceData("r"), UnpairedData("r"), RewardedData("r", label_column="label")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sequences = [spec.encoder(tokenizer)(row).sequences[0] for spec in specs]
    (sequence,) = {(tuple(s.ids), s.trained) for s in sequences}
    ids, trained = sequence
    assert list(ids[: trained.find(1)]) == ids_of(tokenizer, given_)
    assert tokenizer.decode(ids[:-1]) == given_ + answer
