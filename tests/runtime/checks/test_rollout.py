"""Test checks of graphs and objectives under asynchronous rollout."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest

from realign.api import RPC, GenerationConfig
from realign.errors import ConfigError
from realign.interfaces import sft
from realign.interfaces.decoupled_ppo import DecoupledPPOActorInterface
from realign.interfaces.ppo import PPOActorInterface, dataflow
from realign.interfaces.sft import SFTInterface
from realign.runtime import Async
from realign.runtime.checks.rollout import check_rollout
from tests.runtime.test_step import BigramModel, CountToken, experiment

GENERATION = GenerationConfig(n=2, max_new_tokens=4)
AHEAD = Async(max_staleness=2)


def test_what_cannot_be_sampled_ahead_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="none of the RPCs that lead to the key 'rewards' generates responses"):
        check_rollout(experiment(tmp_path, graph=sft.dataflow(), interfaces={"actor": SFTInterface()}, rollout=AHEAD))
    train = RPC("other_train", "other", "train_step", inputs=("input_ids",))
    plain = dataflow({"actor": PPOActorInterface(GENERATION), "reward": CountToken()})
    judged = [replace(r, after=("other_train",)) if r.name == "reward_inf" else r for r in plain.rpcs]
    graph = replace(plain, rpcs=(*judged, train))
    with pytest.raises(ConfigError, match=r"RPC 'other_train' trains a model\. Set rollout=sync"):
        check_rollout(SimpleNamespace(rollout=AHEAD, graph=graph, models={"actor": BigramModel()}))
    judge = [replace(r, model="judge") if r.name == "reward_inf" else r for r in plain.rpcs]
    later = RPC("judge_train", "judge", "train_step", inputs=("input_ids", "rewards"))
    graph = replace(plain, rpcs=(*judge, later))
    with pytest.raises(ConfigError, match=r"RPC 'reward_inf' uses models\.judge, which changes meanwhile"):
        check_rollout(SimpleNamespace(rollout=AHEAD, graph=graph, models={"judge": BigramModel()}))


@pytest.mark.parametrize(
    ("actor", "text"),
    [
        (PPOActorInterface(GENERATION), "PPOActorInterface.* clips the ratio to the policy that sampled them"),
        (PPOActorInterface(GENERATION, recompute=True), "PPOActorInterface.* does not weight them"),
        (DecoupledPPOActorInterface(GENERATION), None),
    ],
)
def test_an_objective_that_does_not_correct_for_staleness_warns(tmp_path, actor, text):
    made = experiment(tmp_path, interfaces={"actor": actor, "reward": CountToken()}, rollout=AHEAD)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_rollout(made)
        check_rollout(replace(made, rollout=Async(max_staleness=0)))
    warned = [str(w.message) for w in caught]
    assert len(warned) == (text is not None)
    assert text is None or re.search(
        rf"max_staleness=2.*{text}.*interfaces\.actor\.correction=importance_correction", warned[0]
    )
