"""Compare presets with the systems and papers that they reproduce: tests/preset_sources.yaml has every constant."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from realign.config import build_experiment, compose
from realign.config.folders import experiments_dir, list_experiments
from tests.test_config import MUST_BE_GIVEN

TABLE: dict[str, dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "preset_sources.yaml").read_text(encoding="utf-8")
)
NOT_CONSTANTS = {"_target_", "path", "function", "of", "name", "defaults"}
"""Last parts of keys that name classes, files and roles."""
INJECTED = [
    ("deepspeed_chat", "interfaces.actor.kl.coef", 0.7),
    ("deepspeed_chat", "interfaces.actor.reward.clip", 50),
    ("instructgpt", "interfaces.actor.ptx_coef", 2.78),
    ("llama2_chat", "models.actor.optimizer.weight_decay", 0.9),
    ("openrlhf_ppo", "interfaces.critic.objective.clip", 0.1),
    ("trlx_ppo", "interfaces.actor.value.clip", 0.9),
    ("trlx_ppo", "interfaces.actor.value.coef", 3),
    ("trlx_ppo", "steps", 625),
    ("areal_decoupled", "interfaces.actor.reward.gain", 1),
    ("areal_decoupled", "interfaces.actor.reward.clip", 2),
    ("areal_decoupled", "rollout.max_staleness", 1),
    ("lm_human_preferences", "interfaces.actor.kl.target", 60),
    ("lm_human_preferences_reward", "models.reward.optimizer.schedule.warmup", 10),
    ("secrets_of_rlhf", "models.critic.optimizer.lr", 1.5e-6),
    ("ilql", "interfaces.actor.tau", 0.8),
    ("ilql", "interfaces.actor.awac_beta", 1.0),
    ("online_dpo", "interfaces.actor.beta", 0.2),
    ("kto", "interfaces.actor.beta", 0.2),
    ("dpo", "models.actor.optimizer.lr", 1.0e-6),
    ("raft", "interfaces.actor.generation.temperature", 1.0),
    ("gkd", "interfaces.actor.on_policy_fraction", 0.5),
]
"""Wrong constants: those that an audit injected without a failing test, and a few more."""


def keys_of(pattern: str) -> list[str]:
    """Return the config keys of a key of the table: `a+b` in a part is two keys."""
    return [".".join(parts) for parts in itertools.product(*(part.split("+") for part in pattern.split(".")))]


@cache
def constants(preset: str) -> dict[str, tuple[Any, str]]:
    """Return value and place of every constant of a preset, by config key."""
    entry = TABLE[preset]
    found = dict(constants(entry["like"])) if "like" in entry else {}
    for source in entry["sources"]:
        where = source.get("paper") or f"{source['repository']} {source['file']}"
        for pattern, (value, place) in source["constants"].items():
            found |= dict.fromkeys(keys_of(pattern), (value, f"{where}, {place}"))
    return found


def ours(preset: str) -> dict[str, str]:
    """Return the reasons for the values that the sources of a preset do not determine."""
    entry = TABLE[preset]
    return (ours(entry["like"]) if "like" in entry else {}) | entry.get("ours", {})


def value_at(config: Any, key: str) -> Any:
    """Return the value at a dotted key of nested mappings."""
    for part in key.split("."):
        assert part in config, f"no {key} in the config"
        config = config[part]
    return config


def differences(preset: str, *overrides: str) -> list[str]:
    """Return the constants of a composed preset that differ from the table, each with its source."""
    config = build_experiment(compose([f"experiment={preset}", *MUST_BE_GIVEN[preset], *overrides])).resolved
    found = {key: value_at(config, key) for key in constants(preset)}
    return [
        f"{key}={found[key]!r}, but {value!r} in {where}"
        for key, (value, where) in constants(preset).items()
        if found[key] != value
    ]


def leaves(node: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted key; a list is a leaf."""
    if not isinstance(node, dict):
        return {prefix: node}
    return {
        key: leaf
        for name, child in node.items()
        for key, leaf in leaves(child, f"{prefix}.{name}" if prefix else str(name)).items()
    }


@pytest.mark.parametrize("preset", TABLE)
def test_every_constant_of_a_composed_preset_is_that_of_its_source(preset):
    assert not differences(preset)


@pytest.mark.parametrize("preset", TABLE)
def test_every_setting_in_the_file_of_a_preset_has_a_source_or_a_reason(preset):
    text = (experiments_dir() / "experiment" / f"{preset}.yaml").read_text(encoding="utf-8")
    settings = {
        key
        for key, value in leaves(yaml.safe_load(text)).items()
        if key.rpartition(".")[2] not in NOT_CONSTANTS and not str(value).startswith("${") and value != "???"
    }
    assert not settings - constants(preset).keys() - ours(preset).keys()
    assert not constants(preset).keys() & ours(preset).keys()


@pytest.mark.parametrize(("preset", "key", "wrong"), INJECTED, ids=[f"{p}: {k}" for p, k, _ in INJECTED])
def test_a_wrong_constant_is_found(preset, key, wrong):
    found = differences(preset, f"{key}={wrong}")
    assert any(text.startswith(f"{key}=") for text in found)


def test_the_table_names_repository_file_and_commit_or_paper():
    assert TABLE.keys() <= list_experiments().keys()
    for entry in TABLE.values():
        assert entry.keys() <= {"like", "sources", "ours"}
        for source in entry["sources"]:
            assert ("paper" in source) != ({"repository", "file"} <= source.keys())
            assert source.get("checked", True) is False or "paper" in source or "commit" in source
            assert all(len(found) == 2 and str(found[1]) for found in source["constants"].values())
