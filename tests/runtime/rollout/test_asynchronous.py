"""Test asynchronous rollout."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from realign import signals
from realign.api import GenerationConfig, ModelInterface
from realign.data import PassRate
from realign.data.curriculum import CurriculumOrder
from realign.engines import TransformersModel
from realign.engines.training.optimizer import OptimizerSpec
from realign.errors import CheckpointError, RunError
from realign.interfaces.components import GAE
from realign.interfaces.decoupled_ppo import DecoupledPPOActorInterface
from realign.interfaces.grpo import GRPOActorInterface
from realign.records.checkpoint.folder import list_checkpoints
from realign.runtime import Async, CheckpointSpec, DynamicSampling, Interrupted, OnUpdate, run
from realign.runtime.local import LocalRuntime
from realign.runtime.rollout.spec import Sync
from realign.runtime.run_checkpoints import restore, run_state
from tests.processes import until
from tests.tiny import save_tiny
from tests.toys import BigramModel, CountToken, Prompts
from tests.toys import experiment as toy

GENERATION = GenerationConfig(n=4, max_new_tokens=10)
DECOUPLED = {"advantage": GAE(lam=1.0), "n_minibatches": 2, "epochs": 2}


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("policy"))


def ahead(max_staleness: int, **more) -> Async:
    return Async(max_staleness=max_staleness, **more)


def experiment(tmp_path: Path, policy: Path, kind: str = "grpo", *, reward: ModelInterface | None = None, **changes):
    interface = GRPOActorInterface(generation=GENERATION)
    if kind == "decoupled":
        interface = DecoupledPPOActorInterface(generation=GENERATION, **DECOUPLED)
    settings = {
        "steps": 4,
        "batch_prompts": 4,
        "interfaces": {"actor": interface, "reward": reward or CountToken()},
        "models": {"actor": TransformersModel(str(policy), optimizer=OptimizerSpec(lr=1e-2))},
        "data": Prompts(11),
        "evaluation": None,
        "checkpoint": None,
    }
    return toy(tmp_path, **(settings | changes))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / "actor" / "model.safetensors")


def same_bits(a: Path, b: Path) -> bool:
    first, second = weights(a), weights(b)
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize("kind", ["grpo", "decoupled"])
def test_trap_f7_without_staleness_the_parameters_are_those_of_a_synchronous_run(tmp_path, policy, kind):
    results = {}
    for name, rollout in (("sync", Sync()), ("async", ahead(0))):
        settings = {"output_dir": tmp_path / name, "rollout": rollout, "steps": 3}
        results[name] = run(experiment(tmp_path, policy, kind, **settings))
    assert same_bits(tmp_path / "sync", tmp_path / "async")
    for metric in ("loss", "reward", "rollout_tokens", "grad_norm"):
        assert results["sync"].series(metric) == results["async"].series(metric)
    assert set(results["async"].series("rollout/version_lag")) == {0.0}


@dataclass
class Recording(DecoupledPPOActorInterface):
    """Actor that records the prompts of each training step, and the staleness of their tokens."""

    trained: list[tuple[str, ...]] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    trains: threading.Event = field(default_factory=threading.Event)

    def train_step(self, model, data, mb_spec):
        self.trained.append(data.ids)
        self.trains.set()
        sampled_T = data["versions"] >= 0
        assert torch.equal(sampled_T, data["loss_mask"])
        self.ages += (model.version - data["versions"][sampled_T]).unique().tolist()
        return super().train_step(model, data, mb_spec)


def recording(tmp_path: Path, policy: Path, max_staleness: int, **changes):
    actor = Recording(generation=GENERATION, **DECOUPLED)
    reward = changes.pop("reward", CountToken())
    settings = {"interfaces": {"actor": actor, "reward": reward}, "rollout": ahead(max_staleness)}
    return experiment(tmp_path, policy, "decoupled", **(settings | changes)), actor


@dataclass
class Waiting(CountToken):
    """Reward that blocks for slow prompts until it has scored `until` others and a training step runs."""

    slow: tuple[str, ...] = ()
    until: int = 10
    judged: list[str] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)
    waits: threading.Event = field(default_factory=threading.Event)
    trains: threading.Event = field(default_factory=threading.Event)

    def inference(self, model, data, mb_spec):
        if set(data.ids) & set(self.slow):
            self.waits.set()
            assert self.go.wait(60)
            assert self.trains.wait(60)
        self.judged += data.ids
        if len(self.judged) >= self.until:
            self.go.set()
        return super().inference(model, data, mb_spec)

    def close(self):
        self.go.set()
        self.trains.set()


def test_a_slow_reward_holds_up_neither_other_prompts_nor_training(tmp_path, policy):
    reward = Waiting(slow=("0@0", "6@0"), until=10)
    run_, actor = recording(tmp_path, policy, 2, steps=6, shuffle=False, reward=reward)
    actor.trains = reward.trains
    result = run(run_)
    stream = [f"{i % 11}@{i // 11}" for i in range(24)]
    assert sorted(i for batch in actor.trained for i in batch) == sorted(stream)
    assert "0@0" not in actor.trained[0]  # it was not ready, and other prompts were
    assert any("0@0" in batch for batch in actor.trained[:3])  # it is trained within the staleness bound
    assert max(actor.ages) <= 2
    assert max(result.series("staleness_max")) <= 2
    assert max(result.series("rollout/version_lag")) > 0
    assert all(len(batch) == 4 for batch in actor.trained)
    for name in ("ready_prompts", "running_prompts", "wait_s"):
        assert min(result.series(f"rollout/{name}")) >= 0
    assert sum(result.series("rollout_tokens")) > 0
    assert {"behavior_kl", "time/actor_gen_s", "time/reward_inf_s"} <= result.history[1].keys()


class Breaks(CountToken):
    def inference(self, model, data, mb_spec):
        if "5@0" in data.ids:
            raise KeyError("row 5 is bad")
        return super().inference(model, data, mb_spec)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_an_error_in_a_thread_ends_the_run_with_its_traceback(tmp_path, policy, max_staleness):
    run_, _ = recording(tmp_path, policy, max_staleness, shuffle=False, reward=Breaks())
    with pytest.raises(KeyError, match="row 5 is bad") as caught:
        run(run_)
    assert "inference" in [entry.name for entry in caught.traceback]
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("rollout")])


def test_a_second_signal_ends_a_run_that_waits_for_a_reward(tmp_path, policy, monkeypatch):
    reward = Waiting(slow=tuple(f"{i}@0" for i in range(11)), until=99)
    run_, _ = recording(tmp_path, policy, 1, reward=reward)
    noted = threading.Event()
    monkeypatch.setattr(signals, "write_stderr", lambda text: noted.set())

    def interrupt():
        reward.waits.wait()
        os.kill(os.getpid(), signal.SIGINT)
        assert noted.wait(60)  # a second signal before the first is handled would be merged with it
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted, match="the steps after the last checkpoint are lost"):
        run(run_)
    thread.join()


class Stops(Exception):
    pass


@dataclass
class StopsAt(Waiting):
    """Ends the run like a kill, after `when` scored prompts."""

    when: int = 10**9

    def inference(self, model, data, mb_spec):
        if len(self.judged) >= self.when:
            raise Stops
        return super().inference(model, data, mb_spec)


@pytest.mark.parametrize("max_staleness", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_trap_f8_a_run_that_ends_midway_goes_on_without_losing_or_repeating_a_prompt(tmp_path, policy, max_staleness):
    every = {"checkpoint": CheckpointSpec(every_steps=1), "steps": 7, "resume": "auto"}
    run_, first = recording(tmp_path, policy, max_staleness, reward=StopsAt(when=18), **every)
    with pytest.raises(Stops):
        run(run_)
    run_, then = recording(tmp_path, policy, max_staleness, **every)
    result = run(run_)
    done = 7 - len(then.trained)
    assert 0 < done <= len(first.trained)  # the last step may have run without being recorded
    trained = [i for batch in first.trained[:done] + then.trained for i in batch]
    assert len(set(trained)) == len(trained) == 28
    assert {i for i in trained if i.endswith("@0")} == {f"{row}@0" for row in range(11)}
    assert len([i for i in trained if i.endswith("@1")]) == 11
    assert max(then.ages) <= max_staleness
    assert [record["step"] for record in result.history] == [*range(8)]
    if max_staleness == 0:
        run(recording(tmp_path, policy, 0, steps=7, output_dir=tmp_path / "whole")[0])
        assert same_bits(tmp_path / "run", tmp_path / "whole")


def test_a_run_may_begin_to_sample_ahead_and_may_not_stop_it_with_prompts_under_way(tmp_path, policy):
    every = {"checkpoint": CheckpointSpec(every_steps=1), "resume": "auto"}
    settings = {"output_dir": tmp_path / "run", **every}
    run(recording(tmp_path, policy, 0, steps=2, **settings | {"rollout": Sync()})[0])
    run_, actor = recording(tmp_path, policy, 2, steps=4, **settings)
    run(run_)
    assert len({i for batch in actor.trained for i in batch}) == 8
    runtime = LocalRuntime(recording(tmp_path, policy, 2, steps=9, output_dir=tmp_path / "other")[0])
    try:
        runtime.step(1)
        state = run_state(runtime, {})
    finally:
        runtime.close()
    assert len(state["rollout"]["untrained"]) == 12
    sync = LocalRuntime(recording(tmp_path, policy, 0, rollout=Sync(), output_dir=tmp_path / "sync")[0])
    with pytest.raises(CheckpointError, match=r"12 prompts of asynchronous rollout .* Keep rollout=async"):
        restore(sync, state)


@dataclass
class ByRow(CountToken):
    """Reward that is constant for groups of odd rows."""

    def inference(self, model, data, mb_spec):
        judged = super().inference(model, data, mb_spec)
        even_S = torch.tensor([int(i.split("@")[0]) % 2 == 0 for i in data.ids]).repeat_interleave(4)
        rewards_S = torch.where(even_S, torch.arange(len(even_S)) % 2.0, 1.0)
        return (
            judged.with_sequences(rewards=rewards_S)
            if "input_ids" in judged
            else judged.with_data({"rewards": rewards_S}, lengths=judged.lengths["rewards"])
        )


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_prompt_that_fails_the_filter_makes_room_for_the_next(tmp_path, policy, max_staleness):
    run_, actor = recording(
        tmp_path, policy, max_staleness, steps=3, shuffle=False, reward=ByRow(), dynamic_sampling=DynamicSampling()
    )
    result = run(run_)
    trained = [i for batch in actor.trained for i in batch]
    even = [f"{i % 11}@{i // 11}" for i in range(40) if i % 11 % 2 == 0]
    assert Counter(trained) == Counter(even[:12])
    assert result.series("dynamic_sampling/missing_prompts") == [0, 0, 0]
    assert sum(result.series("dynamic_sampling/sampled_prompts")) > 12
    assert min(result.series("dynamic_sampling/accepted_fraction")) < 1
    assert max(actor.ages) <= max_staleness


def test_a_filter_that_nothing_passes_ends_the_run(tmp_path, policy):
    reward = CountToken()
    sampling = DynamicSampling(min_reward_std=None, min_mean_reward=1e9, max_batches=2)
    run_, _ = recording(tmp_path, policy, 1, reward=reward, dynamic_sampling=sampling)
    with pytest.raises(RunError, match="none of 8 prompts in 2 batches"):
        run(run_)


def test_a_ratio_that_is_not_1_is_no_mistake_where_the_sampler_is_older(tmp_path, policy):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(experiment(tmp_path, policy, rollout=ahead(2), steps=5, ratio_tolerance=1e-5))
    text = [str(w.message) for w in caught]
    assert [
        t
        for t in text
        if "max_staleness=2" in t and "GRPOActorInterface" in t and "correction=importance_correction" in t
    ]
    assert not [t for t in text if "before the first update" in t]


@pytest.mark.parametrize("kind", ["grpo", "decoupled"])
def test_an_engine_of_a_user_samples_and_scores_ahead(tmp_path, policy, kind):
    saved = {}
    for name, rollout in {"sync": Sync(), "fresh": ahead(0), "ahead": ahead(2)}.items():
        out = tmp_path / name
        changes = {"models": {"actor": BigramModel()}, "rollout": rollout, "steps": 6, "output_dir": out}
        losses = run(experiment(tmp_path, policy, kind, **changes)).series("loss")
        saved[name] = np.load(out / "final" / "actor" / "bigram.npz")["logits"], losses
    assert np.array_equal(saved["fresh"][0], saved["sync"][0])
    assert saved["fresh"][1] == saved["sync"][1]
    assert len(saved["ahead"][1]) == 6
    assert not np.array_equal(saved["ahead"][0], saved["sync"][0])


class Copied(BigramModel):
    """A model spec whose background sampler is the arguments it was called with."""

    def background_sampler(self, name: str, *, seed: int, recompute: bool) -> tuple[str, int, bool]:
        return name, seed, recompute


@pytest.mark.parametrize(("on_update", "recompute"), [(OnUpdate.keep, False), (OnUpdate.recompute, True)])
def test_the_sampler_keeps_or_recomputes_the_cache_as_the_rollout_says(
    tmp_path: Path, on_update: OnUpdate, recompute: bool
) -> None:
    run = LocalRuntime(toy(tmp_path, models={"actor": Copied()}, seed=3))
    assert run._background_sampler(Async(2, on_update), "actor") == ("actor", 3, recompute)
    run.close()


@dataclass
class Parity(ModelInterface):
    """Reward 1 for responses whose tokens have an even sum."""

    needs_engine = False

    def inference(self, model, data, mb_spec):
        pairs = zip(data.sequences("input_ids"), data.sequences("prompt_mask"), strict=True)
        rewards = torch.tensor([float(int(ids[~given].sum()) % 2 == 0) for ids, given in pairs])
        return data.with_sequences(rewards=rewards).select(["rewards"])


def with_curriculum(tmp_path, policy, name, steps=6, **changes):
    curriculum = PassRate(min_weight=0.05)
    settings = {"data": Prompts(6), "curriculum": curriculum, "sample_prompts": 4, "output_dir": tmp_path / name}
    return experiment(tmp_path, policy, reward=Parity(), **(settings | {"steps": steps} | changes))


def samples(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_asynchronous_rollout_without_staleness_chooses_the_same_prompts(tmp_path, policy):
    for name, changes in (("sync", {}), ("async", {"rollout": ahead(0)})):
        run(with_curriculum(tmp_path, policy, name, **changes))
    assert samples(tmp_path / "sync") == samples(tmp_path / "async")


def test_prompts_of_asynchronous_rollout_are_chosen_from_the_rewards_of_the_steps_before_they_start(tmp_path, policy):
    """With staleness 2, two batches run ahead: batch i is chosen from the rewards of steps 1 to i - 2."""
    run(with_curriculum(tmp_path, policy, "run", steps=8, rollout=ahead(2)))
    records = samples(tmp_path / "run")
    trained: dict[int, dict[str, list[float]]] = {}
    for record in records:
        trained.setdefault(record["step"], {}).setdefault(record["id"], []).append(record["reward"])
    order = CurriculumOrder(PassRate(min_weight=0.05), Prompts(6), 0, True)
    started: dict[str, int] = {}
    for number in range(8):
        if number > 2:
            for prompt, rewards in trained[number - 2].items():
                order.record(started[prompt], np.array(rewards))
        places = range(4 * number, 4 * number + 4)
        started |= {f"{row}@{epoch}": place for place, (epoch, row) in zip(places, order.rows(places), strict=True)}
    assert sorted(prompt for step in trained.values() for prompt in step) == sorted(started)


@pytest.mark.parametrize("more", [{}, {"dynamic_sampling": DynamicSampling(min_reward_std=0.2), "batch_prompts": 3}])
def test_asynchronous_rollout_with_a_curriculum_goes_on_after_a_stop(tmp_path, policy, more):
    """No prompt is lost or trained on twice, and the resumed run keeps the pass rates."""
    changes = {"rollout": ahead(2), "checkpoint": CheckpointSpec(every_steps=1, keep=99), **more}
    run(with_curriculum(tmp_path, policy, "run", steps=9, **changes))
    for checkpoint in list_checkpoints(tmp_path / "run" / "checkpoints"):
        state = checkpoint.read()
        rates, begun = state["data"]["curriculum"], state["rollout"]["untrained"]
        assert int(rates["visits"].sum()) >= state["rollout"]["trained"]
        assert sorted(place for place, _ in rates["waiting"]) == begun
        assert begun or checkpoint.step == 9
        if checkpoint.step > 3:
            shutil.rmtree(checkpoint.path)
    run(with_curriculum(tmp_path, policy, "run", steps=9, resume="auto", **changes))
    assert {record["step"] for record in samples(tmp_path / "run")} == set(range(1, 10))
    chosen = [(record["step"], record["id"]) for record in samples(tmp_path / "run")]
    assert len({i for _, i in chosen}) == len(set(chosen))
