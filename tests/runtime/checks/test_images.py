"""Test that parts of a run that do not support images are rejected at launch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from realign.api import Model
from realign.config import build_experiment, compose
from realign.errors import ConfigError
from realign.runtime.checks import images
from realign.runtime.checks.images import check_image_models, check_images
from tests.images import tiny_image_engine
from tests.tiny import tiny_engine, tiny_tokenizer

GRPO = ["experiment=grpo", "interfaces.reward.function=realign.rewards.arithmetic:exact_answer"]
COMMON = ["models.actor.path=model", "data.path=prompts.jsonl", "data.images_column=images"]


def made(*words):
    return build_experiment(compose([*words, *COMMON]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*GRPO, "runtime=ray"], "runtime=ray: workers do not support images"),
        (
            [*GRPO, "models.actor.sampler=vllm"],
            r"models\.actor\.sampler: external samplers do not support images",
        ),
        (
            ["experiment=raft", "interfaces.reward.function=realign.rewards.arithmetic:exact_answer"],
            r"interfaces\.actor: RAFTActorInterface does not support images",
        ),
        (
            ["experiment=ppo", "models.reward.path=reward"],
            r"interfaces\.(reward|critic): \w+ does not support images",
        ),
    ],
)
def test_what_does_not_support_images_is_an_error_before_loading(words, message):
    with pytest.raises(ConfigError, match=message):
        check_images(made(*words))


def test_distributed_training_with_images_is_an_error(monkeypatch):
    experiment = made(*GRPO)
    check_images(experiment)
    monkeypatch.setattr(images, "current", lambda: SimpleNamespace(size=2))
    with pytest.raises(ConfigError, match="distributed training does not support images"):
        check_images(experiment)


def test_a_model_that_does_not_read_images_is_an_error():
    experiment = made(*GRPO)
    reads = Model("actor", tiny_image_engine(), tiny_tokenizer(), 0)
    check_image_models(experiment, {"actor": reads, "ref": reads, "reward": Model("reward", None)})
    text = Model("ref", tiny_engine(), tiny_tokenizer(), 0)
    with pytest.raises(ConfigError, match=r"models\.ref: this model does not read images\. Supported are"):
        check_image_models(experiment, {"actor": reads, "ref": text, "reward": Model("reward", None)})


def test_rows_without_images_are_not_checked():
    check_images(build_experiment(compose([*GRPO, *COMMON[:2], "runtime=ray"])))
