from __future__ import annotations

import pytest
import torch

from realign.api import MicroBatchSpec
from realign.api.engine import copy_head
from realign.engines import OptimizerSpec, SharedModel, TransformersModel
from realign.functional import LMHead
from realign.models import Lora, Score, TopLayers
from tests.tiny import random_sample, save_tiny, tiny_engine

ONE = MicroBatchSpec()


def assert_same_head(actual: LMHead, wanted: LMHead) -> None:
    assert torch.equal(actual.weight_VH, wanted.weight_VH)
    assert (actual.bias_V is None) == (wanted.bias_V is None)
    if actual.bias_V is not None:
        assert torch.equal(actual.bias_V, wanted.bias_V)
    assert (actual.scale, actual.softcap) == (wanted.scale, wanted.softcap)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "granite"])
def test_a_copied_head_is_the_head_of_the_engine(family):
    engine = tiny_engine(family)
    copied = copy_head(engine.forward)
    assert_same_head(copied, engine.lm_head())
    assert not copied.weight_VH.requires_grad
    assert copied.weight_VH.data_ptr() != engine.lm_head().weight_VH.data_ptr()


def test_the_head_of_an_engine_in_this_process_follows_training_and_the_copy_does_not():
    engine = tiny_engine("llama", optimizer=OptimizerSpec(lr=0.1))
    live, copy = engine.lm_head(), copy_head(engine.forward)
    assert engine.capabilities().live_head
    data = random_sample([[5, 4]])
    engine.train_batch(data, ONE, lambda out, mb: (out.logprobs().sum(), {}), lambda d: d["loss_mask"].sum())
    assert_same_head(live, engine.lm_head())
    assert not torch.equal(copy.weight_VH, live.weight_VH)


def test_the_head_is_restricted_to_the_vocabulary_of_the_config(tmp_path):
    from realign.models import Causal

    spec = TransformersModel(str(save_tiny(tmp_path / "m")), device="cpu", head=Causal(vocabulary=40))
    engine = spec.load("teacher", seed=0).engine
    assert engine.lm_head().weight_VH.shape[0] == copy_head(engine.forward).weight_VH.shape[0] == 40


@pytest.mark.parametrize("trains", [TopLayers(2), Lora(rank=4)], ids=["top layers", "lora"])
def test_the_head_of_a_frozen_branch_is_that_of_the_start(tmp_path, trains):
    folder = str(save_tiny(tmp_path / "m"))
    step = OptimizerSpec(lr=0.1)
    actor = TransformersModel(folder, device="cpu", optimizer=step, trains=trains).load("actor", seed=0)
    branch = SharedModel("actor", "reference").load("teacher", seed=0, loaded={"actor": actor}).engine
    start = TransformersModel(folder, device="cpu").load("start", seed=0).engine.lm_head()
    assert_same_head(branch.lm_head(), start)
    data = random_sample([[5, 4]])
    actor.engine.train_batch(data, ONE, lambda out, mb: (out.logprobs().sum(), {}), lambda d: d["loss_mask"].sum())
    assert_same_head(branch.lm_head(), start)
    assert not branch.capabilities().live_head


def test_a_reward_model_has_no_head_for_distributions(tmp_path):
    folder = str(save_tiny(tmp_path / "m", head="score"))
    engine = TransformersModel(folder, device="cpu", head=Score()).load("reward", seed=0).engine
    with pytest.raises(ValueError, match=r"models\.reward has a scalar head"):
        engine.lm_head()
