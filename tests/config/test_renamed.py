"""Test that errors about keys of earlier versions name the new key."""

from __future__ import annotations

import pytest

from realign.api import ModelInterface
from realign.config import ConfigError, build
from realign.config.renamed import RENAMED, renamed
from tests.config.components import HERE


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            "interfaces.actor.clip_high",
            "interfaces.actor.clip_high was renamed to interfaces.actor.objective.high",
        ),
        (
            "interfaces.student.reward_norm.std",
            "interfaces.student.reward_norm.std was renamed to interfaces.student.advantage.reward_norm.std",
        ),
        (
            "interfaces.actor.denominator",
            "interfaces.actor.denominator no longer exists: for denominator=all set "
            "interfaces.actor.correction.keep_in_divisor=true",
        ),
        ("interfaces.actor.reward", None),
        ("interfaces.actor.objective.high", None),
        ("clip_high", None),
    ],
)
def test_an_old_key_is_named_with_its_new_one(key, message):
    assert renamed(key) == message


def test_the_message_takes_the_place_of_unknown_key():
    with pytest.raises(ConfigError, match=r"^interfaces\.actor\.clip_low was renamed to interfaces\.actor\.objective"):
        build({"_target_": f"{HERE}.Actor", "clip_low": 0.1}, ModelInterface, "interfaces.actor")


def test_both_sides_of_the_table_have_the_same_stars():
    assert all(old.count("*") == new.count("*") for old, new in RENAMED.items())
