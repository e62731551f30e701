"""Test how a config becomes an experiment: the named callbacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from realign.config import build_experiment, compose
from realign.config.errors import ConfigError
from realign.runtime.callbacks import EarlyStopping
from tests.config_parts import EXPERIMENT, write_experiment

WORD = "callbacks: {stop: early_stopping}\n"


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


def test_the_command_line_sets_fields_of_a_word_in_a_file(tmp_path):
    assert callbacks(tmp_path, text=WORD) == {"stop": EarlyStopping()}
    assert callbacks(tmp_path, "callbacks.stop.patience=1", text=WORD) == {"stop": EarlyStopping(patience=1)}


@pytest.mark.parametrize("nothing", ["null", "none"])
def test_null_removes_a_callback(tmp_path, nothing):
    assert callbacks(tmp_path, f"callbacks.stop={nothing}", text=WORD) == {}


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
        (["callbacks.stop._target_=realign.runtime.TensorBoard"], "TensorBoard is not a Callback"),
        (["callbacks=null"], "callbacks: expected a component, found null"),
    ],
)
def test_mistakes_name_the_key(tmp_path, words, message):
    with pytest.raises(ConfigError) as caught:
        callbacks(tmp_path, *words)
    assert message in str(caught.value)


def test_the_resolved_config_of_an_actor_without_a_critic_has_no_settings_of_one():
    required = ["models.actor.path=m", "data.path=p.jsonl", "interfaces.reward.function=reward.py:score"]
    critic = ["interfaces.actor._target_=realign.interfaces.ppo.PPOActorInterface", "interfaces.actor.advantage=gae"]
    grpo, ppo = (
        build_experiment(compose(["experiment=grpo", *words])).resolved["interfaces"]["actor"]
        for words in ([*required, "algorithm=rloo"], [*required, *critic])
    )
    assert ppo.keys() - grpo.keys() == {"critic", "value", "critic_warmup_steps", "ptx_coef"}
    with pytest.raises(
        ConfigError, match=r"interfaces\.actor\.critic=own: .*realign\.interfaces\.ppo\.PPOActorInterface"
    ):
        build_experiment(compose(["experiment=grpo", *required, "interfaces.actor.critic=own"]))
