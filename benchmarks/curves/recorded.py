"""Recorded queries, responses and rewards of another implementation, on which both implementations train.

A folder has the arrays that the study of the implementation details published for openai/lm-human-preferences
(huggingface.co/datasets/vwxyzjn/lm-human-preferences-debug), for N samples of Q and R tokens:

- `queries.npy` [N, Q]: token ids. Ids outside the vocabulary of the model are padding.
- `responses.npy` [N, R]: token ids.
- `rewards.npy` [N, R]: the reward of each token, with the KL penalty and the score, before whitening.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.curves import padded
from benchmarks.curves.runs import TABLE, Record, Run, ratio_record
from realign.api import MicroBatchSpec, SequenceSample, stat_values
from realign.config import build_experiment, compose
from realign.errors import DataError
from realign.runtime.models import load_models

LOSSES = ("policy_loss", "value_loss", "entropy", "return_mean")
NAMES = (*TABLE, *LOSSES)


class Recorded(NamedTuple):
    """A recorded batch."""

    queries: list[list[int]]
    responses: Tensor
    """[N, R] int64."""
    rewards: Tensor
    """[N, R] fp32."""


def read(folder: Path, *, vocabulary: int, batch: int) -> list[Recorded]:
    """Return the batches of a folder; the last one is dropped if it is not full.

    Raises:
        DataError: the arrays do not have the shapes above.
    """
    queries, responses, rewards = (
        np.load(folder / f"{name}.npy", allow_pickle=False) for name in ("queries", "responses", "rewards")
    )
    if responses.shape != rewards.shape or len(queries) != len(responses) or responses.max() >= vocabulary:
        raise DataError(
            f"{folder}: queries {queries.shape}, responses {responses.shape} and rewards {rewards.shape}: expected "
            f"[N, Q], [N, R] and [N, R], with token ids of responses below {vocabulary}"
        )
    found = []
    for first in range(0, len(queries) - batch + 1, batch):
        rows = slice(first, first + batch)
        present = [row[row < vocabulary].tolist() for row in queries[rows]]
        found.append(Recorded(present, torch.tensor(responses[rows]).long(), torch.tensor(rewards[rows]).float()))
    return found


def realign_records(run: Run, temperature: float, model: Path, batches: list[Recorded]) -> Iterator[Record]:
    """Train the preset on recorded batches."""
    words = [
        word
        for word in run.overrides(model.parent)
        if not word.startswith(("models.actor.path", "interfaces.actor.kl"))
    ]
    words += [f"models.actor.path={model}", f"interfaces.actor.generation.temperature={temperature}"]
    # the recorded rewards contain the penalty
    words += ["interfaces.actor.kl.coef=0", "interfaces.actor.kl.target=null"]
    words += [f"interfaces.actor.generation.max_new_tokens={batches[0].responses.shape[1]}"]
    experiment = build_experiment(compose([*words, f"steps={len(batches)}"]))
    models = load_models(experiment)
    actor, critic, spec = experiment.interfaces["actor"], experiment.interfaces["critic"], MicroBatchSpec(4096)
    for recorded in batches:
        data = sample(recorded)
        for role, interface in (("actor", actor), ("critic", critic)):
            data = data.merge(interface.inference(models[role], data, spec))
        values = stat_values(actor.train_step(models["actor"], data, spec))
        models["actor"].advance()
        yield ratio_record(values) | {name: values[name] for name in LOSSES}


def sample(recorded: Recorded) -> SequenceSample:
    """Return a recorded batch, packed."""
    rows = [
        torch.tensor([*query, *answer.tolist()])
        for query, answer in zip(recorded.queries, recorded.responses, strict=True)
    ]
    given = [torch.arange(len(row)) < len(query) for row, query in zip(rows, recorded.queries, strict=True)]
    dense = [torch.cat([torch.zeros(len(q)), r]) for q, r in zip(recorded.queries, recorded.rewards, strict=True)]
    data = SequenceSample.from_sequences(range(len(rows)), {"input_ids": [[row] for row in rows]})
    data = data.with_tokens(prompt_mask=[[x] for x in given], dense_rewards=[[x] for x in dense])
    return data.with_tokens(loss_mask=~data["prompt_mask"]).with_sequences(rewards=torch.zeros(len(rows)))


def padded_records(run: Run, temperature: float, model: Path, batches: list[Recorded]) -> Iterator[Record]:
    """Train the independent implementation on recorded batches."""
    constants = replace(run.constants(), updates=len(batches), kl_coef=0.0, temperature=temperature)
    constants = replace(constants, response_tokens=batches[0].responses.shape[1])
    trainer = padded.PaddedPPO(model, constants)
    for queries, responses, rewards in batches:
        record = trainer.update(trainer.rollout(queries, responses, rewards))
        yield {name: record[name] for name in NAMES}
