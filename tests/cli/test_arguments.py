"""Test the notations of overrides: `--key value`, `--key=value` and `--flag`."""

from __future__ import annotations

import pytest

from realign.cli.arguments import options, unknown_option, with_overrides_for_flags


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


def test_no_option_is_hidden_by_a_key():
    assert {"--help", "-m", "--config-dir", "--shell-completion"} <= set(options())
    assert [with_overrides_for_flags([option]) for option in options()] == [[option] for option in options()]


def test_an_unknown_option_is_answered_with_the_nearest():
    assert unknown_option(["--frmat", "svg"]).startswith("unrecognized arguments: --frmat svg; did you mean 'format'?")
