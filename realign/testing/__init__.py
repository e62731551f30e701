"""Conformance tests for interfaces, samplers and engines: an exact engine, random batches, and checks of the contracts.

`check_train_step(MyInterface(...), inputs)` runs your algorithm on a bigram model in float64. It fails if the weights
or the metrics depend on micro-batching, the order of prompts or values outside the loss mask. The inputs are the keys
that the interface reads: a reward model or verifier needs no `loss_mask`.
`check_sampler(make, prompts, config, other)` fails if a sampler violates the contract of `realign.api.Sampler`.
`check_engine(make, data)` fails if an engine violates the contract of `realign.api.PipelinableEngine`.
"""

from realign.testing.batches import random_batch, random_preferences
from realign.testing.bigram import BigramEngine
from realign.testing.engine import ENGINE_CHECKS, check_engine
from realign.testing.sampler import SAMPLER_CHECKS, check_sampler
from realign.testing.train_step import check_train_step, train_once

__all__ = [
    "ENGINE_CHECKS",
    "SAMPLER_CHECKS",
    "BigramEngine",
    "check_engine",
    "check_sampler",
    "check_train_step",
    "random_batch",
    "random_preferences",
    "train_once",
]
