"""Test runs with an external sampler, such as a server."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace

import pytest
import torch

from realign.api import Model, SequenceSample
from realign.errors import ConfigError
from realign.interfaces.grpo import GRPOActorInterface
from realign.runtime import Async, run
from realign.runtime import models as loading
from realign.runtime.local import LocalRuntime
from realign.runtime.rollout.spec import Sync
from realign.runtime.run_checkpoints import restore, run_state
from realign.samplers import InProcessSampling
from realign.testing import BigramEngine
from tests.table_sampler import Served, TableSampling
from tests.toys import GENERATION
from tests.toys import experiment as toy


@pytest.fixture(autouse=True)
def opened():
    TableSampling.opened.clear()
    yield TableSampling.opened
    assert all("closed" in sampler.stopped for sampler in TableSampling.opened)


def experiment(tmp_path, *, external: bool = True, **changes):
    models = {"actor": Served() if external else Served(InProcessSampling())}
    return toy(tmp_path, **({"models": models} | changes))


METRICS = ("loss", "reward", "grad_norm", "eval/reward", "rollout_tokens")


def series(tmp_path, name: str, **changes) -> dict[str, list[float]]:
    result = run(experiment(tmp_path, output_dir=tmp_path / name, strict_ratio=True, **changes))
    return {key: result.series(key) for key in METRICS}


def tables(tmp_path, *names: str) -> list[str]:
    return [sorted((tmp_path / name / "final" / "actor").iterdir())[0].read_bytes().hex() for name in names]


@pytest.mark.parametrize("rollout", [Sync(), Async(max_staleness=0)], ids=["sync", "async"])
def test_a_run_with_evaluation_is_that_of_the_in_process_sampler(tmp_path, opened, rollout):
    want = series(tmp_path, "in_process", external=False)
    assert series(tmp_path, "external", rollout=rollout) == want
    first, second = tables(tmp_path, "in_process", "external")
    assert first == second
    assert len(opened) == 1
    assert opened[0].updates == [1, 2, 3]


@dataclass
class Recording(GRPOActorInterface):
    """Actor that records the staleness of the tokens of each training step."""

    ages: list[int] = field(default_factory=list)

    def train_step(self, model, data, mb_spec):
        self.ages += (model.version - self.versions(data)).unique().tolist()
        return super().train_step(model, data, mb_spec)

    def versions(self, data: SequenceSample) -> torch.Tensor:
        assert torch.equal(data["versions"] >= 0, data["loss_mask"])
        return data["versions"][data["versions"] >= 0]


def test_responses_are_sampled_ahead_of_training_and_carry_the_versions_of_the_sampler(tmp_path, opened):
    actor = Recording(generation=GENERATION)
    plain = experiment(tmp_path)
    rpcs = [replace(r, inputs=(*r.inputs, "versions")) if r.method == "train_step" else r for r in plain.graph.rpcs]
    graph = replace(plain.graph, rpcs=tuple(rpcs), results=("truncated",))
    interfaces = plain.interfaces | {"actor": actor}
    settings = {"rollout": Async(max_staleness=2), "graph": graph, "interfaces": interfaces}
    with pytest.warns(UserWarning, match="max_staleness=2"):
        run(experiment(tmp_path, steps=6, overwrite=True, **settings))
    assert max(actor.ages) <= 2
    assert min(actor.ages) >= 0
    assert opened[0].updates == list(range(1, 7))


def test_a_restored_run_gives_the_sampler_the_weights_of_the_checkpoint(tmp_path, opened):
    through = LocalRuntime(experiment(tmp_path))
    for step in (1, 2):
        through.step(step)
    state = deepcopy(run_state(through, {}))
    values, _ = through.step(3)
    resumed = LocalRuntime(experiment(tmp_path, output_dir=tmp_path / "resumed"))
    restore(resumed, state)
    assert (opened[1].version, opened[1].updates) == (2, [2])
    again, _ = resumed.step(3)
    assert again["loss"] == values["loss"]
    assert torch.equal(resumed.models["actor"].engine.logits_VV, through.models["actor"].engine.logits_VV)
    through.close()
    resumed.close()


def test_an_external_sampler_under_torchrun_is_refused(tmp_path, monkeypatch):
    class Two:
        size = 2

    monkeypatch.setattr(loading, "current", Two)
    with pytest.raises(
        ConfigError, match=r"models.actor.sampler=TableSampling: this sampler does not work under torchrun"
    ):
        loading.open_sampler(Served(), Model("actor", BigramEngine()))
