"""Test models that start from an adapter folder: merged or continued, as policy, reference, reward model and critic."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from realign.api import MicroBatchSpec
from realign.engines import OptimizerSpec, SharedModel, TransformersModel
from realign.errors import ConfigError, DataError
from realign.models import AdapterStart, Lora, Score, Value
from tests.tiny import logprobs, lower_logprobs, random_sample, save_tiny

ONE = MicroBatchSpec()
STEP = OptimizerSpec(lr=1e-2, grad_clip=None)
DATA = random_sample(((9, 4, 6), (12,)))
ALONE = Lora(rank=4, merge_on_save=False)


def load(folder, role="actor", **fields):
    return TransformersModel(str(folder), device="cpu", **fields).load(role, seed=0).engine


def scores(engine):
    return engine.forward(DATA, ONE, lambda out, mb: mb.with_sequences(scores=out.scores()))["scores"]


@pytest.fixture
def sft(tmp_path):
    """Return an engine with a trained adapter, and the folder that it was saved to."""
    engine = load(save_tiny(tmp_path / "base"), optimizer=STEP, trains=ALONE)
    lower_logprobs(engine, DATA, 2)
    engine.save(tmp_path / "adapter")
    return engine, tmp_path / "adapter"


def change(folder, **settings):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_an_adapter_folder_is_the_merged_model(sft):
    engine, folder = sft
    loaded = load(folder)
    torch.testing.assert_close(logprobs(loaded, DATA), logprobs(engine, DATA), atol=1e-5, rtol=1e-5)
    assert not [name for name, _ in loaded.module.named_parameters() if "lora" in name]
    base = load(folder.parent / "base")
    assert (logprobs(base, DATA) - logprobs(loaded, DATA)).abs().max() > 1e-2


def test_training_starts_from_the_merged_model_and_saves_a_whole_one(sft, tmp_path):
    engine, folder = sft
    for name, trains in (("all", {}), ("lora", {"trains": Lora(rank=2)})):
        loaded = load(folder, optimizer=STEP, **trains)
        torch.testing.assert_close(logprobs(loaded, DATA), logprobs(engine, DATA), atol=1e-5, rtol=1e-5)
        lower_logprobs(loaded, DATA, 2)
        loaded.save(tmp_path / name)
        torch.testing.assert_close(logprobs(load(tmp_path / name), DATA), logprobs(loaded, DATA), atol=1e-5, rtol=1e-5)
        AutoModelForCausalLM.from_pretrained(tmp_path / name)


def test_an_adapter_continues_where_only_adapters_are_saved(sft, tmp_path):
    engine, folder = sft
    loaded = load(folder, optimizer=STEP, trains=ALONE)
    assert torch.equal(logprobs(loaded, DATA), logprobs(engine, DATA))
    lower_logprobs(loaded, DATA, 2)
    loaded.save(tmp_path / "further")
    config = json.loads((tmp_path / "further" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    torch.testing.assert_close(logprobs(load(tmp_path / "further"), DATA), logprobs(loaded, DATA), atol=1e-5, rtol=1e-5)


def test_the_reference_of_a_continued_adapter_is_the_start_and_not_the_base_model(sft):
    engine, folder = sft
    spec = TransformersModel(str(folder), device="cpu", optimizer=STEP, trains=ALONE)
    assert spec.facts().branches is False
    reference = spec.frozen_start("actor").load("ref", seed=0).engine
    torch.testing.assert_close(logprobs(reference, DATA), logprobs(engine, DATA), atol=1e-5, rtol=1e-5)
    explicit = TransformersModel(str(folder), optimizer=STEP, trains=Lora(rank=4), adapter=AdapterStart.continue_)
    assert explicit.frozen_start("actor") == TransformersModel(str(folder))
    merged = TransformersModel(str(folder), optimizer=STEP, trains=Lora(rank=4))
    assert merged.frozen_start("actor") == SharedModel("actor", "reference")


def test_a_reward_model_from_an_adapter_keeps_its_head_and_starts_a_critic(tmp_path):
    base = save_tiny(tmp_path / "base")
    engine = load(base, "reward", head=Score(init="normal"), optimizer=STEP, trains=ALONE)
    engine.train_batch(DATA, ONE, lambda out, mb: (out.scores().square().sum(), {}), lambda d: torch.tensor(1.0))
    engine.save(tmp_path / "reward")
    frozen = TransformersModel(str(tmp_path / "reward"), head=Score(), device="cpu")
    frozen.check("reward")
    torch.testing.assert_close(scores(frozen.load("reward", seed=1).engine), scores(engine), atol=1e-5, rtol=1e-5)
    critic = load(tmp_path / "reward", "critic", head=Value(), optimizer=STEP)
    torch.testing.assert_close(critic.head.weight_1H, engine.head.weight_1H)
    further = load(tmp_path / "reward", "reward", head=Score(), optimizer=STEP, trains=ALONE)
    assert torch.equal(scores(further), scores(engine))
    with pytest.raises(
        DataError, match=r"models\.actor\.path=.*weight 'score.weight', which the model has no place for"
    ):
        load(tmp_path / "reward")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_model_name_or_path": None}, "has no base_model_name_or_path"),
        ({"base_model_name_or_path": "/no/such/base"}, "its base model '/no/such/base' does not exist"),
        ({"base_model_name_or_path": "."}, "is a folder without config.json"),
    ],
)
def test_an_adapter_without_a_usable_base_model_is_refused(sft, settings, message):
    change(sft[1], **settings)
    with pytest.raises((ConfigError, DataError), match=f"^models.actor.path=.*{message}"):
        TransformersModel(str(sft[1])).check("actor")


@pytest.mark.parametrize(
    ("fields", "settings", "message"),
    [
        ({"trains": Lora(rank=8, merge_on_save=False)}, {}, r"trains\.rank=8: the adapter in .* has 4\. Set trains"),
        ({"trains": Lora(rank=4, alpha=8, merge_on_save=False)}, {}, r"trains\.alpha=8: the adapter in .* has 32"),
        ({"trains": ALONE}, {"use_dora": True}, r"uses use_dora=True, which realign does not train"),
        ({"trains": ALONE}, {"peft_type": "IA3"}, r"of type IA3"),
        ({"adapter": "continue"}, {}, r"adapter=continue: requires models\.actor\.trains=lora"),
        ({"trains": ALONE, "adapter": "merge"}, {}, r"adapter=merge: with trains\.merge_on_save=false"),
    ],
)
def test_an_adapter_that_cannot_continue_is_refused_with_the_key(sft, fields, settings, message):
    change(sft[1], **settings)
    with pytest.raises(ConfigError, match=rf"^models\.actor\..*{message}"):
        TransformersModel(str(sft[1]), optimizer=STEP, **fields).check("actor")


def test_an_adapter_folder_without_peft_or_weights_is_one_line(sft, monkeypatch):
    (sft[1] / "adapter_model.safetensors").rename(sft[1] / "adapter_model.bin")
    with pytest.raises(DataError, match=r"^models\.actor\.path=.*the adapter folder has no adapter_model\.safetensors"):
        TransformersModel(str(sft[1])).check("actor")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"peft is not installed. Run pip install 'realign-rl\[peft\]'"):
        TransformersModel(str(sft[1])).check("actor")
