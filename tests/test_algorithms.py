"""`algorithm=NAME`: every shipped one composes over the experiments, in any order, and trains a real model."""

from __future__ import annotations

from pathlib import Path

import pytest
from realign.interfaces.formulas import normalization_formula

from realign import cli
from realign.config import ConfigError, build_experiment, compose
from realign.config.folders import experiments_dir, list_algorithms
from realign.demo.arithmetic import prepare
from realign.runtime.local import LocalRuntime

BUFFER = "interfaces.actor.truncation.overlong_buffer"
NEEDS = {"dapo": [f"{BUFFER}=2"]}
ALGORITHMS = sorted(list_algorithms())


@pytest.fixture(scope="module")
def overrides(tmp_path_factory) -> list[str]:
    """A small run of experiment=grpo_arithmetic, with a reward under which an untrained model's answers differ."""
    folder = tmp_path_factory.mktemp("task")
    task = prepare(folder / "task", seed=0, demonstrations=8, held_out=16)
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


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_trains_a_real_model(name, overrides):
    two = [] if "n_minibatches: 1" in (experiments_dir() / "algorithm" / f"{name}.yaml").read_text() else [2]
    more = [f"interfaces.actor.n_minibatches={n}" for n in two]
    made = build_experiment(compose([*overrides, f"algorithm={name}", *NEEDS.get(name, []), *more]))
    runtime = LocalRuntime(made)
    values, batch = runtime.step(1)
    runtime.close()
    assert values["optimizer_steps"] == len(two) + 1
    assert values["first_logprob_diff_max"] == pytest.approx(0, abs=1e-5)
    assert values["grad_norm"] > 0
    assert ("ref_logprobs" in batch) == (made.interfaces["actor"].kl.place != "none")
    assert ("dynamic_sampling/batches" in values) == (name == "dapo")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_trap_g7_an_algorithm_means_the_same_wherever_it_stands_and_yields_to_overrides(name):
    first, last = f"algorithm={name}", "experiment=grpo_arithmetic"
    own = [*NEEDS.get(name, []), "interfaces.actor.aggregation=seq_mean_token_sum", "graph.kl=true"]
    if name == "dr_grpo":
        own.append("interfaces.actor.aggregation_constant=null")
    assert compose([first, *own, last]) == compose([last, first, *own]) == compose([*own, last, first])
    made = build_experiment(compose([last, first, *own]))
    assert made.interfaces["actor"].aggregation == "seq_mean_token_sum"
    assert list_algorithms()[name], "the first comment line of an algorithm says what it is"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_stands_over_templates_with_a_reward_function_and_with_a_reward_model(name):
    given = ["models.actor.path=m", "data.path=p.jsonl", *NEEDS.get(name, [])]
    rule = [*given, "interfaces.reward.function=realign.rewards.arithmetic:exact_answer"]
    learned = [*given, "models.reward.path=r", "interfaces.actor.generation.n=4"]
    for experiment, overrides in (("grpo", rule), ("ppo", learned)):
        made = build_experiment(compose([f"experiment={experiment}", f"algorithm={name}", *overrides]))
        assert all(rpc.model != "critic" for rpc in made.graph.rpcs)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_normalises_the_same_over_experiments_that_normalise_otherwise(name):
    """openrlhf_ppo whitens tokens, llama2_chat scores: neither the level nor a flag may stay behind."""
    given = ["models.actor.path=m", "models.reward.path=r", "data.path=p.jsonl", *NEEDS.get(name, [])]
    config = compose(["experiment=ppo", f"algorithm={name}", "interfaces.actor.generation.n=4", *given])
    grouped = config.interfaces["actor"]["_target_"].endswith("GRPOActorInterface")
    more = {"openrlhf_ppo": ["interfaces.actor.lam=0.95"]} if grouped else {"openrlhf_ppo": [], "llama2_chat": []}
    actor = build_experiment(config).interfaces["actor"]
    for experiment, own in more.items():
        overrides = [f"experiment={experiment}", f"algorithm={name}", "interfaces.actor.generation.n=4", *given, *own]
        other = build_experiment(compose(overrides)).interfaces["actor"]
        for norm in ("adv_norm", "reward_norm"):
            assert normalization_formula(getattr(other, norm)) == normalization_formula(getattr(actor, norm))
        assert not other.credit_per_minibatch


def test_dapo_asks_for_the_length_of_its_buffer():
    with pytest.raises(ConfigError, match=rf"missing: {BUFFER}; give a value"):
        compose(["experiment=grpo_arithmetic", "algorithm=dapo"])


def test_a_misspelt_algorithm_is_told_with_the_nearest():
    with pytest.raises(ConfigError, match=r"^unknown algorithm 'dappo'; did you mean 'dapo'\? \(valid: cispo, dapo"):
        compose(["experiment=grpo_arithmetic", "algorithm=dappo"])
    with pytest.raises(ConfigError, match=r"^unknown key 'algoritm'; did you mean 'algorithm'\?"):
        compose(["experiment=grpo_arithmetic", "algoritm=dapo"])


def test_the_help_lists_algorithms_ours_and_ones_own(tmp_path: Path, capsys):
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "mine.yaml").write_text(
        "# @package _global_\n# My own.\ndefaults: [rloo, _self_]\ninterfaces: {actor: {epochs: 2}}\n"
    )
    assert cli.main(["--config-dir", str(tmp_path), "--help"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {line[0] for line in lines if line} >= {"mine", *ALGORITHMS}
    config = compose(["experiment=grpo_arithmetic", "algorithm=mine"], tmp_path)
    assert (config.interfaces["actor"]["epochs"], config.interfaces["actor"]["objective"]) == (2, "reinforce")
