import json
import subprocess
import sys

import pytest

from realign.data import read_rows
from realign.errors import DataError

ROWS = [{"prompt": f"p{i}", "answer": i, "messages": [{"role": "user", "content": str(i)}]} for i in range(5)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(params=["jsonl", "json", "parquet", "folder"])
def source(request, tmp_path):
    if request.param == "jsonl":
        return write_jsonl(tmp_path / "rows.jsonl", ROWS)
    if request.param == "json":
        (tmp_path / "rows.json").write_text(json.dumps(ROWS))
        return tmp_path / "rows.json"
    if request.param == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
        return tmp_path / "rows.parquet"
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "rows"))
    return tmp_path / "rows"


def test_every_kind_of_file_gives_the_same_rows(source):
    table = read_rows(source)
    assert list(table.rows) == ROWS
    assert table.column("answer") == [0, 1, 2, 3, 4]
    assert list(read_rows(str(source), limit=2).rows) == ROWS[:2]
    assert len(read_rows(source, limit=99)) == 5


LIMITED = """
import resource, sys
from pathlib import Path
from realign.data import read_rows
from realign.errors import DataError
read_rows(sys.argv[1], 1)
used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_DATA, (used + 50_000_000,) * 2)
try:
    print(len(read_rows(sys.argv[2])))
except DataError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA limits all memory on Linux only")
def test_rows_that_need_too_much_memory_are_one_line_of_error(tmp_path):
    small, large = (write_jsonl(tmp_path / f"{name}.jsonl", ROWS) for name in ("small", "large"))
    large.write_text((json.dumps({"prompt": "x" * 1000}) + "\n") * 100_000)
    done = subprocess.run([sys.executable, "-c", LIMITED, small, large], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        f"{large} ({large.stat().st_size:,} bytes): its rows need more memory than this process may use. Set limit to "
        "read fewer rows, or give the process more memory."
    )


def test_a_missing_column_names_the_place_and_the_nearest(source):
    with pytest.raises(DataError, match=r"rows.*(line|row) 1: no column 'promt'; found .*did you mean 'prompt'"):
        read_rows(source).column("promt")


def test_blank_lines_are_skipped_and_do_not_shift_line_numbers(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n   \n{"prompt": "\xc3\xa9\xe2\x80\xa8"}\n{"answer": 1}')
    table = read_rows(file)
    assert [row.get("prompt") for row in table.rows] == ["a", "é\u2028", None]
    with pytest.raises(DataError, match=r"rows.jsonl, line 5: no column 'prompt'; found \['answer'\]"):
        table.column("prompt")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"x": 1}\n{"x": 2\n', r"a.jsonl, line 2 is not valid JSON"),
        ("a.jsonl", b'{"x": 1}\n\n{"x": "\xff"}\n', r"a.jsonl, line 3 is not valid JSON.*decode"),
        ("a.jsonl", b'{"x": 1}\n[1]\n', r"a.jsonl, line 2 contains a list; expected an object"),
        ("a.jsonl", b"\n \n", r"a.jsonl contains no rows"),
        ("a.json", b"[]", r"a.json contains no rows"),
        ("a.json", b'{"x": [1]}', r"a.json contains a dict; expected a list"),
        ("a.json", b'[{"x": 1}, 2]', r"a.json, row 2 contains a int"),
        ("a.json", b'{"x": 1}\n{"x": 2}', r"a.json is not valid JSON.*needs the suffix \.jsonl"),
        ("a.parquet", b"not parquet", r"a.parquet is not a readable parquet file"),
        ("a.csv", b"x\n1\n", r"unknown file type '\.csv'\. Supported: \.jsonl, \.json, \.parquet, or a folder"),
        ("rows", b"", "the file has no suffix"),
    ],
)
def test_bad_files_say_what_is_wrong(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_rows(tmp_path / name)


def test_a_file_that_is_not_there_names_the_nearest(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(DataError, match=r"no file or folder .*trian.jsonl'; did you mean .*train.jsonl'"):
        read_rows(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match=r"the folder .*no' does not exist"):
        read_rows(tmp_path / "no" / "x.jsonl")


def test_a_folder_of_several_splits_names_them(tmp_path):
    import datasets

    dataset = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(str(tmp_path / "all"))
    with pytest.raises(DataError, match=r"several splits\. Choose one: .*all/test, .*all/train"):
        read_rows(tmp_path / "all")
    assert list(read_rows(tmp_path / "all" / "test").rows) == ROWS


def test_a_folder_of_another_kind_says_what_is_in_it(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(DataError, match=r"not a folder written by `save_to_disk`; it contains \['train.jsonl'\]"):
        read_rows(tmp_path)


def test_parts_of_a_column_are_found_by_their_path(tmp_path):
    row = {
        "question": {"text": "why?"},
        "answers": [{"text": "so"}, {"text": "no"}],
        "a.b": "plain",
        "a": {"b": "deep"},
    }
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    table = read_rows(file)
    found = [table.column(name)[0] for name in ("question.text", "answers.1.text", "a.b", "question")]
    assert found == ["why?", "no", "plain", {"text": "why?"}]
    for name in ("question.txt", "answers.2.text", "answers.x", "question.text.more", "question."):
        with pytest.raises(
            DataError, match=rf"line 1: no column '{name}'; found \['a', 'a.b', 'answers', 'question'\]"
        ):
            table.column(name)
