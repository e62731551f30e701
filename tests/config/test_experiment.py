"""Test how a config becomes an experiment: the named callbacks, and settings without effect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from realign.cli.launch_table import derived_rows
from realign.config import build_experiment, compose
from realign.config.errors import ConfigError
from realign.runtime import Experiment
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


# --- settings without effect ---


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
        (["critic_warmup_steps=4"], "critic_warmup_steps=4: has no effect with critic=none. Set critic=own"),
        (["value.coef=2"], "value: has no effect with critic=none. Set critic=shared"),
    ],
)
def test_a_setting_of_the_command_line_without_effect_is_an_error(tmp_path, words, key):
    with pytest.raises(ConfigError, match=re.escape(f"interfaces.actor.{key}")):
        idle(tmp_path, *(f"interfaces.actor.{word}" for word in words))


def test_settings_of_the_run_without_effect_follow_the_same_rule(tmp_path):
    with pytest.raises(ConfigError, match=r"^resume_allow=\[steps\]: has no effect without resume"):
        idle(tmp_path, "resume_allow=[steps]")
    made = idle(tmp_path, more="keep_saves: 3\nsave_every_steps: null\n")
    assert made.keep_saves is None
    assert made.idle[-1] == "keep_saves=3 (without save_every_steps)"
