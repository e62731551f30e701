from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, Model, SequenceSample, stat_values
from realign.config import build_experiment, compose
from realign.engines import OptimizerSpec, TransformersModel
from realign.interfaces.components import JSD, Divergence, ForwardKL, ReverseKL
from realign.interfaces.gkd import GKDInterface
from realign.interfaces.reference import ReferenceInterface
from realign.runtime import run
from realign.testing import BigramEngine, random_batch, train_once
from realign.testing.batches import random_heads
from tests.tiny import random_sample, save_tiny

READ = ("input_ids", "loss_mask", "teacher_logprobs", "teacher_hidden")
DIVERGENCES = [ForwardKL(), ReverseKL(), JSD(), JSD(0.2)]
ONE = MicroBatchSpec()


def by_definition(divergence: Divergence, logq, logp):
    """Return the divergence of two distributions by its textbook formula, in float64."""
    q, p = logq.exp(), logp.exp()
    if isinstance(divergence, JSD):
        m = divergence.beta * p + (1 - divergence.beta) * q
        return divergence.beta * (p * (p / m).log()).sum(-1) + (1 - divergence.beta) * (q * (q / m).log()).sum(-1)
    return (p * (logp - logq)).sum(-1) if isinstance(divergence, ForwardKL) else (q * (logq - logp)).sum(-1)


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
def test_the_loss_is_the_mean_divergence_over_the_trained_tokens_and_its_gradient_follows(divergence):
    data, head = random_batch(3).select(READ), random_heads()["teacher"]
    table = BigramEngine().logits_VV.clone().requires_grad_()
    divergences = []
    for ids, mask, hidden in zip(
        *(data.sequences(k) for k in ("input_ids", "loss_mask", "teacher_hidden")), strict=True
    ):
        for t in range(1, len(ids)):
            if mask[t]:
                logp = (hidden[t] @ head.weight_VH.T / 0.7).log_softmax(-1)
                divergences.append(by_definition(divergence, (table[ids[t - 1]] / 0.7).log_softmax(-1), logp))
    loss = torch.stack(divergences).mean()
    (gradient,) = torch.autograd.grad(loss, table)
    interface = GKDInterface(divergence=divergence, generation=GenerationConfig(temperature=0.7))
    trained = train_once(interface, data, ONE)
    assert trained.metrics["divergence"] == pytest.approx(loss.item(), rel=1e-6)
    assert trained.metrics["loss"] == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(trained.parameters[0], table.detach() - 0.5 * gradient, rtol=1e-10, atol=1e-12)
    nll = -data["teacher_logprobs"][data["loss_mask"]].mean()
    assert trained.metrics["teacher_nll"] == pytest.approx(float(nll), rel=1e-6)


def scored(teacher: Model, data: SequenceSample, spec: MicroBatchSpec = ONE) -> SequenceSample:
    """Return the batch with the keys of the teacher."""
    scores = ReferenceInterface(hidden_states=True).inference(teacher, data, spec)
    return data.merge(scores.rename({"logprobs": "teacher_logprobs", "hidden": "teacher_hidden"}))


def whole_logits(model: Model, data: SequenceSample) -> torch.Tensor:
    """Return all logits [T, V] in float64."""
    out = model.engine.forward(data, ONE, lambda output, mb: mb.with_tokens(logits=output.logits))
    return out["logits"].double()


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
@pytest.mark.parametrize("families", [("llama", "gpt2"), ("gemma2", "llama")], ids=" from ".join)
def test_real_models_give_the_divergence_of_their_logits_however_the_batch_is_packed(tmp_path, families, divergence):
    """The reference runs each sequence alone and uses all logits, in float64."""
    data = random_sample([(9, 4, 6), (12,), (3, 5)])
    specs = [
        TransformersModel(str(save_tiny(tmp_path / family, family, seed=i)), device="cpu", optimizer=optimizer)
        for i, (family, optimizer) in enumerate(zip(families, (OptimizerSpec(lr=0.1), None), strict=True))
    ]
    student, teacher = (spec.load(role, seed=0) for spec, role in zip(specs, ("actor", "teacher"), strict=True))
    student.engine.use_heads({"teacher": teacher.engine.lm_head()})
    losses, gradients = [], []
    for spec in (ONE, MicroBatchSpec(max_tokens_per_microbatch=12), MicroBatchSpec(n_microbatches=5)):
        batch = scored(teacher, data, spec)
        stats = student.engine.train_batch(
            batch, spec, GKDInterface(divergence=divergence).loss, lambda d: d["loss_mask"].sum(), lambda _: False
        )
        losses.append(stat_values(stats)["loss"])
        gradients.append(stat_values(stats)["grad_norm"])
    divergences = []
    for row in range(data.n_sequences):
        alone = data.take_sequences([row])
        logq, logp = (whole_logits(model, alone).log_softmax(-1).roll(1, 0) for model in (student, teacher))
        divergences.append(by_definition(divergence, logq, logp)[alone["loss_mask"]])
    assert losses == pytest.approx([float(torch.cat(divergences).mean())] * 3, rel=2e-5)
    assert gradients == pytest.approx([gradients[0]] * 3, rel=1e-4)


def mixed_batch(n: int = 40) -> SequenceSample:
    ids = [f"{i}@0" for i in range(n)]
    prompts = [[[1, 2 + i % 5]] for i in range(n)]
    data = SequenceSample.from_sequences(ids, {"prompt_ids": prompts})
    given = SequenceSample.from_sequences(ids, {"data_input_ids": [[[1, 2 + i % 5, 9, 9]] for i in range(n)]})
    mask = torch.tensor([False, False, True, True]).repeat(n)
    given = given.with_data({"data_prompt_mask": ~mask, "data_loss_mask": mask}, like="data_input_ids")
    return data.merge(given)


def generated(fraction: float, seed: int = 0, data: SequenceSample | None = None) -> SequenceSample:
    interface = GKDInterface(on_policy_fraction=fraction, generation=GenerationConfig(n=2, max_new_tokens=3))
    return interface.generate(Model("actor", BigramEngine(), seed=seed), mixed_batch() if data is None else data, ONE)


def responses(sample: SequenceSample) -> dict[str, list[list[int]]]:
    counts = np.cumsum(sample.lengths["input_ids"].counts)[:-1]
    parts = np.split(np.arange(sample.n_sequences), counts)
    sequences = sample.sequences()
    return {i: [sequences[s].tolist() for s in part] for i, part in zip(sample.ids, parts, strict=True)}


def test_on_policy_and_given_sequences_are_mixed_by_the_fraction():
    data = mixed_batch()
    given = {i: [ids.tolist()] for i, ids in zip(data.ids, data.sequences("data_input_ids"), strict=True)}
    all_sampled, none, half = (responses(generated(f)) for f in (1.0, 0.0, 0.5))
    assert none == given
    assert all(len(sequences) == 2 for sequences in all_sampled.values())
    assert list(half) == list(data.ids)
    from_data = [i for i in data.ids if half[i] == given[i]]
    assert 10 <= len(from_data) <= 30
    assert all(half[i] == all_sampled[i] for i in data.ids if i not in from_data)  # the same random numbers by id


@dataclass
class Twice(Divergence):
    """Sum of both KL divergences, as a user would write it."""

    def per_token(self, output, data, temperature):
        return sum(kl.per_token(output, data, temperature) for kl in (ForwardKL(), ReverseKL()))


def test_a_divergence_of_ones_own_replaces_the_built_in_ones():
    data = random_batch().select(READ)
    parts = [train_once(GKDInterface(divergence=d), data, ONE).metrics["loss"] for d in (ForwardKL(), ReverseKL())]
    assert train_once(GKDInterface(divergence=Twice()), data, ONE).metrics["loss"] == pytest.approx(sum(parts))


@pytest.fixture
def files(tmp_path) -> dict[str, Path]:
    """Write a student, a larger teacher of another family, and prompts with responses."""
    rows = [{"prompt": text, "response": text[::-1]} for text in ("a cat.", "the dog", "so it is", "well") * 4]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    teacher = save_tiny(tmp_path / "teacher", "gpt2", seed=1, n_embd=96)
    return {"student": save_tiny(tmp_path / "student"), "teacher": teacher, "data": data}


def overrides(files: dict[str, Path], out: Path, *more: str) -> list[str]:
    return [
        "experiment=gkd",
        f"models.actor.path={files['student']}",
        f"models.teacher.path={files['teacher']}",
        f"output_dir={out}",
        "models.actor.optimizer={lr: 3.0e-3, schedule: {kind: constant}}",
        "interfaces.actor.generation.max_new_tokens=8",
        "batch_prompts=8",
        "steps=12",
        *more,
    ]


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_a_student_approaches_a_larger_teacher_of_another_family(files, tmp_path, kind):
    more = [f"data.path={files['data']}", f"interfaces.actor.divergence={kind}"]
    history = run(build_experiment(compose(overrides(files, tmp_path / "run", *more)))).history
    divergences = [r["divergence"] for r in history if "divergence" in r]
    assert len(divergences) == 12
    assert divergences[-1] < 0.6 * divergences[0]
