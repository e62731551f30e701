"""A model folder from an untrusted source loads, or ends in one line, in bounded time and memory."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.torture.crafted import MODEL_FILES, MODEL_VALUES, NO_OBJECTS
from realign.engines import Score, TransformersModel
from realign.engines.files.folders import read_states
from realign.engines.files.model_folder import check_model_folder
from realign.errors import DataError, RealignError
from realign.interfaces.reward_model import RewardModelInterface
from realign.runtime.models import adopt
from tests.tiny import save_tiny

HUGE = 10**7


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def model(tiny, tmp_path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def load(folder: Path) -> str:
    """Return the error message; empty if the model can be loaded."""
    message = ""
    try:
        engine: Any = TransformersModel(str(folder)).load("actor", seed=0).machine
        assert all(isinstance(i, int) for i in engine.eos_token_ids)
    except RealignError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 1500
    return message


def changed(file: Path, **values: Any) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(content | values))


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("generation_config.json", {"eos_token_id": "</s>"}, "eos_token_id='</s>': expected token ids"),
        ("generation_config.json", {"eos_token_id": [1, "x"]}, "eos_token_id=[1, 'x']: expected token ids"),
        ("config.json", {"num_hidden_layers": HUGE}, "num_hidden_layers=10000000: expected an integer from 1 to 10000"),
        ("config.json", {"num_hidden_layers": 9999}, "num_hidden_layers=9999: expected an integer from 1 to "),
        ("config.json", {"num_hidden_layers": -1}, "num_hidden_layers=-1: expected an integer from 1"),
        ("config.json", {"num_hidden_layers": "3"}, "num_hidden_layers='3': expected an integer from 1"),
        ("config.json", {"num_attention_heads": 0}, "num_attention_heads=0: expected an integer from 1"),
        ("config.json", {"vocab_size": 10**12}, "vocab_size=1000000000000: expected an integer from 1"),
        ("config.json", {"text_config": {"num_hidden_layers": HUGE}}, "num_hidden_layers=10000000: expected"),
        ("model.safetensors.index.json", {"weight_map": {"a": "gone.safetensors"}}, "'gone.safetensors' is missing"),
        ("model.safetensors.index.json", {"weight_map": {"a": "../x.safetensors"}}, "weight_map='../x.safetensors': "),
        ("model.safetensors.index.json", {"weight_map": {"a": "/x.safetensors"}}, "weight_map='/x.safetensors': "),
        ("model.safetensors.index.json", {"weight_map": {"a": 3}}, "weight_map='3': expected names of safetensors"),
        ("model.safetensors.index.json", {"weight_map": []}, "has no 'weight_map'"),
    ],
)
def test_values_that_no_model_has_are_named(model, file, values, message):
    changed(model / file, **values)
    assert message in load(model)
    with pytest.raises(DataError):
        TransformersModel(str(model)).check("actor")


@pytest.mark.parametrize("file", MODEL_FILES)
def test_any_change_of_any_value_ends_in_success_or_one_line(model, file):
    chooser = random.Random(file)
    content = json.loads((model / file).read_text())
    keys = [key for key in content if key != "vocab"]
    for key in chooser.sample(keys, k=min(len(keys), 20)):
        value = chooser.choice(MODEL_VALUES)
        (model / file).write_text(json.dumps(content | {key: value}))
        try:
            load(model)
        except BaseException as error:
            error.add_note(f"{file}: {key}={value!r}")
            raise


@pytest.mark.parametrize("file", [*MODEL_FILES, "model.safetensors.index.json"])
@pytest.mark.parametrize("content", NO_OBJECTS)
def test_a_file_that_is_no_json_object_is_one_line(model, file, content):
    (model / file).write_bytes(content)
    assert load(model)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000, "[]", ""])
@pytest.mark.parametrize("name", ["interface_state.json", "interface_state_critic.json"])
def test_the_state_of_an_interface_is_a_json_object(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=f"{name}' (is not a JSON file|must contain a JSON object)"):
        read_states(str(tmp_path))


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"])
def test_a_pipe_in_a_model_folder_blocks_nothing(model, file):
    (model / file).unlink()
    os.mkfifo(model / file)
    assert "is not a regular file" in load(model)


def test_a_file_that_is_too_large_is_not_read(model):
    with (model / "config.json").open("wb") as file:
        file.truncate(10**12)
    assert "has 1000000000000 bytes; expected at most" in load(model)


REAL = [
    {"num_key_value_heads": None},
    {"num_hidden_layers": 2, "text_config": {"num_experts": 0}},
    {"num_attention_heads": [4, 4, 2]},
    {"eos_token_id": [1, 2]},
    {"eos_token_id": None},
]


@pytest.mark.parametrize("values", REAL, ids=str)
def test_values_of_real_families_pass(tmp_path, values):
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "elsewhere").symlink_to("nowhere")
    check_model_folder(tmp_path)


def test_heads_of_other_classes_are_checked_the_same_way(model):
    changed(model / "config.json", num_attention_heads=0)
    with pytest.raises(DataError, match="num_attention_heads=0"):
        TransformersModel(str(model), head=Score()).load("reward", seed=0)


@pytest.mark.parametrize("state", [{"gain": "x"}, {"gain": []}, {"gain": 1.0}, {"gain": 1.0, "bias": None}])
def test_an_interface_state_of_other_values_is_one_line(tmp_path, state):
    (tmp_path / "interface_state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=r"^models\.reward: the interface state saved with the weights does not fit"):
        adopt("reward", RewardModelInterface(), read_states(str(tmp_path))[0])
