"""Test `algorithm=NAME` for all shipped presets: they compose with experiments in any order, and train a real model."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pytest
import torch

from realign.api import MicroBatchSpec
from realign.cli import commands as cli
from realign.config import ConfigError, build_experiment, compose
from realign.config.aliases import read_own_yaml
from realign.config.construct import import_target
from realign.config.experiment import as_node, resolve_config
from realign.config.files import experiments_dir, list_algorithms, list_experiments
from realign.config.places import spell_out
from realign.config.words import snake_case
from realign.interfaces.policy import PolicyInterface
from realign.runtime import Experiment
from realign.runtime.checks.parts import check_parts
from realign.runtime.local import LocalRuntime
from realign.testing import BigramEngine, random_batch, train_once
from tests.config_parts import MUST_BE_GIVEN, PREFERENCE
from tests.small_task import small_task

BUFFER = "interfaces.actor.truncation.overlong_buffer"
NEEDS = {"dapo": [f"{BUFFER}=2"], "gdpo": ["interfaces.actor.advantage.weights={right: 2}"]}
ALGORITHMS = sorted({*list_algorithms()} - {*PREFERENCE})
INHERENT = {
    # Every preset replaces the advantage, and the new one needs rewards, which this experiment has not.
    **{
        ("on_policy_distillation", preset): "needs its rewards: set interfaces.reward._target_ to a class that writes"
        for preset in ALGORITHMS
    },
    # ReMax subtracts the score of the greedy response, which has no penalty for cut samples, unlike the sampled ones.
    ("areal_ppo", "remax"): "change the scores of samples but not",
    # An environment samples and scores in one call, so it cannot score a separate greedy response.
    ("grpo_agent", "remax"): "rewards whole conversations, so greedy responses have no reward",
    ("grpo_environment", "remax"): "rewards whole conversations, so greedy responses have no reward",
}
"""Reason in the error message, by incompatible pair of experiment and preset."""


def template(group: str, name: str) -> dict[str, Any]:
    """Return a shipped file as plain values, merged over the files that its defaults name."""
    own = read_own_yaml(experiments_dir() / group / f"{name}.yaml")
    spell_out(own)
    bases = [base for base in own.pop("defaults", []) if isinstance(base, str) and base != "_self_"]
    return reduce(merged, [*(template(group, base) for base in bases), own])


def merged(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """Return nested mappings with the values of `upper` over those of `lower`."""
    both = {k: merged(lower[k], v) for k, v in upper.items() if isinstance(v, dict) and isinstance(lower.get(k), dict)}
    return {**lower, **upper, **both}


@cache
def rl_experiments() -> tuple[str, ...]:
    """Return the experiments for which presets exist: those whose actor has the pipeline of a policy."""
    actors = {name: template("experiment", name)["interfaces"].get("actor") for name in sorted(list_experiments())}
    classes = {name: import_target(node["_target_"], name) for name, node in actors.items() if node is not None}
    return tuple(name for name, actor in classes.items() if issubclass(actor, PolicyInterface))


# The reward of an experiment has no name, and some shape it or have none.
UNNAMED = r"right needs key 'rewards/right'|advantage=gdpo: normalizes each named reward|needs its rewards"
INHERENT |= {(experiment, "gdpo"): UNNAMED for experiment in rl_experiments()}
INHERENT[("qwen_rlhf", "maxrl")] = r"reward\.center=true: makes rewards negative"
PAIRS = [(experiment, preset) for experiment in rl_experiments() for preset in ALGORITHMS]


def overrides_of(experiment: str, preset: str | None = None) -> list[str]:
    """Return the command line of a pair: required values of the experiment and the preset, and groups of 4."""
    base = [f"experiment={experiment}", *MUST_BE_GIVEN.get(experiment, []), "interfaces.actor.generation.n=4"]
    return base if preset is None else [*base, f"algorithm={preset}", *NEEDS.get(preset, [])]


def resolved(overrides: list[str]) -> tuple[Experiment, dict[str, Any]]:
    """Return the experiment of a command line, and all its values."""
    config = compose(overrides)
    made = build_experiment(config)
    check_parts(made)
    values = resolve_config(config, made)
    for group, given in (("models", config.models), ("interfaces", config.interfaces)):
        values[group] = {role: values[group][role] for role in given}  # excludes roles that follow from settings
    return made, values


@cache
def alone(experiment: str) -> dict[str, Any]:
    """Return all values of an experiment without a preset."""
    return resolved(overrides_of(experiment))[1]


def leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a tree without nested mappings, with their values."""
    if isinstance(node, dict) and node:
        for name, value in node.items():
            yield from leaves(value, f"{key}.{name}".removeprefix("."))
    else:
        yield key, node


def links(experiment: str) -> dict[str, str]:
    """Return the keys of an experiment that refer to another key, which a preset may set."""
    written = leaves(template("experiment", experiment))
    return {key: value[2:-1] for key, value in written if isinstance(value, str) and value.startswith("${")}


def value_at(tree: dict[str, Any], key: str) -> Any:
    return reduce(operator.getitem, key.split("."), tree)


def is_within(key: str, places: list[str]) -> bool:
    return any(key == place or key.startswith(f"{place}.") for place in places)


QUICK = ("grpo", "lm_human_preferences")
"""Experiments that are composed with every preset."""
SPARSE = {pair: (i + i // len(ALGORITHMS)) % 5 == 0 for i, pair in enumerate(PAIRS)}
"""Whether a pair of another experiment is composed: one in five, with every experiment and every preset."""


@pytest.mark.parametrize(
    ("experiment", "preset"),
    [
        pytest.param(*pair, marks=() if pair[0] in QUICK else pytest.mark.slow)
        for pair in PAIRS
        if pair not in INHERENT and (pair[0] in QUICK or SPARSE[pair])
    ],
)
def test_a_preset_and_an_experiment_compose_and_each_keeps_its_values(experiment, preset):
    made, values = resolved(overrides_of(experiment, preset))
    reset = [f"interfaces.actor.{name}" for name in made.interfaces["actor"].ALGORITHM_SETTINGS]
    given = dict(leaves(template("algorithm", preset)))
    for key, value in given.items():
        if isinstance(value, str) and value.startswith("${"):
            value = value_at(values, value[2:-1])
        built = value_at(values, key)
        path = built["_target_"] if isinstance(built, dict) else built if key.endswith("_target_") else ""
        built = snake_case(path.rpartition(".")[2]) if path else built
        assert built == (2 if value == "???" else value), key
    default = {"interfaces": {"actor": as_node(type(made.interfaces["actor"])())}}
    for key in [key for key in reset if not any(is_within(place, [key]) for place in given)]:
        assert value_at(values, key) == value_at(default, key), key
    linked = {key: source for key, source in links(experiment).items() if is_within(source, [*reset, *given])}
    assert [value_at(values, key) for key in linked] == [value_at(values, source) for source in linked.values()]
    for key, value in leaves(alone(experiment)):
        if not is_within(key, [*reset, *given, *linked]) and not any(place.startswith(f"{key}.") for place in given):
            assert value_at(values, key) == value, key
    actor = made.interfaces["actor"]
    keys, batch = actor.keys("train_step"), random_batch(n_prompts=8)
    trained = train_once(actor, batch.select({*keys.needs, *keys.uses} & batch.keys), MicroBatchSpec())
    assert trained.metrics["optimizer_steps"] >= 1
    assert all(p.isfinite().all() for p in trained.parameters)
    clipped = trained.metrics.get("clip_fraction") == 1  # two responses of deepspeed_chat, with gspo's small range
    assert clipped == torch.equal(trained.parameters[0], BigramEngine(seed=0).parameters[0])


@pytest.mark.parametrize(
    ("experiment", "preset"),
    [pair for pair in INHERENT if pair[1] != "gdpo" or pair[0] == "ppo"],
)
def test_a_preset_and_an_experiment_that_exclude_each_other_are_an_error_with_the_reason(experiment, preset):
    with pytest.raises(ConfigError, match=INHERENT[experiment, preset]):
        resolved(overrides_of(experiment, preset))


@pytest.fixture(scope="module")
def overrides(tmp_path_factory) -> list[str]:
    """Return overrides for a small run of experiment=grpo_arithmetic, with different rewards for untrained answers."""
    folder = tmp_path_factory.mktemp("task")
    task = small_task(folder / "task")
    judge = folder / "judge.py"
    judge.write_text("def score(prompt, response, row):\n    return len(response) / 5 + (response[:1] in '13579')\n")
    return [
        "experiment=grpo_arithmetic",
        f"models.actor.path={task.model}",
        f"data.path={task.prompts}",
        f"interfaces.reward.function={judge}:score",
        "interfaces.reward.workers=0",
        "interfaces.actor.generation.n=4",
        f"output_dir={folder / 'run'}",
        "evaluation=null",
        "batch_prompts=4",
    ]


FEW = ("dapo", "gspo", "reinforce_plus_plus_baseline")
"""Presets that change different components: the objective and its limits, sequences, and the advantage."""
EACH = [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in ALGORITHMS]


@pytest.mark.parametrize("name", EACH)
def test_an_algorithm_trains_a_real_model(name, overrides):
    two = [] if "n_minibatches: 1" in (experiments_dir() / "algorithm" / f"{name}.yaml").read_text() else [2]
    more = [f"interfaces.actor.n_minibatches={n}" for n in two]
    if name == "gdpo":
        reward = next(word.partition("=")[2] for word in overrides if word.startswith("interfaces.reward.function="))
        more += ["interfaces.reward.function=null", f"interfaces.reward.functions={{right: '{reward}'}}"]
    made = build_experiment(compose([*overrides, f"algorithm={name}", *NEEDS.get(name, []), *more]))
    runtime = LocalRuntime(made)
    values, batch = runtime.step(1)
    runtime.close()
    assert values["optimizer_steps"] == len(two) + 1
    assert values["first_logprob_diff_max"] == pytest.approx(0, abs=1e-5)
    assert values["grad_norm"] > 0
    assert ("ref_logprobs" in batch) == (made.interfaces["actor"].kl.place != "none")
    assert ("dynamic_sampling/batches" in values) == (name == "dapo")


@pytest.mark.parametrize("name", EACH)
def test_trap_g7_an_algorithm_means_the_same_wherever_it_stands_and_yields_to_overrides(name):
    first, last = f"algorithm={name}", "experiment=grpo_arithmetic"
    own = [*NEEDS.get(name, []), "interfaces.actor.adv_norm.eps=0.5", "interfaces.actor.entropy.coef=0.1"]
    assert compose([first, *own, last]) == compose([last, first, *own]) == compose([*own, last, first])
    made = build_experiment(compose([last, first, *own]))
    assert made.interfaces["actor"].adv_norm.eps == 0.5
    assert made.interfaces["actor"].entropy.coef == 0.1
    assert list_algorithms()[name], "the first comment line of an algorithm says what it is"


@pytest.mark.parametrize("name", PREFERENCE)
def test_a_preset_for_pairs_is_an_error_over_an_experiment_without_pairs(name):
    with pytest.raises(ConfigError, match=r"unknown key 'interfaces\.actor\.kind'"):
        resolved(overrides_of("grpo", name))


def test_a_misspelt_algorithm_is_told_with_the_nearest():
    with pytest.raises(ConfigError, match=r"^unknown algorithm 'dapoo'; did you mean 'dapo'\? \(valid: cispo, "):
        compose(["experiment=grpo_arithmetic", "algorithm=dapoo"])
    with pytest.raises(ConfigError, match=r"^unknown key 'algoritm'; did you mean 'algorithm'\?"):
        compose(["experiment=grpo_arithmetic", "algoritm=dapo"])


def test_the_help_lists_algorithms_ours_and_ones_own(tmp_path: Path, capsys):
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "mine.yaml").write_text(
        "# @package _global_\n# My own.\ndefaults: [rloo, _self_]\ninterfaces: {actor: {epochs: 2}}\n"
    )
    assert cli.main(["--config-dir", str(tmp_path), "--help"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {line[0] for line in lines if line} >= {"mine", *ALGORITHMS, *PREFERENCE}
    actor = compose(["experiment=grpo_arithmetic", "algorithm=mine"], tmp_path).interfaces["actor"]
    assert (actor["epochs"], actor["objective"]) == (2, "reinforce")
