"""Datasets of the hub, read from a server on loopback, in separate processes, since the libraries read HF_ENDPOINT
and HF_HUB_OFFLINE when they are imported."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

import realign
from tests.data.hub_server import hub
from tests.tiny import save_tiny

README = b"""---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: other
  data_files:
  - split: train
    path: other/*
---
"""
READ = """
import json, sys
from realign.data import PromptData, RowSource
from tests.data.text_tokenizer import make_tokenizer

def streamed(path, stop):
    data = PromptData(path, subset="main", streaming=True, shuffle_buffer=3, max_prompt_tokens=9)
    def read(order, dataset, places):
        return [row["prompt"] for row in dataset.sample(order.rows(places)).metadata["row"]]
    dataset = data.load(make_tokenizer())
    order = dataset.order(0, True)
    found = read(order, dataset, range(stop))
    state = json.loads(json.dumps(order.state_dict()))
    dataset = data.load(make_tokenizer())
    order = dataset.order(0, True)
    order.load_state_dict(state)
    return found + read(order, dataset, range(stop, 25)), dataset.identity()

for case in json.loads(sys.argv[1]):
    try:
        if "stop" in case:
            found = streamed(**case)
        else:
            streaming = case.pop("streaming", False)
            found = [row["prompt"] for row in RowSource(**case).read(streaming=streaming).rows]
        print(json.dumps(found))
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
"""
TRAIN = [f"{file}{i}" for file in "ab" for i in range(5)]


def parquet(prompts):
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": p} for p in prompts]), out, row_group_size=2)
    return out.getvalue()


@pytest.fixture(scope="module")
def server():
    files = {
        "README.md": README,
        "main/train-00000-of-00002.parquet": parquet(TRAIN[:5]),
        "main/train-00001-of-00002.parquet": parquet(TRAIN[5:]),
        "main/test-00000-of-00001.parquet": parquet(["t"]),
        "other/rows.parquet": parquet(["x", "y"]),
    }
    with hub(files) as serving:
        yield serving


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("hf")


def environment(server, home, **changes):
    checkout = str(Path(realign.__file__).parents[1])
    left = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return {**left, "PYTHONPATH": checkout, "HF_ENDPOINT": server.url, "HF_HOME": str(home), **changes}


def read(server, home, *cases, **changes):
    """Return the prompts, or the error, of each case."""
    command = [sys.executable, "-c", READ, json.dumps(cases)]
    done = subprocess.run(
        command, env=environment(server, home, **changes), capture_output=True, text=True, timeout=300, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_split_and_subset_of_the_hub_are_read_in_memory_and_streamed(server, home):
    memory, streamed, first, other, streamed_other, test = read(
        server,
        home,
        {"path": "org/name:train", "subset": "main"},
        {"path": "org/name", "split": "train", "subset": "main", "streaming": True},
        {"path": "org/name:train[:3]", "subset": "main"},
        {"path": "org/name", "subset": "other"},
        {"path": "org/name", "subset": "other", "streaming": True},
        {"path": "org/name:test", "subset": "main", "revision": "main"},
    )
    assert memory == streamed == TRAIN
    assert first == TRAIN[:3]
    assert other == streamed_other == ["x", "y"]
    assert test == ["t"]
    assert not any("name.py" in path and method == "GET" for method, path in server.requests)  # no code is loaded
    cached, missing = read(
        server, home, {"path": "org/name:train", "subset": "main"}, {"path": "org/other"}, HF_HUB_OFFLINE="1"
    )
    assert cached == TRAIN
    assert missing.startswith("DataError: org/other: no such file or folder, and not in the cache of the hub, which HF")


@pytest.mark.slow
def test_a_stream_of_the_hub_resumes_at_any_row(server, home):
    stops = (1, 4, 9, 10, 17, 25)
    streams = read(server, home, *({"path": "org/name:train", "stop": stop} for stop in stops))
    assert all(one == streams[0] for one in streams)
    rows, _ = streams[0]
    assert sorted(rows[:10]) == sorted(rows[10:20]) == TRAIN


def test_wrong_names_are_one_line_with_the_valid_ones(server, home):
    answers = read(
        server,
        home,
        {"path": "org/name"},
        {"path": "org/name", "subset": "man", "split": "train"},
        {"path": "org/name", "subset": "main"},
        {"path": "org/name:trian", "subset": "main"},
        {"path": "org/none"},
        {"path": "org/name:train", "split": "test"},
    )
    assert answers == [
        "DataError: org/name contains several subsets. Choose one with subset: main, other.",
        "DataError: subset='man': org/name has no such subset. BuilderConfig 'man' not found. Available: ['main', "
        "'other']",
        "DataError: org/name contains several splits. Choose one: split=train, split=test.",
        "DataError: split='trian': org/name has no such split. Choose one: split=train, split=test. Did you mean "
        "'train'?",
        "DataError: org/none: no such file or folder, and the hub has no such dataset, or it needs a token (Dataset "
        "'org/none' doesn't exist on the Hub or cannot be accessed.).",
        "DataError: split='test': path='org/name:train' already names a split. Remove one of them.",
    ]


def check(server, home, tmp_path, path):
    """Run `realign check`, without the pauses between attempts to reach the hub."""
    code = "import sys, time; time.sleep = lambda seconds: None\nfrom realign.cli import main\nsys.exit(main())"
    save_tiny(tmp_path / "model")
    words = ["check", "experiment=sft", "models.actor.path=model", f"data.path={path}"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=environment(server, home),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stderr.splitlines()[-1]
