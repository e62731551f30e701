"""Test words at the root of a component, such as `interfaces.actor=grpo`, and as the `_target_` of nested ones."""

from __future__ import annotations

import subprocess
import sys

import pytest

from realign.cli.completion import completions
from realign.config import compose
from realign.config.composition import compose_raw
from realign.config.construct import import_target
from realign.config.errors import ConfigError
from realign.config.files import experiments_dir
from realign.config.places import spell_out
from realign.config.trees import merge

PPO = {"_target_": "realign.interfaces.ppo.PPOActorInterface"}
REQUIRED = ["models.actor.path=m", "data.path=p.jsonl", "interfaces.reward.function=reward.py:score"]


@pytest.mark.parametrize(
    ("key", "word", "path"),
    [
        ("interfaces.actor", "grpo", "realign.interfaces.grpo.GRPOActorInterface"),
        ("interfaces.critic", "critic", "realign.interfaces.critic.PPOCriticInterface"),
        ("interfaces.actor", "kto", "realign.interfaces.kto.KTOInterface"),
        ("data", "prompts", "realign.data.prompts.PromptData"),
        ("data", "rewarded", "realign.data.unpaired.RewardedData"),
        ("models.critic", "shared_model", "realign.engines.shared_model.SharedModel"),
        ("models.actor", "transformers_model", "realign.engines.transformers_model.TransformersModel"),
        ("data", "grpo", None),
        ("interfaces.actor", "components", None),
        ("interfaces.actor", "none", None),
        ("interfaces.actor", "my.module.Class", None),
        ("rollout", "sync", None),
    ],
)
def test_a_word_at_the_root_of_a_component_is_the_module_of_the_class(key, word, path):
    root, _, role = key.partition(".")
    values = {root: {role: word} if role else word}
    spell_out(values)
    spelled = values[root][role] if role else values[root]
    assert spelled == (word if path is None else {"_target_": path})
    if path is not None:
        assert import_target(path, key).__name__ == path.rpartition(".")[2]


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        (["interfaces.actor=ppo"], {"actor": PPO}),
        (["interfaces.actor._target_=ppo"], {"actor": PPO}),
        (["interfaces.actor={_target_: ppo}"], {"actor": PPO}),
        (["interfaces={actor: ppo}"], {"actor": PPO}),
        (["interfaces.actor.epochs=2", "interfaces.actor=ppo"], {"actor": {**PPO, "epochs": 2}}),
        (["interfaces.actor={_target_: ppo, epochs: 2}"], {"actor": {**PPO, "epochs": 2}}),
        (["+interfaces.other=ppo"], {"other": PPO}),
    ],
)
def test_the_command_line_takes_the_words_of_files(words, changes):
    made = compose_raw(["experiment=grpo", *REQUIRED, *words])
    expected = compose_raw(["experiment=grpo", *REQUIRED])["interfaces"]
    merge(expected, changes)
    assert made["interfaces"] == expected


@pytest.mark.parametrize(
    "override",
    ["interfaces.actor=grpp", "interfaces.actor._target_=gropo", "data=prompt", "interfaces.actor={_target_: gropo}"],
)
def test_a_misspelled_word_is_an_error_that_names_the_nearest(override):
    with pytest.raises(
        ConfigError, match=r"^(interfaces\.actor|data): unknown choice .* did you mean '(grpo|prompts)'"
    ):
        compose(["experiment=grpo", *REQUIRED, override])


@pytest.mark.parametrize("override", ["models=m", "interfaces=grpo", "curriculum=nothing", "graph=nothing"])
def test_a_word_that_no_key_takes_is_a_text_in_place_of_a_component(override):
    with pytest.raises(ConfigError, match=rf"^{override.partition('=')[0]}: expected a component, found a text"):
        compose(["experiment=grpo", *REQUIRED, override])


def test_shipped_files_write_words_for_shipped_components():
    for path in experiments_dir().rglob("*.yaml"):
        assert "_target_: realign." not in path.read_text(), path


def test_words_need_no_torch_and_complete_as_classes_do():
    code = "import sys; from realign.config import compose; compose(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, "experiment=grpo", *REQUIRED], check=False).returncode == 0
    line = "realign experiment=grpo interfaces.actor=ppo interfaces.actor.crit"
    assert any(word.startswith("interfaces.actor.critic=") for word in completions(line))
