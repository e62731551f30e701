"""GKD: distillation of a teacher's distributions over the vocabulary, on sequences of the student (arXiv:2306.13649).

The loss of a token is a divergence between the distributions of teacher and student over the whole vocabulary. The
student samples a fraction of the sequences (`on_policy_fraction`, the paper's lambda). The others are responses of the
dataset; with a fraction of 0 this is supervised distillation. No gradient flows through sampling, as in the paper.

Generation reads `prompt_ids`, and `data_input_ids`, `data_prompt_mask` and `data_loss_mask` (the responses of the
dataset) if the fraction is below 1. It writes `input_ids`, `prompt_mask`, `loss_mask` and `truncated`. Training reads
`input_ids`, `loss_mask`, `teacher_logprobs` and `teacher_hidden`. Difference from the paper: each prompt draws whether
the student responds, instead of each batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from realign.api import (
    RPC,
    DataflowGraph,
    GenerationConfig,
    Keys,
    MicroBatchSpec,
    Model,
    ModelInterface,
    ModelOutput,
    Panel,
    Plan,
    Role,
    RoleModel,
    SequenceSample,
    Stats,
    derive_seed,
    masked_mean,
    merge_stats,
)
from realign.api.dataflow import named_reward_outputs, prompt_keys_of
from realign.api.sample import with_response_index
from realign.interfaces.components.aggregation import Aggregation, TokenMean
from realign.interfaces.components.divergence import Divergence, ReverseKL
from realign.interfaces.reference import ReferenceInterface
from realign.settings import Count, Fraction

SAMPLED = ("input_ids", "prompt_mask", "loss_mask", "truncated")
GIVEN = {"data_input_ids": "input_ids", "data_prompt_mask": "prompt_mask", "data_loss_mask": "loss_mask"}
"""Dataset keys of given responses, and the keys that generation writes."""
TEACHER = {"logprobs": "teacher_logprobs", "hidden": "teacher_hidden"}
"""Keys of the teacher by their names in its interface."""


@dataclass
class GKDInterface(ModelInterface):
    """The student of GKD, which learns the teacher's distributions."""

    OUTPUTS = frozenset({"logprobs"})
    HEADLINE = ("reward", "divergence", "teacher_nll")
    PANELS = (
        Panel("divergence from the teacher (nats per token)", {"divergence": "training batch"}),
        Panel("negative log-likelihood (nats per token)", {"teacher_nll": "under the teacher"}),
    )

    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """How to sample responses; all settings are allowed. `generation.temperature` also divides the logits of both
    models in the loss."""
    on_policy_fraction: Fraction = 1.0
    """Fraction of prompts that the student answers itself (lambda in the paper); the others use the response in the
    data."""
    divergence: Divergence = field(default_factory=ReverseKL)
    """What to minimize at each token: forward_kl, reverse_kl, jsd, or your own."""
    epochs: Count = 1
    """How often to train on each batch."""
    n_minibatches: Count = 1
    """Optimizer steps per pass. Each pass shuffles the prompts."""
    aggregation: Aggregation = field(default_factory=TokenMean)
    """How to average the loss over tokens and sequences: token_mean, seq_mean_token_mean, seq_mean_token_sum or
    constant."""

    @override
    def keys(self, method: str) -> Keys:
        if method == "generate":
            given = dict.fromkeys(GIVEN, f"on_policy_fraction={self.on_policy_fraction:g}")
            return Keys({"prompt_ids": ""} | (given if self.mixes else {}), writes=frozenset(SAMPLED))
        return Keys(dict.fromkeys(("input_ids", "loss_mask", *TEACHER.values()), ""))

    @property
    def mixes(self) -> bool:
        """Whether the dataset must provide responses."""
        return self.on_policy_fraction < 1

    @override
    def roles(self) -> Mapping[str, Role]:
        """Return the teacher, whose model has no default."""
        return {"teacher": Role(ReferenceInterface(self.generation.temperature, hidden_states=True), RoleModel.none)}

    @override
    def plan(self) -> Plan:
        return Plan(
            epochs=self.epochs,
            n_minibatches=self.n_minibatches,
            longest_response=self.generation.max_new_tokens,
            temperature=self.generation.temperature,
            generation=self.generation,
            sampler=self.generation.describe(),
            exact_sampling=self.generation.exact,
        )

    @override
    def describe(self, batch_prompts: int) -> dict[str, str]:
        sampled = f"the student responds to a prompt with probability {self.on_policy_fraction:g}, else the dataset"
        return {
            "sequences": sampled if self.mixes else "sampled by the student",
            "loss": f"{self.divergence.describe()}, whole vocabulary, {self.aggregation.describe()}",
        }

    def generate(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Sample `generation.n` responses to the prompts that the student answers; others keep those of the dataset."""
        sampled_P = self._choose_student_prompts(model, data) if self.mixes else np.ones(len(data), dtype=np.bool_)
        own, other = np.flatnonzero(sampled_P), np.flatnonzero(~sampled_P)
        parts = []
        if len(own):
            prompts = data.take(own).select(["prompt_ids"])
            out = model.sampler.generate(prompts, self.generation, seed=model.call_seed("generate"))
            parts.append(out.select(SAMPLED))
        if len(other):
            given = with_response_index(data.take(other).select(list(GIVEN)).rename(GIVEN))
            never_S = torch.zeros(given.n_sequences, dtype=torch.bool)
            parts.append(given.with_sequences(truncated=never_S))
        # Back to the order of the prompts.
        return SequenceSample.gather(parts).take(np.argsort(np.concatenate([own, other])))

    def _choose_student_prompts(self, model: Model, data: SequenceSample) -> npt.NDArray[np.bool_]:
        """Return, for each prompt, whether the student responds; a function of the seed, the step and the id."""
        seed = model.call_seed("on_policy")
        drawn = [np.random.default_rng(derive_seed(seed, str(i))).random() for i in data.ids]
        return np.array(drawn) < self.on_policy_fraction

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Stats:
        """Take `epochs * n_minibatches` optimizer steps, in a new random order in each epoch."""
        rng = np.random.default_rng(model.call_seed("minibatches"))
        parts = (part for _ in range(self.epochs) for part in data.minibatches(self.n_minibatches, rng))
        return merge_stats(model.engine.train_batch(part, mb_spec, self.loss, self.loss_weight) for part in parts)

    def loss(self, output: ModelOutput, minibatch: SequenceSample) -> tuple[Tensor, Stats]:
        """Return the aggregated sum of divergences (nats), and metrics."""
        mask_T = minibatch["loss_mask"]
        divergence_T = self.divergence.per_token(output, minibatch, self.generation.temperature)
        stats: Stats = {
            "divergence": masked_mean(divergence_T, mask_T),
            "teacher_nll": masked_mean(-minibatch["teacher_logprobs"], mask_T),
        }
        return self.aggregation.total(torch.where(mask_T, divergence_T, 0), mask_T, minibatch.cu_seqlens()), stats

    def loss_weight(self, data: SequenceSample) -> Tensor:
        """Return the divisor of the loss."""
        return self.aggregation.weight(data["loss_mask"], data.cu_seqlens())


def dataflow(interfaces: Mapping[str, ModelInterface]) -> DataflowGraph:
    """Build the graph: sample or take responses, score them with the teacher, train.

    A role `reward`, if there is one, scores the responses for the metrics; the loss does not read the rewards.
    """
    given = [key for key in interfaces["actor"].keys("generate").needs if key in GIVEN] if "actor" in interfaces else []
    scored = ("input_ids", "loss_mask")
    asked = prompt_keys_of(interfaces, "teacher")
    rpcs = [
        RPC("actor_gen", "actor", "generate", ("prompt_ids", *given), SAMPLED),
        RPC("teacher_inf", "teacher", "inference", (*scored, *asked), tuple(TEACHER.values()), rename=TEACHER),
        RPC("actor_train", "actor", "train_step", (*scored, *TEACHER.values())),
    ]
    results, rows = ["truncated", "prompt_mask"], [key for key in asked if key == "row"]
    if "reward" in interfaces:
        rewards = ("rewards", *named_reward_outputs(interfaces["reward"], "inference"))
        rpcs.append(RPC("reward_inf", "reward", "inference", ("input_ids", "prompt_mask", "row"), rewards))
        results, rows = [*results, *rewards], ["row"]
    return DataflowGraph(tuple(rpcs), dataset_keys=("prompt_ids", *given, *rows), results=tuple(results))
