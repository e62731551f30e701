from __future__ import annotations

from dataclasses import dataclass, fields

import pytest

from realign.api import (
    RPC,
    DataflowGraph,
    GenerationConfig,
    MicroBatchSpec,
    ModelInterface,
    Plan,
    SamplerSpec,
    rl_graph,
)
from realign.cli.launch_table import derived_rows
from realign.engines import TransformersModel
from realign.errors import ConfigError
from realign.interfaces.components import ImportanceCorrection, RatioRange
from realign.interfaces.ppo import PPOActorInterface
from realign.interfaces.rule_reward import RuleRewardInterface
from realign.models import DType
from realign.rewards.terms import FunctionTerm
from realign.runtime import Evaluation, Experiment
from realign.runtime.checks.parts import check_parts
from realign.samplers import InProcessSampling
from realign.settings import Settings
from tests.config_parts import Actor, Bigram, CountThrees, Prompts
from tests.table_sampler import TableSampling


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


def test_control_characters_of_a_config_reach_no_terminal():
    made = experiment()
    made.idle = ["data.suffix=\x1b[2J"]
    assert dict(derived_rows(made))["settings without effect"] == r"data.suffix=\x1b[2J"


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
        "actor: optimizer steps per step": "4 (4 epochs x 1 mini-batch)",
        "actor: prompts per optimizer step": "64",
        "actor: total optimizer steps": "4,000",
        "actor: loss": "none",
        "judge: optimizer steps per step": "1",
        "judge: prompts per optimizer step": "64",
        "judge: total optimizer steps": "1,000",
        "judge: loss": "of the judge",
        "classes of your own": (
            "interfaces.actor: tests.config_parts.Actor; interfaces.actor.adv_norm: tests.config_parts.Norm "
            "(mean Style.group, std Style.batch, eps 1e-06); interfaces.actor.frozen: tests.config_parts.Frozen "
            f"(depth 7, names ('a',)); interfaces.judge: {__name__}.Judge"
        ),
        "tokens per micro-batch": "no limit",
        "temperature": "1 (interfaces.actor.generation.temperature, interfaces.judge.temperature)",
        "evaluation": "every 10 steps, before and after; greedy=True, temperature 1",
        "checkpoints": "every 10 minutes, at the end; keeps the last 2",
        "results that nothing reads": "extra",
        "config keys never read": "interfaces.spare, models.idle",
    }


def actor_rows(actor: PPOActorInterface) -> dict[str, str]:
    interfaces = {"actor": actor, "reward": RuleRewardInterface("module:function")}
    return dict(derived_rows(experiment(graph=rl_graph(interfaces), interfaces=interfaces, models={"actor": Bigram()})))


DEFAULTS = PPOActorInterface()
PLACES = [f.name for f in fields(DEFAULTS) if isinstance(getattr(DEFAULTS, f.name), Settings)]


@pytest.mark.parametrize("place", PLACES)
def test_a_component_of_the_user_is_named_with_its_class_and_fields(place):
    """By one rule, whatever `describe` of the component says."""
    body = {"__annotations__": {"extra": int}, "extra": 3, "__module__": "lab"}
    own = dataclass(type("Own", (type(getattr(DEFAULTS, place)),), body))
    row = actor_rows(PPOActorInterface(**{place: own()}))["classes of your own"]
    assert row == f"interfaces.actor.{place}: lab.Own (extra 3)"


def test_nested_components_and_components_in_mappings_are_named_too():
    own = dataclass(type("Own", (RatioRange,), {"__module__": "lab"}))
    actor = PPOActorInterface(correction=ImportanceCorrection(weight=own(cap=2)))
    term = dataclass(type("Term", (FunctionTerm,), {"__module__": "lab"}))
    reward = RuleRewardInterface(functions={"length": term(f"{__name__}:Judge")})
    graph = rl_graph({"actor": actor, "reward": reward})
    made = experiment(graph=graph, interfaces={"actor": actor, "reward": reward}, models={"actor": Bigram()})
    assert dict(derived_rows(made))["classes of your own"] == (
        "interfaces.actor.correction.weight: lab.Own; interfaces.reward.functions.length: lab.Term"
    )


def test_trap_b2_roles_with_different_temperatures_are_refused():
    assert experiment().temperatures == {
        "interfaces.actor.generation.temperature": 1.0,
        "interfaces.judge.temperature": 1.0,
    }
    with pytest.raises(
        ConfigError, match=r"^interfaces\.judge\.temperature=0\.7: it differs from interfaces\.actor\.gen"
    ):
        check_parts(experiment(interfaces={"actor": Actor(), "judge": Judge(temperature=0.7)}))


def test_samplers_that_are_not_bitwise_are_a_row():
    def rows(sampler: SamplerSpec) -> dict[str, str]:
        models = {"actor": TransformersModel("x", sampler=sampler), "judge": Bigram()}
        return dict(derived_rows(experiment(models=models)))

    for silent in (InProcessSampling(), TableSampling(bitwise=True)):
        assert "samplers that are not bitwise" not in rows(silent)
    assert rows(TableSampling())["samplers that are not bitwise"] == (
        "TableSampling (actor): micro-batches, ranks, restarts and staleness can change the results"
    )


@pytest.mark.parametrize(
    ("instructions", "backward"), [(True, "bfloat16"), (False, "float32, since this CPU cannot multiply bfloat16")]
)
def test_precision_and_kernel_of_each_model_are_a_row(monkeypatch, instructions, backward):
    monkeypatch.setattr("realign.engines.transformers_model.multiplies_bf16", lambda: instructions)
    models = {"actor": TransformersModel("a"), "judge": TransformersModel("b")}
    rows = dict(derived_rows(experiment(models=models)))
    assert rows["models compute on"] == "cpu, float32 products, attention: sdpa"
    models["judge"].dtype = DType.bfloat16
    assert dict(derived_rows(experiment(models=models)))["models compute on"] == (
        "actor: cpu, float32 products, attention: sdpa; judge: cpu, float32 products (weights in bfloat16, backward "
        f"products in {backward}), attention: sdpa"
    )
