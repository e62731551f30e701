"""Compare every family of the table of supported models with transformers. Most families are marked slow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, SequenceSample
from realign.config.aliases import read_own_yaml
from realign.engines.training.transformers_engine import TransformersEngine
from realign.errors import ConfigError
from realign.models.network.attention import ATTENTION, use_attention
from realign.samplers.in_process.settings import InProcessSampling
from tests.families import family_model
from tests.tiny import VOCAB, tiny_tokenizer

TABLE = read_own_yaml(Path(__file__).parents[3] / "docs" / "supported-models.yaml")
QUICK = ("gpt_oss", "qwen3_5_text", "mpt", "roberta")
"""Families of the default run: packed, hybrid, unpacked and not supported."""
OWN_GENERATE = ("moshi", "xlstm")
"""Families whose `generate` needs more inputs than text or fails; only their log-probs are compared."""


def families(*states):
    """Return the families; each check has the quick ones, `.ci/run` also every third one, and the nightly run all."""
    names = [name for name, row in TABLE.items() if row["state"] in states]
    marks = [[pytest.mark.slow, *([pytest.mark.very_slow] if i % 3 else [])] for i in range(len(names))]
    return [pytest.param(name, marks=[] if name in QUICK else of) for name, of in zip(names, marks, strict=True)]


def engine_of(family):
    few = InProcessSampling(max_slots=4)  # sequences wait for the slots of others
    return TransformersEngine("actor", family_model(family), tiny_tokenizer(), seed=0, sampling=few)


def greedy_tokens(model, prompt):
    """Return the text that transformers generates with the attention of the family."""
    if model.config._attn_implementation == ATTENTION:
        use_attention(model, "eager")
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "forced_eos_token_id": None}
    return model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), pad_token_id=0, **settings)[0]


@pytest.mark.parametrize("family", families("packed", "unpacked"))
def test_greedy_tokens_equal_those_of_transformers_and_log_probs_those_of_scoring(family):
    engine = engine_of(family)
    assert (engine.network.abilities.unpacked is None) == (TABLE[family]["state"] == "packed")
    prompts = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in (5, 9, 7)]
    data = SequenceSample.from_sequences(["a", "b", "c"], {"prompt_ids": [[p] for p in prompts]})
    out = engine.generate(data, GenerationConfig(n=2, max_new_tokens=6, greedy=True, stop_token_ids=[]), seed=0)
    scored = engine.forward(out, MicroBatchSpec(), lambda o, part: part.with_tokens(again=o.logprobs()))
    mask = out["loss_mask"]
    torch.testing.assert_close(scored["again"][mask], out["logprobs"][mask], atol=2e-5, rtol=1e-5)
    if family not in OWN_GENERATE:
        for s, ids in enumerate(out.sequences()):
            assert ids.tolist() == greedy_tokens(engine.module, prompts[s // 2]).tolist()


@pytest.mark.parametrize("family", families("unsupported"))
def test_an_unsupported_family_is_rejected_by_name(family):
    with pytest.raises(ConfigError, match="is not supported"):
        engine_of(family)
