from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
import torch

from realign.api import RPC, DataflowGraph, GenerationConfig, ModelInterface, SequenceSample
from realign.errors import ConfigError, RunError
from realign.interfaces.components import KLPenalty, KLPlace
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.ppo import PPOActorInterface, dataflow
from realign.interfaces.reference import ReferenceInterface
from realign.runtime import DynamicSampling
from realign.runtime.checks.parts import check_parts
from realign.runtime.local import LocalRuntime
from tests.toys import GENERATION, BigramModel, Prompts, experiment

nan = math.nan


def judged(*groups: list[float], first: int = 0) -> SequenceSample:
    """Return a batch with these rewards, for prompts numbered from `first`."""
    ids = range(first, first + len(groups))
    tokens = [[[1, 2] for _ in group] for group in groups]
    rewards = [[[reward] for reward in group] for group in groups]
    return SequenceSample.from_sequences(ids, {"input_ids": tokens, "rewards": rewards})


@pytest.mark.parametrize(
    ("settings", "passing"),
    [
        ({}, [1, 2, 4, 6]),
        ({"min_reward_std": 0.45}, [1, 6]),  # standard deviations: 0, 0.5, 0.433, 0, 0.433 of three, ...
        ({"min_reward_std": None, "min_mean_reward": 0.0, "max_mean_reward": 1.0}, [1, 2, 4, 6, 8]),
        ({"min_reward_std": None, "min_mean_reward": 0.25}, [1, 3, 4, 6]),
        ({"min_reward_std": None, "max_mean_reward": 0.5}, [0, 2, 8]),
        ({"min_group_size": 3}, [1, 2, 4]),
        ({"min_reward_std": None, "max_mean_reward": 2.0, "min_group_size": 1}, [0, 1, 2, 3, 4, 5, 6, 8]),
    ],
)
def test_groups_pass_by_spread_mean_and_number_of_rewards(settings, passing):
    batch = judged(
        [0, 0, 0, 0],
        [0, 1, 0, 1],
        [0, 0, 0, 1],
        [1, 1, 1, 1],
        [1, 0, 1, 1],
        [nan, nan, 1, nan],
        [nan, 0, 1, nan],
        [nan, nan, nan, nan],
        [0.1, 0.1, 0.1, 0.1],  # equal, and not exactly representable in binary
    )
    assert DynamicSampling(**settings).choose(batch) == passing


def test_trap_e2_rewards_equal_up_to_rounding_are_flat():
    assert DynamicSampling().choose(judged([0.1 + 0.2, 0.3, 0.3], [0.3, 0.3, 0.301])) == [1]


def test_a_response_without_a_token_that_trains_does_not_count():
    batch = judged([0, 1], [0, 1])
    batch = batch.with_tokens(loss_mask=torch.tensor([False, True] * 3 + [False, False]))
    assert DynamicSampling().choose(batch) == [0]


def test_dense_rewards_count_by_their_sum():
    """All rewards per response are 0. By token rewards, one group has different sums, and the other has equal ones."""
    data = SequenceSample.from_sequences(["a", "b"], {"input_ids": [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]})
    data = data.with_tokens(dense_rewards=torch.tensor([1.0, 0.0, 0.0, 0.5, 1.0, 1.0, 0.0, 2.0]))
    assert DynamicSampling().choose(data.with_sequences(rewards=torch.zeros(4))) == [0]


def test_groups_may_be_ragged():
    assert DynamicSampling().choose(judged([1], [0, 1, 1], [0, 0])) == [1]


def fill(sampling: DynamicSampling, wanted: int, *batches: SequenceSample):
    drawn = []

    def draw(number: int) -> SequenceSample | None:
        drawn.append(number)
        return batches[number] if number < len(batches) else None

    batch, metrics = sampling.fill(wanted, draw)
    return batch, {name.removeprefix("dynamic_sampling/"): value for name, value in metrics.items()}, drawn


def test_batches_are_drawn_until_enough_prompts_have_passed():
    first, second = judged([0, 1], [0, 0], [1, 1]), judged([1, 0], [1, 1], [2, 1], first=3)
    batch, metrics, drawn = fill(DynamicSampling(), 2, first, second)
    assert batch.ids == (0, 3)
    assert batch["rewards"].tolist() == [0, 1, 1, 0]
    assert drawn == [0, 1]
    assert metrics == {
        "batches": 2,
        "sampled_prompts": 6,
        "accepted_fraction": 0.5,
        "surplus_prompts": 1,
        "missing_prompts": 0,
        "sampled_reward": pytest.approx(9 / 12),
    }


def test_a_full_batch_needs_no_second():
    _, metrics, drawn = fill(DynamicSampling(), 1, judged([0, 1]), judged([0, 1], first=1))
    assert drawn == [0]
    assert metrics["sampled_prompts"] == 1


def test_the_limit_of_batches_ends_the_search_with_what_there_is():
    batches = [judged([0, 0], first=0), judged([nan, nan], first=1), judged([1, 0], first=2), judged([1, 0], first=3)]
    batch, metrics, drawn = fill(DynamicSampling(max_batches=3), 4, *batches)
    assert (batch.ids, drawn) == ((2,), [0, 1, 2])
    assert (metrics["missing_prompts"], metrics["batches"], metrics["sampled_reward"]) == (3, 3, 0.25)


def test_the_end_of_the_dataset_ends_the_search_with_what_there_is():
    batch, metrics, _ = fill(DynamicSampling(), 4, judged([1, 0]), judged([1, 1], first=1))
    assert (batch.ids, metrics["missing_prompts"], metrics["batches"]) == ((0,), 3, 2)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [([0.5, 0.5], "The mean reward is 0.5"), ([nan, nan], "No response has a reward")],
)
def test_a_step_without_any_prompt_that_passes_says_what_it_saw(rewards, message):
    with pytest.raises(
        RunError, match=rf"none of 2 prompts in 2 batches .*max_batches=2.*std of rewards > 0\)\. {message}"
    ):
        fill(DynamicSampling(max_batches=2), 2, judged(rewards), judged(rewards, first=1))
    with pytest.raises(RunError, match=r"none of 1 prompts in 1 batches \(up to the end of the dataset\)"):
        fill(DynamicSampling(), 2, judged(rewards))


@dataclass
class FirstWords(ModelInterface):
    """Reward 1 if token 3 was sampled, else 0. It is constant for groups whose prompt ends in 2 or 3."""

    needs_engine = False
    seen: list[tuple] = field(default_factory=list)

    def inference(self, model, data, mb_spec):
        self.seen.append((data.ids, data["input_ids"].tolist()))
        rewards = []
        for ids, given in zip(data.sequences("input_ids"), data.sequences("prompt_mask"), strict=True):
            prompt = int(ids[given][-1])
            rewards.append(1.0 if prompt in (2, 3) else float((ids[~given] == 3).any()))
        return data.select(["input_ids"]).with_sequences(rewards=torch.tensor(rewards)).select(["rewards"])


def dynamic(tmp_path, **changes):
    settings = {
        "data": Prompts(40),
        "dynamic_sampling": DynamicSampling(),
        "interfaces": {"actor": GRPOActorInterface(generation=GENERATION), "reward": FirstWords()},
        "evaluation": None,
    }
    return experiment(tmp_path, **(settings | changes))


def test_a_step_trains_on_full_batches_of_groups_with_spread(tmp_path):
    runtime = LocalRuntime(dynamic(tmp_path))
    values, batch = runtime.step(1)
    assert len(batch) == 8
    assert all(len(set(group.tolist())) == 2 for group in batch["rewards"].split(8))
    assert values["zero_std_fraction"] == 0
    assert values["dynamic_sampling/batches"] == runtime.prompts.drawn >= 2
    assert values["dynamic_sampling/sampled_prompts"] == 8 * runtime.prompts.drawn
    assert values["dynamic_sampling/missing_prompts"] == 0
    assert values["rollout_tokens"] == 6 * 8 * values["dynamic_sampling/sampled_prompts"]
    assert values["rollout_tokens_per_s"] * values["time/actor_gen_s"] == pytest.approx(values["rollout_tokens"])
    assert values["reward"] == pytest.approx(float(batch["rewards"].mean()))


def test_trap_no_prompt_is_used_twice_and_nothing_is_kept_for_a_later_step(tmp_path):
    """Each trained response was sampled in the same step, by the policy of that step."""
    judge = FirstWords()
    parts = {"actor": GRPOActorInterface(generation=GENERATION), "reward": judge}
    runtime = LocalRuntime(dynamic(tmp_path, interfaces=parts))
    for step in (1, 2, 3):
        judge.seen.clear()
        values, batch = runtime.step(step)
        rows = [name.partition("@")[0] for ids, _ in judge.seen for name in ids]
        assert len(set(rows)) == len(rows)
        assert set(batch.ids) <= {name for ids, _ in judge.seen for name in ids}
        assert set(batch["versions"].tolist()) == {-1, step - 1}
        assert values["dynamic_sampling/batches"] == len(judge.seen)
        assert values["logprob_diff_max"] < 1e-6  # the behavior policy is the current policy


def test_batches_of_one_step_have_random_numbers_of_their_own(tmp_path):
    """The bigram engine samples the same tokens for equal seeds and positions. Both batches contain the same prompt."""

    @dataclass
    class Alike(Prompts):
        def sample(self, rows):
            data = super().sample(rows)
            return data.with_data({"prompt_ids": torch.full_like(data["prompt_ids"], 4)}, like="prompt_ids")

    judge = FirstWords()
    parts = {"actor": GRPOActorInterface(generation=GENERATION), "reward": judge}
    sampling = DynamicSampling(min_reward_std=None, min_mean_reward=2.0, max_batches=2)
    runtime = LocalRuntime(dynamic(tmp_path, interfaces=parts, data=Alike(40), dynamic_sampling=sampling))
    with pytest.raises(RunError, match="passed the filter"):
        runtime.step(1)
    (_, first), (_, second) = judge.seen
    assert first != second


def test_a_run_goes_on_where_the_number_of_drawn_batches_says(tmp_path):
    def ids(runtime: LocalRuntime, steps) -> list[tuple]:
        return [runtime.step(step)[1].ids for step in steps]

    through = LocalRuntime(dynamic(tmp_path, models={"actor": BigramModel(lr=0.0)}))
    resumed = LocalRuntime(dynamic(tmp_path, models={"actor": BigramModel(lr=0.0)}))
    first = ids(through, [1])
    resumed.prompts.drawn = through.prompts.drawn
    resumed.models["actor"].version = through.models["actor"].version
    assert ids(through, [2]) == ids(resumed, [2]) != first


def test_calls_that_do_not_lead_to_rewards_see_the_groups_that_train_only(tmp_path):
    class CountingReference(ReferenceInterface):
        def inference(self, model, data, mb_spec):
            seen.append(data.ids)
            return super().inference(model, data, mb_spec)

    seen: list[tuple] = []
    actor = GRPOActorInterface(generation=GENERATION, kl=KLPenalty(KLPlace.loss))
    parts = {"actor": actor, "reward": FirstWords(), "ref": CountingReference()}
    models = {"actor": BigramModel(), "ref": BigramModel()}
    runtime = LocalRuntime(dynamic(tmp_path, graph=dataflow(parts), interfaces=parts, models=models))
    _, batch = runtime.step(1)
    assert seen == [batch.ids]


def test_more_prompts_may_be_sampled_at_once_than_train(tmp_path):
    runtime = LocalRuntime(dynamic(tmp_path, dynamic_sampling=DynamicSampling(generation_prompts=20), batch_prompts=4))
    values, batch = runtime.step(1)
    assert len(batch) == 4
    assert values["dynamic_sampling/sampled_prompts"] == 20
    assert values["dynamic_sampling/surplus_prompts"] == round(values["dynamic_sampling/accepted_fraction"] * 20) - 4


def test_a_short_batch_makes_as_many_minibatches_as_it_has_prompts(tmp_path):
    parts = {"actor": GRPOActorInterface(generation=GENERATION, n_minibatches=8), "reward": FirstWords()}
    sampling = DynamicSampling(max_batches=1)
    runtime = LocalRuntime(dynamic(tmp_path, interfaces=parts, dynamic_sampling=sampling))
    values, batch = runtime.step(1)
    assert 0 < len(batch) < 8
    assert values["optimizer_steps"] == len(batch)
    assert values["dynamic_sampling/missing_prompts"] == 8 - len(batch)


def test_what_cannot_be_filtered_is_refused_before_anything_is_loaded(tmp_path):
    alone = GenerationConfig(n=1, max_new_tokens=6, fixed_length=True)
    parts = {"actor": PPOActorInterface(generation=alone), "reward": FirstWords()}
    with pytest.raises(
        ConfigError, match=r"actor\.generation\.n=1: groups of this size cannot reach .*min_group_size=2\."
    ):
        check_parts(dynamic(tmp_path, interfaces=parts))
    mean = DynamicSampling(min_reward_std=None, max_mean_reward=1.0, min_group_size=1)
    assert dynamic(tmp_path, interfaces=parts, dynamic_sampling=mean).dynamic_sampling is mean

    class Trains(ModelInterface):
        def train_step(self, model, data, mb_spec):
            return {}

    def graph_of(*rpcs: RPC) -> DataflowGraph:
        return DataflowGraph(rpcs, dataset_keys=("prompt_ids", "row"))

    train = RPC("train", "critic", "train_step", ("prompt_ids",))
    others = {"interfaces": {**parts, "critic": Trains()}, "models": {"actor": BigramModel(), "critic": BigramModel()}}
    with pytest.raises(ConfigError, match="no RPC of the graph writes the key 'rewards'"):
        check_parts(dynamic(tmp_path, graph=graph_of(train), **others))
    generate, *rest = dataflow(parts).rpcs
    late = replace(generate, after=("train",))
    with pytest.raises(ConfigError, match="repeats the RPCs that lead to 'rewards', and RPC 'train' among them trains"):
        check_parts(dynamic(tmp_path, graph=graph_of(train, late, *rest), **others))
