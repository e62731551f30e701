"""Test the checks of an experiment against its graph."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from realign.api import RPC, DataflowGraph, Keys, ModelInterface
from realign.errors import ConfigError, DataError, GraphError, SettingsError
from realign.interfaces.grpo import GRPOActorInterface
from realign.runtime import run
from realign.runtime.checks.parts import check_keys, check_parts, check_temperatures, locating, unread_inputs
from tests.toys import GENERATION, CountToken, experiment


def test_a_user_error_starts_with_the_key_and_keeps_its_class():
    with pytest.raises(DataError, match=r"^data: no such file$"), locating("data"):
        raise DataError("no such file")


def test_any_other_error_keeps_its_message_and_gets_the_key_as_a_note():
    with pytest.raises(ValueError, match=r"^bad shape") as raised, locating("interfaces.actor"):
        raise ValueError("bad shape")
    assert raised.value.__notes__ == ["while calling interfaces.actor"]


@dataclass
class Declared(ModelInterface):
    """Interface that declares the given keys for each method."""

    declared: dict[str, Keys] = field(default_factory=dict)

    def inference(self, model, data, mb_spec):
        return data

    def train_step(self, model, data, mb_spec):
        return {}

    def keys(self, method: str) -> Keys:
        return self.declared.get(method, Keys())


def graph(*inputs: str, rename: dict[str, str] | None = None) -> DataflowGraph:
    """Build a graph in which `ref` writes `ref_logprobs` and `turns`, and `actor` is trained on these inputs."""
    scored = RPC("ref_inf", "ref", "inference", ("input_ids",), ("ref_logprobs", "turns"))
    train = RPC("train", "actor", "train_step", inputs, rename=rename or {})
    return DataflowGraph((scored, train), dataset_keys=("input_ids", "labels"))


def check(actor: Keys, *inputs: str, ref: Keys | None = None, rename: dict[str, str] | None = None) -> None:
    roles = {"actor": Declared({"train_step": actor}), "ref": Declared({"inference": ref or Keys()})}
    check_keys(graph(*inputs, rename=rename), roles)


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        (
            {"ref_logprobs": "kl.place=loss"},
            r"^interfaces\.actor\.kl\.place=loss needs key 'ref_logprobs' in train_step, but RPC 'train' does not read "
            r"it\. RPC 'ref_inf' writes it\. Add it to the inputs of 'train'\.$",
        ),
        ({"labels": ""}, r"^interfaces\.actor needs key 'labels' .* The dataset has it\. Add it to the inputs"),
        ({"values": "value=x"}, r"No RPC of the graph writes it\. Add such an RPC to the graph, or change value\.$"),
    ],
)
def test_a_key_that_a_setting_needs_and_the_call_lacks_is_refused(needs, message):
    with pytest.raises(GraphError, match=message):
        check(Keys(needs=needs), "input_ids")


def test_a_key_that_is_computed_for_a_component_and_read_by_none_is_refused():
    with pytest.raises(
        GraphError, match=r"interfaces\.actor: RPC 'train' has input 'ref_logprobs', .*no component of De"
    ):
        check(Keys(needs={"input_ids": ""}), "input_ids", "ref_logprobs")
    check(Keys(needs={"input_ids": ""}, uses=frozenset({"ref_logprobs"})), "input_ids", "ref_logprobs")


def test_an_interface_that_declares_no_keys_is_taken_to_read_all_of_them():
    check(Keys(), "input_ids", "ref_logprobs")
    roles = {"actor": Declared(), "ref": Declared()}
    assert unread_inputs(graph("input_ids", "ref_logprobs"), roles) == {}


def test_a_key_that_another_call_reads_is_computed_for_that_one():
    both = RPC("credit", "actor", "credit", ("ref_logprobs",), ("advantages",))
    dataflow = graph("input_ids", "ref_logprobs")
    keys = {"train_step": Keys(needs={"input_ids": ""}), "credit": Keys(uses=frozenset({"ref_logprobs"}))}
    made = DataflowGraph((*dataflow.rpcs, both), dataset_keys=dataflow.dataset_keys)
    check_keys(made, {"actor": Declared(keys), "ref": Declared()})


def test_keys_are_compared_by_the_names_of_the_interface():
    renamed = {"logprobs": "ref_logprobs"}
    check(Keys(needs={"logprobs": ""}), "ref_logprobs", rename=renamed)
    with pytest.raises(GraphError, match="needs key 'ref_logprobs'"):
        check(Keys(needs={"ref_logprobs": ""}), "ref_logprobs", rename=renamed)


def test_what_a_method_writes_is_what_its_call_declares():
    check(Keys(), "input_ids", ref=Keys(writes=frozenset({"ref_logprobs", "turns"})))
    with pytest.raises(
        GraphError, match=r"interfaces\.ref writes ref_logprobs in inference .* declares ref_logprobs, tu"
    ):
        check(Keys(), "input_ids", ref=Keys(writes=frozenset({"ref_logprobs"})))


def test_settings_that_rule_out_a_method_are_named_by_their_key():
    class Never(Declared):
        def keys(self, method: str) -> Keys:
            raise SettingsError("epochs=2: this method supports one")

    with pytest.raises(SettingsError, match=r"^interfaces\.actor: epochs=2: this method supports one$"):
        check_keys(graph("input_ids"), {"actor": Never(), "ref": Declared()})


def test_trap_d11_more_minibatches_than_prompts_are_refused_before_anything_is_loaded(tmp_path):
    parts = {"actor": GRPOActorInterface(generation=GENERATION, n_minibatches=9), "reward": CountToken()}
    with pytest.raises(ConfigError, match=r"interfaces\.actor\.n_minibatches=9: batch_prompts=8"):
        check_parts(experiment(tmp_path, interfaces=parts))
    assert len(run(experiment(tmp_path, interfaces=parts, batch_prompts=9)).series("loss")) == 3


@pytest.mark.parametrize(
    ("parts", "cure"),
    [
        (9, r"is less than the number of mini-batches\. Set batch_prompts=9 or more, or at most n_minibatches=8\.$"),
        (3, r"is not a multiple of it\. Set batch_prompts=6 or 9, or n_minibatches=2\.$"),
    ],
)
def test_the_cure_for_unequal_minibatches_is_accepted(tmp_path, parts, cure):
    def made(n: int, prompts: int):
        actor = GRPOActorInterface(generation=GENERATION, n_minibatches=n)
        whole = experiment(tmp_path, interfaces={"actor": actor, "reward": CountToken()}, batch_prompts=prompts)
        check_parts(whole)
        return whole

    with pytest.raises(ConfigError, match=rf"^interfaces\.actor\.n_minibatches={parts}: batch_prompts=8 {cure}"):
        made(parts, 8)
    for n, prompts in {9: [(9, 9), (8, 8)], 3: [(3, 6), (3, 9), (2, 8)]}[parts]:
        assert made(n, prompts).batch_prompts == prompts


def test_two_temperatures_are_an_error_that_names_both_keys():
    check_temperatures({"interfaces.actor.generation.temperature": 0.7, "interfaces.ref.temperature": 0.7})
    with pytest.raises(ConfigError, match=r"^b=0\.5: it differs from a=1, so the log-probs"):
        check_temperatures({"a": 1.0, "b": 0.5})
