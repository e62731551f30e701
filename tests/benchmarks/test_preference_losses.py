from __future__ import annotations

import math

import pytest

from benchmarks import preference_losses
from realign.api import MicroBatchSpec, Model
from realign.demo.arithmetic import prepare
from realign.interfaces.kto import KTOReferenceInterface


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(prepare(tmp_path_factory.mktemp("task"), seed=0, demonstrations=1).model)


@pytest.mark.parametrize(("name", "loss"), [("DPO", math.log(2)), ("KTO", 0.5)])
def test_the_side_of_realign_starts_at_the_loss_of_the_reference(folder, name, loss):
    network = preference_losses.load(folder, False, 0)
    data = preference_losses.random_pairs(0, network.config.vocab_size)
    machine = preference_losses.Machine(network)
    scored = KTOReferenceInterface().inference(Model("ref", machine), data, MicroBatchSpec())
    data = data.merge(scored.rename({"logprobs": "ref_logprobs"}))
    preference_losses.METHODS[name].interface.train_step(Model("actor", machine), data, MicroBatchSpec())
    assert machine.loss.item() == pytest.approx(loss, abs=1e-6)
    assert max(float(x.abs().max()) for x in machine.gradients.values()) > 1e-3
