"""Optimizer and learning-rate schedule: settings, and pure functions of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from realign.errors import SettingsError
from realign.settings import AcceptsForeign, Count, Fraction, NonNegative, NonNegativeInt, Positive, Range, Settings

Decay = Annotated[float, Range(ge=0, lt=1)]
_RATES = ((50e6, 1e-4), (0.6e9, 1e-5), (4e9, 2e-6), (math.inf, 1e-6))
"""Number of weights, and the learning rate of a policy with up to so many."""


class ScheduleKind(StrEnum):
    """Shape of the learning rate after warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class ScheduleUnit(StrEnum):
    """Unit of a schedule: optimizer steps, or training steps (rollout batches)."""

    optimizer_step = "optimizer_step"
    train_step = "train_step"


@dataclass
class Schedule(Settings):
    """Learning-rate schedule. With unit=train_step the rate is constant over the mini-batches of a rollout batch.

    Attributes:
        kind: shape after warm-up: constant | linear | cosine.
        warmup: length of the warm-up, in `unit`s. The rate is lr * (step + 1) / (warmup + 1), so it's never 0.
        total: when linear and cosine reach `min_ratio`, in `unit`s and including the warm-up.
        min_ratio: final rate as a fraction of lr.
        unit: optimizer_step | train_step. Skipped optimizer steps don't count.
    """

    kind: ScheduleKind = ScheduleKind.constant
    warmup: NonNegativeInt = 0
    total: Count | None = None
    min_ratio: Fraction = 0.0
    unit: ScheduleUnit = ScheduleUnit.optimizer_step

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind is not ScheduleKind.constant and self.total is None:
            units = f"{self.unit.value}s".replace("_", " ")
            raise SettingsError(f"total=null: kind={self.kind.value} needs a length. Set total, in {units}.")


@dataclass
class OptimizerSpec(Settings, AcceptsForeign):
    """AdamW (arXiv:1711.05101), or with `eps_hat` the Adam variant of TensorFlow.

    Attributes:
        lr: peak learning rate. null: by the size of the model, see `usual_rate`.
        betas: decay rates of the first and second moments.
        eps: added to the square root of the second moment.
        weight_decay: decoupled weight decay, on matrices only (two or more dimensions), not on biases and norms.
        eps_hat: add `eps` before the bias correction, as TensorFlow does (epsilon-hat of arXiv:1412.6980, section 2).
        grad_clip: scale gradients with a larger norm down to this norm. None: no clipping.
        schedule: learning-rate schedule.
        ema_decay: decay of the weight average ema = ema_decay * ema + (1 - ema_decay) * weights, updated after each
            optimizer step. The average is saved in a separate folder, `<role>_ema` (DeepSpeed-Chat: 0.992). None: no
            average.
        max_nonfinite_in_a_row: stop the run after this many consecutive optimizer steps with a non-finite loss or
            gradient. Until then, such steps are skipped.
    """

    stand_in: ClassVar[str] = "realign.engines.training.torch_optimizer.TorchOptimizer"

    lr: NonNegative | None = None
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    eps_hat: bool = False
    grad_clip: Positive | None = 1.0
    schedule: Schedule = field(default_factory=Schedule)
    ema_decay: Annotated[float, Range(gt=0, lt=1)] | None = None
    max_nonfinite_in_a_row: Count = 5

    @classmethod
    @override
    def foreign_base(cls) -> type:
        """Return the base of the classes that a config may name, of torch or of another library."""
        return torch.optim.Optimizer

    @property
    def peak(self) -> float:
        """Peak learning rate. With lr=null, the model sets it when it loads (`TransformersModel.rate_by_size`)."""
        if self.lr is None:
            raise ValueError("lr=null: an engine needs a number. See realign.engines.training.optimizer.usual_rate.")
        return self.lr

    @property
    def elementwise(self) -> bool:
        """Whether each element of a weight is updated on its own, so that the shards of a weight can be updated."""
        return True

    @property
    def label(self) -> str:
        """Name of the optimizer, for messages."""
        return "AdamW"

    def build(self, parameters: Iterable[nn.Parameter], embedding_and_head_ids: Collection[int] = ()) -> Any:
        """Build the optimizer over the parameters that require a gradient.

        Args:
            parameters: weights of the model.
            embedding_and_head_ids: ids of the weights outside of the layers: embeddings and heads.
        """
        return build_adamw(self, parameters)

    def set_step(self, optimizer: Any, *, lr: float, step: int) -> None:
        """Set learning rate and epsilon for optimizer step number `step`, counted from 1.

        Let c1 = 1 - beta1^step and c2 = 1 - beta2^step be the bias corrections. TensorFlow's update is lr * sqrt(c2) /
        c1 * m / (sqrt(v) + eps). Torch's update is lr / c1 * m / (sqrt(v / c2) + eps'). They are equal with eps' = eps
        / sqrt(c2).
        """
        eps = self.eps / math.sqrt(1 - self.betas[1] ** step) if self.eps_hat else self.eps
        for group in optimizer.param_groups:
            group["lr"], group["eps"] = lr, eps

    def check_moments(self, index: int, parameter: Tensor, moments: Mapping[str, Any]) -> None:
        """Raise ValueError if the saved state of a parameter does not fit it.

        Fused kernels would read outside of the memory of a smaller tensor.
        """
        shapes = {name: list(x.shape) for name, x in moments.items() if x.is_floating_point()}
        shape = list(parameter.shape)
        if shapes != {"step": [], "exp_avg": shape, "exp_avg_sq": shape}:
            raise ValueError(f"parameter {index} has shape {shape}, but its moments have {shapes}")


def usual_rate(weights: int, *, adapters: bool, critic: bool) -> float:
    """Return a learning rate to start from, in reinforcement learning with AdamW; docs/guides/hyperparameters.md.

    Args:
        weights: number of weights of the model, trained or not.
        adapters: whether LoRA adapters train instead of the weights, which takes 10 times the rate.
        critic: whether the model is a critic of its own, which takes 5 times the rate.
    """
    rate = next(rate for most, rate in _RATES if weights <= most)
    return rate * (10 if adapters else 1) * (5 if critic else 1)


def learning_rate(spec: OptimizerSpec, step: int) -> float:
    """Return the learning rate at step `step`, counted from 0 in the schedule's unit.

    Without warm-up, linear is lr * (1 - step / total). The rate of the last step is therefore above 0, as in
    openai/lm-human-preferences.
    """
    schedule = spec.schedule
    if step < schedule.warmup:
        return spec.peak * (step + 1) / (schedule.warmup + 1)
    if schedule.kind is ScheduleKind.constant:
        return spec.peak
    assert schedule.total is not None
    # `total` may be below `warmup` (the run then only warms up), and a run may go on after `total`.
    done = min(1.0, (step - schedule.warmup) / max(1, schedule.total - schedule.warmup))
    left = 1 - done if schedule.kind is ScheduleKind.linear else 0.5 * (1 + math.cos(math.pi * done))
    return spec.peak * (schedule.min_ratio + (1 - schedule.min_ratio) * left)


def parameter_groups(trained: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer: weight decay applies to matrices only."""
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_adamw(spec: OptimizerSpec, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Build AdamW over `parameters`, with fused kernels where torch has them, else with foreach kernels."""
    trained = [p for p in parameters if p.requires_grad]
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in trained)
    # torch refuses `fused` together with `foreach=True`.
    return torch.optim.AdamW(
        parameter_groups(trained, spec.weight_decay),
        lr=spec.peak,
        betas=spec.betas,
        eps=spec.eps,
        fused=fused,
        foreach=None if fused else True,
    )
