"""Test the checks before anything is loaded."""

from __future__ import annotations

import copy
import re
import warnings
from dataclasses import replace

import pytest

from realign.api import RPC, GenerationConfig
from realign.data import PromptData, SupervisedData, TextData, WithPretraining
from realign.engines import OptimizerSpec, Schedule, SharedModel, TransformersModel
from realign.errors import ConfigError, DataError
from realign.interfaces import sft
from realign.interfaces.components import KLPenalty, KLPlace, RewardShaping
from realign.interfaces.critic import PPOCriticInterface
from realign.interfaces.decoupled_ppo import DecoupledPPOActorInterface
from realign.interfaces.greedy import GreedyInterface
from realign.interfaces.ppo import PPOActorInterface, dataflow
from realign.interfaces.reference import ReferenceInterface
from realign.interfaces.sft import SFTInterface
from realign.models import Causal, Value, ValueHead
from realign.runtime import Async, Evaluation, Experiment, LocalRuntime
from realign.runtime.checks.before_loading import (
    check_ready,
    check_roles,
    check_rollout,
    open_interfaces,
    used_interfaces,
    writable,
)
from tests.tiny import save_tiny
from tests.toys import BigramModel, CountToken, Prompts, experiment


def test_stand_ins_that_cannot_tell_are_taken_as_they_are(tmp_path):
    check_ready(experiment(tmp_path))
    assert not (tmp_path / "run").exists()


def test_the_folder_of_a_run_is_made_by_the_run_and_looked_at_before(tmp_path):
    assert writable(tmp_path / "a" / "b") == tmp_path
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError, match=r"output_dir=.*file/run.*: .*file' is not a folder"):
        writable(tmp_path / "file" / "run")


@pytest.mark.parametrize("where", ["prompts", "pretraining"])
def test_a_data_node_inside_another_is_named_by_its_whole_key(tmp_path, where):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "text": "2"}\n')
    nodes = {"prompts": PromptData(str(rows)), "pretraining": TextData(str(rows), block_tokens=2)}
    WithPretraining(**nodes).check("data")
    wrong = {"prompts": PromptData(str(rows), prompt_column="prmpt"), "pretraining": TextData("missing.jsonl")}
    with pytest.raises(DataError, match=rf"^data\.{where}\.(prompt_column: .*did you mean 'prompt'|path: no file)"):
        WithPretraining(**{**nodes, where: wrong[where]}).check("data")


def test_held_out_data_is_looked_at_as_training_data_is(tmp_path):
    held_out = SupervisedData(str(tmp_path / "missing.jsonl"))
    with pytest.raises(DataError, match=r"^evaluation\.data\.path: no file or folder"):
        check_ready(experiment(tmp_path, evaluation=Evaluation(held_out, CountToken())))


class Unopened(CountToken):
    """Interface whose `open` raises this error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def open(self) -> None:
        raise self.error


def judged_by(judge: CountToken, tmp_path) -> Experiment:
    evaluation = Evaluation(Prompts(4), judge, metrics={"other": CountToken()})
    return experiment(tmp_path, evaluation=evaluation)


def test_an_interface_that_cannot_be_opened_is_named_by_its_key(tmp_path):
    made = judged_by(Unopened(ConfigError("url=x: no server")), tmp_path)
    assert list(used_interfaces(made)) == [
        "interfaces.actor",
        "interfaces.reward",
        "evaluation.reward",
        "evaluation.metrics.other",
    ]
    with pytest.raises(ConfigError, match=r"^evaluation\.reward: url=x: no server$"):
        open_interfaces(made)
    with pytest.raises(ConfigError, match=r"^evaluation\.reward: "):
        LocalRuntime(judged_by(Unopened(ConfigError("url=x: no server")), tmp_path))


def test_an_error_in_the_open_of_user_code_keeps_its_class_and_gets_the_key_as_a_note(tmp_path):
    with pytest.raises(ZeroDivisionError) as raised:
        open_interfaces(judged_by(Unopened(ZeroDivisionError("by zero")), tmp_path))
    assert (str(raised.value), raised.value.__notes__) == ("by zero", ["while calling evaluation.reward"])


ROLE_GENERATION = GenerationConfig(n=2, max_new_tokens=4)
TRAINED = OptimizerSpec(lr=1e-3)
PENALIZED = PPOActorInterface(ROLE_GENERATION, kl=KLPenalty(KLPlace.reward))


@pytest.mark.parametrize(
    ("interfaces", "models", "message"),
    [
        (
            {"actor": PENALIZED, "ref": ReferenceInterface()},
            {"ref": SharedModel("actor")},
            r"models\.ref\.branch=whole: ref needs frozen weights, but would change with models\.actor",
        ),
        (
            {"actor": PENALIZED, "ref": ReferenceInterface()},
            {"ref": SharedModel("actor", branch="reference")},
            r"models\.ref\.branch=reference: models\.actor trains all of its weights",
        ),
        (
            {
                "actor": PPOActorInterface(ROLE_GENERATION, reward=RewardShaping(baseline="greedy")),
                "baseline": GreedyInterface(ROLE_GENERATION),
            },
            {"baseline": TransformersModel("m")},
            r"models\.baseline\.path='m': .*this copy is never updated.*SharedModel, of: actor\}'",
        ),
        (
            {"critic": PPOCriticInterface(), "actor": PPOActorInterface(ROLE_GENERATION, critic="shared")},
            {"critic": TransformersModel("m", head=Value())},
            r"models\.critic\.path='m': this model is not trained",
        ),
    ],
)
def test_roles_that_must_share_weights_do_and_a_reference_does_not(tmp_path, interfaces, models, message):
    actor = TransformersModel("m", optimizer=TRAINED, head=Causal(ValueHead() if "critic" in models else None))
    parts = {"reward": CountToken()} | interfaces
    made = experiment(tmp_path, interfaces=parts, models={"actor": actor, **models}, evaluation=None)
    with pytest.raises(ConfigError, match=message):
        check_roles(made)


@pytest.mark.parametrize(
    ("schedule", "settings", "warned"),
    [
        (Schedule("linear", total=3), {}, None),
        (
            Schedule("linear", total=3),
            {"n_minibatches": 2, "epochs": 2},
            "total=3: the run has up to 12 optimizer_steps, .*total=12",
        ),
        (Schedule("linear", total=3, unit="train_step"), {"n_minibatches": 2}, None),
        (Schedule("cosine", total=2, unit="train_step"), {}, "total=2: the run has up to 3 train_steps"),
        (Schedule("cosine", total=2, min_ratio=0.1), {}, None),
        (Schedule("constant"), {"n_minibatches": 2}, None),
    ],
)
def test_a_learning_rate_that_reaches_0_before_the_end_warns(tmp_path, recwarn, schedule, settings, warned):
    model = TransformersModel(str(save_tiny(tmp_path / "m")), optimizer=OptimizerSpec(schedule=schedule))
    parts = {"actor": PPOActorInterface(ROLE_GENERATION, **settings), "reward": CountToken()}
    check_roles(experiment(tmp_path, interfaces=parts, models={"actor": model}, evaluation=None))
    messages = [str(w.message) for w in recwarn if "schedule.total" in str(w.message)]
    assert len(messages) == (warned is not None)
    assert not warned or re.search(warned, messages[0])


GENERATION = GenerationConfig(n=2, max_new_tokens=4)
AHEAD = Async(max_staleness=2)


def test_what_cannot_be_sampled_ahead_is_refused(tmp_path):
    made = copy.copy(experiment(tmp_path))  # a copy, because these graphs do not pass the checks of an experiment
    made.rollout = AHEAD
    with pytest.raises(ConfigError, match="none of the RPCs that lead to the key 'rewards' generates responses"):
        check_rollout(experiment(tmp_path, graph=sft.dataflow(), interfaces={"actor": SFTInterface()}, rollout=AHEAD))
    train = RPC("other_train", "other", "train_step", inputs=("input_ids",))
    plain = dataflow({"actor": PPOActorInterface(GENERATION), "reward": CountToken()})
    judged = [replace(r, after=("other_train",)) if r.name == "reward_inf" else r for r in plain.rpcs]
    made.graph, made.models = replace(plain, rpcs=(*judged, train)), {"actor": BigramModel()}
    with pytest.raises(ConfigError, match=r"RPC 'other_train' trains a model\. Set rollout=sync"):
        check_rollout(made)
    judge = [replace(r, model="judge") if r.name == "reward_inf" else r for r in plain.rpcs]
    later = RPC("judge_train", "judge", "train_step", inputs=("input_ids", "rewards"))
    made.graph, made.models = replace(plain, rpcs=(*judge, later)), {"judge": BigramModel()}
    with pytest.raises(ConfigError, match=r"RPC 'reward_inf' uses models\.judge, which changes meanwhile"):
        check_rollout(made)


@pytest.mark.parametrize(
    ("actor", "text"),
    [
        (PPOActorInterface(GENERATION), "PPOActorInterface.* clips the ratio to the policy that sampled them"),
        (PPOActorInterface(GENERATION, recompute=True), "PPOActorInterface.* does not weight them"),
        (DecoupledPPOActorInterface(GENERATION), None),
    ],
)
def test_an_objective_that_does_not_correct_for_staleness_warns(tmp_path, actor, text):
    made = experiment(tmp_path, interfaces={"actor": actor, "reward": CountToken()}, rollout=AHEAD)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_rollout(made)
        check_rollout(replace(made, rollout=Async(max_staleness=0)))
    warned = [str(w.message) for w in caught]
    assert len(warned) == (text is not None)
    assert text is None or re.search(
        rf"max_staleness=2.*{text}.*interfaces\.actor\.correction=importance_correction", warned[0]
    )
