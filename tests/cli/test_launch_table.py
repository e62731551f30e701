from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from realign.api import RPC, DataflowGraph, GenerationConfig, MicroBatchSpec, ModelInterface, Plan, SamplerSpec
from realign.cli.launch_table import derived_rows
from realign.engines import DType, InProcessSampling, OptimizerSpec, SharedModel, TransformersModel, Value
from realign.errors import ConfigError
from realign.runtime import DynamicSampling, Evaluation, Experiment
from tests.config_parts import Actor, Bigram, CountThrees, Prompts
from tests.samplers import TableSampling


@dataclass
class Judge(ModelInterface):
    temperature: float = 1.0

    def inference(self, model, data, mb_spec):
        return data

    def train_step(self, model, data, mb_spec):
        return {}

    def plan(self) -> Plan:
        return Plan(temperature=self.temperature, temperature_setting="temperature")

    def describe(self, batch_prompts: int) -> dict[str, str]:
        return {"loss": "of the judge", "nothing": ""}


def experiment(**changes) -> Experiment:
    graph = DataflowGraph(
        (
            RPC("gen", "actor", "generate", ("prompt_ids",), ("input_ids", "extra")),
            RPC("judge", "judge", "inference", ("input_ids",), ("scores",)),
            RPC("train", "actor", "train_step", ("scores",)),
            RPC("judge_train", "judge", "train_step", ("scores",)),
        ),
        dataset_keys=("prompt_ids",),
    )
    values = {
        "name": "x",
        "steps": 1000,
        "batch_prompts": 64,
        "graph": graph,
        "interfaces": {"actor": Actor(epochs=4, generation=GenerationConfig(n=8, top_p=0.9)), "judge": Judge()},
        "models": {"actor": Bigram(), "judge": Bigram()},
        "data": Prompts(),
    }
    return Experiment(**{**values, **changes})


def test_rows_of_a_graph_with_two_trained_roles():
    e = experiment(
        interfaces={**experiment().interfaces, "spare": Judge(temperature=9.0)},
        models={**experiment().models, "idle": Bigram()},
        microbatch=MicroBatchSpec(),
        evaluation=Evaluation(data=Prompts(), reward=CountThrees()),
    )
    assert dict(derived_rows(e)) == {
        "steps": "1,000",
        "prompts per step": "64",
        "group size (responses per prompt)": "8",
        "sequences per step": "512",
        "sampler": "top_p=0.9, temperature 1",
        "actor: optimizer steps per step": "4 (4 epochs x 1 mini-batches)",
        "actor: prompts per optimizer step": "64",
        "actor: total optimizer steps": "4,000",
        "actor: loss": "none",
        "judge: optimizer steps per step": "1 (1 epochs x 1 mini-batches)",
        "judge: prompts per optimizer step": "64",
        "judge: total optimizer steps": "1,000",
        "judge: loss": "of the judge",
        "tokens per micro-batch": "no limit",
        "temperature": "1 (interfaces.actor.generation.temperature, interfaces.judge.temperature)",
        "evaluation": "every 10 steps, before and after; greedy=True, temperature 1",
        "checkpoints": "every 10 minutes, at the end; keeps the last 2",
        "results that nothing reads": "extra",
        "config keys never read": "interfaces.spare, models.idle",
    }


def test_steps_before_the_first_update_make_no_optimizer_step():
    class Late(Actor):
        def plan(self):
            return replace(super().plan(), first_training_step=51, at_most=True)

    rows = dict(derived_rows(experiment(interfaces={**experiment().interfaces, "actor": Late(epochs=4)})))
    assert rows["actor: steps before the first update"] == "50"
    assert rows["actor: optimizer steps per step"] == "4 at most (4 epochs x 1 mini-batches)"
    assert rows["actor: total optimizer steps"] == "3,800 at most"


def test_a_role_that_is_not_trained_has_no_rows_of_training():
    e = experiment()
    graph = DataflowGraph(tuple(rpc for rpc in e.graph.rpcs if rpc.name != "judge_train"), dataset_keys=("prompt_ids",))
    models = {"actor": Bigram(), "judge": TransformersModel("folder", head=Value(), optimizer=OptimizerSpec(lr=1.0))}
    rows = dict(derived_rows(experiment(graph=graph, models=models)))
    assert not [name for name in rows if name.startswith("judge")]
    assert rows["config keys never read"] == "models.judge.optimizer"


def test_the_filter_of_dynamic_sampling_is_a_row():
    rpcs = (RPC("judge", "judge", "inference", ("prompt_ids",), ("rewards",)),)
    graph = DataflowGraph(rpcs, dataset_keys=("prompt_ids",))
    e = experiment(dynamic_sampling=DynamicSampling(max_mean_reward=1.0), graph=graph)
    expected = "groups with std of rewards > 0, mean reward < 1, out of up to 10 batches of 64 prompts"
    assert dict(derived_rows(e))["dynamic sampling"] == expected


def test_trap_b2_roles_with_different_temperatures_are_refused():
    assert experiment().temperatures == {
        "interfaces.actor.generation.temperature": 1.0,
        "interfaces.judge.temperature": 1.0,
    }
    with pytest.raises(
        ConfigError, match=r"^interfaces\.judge\.temperature=0\.7: it differs from interfaces\.actor\.gen"
    ):
        experiment(interfaces={"actor": Actor(), "judge": Judge(temperature=0.7)})


def test_a_role_whose_plan_has_no_temperature_is_not_compared():
    graph = DataflowGraph((RPC("a", "judge", "inference"), RPC("b", "rule", "inference")))
    e = experiment(graph=graph, interfaces={"judge": Judge(0.5), "rule": CountThrees()}, models={"judge": Bigram()})
    assert e.temperatures == {"interfaces.judge.temperature": 0.5}


def test_roles_that_share_a_model_are_shown():
    assert "roles that share a model" not in dict(derived_rows(experiment()))
    rows = dict(derived_rows(experiment(models={"actor": Bigram(), "judge": SharedModel("actor", "reference", 2)})))
    assert rows["roles that share a model"] == "judge: the frozen start of actor, top 2 layers"


def test_samplers_that_are_not_bitwise_are_a_row():
    def rows(sampler: SamplerSpec) -> dict[str, str]:
        models = {"actor": TransformersModel("x", sampler=sampler), "judge": Bigram()}
        return dict(derived_rows(experiment(models=models)))

    for silent in (InProcessSampling(), TableSampling(bitwise=True)):
        assert "samplers that are not bitwise" not in rows(silent)
    assert rows(TableSampling())["samplers that are not bitwise"] == (
        "TableSampling (actor): micro-batches, ranks, restarts and staleness can change the results"
    )


def test_precision_and_kernel_of_each_model_are_a_row():
    models = {"actor": TransformersModel("a"), "judge": TransformersModel("b")}
    rows = dict(derived_rows(experiment(models=models)))
    assert rows["models compute on"] == "cpu, float32 products, attention: sdpa"
    models["judge"].dtype = DType.bfloat16
    assert dict(derived_rows(experiment(models=models)))["models compute on"] == (
        "actor: cpu, float32 products, attention: sdpa; judge: cpu, bfloat16 products, attention: sdpa"
    )
