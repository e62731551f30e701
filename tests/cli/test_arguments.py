"""Test the notations of overrides: `--key value`, `--key=value` and `--flag`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, auto

import pytest

from realign.cli.arguments import split_options, with_overrides_for_flags
from realign.config.errors import ConfigError
from realign.errors import SettingsError
from realign.settings import Count, Settings


class Kind(StrEnum):
    a100 = auto()
    h100 = auto()


@dataclass
class Options(Settings):
    devices: Count = 8
    nodes: Count = 1
    device: Kind = Kind.h100
    runs: list[str] | str = ""

    def __post_init__(self):
        super().__post_init__()
        if self.devices % self.nodes:
            raise SettingsError(f"nodes={self.nodes}: must divide devices={self.devices}")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--steps", "5"], ["steps=5"]),
        (["--steps=5"], ["steps=5"]),
        (["--batch-prompts", "5", "--seed=1"], ["batch_prompts=5", "seed=1"]),
        (["--interfaces.actor.epochs", "2"], ["interfaces.actor.epochs=2"]),
        (["--learning-rate", "1e-5"], ["learning_rate=1e-5"]),
        (["--ratio_tolerance", "-1"], ["ratio_tolerance=-1"]),
        (["--plan.devices", "8"], ["plan.devices=8"]),
        (["--overwrite"], ["overwrite=true"]),
        (["--overwrite", "--steps", "5"], ["overwrite=true", "steps=5"]),
        (["--overwrite", "steps=5"], ["overwrite=true", "steps=5"]),
        (["--experiment", "grpo"], ["experiment=grpo"]),
        (["--config-dir", "--steps", "-m", "--cfg", "job"], ["--config-dir", "--steps", "-m", "--cfg", "job"]),
        (["--frmat", "svg", "steps=5"], ["--frmat", "svg", "steps=5"]),
        (["help", "--help"], ["help", "--help"]),
    ],
)
def test_flags_of_known_keys_become_overrides(argv, expected):
    assert with_overrides_for_flags(argv) == expected


def test_options_are_separated_from_the_overrides_of_the_experiment():
    words = ["experiment=grpo", "plan.devices=16", "planning=1", "plan.device=a100", "plan.runs=[a,b]", "steps=3"]
    options, rest = split_options("plan", Options, words)
    assert options == Options(devices=16, device=Kind.a100, runs=["a", "b"])
    assert split_options("plan", Options, ["plan.runs=runs/a"])[0].runs == "runs/a"
    assert rest == ["experiment=grpo", "planning=1", "steps=3"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("plan.device=h10", "plan.device: unknown choice 'h10'; did you mean 'h100'?"),
        ("plan.devises=8", "unknown key 'plan.devises'; did you mean 'devices'"),
        ("plan.devices=0", "plan.devices=0: must be at least 1"),
        ("plan.devices", "plan.devices: an option has a value, such as plan.devices=1"),
        ("plan.nodes=3", "plan.nodes=3: must divide devices=8"),
        ("plan.runs={a: 1}", "plan.runs"),
    ],
)
def test_a_wrong_option_is_named(word, message):
    with pytest.raises(ConfigError) as caught:
        split_options("plan", Options, [word])
    assert message in str(caught.value)
