"""Test runtime=ray: results equal those of a single process, and failures in workers."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
import warnings
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import ray
import torch

from realign.api import MicroBatchSpec, Sum, stat_values
from realign.engines import Sharding, TransformersModel
from realign.engines.training.optimizer import OptimizerSpec
from realign.errors import ConfigError, RewardError, RunError, TransientError, is_transient
from realign.interfaces.components.early_stop import EarlyStop
from realign.interfaces.grpo import GRPOActorInterface
from realign.records.checkpoint.random_generators import seed_random
from realign.runtime import Async, Local, Ray, run
from realign.runtime.evaluation.loss import ForwardOnly
from realign.runtime.models import load_own
from realign.runtime.out_of_memory import memory_limited
from realign.runtime.processes.agreement import software
from realign.runtime.processes.placement import RoleGroup
from realign.runtime.processes.watchdog import WorkerHangs
from realign.runtime.ray import workers as groups
from realign.runtime.ray.ray_runtime import RayRuntime, reserve
from realign.runtime.ray.wire_format import map_tree
from realign.runtime.ray.workers import HOOK, RemoteError, Setup, WorkerGroup, counting_hops
from realign.runtime.run_experiment import open_runtime
from tests.checkpoint_runs import PoisonedCritic, assert_same_tree, experiment, started, state, untimed
from tests.tiny import random_sample
from tests.toys import GENERATION, BigramModel, CountToken
from tests.toys import experiment as toy

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]
DATA = random_sample([[6, 5], [7]])
WORDS = DATA.with_tokens(input_ids=DATA["input_ids"] % 11)
"""`DATA` with the vocabulary of the bigram model."""


@pytest.mark.slow
def test_a_run_is_that_of_one_process_bit_for_bit(files, tmp_path):
    """Run PPO with a critic in a separate process, a reference in the actor's process, and all
    components with state."""
    for kind, runtime in (("local", Local()), ("ray", Ray())):
        started(files, tmp_path / kind, "ppo", runtime=runtime, steps=3)
    assert_same_tree(state(tmp_path / "ray"), state(tmp_path / "local"))
    ours, theirs = (untimed(tmp_path / kind / "metrics.jsonl") for kind in ("ray", "local"))
    assert ours == theirs


@pytest.mark.slow
def test_an_engine_of_a_user_trains_and_samples_ahead_in_workers(tmp_path):
    """Its step has no halves, and the early stop that its worker decides ends the epochs in the driver."""
    metrics, weights = {}, {}
    interface = GRPOActorInterface(generation=GENERATION, epochs=3, n_minibatches=2, early_stop=EarlyStop(kl=1e-6))
    for kind, more in {
        "local": {},
        "ray": {"runtime": Ray(placement={"actor": {"devices": 2}})},
        "ahead": {"runtime": Ray(), "rollout": Async(max_staleness=0)},
    }.items():
        out = tmp_path / kind
        done = run(toy(tmp_path, output_dir=out, interfaces={"actor": interface, "reward": CountToken()}, **more))
        metrics[kind] = done.series("loss"), done.series("early_stopped")
        weights[kind] = np.load(out / "final" / "actor" / "bigram.npz")["logits"]
    assert metrics["local"][1] == [1.0, 1.0, 1.0]
    assert metrics["ray"] == metrics["ahead"] == metrics["local"]
    assert np.array_equal(weights["ray"], weights["local"])
    assert np.array_equal(weights["ahead"], weights["local"])


def loss(output, mb):
    return -output.logprobs().sum(), {"prompts": Sum(torch.tensor(float(len(mb))))}


def broken(output, mb):
    """Fail in a worker, on the rank that receives prompt `p1`."""
    if "p1" in mb.ids:
        raise ValueError("a bug of the user")
    return loss(output, mb)


def weight(data):
    return torch.tensor(3.0)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [Sharding(), Sharding(pipeline=2)], ids=["slices", "stages"])
def test_trap_g5_two_ranks_compute_what_one_does_and_the_error_of_one_ends_both(files, tmp_path, sharding):
    """Cover group statistics and KL of whole batches, a reference in the same processes, and weight transfers."""
    made = {}
    for kind, runtime in (("local", Local()), ("ray", Ray(placement={"actor": {"devices": 2}}))):
        path = str(files / "llama")
        models = {
            "actor": TransformersModel(path, optimizer=OptimizerSpec(lr=1e-3), sharding=sharding),
            "ref": TransformersModel(path, sharding=sharding),
        }
        e = experiment(files, tmp_path / kind, "grpo", evaluation=None, models=models, runtime=runtime)
        seed_random(e.seed)  # the reward draws from the global generators
        with closing(open_runtime(e)) as opened:
            (values, first), (_, second) = opened.step(1), opened.step(2)
            engine = opened.models["actor"].engine
            measured = ForwardOnly("actor", "actor", engine).train_batch(DATA, MicroBatchSpec(), loss, weight)
            weights, trained = (map_tree(tree, torch.clone) for tree in (engine.weights(), engine.state_dict()))
            made[kind] = [first, second], weights, trained, stat_values(measured)
            engine.load_state_dict(engine.state_dict())
            engine.train_batch(DATA, MicroBatchSpec(), loss, weight)
            made[kind] += (counts(engine),)
            if kind == "ray":
                opened.models["ref"].engine.load_weights(engine.weights())
                assert engine.group is opened.models["ref"].engine.group
                assert 0 < values["time/actor_gen_wait_s"] <= values["time/actor_gen_s"]
                assert "time/reward_inf_wait_s" not in values
                begun = time.monotonic()
                place = rf'{re.escape(__file__)}", line {broken.__code__.co_firstlineno + 3}, in broken'
                with pytest.raises(RemoteError, match=rf"(?s)actor: train on rank \d of 2.*{place}.*a bug of the user"):
                    engine.train_batch(DATA, MicroBatchSpec(), broken, weight)
                assert time.monotonic() - begun < 30
    for ours, theirs in zip(made["ray"][0], made["local"][0], strict=True):
        assert ours.ids == theirs.ids
        assert torch.equal(ours["input_ids"], theirs["input_ids"])
    for ours, theirs in zip(made["ray"][1:], made["local"][1:], strict=True):
        assert_close(ours, theirs)


def counts(engine: Any) -> list[float]:
    """Return the number of steps of each parameter in the optimizer."""
    return [float(moments["step"]) for moments in engine.state_dict()["optimizer"]["optimizer"]["state"].values()]


def assert_close(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key, x in theirs.items():
            assert_close(ours[key], x)
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, abs=2e-5)
    elif isinstance(theirs, list):
        for a, b in zip(ours, theirs, strict=True):
            assert_close(a, b)
    else:
        assert ours == theirs


@pytest.fixture(scope="module")
def group(cluster, files):
    """Start one process in the folder `files`, with a bigram model as `actor`."""
    room = reserve(RoleGroup(("actor",)), Ray(), gpu=False)
    setup = Setup(str(files), (), threads=1, seed=0)
    made = WorkerGroup(RoleGroup(("actor",)), Ray(), room, setup, gpu=False)
    made.ready()
    made.load({"actor": BigramModel()}, 0)
    yield made
    made.kill()
    ray.util.remove_placement_group(room)


def test_warnings_and_errors_of_realign_in_a_worker_reach_the_driver(group, files, recwarn):
    def hook(output, mb):
        warnings.warn(f"in {os.getcwd()}", UserWarning, stacklevel=1)
        return mb.with_tokens(scored=output.logprobs())

    out = group.ask("actor", "forward", [(WORDS, MicroBatchSpec(), HOOK)], hook)[0]
    assert out["scored"].shape == WORDS["input_ids"].shape
    assert [str(w.message) for w in recwarn if w.category is UserWarning] == [f"in {files}"]
    with pytest.raises(ValueError, match=r"the function passed to forward cannot be pickled for a worker"):
        group.ask("actor", "forward", [(WORDS, MicroBatchSpec(), HOOK)], threading.Lock().acquire)

    def rejects(output, mb):
        raise RewardError("too many failed rewards")

    with pytest.raises(RewardError, match="too many failed rewards") as caught:
        group.ask("actor", "forward", [(WORDS, MicroBatchSpec(), HOOK)], rejects)
    assert "in rejects" in str(caught.value.__cause__)


def loss_with_a_bug(output, mb):
    return mb.select(["no such key"])


def test_an_error_of_a_user_keeps_the_file_and_line_of_the_worker(group):
    """A ValueError raised by realign code is a bug of the caller, not a configuration error."""
    line = loss_with_a_bug.__code__.co_firstlineno + 1
    message = rf"(?s)actor: measure \(workers of actor\) failed:.*{re.escape(__file__)}\", line {line}.*no such key"
    with pytest.raises(RemoteError, match=message):
        group.ask("actor", "measure", [(WORDS, MicroBatchSpec(), HOOK)], loss_with_a_bug)


def test_a_full_disk_in_a_worker_is_an_os_error_of_the_driver(group):
    def full(output, mb):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left") as caught:
        group.ask("actor", "forward", [(WORDS, MicroBatchSpec(), HOOK)], full)
    assert is_transient(caught.value)


def out_of_memory(output, mb):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nFurther lines.")


def test_out_of_memory_in_a_worker_is_one_line_with_the_setting_that_lowers_the_memory_use(group):
    message = (
        r"RPC 'actor_inf': out of memory \(actor: forward \(workers of actor\): CUDA out of memory\. Tried to allocate "
        r"20 GiB\)\. Lower x\."
    )
    with pytest.raises(RunError, match=message) as caught, memory_limited("RPC 'actor_inf'", "Lower x."):
        group.ask("actor", "forward", [(WORDS, MicroBatchSpec(), HOOK)], out_of_memory)
    assert "in out_of_memory" in str(caught.value.__cause__.__cause__)


def test_a_worker_with_other_versions_than_the_driver_is_named(group, monkeypatch):
    monkeypatch.setattr(groups, "software", lambda: software() | {"torch": "2.9.0"})
    message = rf"^torch: the driver has 2\.9\.0, but worker 0 \(workers of actor\) has {re.escape(torch.__version__)}\."
    with pytest.raises(ConfigError, match=message):
        group.ready()


def test_a_call_that_hangs_is_named_with_its_shapes(group, monkeypatch):
    def forever(output, mb):
        time.sleep(60)

    monkeypatch.setattr(group, "_limit_s", 0.5)
    slow = group.ask("actor", "forward", [(WORDS, MicroBatchSpec(), HOOK)], lambda out, mb: time.sleep(1) or mb)[0]
    assert slow.ids == WORDS.ids  # requests outside the graph, such as evaluations, have no limit
    message = r"RPC 'x_inf', actor: forward \(workers of actor\): rank 0 did not answer .* Data: rank 0: 2 prompts"
    with counting_hops("x_inf"), pytest.raises(WorkerHangs, match=message):
        group.ask("actor", "forward", [(WORDS, MicroBatchSpec(), HOOK)], forever)


def test_a_cluster_without_room_is_a_config_error_with_the_required_resources(files, tmp_path):
    runtime = Ray(placement={"actor": {"devices": 500}}, placement_timeout_s=1)
    e = experiment(files, tmp_path, "raft", runtime=runtime)
    message = r"placement\.actor: actor on 500 devices needs 500 CPU, but the cluster has \d+ CPU .* Use fewer devices"
    with pytest.raises(ConfigError, match=message):
        open_runtime(e)


def test_resources_that_other_jobs_use_are_a_transient_error():
    held = reserve(RoleGroup(("actor",), int(ray.available_resources()["CPU"])), Ray(), gpu=False)
    try:
        with pytest.raises(TransientError, match="Wait until other jobs release resources"):
            reserve(RoleGroup(("ref",)), Ray(address="auto", placement_timeout_s=1), gpu=False)
    finally:
        ray.util.remove_placement_group(held)


@pytest.mark.slow
def test_calls_that_do_not_wait_for_each_other_are_made_at_the_same_time(files, tmp_path, monkeypatch):
    """The calls are the reward and the reference of GRPO. Keys are in the order of the graph, whichever call ends
    first."""
    meeting = threading.Barrier(2, timeout=60)
    made: list[str] = []

    def call(self: RayRuntime, rpc: Any, batch: Any, draw: int = 0) -> Any:
        if rpc.name in ("reward_inf", "ref_inf"):
            meeting.wait()
        made.append(rpc.name)
        return original(self, rpc, batch, draw)

    original = RayRuntime._call
    monkeypatch.setattr(RayRuntime, "_call", call)
    monkeypatch.setattr(RayRuntime, "_load_own", lambda self, specs, seed: load_own(specs, seed))
    e = experiment(files, tmp_path, "grpo", evaluation=None, runtime=Ray())
    with closing(open_runtime(e)) as opened:
        _, batch = opened.step(1)
    assert {"reward_inf", "ref_inf"} < set(made)
    assert made[-1] == "actor_train"
    assert list(batch.data)[-2:] == ["ref_logprobs", "prox_logprobs"]


@pytest.mark.slow
def test_sampling_ahead_on_its_own_workers_with_no_staleness_is_the_same_bit_for_bit(files, tmp_path):
    ahead = {"runtime": Ray(), "rollout": Async(max_staleness=0)}
    for kind, settings in (("local", {}), ("ray", ahead)):
        started(files, tmp_path / kind, "raft", steps=2, **settings)
    ours, theirs = (state(tmp_path / kind)["models"]["actor"]["engine"] for kind in ("ray", "local"))
    assert_same_tree(ours | {"fused": True, "decode": theirs["decode"]}, theirs)  # the trained model has not sampled
    values = untimed(tmp_path / "ray" / "metrics.jsonl")[-1]
    assert (values["rollout/version_lag"], values["rollout/running_prompts"]) == (0, 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is not finite")
@pytest.mark.parametrize("shared", [False, True])
def test_seed_c13_models_of_other_processes_skip_a_step_together(files, tmp_path, shared):
    placement = "colocated" if shared else "separate"
    taken = {}
    for kind, runtime in (("local", Local()), ("ray", Ray(placement=placement))):
        run = experiment(files, tmp_path / kind, "ppo", runtime=runtime, evaluation=None, skip_together=True, steps=3)
        run.interfaces["critic"] = PoisonedCritic(epochs=2, n_minibatches=2)
        seed_random(run.seed)  # the reward draws from the global generators
        with closing(open_runtime(run)) as opened:
            values = [opened.step(step)[0] for step in (1, 2, 3)]
        counts = [(x.get("optimizer_steps", 0), x["critic/optimizer_steps"]) for x in values]
        taken[kind] = counts, values[2]["loss"], values[2]["critic/loss"]
    assert taken["ray"] == taken["local"]
    assert taken["ray"][0] == [(0, 4), (0, 0), (4, 4)]
