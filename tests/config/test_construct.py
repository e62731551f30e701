"""Test how graphs are built from interfaces, and errors in constructors."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from realign.api import DataflowGraph, ModelInterface
from realign.config import ConfigError, build
from realign.config.construct import build_graph
from tests.config.components import HERE, Actor

FLOW = f"{HERE}.flow_of_interfaces"


@dataclass
class Buggy(ModelInterface):
    kind: str = "value"

    def __post_init__(self) -> None:
        errors = {"value": ValueError("a bug"), "key": KeyError("lost"), "type": TypeError("wrong")}
        raise errors[self.kind]


def test_a_graph_function_is_given_the_built_interfaces():
    interfaces = {"student": Actor()}
    graph = build_graph({"_target_": FLOW, "twice": True}, DataflowGraph, "graph", interfaces)
    assert [(rpc.name, rpc.model) for rpc in graph.rpcs] == [("train_0", "student"), ("train_1", "student")]
    with pytest.raises(ConfigError, match=r"unknown key 'graph\.interfaces'"):
        build_graph({"_target_": FLOW, "interfaces": {}}, DataflowGraph, "graph", interfaces)


def test_settings_errors_get_the_key_in_front():
    node = {"_target_": f"{HERE}.Actor", "objective": {"_target_": f"{HERE}.Gspo", "low": 2}}
    with pytest.raises(ConfigError, match=r"^interfaces\.actor\.objective\.low=2\.0: must be at least 0 and"):
        build(node, ModelInterface, "interfaces.actor")


@pytest.mark.parametrize(("kind", "error"), [("value", ValueError), ("key", KeyError), ("type", TypeError)])
def test_a_bug_in_a_users_constructor_keeps_its_traceback_and_names_the_key(kind, error):
    with pytest.raises(error) as caught:
        build({"_target_": f"{__name__}.Buggy", "kind": kind}, ModelInterface, "interfaces.actor")
    assert caught.value.__notes__ == ["while building interfaces.actor"]
    assert caught.traceback[-1].name == "__post_init__"
