"""The toy run of the tests: GRPO on an exact bigram model, with a reward that counts tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from realign.api import (
    GenerationConfig,
    MicroBatchSpec,
    Model,
    ModelInterface,
    ModelSpec,
    SequenceSample,
)
from realign.data import Dataset, DataSpec
from realign.interfaces.components import Aggregation, SeqMeanTokenMean, TokenMean
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.ppo import dataflow
from realign.runtime import Evaluation, Experiment
from realign.testing import BigramEngine, random_preferences


class Digits:
    """Tokenizer whose tokens are numbers."""

    added_tokens_decoder = MappingProxyType({})

    def __call__(self, texts, **_) -> dict[str, list[list[int]]]:
        return {"input_ids": [[] for _ in texts]}

    def decode(self, ids, skip_special_tokens=True, **_) -> str:
        return " ".join(str(int(i)) for i in ids)

    def batch_decode(self, sequences, skip_special_tokens=True) -> list[str]:
        return [self.decode(s) for s in sequences]


@dataclass
class BigramModel(ModelSpec):
    lr: float = 0.5

    def load(self, name: str, *, seed: int) -> Model:
        return Model(name, BigramEngine(seed=seed, lr=self.lr), Digits(), seed)


@dataclass
class Rows(Dataset):
    """Rows that are only counted: the ids of a sample are what the order asked for."""

    n: int
    keys = ("prompt_ids",)

    def __len__(self) -> int:
        return self.n

    def sample(self, rows) -> SequenceSample:
        return SequenceSample(tuple(rows))


@dataclass
class Prompts(DataSpec, Dataset):
    n: int = 8
    keys: tuple[str, ...] = ("prompt_ids", "row")

    def load(self, tokenizer):
        return self

    def __len__(self) -> int:
        return self.n

    def sample(self, rows) -> SequenceSample:
        ids = [f"{row}@{epoch}" for epoch, row in rows]
        data = SequenceSample.from_sequences(ids, {"prompt_ids": [[[1, 2 + row % 5]] for _, row in rows]})
        return data.with_metadata(row=[{"n": row} for _, row in rows])


@dataclass
class CountToken(ModelInterface):
    """Reward that counts the sampled tokens 3. `shuffle` permutes the rewards randomly."""

    needs_engine = False
    shuffle: bool = False
    closed: list[bool] = field(default_factory=list)

    def inference(self, model, data, mb_spec):
        scores = [
            float((ids[~given] == 3).sum())
            for ids, given in zip(data.sequences("input_ids"), data.sequences("prompt_mask"), strict=True)
        ]
        rewards = torch.tensor(scores)
        if self.shuffle:
            generator = torch.Generator().manual_seed(model.call_seed("shuffle") % 2**31)
            rewards = rewards[torch.randperm(len(rewards), generator=generator)]
        return data.select(["input_ids"]).with_sequences(rewards=rewards).select(["rewards"])

    def close(self):
        self.closed.append(True)


GENERATION = GenerationConfig(n=8, max_new_tokens=6, fixed_length=True)


def experiment(tmp_path: Path, **changes) -> Experiment:
    """Build a GRPO run on bigrams with changed settings. Without a given graph, the graph follows from the
    interfaces."""
    settings = {
        "name": "toy",
        "steps": 3,
        "batch_prompts": 8,
        "interfaces": {"actor": GRPOActorInterface(generation=GENERATION), "reward": CountToken()},
        "models": {"actor": BigramModel()},
        "data": Prompts(),
        "output_dir": tmp_path / "run",
        "evaluation": Evaluation(Prompts(4), CountToken(), GENERATION, every_steps=2, batch_prompts=3),
    }
    settings |= changes
    graph = settings.pop("graph", None) or dataflow(settings["interfaces"])
    return Experiment(graph=graph, **settings)


READ = ("input_ids", "prompt_mask", "loss_mask", "rewards")


class Watching(BigramEngine):
    """Engine that stores the batch of each optimizer step."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.seen: list[SequenceSample] = []

    def train_batch(self, data, *args, **kwargs):
        self.seen.append(data)
        return super().train_batch(data, *args, **kwargs)


def likelihood(table: torch.Tensor, sequences, aggregation: Aggregation) -> torch.Tensor:
    """Compute the mean negative log-likelihood in float64, token by token, for `sequences` of (ids, mask)."""
    losses = []
    for ids, mask in sequences:
        trained = [t for t in range(len(ids)) if mask[t]]
        losses.append([-table[ids[t - 1]].log_softmax(-1)[ids[t]] for t in trained])
    if aggregation == TokenMean():
        return sum(map(sum, losses)) / sum(map(len, losses))
    return sum(sum(x) / (len(x) if aggregation == SeqMeanTokenMean() else 1) for x in losses) / len(losses)


def liked(data: SequenceSample) -> torch.Tensor:
    """Count the tokens 3 of each response [S]."""
    return torch.tensor([float(ids[1:].eq(3).sum()) for ids in data.sequences("input_ids")])


def rewards_of_training(interface, *, shuffle: bool, steps: int = 12) -> tuple[float, float]:
    """Return the mean reward before and after training a bigram model to sample token 3.

    With `shuffle`, rewards are randomly permuted over responses.
    """
    model, rng = Model("actor", BigramEngine(vocabulary=6, lr=4.0)), np.random.default_rng(0)
    prompts = SequenceSample.from_sequences(list("abcdef"), {"prompt_ids": [[[i]] for i in range(6)]})
    means = []
    for _ in range(steps):
        batch = interface.generate(model, prompts, MicroBatchSpec())
        rewards_S = liked(batch)
        means.append(float(rewards_S.mean()))
        if shuffle:
            rewards_S = rewards_S[torch.from_numpy(rng.permutation(len(rewards_S)))]
        interface.train_step(model, batch.with_sequences(rewards=rewards_S).select(READ), MicroBatchSpec())
        model.publish_weights()
    return sum(means[:3]) / 3, sum(means[-3:]) / 3


TOY = GenerationConfig(n=8, max_new_tokens=5, fixed_length=True)


@dataclass
class Judged(DataSpec, Dataset):
    """Random scored responses. This dataset contains the prompts from `start` on."""

    n: int
    seed: int = 0

    keys = ("input_ids", "prompt_mask", "loss_mask", "labels", "margins")

    def load(self, tokenizer):
        return self

    def __len__(self) -> int:
        return self.n

    def sample(self, rows) -> SequenceSample:
        return random_preferences(self.seed, n_prompts=self.n).select(self.keys).take([row for _, row in rows])
