"""Test the settings of a run: roles that the config does not define."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from realign.api import RPC, DataflowGraph, ModelInterface, Role, RoleModel
from realign.cli.launch_table import derived_rows
from realign.engines import OptimizerSpec, Share, SharedModel, TransformersModel
from realign.errors import ConfigError
from realign.interfaces import dpo
from realign.interfaces.dpo import DPOInterface
from realign.interfaces.reference import ReferenceInterface
from realign.models import Lora, TopLayers
from realign.runtime import Experiment
from realign.runtime.experiment import with_default_roles
from tests.config_parts import Prompts

TRAINED = OptimizerSpec(lr=1e-3, ema_decay=0.9)


@dataclass
class Asks(ModelInterface):
    """Trained role that requests other roles."""

    asked: dict[str, Role] = field(default_factory=dict)

    def train_step(self, model, data, mb_spec):
        return {}

    def roles(self) -> Mapping[str, Role]:
        return self.asked


@dataclass
class Scores(ModelInterface):
    label: str = "a"

    def inference(self, model, data, mb_spec):
        return data


def graph(*roles: str) -> DataflowGraph:
    calls = [RPC(f"{role}_inf", role, "inference", ("input_ids",), (f"{role}_out",)) for role in roles]
    train = RPC("train", "actor", "train_step", tuple(f"{role}_out" for role in roles))
    return DataflowGraph((*calls, train), dataset_keys=("input_ids",))


def filled(asked: dict[str, Role], *roles: str, interfaces=None, models=None):
    interfaces = {"actor": Asks(asked), **(interfaces or {})}
    models = {"actor": TransformersModel("start", optimizer=TRAINED), **(models or {})}
    interfaces, models, added = with_default_roles(graph(*roles), interfaces, models)
    return SimpleNamespace(interfaces=interfaces, models=models, added=added)


def test_a_role_that_the_config_lacks_gets_a_frozen_copy_of_the_start():
    completed = filled({"ref": Role(ReferenceInterface(0.5))}, "ref")
    assert completed.interfaces["ref"] == ReferenceInterface(0.5)
    assert completed.models["ref"] == TransformersModel("start")
    assert completed.added == {"ref": "ReferenceInterface, frozen copy of the start of actor"}


@pytest.mark.parametrize("partly", [{"trains": Lora()}, {"trains": TopLayers(1)}])
def test_a_model_that_trains_in_part_contains_its_own_start(partly):
    models = {"actor": TransformersModel("start", optimizer=TRAINED, **partly)}
    completed = filled({"ref": Role(ReferenceInterface())}, "ref", models=models)
    assert completed.models["ref"] == SharedModel("actor", Share.reference)
    assert completed.added == {"ref": "ReferenceInterface, the frozen start of actor"}


def test_a_role_may_share_the_model_of_its_owner_or_have_none():
    asked = {"twin": Role(Scores(), RoleModel.shared), "rule": Role(Scores(), RoleModel.none)}
    completed = filled(asked, "twin", "rule")
    assert completed.models["twin"] == SharedModel("actor")
    assert "rule" not in completed.models
    shares = {"actor": SharedModel("base"), "base": TransformersModel("start")}
    assert filled(asked, "twin", models=shares).models["twin"] == SharedModel("base")


def test_what_the_config_defines_wins():
    given = TransformersModel("other")
    role = Role(ReferenceInterface())
    completed = filled({"ref": role}, "ref", models={"ref": given})
    assert (completed.models["ref"], completed.added) == (given, {"ref": "ReferenceInterface"})
    completed = filled({"ref": role}, "ref", interfaces={"ref": Scores()})
    assert (completed.interfaces["ref"], completed.added) == (Scores(), {"ref": "frozen copy of the start of actor"})


def test_a_role_outside_the_graph_is_not_added():
    assert "ref" not in filled({"ref": Role(ReferenceInterface())}, "other").interfaces


def test_a_role_that_was_filled_in_may_ask_for_another():
    class Chain(Scores):
        def roles(self) -> Mapping[str, Role]:
            return {"second": Role(Scores(), RoleModel.shared)}

    completed = filled({"first": Role(Chain())}, "first", "second")
    assert completed.models["second"] == SharedModel("first")


def test_different_defaults_for_one_role_are_refused_unless_the_config_defines_it():
    asked, other = {"ref": Role(Scores("a"))}, {"critic": Asks({"ref": Role(Scores("b"))})}
    made = DataflowGraph((*graph("ref").rpcs, RPC("t", "critic", "train_step", ("input_ids",))), ("input_ids",))
    interfaces = {"actor": Asks(asked), **other}
    with pytest.raises(
        ConfigError, match=r"^interfaces\.ref: interfaces\.actor and interfaces\.critic declare .* Define interf"
    ):
        with_default_roles(made, interfaces, {})
    with_default_roles(made, interfaces | {"ref": Scores()}, {})


def test_dpo_needs_no_reference_in_the_config_and_the_launch_table_shows_it(tmp_path):
    made = Experiment(
        name="x",
        steps=1,
        batch_prompts=2,
        graph=dpo.dataflow(),
        interfaces={"actor": DPOInterface(temperature=0.7)},
        models={"actor": TransformersModel("start", optimizer=TRAINED)},
        data=Prompts(),
        output_dir=tmp_path,
    )
    assert made.temperatures == {"interfaces.ref.temperature": 0.7, "interfaces.actor.temperature": 0.7}
    expected = "ref: ReferenceInterface, frozen copy of the start of actor"
    assert dict(derived_rows(made))["roles filled in by default"] == expected
