from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from realign.engines import Causal, Score, TransformersModel, Value, ValueHead
from realign.engines.device import pick_device
from realign.engines.files.model_folder import check_hub, weight_names
from realign.engines.module_reader import check_head
from realign.errors import ConfigError, DataError
from tests.tiny import save_tiny

HEADS = {"causal": Causal(), "score": Score(), "value": Value()}


def test_names_of_weights_come_from_the_file_or_from_its_index(tmp_path):
    assert weight_names(tmp_path) is None
    save_file({"a.weight": torch.zeros(2), "score.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert weight_names(tmp_path) == {"a.weight", "score.weight"}
    index = {"weight_map": {"b.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert weight_names(tmp_path) == {"b.weight"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", b"", r"model\.safetensors' is not a safetensors file: .* Download the model again\."),
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


@pytest.mark.parametrize(
    ("names", "head", "random_head", "message"),
    [
        ({"lm_head.weight"}, Causal(), False, None),
        ({"model.x"}, Causal(), False, None),  # tied
        ({"score.weight", "lm_head.weight"}, Causal(), False, None),
        ({"model.x", "score.weight"}, Score(), False, None),
        ({"model.x", "classifier.weight"}, Value(), False, None),
        ({"lm_head.weight"}, Value(), True, None),
        (
            {"lm_head.weight"},
            Score(),
            False,
            r"models\.x\.head=score: 'm' has no such head .*models\.x\.head\.init",
        ),
        (
            {"model.x", "score.weight"},
            Causal(),
            True,
            r"models\.x\.head=causal: 'm' contains a reward model or critic \(score\.weight",
        ),
    ],
)
def test_the_head_is_told_by_the_names_of_weights(names, head, random_head, message):
    if message is None:
        check_head("models.x", "m", names, head, random_head=random_head)
        return
    with pytest.raises(DataError, match=message):
        check_head("models.x", "m", names, head, random_head=random_head)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox"])
@pytest.mark.parametrize("saved", ["causal", "score", "value"])
@pytest.mark.parametrize("head", ["causal", "score", "value"])
def test_what_is_said_of_a_folder_is_what_loading_it_finds(tmp_path, family, saved, head):
    model = TransformersModel(str(save_tiny(tmp_path / "m", family, head=saved)), head=HEADS[head])

    def fails(action) -> bool:
        try:
            action()
        except DataError:
            return True
        return False

    assert fails(lambda: model.check("x")) == fails(lambda: model.load("x", seed=0))


def test_what_a_spec_says_it_gives_is_what_its_engine_gives(tmp_path):
    for word, head in HEADS.items():
        spec = TransformersModel(str(save_tiny(tmp_path / word, head=word)), head=head)
        assert spec.facts().outputs == spec.load("x", seed=0).machine.outputs
    both = TransformersModel(str(tmp_path / "causal"), head=Causal(ValueHead()))
    assert both.facts().outputs == {"logprobs", "values", "scores"}


def test_a_hub_name_is_refused_offline_unless_it_is_cached(monkeypatch):
    check_hub("models.x.path", "owner/name")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"models\.x\.path='owner/name': no such folder, .*HF_HUB_OFFLINE=1"):
        check_hub("models.x.path", "owner/name")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: "/cache/config.json")
    check_hub("models.x.path", "owner/name")


def test_devices():
    assert pick_device("cpu") == torch.device("cpu")
    if not torch.cuda.is_available():
        assert pick_device("auto") == torch.device("cpu")
        with pytest.raises(ConfigError, match="device='cuda:1': torch finds no CUDA device"):
            pick_device("cuda:1")
    with pytest.raises(ConfigError, match=r"device='gpu': unknown device. Use auto, cpu or cuda."):
        pick_device("gpu")
    with pytest.raises(ConfigError, match=r"device='mps': MPS has no float64, .* Use cpu\."):
        pick_device("mps")
