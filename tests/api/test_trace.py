"""Test token traces: per-token values next to the metrics, only for the requested prompts."""

from __future__ import annotations

import pytest
import torch

from realign.api import MicroBatchSpec, Model, TokenValues, merge_stats, stat_values
from realign.api.trace import keep_traces, traced, with_responses
from realign.interfaces.components import KLPenalty
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.ppo import PPOActorInterface
from realign.testing import BigramEngine, random_batch

KEYS = ("input_ids", "loss_mask", "logprobs", "rewards", "ref_logprobs")


def trained(interface, spec, data):
    engine = BigramEngine()
    stats = interface.train_step(Model("actor", engine), data, spec)
    return engine.parameters, stats


@pytest.mark.parametrize("n_microbatches", [1, 3, 7])
def test_traces_are_the_same_however_the_batch_is_cut_and_change_nothing_else(n_microbatches):
    data = random_batch().select(KEYS)
    interface = GRPOActorInterface(kl=KLPenalty("loss", 0.1))
    plain, off = trained(interface, MicroBatchSpec(n_microbatches=n_microbatches), data)
    weights, stats = trained(interface, MicroBatchSpec(n_microbatches=n_microbatches, trace_ids=("q1", "q3")), data)
    assert all(torch.equal(a, b) for a, b in zip(plain, weights, strict=True))
    assert stat_values(stats) == stat_values(off)
    assert not list(traced(off, ("q1", "q3")))
    found = {(one.prompt, one.response): one.values for one in traced(stats, ("q1", "q3"))}
    whole = {
        (one.prompt, one.response): one.values
        for one in traced(trained(interface, MicroBatchSpec(trace_ids=("q1", "q3")), data)[1], ("q1", "q3"))
    }
    trained_responses = {key for key, values in whole.items() if values["token/mask"].any()}
    assert trained_responses
    assert found.keys() == whole.keys()
    for key, values in whole.items():
        for name, x_T in values.items():
            assert torch.allclose(found[key][name], x_T, atol=1e-6), (key, name)


def test_a_trace_holds_the_values_of_the_loss():
    data = random_batch().select(KEYS)
    _, stats = trained(PPOActorInterface(), MicroBatchSpec(trace_ids=data.ids), data)
    ratio = torch.cat([one.values["token/ratio"] for one in traced(stats, data.ids)])
    mask = torch.cat([one.values["token/mask"] for one in traced(stats, data.ids)]).bool()
    assert float(ratio[mask].mean()) == pytest.approx(stat_values(stats)["ratio_mean"], rel=1e-5)
    assert {"token/ratio", "token/entropy", "token/advantage", "token/mask"} <= set(stats)


def test_token_values_are_dropped_unless_their_prompt_is_traced():
    data = with_responses(random_batch().select(["input_ids"]), MicroBatchSpec(trace_ids=("q2",)))
    stats = {"token/x": TokenValues(torch.arange(len(data["input_ids"])).double())}
    assert keep_traces(stats, data, MicroBatchSpec()) == {}
    kept = keep_traces(stats, data, MicroBatchSpec(trace_ids=("q2",)))
    start, end = (int(data.cu_seqlens()[s]) for s in (data.lengths["input_ids"].sequence_starts[2:4]))
    assert kept["token/x"].values.tolist() == list(range(start, end))
    assert stat_values(merge_stats([kept, kept])) == {}
