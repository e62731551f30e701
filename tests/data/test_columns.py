import pytest

from realign.cells import read_column
from realign.errors import DataError

ROW = {"question": {"text": "a"}, "answers": [{"text": "b"}, {"text": "c"}], "a.b": 1}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("question", {"text": "a"}),
        ("question.text", "a"),
        ("answers.1.text", "c"),
        ("answers.-1.text", "c"),
        ("answers.*.text", ["b", "c"]),
        ("a.b", 1),
    ],
)
def test_a_name_is_a_column_or_a_path_in_one(name, value):
    assert read_column(ROW, name) == value


@pytest.mark.parametrize("name", ["questions", "question.txt", "answers.2", "answers.x", "question.*", "answers.*.x"])
def test_a_missing_column_is_named_with_those_that_exist(name):
    with pytest.raises(
        DataError, match=rf"no column '{name}'; found \['a\.b', 'answers', 'question'\]".replace("*", r"\*")
    ):
        read_column(ROW, name)
    with pytest.raises(DataError, match="did you mean 'question'"):
        read_column(ROW, "questoin")
