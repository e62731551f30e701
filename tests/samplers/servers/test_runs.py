"""Whole runs with a server as sampler."""

import itertools
import json
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from unittest.mock import patch

import pytest

from realign.api import Model, ModelSpec
from realign.errors import ConfigError, TransientError
from realign.ranks import Ranks, current
from realign.records.checkpoint.folder import list_checkpoints
from realign.runtime import Async, CheckpointSpec, run
from realign.runtime.rollout.spec import Sync
from realign.runtime.rollout.staleness import Staleness
from realign.runtime.run_experiment import check_ranks
from realign.samplers.servers.probe import SAMPLED
from realign.samplers.servers.server_sampler import Servers
from realign.samplers.servers.vllm import Vllm
from tests.engines.distributed.run_ranks import run_ranks
from tests.samplers.servers.fake_server import FakeServer, random_table
from tests.table_sampler import TrainsOnly
from tests.toys import Digits
from tests.toys import experiment as toy


class Words(Digits):
    """Tokenizer with 11 tokens, of which 0 is the end token."""

    eos_token_id = 0

    def __len__(self):
        return 11


@dataclass
class Served(ModelSpec):
    """Model whose responses come from a server."""

    sampler: Servers = field(default_factory=Vllm)

    def load(self, name: str, *, seed: int) -> Model:
        return Model(name, TrainsOnly(seed=seed), Words(), seed)


@pytest.fixture
def server():
    started = FakeServer("vllm", random_table(9, words=11), token_s=0.001)
    yield started
    started.close()


def experiment(tmp_path, server, patience_s=30.0, sleep_level=0, **changes):
    models = {"actor": Served(Vllm(urls=[server.url], patience_s=patience_s, sleep_level=sleep_level))}
    return toy(tmp_path, **({"models": models, "steps": 4, "batch_prompts": 4} | changes))


@pytest.mark.parametrize("rollout", [Sync(), Async(max_staleness=1)], ids=["sync", "async"])
def test_a_run_trains_on_the_samples_of_a_server(tmp_path, server, rollout):
    result = run(experiment(tmp_path, server, rollout=rollout))
    assert len(result.series("reward")) == 4
    assert len(result.series("loss")) == 4
    labels = [label for label in server.tokens_by_label if label.startswith("realign-")]
    assert len(labels) >= 4
    assert set(server.tokens_by_label) == set(labels)


@pytest.mark.parametrize(("rollout", "sleeps"), [(Sync(), 4), (Async(max_staleness=1), 0)], ids=["sync", "async"])
def test_servers_sleep_in_each_training_call_of_synchronous_rollout(tmp_path, server, rollout, sleeps):
    run(experiment(tmp_path, server, rollout=rollout, sleep_level=2))
    assert server.sleeps == sleeps


def test_a_run_without_any_server_stops_and_can_be_resumed(tmp_path, server):
    def end_soon():
        while sum(server.tokens_by_label.values()) < SAMPLED.max_new_tokens + 30:  # the response that is compared
            time.sleep(0.001)
        server.close()

    threading.Thread(target=end_soon, daemon=True).start()
    with pytest.raises(TransientError, match="no server worked for 1 seconds"):
        run(experiment(tmp_path, server, patience_s=1.0, steps=5))
    other = FakeServer("vllm", random_table(8, words=11))
    try:
        result = run(experiment(tmp_path, other, steps=5, resume="auto"))
    finally:
        other.close()
    assert len(result.series("reward")) == 5


@pytest.mark.parametrize("rollout", [Sync(), Async(max_staleness=1)], ids=["sync", "async"])
def test_servers_that_take_no_weights_of_a_complete_step_cost_none(tmp_path, server, rollout):
    """The step that trained the weights is complete. The next one needs the servers."""

    loads = itertools.count()

    def tamper(path, body, answer):
        return (500, {"error": "broken"}) if path == "/collective_rpc" and next(loads) >= 3 else answer

    server.tamper = tamper
    with pytest.raises(TransientError, match="no server worked for 1 seconds"):
        run(experiment(tmp_path, server, patience_s=1.0, steps=6, rollout=rollout))
    records = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    kept = list_checkpoints(tmp_path / "run" / "checkpoints")[-1].step
    assert 0 < kept == records[-1] < 6
    other = FakeServer("vllm", random_table(8, words=11))
    try:
        run(experiment(tmp_path, other, steps=6, rollout=rollout, resume="auto"))
    finally:
        other.close()
    after = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert after == list(range(7))


class OfRankZero(TrainsOnly):
    """Engine that rank 0 saves, as sharded engines do."""

    def save(self, path):
        if current().leader:
            super().save(path)


@dataclass
class Shared(Served):
    def load(self, name: str, *, seed: int) -> Model:
        return Model(name, OfRankZero(seed=seed), Words(), seed)


def on_ranks(folder, url, rollout, **changes):
    """Run on every rank, and return the metrics that do not depend on the clock."""
    sampler = Vllm(urls=[url], weights_dir=str(folder / "weights"))
    models = {"actor": Shared(sampler)}
    result = run(toy(folder, models=models, **({"steps": 4, "batch_prompts": 4, "rollout": rollout} | changes)))
    return {name: result.series(name) for name in ("reward", "loss", "rollout/version_lag")}


@pytest.mark.parametrize("staleness", [0, 1])
def test_rank_0_samples_ahead_for_all_ranks(tmp_path, server, staleness):
    (first, other) = run_ranks(2, on_ranks, tmp_path / "ranks", server.url, Async(max_staleness=staleness))
    assert first == other
    assert len(first["loss"]) == 4
    assert max(first["rollout/version_lag"]) <= staleness
    if not staleness:
        alone = run(experiment(tmp_path / "alone", server))
        assert [first["reward"], first["loss"]] == [alone.series("reward"), alone.series("loss")]


@pytest.mark.slow
def test_ranks_resume_what_rank_0_sampled_ahead(tmp_path, server):
    settings = (tmp_path, server.url, Async(max_staleness=2))
    run_ranks(2, partial(on_ranks, steps=2, checkpoint=CheckpointSpec(every_steps=1)), *settings)
    first, other = run_ranks(2, partial(on_ranks, steps=5, checkpoint=CheckpointSpec(), resume="auto"), *settings)
    assert first == other
    assert len(first["loss"]) == 5
    assert max(first["rollout/version_lag"]) <= 2


def error_after_a_step(folder, url):
    with (
        patch.object(Staleness, "train", side_effect=ValueError("a bug of rank 0")),
        pytest.raises(ValueError, match="rank 0") as caught,
    ):
        on_ranks(folder, url, Async())
    return str(caught.value)


@pytest.mark.slow
def test_an_error_of_rank_0_after_a_step_ends_all_ranks(tmp_path, server):
    assert run_ranks(2, error_after_a_step, tmp_path, server.url) == ["a bug of rank 0"] * 2


def test_what_needs_all_ranks_cannot_run_ahead(tmp_path, server):
    own = toy(tmp_path, rollout=Async())
    with pytest.raises(ConfigError, match=r"RPC 'actor_gen' would need all ranks .* Set models.actor.sampler=vllm or"):
        check_ranks(own, Ranks(0, 2))
    check_ranks(experiment(tmp_path, server, rollout=Async()), Ranks(0, 2))
    scored = experiment(tmp_path, server, rollout=Async())
    scored.interfaces["reward"].needs_engine = True
    with pytest.raises(
        ConfigError, match=r"would need all ranks for models.reward .* Set rollout=sync, or runtime=ray"
    ):
        check_ranks(scored, Ranks(0, 2))
