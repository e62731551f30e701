"""Compare presets with the systems and papers that they reproduce: tests/preset_sources.yaml has every constant."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from realign.api import MicroBatchSpec, Model, SequenceSample
from realign.config import build_experiment, compose
from realign.config.aliases import read_own_yaml
from realign.config.files import experiments_dir, list_experiments
from realign.testing import BigramEngine
from tests.config_parts import MUST_BE_GIVEN

TABLE: dict[str, dict[str, Any]] = read_own_yaml(Path(__file__).with_name("preset_sources.yaml"))
NOT_CONSTANTS = {"_target_", "path", "function", "of", "name", "defaults"}
"""Last parts of keys that name classes, files and roles."""


def keys_of(pattern: str) -> list[str]:
    """Return the config keys of a key of the table: `a+b` in a part is two keys."""
    return [".".join(parts) for parts in itertools.product(*(part.split("+") for part in pattern.split(".")))]


@cache
def constants(preset: str) -> dict[str, tuple[Any, str]]:
    """Return value and place of every constant of a preset, by config key."""
    entry = TABLE[preset]
    values = dict(constants(entry["like"])) if "like" in entry else {}
    for source in entry["sources"]:
        where = source.get("paper") or f"{source['repository']} {source['file']}"
        for pattern, (value, place) in source["constants"].items():
            values |= dict.fromkeys(keys_of(pattern), (value, f"{where}, {place}"))
    return values


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
    values = {key: value_at(config, key) for key in constants(preset)}
    return [
        f"{key}={values[key]!r}, but {value!r} in {where}"
        for key, (value, where) in constants(preset).items()
        if values[key] != value
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
    config = build_experiment(compose([f"experiment={preset}", *MUST_BE_GIVEN[preset]])).resolved
    settings = {
        key
        for key, value in leaves(yaml.safe_load(text)).items()
        if key.rpartition(".")[2] not in NOT_CONSTANTS and not str(value).startswith("${") and value != "???"
    }
    settings = {key for key in settings if not isinstance(value_at(config, key), dict)}  # not the word of a class
    assert not settings - constants(preset).keys() - ours(preset).keys()
    assert not constants(preset).keys() & ours(preset).keys()


EOS, TOKENIZER = 0, SimpleNamespace(eos_token_id=0)
RESPONSES = [[3, EOS], [3, 4, EOS], [EOS], [5, 3, 4, 6], [4, 4, 3, 5, 6, EOS]]
"""Responses of a token and EOS, two and EOS, EOS alone, a truncated one, and five and EOS."""


def sampled_responses() -> SequenceSample:
    """Return `RESPONSES` after a prompt of two tokens, with random log-probs and values."""
    ids = [[[7, 8, *response]] for response in RESPONSES]
    data = SequenceSample.from_sequences(list("abcde"), {"input_ids": ids})
    mask_T = torch.cat([torch.arange(2 + len(response)) > 1 for response in RESPONSES])
    random = torch.Generator().manual_seed(0)
    columns = {key: torch.randn(len(mask_T), generator=random) for key in ("logprobs", "ref_logprobs", "values")}
    data = data.with_tokens(loss_mask=mask_T, prompt_mask=~mask_T, **{k: x * mask_T for k, x in columns.items()})
    truncated_S = torch.tensor([response[-1] != EOS for response in RESPONSES])
    return data.with_sequences(truncated=truncated_S, bootstrap_values=torch.ones(len(RESPONSES)))


def deepspeed_chat_in_plain_python(
    response: list[int], logp: list[float], ref: list[float], value: list[float], score: float
) -> tuple[list[float], list[float], list[bool]] | None:
    """Compute advantages, returns and loss mask of a response in a row that is padded with EOS; None: it is dropped.

    The score, clipped at 5, is in the slot after the last token that is not padding, or in the last slot of the row.
    """
    width = max(map(len, RESPONSES)) if response[-1] == EOS else len(response)
    row = response + [EOS] * (width - len(response))
    trains = [token != EOS for token in row]
    if sum(trains) <= 1:
        return None
    slots = min(sum(trains) + 1, width)
    rewards = [-0.1 * (logp[t] - ref[t]) for t in range(slots)]
    rewards[-1] += min(max(score, -5.0), 5.0)
    advantages, following = [0.0] * slots, 0.0
    for t in reversed(range(slots)):
        ahead = value[t + 1] if t + 1 < slots else 0.0
        following = rewards[t] + ahead - value[t] + 0.95 * following
        advantages[t] = following
    return advantages, [a + v for a, v in zip(advantages, value, strict=False)], trains[:slots]


def test_deepspeed_chat_reads_the_score_before_the_end_token_which_it_does_not_train():
    preset = build_experiment(compose(["experiment=deepspeed_chat", *MUST_BE_GIVEN["deepspeed_chat"]]))
    engine, data = BigramEngine(), sampled_responses()
    scored = preset.interfaces["reward"].inference(Model("reward", engine, TOKENIZER), data, MicroBatchSpec())
    before_end = [8 if response == [EOS] else [i for i in response if i != EOS][-1] for response in RESPONSES]
    torch.testing.assert_close(scored["rewards"], engine.values_V[before_end])
    data = data.with_sequences(rewards=torch.tensor([1.0, -9.0, 2.0, 7.0, 0.5]))
    credit = preset.interfaces["actor"].credit(Model("actor", engine, TOKENIZER), data, MicroBatchSpec())
    keys = ("logprobs", "ref_logprobs", "values")
    dropped = []
    for s, response in enumerate(RESPONSES):
        columns = [data.sequences(key)[s][2:].tolist() for key in keys]
        expected = deepspeed_chat_in_plain_python(response, *columns, data["rewards"][s].item())
        mask_T = credit.sequences("loss_mask")[s][2:]
        if expected is None:
            dropped.append(response)
            assert not mask_T.any()
            continue
        advantages, returns, trains = expected
        assert mask_T.tolist() == trains
        assert credit.sequences("advantages")[s][2:].tolist() == pytest.approx(advantages, abs=1e-5)
        assert credit.sequences("returns")[s][2:].tolist() == pytest.approx(returns, abs=1e-5)
    assert dropped == [[3, EOS], [EOS]]


def test_the_table_names_repository_file_and_commit_or_paper():
    assert TABLE.keys() <= list_experiments().keys()
    for entry in TABLE.values():
        assert entry.keys() <= {"like", "sources", "ours"}
        for source in entry["sources"]:
            assert ("paper" in source) != ({"repository", "file"} <= source.keys())
            assert source.get("checked", True) is False or "paper" in source or "commit" in source
            assert all(len(constant) == 2 and str(constant[1]) for constant in source["constants"].values())
