"""Test words that select a shipped class by its module."""

from __future__ import annotations

import subprocess
import sys

import pytest

from realign.cli.completion import completions
from realign.config import build_experiment, compose
from realign.config.construct import import_target
from realign.config.errors import ConfigError
from realign.config.files import experiments_dir, list_experiments
from realign.config.module_words import spell_out, target_of, with_target
from tests.config_parts import write_experiment

REQUIRED = ["models.actor.path=m", "data.path=p.jsonl", "interfaces.reward.function=reward.py:score"]
PLAIN = """# @package _global_
steps: 2
batch_prompts: 4
models:
  actor: {path: m}
  other: {_target_: shared_model, of: actor}
interfaces:
  actor: grpo
  reward: {_target_: rule_reward, function: "reward.py:score"}
data: {_target_: prompts, path: p.jsonl}
evaluation:
  data: {path: p.jsonl}
  reward: {_target_: rule_reward, function: "other.py:score"}
"""


@pytest.mark.parametrize(
    ("key", "word", "path"),
    [
        ("interfaces.actor", "grpo", "realign.interfaces.grpo.GRPOActorInterface"),
        ("interfaces.critic", "critic", "realign.interfaces.critic.PPOCriticInterface"),
        ("interfaces.actor", "kto", "realign.interfaces.kto.KTOInterface"),
        ("evaluation.reward", "rule_reward", "realign.interfaces.rule_reward.RuleRewardInterface"),
        ("evaluations.math.metrics.length", "rule_reward", "realign.interfaces.rule_reward.RuleRewardInterface"),
        ("data", "prompts", "realign.data.prompts.PromptData"),
        ("calibration.data", "unpaired", "realign.data.unpaired.UnpairedData"),
        ("models.critic", "shared_model", "realign.engines.shared_model.SharedModel"),
        ("models.actor", "transformers_model", "realign.engines.transformers_model.TransformersModel"),
        ("data", "grpo", None),
        ("interfaces.actor", "components", None),
        ("interfaces.actor", "none", None),
        ("interfaces.actor", "my.module.Class", None),
        ("interfaces.actor.kl", "grpo", None),
        ("rollout", "prompts", None),
    ],
)
def test_a_word_is_the_module_of_the_class(key, word, path):
    assert target_of(key, word) == path
    if path is not None:
        assert import_target(path, key).__name__ == path.rpartition(".")[2]


@pytest.mark.parametrize(
    ("override", "replaced"),
    [
        ("interfaces.actor=ppo", "interfaces.actor._target_=realign.interfaces.ppo.PPOActorInterface"),
        ("interfaces.actor._target_=ppo", "interfaces.actor._target_=realign.interfaces.ppo.PPOActorInterface"),
        ("+models.x=shared_model", "+models.x._target_=realign.engines.shared_model.SharedModel"),
        (
            "interfaces.actor=sft,raft",
            "interfaces.actor._target_=realign.interfaces.sft.SFTInterface,realign.interfaces.raft.RAFTActorInterface",
        ),
        (
            "evaluation.data={path: 'a,b', _target_: prompts, limit: 4}",
            "evaluation.data={path: 'a,b', _target_: realign.data.prompts.PromptData, limit: 4}",
        ),
        *((same, same) for same in ("interfaces.actor=nothing", "data=null", "~data", "interfaces.actor={a: 1}")),
        *((same, same) for same in ("rollout=async", "data.path=prompts", "experiment=grpo", "data=grpo,prompts")),
    ],
)
def test_an_override_with_a_word_becomes_one_with_an_import_path(override, replaced):
    assert with_target(override) == replaced


@pytest.mark.parametrize("override", ["interfaces.actor=grpp", "interfaces.actor._target_=gropo", "data=prompt"])
def test_a_misspelled_word_is_an_error_that_names_the_nearest(override):
    with pytest.raises(
        ConfigError, match=r"^(interfaces\.actor|data): unknown choice .* did you mean '(grpo|prompts)'"
    ):
        with_target(override)


def test_a_file_is_written_in_words(tmp_path):
    made = build_experiment(compose(["experiment=bigram"], write_experiment(tmp_path, text=PLAIN))).resolved
    assert made["interfaces"]["actor"]["_target_"] == "realign.interfaces.grpo.GRPOActorInterface"
    assert made["graph"]["_target_"] == "realign.interfaces.grpo.dataflow"
    assert made["evaluation"]["reward"]["function"] == "other.py:score"
    assert made["models"]["other"]["_target_"] == "realign.engines.shared_model.SharedModel"


def test_a_word_of_a_higher_layer_replaces_the_class_and_keeps_what_both_have():
    made = build_experiment(
        compose(["experiment=grpo", *REQUIRED, "interfaces.actor=ppo", "interfaces.actor.epochs=2"])
    )
    assert type(made.interfaces["actor"]).__name__ == "PPOActorInterface"
    assert made.interfaces["actor"].epochs == 2
    assert made.resolved["graph"]["_target_"] == "realign.interfaces.ppo.dataflow"


def test_shipped_experiments_write_words_where_a_word_exists():
    for name in list_experiments():
        text = (experiments_dir() / "experiment" / f"{name}.yaml").read_text()
        assert "_target_: realign.interfaces." not in text.replace("realign.interfaces.components", ""), name
        assert "TransformersModel" not in text


def test_words_need_no_torch_and_complete_as_classes_do():
    code = "import sys; from realign.config import compose; compose(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, "experiment=grpo", *REQUIRED], check=False).returncode == 0
    line = "realign experiment=grpo interfaces.actor=ppo interfaces.actor.crit"
    assert any(word.startswith("interfaces.actor.critic=") for word in completions(line))


def test_a_file_keeps_what_is_no_word():
    values = {"interfaces": {"actor": "${x}"}, "data": "nothing", "models": {"actor": {"_target_": "my.Model"}}}
    before = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
    assert spell_out(values) == {}
    assert values == before
