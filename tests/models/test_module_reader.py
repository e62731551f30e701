from __future__ import annotations

import json
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from realign.engines import OptimizerSpec, SharedModel, TransformersModel
from realign.errors import ConfigError, DataError
from realign.models import All, Causal, Lora, Score, Value, ValueHead
from realign.models.files.unread import weights_in
from realign.models.module_reader import check_head
from tests.tiny import VOCAB, logprobs, lower_logprobs, random_sample, save_tiny

ALONE = Lora(rank=4, merge_on_save=False)

STEP = OptimizerSpec(lr=1e-2)

DATA = random_sample(((9, 4, 6), (12,)))


def model(folder, **fields):
    settings = {"optimizer": STEP, "trains": ALONE, "device": "cpu", "load_in_4bit": True, **fields}
    return TransformersModel(str(folder), **settings)


@pytest.fixture
def stubbed(monkeypatch):
    """Replace the loading call by one that does not quantize. Return its arguments."""
    settings_given = {}
    monkeypatch.setattr("realign.models.module_reader.find_spec", lambda name: name)
    load = AutoModelForCausalLM.from_pretrained

    def from_pretrained(path, **settings):
        settings_given.update(settings)
        return load(path, **{k: x for k, x in settings.items() if k not in ("quantization_config", "device_map")})

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    return settings_given


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
    config = stubbed["quantization_config"].to_dict()
    assert {name: config[name] for name in settings} == settings
    assert stubbed["device_map"] == {"": torch.device("cpu")}
    assert stubbed["dtype"] == torch.float32
    assert engine.fusion is None
    lower_logprobs(engine, DATA, 2)


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


def test_without_bitsandbytes_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"load_in_4bit=true: .* Run pip install 'realign-rl\[quantization\]'\.$"):
        model(save_tiny(tmp_path)).check("actor")


def test_the_reference_is_the_base_in_4_bits_and_a_continued_adapter_has_none(tmp_path):
    assert model("x").frozen_start("actor") == SharedModel("actor", "reference")
    with pytest.raises(ConfigError, match=r"models\.actor\.load_in_4bit=true: a continued adapter has no reference"):
        model("x", adapter="continue").frozen_start("actor")


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


def change(folder, weights=lambda state: state, **config):
    """Change weights and config of a model folder."""
    file = folder / "model.safetensors"
    state = {name: x.clone() for name, x in weights(load_file(file)).items()}
    save_file(state, file, {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | config))


def loaded(folder, **fields):
    return TransformersModel(str(folder), device="cpu", **fields).load("actor", seed=0).engine


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_weights_that_no_layer_takes_are_refused(tmp_path, family):
    folder = save_tiny(tmp_path / "m", family)
    layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
    change(folder, **{layers: 2, "layer_types": None})
    with pytest.raises(DataError, match=r"models\.actor\.path=.*: no layer .* takes the weight '.*\.2\..* 2 layers\)"):
        loaded(folder)
    change(folder, **{layers: 4})
    with pytest.raises(DataError, match=r"models\.actor\.path=.* lacks weights for head=causal: .*\.3\."):
        loaded(folder)


@pytest.mark.parametrize(
    ("name", "warned"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", False),
        ("model.layers.0.attention.masked_bias", False),
        ("mtp.layers.0.mlp.weight", True),
        ("model.visual.blocks.0.weight", True),
        ("v_head.summary.weight", True),
        ("score.weight", True),
    ],
)
def test_harmless_weights_are_left_over_and_other_parts_are_named_once(tmp_path, name, warned):
    folder = save_tiny(tmp_path / "m")
    wanted = logprobs(loaded(folder), DATA)
    change(folder, lambda state: state | {name: torch.ones(4)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(logprobs(loaded(folder), DATA), wanted)
    said = [str(w.message) for w in caught if "not used" in str(w.message)]
    assert said == [f"models.actor.path={str(folder)!r}: 1 weights are not used, such as {name!r}."] * warned


def test_a_weight_of_another_shape_is_named_with_both_shapes(tmp_path):
    folder = save_tiny(tmp_path / "m")
    change(folder, vocab_size=VOCAB - 3)
    shapes = rf"has the shape \[{VOCAB}, 64\], expected \[{VOCAB - 3}, 64\]"
    with pytest.raises(
        DataError, match=rf"models\.actor\.path=.*: the weight '.*(lm_head|embed_tokens)\.weight' {shapes}"
    ):
        loaded(folder)


def test_a_classifier_with_several_labels_is_no_reward_model_unless_its_head_is_replaced(tmp_path):
    folder = save_tiny(tmp_path / "m", head="score")
    change(folder, lambda state: state | {"score.weight": torch.ones(2, 64)}, num_labels=2)
    with pytest.raises(
        DataError, match=r"'score\.weight' has the shape \[2, 64\], expected \[1, 64\]\. A model with head="
    ):
        loaded(folder, head=Score())
    assert not loaded(folder, head=Score("zero")).head.weight_1H.any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_is_named_before_the_model_is_probed(tmp_path, value):
    folder = save_tiny(tmp_path / "m")

    def spoil(state):
        state["model.layers.1.mlp.up_proj.weight"][3, 2] = value
        return state

    change(folder, spoil)
    message = r"models\.actor\.path=.*: the weight 'model\.layers\.1\.mlp\.up_proj\.weight' has values that are NaN"
    with pytest.raises(DataError, match=message):
        loaded(folder)
    weights = weights_in(str(folder), torch.device("cpu"))
    with pytest.raises(
        DataError, match=r"model\.safetensors': the weight 'model\.layers\.1\.mlp\.up_proj\.weight' has"
    ):
        weights["model.layers.1.mlp.up_proj.weight"].read([slice(2, 4)])
