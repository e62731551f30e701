from __future__ import annotations

import pytest

from realign.errors import ConfigError
from realign.interfaces.grpo import GRPOActorInterface
from realign.runtime import run
from realign.runtime.checks.combinations import check_temperatures
from tests.runtime.test_step import GENERATION, CountToken, experiment


def test_trap_d11_more_minibatches_than_prompts_are_refused_before_anything_is_loaded(tmp_path):
    parts = {"actor": GRPOActorInterface(generation=GENERATION, n_minibatches=9), "reward": CountToken()}
    with pytest.raises(ConfigError, match=r"interfaces\.actor\.n_minibatches=9: batch_prompts=8"):
        experiment(tmp_path, interfaces=parts)
    assert len(run(experiment(tmp_path, interfaces=parts, batch_prompts=9)).series("loss")) == 3


@pytest.mark.parametrize(
    ("parts", "cure"),
    [
        (9, r"is less than the number of mini-batches\. Set batch_prompts=9 or more, or at most n_minibatches=8\.$"),
        (3, r"is not a multiple of it\. Set batch_prompts=6 or 9, or n_minibatches=2\.$"),
    ],
)
def test_the_cure_for_unequal_minibatches_is_accepted(tmp_path, parts, cure):
    def made(n: int, prompts: int):
        actor = GRPOActorInterface(generation=GENERATION, n_minibatches=n)
        return experiment(tmp_path, interfaces={"actor": actor, "reward": CountToken()}, batch_prompts=prompts)

    with pytest.raises(ConfigError, match=rf"^interfaces\.actor\.n_minibatches={parts}: batch_prompts=8 {cure}"):
        made(parts, 8)
    for n, prompts in {9: [(9, 9), (8, 8)], 3: [(3, 6), (3, 9), (2, 8)]}[parts]:
        assert made(n, prompts).batch_prompts == prompts


def test_two_temperatures_are_an_error_that_names_both_keys():
    check_temperatures({"interfaces.actor.generation.temperature": 0.7, "interfaces.ref.temperature": 0.7})
    with pytest.raises(ConfigError, match=r"^b=0\.5: it differs from a=1, so the log-probs"):
        check_temperatures({"a": 1.0, "b": 0.5})
