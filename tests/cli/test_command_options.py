from __future__ import annotations

import pytest

from realign.cli.command_options import split_options
from realign.config.errors import ConfigError
from realign.planning.options import DeviceKind, PlanOptions


def test_options_are_separated_from_the_overrides_of_the_experiment():
    words = ["experiment=grpo", "plan.devices=16", "planning=1", "plan.device=a100", "plan.runs=[a,b]", "steps=3"]
    options, rest = split_options("plan", PlanOptions, words)
    assert options == PlanOptions(devices=16, device=DeviceKind.a100, runs=["a", "b"])
    assert options.folders == ["a", "b"]
    assert split_options("plan", PlanOptions, ["plan.runs=runs/a"])[0].folders == ["runs/a"]
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
        split_options("plan", PlanOptions, [word])
    assert message in str(caught.value)
