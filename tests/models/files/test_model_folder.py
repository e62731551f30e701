"""A model folder from an untrusted source loads, or ends in one line, in bounded time and memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from realign.engines import TransformersModel
from realign.errors import ConfigError, DataError, RealignError
from realign.interfaces.reward_model import RewardModelInterface
from realign.models.files.folders import read_states
from realign.models.files.model_folder import check_hub, readable, weight_names
from realign.runtime.models import load_saved_state
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
        engine: Any = TransformersModel(str(folder)).load("actor", seed=0).engine
        assert all(isinstance(i, int) for i in engine.capabilities().eos_token_ids)
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
        ("config.json", {"vocab_size": 10**12}, "vocab_size=1000000000000: expected an integer from 2"),
        ("config.json", {"vocab_size": 1}, "vocab_size=1: expected an integer from 2"),
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


def test_a_file_that_is_too_large_is_not_read(model):
    with (model / "config.json").open("wb") as file:
        file.truncate(10**12)
    assert "has 1000000000000 bytes; expected at most" in load(model)


@pytest.mark.parametrize("state", [{"gain": "x"}, {"gain": []}, {"gain": 1.0}, {"gain": 1.0, "bias": None}])
def test_an_interface_state_of_other_values_is_one_line(tmp_path, state):
    (tmp_path / "interface_state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=r"^models\.reward: the interface state saved with the weights does not fit"):
        load_saved_state("reward", RewardModelInterface(), read_states(str(tmp_path))[0])


def save_part(file: Path, *names: str) -> None:
    save_file({name: torch.zeros(1) for name in names}, file)


def write_index(folder: Path, **files: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def test_names_of_weights_come_from_the_files_that_transformers_reads(tmp_path):
    save_part(tmp_path / "model.safetensors", "a.weight", "score.weight")
    assert weight_names(tmp_path) == {"a.weight", "score.weight"}
    write_index(tmp_path, a="model.safetensors")  # an index of a single file
    assert weight_names(tmp_path) == {"a.weight", "score.weight"}
    (tmp_path / "model.safetensors").rename(tmp_path / "x-1.safetensors")
    save_part(tmp_path / "x-2.safetensors", "b")
    write_index(tmp_path, a="x-1.safetensors", b="x-2.safetensors")
    assert weight_names(tmp_path) == {"a.weight", "score.weight", "b"}


def test_two_sets_of_weights_are_refused_with_both_names(tmp_path):
    for name in ("model", "x-1", "x-2"):
        save_part(tmp_path / f"{name}.safetensors", "a")
    write_index(tmp_path, a="x-1.safetensors")
    with pytest.raises(
        DataError, match=r"two sets of weights: 'model\.safetensors', and 'x-1\.safetensors' and others"
    ):
        weight_names(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    write_index(tmp_path, a="x-1.safetensors", b="x-2.safetensors")
    with pytest.raises(DataError, match=r"x-2\.safetensors' and .*x-1\.safetensors' both have the weight 'a'"):
        weight_names(tmp_path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], r"has no weights: neither 'model\.safetensors' nor"),
        (
            ["pytorch_model.bin"],
            r"weights only in 'pytorch_model\.bin'\. realign reads safetensors, .* Convert them: AutoModel",
        ),
        (["model-q4.gguf", "README.md"], r"weights only in 'model-q4\.gguf'"),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], r"no index .* Download the index"),
        (
            ["lm.safetensors"],
            r"'lm\.safetensors', but no index .* A single file of weights is called 'model\.safetensors'",
        ),
    ],
)
def test_a_folder_without_weights_that_are_read_names_what_is_there(model, names, message):
    (model / "model.safetensors").unlink()
    for name in names:
        (model / name).touch()
    with pytest.raises(DataError, match=message):
        TransformersModel(str(model)).check("actor")


DAMAGES = {
    "empty": lambda _: b"",
    "half": lambda content: content[: len(content) // 2],
    "pointer": lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    "page": lambda _: b"<!DOCTYPE html><html>404</html>",
    "binary": lambda _: b"\xff\x00" * 64,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_the_model_family_is_not_blamed(model, damage):
    for file in sorted(model.iterdir()):
        content = file.read_bytes()
        file.write_bytes(DAMAGES[damage](content))
        message = load(model)
        assert file.name in message, file
        assert damage != "pointer" or "is a Git LFS pointer" in message
        assert not any(words in message for words in ("not supported", "above report", "not causal"))
        file.write_bytes(content)
    assert load(model) == ""


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", b"", r"model\.safetensors' is not a safetensors file, or not all of it: .* \(0 bytes\)"),
        ("model.safetensors", b"\xff" * 64, "is not a safetensors file"),
        ("model.safetensors.index.json", b"{", r"index\.json' is not a JSON file"),
        ("model.safetensors.index.json", b"[]", "must contain a JSON object"),
        ("model.safetensors.index.json", b"{}", "is not an index of weights: it has no 'weight_map'"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        weight_names(tmp_path)


def test_a_hub_name_is_refused_offline_unless_it_is_cached(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    check_hub("models.x.path", "owner/name")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"models\.x\.path='owner/name': no such folder, .*HF_HUB_OFFLINE=1"):
        check_hub("models.x.path", "owner/name")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: "/cache/config.json")
    check_hub("models.x.path", "owner/name")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("\nfirst\nsecond"), "models.x: first"),
        (OSError("offline"), "models.x: OSError: offline"),
        (KeyError("x"), "models.x: KeyError: 'x'"),
        (
            ValueError("pass trust_remote_code"),
            "models.x: pass trust_remote_code Set trust_remote_code=true of this role",
        ),
    ],
)
def test_an_error_of_transformers_becomes_one_line_with_the_original_as_cause(error, message):
    with pytest.raises(DataError) as caught, readable("models.x"):
        raise error
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error
