import csv
import gzip
import json
import struct
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realign.data import RowSource, Split, files, read_rows
from realign.data.files import Cursor, JsonLinesFile, PlacedRow
from realign.data.row_sources import Table
from realign.errors import DataError

ROWS = [{"prompt": f"p{i}", "answer": i, "messages": [{"role": "user", "content": str(i)}]} for i in range(5)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(
    params=["jsonl", "json", "parquet", "folder", "arrow", "arrow stream", "gz", "wrong suffix", "data folder"]
)
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
    if request.param.startswith("arrow"):
        import pyarrow

        table = pyarrow.Table.from_pylist(ROWS)
        new = pyarrow.ipc.new_file if request.param == "arrow" else pyarrow.ipc.new_stream
        with new(tmp_path / "rows.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
        return tmp_path / "rows.arrow"
    if request.param == "gz":
        (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(write_jsonl(tmp_path / "rows.jsonl", ROWS).read_bytes()))
        return tmp_path / "rows.jsonl.gz"
    if request.param == "wrong suffix":
        return write_jsonl(tmp_path / "rows.json", ROWS)
    if request.param == "data folder":
        (tmp_path / "rows").mkdir()
        write_jsonl(tmp_path / "rows" / "train-00000-of-00002.jsonl", ROWS[:3])
        write_jsonl(tmp_path / "rows" / "train-00001-of-00002.jsonl", ROWS[3:])
        return tmp_path / "rows"
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
        f"{large}: its rows need more memory than this process may use. Set streaming=true to read rows during "
        "training, set limit to read fewer rows, or give the process more memory."
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"x": 1}\n{"x": 2\n', r"a.jsonl, line 2 is not valid JSON"),
        ("a.jsonl", b'{"x": 1}\n\n{"x": "\xff"}\n', r"a.jsonl, line 3 is not UTF-8 text: byte 0xff at position 7"),
        ("a.jsonl", b'{"x": 1}\n[1]\n', r"a.jsonl, line 2 contains a list; expected an object"),
        ("a.jsonl", b"\n \n", r"a.jsonl contains no rows"),
        ("a.json", b"[]", r"a.json contains no rows"),
        ("a.json", b'{"x": [1]}', r"a.json contains a dict; expected a list"),
        ("a.json", b'[{"x": 1}, 2]', r"a.json, row 2 contains a int"),
        ("a.json", b'{"x": 1}\n{"x": 2', r"a.json, line 2 is not valid JSON"),
        ("a.jsonl", b"x,y\n1,2\n", r"a.jsonl, line 1 is not valid JSON"),
        ("a.parquet", b"not parquet", r"a.parquet is not a readable parquet file"),
        ("a.arrow", b"not arrow", r"a.arrow is not a readable arrow file"),
        ("a.csv", b"x,y\n", r"a.csv contains no rows"),
        ("a.csv", b"x,y\n1,2\n\n3\n", r"a.csv, line 4 has 1 fields, but the header has 2"),
        ("a.csv", b"x,y\n1,\xff\n", r"a.csv, line 2 is not UTF-8 text"),
        ("a.csv", b'x,y\n1,2\n"3,4\n5,6\n', r"a.csv, line 3 is not valid CSV: unexpected end of data"),
        ("a.csv", b"x,x\n1,2\n", r"a.csv: the header \['x', 'x'\] has a duplicate or empty column name"),
        ("a.jsonl.gz", gzip.compress(b'{"x": 1}\n', mtime=0)[:20], r"a.jsonl.gz is not a readable gzip file"),
        ("a.xlsx", b"x\n1\n", r"unknown file type '\.xlsx', .* Supported: JSONL, JSON, CSV, TSV, parquet and arrow"),
        (
            "a.jsonl",
            b'{"x": 1}\n{"y": {"z": 1, "z": 2}}\n',
            r"line 2 is not valid JSON: the key 'z' occurs twice",
        ),
        ("a.json", b'[{"x": 1, "x": 2}]', r"a.json is not valid JSON: the key 'x' occurs twice"),
        ("rows", b"", "the file has no suffix"),
    ],
)
def test_bad_files_say_what_is_wrong(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_rows(tmp_path / name)


def arrow_file(path, table):
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    return path


OFFSETS = struct.pack("<ii", 0, 777)


@pytest.mark.parametrize("kind", ["string", "binary", "list", "folder"])
@pytest.mark.parametrize("offsets", [(-500, 777), (0, 2**30), (777, 0), (2**31 - 1, -(2**31))])
def test_an_arrow_file_whose_offsets_are_outside_of_it_is_refused_and_not_read(tmp_path, kind, offsets):
    values = {"binary": [b"h" * 777], "list": [["h"] * 777]}.get(kind, ["h" * 777])
    path = tmp_path / "rows.arrow"
    if kind == "folder":
        import datasets

        datasets.Dataset.from_dict({"prompt": values}).save_to_disk(str(tmp_path / "rows"))
        (path,) = (tmp_path / "rows").glob("*.arrow")
    else:
        arrow_file(path, pyarrow.table({"prompt": values}))
    before, middle, after = path.read_bytes().rpartition(OFFSETS)
    assert middle
    path.write_bytes(before + struct.pack("<ii", *offsets) + after)
    with pytest.raises(DataError, match=r"rows(\.arrow is not a readable arrow file| cannot be read as a dataset): "):
        read_rows(tmp_path / "rows" if kind == "folder" else path)


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl.gz", "json.gz"])
def test_a_small_file_with_giant_rows_is_refused(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(files, "LARGEST_ROW", 2**20)
    path, cells = tmp_path / f"rows.{suffix}", ["x" * 50_000]
    if "gz" in suffix:
        rows = [{"prompt": cells[0]}] * 2000
        text = json.dumps(rows) if suffix == "json.gz" else "".join(json.dumps(row) + "\n" for row in rows)
        path.write_bytes(gzip.compress(text.encode()))
    else:
        indices = pyarrow.array([0] * 2000, pyarrow.int32())
        table = pyarrow.table({"prompt": pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(cells))})
        arrow_file(path, table) if suffix == "arrow" else pyarrow.parquet.write_table(table, path)
    assert path.stat().st_size < 200_000
    with pytest.raises(DataError, match=r"rows.* is a compressed file with more than \d+ MiB of rows"):
        read_rows(path)


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl", "jsonl.gz", "csv"])
def test_a_row_above_the_limit_is_named(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(files, "LARGEST_ROW", 2**20)
    path, cells = tmp_path / f"rows.{suffix}", ["x", "x" * (2**20 + 1), "x"]
    if suffix in ("parquet", "arrow"):
        table = pyarrow.table({"prompt": cells})
        arrow_file(path, table) if suffix == "arrow" else pyarrow.parquet.write_table(table, path)
    elif suffix == "csv":
        path.write_text("prompt,answer\n" + "".join(f"{cell},1\n" for cell in cells))
    else:
        text = "".join(json.dumps({"prompt": cell}) + "\n" for cell in cells).encode()
        path.write_bytes(gzip.compress(text) if suffix == "jsonl.gz" else text)
    with pytest.raises(DataError, match=r"rows.*(line \d)? has more than 1 MiB"):
        read_rows(path)


def test_a_file_that_is_not_there_names_the_nearest(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(DataError, match=r"no file or folder .*trian.jsonl'; did you mean .*train.jsonl'"):
        read_rows(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match=r"the folder .*no' does not exist"):
        read_rows(tmp_path / "no" / "x.jsonl")


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
    columns = [table.column(name)[0] for name in ("question.text", "answers.1.text", "a.b", "question")]
    assert columns == ["why?", "no", "plain", {"text": "why?"}]
    for name in ("question.txt", "answers.2.text", "answers.x", "question.text.more", "question."):
        with pytest.raises(
            DataError, match=rf"line 1: no column '{name}'; found \['a', 'a.b', 'answers', 'question'\]"
        ):
            table.column(name)


def files_of(path):
    return RowSource(str(path)).files()


def test_reading_from_any_position_gives_the_rows_after_it(source):
    """Interrupt the reader after each row, and continue with another reader at the stored position."""
    rows = []
    for file in files_of(source):
        position = None
        while True:
            cursor = Cursor(position)
            placed = next(file.rows(cursor), None)
            if placed is None:
                break
            rows.append(placed.row)
            position = json.loads(json.dumps(cursor.here()))
    assert rows == ROWS


CELL = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=5)


@given(st.lists(st.tuples(CELL, CELL), min_size=1, max_size=6), st.sampled_from([",", "\t", ";"]))
def test_delimited_files_with_any_cells_are_read_from_any_position(tmp_path_factory, cells, delimiter):
    file = tmp_path_factory.mktemp("csv") / ("rows.tsv" if delimiter == "\t" else "rows.csv")
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out, delimiter=delimiter, lineterminator="\n", quoting=csv.QUOTE_ALL)
        writer.writerows([("a", "b"), *cells])
    (rows,) = files_of(file)
    expected = [{"a": a, "b": b} for a, b in cells]
    whole, cursor = [], Cursor()
    positions = []
    for placed in rows.rows(cursor):
        whole.append(placed.row)
        positions.append(cursor.here())
    assert whole == expected
    for n, position in enumerate(positions, 1):
        assert [placed.row for placed in rows.rows(Cursor(position))] == expected[n:]


def test_a_pattern_reads_all_matching_files_in_order_and_names_the_file_of_a_row(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", ROWS[3:])
    write_jsonl(tmp_path / "a.jsonl", ROWS[:3])
    (tmp_path / "c.csv").write_text("prompt\nx\n")
    table = read_rows(f"{tmp_path}/[ab].jsonl")
    assert list(table.rows) == ROWS
    assert table.where(3) == f"{tmp_path}/b.jsonl, line 1"
    assert len(read_rows(f"{tmp_path}/*")) == 6
    with pytest.raises(DataError, match=r"no file or folder '.*/\*\.json'; no file matches this pattern"):
        read_rows(f"{tmp_path}/*.json")
    odd = write_jsonl(tmp_path / "odd[1].jsonl", ROWS[:1])
    assert list(read_rows(odd).rows) == ROWS[:1]


def test_a_folder_of_data_files_has_the_splits_of_a_hub_repository(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", ROWS[:4])
    write_jsonl(folder / "test.jsonl", ROWS[4:])
    assert list(read_rows(f"{tmp_path}:test").rows) == ROWS[4:]
    assert list(RowSource(str(tmp_path), split="train").read().rows) == ROWS[:4]
    with pytest.raises(DataError, match=r"contains several splits\. Choose one: split=train, split=test"):
        read_rows(tmp_path)
    with pytest.raises(DataError, match=r"subset='x': .* has no such subset"):
        RowSource(str(tmp_path), split="train", subset="x").read()
    (tmp_path / "more.csv").write_text("prompt\nx\n")
    with pytest.raises(DataError, match=r"contains 'more\.csv', of another format than the others"):
        read_rows(f"{tmp_path}:train")


def test_columns_are_renamed_and_a_limit_counts_rows_of_all_files(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"q": "1", "a": ["x", "y"], "id": 1}, {"q": "2", "a": ["z"], "id": 2}])
    write_jsonl(tmp_path / "b.jsonl", [{"q": "3", "a": ["w"], "id": 3}, {"q": "4", "a": [], "id": 4}])
    columns = {"prompt": "q", "response": "a.0"}
    table = RowSource(f"{tmp_path}/?.jsonl", limit=3, columns=columns).read()
    assert list(table.rows)[1:] == [
        {"a": ["z"], "id": 2, "prompt": "2", "response": "z"},
        {"a": ["w"], "id": 3, "prompt": "3", "response": "w"},
    ]
    assert table.where(2) == f"{tmp_path}/b.jsonl, line 1"
    with pytest.raises(DataError, match=r"b\.jsonl, line 2: columns: no column 'a\.0'; found \['a', 'id', 'q'\]"):
        RowSource(f"{tmp_path}/?.jsonl", columns=columns).read()


def parts(n, weights, seed=0):
    file = JsonLinesFile(Path("all.jsonl"))
    table = Table("all.jsonl", [PlacedRow(file, i + 1, {"n": i}) for i in range(n)])
    return [Split(part, weights, seed).apply(table) for part in range(len(weights))]


@given(st.integers(20, 200), st.lists(st.floats(1, 5), min_size=1, max_size=4), st.integers(0, 3))
def test_parts_are_disjoint_and_together_the_whole(n, weights, seed):
    numbers = [[row["n"] for row in part.rows] for part in parts(n, weights, seed)]
    assert sorted(n for rows in numbers for n in rows) == list(range(n))
    assert all(rows == sorted(rows) for rows in numbers)
    for rows, weight in zip(numbers, weights, strict=True):
        assert abs(len(rows) - weight / sum(weights) * n) <= 1


def test_the_split_of_deepspeed_chat():
    sft, reward, rl = parts(20, [2, 4, 4])
    assert [len(part) for part in (sft, reward, rl)] == [4, 8, 8]
    assert reward.where(0) == f"all.jsonl, line {reward.rows[0]['n'] + 1}"
    assert [r["n"] for r in parts(20, [2, 4, 4], seed=1)[0].rows] != [r["n"] for r in sft.rows]


@pytest.mark.parametrize(
    ("url", "cure"),
    [
        ("https://example.com/rows.jsonl", "Download the file"),
        ("s3://bucket/rows.jsonl", "Download the file"),
        ("hf://datasets/org/name/train.parquet", "set path=org/name"),
        ("https://huggingface.co/datasets/org/name", "set path=org/name"),
        ("file:///tmp/rows.jsonl", "Download the file"),
    ],
)
def test_urls_are_not_read(url, cure):
    with pytest.raises(DataError, match=rf"^path='{url}': URLs are not read\. .*{cure}"):
        read_rows(url)
