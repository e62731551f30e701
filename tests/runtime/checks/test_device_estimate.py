from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from realign.api.memory import RoleMemory
from realign.config import build_experiment, compose
from realign.runtime.checks import device_estimate
from realign.runtime.checks.device_estimate import DeviceEstimate, estimate, work_of
from tests.tiny import save_tiny

GRPO = ("interfaces.reward.function=realign.rewards.arithmetic:exact_answer", "data.path=prompts.jsonl")
SMALL = ("batch_prompts=4", "interfaces.actor.generation.n=2", "interfaces.actor.generation.max_new_tokens=20")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "model")


def experiment(*words):
    return build_experiment(compose(["experiment=grpo", "models.actor.path=model", *GRPO, *SMALL, *words]))


def test_work_follows_from_batch_lengths_and_budget(here):
    work = work_of(experiment("data.max_prompt_tokens=10"), "actor")
    assert (work.trains, work.samples, work.prompts, work.sequences) == (True, True, 4, 8)
    assert (work.prompt, work.response, work.tokens, work.optimizer_step_tokens) == (10, 20, 240, 240)
    assert work_of(experiment("microbatch.max_tokens_per_microbatch=100"), "actor").tokens == 100
    assert work_of(experiment("data.max_prompt_tokens=null"), "actor").prompt == device_estimate.ASSUMED_PROMPT


def test_a_row_limit_is_the_length_of_a_sequence_without_sampling(here):
    words = ["experiment=sft", "models.actor.path=model", "data.path=a.jsonl", "batch_prompts=4", "data.max_tokens=50"]
    work = work_of(build_experiment(compose(words)), "actor")
    assert (work.samples, work.optimizer_step_tokens) == (False, 200)


def test_roles_on_one_device_add_their_weights_and_share_the_rest(here):
    (device,) = estimate(experiment("interfaces.actor.kl.coef=0.1", "interfaces.actor.kl.place=loss"))
    assert list(device.roles) == ["actor", "ref"]
    actor, ref = device.roles.values()
    assert ref.kept == ref.weights == actor.weights
    assert device.kept == actor.kept + ref.kept
    assert device.peak == device.kept + max(actor.passing, ref.passing)
    assert device.free == pytest.approx(device_estimate.free_memory(torch.device("cpu")), rel=0.2)


def test_a_role_that_shares_a_model_adds_its_calls_to_the_owner(here):
    with_adapters = experiment(
        "models.actor.trains=lora", "interfaces.actor.kl.coef=0.1", "interfaces.actor.kl.place=loss"
    )
    (device,) = estimate(with_adapters)
    assert list(device.roles) == ["actor"]
    assert device.roles["actor"].references == 0
    assert work_of(with_adapters, "actor").scores


def test_asynchronous_rollout_has_a_copy_of_the_weights(here):
    (device,) = estimate(experiment("rollout=async"))
    actor, rollout = device.roles["actor"], device.roles["rollout"]
    assert (actor.cache, rollout.moments, rollout.gradients) == (0, 0, 0)
    assert rollout.kept == actor.weights
    assert device.peak == device.kept + actor.passing + rollout.passing


def test_worker_groups_on_the_cpu_share_the_memory_of_the_host(here, monkeypatch):
    monkeypatch.setattr(device_estimate, "free_memory", lambda device: 10**9)
    groups = estimate(
        experiment(
            "runtime=ray",
            "interfaces.actor.kl.coef=0.1",
            "interfaces.actor.kl.place=loss",
            "+runtime.placement.ref.devices=2",
        )
    )
    assert [(list(g.roles), g.processes) for g in groups] == [(["actor"], 1), (["ref"], 2)]
    assert [g.free for g in groups] == [10**9 - groups[1].peak, 10**9 - groups[0].peak]


def test_a_cached_reference_uses_memory_only_while_it_scores(here):
    words = ["experiment=dpo", "models.actor.path=model", "data.path=a.jsonl", "batch_prompts=4"]
    [resident] = estimate(build_experiment(compose(words)))
    [cached] = estimate(build_experiment(compose([*words, "cache_reference=true"])))
    assert resident.kept - cached.kept == cached.roles["ref"].kept > 0
    assert cached.during("actor", 0) == cached.kept
    assert cached.during("ref", 0) == resident.kept


def test_an_offloaded_role_uses_the_device_only_during_its_calls():
    actor, ref = RoleMemory("cpu", weights=100, gradients=30), RoleMemory("cpu", weights=80, scoring=5)
    both = DeviceEstimate("cpu", {"actor": actor, "ref": ref})
    assert (both.kept, both.peak) == (180, 210)
    assert replace(both, offloaded=frozenset({"ref"})).peak == 185
    assert replace(both, processes=2).peak == 420


@pytest.mark.parametrize(
    ("role", "message"),
    [
        (RoleMemory("cuda:0", weights=2 * 2**30), "cuda:0: weights and optimizer state need 2.0 GiB, but 1.0 GiB are"),
        (
            RoleMemory("cuda:0", 2**20, cache=2**30),
            "in rollouts of actor, but 1.0 GiB are free. Lower",
        ),
        (
            RoleMemory("cuda:0", 2**20, activations=2**30),
            "in training of actor, but 1.0 GiB are free. Lower",
        ),
        (
            RoleMemory("cuda:0", 2**20, gradients=2**30),
            "in training of actor, but 1.0 GiB are free. Train",
        ),
        (RoleMemory("cuda:0", 2**20, scoring=2**30), "in scoring of actor, but 1.0 GiB are free. Lower"),
    ],
)
def test_a_device_that_is_too_small_is_named_with_a_fix(role, message):
    (problem,) = DeviceEstimate("cuda:0", {"actor": role}, free=2**30).problems()
    assert message in problem


def test_what_fits_or_is_unknown_is_no_problem():
    device = DeviceEstimate("cpu", {"actor": RoleMemory("cpu", weights=100)}, free=100)
    assert list(device.problems()) == []
    assert list(replace(device, free=None).problems()) == []
