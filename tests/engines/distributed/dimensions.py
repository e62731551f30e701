"""Runs for the ranks of a mesh with the dimensions `pipeline`, `tensor` and `expert`, and for one process. They return
numbers to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor

from realign.api import GenerationConfig, Model, SequenceSample, stat_values
from realign.engines import LoadBalancing, Sharding
from realign.engines.distributed.shard_files import shards_to_write
from realign.engines.distributed.sharded_engine import ShardedEngine
from realign.engines.training.transformers_engine import TransformersEngine
from realign.interfaces.reward_model import RewardModelInterface
from realign.models import Causal, Lora, Score, ValueHead
from realign.models.parts import whole
from realign.ranks import current
from tests.engines.distributed.scenarios import (
    BUDGET,
    LENGTHS,
    PAIRS,
    batch,
    dpo,
    gkd,
    grpo,
    joint_loss,
    load,
    of_all_stages,
    plain_loss,
    ppo,
    sft,
    steps,
    train,
    weight,
    weights_now,
)
from tests.tiny import random_sample, save_tiny, tiny_tokenizer

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"family": "qwen3"},
    "uneven": {"family": "qwen3", "vocab_size": 101},
    "tied": {"family": "gemma3_text", "tie_word_embeddings": True},
    "fused": {"family": "phi3"},
    "experts": {"family": "qwen3_moe", "num_experts": 8},
    "mixtral": {"family": "mixtral"},
    "critic": {"family": "llama", "head": "value"},
    "reward": {"family": "llama", "head": "score"},
}
"""Norms of heads, a vocabulary that nothing divides, scaled and tied embeddings, joined projections, and experts."""


def write_models(folder: Path) -> None:
    """Write the models of the runs."""
    for name, settings in MODELS.items():
        save_tiny(folder / name, **{"vocab_size": 100, **settings})
    assert len(tiny_tokenizer()) <= 100


def reward_model(folder: Path, **settings: Any) -> dict[str, Any]:
    model, pairs = load(folder, "reward", head=Score(), **settings), [batch(i, preferences=True) for i in range(3)]
    return train(model, RewardModelInterface(n_minibatches=2), pairs, PAIRS)


def lora(folder: Path, **settings: Any) -> dict[str, Any]:
    """Train adapters, and write them to a folder."""
    model = load(folder, "dense", trains=Lora(rank=4, merge_on_save=False), **settings)
    results = {"gradient": adapter_gradient(model), **steps(model, entropy_loss, n=3), "base": base_logprobs(model)}
    model.engine.save_adapter(folder / f"adapter of {current().size}")
    return results


def dropped(folder: Path, **settings: Any) -> dict[str, Any]:
    """Train adapters with dropout. Every number of ranks has the same seed."""
    with ExitStack() as stack:
        for engine in (TransformersEngine, ShardedEngine):
            stack.enter_context(patch.object(engine, "dropout_seed", lambda self: self._stepper.optimizer_steps))
        return steps(load(folder, "dense", trains=Lora(rank=4, dropout=0.4), **settings), entropy_loss, n=3)


def limited(folder: Path, **settings: Any) -> dict[str, Any]:
    """Train with a smaller vocabulary than the embeddings have rows, a value head and logits of all tokens."""

    def loss(output: Any, data: SequenceSample) -> tuple[Tensor, dict[str, Any]]:
        joint, stats = joint_loss(output, data)
        return joint + (output.logits[data["loss_mask"]].logsumexp(-1).square().sum() if len(data) else 0), stats

    head = Causal(ValueHead(init="normal"), vocabulary=97)
    return steps(load(folder, "dense", head=head, **settings), loss, n=3)


def fused(folder: Path, **settings: Any) -> dict[str, Any]:
    """Train a family whose plan gathers the outputs of layers, in checkpointed layers."""
    return steps(load(folder, "fused", gradient_checkpointing=True, **settings), entropy_loss, n=3)


def experts(folder: Path, **settings: Any) -> dict[str, Any]:
    """Train with load balancing, sample, and restore the state before the steps."""
    model = load(folder, "experts", load_balancing=LoadBalancing(0.5), **settings)
    results = {"gradient": gradient(model, plain_loss), "steps": steps(model, entropy_loss, n=3)}
    prompts = SequenceSample.from_sequences(["a", "b"], {"prompt_ids": [[[5, 6, 7]], [[8]]]})
    config = GenerationConfig(n=2, max_new_tokens=4, router_replay=True)
    results["sampled"] = dict(model.engine.generate(prompts, config, seed=1).data)
    return results


def recomputed_experts(folder: Path, **settings: Any) -> dict[str, Any]:
    """Train checkpointed layers on replayed choices of experts; all tokens of one prompt choose the same two."""
    model = load(folder, "mixtral", load_balancing=LoadBalancing(0.5), gradient_checkpointing=True, **settings)
    data = random_sample(LENGTHS)
    tokens = len(data["input_ids"])
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(tokens, 3, 4, generator=generator).argsort(-1)[..., :2]
    chosen[: data.lengths["input_ids"].flat[0]] = torch.tensor([0, 1])
    data = data.with_tokens(router_experts=chosen.flatten(1).short())
    metrics = [stat_values(model.engine.train_batch(data, BUDGET, plain_loss, weight)) for _ in range(3)]
    return {"metrics": metrics, "weights": weights_now(model)}


def lora_of_experts(folder: Path, **settings: Any) -> dict[str, Any]:
    """Train adapters, and write the merged model to a folder."""
    model = load(folder, "experts", trains=Lora(rank=2), **settings)
    results = {"gradient": adapter_gradient(model), **steps(model, entropy_loss, n=3), "base": base_logprobs(model)}
    path = folder / f"merged of {current().size}"
    model.engine.save(path)
    return results | {"saved": load_file(path / "model.safetensors")}


def base_logprobs(model: Model) -> Tensor:
    score = model.engine.reference()
    return score(random_sample(LENGTHS), BUDGET, lambda out, mb: mb.with_tokens(x=out.logprobs()))["x"]


def low(folder: Path, **settings: Any) -> dict[str, Any]:
    return steps(load(folder, "experts", dtype="bfloat16", **settings), entropy_loss)


def adapter_gradient(model: Model) -> dict[str, Tensor]:
    """Return the gradient after B, which starts at 0 and stops the gradient of A, was set to small numbers."""
    weights = dict(model.engine.weights())
    for name, x in weights.items():
        if "lora_B" in name:
            weights[name] = torch.linspace(-0.01, 0.02, x.numel()).view_as(x)
    model.engine.load_weights(weights)
    return gradient(model, plain_loss)


def entropy_loss(output: Any, data: SequenceSample) -> tuple[Tensor, dict[str, Any]]:
    mask_T = data["loss_mask"]
    logprobs_T, entropy_T = output.logprobs_and_entropy(temperature=0.7, where_T=mask_T)
    return -(logprobs_T + 0.3 * entropy_T).sum(), {"entropy": (entropy_T.detach().sum(), mask_T.sum())}


def gradient(model: Model, loss: Any) -> dict[str, Tensor]:
    """Return the gradient of each weight."""
    engine: Any = model.engine
    data = random_sample(LENGTHS, seed=9)
    part = engine._own_part("gradient", data)
    engine.accumulate(part, BUDGET, loss, weight(data))
    network = engine.network
    names = [name for name, _ in network.named_parameters()]
    gradients = {}
    for i, (name, own) in enumerate(zip(names, network.own_parameters(), strict=True)):
        if own.grad is not None:
            gradients[name] = whole(network.weights.like(own.grad, i)) if current().size > 1 else own.grad.clone()
    engine._accumulated = None
    return of_all_stages(gradients)


TENSOR = {
    "sft": partial(sft, family="tied", n=3),
    "grpo": partial(grpo, family="dense", n=3),
    "dpo": partial(dpo, family="uneven", n=3),
    "ppo": partial(ppo, family="dense", n=3),
    "gkd": partial(gkd, families=("dense", "tied"), n=3),
    **{run.__name__: run for run in (reward_model, lora, limited, fused)},
}
"""Runs that depend on the dimension `tensor`."""
EXPERT = {run.__name__: run for run in (experts, recomputed_experts, lora_of_experts)}
"""Runs that depend on both dimensions."""
RUNS: dict[str, Any] = {**TENSOR, **EXPERT, "low": low, "dropped": dropped}


def of_mesh(folder: Path, names: Sequence[str], sharding: Mapping[str, int]) -> dict[str, Any]:
    """Return the results of some runs on a mesh."""
    return {name: RUNS[name](folder, sharding=Sharding(**sharding)) for name in names}


def written(folder: Path, model: str, sharding: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return for each weight of a model how many of its elements this rank writes into a checkpoint, and has."""
    trains = {"trains": Lora(rank=2)} if model == "experts" else {}
    engine = load(folder, model, sharding=Sharding(**sharding), **trains).engine
    state = engine.state_dict()["module"] | engine.fixed_weights()["module"]
    shards, _ = shards_to_write(state, current())
    return {name: (shards[name].numel() if name in shards else 0, x.numel()) for name, x in state.items()}
