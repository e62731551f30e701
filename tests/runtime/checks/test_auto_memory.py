from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from realign.api.memory import MemoryChoice, RoleMemory
from realign.api.model import ModelFacts
from realign.cli.launch_table import derived_rows
from realign.config import build_experiment, compose
from realign.ranks import Ranks
from realign.runtime.checks import auto_memory, device_estimate
from realign.runtime.checks.auto_memory import USABLE, decide, with_memory_choices
from realign.runtime.checks.device_estimate import estimate, show
from realign.settings import Auto
from tests.tiny import save_tiny
from tests.toys import BigramModel
from tests.toys import experiment as toy

WORDS = ("data.path=p.jsonl", "interfaces.reward.function=realign.rewards.arithmetic:exact_answer", "batch_prompts=4")
AUTO = "models.actor.gradient_checkpointing=auto"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "model")


@pytest.fixture
def cuda(here, monkeypatch):
    """Let estimates assume a CUDA device; nothing is loaded there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 2**30))


def experiment(*words, auto=(AUTO,)):
    return build_experiment(
        compose(["experiment=grpo", "models.actor.path=model", "models.actor.dtype=float32", *WORDS, *auto, *words])
    )


def needed(made, role="actor"):
    """Return the bytes on the device while a role trains or scores, with the defaults of a CPU."""
    (device,) = estimate(made, free=lambda device: 10**15)
    return device.during(role, device.roles[role].computing)


def having(count):
    return lambda device: count


def test_on_a_cpu_nothing_is_decided_and_no_config_is_read(here):
    made = experiment("models.actor.path=missing")
    assert decide(made, having(1)) == []
    assert with_memory_choices(made) is made
    spec = made.models["actor"]
    assert (spec.gradient_checkpointing, spec.checkpoints, spec.sharding.keeps_rollout) == (Auto.auto, False, True)
    assert not {MemoryChoice.checkpointing, MemoryChoice.sampling_copy} & dict(derived_rows(experiment())).keys()


def test_layers_are_recomputed_if_training_does_not_fit_otherwise(cuda):
    made = experiment()
    most = needed(made)
    (fits,) = decide(made, having(round(most / USABLE) + 1))
    assert (fits.role, fits.setting, fits.on) == ("actor", MemoryChoice.checkpointing, False)
    tight = round(most / USABLE) - 1000
    (full,) = decide(made, having(tight))
    assert full.on
    assert str(full) == f"on (auto: {show(most)} without it, {show(tight)} free on the device)"
    spec = with_memory_choices(made, having(tight)).models["actor"]
    assert (spec.gradient_checkpointing, spec.inherited) == (True, made.models["actor"].inherited)
    assert made.models["actor"].gradient_checkpointing is Auto.auto


def test_roles_on_one_device_decide_for_their_own_calls(cuda):
    made = experiment("interfaces.actor.kl.coef=0.1", "interfaces.actor.kl.place=loss")
    (choice,) = decide(made, having(1))  # the frozen reference trains nothing
    assert choice.role == "actor"
    assert choice.reason.startswith(show(needed(made)))


def test_the_launch_table_shows_the_choice(cuda, monkeypatch):
    made = experiment()
    monkeypatch.setattr(device_estimate, "free_memory", having(2**20))
    monkeypatch.setattr("realign.models.device.supports_bfloat16", lambda device: True)
    row = dict(derived_rows(made))[MemoryChoice.checkpointing]
    assert row == f"on (auto: {show(needed(made))} without it, 1 MiB free on the device)"


def test_the_copy_for_sampling_is_freed_first(cuda, monkeypatch):
    monkeypatch.setattr(device_estimate, "expected_size", lambda: 8)
    made = experiment()
    (device,) = estimate(made, free=lambda device: 10**15)
    most, copy = needed(made), device.roles["actor"].sampling_copy
    assert copy == 8 * device.roles["actor"].weights
    kept, off = decide(made, having(round(most / USABLE) + 1))
    assert (kept.setting, kept.on, off.on) == (MemoryChoice.sampling_copy, True, False)
    freed, off = decide(made, having(round((most - copy) / USABLE) + 1))
    assert (freed.on, off.on) == (False, False)
    assert off.reason.startswith(show(most - copy))
    spec = with_memory_choices(made, having(round((most - copy) / USABLE) - 1000)).models["actor"]
    assert (spec.checkpoints, spec.sharding.keep_rollout) == (True, False)


@dataclass
class Recomputing(BigramModel):
    """A model of a user that can recompute its activations."""

    recomputes: bool | None = None

    def facts(self):
        return ModelFacts(device="cuda:0")

    def memory(self, name, work):
        return RoleMemory("cuda:0", weights=100, activations=900)

    def memory_choices(self):
        return frozenset({MemoryChoice.checkpointing} if self.recomputes is None else ())

    def with_memory_choice(self, choice, on):
        return replace(self, recomputes=on)


def test_a_model_of_a_user_leaves_its_choices_to_the_runtime_too(cuda, tmp_path):
    made = toy(tmp_path, models={"actor": Recomputing()})
    for free, recomputes in ((1200, False), (1100, True)):
        assert with_memory_choices(made, having(free)).models["actor"] == Recomputing(recomputes=recomputes)
    given = toy(tmp_path, models={"actor": Recomputing(recomputes=False)})
    assert with_memory_choices(given, having(1)) is given


def test_rank_0_decides_for_all(here, monkeypatch):
    class Second(Ranks):
        def lead(self, action):
            return [auto_memory.Decision("actor", MemoryChoice.checkpointing, on=True, reason="")]

    monkeypatch.setattr(auto_memory, "current", lambda: Second(1, 2))
    assert with_memory_choices(experiment()).models["actor"].checkpoints
