import pytest

from realign.data.writer import Template, Writer
from realign.errors import DataError
from realign.tokenization import Tokens, with_start
from tests.data.text_tokenizer import (
    ASSISTANT,
    BOS,
    END,
    SOP,
    THINKING,
    TURNS,
    UNK,
    USER,
    WITH_BOS,
    characters,
    make_tokenizer,
)


def ids_of(writer, value):
    written = writer.prompt(value)
    tokens = Tokens(writer.tokenizer)
    return with_start(next(tokens.encode([written.text])), [] if written.chat else tokens.start())


def pair_of(writer, *values):
    (written,) = writer.response(*values)
    assert [segment.trained for segment in written.segments] == [False, True]
    return tuple(segment.text for segment in written.segments)


@pytest.mark.parametrize(
    ("before", "after", "start"),
    [
        ((), (), []),
        (("<s>",), (), [BOS]),
        (("<s>",), ("</s>",), [BOS]),
        ((), ("</s>",), []),
        (("<unk>", "<sop>"), (), [UNK, SOP]),
    ],
)
def test_trap_a13_a_plain_prompt_starts_as_the_tokenizer_starts_a_text(before, after, start):
    tokenizer = make_tokenizer(before=before, after=after)
    assert Tokens(tokenizer).start() == start
    writer = Writer(tokenizer, prefix="q: ", suffix="=")
    assert ids_of(writer, "1+2") == start + characters("q: 1+2=")
    assert ids_of(writer, "1+2") == tokenizer("q: 1+2=")["input_ids"][: len(start) + 7]


def test_trap_a13_a_bos_written_in_the_text_is_not_doubled():
    adds = make_tokenizer(before=("<s>",))
    assert ids_of(Writer(adds, prefix="<s>"), "1") == [BOS, *characters("1")]
    adds_none = make_tokenizer()
    assert ids_of(Writer(adds_none, prefix="<s>"), "1") == [BOS, *characters("1")]


@pytest.mark.parametrize("before", [(), ("<s>",)])
@pytest.mark.parametrize(("template", "n_bos"), [(WITH_BOS, 1), (TURNS, 0)])
def test_trap_a13_a_chat_prompt_is_what_the_tokenizer_itself_makes_of_it(before, template, n_bos):
    tokenizer = make_tokenizer(before=before, chat_template=template)
    writer = Writer(tokenizer, Template.chat)
    ids = ids_of(writer, "1+2")
    messages = [{"role": "user", "content": "1+2"}]
    assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids == [BOS] * n_bos + [USER, *characters("1+2"), END, *characters("\n"), ASSISTANT]
    assert ids_of(writer, messages) == ids


def test_a_template_that_rewrites_the_prompt_is_refused():
    tokenizer = make_tokenizer(chat_template=THINKING)
    with pytest.raises(DataError, match=r"when a response follows. At character 26, .*'think '.*'3<|end|>'"):
        Writer(tokenizer, Template.chat, options={"enable_thinking": False}).response("1", "3")
    assert pair_of(Writer(tokenizer, Template.chat, options={"enable_thinking": True}), "1", "3")[1] == "3<|end|>"


@pytest.mark.parametrize(
    ("template", "value", "message"),
    [
        ("plain", None, "the prompt is None; expected a string"),
        ("plain", 3, "the prompt is 3; expected a string"),
        ("plain", [{"role": "user", "content": "x"}], "Set template=auto for a list of messages"),
        ("chat", 3, "expected a string or a list of chat messages"),
        ("chat", [], "expected a string or a list of chat messages"),
        ("chat", ["x"], "lacks 'role' or 'content'"),
        ("chat", [{"role": "user", "text": "x"}], "lacks 'role' or 'content'"),
    ],
)
def test_a_prompt_of_the_wrong_kind_is_shown(template, value, message):
    writer = Writer(make_tokenizer(chat_template=TURNS), Template(template))
    with pytest.raises(DataError, match=message):
        writer.prompt(value)
