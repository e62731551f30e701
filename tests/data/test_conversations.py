"""Conversations as supervised data: which text is trained, and which chat templates raise an error."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realign.data import AssistantMasks, PromptData, SupervisedData, Template, TooLong, Turns
from realign.data.encoding import decode_row
from realign.data.writer import Writer
from realign.errors import DataError
from realign.tokenization import Tokens
from tests.data.chat_templates import (
    CHATML,
    GENERATION,
    LLAMA3,
    PLAIN_CHATML,
    REASONING,
    assistant,
    chat_tokenizer,
    runs,
    system,
    tool,
    user,
)
from tests.data.text_tokenizer import ASSISTANT, BOS, END, USER, WITH_BOS, characters, make_tokenizer

pytestmark = pytest.mark.usefixtures("each_kind")

TWO_TURNS = [system("be brief"), user("hello"), assistant("hi"), user("1+1="), assistant("2")]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLS = [
    user("add 1"),
    {"role": "assistant", "tool_calls": [CALL, CALL]},
    tool("1"),
    tool("one"),
    assistant("It is 1."),
]


@pytest.fixture
def load(write):
    def load(rows, chat_template=CHATML, eos="<|im_end|>", **fields):
        return SupervisedData(write(*rows), **fields).load(chat_tokenizer(chat_template, eos))

    return load


def trained(dataset, row=0):
    return [[text for text, on in sequence if on] for sequence in runs(dataset, row)]


def test_every_assistant_turn_is_trained_with_the_token_that_ends_it(load):
    assert runs(load([{"messages": TWO_TURNS}])) == [
        [
            (
                "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
                False,
            ),
            ("hi<|im_end|>", True),
            ("\n<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n", False),
            ("2<|im_end|>", True),
        ]
    ]


def test_only_the_last_turn_can_be_trained(load):
    ((before, answer),) = runs(load([{"messages": TWO_TURNS}], train_on_turns=Turns.last))
    assert answer == ("2<|im_end|>", True)
    assert before == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        "hi<|im_end|>\n<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n",
        False,
    )


def test_a_turn_with_weight_0_is_not_trained(load):
    first = [user("a"), {**assistant("b"), "weight": 0}, user("c"), {**assistant("d"), "weight": 1}]
    assert trained(load([{"messages": first}])) == [["d<|im_end|>"]]
    assert trained(load([{"messages": first}], train_on_turns=Turns.each)) == [["d<|im_end|>"]]
    with pytest.raises(DataError, match=r"line 1: message 1: weight=0\.5 puts a part of the message in the loss"):
        load([{"messages": [user("a"), {**assistant("b"), "weight": 0.5}]}])
    with pytest.raises(DataError, match="no assistant message to train on"):
        load([{"messages": [user("a"), {**assistant("b"), "weight": 0}]}])


def test_the_token_masks_by_hand(write):
    tokenizer = make_tokenizer(before=("<s>",), eos="<|end|>", chat_template=WITH_BOS)
    messages = [user("ab"), assistant(" c "), user("d"), assistant("e")]
    sample = SupervisedData(write({"messages": messages})).load(tokenizer).sample([(0, 0)])
    line = characters("\n")
    parts = [
        ([BOS, USER, *characters("ab"), END, *line, ASSISTANT], False),
        ([*characters(" c "), END], True),
        ([*line, USER, *characters("d"), END, *line, ASSISTANT], False),
        ([*characters("e"), END], True),
    ]
    assert sample["input_ids"].tolist() == [i for part, _ in parts for i in part]
    assert sample["loss_mask"].tolist() == [on for part, on in parts for _ in part]
    assert (sample["prompt_mask"] == ~sample["loss_mask"]).all()


def test_the_prompt_of_training_is_that_of_generation(write):
    tokenizer = chat_tokenizer(CHATML)
    sample = SupervisedData(write({"messages": CALLS, "tools": [ADD]})).load(tokenizer).sample([(0, 0)])
    prompt = PromptData(write({"messages": CALLS[:1], "tools": [ADD]})).load(tokenizer).sample([(0, 0)])["prompt_ids"]
    assert sample["input_ids"][: len(prompt)].tolist() == prompt.tolist()
    assert not sample["loss_mask"][: len(prompt)].any()
    assert sample["loss_mask"][len(prompt)]


SHAREGPT = [
    {"from": "system", "value": "be brief"},
    {"from": "human", "value": "hello"},
    {"from": "gpt", "value": "hi"},
    {"from": "human", "value": "1+1="},
    {"from": "gpt", "value": "2"},
]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": SHAREGPT},
        {"conversation": TWO_TURNS},
        {"messages": TWO_TURNS, "prompt": "hello", "prompt_id": 3},
    ],
)
def test_conversations_are_recognized_by_their_columns(load, row):
    assert runs(load([row])) == runs(load([{"messages": TWO_TURNS}]))


@pytest.mark.parametrize("name", ["completion", "response"])
def test_prompt_and_response_are_strings_or_message_lists(load, name):
    plain = load([{"prompt": "1+1=", name: "2"}], template=Template.plain)
    assert runs(plain) == [[("1+1=", False), ("2<|im_end|>", True)]]
    chat = [("<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n", False), ("2<|im_end|>", True)]
    for prompt, response in (
        ([user("1+1=")], "2"),
        ([user("1+1=")], [assistant("2")]),
        ("1+1=", [assistant("2")]),
    ):
        assert runs(load([{"prompt": prompt, name: response}])) == [chat]
    assert runs(load([{"prompt": "1+1=", name: "2"}], template=Template.chat)) == [chat]


def test_an_explicit_column_wins(load):
    row = {"messages": TWO_TURNS, "prompt": "x", "response": "y", "question": "q", "answer": "a", "chat": SHAREGPT}
    assert trained(load([row], messages_column="chat")) == [["hi<|im_end|>", "2<|im_end|>"]]
    assert trained(load([row], None, prompt_column="prompt")) == [["y<|im_end|>"]]
    assert runs(load([row], None, prompt_column="question", response_column="answer"))[0][0] == ("q", False)
    assert trained(load([row], None, response_column="answer")) == [["a<|im_end|>"]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"messages": TWO_TURNS, "prompt": "a", "response": "b"},
            "'messages' and 'prompt' with 'response' both fit. Set ignored_columns=.response. or",
        ),
        (
            {"messages": TWO_TURNS, "conversations": SHAREGPT},
            r"found the columns \['messages', 'conversations'\]. Set messages_column",
        ),
        (
            {"prompt": "a", "response": "b", "completion": "c"},
            r"found the columns \['completion', 'response'\]. Set response_column",
        ),
        ({"question": "a", "answer": "b"}, r"the columns \['answer', 'question'\] fit neither 'messages' nor 'prompt'"),
    ],
)
def test_columns_that_fit_several_layouts_or_none_are_an_error(write, row, message):
    data = SupervisedData(write(row))
    with pytest.raises(DataError, match=rf"line 1: .*{message}"):
        data.load(chat_tokenizer(CHATML))
    with pytest.raises(DataError, match=rf"^data: .*line 1: .*{message}"):
        data.check("data")


@pytest.mark.parametrize("written", [json.dumps(TWO_TURNS), repr(TWO_TURNS), json.dumps(SHAREGPT), repr(TWO_TURNS[1])])
def test_a_string_that_prints_messages_is_an_error(load, written):
    for row in ({"prompt": written, "response": "b"}, {"prompt": "a", "response": written}, {"messages": written}):
        with pytest.raises(DataError, match=r"is the text of chat messages: .*Store the messages as a list"):
            load([row])


def test_tools_tool_calls_and_results_are_rendered(load):
    ((before, call, between, answer),) = runs(load([{"messages": CALLS, "tools": [ADD]}]))
    assert json.dumps(ADD) in before[0]
    written = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert call == (f"{written}{written}<|im_end|>", True)
    assert between[0] == (
        "\n<|im_start|>user\n<tool_response>1</tool_response>\n<tool_response>one</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert answer == ("It is 1.<|im_end|>", True)


def test_text_after_the_end_of_the_last_turn_is_an_error(load):
    always = PLAIN_CHATML.replace("{%- if add_generation_prompt %}", "{%- if true %}")
    message = r"the chat template writes '\\n<\|im_start\|>assistant\\n' after the EOS token of the last message"
    with pytest.raises(DataError, match=message):
        load([{"messages": TWO_TURNS[:3]}], always)


def test_sharegpt_function_calls_are_tool_calls(load):
    turns = [
        {"from": "human", "value": "add 1"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "1"},
        {"from": "gpt", "value": "It is 1."},
    ]
    expected = [CALLS[0], {"role": "assistant", "tool_calls": [CALL]}, tool("1"), CALLS[-1]]
    assert runs(load([{"conversations": turns}])) == runs(load([{"messages": expected}]))


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        ({"messages": TWO_TURNS, "tools": [ADD]}, PLAIN_CHATML, "ignores the tools. .*or set tools_column=''"),
        ({"messages": CALLS}, PLAIN_CHATML, r"drops the name of a tool call of message 1 \(assistant\)"),
        (
            {"messages": [*CALLS[:2], tool("1"), assistant("It is 1.")]},
            CHATML.replace("message.role == 'tool'", "message.role == 'ipython'"),
            r"drops the content of message 2 \(tool\)",
        ),
        ({"messages": [{"role": "human", "content": "a"}, assistant("b")]}, PLAIN_CHATML, "unknown role 'human'"),
        ({"messages": [user("a"), assistant("b"), {"role": "developer", "content": "c"}]}, CHATML, "developer"),
        (
            {"messages": [user([{"type": "text", "text": "a"}][:1]), assistant("b")]},
            PLAIN_CHATML.replace("message['content']", "message['content'] | string"),
            r"prints the list of content parts of message 0 \(user\) as code",
        ),
        (
            {"messages": [user("a\nb"), assistant("c")]},
            CHATML.replace("message.content", "message.content.split()[0]"),
            "user",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, assistant("b")]}, CHATML, "Only text is supp"),
        ({"messages": [assistant("b")]}, PLAIN_CHATML, "begins with an assistant message"),
        ({"messages": [user("b")]}, CHATML, "no assistant message to train on"),
        ({"messages": []}, CHATML, "expected a list of chat messages"),
        (
            {"messages": [{"from": "bot", "value": "a"}]},
            CHATML,
            r"unknown role 'from': 'bot'; did you mean 'assistant'\? \(valid: human,",
        ),
        ({"messages": [user("a"), assistant("", function_call={"name": "f"})]}, CHATML, "outdated key 'function_call'"),
        (
            {"messages": [user("a"), assistant("", tool_calls=[{"name": "f", "arguments": {"a": 1, "b": None}}])]},
            CHATML,
            "arguments of the tool call 'f' contain null",
        ),
        ({"messages": [user("a"), assistant("", tool_calls=[{"id": 3}])]}, CHATML, "lacks 'name'"),
        ({"messages": TWO_TURNS, "tools": {"a": 1}}, CHATML, "expected a list of JSON schemas"),
        ({"prompt": "a", "response": "b", "tools": [ADD]}, None, "tools_column applies only to chat messages"),
        ({"prompt": [user("a")], "response": [user("b"), assistant("c")]}, CHATML, "must begin with the messages of"),
        ({"messages": TWO_TURNS}, None, "the tokenizer has no chat template"),
    ],
)
def test_what_a_template_does_not_render_faithfully_is_an_error(load, row, template, message):
    with pytest.raises(DataError, match=rf"line 1: .*{message}"):
        load([row], template)


THOUGHT = [
    user("1+1="),
    assistant("2", reasoning_content="one and one"),
    user("2+2="),
    assistant("4", reasoning_content="two and two"),
]
THINKS = "<think>\n{}\n</think>\n\n{}<|im_end|>"


def test_a_template_that_removes_reasoning_from_earlier_turns_is_an_error_that_says_what_helps(load):
    message = r"line 1: the chat template rewrites message 1 \(assistant\) when other messages follow it. At character"
    with pytest.raises(DataError, match=rf"{message}.*'<think>.*Set train_on_turns=each"):
        load([{"messages": THOUGHT}], REASONING)
    assert trained(load([{"messages": THOUGHT}], REASONING, train_on_turns=Turns.last)) == [
        [THINKS.format("two and two", "4")]
    ]
    dataset = load([{"messages": THOUGHT}], REASONING, train_on_turns=Turns.each)
    assert trained(dataset) == [[THINKS.format("one and one", "2")], [THINKS.format("two and two", "4")]]
    assert "one and one" not in runs(dataset)[1][0][0]
    inside = [user("a"), assistant("<think>\nb\n</think>\n\nc"), user("d"), assistant("e")]
    with pytest.raises(DataError, match=r"rewrites message 1 \(assistant\)"):
        load([{"messages": inside}], REASONING)


def test_a_prompt_may_begin_the_reasoning_and_a_template_may_move_its_whitespace(load):
    opens = PLAIN_CHATML.replace("assistant\n' }}{%- endif %}", "assistant\n<think>\n' }}{%- endif %}")
    assert opens != PLAIN_CHATML
    ((before, answer),) = runs(load([{"messages": [user("a"), assistant("<think>\nb\n</think>\n\nc")]}], opens))
    assert before[0].endswith("assistant\n<think>\n")
    assert answer == ("b\n</think>\n\nc<|im_end|>", True)
    moves = PLAIN_CHATML.replace("message['content']", "message['content'].replace('\n', '')")
    assert trained(load([{"messages": [user("a"), assistant("<think>\nb\n</think>\n\nc")]}], moves)) == [
        ["<think>b</think>c<|im_end|>"]
    ]
    drops = PLAIN_CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")
    with pytest.raises(DataError, match=r"changes or drops the content of message 1 \(assistant\)"):
        load([{"messages": [user("a"), assistant("<think>\nb\n</think>\n\nc")]}], drops)


def test_blocks_and_prefixes_give_the_same_masks(load):
    rows = [{"messages": TWO_TURNS}]
    expected = runs(load(rows, PLAIN_CHATML))
    for masks in AssistantMasks:
        assert runs(load(rows, GENERATION, assistant_masks=masks)) == expected
    last = {"assistant_masks": AssistantMasks.generation_blocks, "train_on_turns": Turns.last}
    assert trained(load(rows, GENERATION, **last)) == [["2<|im_end|>"]]


def test_an_end_of_turn_that_is_not_eos_is_warned_of_once(load):
    with pytest.warns(UserWarning, match=r"ends an assistant turn with '<\|im_end\|>', but the EOS token") as warned:
        dataset = load([{"messages": TWO_TURNS}] * 2, eos="<|endoftext|>")
    assert len(warned) == 1
    assert trained(dataset) == [["hi<|im_end|>", "2<|im_end|>\n<|endoftext|>"]]


def test_only_the_text_before_the_first_answer_is_truncated(load):
    rows = [{"messages": [user("abcdefghij"), assistant("k"), user("l"), assistant("m")]}]
    whole = load(rows)
    length = len(whole.tokens.ids)
    cut = load(rows, max_tokens=length - 3, too_long=TooLong.truncate_left)
    assert cut.tokens.ids.tolist() == whole.tokens.ids[3:].tolist()
    assert trained(cut) == trained(whole)
    with pytest.raises(DataError, match=r"no row is left of .*longer than max_tokens=5"):
        load(rows, max_tokens=5, too_long=TooLong.truncate_left)


def test_settings_of_the_template_apply_to_messages(load):
    row = {"messages": TWO_TURNS[1:]}
    assert runs(load([row], system="be brief")) == runs(load([{"messages": TWO_TURNS}]))
    with pytest.raises(DataError, match=r"the row already has a system message. Remove it, or set system=''"):
        load([{"messages": TWO_TURNS}], system="be brief")
    with pytest.raises(DataError, match="prefix and suffix need a prompt that is a string"):
        load([row], prefix="a")
    with pytest.raises(DataError, match="system applies only to chat messages, and the prompt is plain text"):
        load([{"prompt": "a", "response": "b"}], system="be brief")
    with pytest.raises(DataError, match=r"template=plain: chat messages need a chat template. Set template=auto"):
        load([row], template=Template.plain)


def prompts(write, rows, template=CHATML, **fields):
    dataset = PromptData(write(*rows), **fields).load(chat_tokenizer(template))
    return [decode_row(dataset.sample([(0, i)]), chat_tokenizer(None))[0].segments[0].text for i in range(len(rows))]


def test_messages_are_prompts_up_to_the_last_user_or_tool_message(write):
    rendered = "<|im_start|>user\nadd 1<|im_end|>\n<|im_start|>assistant\n"
    assert (
        prompts(write, [{"messages": CALLS[:1]}, {"messages": [{"from": "human", "value": "add 1"}]}]) == [rendered] * 2
    )
    assert prompts(write, [{"prompt": CALLS[:1], "messages": CALLS}]) == [rendered]
    with pytest.raises(DataError, match=r"'prompt' and 'messages' both fit.* Set prompt_column=prompt or messages_col"):
        prompts(write, [{"prompt": "add 1", "messages": TWO_TURNS}])
    (called,) = prompts(write, [{"messages": CALLS[:4], "tools": [ADD]}])
    assert called.endswith("<tool_response>one</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert '"description": "Add numbers."' in called


def test_an_answer_at_the_end_of_a_prompt_is_an_error_or_removed_on_request(write):
    row = {"messages": TWO_TURNS}
    with pytest.raises(
        DataError, match=r"line 1: the conversation ends with an assistant message.*drop_final_answer=true"
    ):
        prompts(write, [row])
    (text,) = prompts(write, [row], drop_final_answer=True)
    assert text.endswith("hi<|im_end|>\n<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n")
    dataset = PromptData(write(row), drop_final_answer=True).load(chat_tokenizer(CHATML))
    assert dataset.rows[0]["messages"][-1] == assistant("2")


STARTED = [user("1+1="), assistant("Let me think.\n<think>")]
OPEN = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\nLet me think.\n<think>"


@pytest.mark.parametrize("template", [CHATML, PLAIN_CHATML, GENERATION])
@pytest.mark.parametrize("answer", [" 2</think>2", [assistant(" 2</think>2"), user("2+2="), assistant("4")]])
@pytest.mark.parametrize("masks", AssistantMasks)
def test_the_start_of_an_answer_is_context_and_its_rest_is_trained(load, template, answer, masks):
    if masks is AssistantMasks.generation_blocks and template is not GENERATION:
        return
    for turns in Turns:
        row = {"prompt": STARTED, "completion": answer}
        shown = runs(load([row], template, assistant_masks=masks, train_on_turns=turns))
        later = [] if isinstance(answer, str) else ["4<|im_end|>"]
        first = [] if later and turns is Turns.last else [" 2</think>2<|im_end|>"]
        assert [text for sequence in shown for text, on in sequence if on] == [*first, *later]
        assert all(sequence[0][0].startswith(OPEN) for sequence in shown)
        assert not first or shown[0][0] == (OPEN, False)


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<>|\r"), min_size=1, max_size=12).filter(
    lambda text: text.strip() == text
)


@st.composite
def conversations(draw):
    messages = [system(draw(TEXT))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages += [user(draw(TEXT)), assistant(draw(TEXT))]
    return messages


@given(conversations(), st.sampled_from([CHATML, PLAIN_CHATML, LLAMA3, GENERATION]))
def test_segments_are_the_rendered_conversation_and_train_the_answers(messages, template):
    tokenizer = chat_tokenizer(template, "<|eot_id|>" if template is LLAMA3 else "<|im_end|>")
    writer = Writer(tokenizer)
    (written,) = writer.conversation(messages)
    assert written.text == tokenizer.apply_chat_template(messages, tokenize=False)
    encoder = SupervisedData("rows.jsonl").encoder(tokenizer)
    (sequence,) = encoder({"messages": messages}).sequences
    decode = Tokens(tokenizer).decode
    assert decode(sequence.ids, ()) == written.text.rstrip("\n")
    parts, current = [], []
    for place, (token, on) in enumerate(zip([*sequence.ids, 0], [*sequence.trained, 0], strict=True)):
        if on:
            current.append(token)
        elif current:
            parts.append(decode(current, sequence.ids[: place - len(current)]))
            current = []
    assert parts == [m["content"] + tokenizer.eos_token for m in messages if m["role"] == "assistant"]
