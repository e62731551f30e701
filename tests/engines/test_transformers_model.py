from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from realign.api import MicroBatchSpec
from realign.api.stats import stat_values
from realign.engines import OptimizerSpec, TransformersModel
from realign.errors import ConfigError, DataError, RunError, SettingsError, TransientError
from realign.models import All, Causal, HeadInit, Lora, Score, TopLayers, Value
from realign.models.network.attention import PackedContext
from realign.samplers.servers.vllm import Vllm
from tests.flash_stand_in import compute_as_on_a_gpu
from tests.tiny import FAMILIES, OTHERS, UNPACKED, random_sample, save_tiny, tiny_engine, tiny_model, tiny_tokenizer

CLASSES = {
    Causal: AutoModelForCausalLM,
    Score: AutoModelForSequenceClassification,
    Value: AutoModelForTokenClassification,
}
WITHOUT_TOKEN_CLASSIFIER = ("opt", "gemma3_text")


@pytest.fixture
def offline(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def load(path, name="actor", **fields):
    return TransformersModel(str(path), **fields).load(name, seed=0)


def logprobs(engine, data):
    out = engine.forward(data, MicroBatchSpec(), lambda out, mb: mb.with_tokens(logprobs=out.logprobs()))
    return out["logprobs"]


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_every_family_passes_its_probe(family):
    engine = tiny_engine(family)
    data = random_sample([[6, 3]])
    engine.module.set_attn_implementation("eager")
    ids = data["input_ids"]
    want = engine.module(input_ids=ids[None, :6], use_cache=False).logits[0].log_softmax(-1)
    engine.module.set_attn_implementation("realign")
    torch.testing.assert_close(logprobs(engine, data)[1:6], want[torch.arange(5), ids[1:6]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", UNPACKED)
def test_families_with_attention_of_their_own_run_unpacked_and_say_so(tmp_path, family, caplog):
    save_tiny(tmp_path / family, family)
    engine = load(tmp_path / family).engine
    assert engine.network.abilities.unpacked is not None
    assert f"models.actor: model family '{family}' cannot run packed" in caplog.text
    data = random_sample([[6]])
    ids = data["input_ids"]
    want = tiny_model(family, attention="eager")(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
    torch.testing.assert_close(logprobs(engine, data)[1:], want[torch.arange(5), ids[1:]], atol=1e-5, rtol=1e-5)


def test_probe_refuses_logits_that_the_config_does_not_explain():
    module = tiny_model("llama")
    module.lm_head.register_forward_hook(lambda layer, inputs, out: out * 1.01)
    with pytest.raises(ConfigError, match="'llama' is not supported: its outputs differ"):
        tiny_engine_of(module)


def test_a_model_whose_positions_do_not_restart_runs_unpacked():
    module = tiny_model("gpt2")
    module.transformer.register_forward_pre_hook(
        lambda layer, args, kw: (args, {k: v for k, v in kw.items() if k != "position_ids"}), with_kwargs=True
    )
    unpacked = tiny_engine_of(module).network.abilities.unpacked
    assert unpacked is not None
    assert "'gpt2' cannot run packed: hidden states of packed sequences differ" in unpacked.reason


def tiny_engine_of(module):
    from realign.engines.training.transformers_engine import TransformersEngine

    return TransformersEngine("actor", module, None, seed=0)


def test_probe_refuses_a_kernel_that_is_wrong_in_bfloat16(monkeypatch):
    right = PackedContext.attend

    def wrong(self, layer, q, k, v, args):
        out = right(self, layer, q, k, v, args)
        return out.roll(1, 1) if q.dtype == torch.bfloat16 else out

    compute_as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(PackedContext, "attend", wrong)
    tiny_engine("llama")
    with pytest.raises(ConfigError, match="'llama' with attention=auto in bfloat16 differs by"):
        tiny_engine("llama", dtype=torch.bfloat16)


@pytest.mark.parametrize("head", [Causal(), Score(), Value()], ids=str)
def test_save_and_load_back(tmp_path, head):
    source = save_tiny(tmp_path / "source", "llama")
    model = load(source, head=head, optimizer=OptimizerSpec(lr=1e-2))
    engine, data = model.engine, random_sample([[7], [5, 4]])
    losses = {
        Causal: lambda out, mb: (out.logprobs().sum(), {}),
        Score: lambda out, mb: (out.scores().sum(), {}),
        Value: lambda out, mb: (out.values().sum(), {}),
    }
    engine.train_batch(data, MicroBatchSpec(), losses[type(head)], lambda d: torch.tensor(1.0))
    target = tmp_path / "runs" / "saved"
    engine.save(target)
    engine.save(target)  # replaces the existing folder
    assert sorted(p.name for p in target.parent.iterdir()) == ["saved"]
    assert (target / "model.safetensors").is_file()
    assert "realign" not in (target / "config.json").read_text()
    assert json.loads((target / "config.json").read_text())["dtype"] == "float32"
    back = CLASSES[type(head)].from_pretrained(target)
    for (name, a), (_, b) in zip(engine.module.named_parameters(), back.named_parameters(), strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert torch.equal(a, b), name
    again = load(target, head=head)
    assert again.tokenizer("1+2=3")["input_ids"] == tiny_tokenizer()("1+2=3")["input_ids"]
    assert again.tokenizer.decode(again.tokenizer("1+2=3 ok")["input_ids"]) == "1+2=3 ok"
    what = {Causal: "logprobs", Score: "scores", Value: "values"}[type(head)]

    def hook(out, mb):
        x = getattr(out, what)()
        return mb.with_sequences(x=x) if isinstance(head, Score) else mb.with_tokens(x=x)

    results = [e.forward(data, MicroBatchSpec(), hook)["x"] for e in (engine, again.engine)]
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("head", "trains", "rate"), [(Causal(), All(), 1e-4), (Causal(), Lora(), 1e-3), (Value(), All(), 5e-4)], ids=str
)
def test_without_a_learning_rate_the_size_of_the_model_decides_it(tmp_path, head, trains, rate):
    spec = TransformersModel(
        save_tiny(tmp_path / "model", "llama"), head=head, trains=trains, optimizer=OptimizerSpec()
    )
    model = spec.load("actor", seed=0)
    decided, weights = spec.rate_by_size("actor")
    assert decided == pytest.approx(rate)
    assert weights == sum(p.numel() for name, p in model.engine.module.named_parameters() if "lora" not in name)
    output = {Causal: "logprobs", Value: "values"}[type(head)]
    stats = model.engine.train_batch(
        random_sample([[7]]),
        MicroBatchSpec(),
        lambda out, mb: (getattr(out, output)().sum(), {}),
        lambda data: torch.tensor(1.0),
    )
    assert stat_values(stats)["lr"] == pytest.approx(rate)
    assert replace(spec, optimizer=OptimizerSpec(lr=1e-3)).rate_by_size("actor") is None
    assert replace(spec, path="owner/not-downloaded").rate_by_size("actor") is None


@pytest.mark.parametrize("family", FAMILIES)
def test_scalar_heads_of_every_family(family):
    data = random_sample([[6, 3]])
    for head in ("score", "value"):
        if head == "value" and family in WITHOUT_TOKEN_CLASSIFIER:
            continue
        engine = tiny_engine(family, model={"head": head})  # the probe compares with the model's own output
        out = engine.network.run(data, data)
        x = out.scores() if head == "score" else out.values()
        assert x.shape == ((2,) if head == "score" else (9,))
        assert x.abs().max() > 1e-3


def test_new_heads_are_drawn_from_the_seed_of_the_role(tmp_path):
    save_tiny(tmp_path / "model", "llama")
    state = torch.get_rng_state()

    def weight(name, seed):
        spec = TransformersModel(str(tmp_path / "model"), head=Score(), optimizer=OptimizerSpec(lr=1e-2))
        model = spec.load(name, seed=seed)
        return model.engine.head.weight_1H

    assert torch.equal(weight("reward", 0), weight("reward", 0))
    assert not torch.equal(weight("reward", 0), weight("reward", 1))
    assert not torch.equal(weight("reward", 0), weight("critic", 0))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("head", [Score, Value])
def test_a_random_head_that_nothing_trains_is_refused(tmp_path, head):
    save_tiny(tmp_path / "model", "llama")
    with pytest.raises(DataError, match=rf"models\.reward\.head={head()}: .* has no such head .*score\.weight"):
        load(tmp_path / "model", "reward", head=head())
    load(tmp_path / "model", "reward", head=head(HeadInit.zero))


def test_a_language_model_without_its_last_layer_is_refused(tmp_path):
    folder = save_tiny(tmp_path / "reward", "llama", head="score")
    with pytest.raises(
        DataError, match=r"models\.actor\.head=causal: .* contains a reward model or critic \(score\.weight"
    ):
        load(folder, "actor")
    weights = load_file(folder / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=r"models\.actor\.path=.* lacks weights for head=causal: lm_head\.weight"):
        load(folder, "actor")


def test_a_folder_without_all_layers_is_refused(tmp_path):
    folder = save_tiny(tmp_path / "model", "llama")
    weights = load_file(folder / "model.safetensors")
    save_file(
        {k: v for k, v in weights.items() if ".mlp.up_proj." not in k}, folder / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(
        DataError, match=r"models\.actor\.path=.* lacks weights .* model\.layers\.0\.mlp\.up_proj\.weight"
    ):
        load(folder, "actor")


def test_head_init_starts_a_scalar_head_anew(tmp_path):
    folder = str(save_tiny(tmp_path / "model", "llama", head="score"))

    def weight(init, seed=0, head=Score):
        return TransformersModel(folder, head=head(init)).load("reward", seed=seed).engine.head.weight_1H

    assert not weight("zero").any()
    assert not weight("zero", head=Value).any()
    kept, drawn = weight(None), weight("normal")
    assert torch.equal(kept, weight(None, seed=1))
    assert torch.equal(drawn, weight("normal"))
    assert not torch.equal(drawn, weight("normal", seed=1))
    assert drawn.std().item() == pytest.approx(65**-0.5, rel=0.3)  # hidden size 64


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "qwen2"])
def test_a_critic_starts_as_the_reward_model_of_its_folder(tmp_path, family):
    """Some families name the layer `score` in one class and `classifier` in the other."""
    folder = save_tiny(tmp_path / "reward", family, head="score")
    data = random_sample([[7], [5, 4]])
    reward = load(folder, "reward", head=Score()).engine
    critic = load(folder, "critic", head=Value(), optimizer=OptimizerSpec(lr=1e-2)).engine
    assert torch.equal(critic.head.weight_1H, reward.head.weight_1H)
    assert not critic.head.bias_1.any()  # a reward model has no bias
    scores = [
        e.forward(data, MicroBatchSpec(), lambda out, mb: mb.with_sequences(s=out.scores()))["s"]
        for e in (reward, critic)
    ]
    assert torch.equal(*scores)
    critic.train_batch(data, MicroBatchSpec(), lambda out, mb: (out.values().sum(), {}), lambda d: torch.tensor(1.0))
    critic.save(tmp_path / "critic")
    back = load(tmp_path / "critic", "reward", head=Score()).engine
    assert torch.equal(back.head.weight_1H, critic.head.weight_1H)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_critic_from_the_actor_starts_with_a_head_of_its_own(tmp_path, family):
    folder = save_tiny(tmp_path / "actor", family)
    data = random_sample([[7], [5, 4]])
    for init in ("zero", "normal"):
        critic = load(folder, "critic", head=Value(init)).engine
        values = critic.forward(data, MicroBatchSpec(), lambda out, mb: mb.with_tokens(v=out.values()))["v"]
        assert values.any() == (init == "normal")
        actor = load(folder).engine.module.base_model.state_dict()
        assert all(torch.equal(x, actor[name]) for name, x in critic.module.base_model.state_dict().items())


def test_trap_b5_nothing_but_end_tokens_is_read_from_generation_config(tmp_path):
    folder = save_tiny(tmp_path / "model", "qwen2")
    leaked = {"eos_token_id": [2, 9], "repetition_penalty": 1.1, "top_k": 20, "temperature": 0.7, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(leaked))
    assert load(folder).engine.capabilities().eos_token_ids == (2, 9)
    (folder / "generation_config.json").unlink()
    assert load(folder).engine.capabilities().eos_token_ids == (2,)


@pytest.mark.parametrize(("config", "saved"), [([7, 9], [2, 7, 9]), (7, [2, 7]), (2, 2), (None, 2)])
def test_a_saved_model_stops_where_trained_responses_end(tmp_path, config, saved):
    """The tokenizer has another end token than the config of the base model, as after `setup_chat_format`."""
    folder = save_tiny(tmp_path / "model", "qwen2")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config}))
    load(folder).engine.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/generation_config.json").read_text())["eos_token_id"] == saved


@pytest.mark.parametrize("path", ["./model", "/nowhere/model", "~/model", "a/b/c", "here/model", "..", "", "-x", "a b"])
def test_a_bad_local_path_fails_at_once(tmp_path, monkeypatch, offline, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(
        (ConfigError, DataError), match=r"^models\.actor\.path=.*: (neither|the folder has no)"
    ) as error:
        load(path or "", "actor")
    assert "\n" not in str(error.value)


def test_a_hub_name_out_of_reach_is_one_line(monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("We couldn't connect.\nSecond line.")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", fail)
    with pytest.raises(
        DataError, match=r"^models.actor.path='owner/m': cannot load 'owner/m' from .*: OSError: We couldn't connect\.$"
    ):
        load("owner/m")


def test_trap_g3_weights_that_are_not_finite_are_not_saved(tmp_path):
    engine = tiny_engine("llama")
    engine.save(tmp_path / "model")
    weight = next(engine.module.parameters())
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.view(-1)[0] = float("nan")
    with pytest.raises(
        RunError, match=r"models\.actor was not saved: weight 'model\.embed_tokens\.weight' is not finite"
    ):
        engine.save(tmp_path / "model")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(back.model.embed_tokens.weight, kept)


def test_trap_g3_a_save_that_fails_leaves_the_old_folder(tmp_path, monkeypatch):
    engine = tiny_engine("llama")
    engine.save(tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()

    def fail(path):
        raise OSError("permission denied")

    monkeypatch.setattr(engine.tokenizer, "save_pretrained", fail)
    with pytest.raises(OSError, match="permission denied") as error:
        engine.save(tmp_path / "model")
    assert not isinstance(error.value, TransientError)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before


def test_weights_that_the_disk_does_not_take_are_an_error_of_the_disk(tmp_path, monkeypatch):
    """In this case safetensors raises an error that is not an OSError, and would look like a bug."""
    engine = tiny_engine("llama")
    engine.save(tmp_path / "model")

    def fail(path, **given):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(engine.module, "save_pretrained", fail)
    with pytest.raises(OSError, match=r"model was not saved: I/O error: No space left") as error:
        engine.save(tmp_path / "model")
    assert isinstance(error.value, TransientError)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_saved_folders_can_be_read_by_others(tmp_path):
    engine = tiny_engine("llama")
    old = os.umask(0o022)
    try:
        engine.save(tmp_path / "model")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "model").stat().st_mode) == 0o755


def test_importing_the_package_does_not_import_transformers():
    code = "import realign.engines, sys; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_server_cannot_sample_a_part_of_the_vocabulary():
    with pytest.raises(SettingsError, match=r"head\.vocabulary=5: sampler=Vllm samples all tokens\."):
        TransformersModel("x", head=Causal(vocabulary=5), sampler=Vllm())


@pytest.mark.parametrize(
    ("trains", "keeps_start"), [(All(), False), (TopLayers(1), True), (Lora(), True)], ids=["all", "top", "lora"]
)
def test_a_start_is_kept_by_what_trains_in_part_or_not_at_all(trains, keeps_start):
    assert TransformersModel("x", optimizer=OptimizerSpec(), trains=trains).facts().branches == keeps_start
    assert not TransformersModel("x").facts().trainable


def test_a_tokenizer_that_transformers_rebuilds_as_another_kind_is_read_from_its_file(tmp_path):
    folder = save_tiny(tmp_path / "model", "qwen2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = TransformersModel(str(folder), device="cpu").load("actor", seed=0)
    text = "1+2= 3\nok"
    assert type(AutoTokenizer.from_pretrained(folder)).__name__ == "Qwen2Tokenizer"
    assert model.tokenizer(text)["input_ids"] == tiny_tokenizer()(text)["input_ids"]
    assert model.tokenizer.eos_token == "<eos>"


def test_a_role_uses_the_tokenizer_of_the_actor_unless_it_names_one(tmp_path):
    actor = TransformersModel("model", tokenizer="words")
    source = actor.tokenizer_source("actor")
    assert (source.path, source.key) == ("words", "models.actor.tokenizer")
    assert TransformersModel("other").with_tokenizer(source).tokenizer_source("ref") == source
    own = TransformersModel("other", tokenizer="own").with_tokenizer(source)
    assert own.tokenizer_source("ref").key == "models.ref.tokenizer"
    trained = TransformersModel("other", optimizer=OptimizerSpec(ema_decay=0.9)).with_tokenizer(source)
    assert trained.for_sampling().tokenizer_source("critic") == source


def test_an_inherited_tokenizer_must_fit_the_tokenizer_in_the_folder_of_the_role(tmp_path):
    actor, other = save_tiny(tmp_path / "actor"), save_tiny(tmp_path / "other")
    source = TransformersModel(str(actor)).tokenizer_source("actor")
    inherits = TransformersModel(str(other), device="cpu").with_tokenizer(source)
    assert inherits.load("ref", seed=0).tokenizer.name_or_path == str(actor)
    words = json.loads((other / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    (other / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(
        ConfigError, match=r"models\.ref: .* Token '1' has id .* models\.actor .* models\.ref\.tokenizer"
    ):
        inherits.load("ref", seed=0)
    small = save_tiny(tmp_path / "small", vocab_size=60)
    with pytest.raises(
        DataError, match=r"models\.ref: the tokenizer of models\.actor\.path=.* ids up to 96, .* only 60 tokens"
    ):
        TransformersModel(str(small), device="cpu").with_tokenizer(source).load("ref", seed=0)


def test_a_role_whose_folder_has_no_tokenizer_works_with_that_of_the_actor(tmp_path):
    source = TransformersModel(str(save_tiny(tmp_path / "actor"))).tokenizer_source("actor")
    tiny_model("llama").save_pretrained(tmp_path / "bare")
    bare = TransformersModel(str(tmp_path / "bare"), device="cpu").with_tokenizer(source)
    bare.check("ref")
    assert len(bare.load("ref", seed=0).tokenizer) == 97
