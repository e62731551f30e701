"""Test the script that disconnects options: the package reads the default, and tests read the value."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from realign.interfaces.components import Clip
from realign.interfaces.ppo import PPOActorInterface

spec = importlib.util.spec_from_file_location(
    "coverage_options", Path(__file__).parents[2] / "scripts" / "coverage_options.py"
)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
ROOTS = {"actor": "realign.interfaces.ppo.PPOActorInterface"}


@dataclass
class Base:
    """Settings with and without defaults."""

    needed: int
    width: int = 3
    names: list[str] = field(default_factory=lambda: ["a"])


@dataclass
class Derived(Base):
    """The same settings with another default."""

    width: int = 4


def read_by(module: str, settings: Base, name: str) -> object:
    """Return a field as code of a module reads it."""
    return eval(f"settings.{name}", {"__name__": module, "settings": settings})


def test_the_package_reads_the_default_and_tests_read_the_value():
    assert script.disconnect(Base, "width")
    assert script.disconnect(Base, "names")
    for settings, default in ((Base(1, 7, ["b"]), 3), (Derived(1, 7, ["b"]), 4)):
        assert (settings.width, settings.names) == (7, ["b"])
        assert read_by("realign.interfaces.ppo", settings, "width") == default
        assert read_by("realign.interfaces.ppo", settings, "names") == ["a"]
        assert read_by("realign.settings", settings, "width") == 7
        assert read_by("realign.config.construct", settings, "width") == 7


def test_a_field_without_a_default_stays_as_it_is():
    assert not script.disconnect(Base, "needed")
    assert read_by("realign.interfaces.ppo", Base(5), "needed") == 5


def test_an_option_is_a_field_of_a_class_of_the_package():
    assert script.field_of("actor.epochs", ROOTS) == (PPOActorInterface, "epochs")
    assert script.field_of("actor.early_stop.kl", ROOTS)[1] == "kl"
    assert script.field_of("realign.api.RPC", ROOTS) is None


@pytest.mark.slow
def test_a_test_that_needs_the_option_fails_without_it_and_another_does_not():
    needs = ["interfaces/test_ppo.py::test_a_dual_clip_bounds_what_a_negative_advantage_can_cost"]
    assert script.outcome(needs, (Clip, "dual"), 120) == "held"
    assert script.outcome(needs, (Clip, "low"), 120) == "not held"
