"""Comparison of two positions of Adam's epsilon on the same recorded batches (docs/studies/tf-adam.md).

Run: `python benchmarks/tf_adam.py MODEL PROMPTS [--steps 20] [--scales 1 0.1 0.01] [--picture tf_adam.png]`

Records a short PPO run: prompts, responses, behavior log-probs and rewards. Then trains the policy twice on these
batches, from its initial weights:

- PyTorch: epsilon is added to the root of the bias-corrected second moment.
- eps-hat: epsilon is added before the bias correction (TensorFlow, openai/lm-human-preferences).

Ratios are relative to the policy before each step, so that they measure the change by one step. Prints a table and, as
the last line, the same results as one JSON object.

Letters: T packed tokens, N scalar parameters.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from realign.api import GenerationConfig, MicroBatchSpec, Model, ModelOutput, SequenceSample, Stats
from realign.data import PromptData
from realign.engines import TransformersModel
from realign.engines.training.optimizer import OptimizerSpec
from realign.engines.training.transformers_engine import TransformersEngine
from realign.functional import KLEstimator, kl_estimate
from realign.interfaces.components import GAE
from realign.interfaces.ppo import PPOActorInterface, dataflow
from realign.interfaces.rule_reward import RuleRewardInterface
from realign.runtime import Experiment, LocalRuntime

ARMS = {"PyTorch": False, "eps-hat": True}
METRICS = {"ratio_variance": "ratio variance", "clip_fraction": "clip fraction", "approx_kl": "approximate KL (nats)"}
CLIP = 0.2
SPEC = MicroBatchSpec(max_tokens_per_microbatch=16384)


@dataclass
class ScaledPPO(PPOActorInterface):
    """PPO with a loss multiplied by a constant. For Adam, this is equivalent to dividing epsilon by the constant."""

    scale: float = 1.0

    def loss(self, output: ModelOutput, minibatch: SequenceSample) -> tuple[Tensor, Stats]:
        """Compute the loss of PPO, multiplied by `scale`."""
        total, stats = super().loss(output, minibatch)
        return self.scale * total, stats


@dataclass
class Study:
    """Settings shared by both arms. The optimizer's constants are those of openai/lm-human-preferences."""

    model: Path
    prompts: Path
    steps: int = 20
    batch_prompts: int = 32
    responses: int = 8
    epochs: int = 4
    max_new_tokens: int = 5
    lr: float = 3e-5
    eps: float = 1e-5
    seed: int = 0
    recorded_with: str = "PyTorch"
    reward: str = RuleRewardInterface.function

    def optimizer(self, arm: str) -> OptimizerSpec:
        """Configure Adam without clipping and weight decay."""
        return OptimizerSpec(lr=self.lr, eps=self.eps, eps_hat=ARMS[arm], grad_clip=None)

    def interface(self, scale: float = 1.0) -> ScaledPPO:
        """Configure PPO with one mini-batch per epoch and whitened advantages, without a critic."""
        sampler = GenerationConfig(n=self.responses, max_new_tokens=self.max_new_tokens)
        return ScaledPPO(generation=sampler, epochs=self.epochs, advantage=GAE(lam=1.0), scale=scale)

    def load(self, arm: str) -> Model:
        """Load the policy with its initial weights."""
        return TransformersModel(str(self.model), optimizer=self.optimizer(arm)).load("actor", seed=self.seed)

    def record(self) -> list[SequenceSample]:
        """Record the batches of a run that trains with the arm `recorded_with`."""
        interfaces = {"actor": self.interface(), "reward": RuleRewardInterface(self.reward, workers=0)}
        with tempfile.TemporaryDirectory() as folder:
            runtime = LocalRuntime(
                Experiment(
                    name="tf_adam",
                    steps=self.steps,
                    batch_prompts=self.batch_prompts,
                    graph=dataflow(interfaces),
                    interfaces=interfaces,
                    models={"actor": TransformersModel(str(self.model), optimizer=self.optimizer(self.recorded_with))},
                    data=PromptData(str(self.prompts)),
                    output_dir=Path(folder),
                    microbatch=SPEC,
                    seed=self.seed,
                )
            )
            try:
                return [runtime.step(step)[1] for step in range(1, self.steps + 1)]
            finally:
                runtime.close()


def replay(study: Study, batches: Sequence[SequenceSample], arm: str, scale: float) -> list[dict[str, float]]:
    """Train on the batches in their order; return one record per batch of how much the step changed the policy."""
    interface, model = study.interface(scale), study.load(arm)
    records = []
    for batch in batches:
        data = batch.select(["input_ids", "loss_mask", "logprobs", "rewards"])
        scored = data.select(["input_ids", "loss_mask"])
        before_T = interface.inference(model, scored, SPEC)["logprobs"]
        interface.train_step(model, data.with_tokens(prox_logprobs=before_T), SPEC)
        model.publish_weights()
        after_T = interface.inference(model, scored, SPEC)["logprobs"]
        records.append(movement(before_T, after_T, data["loss_mask"]) | optimizer_terms(study, model, arm))
    return records


def movement(before_T: Tensor, after_T: Tensor, mask_T: Tensor) -> dict[str, float]:
    """Compute ratio variance, clip fraction and approximate KL (k3) over the sampled tokens of a batch."""
    ratio_M = (after_T - before_T)[mask_T].double().exp()
    kl_T = kl_estimate(before_T, after_T, mask_T, KLEstimator.k3)
    return {
        "ratio_variance": float(ratio_M.var(correction=0)),
        "clip_fraction": float(((ratio_M - 1).abs() > CLIP).double().mean()),
        "approx_kl": float(kl_T[mask_T].double().mean()),
    }


def optimizer_terms(study: Study, model: Model, arm: str) -> dict[str, float]:
    """Measure the effect of epsilon on the learning rate after this step, and the size of gradients.

    `lr_scale` is the mean over parameters of r / (r + eps). Here r [N] is the root of the bias-corrected second moment,
    and eps is that of the arm. It is 1 if epsilon has no effect. `rms_gradient` is the root of the mean of r^2.
    """
    engine = model.engine
    assert isinstance(engine, TransformersEngine)
    stepper = engine.state_dict()["optimizer"]
    step = stepper["optimizer_steps"]
    correction = 1 - study.optimizer(arm).betas[1] ** step
    second_N = torch.cat([s["exp_avg_sq"].flatten() for s in stepper["optimizer"]["state"].values()]).double()
    root_N = (second_N / correction).sqrt()
    eps = study.eps / math.sqrt(correction) if ARMS[arm] else study.eps
    return {
        "rms_gradient": float(root_N.square().mean().sqrt()),
        "lr_scale": float((root_N / (root_N + eps)).mean()),
    }


Arms = dict[str, list[dict[str, float]]]


def summary(records: Arms, first: int) -> dict[str, dict[str, float]]:
    """Average over the first steps and over all steps: both arms, and eps-hat as a fraction of PyTorch, per metric."""
    out: dict[str, dict[str, float]] = {}
    for name, part in (("first", slice(0, first)), ("all", slice(None))):
        for metric in (*METRICS, "lr_scale", "rms_gradient"):
            means = {arm: sum(r[metric] for r in rows[part]) / len(rows[part]) for arm, rows in records.items()}
            fraction = means["eps-hat"] / means["PyTorch"] if means["PyTorch"] else math.nan
            row = {**means, "fraction": fraction}
            out[f"{name}: {metric}"] = {column: float(f"{value:.4g}") for column, value in row.items()}
    return out


def draw(study: Study, found: dict[float, Arms], path: Path) -> None:
    """Plot the two terms, their effect on the learning rate, and the three metrics, over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.2, 7.2), layout="constrained")
    figure.suptitle("Adam with eps after (PyTorch) and before (eps-hat) the bias correction, same batches", fontsize=13)
    axes = figure.subplots(2, 3).flatten()
    steps = range(1, study.steps * study.epochs + 1)
    beta = study.optimizer("eps-hat").betas[1]
    axes[0].plot(steps, [study.eps for _ in steps], "k-", label="PyTorch: eps")
    axes[0].plot(
        steps, [study.eps / math.sqrt(1 - beta**t) for t in steps], "k--", label="eps-hat: eps / sqrt(1 - b2^t)"
    )
    axes[0].set(title="term added to the root of the corrected second moment", xlabel="optimizer step", yscale="log")
    panels = {"lr_scale": "fraction of the learning rate that remains (mean over parameters)", **METRICS}
    for ax, (metric, title) in zip(axes[1:], panels.items(), strict=False):
        for color, (scale, arms) in enumerate(found.items()):
            for arm, style in zip(ARMS, ("-", "--"), strict=True):
                steps = range(1, len(arms[arm]) + 1)
                label = f"loss x {scale:g}, {arm}"
                ax.plot(steps, [r[metric] for r in arms[arm]], f"C{color}{style}", label=label, linewidth=1.4)
        scale_y = "log" if metric in ("ratio_variance", "approx_kl") else "linear"
        ax.set(title=title, xlabel="step (rollout batch)", yscale=scale_y)
    for ax in axes[:-1]:
        ax.title.set_fontsize(10)
        ax.grid(alpha=0.25)
        ax.tick_params(labelsize=8)
    axes[0].legend(fontsize=9, frameon=False)
    axes[-1].axis("off")
    axes[-1].legend(*axes[1].get_legend_handles_labels(), fontsize=10, frameon=False, loc="center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    """Record, replay, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="model folder of the initial policy")
    parser.add_argument("prompts", type=Path, help="JSONL file with the columns `prompt` and `answer`")
    parser.add_argument("--steps", type=int, default=Study.steps)
    parser.add_argument("--batch-prompts", type=int, default=Study.batch_prompts)
    parser.add_argument("--first", type=int, default=5, help="number of steps that count as early")
    parser.add_argument("--scales", type=float, nargs="+", default=[1.0, 0.1, 0.01], help="factors for the loss")
    parser.add_argument("--recorded-with", choices=ARMS, default=Study.recorded_with)
    parser.add_argument("--reward", default=Study.reward, help="import path of the reward function")
    parser.add_argument("--seed", type=int, default=Study.seed)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args(arguments)
    study = Study(
        given.model,
        given.prompts,
        given.steps,
        given.batch_prompts,
        seed=given.seed,
        recorded_with=given.recorded_with,
        reward=given.reward,
    )
    batches = study.record()
    found: dict[float, Arms] = {}
    report: dict[str, object] = {"steps": study.steps, "seed": study.seed, "recorded_with": study.recorded_with}
    for scale in given.scales:
        found[scale] = {arm: replay(study, batches, arm, scale) for arm in ARMS}
        report[f"loss x {scale:g}"] = means = summary(found[scale], given.first)
        print(f"loss x {scale:<8g}{'PyTorch':>20}{'eps-hat':>12}{'fraction':>12}")
        for name, row in means.items():
            print(f"  {name:<24}{row['PyTorch']:>12.3g}{row['eps-hat']:>12.3g}{row['fraction']:>12.3f}")
    if given.picture is not None:
        draw(study, found, given.picture)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
