"""Read a row of each layout that other tools write, and rows with more than a layout reads."""

import warnings
from functools import cache

import pytest

from docs import layouts
from realign import data
from realign.config.construct import fill
from realign.data.columns import CONTEXT, IN_LOSS, MEDIA, OUTSIDE_LOSS, PARTLY_IN_LOSS
from realign.errors import DataError
from tests.data.chat_templates import CHATML, assistant, chat_tokenizer, user
from tests.data.layouts import ASK, LAYOUTS, PAIR

TEMPLATE = "{{ mark }}{{ 'thinking' if enable_thinking }}" + CHATML.replace(
    "message.content", "(message.content | join('', 'text') if message.content is not string else message.content)"
)


@cache
def tokenizer(chat):
    return chat_tokenizer(TEMPLATE if chat else None)


def texts(kind, row, *, chat=True, **settings):
    """Return the texts of a row in the short form of the table."""
    spec = fill(getattr(data, kind), {"path": "rows.jsonl", **settings}, "data")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoded = spec.encoder(tokenizer(chat))(row)
    return tuple(map(shortened, encoded.sequences))


def shortened(sequence):
    text, on = "", False
    for token, trained in zip(sequence.ids, sequence.trained, strict=True):
        text += ("[[" if trained else "]]") * (bool(trained) is not on) + tokenizer(True).decode([token])
        on = bool(trained)
    text += "]]" * on
    for role in ("user", "assistant", "system"):
        text = text.replace(f"<|im_start|>{role}\n", f"{role}:")
    for before in ("<|im_end|>", "]]", "Tools", "}"):
        text = text.replace(f"{before}\n", before)
    return text.replace("\n", "|")


@pytest.mark.parametrize("layout", LAYOUTS, ids=[f"{layout.tool}: {layout.columns}" for layout in LAYOUTS])
def test_a_row_becomes_the_text_that_its_tool_means(layout):
    expected = (layout.text,) if isinstance(layout.text, str) else layout.text
    if expected[0].startswith("error: "):
        with pytest.raises(DataError, match=expected[0].removeprefix("error: ")):
            texts(layout.data, layout.row, **layout.settings)
    else:
        assert texts(layout.data, layout.row, **layout.settings) == expected


def test_the_page_has_the_table_of_todays_layouts():
    page = layouts.PAGE.read_text(encoding="utf-8")
    assert layouts.render(page) == page, "Run `python -m docs.layouts`."


@pytest.mark.parametrize("key", [*IN_LOSS, *OUTSIDE_LOSS, *PARTLY_IN_LOSS])
def test_a_key_that_speaks_of_the_loss_excludes_a_turn_or_is_refused(key):
    trains, excludes = (0, 1) if key in OUTSIDE_LOSS else (1, 0)

    def read(value, role="assistant"):
        turns = [user("q"), assistant("a"), user("r"), assistant("b")]
        next(turn for turn in turns if turn["role"] == role)[key] = value
        return texts("SupervisedData", {"messages": turns})[0]

    assert read(None).count("[[") == 2
    for value in (0.5, [{"begin_offset": 0, "end_offset": 0, "train": False}], "no"):
        with pytest.raises(DataError, match=f"message 1: {key}="):
            read(value)
    if key in PARTLY_IN_LOSS:
        return
    for value in (excludes, bool(excludes), float(excludes)):
        assert read(value).count("[[") == 1
        assert "[[b" in read(value)
        assert read(value, role="user").count("[[") == 2
    for value in (trains, bool(trains), float(trains)):
        assert read(value).count("[[") == 2
        with pytest.raises(DataError, match=r"message 0 \(user\) has a key that includes it in the loss"):
            read(value, role="user")


def test_keys_that_contradict_each_other_are_refused():
    turn = assistant("a", weight=1, train=False)
    with pytest.raises(DataError, match=r"message 1: the keys \['weight', 'train'\] contradict each other"):
        texts("SupervisedData", {"messages": [user("q"), turn]})
    assert "[[" in texts("SupervisedData", {"messages": [user("q"), assistant("a", weight=1, masked=False)]})[0]


STRINGS = {
    "SupervisedData": {"prompt": "Ask this.", "response": "a"},
    "PreferenceData": {"prompt": "Ask this.", "chosen": "a", "rejected": "b"},
    "UnpairedData": {"prompt": "Ask this.", "completion": "a", "label": True},
    "RewardedData": {"prompt": "Ask this.", "completion": "a", "reward": 1.0},
    "PromptData": {"prompt": "Ask this."},
}
RATED = {"prompt": "Ask this.", "responses": ["a", "b"], "scores": [1, 0]}
MESSAGES = {
    "SupervisedData": {"messages": ASK},
    "PreferenceData": {"chosen": ASK, "rejected": [user("q"), assistant("b")]},
    "UnpairedData": {"messages": ASK, "label": True},
    "PromptData": {"messages": ASK[:1]},
}
FORMS = [
    *((kind, row, {"template": "plain"}) for kind, row in STRINGS.items()),
    *((kind, row, {"template": "chat"}) for kind, row in STRINGS.items()),
    *((kind, row, {}) for kind, row in MESSAGES.items()),
    ("PreferenceData", RATED, {"template": "chat"}),
    ("PreferenceData", {"chosen": "Human: q\n\nAssistant: a", "rejected": "Human: q\n\nAssistant: b"}, {}),
]


@pytest.mark.parametrize("column", CONTEXT)
@pytest.mark.parametrize(("kind", "row", "settings"), FORMS)
def test_a_column_of_the_prompt_is_in_the_text_or_the_row_is_refused(kind, row, settings, column):
    chat = "template" in settings or not any("Human:" in str(value) for value in row.values())
    value = [["PIRATE", "yes"]] if column == "history" else "PIRATE"
    plain = texts(kind, row, chat=chat, **settings)
    for empty in (None, "", " ", [], float("nan")):
        assert texts(kind, {**row, column: empty}, chat=chat, **settings) == plain
    assert texts(kind, {**row, column: value}, chat=chat, **settings, ignored_columns=[column]) == plain
    messages = kind in MESSAGES and row == MESSAGES[kind]
    if settings == {"template": "chat"} or messages:
        rendered = column.startswith("system") or (column == "history" and not messages)
    else:
        rendered = False
    if rendered:
        assert all("PIRATE" in text for text in texts(kind, {**row, column: value}, chat=chat, **settings))
    else:
        with pytest.raises(DataError, match=rf"'{column}' belongs to the prompt.*ignored_columns=\[{column}\]"):
            texts(kind, {**row, column: value}, chat=chat, **settings)


def test_a_column_that_a_setting_names_has_no_other_meaning():
    # SHP has the prompt in `history`
    row = {"history": "q", "human_ref_A": "a", "human_ref_B": "b", "labels": 1}
    fields = {"prompt_column": "history", "chosen_column": "human_ref_A", "rejected_column": "human_ref_B"}
    assert texts("PreferenceData", row, template="chat", **fields) == PAIR
    row = {"system": "q", "input": "a"}
    fields = {"prompt_column": "system", "response_column": "input"}
    assert texts("SupervisedData", row, template="chat", **fields) == PAIR[:1]
    with pytest.raises(DataError, match="'history' belongs to the prompt"):
        texts("PromptData", {"prompt": "q", "history": "no list"}, template="chat")


def test_columns_with_one_meaning_and_settings_beside_columns_are_named():
    with pytest.raises(DataError, match=r"\['system', 'system_prompt'\]. Set ignored_columns"):
        texts("PromptData", {"prompt": [user("q")], "system": "s", "system_prompt": "t"})
    with pytest.raises(DataError, match="already has a system message"):
        texts("PromptData", {"prompt": [user("q")], "system": "s"}, system="t")
    with pytest.raises(DataError, match=r"\['prompt', 'query'\]. Set prompt_column"):
        texts("PromptData", {"prompt": [user("q")], "query": "t"})
    assert texts("PromptData", {"prompt": "q", "query": "t"}, prompt_column="query", template="plain") == ("t",)
    # Magpie has the same twice, and HuggingFaceH4's ultrafeedback_binarized three times
    twice = {"instruction": "q", "response": "a", "conversations": ASK}
    assert texts("SupervisedData", twice) == PAIR[:1]
    with pytest.raises(DataError, match="both fit"):
        texts("SupervisedData", {**twice, "response": "other"})


@pytest.mark.parametrize("key", MEDIA)
def test_media_in_a_message_is_refused(key):
    with pytest.raises(DataError, match=f"a message has the key '{key}'"):
        texts("PromptData", {"messages": [{**user("q"), key: ["a.png"]}]})
    assert texts("PromptData", {"messages": [{**user("q"), key: []}]})


@pytest.mark.parametrize(
    ("role", "near"),
    [("model", "assistant"), ("User", "user"), ("Assistant", "assistant"), ("human", "user"), ("narrator", "")],
)
def test_an_unknown_role_is_named_before_a_missing_answer(role, near):
    hint = f"; did you mean '{near}'" if near else " "
    for turns in ([user("q"), {"role": role, "content": "a"}], [{"role": role, "content": "a"}]):
        with pytest.raises(DataError, match=f"unknown role '{role}'{hint}"):
            texts("SupervisedData", {"messages": turns})
        with pytest.raises(DataError, match=f"unknown role '{role}'{hint}"):
            texts("PromptData", {"messages": turns})


ALONE = {"SupervisedData": "response", "UnpairedData": "completion", "RewardedData": "completion"}


@pytest.mark.parametrize("settings", [{"template": "plain"}, {"template": "chat"}])
@pytest.mark.parametrize("kind", [*ALONE, "PreferenceData", "rated"])
def test_a_response_that_repeats_its_prompt_is_refused_or_read_as_a_setting_says(kind, settings):
    data_class = "PreferenceData" if kind == "rated" else kind

    def row(chosen, rejected):
        if kind == "rated":
            return {**RATED, "responses": [chosen, rejected]}
        if kind == "PreferenceData":
            return {**STRINGS[kind], "chosen": chosen, "rejected": rejected}
        return {**STRINGS[kind], ALONE[kind]: chosen}

    repeated = row("Ask this. a", "Ask this. b")
    right = texts(data_class, row(" a", " b"), **settings)
    for wrong in (repeated, row("Human: Ask this.\n\nAssistant: a", "b"), row("<|im_start|>user\nAsk this.\na", "b")):
        with pytest.raises(DataError, match=r"the response repeats the prompt: .*repeated_prompt=remove"):
            texts(data_class, wrong, **settings)
    assert texts(data_class, repeated, **settings, repeated_prompt="remove") == right
    assert "Ask this. a" in texts(data_class, repeated, **settings, repeated_prompt="keep")[0].partition("[[")[2]
    # an answer that happens to begin with a short prompt, or quotes it later, is none
    for answer in ("You said: Ask this. a", "Ask this."):
        assert texts(data_class, row(answer, "b"), **settings)
    if kind in ALONE:
        assert texts(data_class, {**STRINGS[kind], "prompt": "Hi!", ALONE[kind]: "Hi! How are you?"}, **settings)


@pytest.mark.parametrize("prompt", ["q", [user("q")], [{"from": "human", "value": "q"}]])
def test_messages_of_a_response_may_begin_with_the_prompt(prompt):
    whole = [user("q"), assistant("a")]
    assert texts("SupervisedData", {"prompt": prompt, "response": whole}) == PAIR[:1]
    assert texts("UnpairedData", {"prompt": prompt, "completion": whole, "label": 1}) == PAIR[:1]
    rated = {"prompt": prompt, "responses": [whole, [user("q"), assistant("b")]], "scores": [1, 0]}
    assert texts("PreferenceData", rated) == PAIR
    with pytest.raises(DataError, match="begin with"):
        texts("SupervisedData", {"prompt": [user("other")], "response": whole})


def test_the_history_is_learned_only_where_its_tools_learn_it():
    row = {"query": "r", "history": [["q", "a"]]}
    pair = texts("PreferenceData", {**row, "response": "b", "rejected_response": "c"}, template="chat")
    assert pair[0] == "user:q<|im_end|>assistant:a<|im_end|>user:r<|im_end|>assistant:[[b<|im_end|>]]"
    last = texts("SupervisedData", {**row, "response": "b"}, template="chat", train_on_turns="last")
    assert last == pair[:1]
    each = texts("SupervisedData", {**row, "response": "b"}, template="chat", train_on_turns="each")
    assert each == (PAIR[0], pair[0])
    with pytest.raises(DataError, match="the history contains 'q'; expected pairs"):
        texts("PromptData", {"query": "r", "history": ["q", "a"]}, template="chat")


def test_variables_of_the_template_come_from_the_row_unless_a_setting_names_them():
    row = {"messages": ASK, "chat_template_kwargs": {"mark": "row "}}
    assert texts("SupervisedData", row)[0].startswith("row user:")
    assert texts("SupervisedData", row, template_options={"mark": "set "})[0].startswith("set user:")
    assert texts("SupervisedData", row, ignored_columns=["chat_template_kwargs"]) == PAIR[:1]


def test_the_reward_function_sees_ignored_columns():
    spec = data.PromptData("rows.jsonl", ignored_columns=["system"])
    row = {"prompt": [user("q")], "system": "s"}
    assert spec.encoder(tokenizer(True))(row).row == row


@pytest.mark.parametrize(("kind", "row"), [*STRINGS.items(), ("PreferenceData", RATED)])
def test_a_string_prompt_of_a_chat_model_is_not_guessed(kind, row):
    wrapped = r"<\|im_start\|>user\\n.*Ask this\.<\|im_end\|>\\n<\|im_start\|>assistant\\n"
    with pytest.raises(DataError, match=rf"data.template=chat for '{wrapped}' or data.template=plain for 'Ask this\.'"):
        texts(kind, row)
    with pytest.raises(DataError, match=r"data\.template=plain for '>Ask this\.<'"):
        texts(kind, row, prefix=">", suffix="<")
    assert "user:" in texts(kind, row, template="chat")[0]
    assert texts(kind, row, template="plain") == texts(kind, row, chat=False)
    assert "user:" not in texts(kind, row, template="plain")[0]


def test_the_check_says_what_the_columns_of_the_first_row_are(write):
    row = {"instruction": "q", "input": "c", "output": "a", "system": "s", "id": 3, "history": []}
    spec = data.SupervisedData(write(row))
    assert spec.describe_columns() == (
        "prompt: instruction, response: output; with it: system, input; other columns: id, history"
    )
    spec = data.PromptData(write({"messages": ASK[:1], "tools": [], "enable_thinking": False}), ignored_columns=["x"])
    assert spec.describe_columns() == "messages: messages; with it: enable_thinking; other columns: tools"
