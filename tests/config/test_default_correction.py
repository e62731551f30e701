"""External samplers and the importance correction that they need."""

import pytest

from realign.config import build_experiment, compose
from realign.interfaces.components.correction import ImportanceCorrection, RatioRange
from realign.interfaces.grpo import GRPOActorInterface

BASE = ["experiment=grpo", "models.actor.path=model", "data.path=rows.jsonl", "interfaces.reward.function=arithmetic"]
SERVER = ["models.actor.sampler=vllm", "models.actor.sampler.urls=[http://127.0.0.1:8000]"]


def correction(*words):
    experiment = build_experiment(compose([*BASE, *words]))
    actor = experiment.interfaces["actor"]
    assert isinstance(actor, GRPOActorInterface)
    return actor.correction, {rpc.name for rpc in experiment.graph.rpcs}


def test_a_server_brings_the_correction_and_the_call_that_it_needs():
    assert correction() == (None, correction()[1])
    found, calls = correction(*SERVER)
    assert found == ImportanceCorrection()
    assert len(calls) == len(correction()[1]) + 1


@pytest.mark.parametrize("word", ["null", "none"])
def test_a_correction_can_be_disabled(word):
    assert correction(*SERVER, f"interfaces.actor.correction={word}")[0] is None


def test_a_correction_of_the_user_stays():
    found, _ = correction(
        *SERVER, "interfaces.actor.correction=importance_correction", "interfaces.actor.correction.weight.cap=2"
    )
    assert found == ImportanceCorrection(weight=RatioRange(cap=2.0))
