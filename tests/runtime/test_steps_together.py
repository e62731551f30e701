from __future__ import annotations

import threading

import pytest
import torch

from realign.api import stat_values
from realign.errors import RunError, SettingsError
from realign.records.checkpoint.random_generators import seed_random
from realign.runtime.local import LocalRuntime
from realign.runtime.steps_together import StepsTogether, run_in_turns
from tests.checkpoint_runs import PoisonedCritic, experiment
from tests.tiny import ONE, STEP, Likelihood, random_sample, tiny_engine, train, weights

LOSS = Likelihood()
BATCHES = [random_sample([[7, 4], [5]], seed=seed) for seed in range(4)]


def steps(engine, finite):
    """Take a step on each batch; the loss is NaN where `finite` is False."""

    def poisoned(output, mb):
        return LOSS.loss(output, mb)[0] * torch.nan, {}

    return [
        stat_values(engine.train_batch(batch, ONE, LOSS.loss if ok else poisoned, LOSS.weight))
        for batch, ok in zip(BATCHES, finite, strict=False)
    ]


@pytest.mark.filterwarnings("ignore:.*is not finite")
def test_seed_c13_the_nth_step_is_taken_by_all_models_or_by_none():
    actor, critic = tiny_engine("llama", optimizer=STEP), tiny_engine("gpt2", optimizer=STEP)
    calls = [
        ("actor", actor, lambda: steps(actor, [True, False, True, True])),
        ("critic", critic, lambda: steps(critic, [True, True, False])),
    ]
    of_actor, of_critic = run_in_turns(calls)
    assert [x["optimizer_steps"] for x in of_actor] == [1, 0, 0, 1]
    assert [x["optimizer_steps"] for x in of_critic] == [1, 0, 0]
    assert [x["nonfinite_steps"] for x in of_actor] == [0, 1, 0, 0]
    assert [x["vetoed_steps"] for x in of_actor] == [0, 0, 1, 0]
    assert [x["vetoed_steps"] for x in of_critic] == [0, 1, 0]
    for engine, family, taken in ((actor, "llama", (0, 3)), (critic, "gpt2", (0,))):
        alone = tiny_engine(family, optimizer=STEP)
        for number in taken:
            train(alone, BATCHES[number])
        assert all(torch.equal(x, weights(engine)[name]) for name, x in weights(alone).items())
        assert stat_values(train(engine, BATCHES[0]))["optimizer_steps"] == 1  # nobody is asked afterwards


def test_a_batch_without_weight_counts_as_a_step_that_is_finite():
    actor, critic = tiny_engine(optimizer=STEP), tiny_engine(optimizer=STEP)
    empty = BATCHES[0].with_tokens(loss_mask=torch.zeros_like(BATCHES[0]["loss_mask"]))

    def of_actor():
        return [stat_values(train(actor, batch)) for batch in (empty, BATCHES[1])]

    made = run_in_turns([("actor", actor, of_actor), ("critic", critic, lambda: steps(critic, [True, True]))])
    assert [x["optimizer_steps"] for x in made[0]] == [0, 1]
    assert [x["optimizer_steps"] for x in made[1]] == [1, 1]


def test_an_error_in_one_call_ends_the_others_with_its_message():
    actor, critic = tiny_engine(optimizer=STEP), tiny_engine(optimizer=STEP)

    def fails():
        train(critic, BATCHES[0])
        raise RunError("the critic fails")

    with pytest.raises(RunError, match="the critic fails"):
        run_in_turns([("actor", actor, lambda: steps(actor, [True] * 4)), ("critic", critic, fails)])


def test_a_call_does_not_wait_for_one_that_an_error_of_the_graph_prevents():
    actor, errors = tiny_engine(optimizer=STEP), []
    together = StepsTogether(["actor", "critic"], in_turns=False)

    def run():
        try:
            with together.join("actor", actor):
                train(actor, BATCHES[0])
        except RunError as error:
            errors.append(error)

    thread = threading.Thread(target=run)

    def prevents():
        thread.start()
        raise RunError("the reward fails")

    with pytest.raises(RunError, match="the reward fails"), together:
        prevents()
    thread.join()
    assert [str(error) for error in errors] == ["the reward fails"]


@pytest.mark.filterwarnings("ignore:.*is not finite")
def test_actor_and_critic_of_a_run_skip_the_step_of_a_critic_that_is_not_finite(files, tmp_path):
    taken = {}
    for together in (True, False):
        run = experiment(files, tmp_path / str(together), "ppo", evaluation=None, skip_together=together, steps=3)
        run.interfaces["critic"] = PoisonedCritic(epochs=2, n_minibatches=2)
        seed_random(run.seed)  # the reward draws from the global generators
        runtime = LocalRuntime(run)
        values = [runtime.step(step)[0] for step in (1, 2, 3)]
        runtime.close()
        taken[together] = [(x.get("optimizer_steps", 0), x["critic/optimizer_steps"]) for x in values]
    assert taken == {True: [(0, 4), (0, 0), (4, 4)], False: [(0, 4), (4, 0), (4, 4)]}


def test_a_run_that_trains_one_model_cannot_skip_steps_together(files, tmp_path):
    with pytest.raises(SettingsError, match=r"skip_together=true.* without two models whose training calls"):
        experiment(files, tmp_path, "grpo", skip_together=True)
