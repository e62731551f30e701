import json
import logging
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realign.data import PreferenceData, PromptData, RewardedData, RowSource, SupervisedData, UnpairedData
from realign.data.dataset import content_hash
from realign.data.files import JsonLinesFile
from realign.errors import DataError
from tests.data.text_tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(name):
    return {
        "prompt": f"{name}?",
        "response": f"{name}!",
        "chosen": f"{name} yes",
        "rejected": f"{name} no",
        "completion": "x",
        "label": True,
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Three files of 11 rows, of which every fifth row is too long."""
    folder = tmp_path_factory.mktemp("rows")
    for name in "abc":
        rows = [row(f"{name}{i}" + " long" * (12 if i % 5 == 4 else 0)) for i in range(11)]
        write(folder / f"{name}.jsonl", rows)
    return folder


def prompts(path, **changes):
    return PromptData(path, **{"streaming": True, "max_prompt_tokens": 20, "shuffle_buffer": 4} | changes)


def taken(dataset, order, places):
    """Return the text and id of the rows at these places."""
    sample = dataset.sample(order.rows(places))
    return [(one["prompt"], name) for one, name in zip(sample.metadata["row"], sample.ids, strict=True)]


def sources_of(files, weighted):
    names = [f"{files}/{name}.jsonl" for name in "abc"]
    return [RowSource(name, weight=i + 1) for i, name in enumerate(names)] if weighted else names


@given(
    buffer=st.integers(1, 40),
    stops=st.lists(st.integers(1, 30), max_size=4),
    batch=st.integers(1, 7),
    shuffle=st.booleans(),
    weighted=st.booleans(),
    limit=st.one_of(st.none(), st.integers(1, 6)),
    seed=st.integers(0, 2),
)
def test_a_stream_interrupted_anywhere_gives_the_rows_of_an_undisturbed_one(
    files, buffer, stops, batch, shuffle, weighted, limit, seed
):
    """Continue from a JSON copy of the state after each stop, in a new dataset."""
    data = prompts(sources_of(files, weighted), shuffle_buffer=buffer, limit=limit)
    whole = data.load(TOKENIZER)
    expected = taken(whole, whole.order(seed, shuffle), range(sum(stops) + 40))
    dataset = data.load(TOKENIZER)
    order, place, rows = dataset.order(seed, shuffle), 0, []

    def read(n):
        nonlocal place
        for start in range(place, place + n, batch):
            rows.extend(taken(dataset, order, range(start, min(start + batch, place + n))))
        place += n

    for stop in stops:
        read(stop)
        state = json.loads(json.dumps(order.state_dict()))
        dataset = data.load(TOKENIZER)
        order = dataset.order(seed, shuffle)
        order.load_state_dict(state)
    read(40)
    assert rows == expected


@given(st.integers(1, 40), st.booleans(), st.integers(0, 2))
def test_an_epoch_contains_every_row_once_that_is_not_dropped(files, buffer, shuffle, seed):
    dataset = prompts(f"{files}/*.jsonl", shuffle_buffer=buffer).load(TOKENIZER)
    memory = PromptData(f"{files}/*.jsonl", max_prompt_tokens=20).load(TOKENIZER)
    expected = [one["prompt"] for one in memory.rows]
    order = dataset.order(seed, shuffle)
    assert order.rows_per_epoch is None
    for epoch in range(3):
        n = len(expected)
        rows = taken(dataset, order, range(epoch * n, (epoch + 1) * n))
        assert {name.partition("@")[2] for _, name in rows} == {str(epoch)}
        texts = [text for text, _ in rows]
        assert sorted(texts) == sorted(expected)
        assert shuffle or texts == expected
    order.rows([3 * n])
    assert order.rows_per_epoch == n


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (SupervisedData, {"max_tokens": 40, "response_column": "response"}),
        (PromptData, {"max_prompt_tokens": 40}),
        (PreferenceData, {"max_tokens": 40}),
        (UnpairedData, {"max_tokens": 40, "response_column": "completion"}),
        (RewardedData, {"max_tokens": 40, "label_column": "label", "response_column": "completion"}),
    ],
)
def test_streamed_samples_equal_those_of_rows_in_memory(files, kind, settings):
    path = f"{files}/*.jsonl"
    memory = kind(path, **settings).load(TOKENIZER)
    streamed = kind(path, streaming=True, **settings).load(TOKENIZER)
    assert streamed.keys == tuple(memory.keys)
    order = streamed.order(0, shuffle=False)
    batch, expected = streamed.sample(order.rows(range(7))), memory.sample([(0, i) for i in range(7)])
    assert batch.keys == expected.keys
    for key in batch.data:
        assert batch[key].tolist() == expected[key].tolist()
        assert batch.lengths[key] == expected.lengths[key]
    assert batch.metadata == expected.metadata


def test_only_the_rows_of_the_first_blocks_are_read_before_the_first_batch(tmp_path, monkeypatch):
    file = write(tmp_path / "rows.jsonl", [row(i) for i in range(500)])
    read = Counter()
    plain = JsonLinesFile.rows

    def counted(self, cursor):
        for placed in plain(self, cursor):
            read["rows"] += 1
            yield placed

    monkeypatch.setattr(JsonLinesFile, "rows", counted)
    data = prompts(str(file), shuffle_buffer=16)
    data.check("data")
    dataset = data.load(TOKENIZER)
    assert read["rows"] == 1
    order = dataset.order(0, True)
    order.rows(range(8))
    assert 8 <= read["rows"] <= 1 + 2 * 16
    order.rows(range(8, 200))
    assert read["rows"] <= 1 + 200 + 16


def test_the_shuffle_mixes_files_and_rows(tmp_path):
    for name in range(8):
        write(tmp_path / f"{name}.jsonl", [row(f"{name}:{i}") for i in range(50)])
    dataset = prompts(f"{tmp_path}/*.jsonl", shuffle_buffer=100).load(TOKENIZER)
    order = dataset.order(0, True)
    epochs = []
    for epoch in range(2):
        texts = [
            text
            for start in range(0, 400, 50)
            for text, _ in taken(dataset, order, range(epoch * 400 + start, epoch * 400 + start + 50))
        ]
        epochs.append(texts)
    files_in_order = [[text.partition(":")[0] for text in texts] for texts in epochs]
    assert files_in_order[0] != files_in_order[1]
    changes = sum(a != b for a, b in zip(files_in_order[0], files_in_order[0][1:], strict=False))
    assert changes > 100  # 7 without shuffling


def test_dropped_rows_are_counted_and_the_first_is_named(files, caplog):
    dataset = prompts(f"{files}/a.jsonl").load(TOKENIZER)
    order = dataset.order(0, shuffle=False)
    with caplog.at_level(logging.WARNING):
        order.rows(range(9))
    assert caplog.messages == [
        f"{files}/a.jsonl, line 5 was dropped (longer than max_prompt_tokens=20). The metric data/rows_dropped counts "
        "further ones."
    ]
    metrics = order.metrics()
    assert metrics == {"data/epoch": 0.0, "data/rows_read": 11.0, "data/rows_dropped": 2.0, "data/rows_truncated": 0.0}


def test_a_row_that_cannot_be_read_or_encoded_names_its_file_and_line(tmp_path):
    file = write(tmp_path / "rows.jsonl", [row(i) for i in range(20)])
    with file.open("a") as out:
        out.write('{"prompt": 1}\n')
    dataset = prompts(str(file)).load(TOKENIZER)
    with pytest.raises(DataError, match=r"rows\.jsonl, line 21: the prompt is 1; expected a string"):
        dataset.order(0, shuffle=False).rows(range(30))
    with file.open("a") as out:
        out.write("{\n")
    with pytest.raises(DataError, match=r"rows\.jsonl, line 22 is not valid JSON"):
        dataset.order(0, shuffle=False).rows(range(30))


def test_the_identity_of_a_stream_follows_the_content_of_its_files(tmp_path):
    file = write(tmp_path / "rows.jsonl", [row(i) for i in range(20)])
    first = content_hash(prompts(str(file)).load(TOKENIZER))
    copy = write(tmp_path / "copy.jsonl", [row(i) for i in range(20)])
    assert content_hash(prompts(str(copy)).load(TOKENIZER)) == first
    assert content_hash(prompts(str(copy), shuffle_buffer=5).load(TOKENIZER)) != first
    copy.write_text(copy.read_text().replace("3?", "4?"))
    assert content_hash(prompts(str(copy)).load(TOKENIZER)) != first
