"""Test that the conformance kit reports each kind of broken invariance."""

from __future__ import annotations

import pytest
import torch

from realign.api import Keys, Mean, ModelInterface
from realign.interfaces.grpo import GRPOActorInterface
from realign.testing import check_train_step

INPUTS = ("input_ids", "loss_mask", "logprobs", "rewards")


class LaterCountsMore(GRPOActorInterface):
    def estimate_advantages(self, model, data):
        out = super().estimate_advantages(model, data)
        return out.with_tokens(advantages=out["advantages"] * torch.arange(len(out["advantages"])))


class ReadsPrompts(GRPOActorInterface):
    def estimate_advantages(self, model, data):
        out = super().estimate_advantages(model, data)
        return out.with_tokens(advantages=out["advantages"] + data["logprobs"].sum())


class CountsMicroBatches(GRPOActorInterface):
    def loss(self, output, minibatch):
        total, stats = super().loss(output, minibatch)
        return total, stats | {f"of_{len(minibatch.cu_seqlens()) - 1}": stats["entropy"]}


class AveragesMeans(GRPOActorInterface):
    def loss(self, output, minibatch):
        total, stats = super().loss(output, minibatch)
        mean = stats["entropy"].total / stats["entropy"].weight.clamp(min=1)
        return total, stats | {"entropy": Mean(mean, torch.ones(()))}


class Averages(GRPOActorInterface):
    def loss(self, output, minibatch):
        total, stats = super().loss(output, minibatch)
        return total / minibatch["loss_mask"].sum().clamp(min=1), stats


class Verifier(ModelInterface):
    """Predicts rewards from whole sequences, without a loss mask."""

    def keys(self, method):
        return Keys(needs={"input_ids": "", "rewards": ""})

    def train_step(self, model, data, mb_spec):
        return model.engine.train_batch(data, mb_spec, self.loss, lambda data: (~data["rewards"].isnan()).sum())

    def loss(self, output, minibatch):
        known_S = ~minibatch["rewards"].isnan()
        errors_S = (output.scores() - minibatch["rewards"].nan_to_num()) ** 2
        total = torch.where(known_S, errors_S, 0).sum()
        return total, {"verifier_loss": Mean(total.detach(), known_S.sum())}


class AveragingVerifier(Verifier):
    def loss(self, output, minibatch):
        total, stats = super().loss(output, minibatch)
        return total / len(minibatch["rewards"]), stats


@pytest.mark.parametrize(
    ("interface", "text"),
    [
        (LaterCountsMore, "prompts in another order: the weights"),
        (ReadsPrompts, "nan at every masked token: the weights"),
        (CountsMicroBatches, r"split by .*: metrics \['of_.* are missing in one"),
        (AveragesMeans, "split by .*: metric entropy changes"),
        (Averages, "split by .*: the weights"),
    ],
)
def test_the_kit_names_the_invariance_that_is_broken(interface, text):
    with pytest.raises(AssertionError, match=text):
        check_train_step(interface(), INPUTS)


def test_the_kit_passes_what_is_right():
    check_train_step(GRPOActorInterface(), INPUTS)


def test_an_interface_that_is_no_policy_is_checked_with_the_keys_that_it_declares():
    verifier = Verifier()
    check_train_step(verifier, verifier.keys("train_step").needs)
    with pytest.raises(AssertionError, match=r"split by .*: the weights"):
        check_train_step(AveragingVerifier(), verifier.keys("train_step").needs)
