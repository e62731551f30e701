from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM

from realign.api import GenerationConfig, MicroBatchSpec, SequenceSample
from realign.cli import commands as cli
from realign.engines import All, Causal, Lora, OptimizerSpec, Score, SharedModel, TransformersModel, Value, ValueHead
from realign.engines.distributed.ranks import Ranks
from realign.engines.module_reader import check_head
from realign.errors import ConfigError, DataError
from tests.tiny import random_sample, save_tiny

ALONE = Lora(rank=4, merge_on_save=False)

STEP = OptimizerSpec(lr=1e-2)

DATA = random_sample(((9, 4, 6), (12,)))

REAL = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs the extra quantization (bitsandbytes)")


def model(folder, **fields):
    settings = {"optimizer": STEP, "trains": ALONE, "device": "cpu", "load_in_4bit": True, **fields}
    return TransformersModel(str(folder), **settings)


def logprobs(engine):
    spec = MicroBatchSpec()
    return engine.forward(DATA, spec, lambda out, mb: mb.with_tokens(logprobs=out.logprobs()))["logprobs"]


def train(engine, steps=2):
    for _ in range(steps):
        engine.train_batch(
            DATA, MicroBatchSpec(), lambda out, mb: (out.logprobs().sum(), {}), lambda d: d["loss_mask"].sum()
        )


@pytest.fixture
def stubbed(monkeypatch):
    """Replace the loading call by one that does not quantize. Return its arguments."""
    found = {}
    monkeypatch.setattr("realign.engines.module_reader.find_spec", lambda name: name)
    load = AutoModelForCausalLM.from_pretrained

    def from_pretrained(path, **settings):
        found.update(settings)
        return load(path, **{k: x for k, x in settings.items() if k not in ("quantization_config", "device_map")})

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linear_layers_are_loaded_as_nf4_on_the_device(tmp_path, stubbed, dtype):
    engine = model(save_tiny(tmp_path), dtype=dtype).load("actor", seed=0).engine
    settings = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": dtype,
        "llm_int8_skip_modules": ["lm_head", "embed_out", "score", "classifier"],
    }
    found = stubbed["quantization_config"].to_dict()
    assert {name: found[name] for name in settings} == settings
    assert stubbed["device_map"] == {"": torch.device("cpu")}
    assert stubbed["dtype"] == torch.float32
    assert engine.fusion is None
    train(engine)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer": None, "trains": None}, "weights in 4 bits cannot train. Set models.actor.trains=lora"),
        ({"trains": Lora(rank=4)}, "Set models.actor.trains.merge_on_save=false, and merge .* realign export --merge"),
        ({"head": Causal(ValueHead(layers=1))}, "models.actor.head.value_head.layers would copy and train"),
    ],
)
def test_settings_that_need_whole_weights_are_refused(tmp_path, stubbed, fields, message):
    fields = {name: All() if name == "trains" and x is None else x for name, x in fields.items()}
    with pytest.raises(ConfigError, match=f"^models.actor.load_in_4bit=true: .*{message}"):
        model(save_tiny(tmp_path), **fields).check("actor")


def test_weights_in_4_bits_are_not_sharded(tmp_path, stubbed, monkeypatch):
    monkeypatch.setattr("realign.engines.transformers_model.current", lambda: Ranks(rank=0, size=2))
    with pytest.raises(ConfigError, match=r"models\.actor\.load_in_4bit=true: .* cannot be sharded"):
        model(save_tiny(tmp_path)).check("actor")


def test_without_bitsandbytes_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"load_in_4bit=true: .* Run pip install 'realign-rl\[quantization\]'\.$"):
        model(save_tiny(tmp_path)).check("actor")


def test_the_reference_is_the_base_in_4_bits_and_a_continued_adapter_has_none(tmp_path):
    assert model("x").frozen_start("actor") == SharedModel("actor", "reference")
    with pytest.raises(ConfigError, match=r"models\.actor\.load_in_4bit=true: a continued adapter has no reference"):
        model("x", adapter="continue").frozen_start("actor")


@pytest.mark.slow
@REAL
def test_a_base_in_4_bits_trains_samples_resumes_and_is_exported(tmp_path):
    folder = save_tiny(tmp_path / "base")
    whole, first, second = (model(folder).load("actor", seed=0).engine for _ in range(3))
    kinds = {type(layer.base_layer).__name__ for name, layer in whole.module.named_modules() if name.endswith("q_proj")}
    assert kinds == {"Linear4bit"}
    assert type(whole.module.lm_head) is torch.nn.Linear
    plain = TransformersModel(str(folder), device="cpu").load("ref", seed=0).engine
    difference = (logprobs(whole) - logprobs(plain)).abs().max()
    assert 0 < difference < 1
    train(whole, 3)
    train(first, 2)
    second.load_state_dict(first.state_dict())
    assert torch.equal(logprobs(second), logprobs(first))
    train(second, 1)
    assert torch.equal(logprobs(second), logprobs(whole))
    fixed = whole.fixed_weights()["module"]
    assert any(name.endswith("q_proj.base_layer.weight.absmax") for name in fixed)
    assert not fixed.keys() & whole.state_dict()["module"].keys()
    prompts = SequenceSample.from_sequences(["a"], {"prompt_ids": [[[5, 6, 7]]]})
    sampled = whole.generate(prompts, GenerationConfig(n=2, max_new_tokens=6, fixed_length=True), seed=1)
    assert sampled["loss_mask"].sum() == 12
    whole.save(tmp_path / "adapter")
    further = model(tmp_path / "adapter").load("actor", seed=0).engine
    torch.testing.assert_close(logprobs(further), logprobs(whole))
    assert cli.main(["export", str(tmp_path / "adapter"), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    merged = TransformersModel(str(tmp_path / "merged"), device="cpu").load("actor", seed=0).engine
    assert (logprobs(merged) - logprobs(whole)).abs().max() < 2 * difference + 1e-3


HEADS = {"causal": Causal(), "score": Score(), "value": Value()}


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
        assert spec.facts().outputs == spec.load("x", seed=0).engine.capabilities().outputs
    both = TransformersModel(str(tmp_path / "causal"), head=Causal(ValueHead()))
    assert both.facts().outputs == {"logprobs", "values", "scores"}
