"""Test weight sync from a trained role: schedule, mixing, verification, and content of checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from realign.api import Sync
from realign.cli.launch_table import derived_rows
from realign.config import ConfigError, compose
from realign.config.experiment import build_experiment
from realign.engines import OptimizerSpec, SharedModel, TransformersModel
from realign.interfaces.components import KLPenalty, KLPlace
from realign.interfaces.grpo import GRPOActorInterface, dataflow
from realign.interfaces.reference import ReferenceInterface
from realign.records.checkpoint.folder import list_checkpoints
from realign.runtime import Async, Experiment, LocalRuntime, run
from realign.runtime.checks.parts import check_parts
from realign.testing import BigramEngine
from tests.tiny import save_tiny
from tests.toys import GENERATION, CountToken, experiment


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    save_tiny(path / "actor", seed=1)
    save_tiny(path / "ref", seed=2)
    save_tiny(path / "wide", num_hidden_layers=1)
    return path


def synced(folder: Path, out: Path, sync: dict[str, Sync], ref: str = "ref", **changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "interfaces": {
            "actor": GRPOActorInterface(generation=replace(GENERATION, n=2), kl=KLPenalty(KLPlace.loss, coef=1e-9)),
            "ref": ReferenceInterface(),
            "reward": CountToken(),
        },
        "models": {
            "actor": TransformersModel(str(folder / "actor"), optimizer=OptimizerSpec(lr=1e-2)),
            "ref": TransformersModel(str(folder / ref)),
        },
        "evaluation": None,
        "sync": sync,
    }
    return experiment(out, **(settings | changes))


def weights(runtime: LocalRuntime, role: str) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in runtime.models[role].engine.weights().items()}


def test_a_reference_becomes_the_mixture_in_every_second_step_and_counts_the_version(folder, tmp_path):
    runtime = LocalRuntime(synced(folder, tmp_path, {"ref": Sync("actor", weight=0.25, every_steps=2)}))
    start = weights(runtime, "ref")
    values, _ = runtime.step(1)
    assert all(weights(runtime, "ref")[name].equal(x) for name, x in start.items())
    assert runtime.models["ref"].version == 0
    assert not any(name.startswith(("sync/", "time/sync")) for name in values)
    values, _ = runtime.step(2)
    actor = weights(runtime, "actor")
    for name, x in weights(runtime, "ref").items():
        torch.testing.assert_close(x, 0.75 * start[name] + 0.25 * actor[name], rtol=1e-6, atol=1e-7)
    assert runtime.models["ref"].version == values["sync/ref_version"] == 2
    assert values["time/sync_ref_s"] > 0


def test_trap_g4_a_copy_is_the_trained_model_bit_by_bit_and_its_kl_is_zero(folder, tmp_path):
    runtime = LocalRuntime(synced(folder, tmp_path, {"ref": Sync("actor")}))
    first, _ = runtime.step(1)
    assert all(weights(runtime, "ref")[name].equal(x) for name, x in weights(runtime, "actor").items())
    second, _ = runtime.step(2)
    assert abs(first["ref_kl_per_sequence"]) > 1e-3
    assert abs(second["ref_kl_per_sequence"]) < 1e-5  # the reference equals the sampling policy


def test_trap_g4_a_copy_that_is_none_is_found(folder, tmp_path, monkeypatch):
    runtime = LocalRuntime(synced(folder, tmp_path, {"ref": Sync("actor")}))
    monkeypatch.setattr(runtime.models["ref"].engine, "load_weights", lambda weights, mix: None)
    with pytest.raises(RuntimeError, match=r"sync\.ref: after the copy in step 1, the weights of 'ref' \(sha256 "):
        runtime.step(1)


def test_the_code_needs_no_more_of_an_engine_than_the_two_methods(folder, tmp_path):
    runtime = LocalRuntime(synced(folder, tmp_path, {"ref": Sync("actor", weight=0.5)}))
    engines = {"actor": BigramEngine(seed=1), "ref": BigramEngine(seed=2)}
    for role, engine in engines.items():
        runtime.models[role].engine = engine
    expected = (engines["actor"].logits_VV + engines["ref"].logits_VV) / 2
    runtime.sync.after_step(1)
    torch.testing.assert_close(engines["ref"].logits_VV, expected)


def test_trap_b7_what_a_reference_has_become_is_in_the_checkpoint_and_not_what_it_was(folder, tmp_path):
    sync = {"ref": Sync("actor", weight=0.5)}
    run(synced(folder, tmp_path, sync, steps=1))
    state = list_checkpoints(tmp_path / "run" / "checkpoints")[-1].read()
    assert state["frozen"] == {}
    assert state["models"]["ref"]["version"] == 1
    runtime = LocalRuntime(synced(folder, tmp_path / "other", sync))
    start = weights(runtime, "ref")
    saved = state["models"]["ref"]["weights"]
    assert saved.keys() == start.keys()
    assert not saved["lm_head.weight"].equal(start["lm_head.weight"])
    # The checkpoint contains the weights of `ref`, so its path may change.
    run(synced(folder, tmp_path, sync, ref="actor", steps=2, resume="auto"))


def test_other_architectures_are_refused_when_they_are_loaded(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"sync\.ref\.of=actor: .*'model\.layers\.1\..*"):
        LocalRuntime(synced(folder, tmp_path, {"ref": Sync("actor")}, ref="wide"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"models": {"actor": TransformersModel("a", optimizer=OptimizerSpec(lr=1.0)), "ref": SharedModel("actor")}},
            r"sync\.ref: models\.ref shares the model of role 'actor' and has no separate weights",
        ),
        ({"sync": {"reff": Sync("actor")}}, r"sync\.reff: no RPC of the graph uses role 'reff'; did you mean 'ref'"),
        ({"sync": {"reward": Sync("actor")}}, r"sync\.reward: role 'reward' has no model"),
    ],
)
def test_a_sync_that_cannot_be_is_refused_before_anything_is_loaded(folder, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        check_parts(synced(folder, tmp_path, **({"sync": {"ref": Sync("actor")}} | changes)))


def test_calls_that_are_made_ahead_of_the_step_take_no_weights(folder, tmp_path):
    actor = GRPOActorInterface(kl=KLPenalty(KLPlace.loss))
    interfaces = {"actor": actor, "ref": GRPOActorInterface(), "reward": CountToken()}
    graph = dataflow(interfaces)
    rpcs = tuple(replace(rpc, model="ref") if rpc.method == "generate" else rpc for rpc in graph.rpcs)
    with pytest.raises(ConfigError, match=r"sync\.ref: with rollout=async, calls of 'ref' run while"):
        check_parts(
            synced(
                folder,
                tmp_path,
                {"ref": Sync("actor")},
                graph=replace(graph, rpcs=rpcs),
                interfaces=interfaces,
                rollout=Async(),
            )
        )


def test_a_config_sets_it_and_the_table_at_launch_says_it():
    overrides = ["experiment=grpo_arithmetic", "interfaces.actor.kl={place: loss, estimator: k3}"]
    made = build_experiment(compose([*overrides, "sync.ref={of: actor, weight: 0.1, every_steps: 10}"]))
    assert made.graph.sync == made.sync == {"ref": Sync("actor", 0.1, 10)}
    assert dict(derived_rows(made))["weights after a step"] == "ref: 0.9 own + 0.1 actor, every 10 steps"
    assert made.resolved["sync"]["ref"]["every_steps"] == 10
    with pytest.raises(ConfigError, match=r"sync\.ref\.weight=3\.0: must be above 0 and at most 1"):
        build_experiment(compose([*overrides, "sync.ref={of: actor, weight: 3}"]))
    with pytest.raises(ConfigError, match=r"unknown key 'sync\.ref\.every_step'; did you mean 'every_steps'"):
        build_experiment(compose([*overrides, "sync.ref={of: actor, every_step: 3}"]))
