from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from benchmarks import levers
from benchmarks.batches import make_rollout
from benchmarks.peer.work import SCENARIOS
from realign.engines.sampling import rollout_model

TINY = replace(SCENARIOS["tiny"], prompts=3, group=4)


@pytest.mark.slow
def test_every_lever_is_measured_on_the_same_work(capsys, monkeypatch):
    monkeypatch.setitem(levers.SCENARIOS, "tiny", TINY)
    levers.main(["scenarios=tiny", "repeats=1", f"threads={torch.get_num_threads()}"])
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert [row["lever"] for row in report["levers"]] == list(levers.LEVERS)
    assert all(row["on_s"] > 0 and row["off_s"] > 0 for row in report["levers"])
    assert all(lever.what in out for lever in levers.LEVERS.values())


@pytest.mark.parametrize("name", [name for name, lever in levers.LEVERS.items() if lever.part == "rollout"])
def test_responses_have_their_lengths_with_and_without(name):
    lengths = [torch.tensor(TINY.lengths(1))] * 2
    found = []
    for lever in (None, levers.LEVERS[name]):
        out = levers.rollout(TINY, lever)()
        found.append(torch.tensor([int(m.sum()) for m in out.sequences("loss_mask")]))
    assert all(map(torch.equal, found, lengths))


@pytest.mark.parametrize("name", [name for name, lever in levers.LEVERS.items() if lever.part == "training"])
def test_a_step_without_a_lever_is_the_same_step(name, monkeypatch):
    weights = []
    make = levers.make_actor

    def kept(*args, **kwargs):
        actor = make(*args, **kwargs)
        weights.append(actor.engine.network)
        return actor

    monkeypatch.setattr(levers, "make_actor", kept)
    for lever in (None, levers.LEVERS[name]):
        levers.training(TINY, lever)()
    on, off = (torch.cat([p.detach().flatten() for p in network.parameters()]) for network in weights)
    torch.testing.assert_close(on, off, atol=3e-6, rtol=1e-4)  # the first step of Adam is lr = 1e-6 for any gradient


def test_nothing_of_a_lever_stays(monkeypatch):
    before = rollout_model.SMALL_PRODUCT
    with levers.without(levers.LEVERS["one_core"]):
        assert rollout_model.SMALL_PRODUCT == 0
    assert before == rollout_model.SMALL_PRODUCT
    with levers.without(None):
        pass


def test_log_probs_of_all_tokens_are_the_same_where_they_count():
    actor, batch, found = levers.make_actor(TINY), make_rollout(TINY), []
    for context in (nullcontext(), levers.without(levers.LEVERS["where"])):
        with context:
            found.append(levers.score(actor, batch)["old_logprobs"])
    torch.testing.assert_close(*found)


def test_what_is_unknown_is_refused():
    with pytest.raises(SystemExit, match="unknown lever 'speed'; valid: fused_rollout"):
        levers.main(["levers=speed", f"threads={torch.get_num_threads()}"])
