import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realign.data import PromptData, Split, Table
from realign.errors import DataError, SettingsError
from tests.data.text_tokenizer import make_tokenizer


def parts(n, weights, seed=0):
    table = Table("all.jsonl", [{"n": i} for i in range(n)], range(1, n + 1), "line")
    return [Split(part, weights, seed).apply(table) for part in range(len(weights))]


@given(st.integers(20, 200), st.lists(st.floats(1, 5), min_size=1, max_size=4), st.integers(0, 3))
def test_parts_are_disjoint_and_together_the_whole(n, weights, seed):
    found = [[row["n"] for row in part.rows] for part in parts(n, weights, seed)]
    assert sorted(n for rows in found for n in rows) == list(range(n))
    assert all(rows == sorted(rows) for rows in found)
    for rows, weight in zip(found, weights, strict=True):
        assert abs(len(rows) - weight / sum(weights) * n) <= 1


def test_the_split_of_deepspeed_chat():
    sft, reward, rl = parts(20, [2, 4, 4])
    assert [len(part) for part in (sft, reward, rl)] == [4, 8, 8]
    assert reward.where(0) == f"all.jsonl, line {reward.rows[0]['n'] + 1}"
    assert [r["n"] for r in parts(20, [2, 4, 4], seed=1)[0].rows] != [r["n"] for r in sft.rows]


def test_a_part_is_the_same_in_every_run_and_is_dealt_from_the_limited_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a", "n": n}) + "\n" for n in range(30)))
    first = PromptData(str(path), limit=10, split=Split(0, [1, 1])).load(make_tokenizer())
    again = PromptData(str(path), limit=10, split=Split(0, [1, 1])).load(make_tokenizer())
    other = PromptData(str(path), limit=10, split=Split(1, [1, 1])).load(make_tokenizer())
    assert first.rows == again.rows
    assert sorted(row["n"] for row in first.rows + other.rows) == list(range(10))
    assert first.report.rows_read == 5
    assert first.report.rows_dropped == {}


def test_what_cannot_be_split_is_refused():
    with pytest.raises(SettingsError, match=r"weights=\[1, 0\]: must be a list of positive, finite numbers"):
        Split(0, [1, 0])
    with pytest.raises(SettingsError, match=r"part=3: must be below the number of weights \(3\)"):
        Split(3)
    with pytest.raises(
        DataError, match=r"all\.jsonl: split\.part=0 of split\.weights=\[1, 99\] contains none of 5 rows"
    ):
        parts(5, [1, 99])
