"""Test that the launch accepts what `realign plan` proposes: its checks, and loading under imagined ranks."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from extras.planner.tests.models import built, words_for
from realign.engines import TransformersModel
from realign.engines.distributed import sharded_network
from realign.models.host import Host
from realign.ranks import LAUNCHED, Ranks
from realign.runtime.checks.before_loading import check_ready
from realign.samplers.servers.server_settings import ServerSettings
from realign_planner.options import PlanOptions
from realign_planner.placements import LAUNCHERS, PlannedPlacement, overrides, placements
from realign_planner.workload import Workload, workload_of
from tests.tiny import save_tiny

DEEP: dict[str, Any] = {
    "family": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 104,
}
EXPERTS = {**DEEP, "family": "qwen3_moe", "num_experts": 4}
SERVER = next(iter(LAUNCHERS))
REF, NO_REF = "interfaces.actor.kl.place=loss", "interfaces.actor.kl.place=none"
RUNS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "reference": (DEEP, "grpo", (REF,)),
    "critic": (DEEP, "ppo", ()),
    "trained layers": (DEEP, "grpo", ("models.actor.trains=top_layers", "models.actor.trains.layers=2", NO_REF)),
    "shared reference": (DEEP, "grpo", ("models.actor.trains=top_layers", "models.actor.trains.layers=2", REF)),
    "lora": (DEEP, "grpo", ("models.actor.trains=lora", REF)),
    "lora of experts": (EXPERTS, "grpo", ("models.actor.trains=lora",)),
    "replay": (EXPERTS, "grpo", ("interfaces.actor.generation.router_replay=true",)),
    "compiled": (DEEP, "grpo", ("models.actor.torch_compile=eager",)),
    "branch": (DEEP, "trlx_ppo", ("models.actor.head.value_head.layers=2", "~models.actor.trains")),
    "no plan": ({**DEEP, "family": "gpt2"}, "grpo", ()),
    "own mesh": (DEEP, "grpo", ("models.actor.sharding.tensor=2", "models.actor.sharding.pipeline=2")),
}
REFUSED = {
    "trained layers": {"pipeline": (4,)},
    "shared reference": {"devices": (2, 4, 8)},
    "lora of experts": {"expert": (4,)},
    "replay": {"pipeline": (2, 4)},
    "compiled": {"pipeline": (2, 4)},
    "branch": {"pipeline": (4,)},
    "no plan": {"tensor": (2,), "expert": (2,)},
}
"""What a run cannot have, of what others have."""


def written(name: str, folder: Path) -> list[str]:
    """Write the model and the rows of a run, and return its words."""
    model, experiment, more = RUNS[name]
    save_tiny(folder / "model", **model)
    if experiment == "ppo":
        save_tiny(folder / "reward", head="score", **model)
        more = (f"models.reward.path={folder / 'reward'}",)
    (folder / "rows.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    words = [word for word in words_for(folder / "model", *more, experiment=experiment) if "data.path" not in word]
    return [*words, f"data.path={folder / 'rows.jsonl'}", f"output_dir={folder / 'out'}"]


def proposals(load: Workload) -> list[tuple[PlanOptions, PlannedPlacement]]:
    """Return placements on one node and on two, one for each division of the devices among roles and each mesh."""
    distinct = {}
    for options in (PlanOptions(devices=4), PlanOptions(devices=8, nodes=2)):
        for placement in placements(load, options, servers=load.servers):
            distinct.setdefault((placement.groups, placement.mesh, placement.runtime), (options, placement))
    return list(distinct.values())


def imagined(ranks: int) -> ExitStack:
    """Return a context in which this process is the first of several ranks, and all agree with it."""
    stack = ExitStack()
    if ranks > 1:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        stack.callback(_clear_sharding_prop_cache)  # it refers to the meshes of this process group
        stack.callback(dist.destroy_process_group)
    answers = {"most": lambda self, n: 0, "gather": lambda self, x, group=None: [x] * dist.get_world_size(group)}
    stack.enter_context(patch.multiple(Host, **answers))
    stack.enter_context(patch.object(Ranks, "gather", lambda self, x: [x] * self.size))
    stack.enter_context(patch.object(sharded_network, "probe_divided", return_value=0.0))
    return stack


@pytest.fixture(autouse=True)
def servers_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerSettings, "check", lambda self, where: None)


@pytest.mark.parametrize("name", RUNS)
def test_the_checks_of_the_launch_accept_what_a_plan_proposes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = written(name, tmp_path)
    load = workload_of(built(words), PlanOptions())
    proposed = proposals(load)
    for options, placement in proposed[:: max(1, len(proposed) // 8)]:
        size = placement.trainers if placement.runtime == "torchrun" else 1
        for variable, text in zip(LAUNCHED, ("0", str(size), "localhost", "29500"), strict=True):
            monkeypatch.setenv(variable, text)
        check_ready(built([*words, *overrides(placement, load, options, SERVER)]))
    sizes = {
        name: {getattr(placement.mesh, name) for _, placement in proposed} for name in ("pipeline", "tensor", "expert")
    }
    sizes["devices"] = {group.devices for _, placement in proposed for group in placement.groups}
    for dimension, refused in REFUSED.get(name, {}).items():
        assert not sizes[dimension] & set(refused)
    if name != "shared reference":
        assert max(sizes["devices"]) == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_models_load_on_every_mesh_that_a_plan_proposes(name: str, tmp_path: Path) -> None:
    words = written(name, tmp_path)
    load = workload_of(built(words), PlanOptions())
    loads = {
        (role, group.devices, placement.mesh): (options, placement)
        for options, placement in proposals(load)
        for group in placement.groups
        for role in group.roles
        if load.roles[role].configured
    }
    assert loads
    for (role, ranks, _), (options, placement) in loads.items():
        spec = built([*words, *overrides(placement, load, options, SERVER)]).models[role]
        with imagined(ranks):
            assert isinstance(spec, TransformersModel)
            spec.load(role, seed=0)
