import pytest
import torch

from realign.data import LabelKind, PreferenceData, SupervisedData, Template, TooLong
from realign.errors import DataError, SettingsError
from tests.data.text_tokenizer import BOS, EOS, WITH_BOS, characters, make_tokenizer


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


def test_margins_stand_at_both_of_a_pair(write):
    path = write(pair(better=0.5), pair("1", ["2", "3"], ["4", "5"], better=[1, 2.5]))
    sample = PreferenceData(path, margin_column="better").load(make_tokenizer()).sample([(0, 0), (0, 1)])
    assert sample["margins"].tolist() == [0.5, 0.5, 1.0, 1.0, 2.5, 2.5]


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


def test_an_empty_prompt_does_not_train_its_first_token(write):
    sample = PreferenceData(write(pair("", "12", "3"))).load(make_tokenizer()).sample([(0, 0)])
    assert sample["loss_mask"].tolist() == [False, True, True, False, True]


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


def test_bad_margins_and_settings_are_refused(write):
    with pytest.raises(DataError, match=r"line 1: the margins are \['a'\]; expected 1 finite numbers"):
        PreferenceData(write(pair(m="a")), margin_column="m").load(make_tokenizer())
    with pytest.raises(SettingsError, match="margin_column='m': requires kind=pairs, but kind=best_of_n"):
        PreferenceData("x", margin_column="m", kind=LabelKind.best_of_n)
    with pytest.raises(DataError, match="line 1: the response has no token to train on"):
        PreferenceData(write(pair("1", "2", "")), append_eos=False).load(make_tokenizer())
    with pytest.raises(DataError, match="no column 'worse'"):
        PreferenceData(write(pair()), rejected_column="worse").load(make_tokenizer())
