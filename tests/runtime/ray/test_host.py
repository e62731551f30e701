from __future__ import annotations

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, Request, SequenceSample, stat_values
from realign.engines import TransformersModel
from realign.engines.training.optimizer import OptimizerSpec
from realign.engines.training.transformers_engine import TransformersEngine
from realign.errors import ConfigError
from realign.models import TopLayers
from realign.runtime.evaluation.loss import LOSS_SUM
from realign.runtime.ray import host as host_module
from realign.runtime.ray.host import Host, Offload
from realign.runtime.ray.wire_format import map_tree
from tests.checkpoint_runs import assert_same_tree
from tests.tiny import random_sample, tiny_model, tiny_tokenizer
from tests.toys import BigramModel

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
    assert loaded.capabilities.eos_token_ids == (2,)
    assert (loaded.capabilities.trainable, loaded.capabilities.positions, loaded.data_ranks, loaded.data_rank) == (
        True,
        128,
        1,
        0,
    )
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
    given = map_tree(host.ask("actor", "state_dict", ()), torch.clone)
    counts = [moments["step"].clone() for moments in given["optimizer"]["optimizer"]["state"].values()]
    kept = map_tree(given, torch.clone)
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
        def __init__(self, resident):
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


def test_an_engine_that_lists_no_tensors_cannot_be_offloaded():
    message = r"^runtime\.placement\.actor\.offload=true: BigramEngine does not list the tensors .* Remove it\.$"
    with pytest.raises(ConfigError, match=message):
        Host(0, 1).load({"actor": BigramModel()}, 0, frozenset({"actor"}))


def test_a_copy_samples_whole_batches_and_single_responses_and_stops_on_request(specs):
    host = Host(0, 1)
    host.load_copies(specs, 3, True)
    sampler = host._samplers["actor"]
    prompts = SequenceSample.from_sequences(["a"], {"prompt_ids": [[[3, 4]]]})
    config = GenerationConfig(n=2, max_new_tokens=5)
    whole = host.ask("actor", "sample", (prompts, config, 1))
    ids, logprobs, versions, truncated, _ = host.ask("actor", "complete", ("a", 1, torch.tensor([3, 4]), config, 1))
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
    host.ask("actor", "update", (sampler.engine.weights(), 4))
    assert set(host.ask("actor", "sample", (prompts, config, 1))["versions"].tolist()) == {-1, 4}
    sampler.close()


PROMPTS = SequenceSample.from_sequences(["a", "b"], {"prompt_ids": [[[5, 6, 7]], [[8]]]})


def pauses(device: str, *, offload: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor, list[int]]:
    """Return the weights after two optimizer steps, and a rollout, with or without offloading in between."""
    module = tiny_model("qwen2").to(device)
    engine = TransformersEngine(
        "actor", module, tiny_tokenizer(), seed=0, optimizer=OptimizerSpec(lr=1e-2, ema_decay=0.9)
    )
    away = Offload(engine.resident)
    waited = []
    for seed in (0, 1):
        if offload:
            there = [x for x in engine.resident() if x.device.type != "cpu"]
            away.leave()
            waited.append(len(there))
            assert all(x.device.type == "cpu" for x in engine.resident())
            away.come_back()
        data = random_sample([[6, 9], [7]], seed=seed)
        engine.train_batch(
            data, MicroBatchSpec(), lambda out, mb: (-out.logprobs().sum(), {}), lambda d: torch.tensor(3.0)
        )
    sampled = engine.generate(PROMPTS, GenerationConfig(n=2, max_new_tokens=5), seed=0)
    return {name: x.cpu() for name, x in engine.weights().items()}, sampled["input_ids"].cpu(), waited


def test_on_a_cpu_nothing_moves():
    assert pauses("cpu", offload=True)[2] == [0, 0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_engine_goes_on_after_a_pause_as_if_it_had_never_left_the_device():
    (weights, sampled, waited), (want, wanted, _) = pauses("cuda", offload=True), pauses("cuda", offload=False)
    assert waited[1] > waited[0] > 0  # the second offload includes the moments of the optimizer
    assert torch.equal(sampled, wanted)
    for name, x in want.items():
        torch.testing.assert_close(weights[name], x, rtol=0, atol=0)
