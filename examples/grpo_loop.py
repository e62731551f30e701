"""GRPO from start to finish on one page: sample, score, compare within each group, take a clipped policy-gradient step.

    python examples/grpo_loop.py MODEL PROMPTS [--steps 120] [--lr 1.5e-4] [--group-size 16] [--seed 0]

This is what `realign experiment=grpo_arithmetic` computes, down to the last bit of the weights, without the graph, the
config and the runtime around it. Copy it if you want to own the loop. It keeps realign's engine (packed sequences,
micro-batches, optimizer) and sampler, and it drops everything that makes a long run safe: evaluation, checkpoints,
metrics files, reward functions in separate processes, checks before the first step.

GRPO (arXiv:2402.03300) as most people run it today: no critic, no KL term, one optimizer step per batch, and every
token of the batch has the same weight (the paper averages within each response first).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from realign.api import GenerationConfig, LossStats, MicroBatchSpec, Model, ModelOutput, SequenceSample, stat_values
from realign.data import PromptData
from realign.engines import OptimizerSpec, Schedule, ScheduleKind, TransformersModel
from realign.functional import Scope, broadcast_to_tokens, normalize, policy_loss, segment_sum
from realign.rewards.arithmetic import exact_answer

# the loss has no term but the advantage's: prompts of equal rewards need no backward pass
MICRO_BATCH = MicroBatchSpec(max_tokens_per_microbatch=16384, zero_key="advantages")


def batches(path: str, model: Model, prompts: int, steps: int) -> Iterator[SequenceSample]:
    """Yield one batch of tokenized prompts per step, in a new random order in each epoch."""
    dataset = PromptData(path).load(model.tokenizer)
    order = dataset.order(model.seed, shuffle=True)
    for step in range(steps):
        yield dataset.sample(order.rows(range(step * prompts, (step + 1) * prompts)))


def score(model: Model, prompts: SequenceSample, rollout: SequenceSample) -> Tensor:
    """Return the reward of each response [S]: 1 for the right answer, else 0."""
    rewards = []
    questions = rollout.group_index().tolist()  # index of the prompt of each response
    for i, ids, from_policy in zip(questions, rollout.sequences(), rollout.sequences("loss_mask"), strict=True):
        text = partial(model.tokenizer.decode, skip_special_tokens=True)
        rewards.append(exact_answer(text(ids[~from_policy]), text(ids[from_policy]), prompts.metadata["row"][i]))
    return torch.tensor(rewards)


def with_advantages(rollout: SequenceSample, rewards_S: Tensor) -> SequenceSample:
    """Add `advantages` [T]: how far a reward is above the mean of its prompt's group, in standard deviations."""
    lengths_S = segment_sum(rollout["loss_mask"], rollout.cu_seqlens())
    advantages_S = normalize(rewards_S, rollout.group_index(), lengths_S > 0, mean=Scope.group, std=Scope.group)
    return rollout.with_tokens(advantages=broadcast_to_tokens(advantages_S, rollout.cu_seqlens()))


def loss(output: ModelOutput, data: SequenceSample, *, temperature: float) -> tuple[Tensor, LossStats]:
    """Return PPO's clipped loss, summed over the tokens of one micro-batch, and metrics.

    A sum, not a mean: the engine divides once, by `loss_weight` of the whole batch. So the size of a micro-batch
    changes neither loss nor gradient.
    """
    mask_T = data["loss_mask"]
    logprobs_T = output.logprobs(temperature=temperature, where_T=mask_T)
    result = policy_loss(logprobs_T, data["logprobs"], data["advantages"], mask_T, clip_low=0.2, clip_high=0.2)
    return result.loss_T.sum(), {"clip_fraction": (result.clipped_T.sum(), mask_T.sum())}


def loss_weight(data: SequenceSample) -> Tensor:
    """Return what the engine divides the loss by: the number of tokens that the policy sampled."""
    return data["loss_mask"].sum()


def train_step(model: Model, prompts: SequenceSample, generation: GenerationConfig) -> dict[str, float]:
    """Sample responses, score them, take one optimizer step and return its metrics."""
    # A seed per step, from which every response derives its own: micro-batches and restarts change no sample.
    rollout = model.sampler.generate(prompts, generation, seed=model.call_seed("generate"))
    rewards_S = score(model, prompts, rollout)
    # The sampler has returned the log-prob of each token, at the temperature at which it was drawn. With one optimizer
    # step per batch, the policy that trains is the one that sampled, so no ratio is clipped here. It is with more.
    batch = with_advantages(rollout, rewards_S)
    shuffle = np.random.default_rng(model.call_seed("minibatches"))
    for minibatch in batch.minibatches(1, shuffle):
        stats = model.engine.train_batch(
            minibatch, MICRO_BATCH, partial(loss, temperature=generation.temperature), loss_weight
        )
    model.publish_weights()
    return {"reward": float(rewards_S.mean()), **stat_values(stats)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and save the model as a Hugging Face folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model to train, such as runs/sft_arithmetic/final/actor")
    parser.add_argument("prompts", help="JSONL file with prompt and answer, such as runs/arithmetic/prompts.jsonl")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-prompts", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=16, help="responses per prompt")
    parser.add_argument("--lr", type=float, default=1.5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/grpo_loop"))
    given = parser.parse_args(arguments)

    optimizer = OptimizerSpec(lr=given.lr, schedule=Schedule(kind=ScheduleKind.constant, warmup=10))
    model = TransformersModel(given.model, optimizer=optimizer).load("actor", seed=given.seed)
    generation = GenerationConfig(n=given.group_size, max_new_tokens=5, temperature=1.0)
    for step, prompts in enumerate(batches(given.prompts, model, given.batch_prompts, given.steps), start=1):
        metrics = train_step(model, prompts, generation)
        print(f"step {step}: reward {metrics['reward']:.3f}, gradient norm {metrics['grad_norm']:.3f}")
    model.engine.save(given.output_dir)


if __name__ == "__main__":
    main()
