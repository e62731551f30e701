import json

import pytest
import torch

from realign.data import (
    PreferenceData,
    RatedPairs,
    SupervisedData,
    Template,
    TooLong,
    UnpairedData,
)
from realign.errors import DataError, SettingsError
from tests.data.chat_templates import CHATML, assistant, chat_tokenizer, runs, system, user
from tests.data.text_tokenizer import BOS, EOS, WITH_BOS, characters, make_tokenizer

pytestmark = pytest.mark.usefixtures("each_kind")


def pair(prompt="1", chosen="2", rejected="3", **more):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


def several(responses, labels, prompt="1"):
    return {"prompt": prompt, "responses": responses, "labels": labels}


def test_a_row_is_a_prompt_with_chosen_and_rejected_as_its_sequences(write):
    path = write(pair("1+", "2", "345"), pair("6", ["7", ""], ["8", "9"]))
    dataset = PreferenceData(path).load(make_tokenizer(before=("<s>",)))
    assert len(dataset) == dataset.report.rows_kept == 2
    sample = dataset.sample([(0, 1), (0, 0)])
    assert sample.keys == set(dataset.keys)
    assert sample.ids == ("1@0", "0@0")
    texts = [[BOS, *characters(text), EOS] for text in ("67", "68", "6", "69", "1+2", "1+345")]
    assert [x.tolist() for x in sample.sequences()] == texts
    assert sample.lengths["input_ids"].counts.tolist() == [4, 2]
    assert [int(x.sum()) for x in sample.sequences("prompt_mask")] == [2, 2, 2, 2, 3, 3]
    assert torch.equal(sample["loss_mask"], ~sample["prompt_mask"])
    assert sample["labels"].tolist() == [1, 0, 1, 0, 1, 0]
    assert sample["labels"].dtype == sample["margins"].dtype == torch.float32
    assert sample["margins"].tolist() == [0.0] * 6
    assert dataset.report.longest == 15  # all sequences of a row: 4 + 4 + 3 + 4


def test_trap_pairs_of_equal_responses_are_left_out_and_counted(write):
    rows = pair("1", "2", "2", better=1), pair("1", ["2", "3"], ["4", "3"], better=[1, 5]), pair("1", "", "", better=1)
    dataset = PreferenceData(write(*rows), margin_column="better").load(make_tokenizer())
    assert (dataset.report.rows_read, dataset.report.rows_dropped) == (3, {"chosen equals rejected": 2})
    sample = dataset.sample([(0, 0)])
    assert [x.tolist() for x in sample.sequences()] == [[*characters(text), EOS] for text in ("12", "14")]
    assert (sample["labels"].tolist(), sample["margins"].tolist()) == ([1, 0], [1, 1])
    with pytest.raises(DataError, match=r"no row is left of .*1 dropped \(chosen equals rejected\)"):
        PreferenceData(write(pair("1", "2", "2"))).load(make_tokenizer())


@pytest.mark.parametrize(
    ("kind", "labels"),
    [("best_of_n", [0, 1, 0, 0]), ("scalar_rating", [0.5, -2, 3, 3]), ("scalar_compare", [1, 2, 0, 0.5])],
)
def test_other_kinds_keep_the_labels_as_given(write, kind, labels):
    dataset = PreferenceData(write(several(["2", "34", "5", "6"], labels)), kind=kind).load(make_tokenizer())
    sample = dataset.sample([(3, 0)])
    assert sample["labels"].tolist() == labels
    assert [x.tolist() for x in sample.sequences()] == [[*characters(t), EOS] for t in ("12", "134", "15", "16")]


def test_each_response_is_written_as_for_sft(write):
    tokenizer = make_tokenizer(before=("<s>",), eos="<|end|>", chat_template=WITH_BOS)
    preferences = PreferenceData(write(pair("12", "3", "45")), template=Template.chat).load(tokenizer)
    sample = preferences.sample([(0, 0)])
    for s, response in enumerate(("3", "45")):
        path = write({"prompt": "12", "response": response})
        alone = SupervisedData(path, template=Template.chat).load(tokenizer).sample([(0, 0)])
        for key in ("input_ids", "prompt_mask", "loss_mask"):
            assert torch.equal(sample.sequences(key)[s], alone[key])


def test_all_responses_of_a_row_keep_the_same_part_of_the_prompt(write):
    path, tokenizer = write(pair("12345", "6", "78"), pair("1", "23", "4"), pair("1", "2", "3456789")), make_tokenizer()
    dropped = PreferenceData(path, max_tokens=5).load(tokenizer)
    assert [len(dropped), dropped.report.rows_dropped] == [1, {"longer than max_tokens=5": 2}]
    assert [x.tolist() for x in dropped.sample([(0, 0)]).sequences()] == [[*characters(t), EOS] for t in ("123", "14")]
    cut = PreferenceData(path, max_tokens=5, too_long=TooLong.truncate_left).load(tokenizer)
    assert [len(cut), cut.report.rows_truncated] == [2, 1]
    assert [x.tolist() for x in cut.sample([(0, 0)]).sequences()] == [[*characters(t), EOS] for t in ("456", "4578")]
    with pytest.raises(DataError, match="line 1: a sequence has 8 tokens, more than max_tokens=5"):
        PreferenceData(path, max_tokens=5, too_long=TooLong.error).load(tokenizer)


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("pairs", pair(rejected=["3", "4"]), r"chosen is '2' and rejected is \['3', '4'\]; expected two strings"),
        (
            "pairs",
            pair(chosen=["2"], rejected=["3", "4"]),
            "chosen and rejected must be strings, or lists of equal length",
        ),
        ("pairs", pair(chosen=[], rejected=[]), "chosen and rejected must be strings, or lists of equal length"),
        ("pairs", pair(chosen=5), "the response is 5; expected a string"),
        ("best_of_n", several(["2", "3"], [1, 1]), "kind=best_of_n needs one label 1"),
        ("best_of_n", several(["2"], [1]), "kind=best_of_n needs one label 1"),
        ("scalar_rating", several(["2", "3"], [1]), r"the labels are \[1\]; expected 2 finite numbers"),
        ("scalar_rating", several(["2"], [float("nan")]), r"the labels are \[nan\]; expected 1 finite numbers"),
        ("scalar_rating", several("23", [1, 2]), "the responses are '23'; expected a list of strings"),
        (
            "scalar_compare",
            several(["2", "3", "4"], [1, 2, 3]),
            "kind=scalar_compare needs an even number of responses, found 3",
        ),
    ],
)
def test_bad_rows_are_named_by_line(write, kind, row, message):
    good = pair() if kind == "pairs" else several(["2", "3"], [0, 1])
    with pytest.raises(DataError, match=f"line 2: .*{message}"):
        PreferenceData(write(good, row), kind=kind).load(make_tokenizer())


PROMPT = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
PAIR = [[(PROMPT, False), ("2<|im_end|>", True)], [(PROMPT, False), ("3<|im_end|>", True)]]


@pytest.fixture
def load(write):
    def load(rows, chat_template=CHATML, kind=PreferenceData, **fields):
        if '"role"' not in json.dumps(rows):
            fields = {"template": Template.plain} | fields
        return kind(write(*rows), **fields).load(chat_tokenizer(chat_template))

    return load


def answers(dataset, row=0):
    return [sequence[-1][0].removesuffix("<|im_end|>") for sequence in runs(dataset, row)]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [user("1+1=")], "chosen": [assistant("2")], "rejected": [assistant("3")]},
        {"prompt": "1+1=", "chosen": [assistant("2")], "rejected": [assistant("3")]},
        {"chosen": [user("1+1="), assistant("2")], "rejected": [user("1+1="), assistant("3")]},
        {"prompt": "1+1=", "chosen": [user("1+1="), assistant("2")], "rejected": [user("1+1="), assistant("3")]},
        {
            "prompt": [user("1+1=")],
            "chosen": [user("1+1="), assistant("2")],
            "rejected": [user("1+1="), assistant("3")],
        },
        {"prompt": [user("1+1=")], "chosen": "2", "rejected": "3"},
        {"prompt": "1+1=", "chosen": [[assistant("2")]], "rejected": [[assistant("3")]]},
        {
            "chosen": [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}],
            "rejected": [user("1+1="), assistant("3")],
        },
    ],
    ids=[
        "conversational with explicit prompt",
        "string prompt",
        "implicit prompt",
        "UltraFeedback",
        "prompt repeated in both",
        "string responses",
        "several",
        "ShareGPT",
    ],
)
def test_message_lists_are_the_same_pair_in_every_layout(load, row):
    dataset = load([row])
    assert runs(dataset) == PAIR
    assert dataset.sample([(0, 0)])["labels"].tolist() == [1, 0]


def test_the_common_start_of_both_conversations_is_the_prompt_and_is_not_trained(load):
    start = [system("be brief"), user("a"), assistant("b"), user("c")]
    chosen, rejected = [*start, assistant("d")], [*start, assistant("e"), user("f"), assistant("g")]
    first, second = runs(load([{"chosen": chosen, "rejected": rejected}]))
    assert [text for text, on in first if on] == ["d<|im_end|>"]
    assert [text for text, on in second if on] == ["e<|im_end|>", "g<|im_end|>"]
    assert first[0] == second[0]
    assert "b<|im_end|>" in first[0][0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": [user("a"), assistant("b")], "rejected": [user("c"), assistant("d")]}, "have 0 messages in common"),
        (
            {"chosen": [user("a"), assistant("b"), user("c")], "rejected": [user("a"), assistant("b"), user("d")]},
            "have 2 messages in common, after which both must continue with an assistant message",
        ),
        (
            {"prompt": [user("x")], "chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]},
            "must begin with the messages of the prompt, or with an answer",
        ),
        ({"chosen": "a", "rejected": [assistant("b")]}, "expected two strings or two lists"),
        ({"chosen": "a b", "rejected": "a c"}, r"no common '\\n\\nAssistant:'.* Set prompt_column"),
        ({"prompt": "a", "chosen": repr([assistant("b")]), "rejected": "c"}, "is the text of chat messages"),
        (
            {"prompt": "a", "chosen": "b", "rejected": {"role": "assistant", "content": "c"}},
            "expected two strings or two",
        ),
    ],
)
def test_responses_without_a_common_prompt_are_an_error(load, row, message):
    with pytest.raises(DataError, match=f"line 1: .*{message}"):
        load([row])


HH = {
    "chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d",
    "rejected": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: e",
}


def test_later_human_turns_of_a_dialogue_are_not_trained(load):
    longer = {**HH, "rejected": "\n\nHuman: a\n\nAssistant: x\n\nHuman: y\n\nAssistant: z"}
    with pytest.warns(UserWarning, match="Only the last turn of a conversation gets EOS"):
        first, second = runs(load([longer]))
    prompt = ("\n\nHuman: a\n\nAssistant:", False)
    assert first == [prompt, (" b", True), ("\n\nHuman: c\n\nAssistant:", False), (" d<|im_end|>", True)]
    assert second == [prompt, (" x", True), ("\n\nHuman: y\n\nAssistant:", False), (" z<|im_end|>", True)]


def test_a_dialogue_can_be_formatted_with_the_chat_template(load):
    turns = [user("a"), assistant("b"), user("c")]
    messages = {"chosen": [*turns, assistant("d")], "rejected": [*turns, assistant("e")]}
    assert runs(load([HH], template=Template.chat)) == runs(load([messages]))
    with pytest.raises(DataError, match="the text is not a dialogue"):
        load([{"chosen": "a", "rejected": "b"}], template=Template.chat)
    with pytest.raises(DataError, match="prefix and suffix need a prompt column"):
        load([HH], prefix="a")


RATED = {"prompt": "1+1=", "responses": ["2", "3", "4", "5"], "scores": [7, 9.5, 1, 7]}


def test_rated_responses_give_the_best_and_the_worst_as_a_pair(load):
    dataset = load([RATED])
    sample = dataset.sample([(0, 0)])
    assert answers(dataset) == ["3", "4"]
    assert (sample["labels"].tolist(), sample["margins"].tolist()) == ([1, 0], [8.5, 8.5])


def test_rated_responses_can_give_all_pairs_with_different_ratings(load):
    dataset = load([RATED], rated_pairs=RatedPairs.all)
    pairs = answers(dataset)
    assert list(zip(pairs[::2], pairs[1::2], strict=True)) == [
        ("3", "2"),
        ("3", "5"),
        ("3", "4"),
        ("2", "4"),
        ("5", "4"),
    ]
    assert dataset.sample([(0, 0)])["margins"].tolist() == [2.5, 2.5, 2.5, 2.5, 8.5, 8.5, 6, 6, 6, 6]


@pytest.mark.parametrize("response", ["completion", "response"])
@pytest.mark.parametrize(("prompt", "answer"), [("1+1=", "2"), ([user("1+1=")], [assistant("2")])])
def test_unpaired_responses_have_one_label_each(load, write, prompt, answer, response):
    rows = [{"prompt": prompt, response: answer, "label": label} for label in (True, False, 1, 0)]
    dataset = load(rows, kind=UnpairedData)
    sample = dataset.sample([(0, 3), (0, 0)])
    assert dataset.keys == ("input_ids", "prompt_mask", "loss_mask", "labels")
    assert sample.keys == set(dataset.keys)
    assert sample["labels"].tolist() == [0, 1]
    assert sample["labels"].dtype == torch.float32
    template = Template.plain if isinstance(prompt, str) else Template.auto
    supervised = SupervisedData(write(*rows), template=template).load(chat_tokenizer(CHATML)).sample([(0, 3), (0, 0)])
    for key in supervised.keys:
        assert torch.equal(sample[key], supervised[key])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": "b", "label": None}, "the label is None; expected true or false"),
        ({"prompt": "a", "completion": "b", "label": "good"}, "the label is 'good'; expected true or false"),
        ({"prompt": "a", "completion": "b"}, "no column 'label'"),
        ({"prompt": "a", "completion": "b", "response": "c", "label": 1}, "Set response_column"),
    ],
)
def test_unpaired_rows_that_are_incomplete_are_an_error(load, row, message):
    with pytest.raises(DataError, match=f"line 1: .*{message}"):
        load([row], kind=UnpairedData)
    with pytest.raises(SettingsError, match="it is part of prompt_column='a'"):
        UnpairedData("rows.jsonl", prompt_column="a", response_column="a.b")
