from __future__ import annotations

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, Model
from realign.engines import OptimizerSpec, SharedModel, TransformersModel
from realign.errors import ConfigError, SettingsError
from realign.models import Causal, Lora, Score, TopLayers, ValueHead
from realign.testing import BigramEngine
from tests.tiny import logprobs, lower_logprobs, random_sample, save_tiny

ONE = MicroBatchSpec()
STEP = OptimizerSpec(lr=1e-2, grad_clip=None)
LENGTHS = ((9, 4, 6), (12,), (3, 5))


def load(folder, branch="reference", layers=None, **fields):
    """Return the engines of an actor and of a role that shares its model."""
    actor = TransformersModel(str(folder), device="cpu", optimizer=STEP, **fields).load("actor", seed=0)
    ref = SharedModel("actor", branch, layers).load("ref", seed=0, loaded={"actor": actor})
    return actor.engine, ref.engine


REFERENCES = {
    "top 1": ("qwen2", {"trains": TopLayers(1)}, {}),
    "top 2, tied": ("llama", {"trains": TopLayers(2)}, {"tie_word_embeddings": True}),
    "all layers": ("gpt2", {"trains": TopLayers(3), "gradient_checkpointing": True}, {}),
    "bfloat16": ("llama", {"trains": TopLayers(2), "dtype": "bfloat16"}, {}),
    "experts": ("qwen3_moe", {"trains": TopLayers(2)}, {}),
    "windows and caps": ("gemma2", {"trains": TopLayers(2)}, {}),
    "adapters": ("qwen2", {"trains": Lora(rank=4)}, {}),
    "adapters of gpt2": ("gpt2", {"trains": Lora(rank=4)}, {}),
    "adapters of experts": ("qwen3_moe", {"trains": Lora(rank=4)}, {}),
    "adapters and values": ("llama", {"trains": Lora(rank=4), "head": Causal(ValueHead(1))}, {}),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_trap_b7_the_reference_is_the_start_and_never_moves(tmp_path, name):
    family, fields, config = REFERENCES[name]
    folder = save_tiny(tmp_path / "m", family, **config)
    actor, ref = load(folder, **fields)
    data = random_sample(LENGTHS)
    dtype = fields.get("dtype", "float32")
    separate = TransformersModel(str(folder), device="cpu", dtype=dtype).load("separate", seed=0).engine
    start = logprobs(ref, data)
    assert torch.equal(start, logprobs(actor, data))
    torch.testing.assert_close(start, logprobs(separate, data), atol=1e-6, rtol=1e-6)
    lower_logprobs(actor, data, 3)
    assert torch.equal(logprobs(ref, data), start)
    assert (logprobs(actor, data) - start).abs().max() > 1e-2
    cut = logprobs(ref, data, MicroBatchSpec(max_tokens_per_microbatch=20))
    torch.testing.assert_close(cut, start, atol=1e-5, rtol=1e-5)
    lower_logprobs(actor, data, 1)  # scoring with the reference leaves the actor trainable
    again = logprobs(actor, data)
    assert not torch.equal(again, start)
    assert torch.equal(logprobs(ref, data), start)


def test_only_the_top_is_trained(tmp_path):
    for tied in (False, True):
        folder = save_tiny(tmp_path / f"tied-{tied}", "llama", tie_word_embeddings=tied)
        engine = TransformersModel(str(folder), optimizer=STEP, trains=TopLayers(1)).load("actor", seed=0).engine
        before = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
        lower_logprobs(engine, random_sample(LENGTHS))
        moved = {n for n, p in engine.module.named_parameters() if not torch.equal(p, before[n])}
        top = {n for n in before if n.startswith("model.layers.2.")} | {"model.norm.weight"}
        assert moved == top | (set() if tied else {"lm_head.weight"})


def test_a_reference_over_a_trunk_that_moves_is_refused(tmp_path):
    folder = save_tiny(tmp_path / "m")
    with pytest.raises(
        ConfigError, match=r"models\.ref: models\.actor\.trains=all: .* Set models\.actor\.trains=top_layers or lora"
    ):
        load(folder)
    tied = save_tiny(tmp_path / "tied", "llama", tie_word_embeddings=True)  # the head shares its weight with the trunk
    with pytest.raises(ConfigError, match=r"models\.ref: models\.actor\.trains=all: "):
        load(tied)
    with pytest.raises(ConfigError, match=r"models\.ref: layers=1: must be at least 2"):
        load(folder, layers=1, trains=TopLayers(2))
    with pytest.raises(ConfigError, match=r"models\.ref: layers=4: must be between 1 and 3"):
        load(folder, layers=4, trains=TopLayers(2))
    with pytest.raises(ConfigError, match=r"models\.actor\.trains: layers=4: must be between 1 and 3"):
        load(folder, trains=TopLayers(4))
    with pytest.raises(ConfigError, match="layers=2: with LoRA, the reference is the base model"):
        load(folder, layers=2, trains=Lora())
    with pytest.raises(ConfigError, match="branch=reference requires a language model"):
        load(save_tiny(tmp_path / "score", head="score"), head=Score(), trains=TopLayers(1))
    bigram = Model("actor", BigramEngine())
    with pytest.raises(ConfigError, match=r"models\.ref: BigramEngine has no reference branch"):
        SharedModel("actor", "reference").load("ref", seed=0, loaded={"actor": bigram})


def test_a_reference_only_scores(tmp_path):
    _, ref = load(save_tiny(tmp_path / "m"), trains=TopLayers(1), head=Causal(ValueHead()))
    data = random_sample(LENGTHS)
    assert not ref.capabilities().trainable
    with pytest.raises(ValueError, match=r"models.ref shares the model of role 'actor' and cannot train"):
        lower_logprobs(ref, data, 3)
    with pytest.raises(ValueError, match="which cannot generate"):
        ref.generate(data, GenerationConfig(), seed=0)
    with pytest.raises(ValueError, match="which cannot be saved"):
        ref.save(tmp_path / "out")
    with pytest.raises(ValueError, match="values requires a scalar head"):
        ref.forward(data, ONE, lambda out, mb: mb.with_tokens(values=out.values()))


def test_a_critic_shares_the_value_head_of_the_actor(tmp_path):
    actor, critic = load(save_tiny(tmp_path / "m"), branch="whole", head=Causal(ValueHead()))
    data = random_sample(LENGTHS)

    def values(engine):
        return engine.forward(data, ONE, lambda out, mb: mb.with_tokens(values=out.values()))["values"]

    assert not values(critic).any()
    actor.train_batch(data, ONE, lambda out, mb: ((out.values() - 1).square().sum(), {}), lambda d: torch.tensor(1.0))
    assert values(critic).any()
    assert torch.equal(values(critic), values(actor))


def test_settings_that_do_not_go_together_are_refused():
    with pytest.raises(SettingsError, match="layers=2: requires branch=reference"):
        SharedModel("actor", layers=2)
