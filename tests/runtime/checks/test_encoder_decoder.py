"""Test that parts of a run that do not support encoder-decoder models are rejected at launch."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from realign.api import Model
from realign.config import build_experiment, compose
from realign.data import SupervisedData, TextData, WithPretraining
from realign.errors import ConfigError
from realign.runtime.checks.encoder_decoder import check_encoder_decoders, check_predicted
from realign.runtime.ray.engine import RayEngine
from realign.runtime.ray.host import Loaded
from tests.encoder_decoders import tiny_pair
from tests.tiny import engine_over, tiny_engine, tiny_tokenizer

GRPO = ["experiment=grpo", "interfaces.reward.function=realign.rewards.arithmetic:exact_answer"]
COMMON = ["models.actor.path=model", "data.path=prompts.jsonl"]


def models_of(engine):
    return {"actor": Model("actor", engine, tiny_tokenizer(), 0), "reward": Model("reward", None)}


@pytest.fixture(scope="module")
def pair():
    return models_of(engine_over(tiny_pair("t5")))


def test_the_ray_runtime_is_an_error(pair):
    local, ray = (build_experiment(compose([*GRPO, *COMMON, *words])) for words in ([], ["runtime=ray"]))
    check_encoder_decoders(local, pair)
    check_encoder_decoders(ray, models_of(tiny_engine()))
    with pytest.raises(ConfigError, match=r"^runtime=ray: not supported by encoder-decoder models \(models\.actor\)"):
        check_encoder_decoders(ray, pair)


def test_workers_report_an_encoder_decoder_model_to_the_driver():
    facts = {field.name: None for field in dataclasses.fields(Loaded)}
    loaded = Loaded(**{**facts, "data_rank": 0, "encoder_decoder": True})
    assert RayEngine("actor", SimpleNamespace(), [loaded]).encoder_decoder


def test_losses_of_prompts_and_pretraining_texts_are_errors(pair, tmp_path):
    rows, texts = tmp_path / "rows.jsonl", tmp_path / "texts.jsonl"
    rows.write_text('{"prompt": "1+1=", "response": "2"}\n')
    texts.write_text('{"text": "12+34"}\n')
    tokenizer = tiny_tokenizer()
    responses, whole = (SupervisedData(str(rows), train_on_prompt=on).load(tokenizer) for on in (False, True))
    check_predicted(responses, "data", pair)
    check_predicted(whole, "data", models_of(tiny_engine()))
    with pytest.raises(ConfigError, match=r"^data\.train_on_prompt=true: not supported, because models\.actor is"):
        check_predicted(whole, "data", pair)
    prompts = build_experiment(compose([*GRPO, *COMMON, f"data.path={rows}"])).data
    mixed = WithPretraining(prompts, TextData(str(texts), block_tokens=4)).load(tokenizer)
    with pytest.raises(ConfigError, match=r"^data\.pretraining: not supported, .* and set ptx_coef=0\.$"):
        check_predicted(mixed, "data", pair)
