"""Test how a config becomes an experiment: callbacks, idle settings, and what evaluations take over from training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from realign.api import GenerationConfig
from realign.cli.launch_table import derived_rows
from realign.config import ConfigError, build_experiment, compose
from realign.config.experiment import as_node
from realign.data import PreferenceData, PromptData, SupervisedData
from realign.interfaces.components.correction import ImportanceCorrection
from realign.interfaces.environment import EnvironmentInterface
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.rule_reward import RuleRewardInterface
from realign.records import MLflow, SwanLab, TensorBoard, Trackio, WandB
from realign.runtime import EpisodeEvaluation, Evaluation, Experiment, LossEvaluation
from realign.runtime.callbacks import EarlyStopping
from realign.runtime.checks.parts import check_parts
from tests.config_parts import EXPERIMENT, write_experiment

ACTOR = "interfaces.actor._target_"
REQUIRED = ["models.actor.path=m", "data.path=p.jsonl", "interfaces.reward.function=reward.py:score"]
OWN_ACTORS = """
from dataclasses import dataclass
from realign.api import DataflowGraph
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.raft import RAFTActorInterface, dataflow as raft

@dataclass
class Mine(GRPOActorInterface):
    pass
"""


def callbacks(folder: Path, *words: str, text: str = ""):
    conf = write_experiment(folder, text=EXPERIMENT + text)
    experiment = build_experiment(compose(["experiment=bigram", *words], conf))
    assert experiment.resolved["callbacks"].keys() == experiment.callbacks.keys()
    return experiment.callbacks


@pytest.mark.parametrize(
    "words",
    [
        ["callbacks.stop=early_stopping", "callbacks.stop.patience=1"],
        ["callbacks.stop.patience=1", "callbacks.stop=early_stopping"],
        ["callbacks={stop: {_target_: realign.runtime.callbacks.EarlyStopping, patience: 1}}"],
    ],
)
def test_a_word_or_an_import_path_selects_a_callback(tmp_path, words):
    assert callbacks(tmp_path, *words) == {"stop": EarlyStopping(patience=1)}


@pytest.mark.parametrize(
    ("words", "cls", "fields"),
    [
        (["trackers.a=tensorboard"], TensorBoard, {}),
        (["trackers.a=tensorboard", "trackers.a.folder=b"], TensorBoard, {"folder": "b"}),
        (["trackers.a=wandb", "trackers.a.project=p"], WandB, {"project": "p"}),
        (["trackers.a._target_=mlflow"], MLflow, {}),
        (["trackers.a=trackio"], Trackio, {}),
        (["trackers.a=swanlab"], SwanLab, {}),
    ],
)
def test_a_word_selects_a_tracker(tmp_path, monkeypatch, words, cls, fields):
    monkeypatch.setattr("realign.records.metrics.trackers._extra", lambda module, extra: None)
    conf = write_experiment(tmp_path, text=EXPERIMENT)
    experiment = build_experiment(compose(["experiment=bigram", *words], conf))
    assert experiment.trackers == {"a": cls(**fields)}


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["checkpoint.evry_steps=3", "checkpoint.kep=2"], ["checkpoint.evry_steps", "checkpoint.kep"]),
        (["checkpoint.kep=2", "models.actor.pth=x", "data.pth=x"], ["checkpoint.kep", "models.actor.pth", "data.pth"]),
        (["stepps=3", "data.pth=x", "models.actor.pth=x"], ["stepps", "models.actor.pth", "data.pth"]),
    ],
)
def test_all_unknown_keys_are_in_one_error(words, keys):
    with pytest.raises(ConfigError) as caught:
        build_experiment(compose(["experiment=grpo", *words]))
    message = str(caught.value)
    assert [message.count(f"unknown key {key!r}; did you mean") for key in keys] == [1] * len(keys)
    assert message.count("unknown key") == len(keys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["callbacks.stop=early_stoping"], "callbacks.stop: unknown choice 'early_stoping'; did you mean 'early_stop"),
        (["callbacks.stop.patience=1"], "callbacks.stop._target_ is missing: give the import path of a class"),
        (
            ["callbacks.stop=early_stopping", "callbacks.stop.patence=1"],
            "unknown key 'callbacks.stop.patence'; did you",
        ),
        (["callbacks.stop=early_stopping", "callbacks.stop.patience=0"], "callbacks.stop.patience=0: must be at least"),
        (["callbacks.stop._target_=realign.records.TensorBoard"], "TensorBoard is not a Callback"),
        (["callbacks=null"], "callbacks: expected a component, found null"),
    ],
)
def test_mistakes_name_the_key(tmp_path, words, message):
    with pytest.raises(ConfigError) as caught:
        callbacks(tmp_path, *words)
    assert message in str(caught.value)


def test_the_resolved_config_of_an_actor_without_a_critic_has_no_settings_of_one():
    critic = ["interfaces.actor._target_=realign.interfaces.ppo.PPOActorInterface", "interfaces.actor.advantage=gae"]
    grpo, ppo = (
        build_experiment(compose(["experiment=grpo", *words])).resolved["interfaces"]["actor"]
        for words in ([*REQUIRED, "algorithm=rloo"], [*REQUIRED, *critic])
    )
    assert ppo.keys() - grpo.keys() == {"critic", "value", "critic_warmup_steps", "ptx_coef"}
    with pytest.raises(ConfigError, match=r"actor\.critic': it is a setting of .*PPOActorInterface, not of"):
        build_experiment(compose(["experiment=grpo", *REQUIRED, "interfaces.actor.critic=own"]))


def graph(*words: str) -> str:
    made = build_experiment(compose(["experiment=grpo", *REQUIRED, *words]))
    check_parts(made)
    return made.resolved["graph"]["_target_"]


def test_the_graph_is_the_dataflow_function_beside_the_class_of_the_actor_or_beside_its_base_class(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "derived.py").write_text(OWN_ACTORS)
    (tmp_path / "rewired.py").write_text(f"{OWN_ACTORS}\ndef dataflow() -> DataflowGraph:\n    return raft()\n")
    assert graph() == "realign.interfaces.grpo.dataflow"
    assert graph(f"{ACTOR}=realign.interfaces.raft.RAFTActorInterface") == "realign.interfaces.raft.dataflow"
    assert graph(f"{ACTOR}=derived.Mine") == "realign.interfaces.grpo.dataflow"
    with pytest.raises(ConfigError, match=r"RPC 'actor_gen'"):  # the graph of RAFT has no log-probs
        graph(f"{ACTOR}=rewired.Mine")
    assert graph(f"{ACTOR}=rewired.Mine", "graph._target_=realign.interfaces.ppo.dataflow").endswith("ppo.dataflow")


def test_a_config_without_a_graph_has_a_valid_actor_or_an_error_that_names_the_key(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "plain.py").write_text(
        "from dataclasses import dataclass\nfrom realign.api import ModelInterface\n\n"
        "@dataclass\nclass Mine(ModelInterface):\n    pass\n"
    )
    with pytest.raises(ConfigError, match=r"^graph\._target_ is missing"):
        graph(f"{ACTOR}=plain.Mine")
    with pytest.raises(ConfigError, match=r"^unknown key 'graph\.epochs'"):
        graph("graph.epochs=2")


HELD_OUT = "evaluation.data.path=held_out.jsonl"
NEEDED = {
    "grpo": ["interfaces.reward.function=realign.rewards:exact_answer"],
    "raft": ["interfaces.reward.function=realign.rewards:exact_answer"],
    "remax": ["interfaces.reward.function=realign.rewards:exact_answer"],
    "trlx_ppo": ["interfaces.reward.function=realign.rewards:exact_answer"],
    "ppo": ["models.reward.path=r"],
    "instructgpt": ["models.reward.path=r", "data.prompts.path=a.jsonl", "data.pretraining.path=b.jsonl"],
    "reward_model": ["models.reward.path=m"],
    "grpo_agent": ["interfaces.agent.agent=a.py:agent"],
    "grpo_environment": ["interfaces.agent.environment=a.py:World"],
}
KINDS = {
    **dict.fromkeys(("grpo", "raft", "remax", "trlx_ppo", "ppo", "instructgpt"), (Evaluation, PromptData)),
    "grpo_agent": (EpisodeEvaluation, PromptData),
    "grpo_environment": (EpisodeEvaluation, PromptData),
    "sft": (LossEvaluation, SupervisedData),
    "dpo": (LossEvaluation, PreferenceData),
    "reward_model": (LossEvaluation, PreferenceData),
}


def built(name: str, *overrides: str) -> Experiment:
    given = [f"experiment={name}", *NEEDED.get(name, [])]
    given += [] if name == "reward_model" else ["models.actor.path=m"]
    given += [] if name == "instructgpt" else ["data.path=train.jsonl"]
    made = build_experiment(compose([*given, *overrides]))
    check_parts(made)
    return made


@pytest.mark.parametrize("name", KINDS)
def test_the_path_of_the_held_out_rows_is_enough(name):
    made = built(name, HELD_OUT)
    evaluation = made.evaluation
    assert (type(evaluation), type(evaluation.data)) == KINDS[name]
    assert evaluation.data.path == "held_out.jsonl"
    assert evaluation.role == ("reward" if name == "reward_model" else "actor")


def test_data_has_the_template_the_columns_and_the_limits_of_training_but_other_rows():
    training = ["data.template=chat", "data.system=Be brief.", "data.prompt_column=question", "data.limit=100"]
    data = built("grpo", *training, HELD_OUT, "evaluation.data.max_prompt_tokens=99").evaluation.data
    assert (data.template.name, data.system, data.prompt_column) == ("chat", "Be brief.", "question")
    assert (data.limit, data.max_prompt_tokens) == (None, 99)
    supervised = built("sft", *training, HELD_OUT, "evaluation.data.limit=5").evaluation.data
    assert (supervised.system, supervised.prompt_column, supervised.max_tokens) == ("Be brief.", "question", 2048)
    assert supervised.limit == 5


def test_responses_are_greedy_and_as_long_as_in_training_unless_the_node_asks_for_samples():
    training = ["interfaces.actor.generation={n: 8, max_new_tokens: 77, temperature: 0.9}"]

    def generation(*overrides: str) -> GenerationConfig:
        return built("grpo", *training, HELD_OUT, *overrides).evaluation.generation

    assert generation() == GenerationConfig(n=1, max_new_tokens=77, temperature=0.9, greedy=True)
    assert generation("evaluation.generation.max_new_tokens=5").max_new_tokens == 5
    several = generation("evaluation.generation.n=16")
    assert (several.n, several.greedy, several.temperature) == (16, False, 0.9)
    assert not generation("evaluation.generation.temperature=0.5").greedy
    assert generation("evaluation.generation={n: 2, greedy: true}").greedy


def test_the_reward_is_that_of_the_graph_or_that_of_training_with_other_settings():
    functions = "interfaces.reward.functions={a: x.py:f, b: {function: y.py:g, weight: 2}}"
    made = built("grpo", "interfaces.reward.function=null", functions, "interfaces.reward.workers=3", HELD_OUT)
    assert made.evaluation.reward is None
    changed = built("grpo", "interfaces.reward.workers=3", HELD_OUT, "evaluation.reward.timeout_s=5").evaluation.reward
    training = "realign.rewards:exact_answer"
    assert changed == RuleRewardInterface(training, workers=3, timeout_s=5.0)
    replaced = built("grpo", HELD_OUT, "evaluation.reward.functions={a: x.py:f}").evaluation.reward
    assert replaced == RuleRewardInterface(functions={"a": "x.py:f"})
    with pytest.raises(
        ConfigError, match=r"evaluation\.reward\._target_ is missing: the reward of training is a model"
    ):
        built("ppo", HELD_OUT, "evaluation.reward.function=x.py:f")


def test_episodes_are_those_of_training_one_greedy_episode_per_row():
    made = built("grpo_environment", "interfaces.agent.max_turns=3", HELD_OUT).evaluation
    assert isinstance(made.episodes, EnvironmentInterface)
    assert (made.episodes.max_turns, made.episodes.generation.n, made.episodes.generation.greedy) == (3, 1, True)
    changed = built("grpo_environment", HELD_OUT, "evaluation.episodes={max_turns: 2, generation: {n: 4}}").evaluation
    assert (changed.episodes.max_turns, changed.episodes.generation.n) == (2, 4)
    assert not changed.episodes.generation.greedy


def test_named_sets_take_over_the_training_settings_too():
    made = built(
        "grpo",
        "data.template=chat",
        "evaluations={math: {data: {path: a.jsonl}}, code: {data: {path: b.jsonl}, every_steps: 5}}",
    )
    assert {name: e.data.path for name, e in made.evaluations.items()} == {"math": "a.jsonl", "code": "b.jsonl"}
    assert {e.data.template.name for e in made.evaluations.values()} == {"chat"}
    assert [e.every_steps for e in made.evaluations.values()] == [10, 5]
    assert [*made.all_evaluations] == ["evaluations.math", "evaluations.code"]
    assert built("grpo", "evaluations.math=null").evaluations == {}


def test_the_resolved_config_contains_everything_and_builds_the_same_evaluation():
    made = built("grpo", HELD_OUT, "evaluations.math.data.path=a.jsonl")
    again = built("grpo", f"evaluation={_flow(as_node(made.evaluation))}")
    assert again.evaluation == made.evaluation
    assert made.resolved["evaluations"]["math"]["data"]["path"] == "a.jsonl"


def _flow(node) -> str:
    """Write a config node as an override."""
    if isinstance(node, dict):
        return "{" + ", ".join(f"{key}: {_flow(value)}" for key, value in node.items()) + "}"
    if isinstance(node, list):
        return "[" + ", ".join(map(_flow, node)) + "]"
    return (
        "null"
        if node is None
        else str(node).lower()
        if isinstance(node, bool)
        else f"'{node}'"
        if node == ""
        else str(node)
    )


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("grpo", ["evaluation.every_steps=5"], r"evaluation\.data\.path is missing: give it the held-out rows"),
        ("grpo", ["evaluations.math.every_steps=5"], r"evaluations\.math\.data\.path is missing"),
        ("grpo", ["evaluation.data.template=chat"], r"evaluation\.data\.path is missing"),
        (
            "grpo",
            [HELD_OUT, "evaluation.every_steps=null"],
            r"every_steps must not be null; expected int; evaluation=null disables",
        ),
        (
            "grpo",
            [HELD_OUT, "evaluation.data.tmplate=chat"],
            r"unknown key 'evaluation\.data\.tmplate'; did you mean 'template'",
        ),
        ("grpo", [HELD_OUT, "evaluation.role=critic"], r"evaluation\.role: no model plays 'critic'"),
        ("grpo", [HELD_OUT, "evaluation.pass_at=[4]"], r"evaluation\.pass_at=\[4\]: needs at least 4 responses"),
        (
            "sft",
            [HELD_OUT, "evaluation.generation.n=2"],
            r"evaluation\.reward is not set, and no RPC of the graph writes",
        ),
        (
            "sft",
            [HELD_OUT, "evaluation.reward.workers=2"],
            r"evaluation\.reward\._target_ is missing: training has no reward",
        ),
        ("grpo", ["evaluations=3"], r"evaluations"),
        ("grpo", ["evaluations.math=held.jsonl"], r"evaluations\.math"),
        ("grpo", ["evaluations.math.data.path=a.jsonl", "save_best=eval/code/reward"], None),
    ],
)
def test_a_mistake_is_named_with_its_key(name, overrides, message):
    if message is None:
        assert built(name, *overrides).save_best == "eval/code/reward"  # found at launch, with the valid metrics
        return
    with pytest.raises(ConfigError, match=message):
        built(name, *overrides)


BASE = ["experiment=grpo", "models.actor.path=model", "data.path=rows.jsonl", "interfaces.reward.function=arithmetic"]
SERVER = ["models.actor.sampler=vllm", "models.actor.sampler.urls=[http://127.0.0.1:8000]"]


def correction(*words):
    experiment = build_experiment(compose([*BASE, *words]))
    actor = experiment.interfaces["actor"]
    assert isinstance(actor, GRPOActorInterface)
    return actor.correction, {rpc.name for rpc in experiment.graph.rpcs}


def test_a_server_brings_the_correction_and_the_call_that_it_needs():
    assert correction() == (None, correction()[1])
    corrected, calls = correction(*SERVER)
    assert corrected == ImportanceCorrection()
    assert len(calls) == len(correction()[1]) + 1


IDLE = """# @package _global_
defaults: [/experiment/grpo, _self_]
models: {actor: {path: m}}
data: {path: p.jsonl}
interfaces:
  actor:
    _target_: realign.interfaces.ppo.PPOActorInterface
    advantage: gae
    kl: {place: loss, full_vocabulary: true, estimator: null}
    critic_warmup_steps: 3
  reward: {function: "realign.rewards.arithmetic:score"}
"""


def idle(folder: Path, *words: str, more: str = "") -> Experiment:
    file = folder / "experiment" / "idle.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(IDLE + more)
    return build_experiment(compose(["experiment=idle", *words], folder))


def test_a_setting_of_a_file_without_effect_is_a_row_of_the_launch_table(tmp_path):
    made = idle(tmp_path, "interfaces.actor.kl.place=reward")
    actor = made.interfaces["actor"]
    assert (actor.kl.full_vocabulary, actor.critic_warmup_steps) == (False, 0)
    assert made.resolved["interfaces"]["actor"]["critic_warmup_steps"] == 0
    assert made.idle == [
        "interfaces.actor.kl.full_vocabulary=true (with place=reward)",
        "interfaces.actor.critic_warmup_steps=3 (with critic=none)",
    ]
    assert dict(derived_rows(made))["settings without effect"] == "; ".join(made.idle)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (
            ["kl.place=reward", "kl.full_vocabulary=true"],
            "kl.full_vocabulary=true: has no effect with place=reward",
        ),
        (["kl={place: reward, full_vocabulary: true}"], "kl.full_vocabulary=true: has no effect"),
        (["kl.place=none", "kl.coef=0.1"], "kl.coef=0.1: has no effect with place=none. Set place=reward or"),
        (["kl.place=none", "kl.estimator=k2"], "kl.estimator=k2: has no effect with place=none. Set place=reward or"),
        (["critic_warmup_steps=4"], "critic_warmup_steps=4: has no effect with critic=none. Set critic=own"),
        (["value.coef=2"], "value: has no effect with critic=none. Set critic=shared"),
    ],
)
def test_a_setting_of_the_command_line_without_effect_is_an_error(tmp_path, words, key):
    with pytest.raises(ConfigError, match=re.escape(f"interfaces.actor.{key}")):
        idle(tmp_path, *(f"interfaces.actor.{word}" for word in words))


def test_building_runs_the_constructor_of_the_experiment_once(monkeypatch):
    runs = []
    check = Experiment.__post_init__
    monkeypatch.setattr(Experiment, "__post_init__", lambda self: (runs.append(self), check(self)))
    made = build_experiment(compose(["experiment=grpo", *REQUIRED, "interfaces.reward.function=builtins.py:len"]))
    assert runs == [made]
    assert made.resolved["interfaces"]["actor"]["adv_norm"]["std"] == "group"
