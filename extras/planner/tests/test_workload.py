from __future__ import annotations

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from extras.planner.tests.models import built, load_for, words_for, write_model
from realign.errors import ConfigError
from realign.samplers.in_process.settings import InProcessSampling
from realign_planner.options import PlanOptions
from realign_planner.simulator import Tail
from realign_planner.workload import LORA_FRACTION, workload_of


def test_the_sizes_of_a_model_come_from_its_config_without_weights(tmp_path):
    load = load_for(tmp_path / "model", "models.actor.dtype=bfloat16")
    network = load.roles["actor"].network
    module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model"))
    assert network.weights == sum(p.numel() for p in module.parameters())
    assert (network.layers, network.kv_heads, network.head_size, network.hidden) == (4, 2, 16, 64)
    assert network.number_bytes == 2
    assert load_for(tmp_path / "model", "models.actor.dtype=float32").roles["actor"].network.number_bytes == 4


def test_the_experts_that_a_token_does_not_choose_are_idle(tmp_path):
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    write_model(tmp_path, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", **experts)
    network = workload_of(built(words_for(tmp_path)), PlanOptions()).roles["actor"].network
    assert network.weights - network.active == 4 * 6 * (3 * 64 * 32)


def test_the_work_of_a_step_comes_from_the_experiment_and_the_options(tmp_path):
    more = ("batch_prompts=6", "interfaces.actor.generation.n=5", "interfaces.actor.generation.max_new_tokens=40")
    load = load_for(tmp_path / "model", *more, prompt_tokens=10, length_sigma=0.3, reward_s=2.0)
    assert (load.work.batch_prompts, load.work.group, load.sequences) == (6, 5, 30)
    assert (load.work.prompt_tokens, load.work.lengths, load.work.reward_s) == (10, Tail(20.0, 0.3, 40), Tail(2.0))
    assert load.tokens == 30 * 30
    fixed = load_for(tmp_path / "model", *more, "interfaces.actor.generation.fixed_length=true")
    assert fixed.work.lengths == Tail(40, 0.0, 40)
    assert load_for(tmp_path / "model", *more, response_tokens=90).work.lengths.mean == 40


def test_the_settings_of_the_sampler_reach_the_plan(tmp_path):
    load = load_for(tmp_path / "model")
    assert (load.max_slots, load.cache_fraction) == (None, InProcessSampling.cache_fraction)
    load = load_for(tmp_path / "model", "models.actor.sampler.max_slots=7", "models.actor.sampler.cache_fraction=0.25")
    assert (load.max_slots, load.cache_fraction) == (7, 0.25)


def test_calls_have_the_operations_of_their_passes(tmp_path):
    load = load_for(tmp_path / "model", "interfaces.actor.kl.place=loss", "interfaces.actor.epochs=3")
    assert {call.name: call.operations for call in load.calls} == {"ref_inf": 2.0, "actor_train": 18.0}
    assert load.calls[-1].optimizer_steps == 3 * built(words_for(tmp_path / "model")).interfaces["actor"].n_minibatches
    assert "ref_inf" in load.calls[-1].after
    assert (load.sampling_calls, load.reward_calls) == (("actor_gen",), ("reward_inf",))
    assert load.epochs == 3


def test_lora_trains_few_weights_and_shares_the_base_with_the_reference(tmp_path):
    load = load_for(tmp_path / "model", "interfaces.actor.kl.place=loss", "models.actor.trains=lora")
    assert list(load.roles) == ["actor"]
    assert load.roles["actor"].trained == LORA_FRACTION
    operations = {call.name: (call.role, call.operations) for call in load.calls}
    assert operations["ref_inf"] == ("actor", 2.0)
    assert operations["actor_train"] == ("actor", pytest.approx(4.0, rel=0.01))


def test_top_layers_train_their_fraction_of_the_weights(tmp_path):
    load = load_for(tmp_path / "model", "models.actor.trains=top_layers", "models.actor.trains.layers=1")
    assert load.roles["actor"].trained == 0.25


def test_experiments_that_cannot_be_planned_are_named(tmp_path):
    write_model(tmp_path / "model")
    sft = ["experiment=sft", f"models.actor.path={tmp_path / 'model'}", "data.path=x.jsonl"]
    with pytest.raises(ConfigError, match="the graph does not sample and train"):
        workload_of(built(sft), PlanOptions())
    with pytest.raises(ConfigError, match=r"models.actor.path=.*neither a model folder nor a hub name"):
        workload_of(built(words_for(tmp_path / "no" / "such" / "model")), PlanOptions())
