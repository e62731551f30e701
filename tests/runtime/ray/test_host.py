from __future__ import annotations

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, Request, SequenceSample, stat_values
from realign.engines import TopLayers, TransformersModel
from realign.engines.training.optimizer import OptimizerSpec
from realign.runtime.evaluation.loss import LOSS_SUM
from realign.runtime.ray import host as host_module
from realign.runtime.ray.host import Host
from realign.runtime.ray.wire_format import mapped
from tests.checkpoint_runs import assert_same_tree
from tests.tiny import random_sample

SPEC, DATA = MicroBatchSpec(), random_sample([[6, 5], [7]])
WEIGHT = torch.tensor(4.0)


def loss(output, mb):
    return -output.logprobs().sum(), {"kl": (torch.tensor(2.0), torch.tensor(1.0))}


def scored(output, mb):
    return mb.with_tokens(scored=output.logprobs())


@pytest.fixture
def specs(files):
    path = str(files / "llama")
    return {"actor": TransformersModel(path, optimizer=OptimizerSpec(lr=1e-2), trains=TopLayers(1))}


def test_two_halves_are_one_step(specs):
    one, two = Host(0, 1), Host(0, 1)
    for host in (one, two):
        loaded = host.load(specs, 3, frozenset())["actor"]
    assert loaded.eos_token_ids == (2,)
    assert (loaded.trainable, loaded.positions, loaded.data_ranks, loaded.data_rank) == (True, 128, 1, 0)
    part, whole = one.ask("actor", "train", (DATA, SPEC, loss, WEIGHT))
    assert stat_values(part)["tokens"] == 18
    assert two.ask("actor", "accumulate", (DATA, SPEC, loss, WEIGHT)).keys() == part.keys()
    assert stat_values(two.ask("actor", "apply", (WEIGHT, False))) == stat_values(whole)
    ours, theirs = (host.ask("actor", "weights", ()) for host in (one, two))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("size", [1, 2])
def test_a_loaded_state_is_not_changed_by_later_steps(specs, size):
    """The workers of a group receive one state in shared memory."""
    host = Host(0, 1)
    host.load(specs, 3, frozenset())
    host.ask("actor", "train", (DATA, SPEC, loss, WEIGHT))
    given = mapped(host.ask("actor", "state_dict", ()), torch.clone)
    counts = [moments["step"].clone() for moments in given["optimizer"]["optimizer"]["state"].values()]
    kept = mapped(given, torch.clone)
    host._size = size  # the branch of a group with several ranks; its engine copies its slices
    host.ask("actor", "load_state_dict", (given, False))
    host.ask("actor", "train", (DATA, SPEC, loss, WEIGHT))
    assert [moments["step"] for moments in given["optimizer"]["optimizer"]["state"].values()] == counts
    if size == 1:
        assert_same_tree(given, kept)


def test_a_reference_stays_and_the_loss_is_measured_without_a_step(specs):
    host = Host(0, 1)
    host.load(specs, 3, frozenset())
    host.ask("actor", "reference", (1,))
    before = host.ask("actor", "forward", (DATA, SPEC, scored))["scored"]
    measured = host.ask("actor", "measure", (DATA, SPEC, loss))
    torch.testing.assert_close(measured[LOSS_SUM].value.float(), -before.sum())
    host.ask("actor", "train", (DATA, SPEC, loss, WEIGHT))
    assert not torch.equal(host.ask("actor", "forward", (DATA, SPEC, scored))["scored"], before)
    torch.testing.assert_close(host.ask("actor", "score", (DATA, SPEC, scored, 1))["scored"], before)


def test_an_offloaded_role_is_on_its_device_during_its_calls_and_between_the_halves_of_a_step(specs, monkeypatch):
    events = []

    class Recorded:
        def __init__(self, resident, free):
            events.append(len(list(resident())))

        def leave(self):
            events.append("leave")

        def come_back(self):
            events.append("back")

    monkeypatch.setattr(host_module, "Offload", Recorded)
    host = Host(0, 1)
    host.load(specs | {"ref": TransformersModel(specs["actor"].path)}, 3, frozenset({"actor"}))
    assert events[0] > 0
    assert events[1:] == ["leave"]
    del events[:]
    host.ask("actor", "forward", (DATA, SPEC, scored))
    host.ask("ref", "forward", (DATA, SPEC, scored))
    assert events == ["back", "leave"]
    del events[:]
    host.ask("actor", "accumulate", (DATA, SPEC, loss, WEIGHT))
    assert events == ["back"]
    host.ask("actor", "apply", (WEIGHT, False))
    assert events == ["back", "back", "leave"]


def test_a_copy_samples_whole_batches_and_single_responses_and_stops_on_request(specs):
    host = Host(0, 1)
    host.load_copies(specs, 3, True)
    sampler = host._samplers["actor"]
    prompts = SequenceSample.from_sequences(["a"], {"prompt_ids": [[[3, 4]]]})
    config = GenerationConfig(n=2, max_new_tokens=5)
    whole = host.ask("actor", "sample", (prompts, config, 1))
    ids, logprobs, versions, truncated = host.ask("actor", "complete", ("a", 1, torch.tensor([3, 4]), config, 1))
    assert ids.tolist() == whole.sequences()[1][2:].tolist()
    assert torch.allclose(logprobs, whole.sequences("logprobs")[1][2:], atol=1e-5)
    assert set(versions.tolist()) == {0}
    assert truncated == bool(whole["truncated"][1])
    for stop, go in (("pause", "resume"), ("sleep", "wake")):
        host.ask("actor", stop, ())
        handle = sampler.submit(Request("a", 0, torch.tensor([3, 4]), config, 1))
        with pytest.raises(TimeoutError):
            handle.result(0.05)
        host.ask("actor", go, ())
        handle.result(60)
    host.ask("actor", "update", (sampler.weights(), 4))
    assert set(host.ask("actor", "sample", (prompts, config, 1))["versions"].tolist()) == {-1, 4}
    sampler.close()
