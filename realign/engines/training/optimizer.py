"""Optimizers and learning-rate schedules: the settings, the classes of other libraries, and how they are built.

`OptimizerSpec` is AdamW. `TorchOptimizer` wraps any optimizer class of torch or of another library.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from importlib.util import find_spec
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from realign.errors import SettingsError
from realign.settings import AcceptsForeign, Count, Fraction, NonNegative, NonNegativeInt, Positive, Range, Settings

ELEMENTWISE = frozenset({"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD"})
"""Classes of torch.optim that update each element of a weight on its own, so that shards can be updated apart."""

REFUSED_OPTIMIZERS: Mapping[str, str] = MappingProxyType(
    {
        "LBFGS": "it evaluates the loss several times in each step",
        "SparseAdam": "it needs sparse gradients",
        "Rprop": "it ignores lr after the first step, and so the schedule",
    }
)

ENGINE_ARGUMENTS = ("params", "lr", "weight_decay", "maximize", "foreach", "fused", "capturable", "differentiable")
"""Arguments that realign sets, or leaves at their defaults."""


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
        warmup: warm-up length in units. The rate is lr * (step + 1) / (warmup + 1), so it is never 0.
        total: units, including warm-up, after which linear and cosine reach `min_ratio`.
        min_ratio: final rate as a fraction of lr.
        unit: optimizer_step | train_step. Skipped optimizer steps do not count.
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
        lr: peak learning rate.
        betas: decay rates of the first and second moments.
        eps: constant added to the square root of the second moment.
        weight_decay: decoupled weight decay. Applies to matrices only (parameters of two or more dimensions), not to
            biases and norms.
        eps_hat: add `eps` before the bias correction, as TensorFlow does (epsilon-hat of arXiv:1412.6980, section 2).
        grad_clip: maximum gradient norm; a larger gradient is scaled down to it. None: no clipping.
        schedule: learning-rate schedule.
        ema_decay: decay of the weight average ema = ema_decay * ema + (1 - ema_decay) * weights, updated after each
            optimizer step. The average is saved in a separate folder, `<role>_ema` (DeepSpeed-Chat: 0.992). None: no
            average.
        max_nonfinite_in_a_row: consecutive optimizer steps with a non-finite loss or gradient after which the run
            ends. Steps before that are skipped.
    """

    stand_in: ClassVar[str] = "realign.engines.training.optimizer.TorchOptimizer"

    lr: NonNegative = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    eps_hat: bool = False
    grad_clip: Positive | None = 1.0
    schedule: Schedule = field(default_factory=Schedule)
    ema_decay: Annotated[float, Range(gt=0, lt=1)] | None = None
    max_nonfinite_in_a_row: Count = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise SettingsError(f"betas={list(self.betas)}: must be two numbers of at least 0 and below 1")

    @classmethod
    @override
    def foreign_base(cls) -> type:
        """Return the base of the classes that a config may name, of torch or of another library."""
        return torch.optim.Optimizer

    @property
    def elementwise(self) -> bool:
        """Whether each element of a weight is updated on its own, so that the shards of a weight can be updated."""
        return True

    @property
    def label(self) -> str:
        """Name of the optimizer, for messages."""
        return "AdamW"

    def build(self, parameters: Iterable[nn.Parameter], outer: Collection[int] = ()) -> Any:
        """Build the optimizer over the parameters that require a gradient.

        Args:
            parameters: weights of the model.
            outer: ids of the weights outside of the layers: embeddings and heads.
        """
        return _build_adamw(self, parameters)

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


def learning_rate(spec: OptimizerSpec, step: int) -> float:
    """Return the learning rate at step `step`, counted from 0 in the schedule's unit.

    Without warm-up, linear is lr * (1 - step / total). The rate of the last step is therefore above 0, as in
    openai/lm-human-preferences.
    """
    schedule = spec.schedule
    if step < schedule.warmup:
        return spec.lr * (step + 1) / (schedule.warmup + 1)
    if schedule.kind is ScheduleKind.constant:
        return spec.lr
    assert schedule.total is not None
    done = min(1.0, (step - schedule.warmup) / max(1, schedule.total - schedule.warmup))
    left = 1 - done if schedule.kind is ScheduleKind.linear else 0.5 * (1 + math.cos(math.pi * done))
    return spec.lr * (schedule.min_ratio + (1 - schedule.min_ratio) * left)


def _parameter_groups(trained: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer: weight decay applies to matrices only."""
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _build_adamw(spec: OptimizerSpec, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Build AdamW over `parameters`, with fused kernels where torch has them, else with foreach kernels."""
    trained = [p for p in parameters if p.requires_grad]
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in trained)
    return torch.optim.AdamW(
        _parameter_groups(trained, spec.weight_decay),
        lr=spec.lr,
        betas=spec.betas,
        eps=spec.eps,
        fused=fused,
        foreach=None if fused else True,
    )


@dataclass
class TorchOptimizer(OptimizerSpec):
    """An optimizer class of torch or of another library, such as torch.optim.Muon or bitsandbytes.optim.AdamW8bit.

    In a config, `optimizer._target_` may name the class itself, with its arguments as further keys. All settings of
    `OptimizerSpec` apply, except that `betas`, `eps` and `eps_hat` concern AdamW.

    Attributes:
        of: import path of the class, derived from torch.optim.Optimizer.
        arguments: further arguments of the class, except `lr` and `weight_decay`.
        only_matrices: update only the weight matrices of the layers with this class. AdamW, with `betas`, `eps` and
            `other_lr`, updates the rest: embeddings, heads, norms and biases. null: true for torch.optim.Muon.
        other_lr: peak learning rate of the rest; null: `lr`.
    """

    of: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    only_matrices: bool | None = None
    other_lr: NonNegative | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        cls = self._imported()
        name = cls.__name__
        if (why := _refusal(cls)) is not None:
            raise SettingsError(f"{self.of}: {why}. Choose another optimizer.")
        if self.other_lr is not None and not self.splits:
            raise SettingsError(f"other_lr={self.other_lr}: {name} updates all weights. Remove it.")
        for key in () if self.splits else ("betas", "eps", "eps_hat"):
            if getattr(self, key) != getattr(OptimizerSpec(), key):
                raise SettingsError(f"{key}={getattr(self, key)}: it concerns AdamW. Set arguments.{key} for {name}.")
        self._check_arguments(cls)

    @classmethod
    def fields_for(cls, path: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Pass `betas`, `eps` and all unknown keys as arguments of the class."""
        own = {f.name for f in fields(cls)} - {"of", "arguments", "betas", "eps", "eps_hat"}
        return {
            "of": path,
            "arguments": {name: value for name, value in values.items() if name not in own},
            **{name: value for name, value in values.items() if name in own},
        }

    @property
    def splits(self) -> bool:
        """Whether AdamW updates the weights that are no matrices of layers."""
        return self.of.endswith(".Muon") if self.only_matrices is None else self.only_matrices

    @property
    @override
    def elementwise(self) -> bool:
        return self.of in {f"torch.optim.{name}" for name in ELEMENTWISE} and not self.splits

    @property
    @override
    def label(self) -> str:
        return self.of

    @override
    def build(self, parameters: Iterable[nn.Parameter], outer: Collection[int] = ()) -> Any:
        trained = [p for p in parameters if p.requires_grad]
        if not self.splits:
            return self._make(_parameter_groups(trained, self.weight_decay))
        inner = [p for p in trained if p.ndim == 2 and id(p) not in outer]
        rest = [p for p in trained if p.ndim != 2 or id(p) in outer]
        made = [self._make([{"params": inner, "weight_decay": self.weight_decay}])] if inner else []
        return MixedOptimizer(made, [_build_adamw(self, rest)] if rest else [])

    @override
    def set_step(self, optimizer: Any, *, lr: float, step: int) -> None:
        if not isinstance(optimizer, MixedOptimizer):
            for group in optimizer.param_groups:
                group["lr"] = lr
            return
        for part in optimizer.first:
            for group in part.param_groups:
                group["lr"] = lr
        peak = self.lr if self.other_lr is None else self.other_lr
        for part in optimizer.rest:
            super().set_step(part, lr=peak * (lr / self.lr if self.lr else 0.0), step=step)

    @override
    def check_moments(self, index: int, parameter: Tensor, moments: Mapping[str, Any]) -> None:
        """Check the moments of torch optimizers; other libraries check the shapes of their state themselves."""
        if not self.of.startswith("torch.optim."):
            return
        shape = list(parameter.shape)
        for name, x in moments.items():
            if not isinstance(x, Tensor) or x.numel() == 1 or list(x.shape) == shape:
                continue
            factored = not self.elementwise and x.ndim == len(shape)  # Adafactor keeps rows and columns
            if not factored or any(n not in (1, m) for n, m in zip(x.shape, shape, strict=True)):
                raise ValueError(f"parameter {index} has shape {shape}, but its {name} has {list(x.shape)}")

    def _imported(self) -> type[torch.optim.Optimizer]:
        module, _, name = self.of.rpartition(".")
        root = module.partition(".")[0]
        if not module or root in sys.stdlib_module_names:
            raise SettingsError(f"of={self.of!r}: must be the import path of an optimizer, such as torch.optim.SGD")
        if root == "bitsandbytes" and find_spec(root) is None:
            raise SettingsError(
                f"{self.of}: bitsandbytes is not installed. Run pip install 'realign-rl[quantization]'."
            )
        try:
            optimizer_class = getattr(importlib.import_module(module), name, None)
        except ImportError as error:
            raise SettingsError(f"of={self.of}: cannot be imported ({error})") from error
        if not inspect.isclass(optimizer_class) or not issubclass(optimizer_class, torch.optim.Optimizer):
            raise SettingsError(f"of={self.of}: must be a class derived from torch.optim.Optimizer")
        return optimizer_class

    def _check_arguments(self, cls: type[torch.optim.Optimizer]) -> None:
        """Construct the optimizer over a small matrix, so that its class checks the arguments."""
        known = _argument_names(cls)
        for name in self.arguments:
            if name in ENGINE_ARGUMENTS or name not in known:
                valid = ", ".join(key for key in known if key not in ENGINE_ARGUMENTS)
                raise SettingsError(f"{name}: {self.of} does not take this argument here (valid: {valid})")
        if self.weight_decay and "weight_decay" not in known:
            raise SettingsError(f"weight_decay={self.weight_decay}: {self.of} has no weight decay. Remove it.")
        try:
            self._make([{"params": [nn.Parameter(torch.zeros(2, 2))], "weight_decay": self.weight_decay}])
        except (TypeError, ValueError) as error:
            raise SettingsError(f"arguments={self.arguments}: {self.of} refuses them: {error}") from error

    def _make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        cls: Any = self._imported()
        if "weight_decay" not in _argument_names(cls):
            groups = [{"params": group["params"]} for group in groups]
        arguments = {name: tuple(x) if isinstance(x, list) else x for name, x in self.arguments.items()}
        made: torch.optim.Optimizer = cls(groups, lr=self.lr, **arguments)
        return made


def _argument_names(cls: type) -> list[str]:
    """Return the names of the arguments of an optimizer class."""
    return list(inspect.signature(cls).parameters)


def _refusal(cls: type[torch.optim.Optimizer]) -> str | None:
    if cls.__module__.startswith("torch.optim") and cls.__name__ in REFUSED_OPTIMIZERS:
        return REFUSED_OPTIMIZERS[cls.__name__]
    if "lr" not in _argument_names(cls):
        return "it has no argument lr, which the schedule sets"
    if hasattr(cls, "train") and hasattr(cls, "eval"):
        return "it must be told about training and evaluation, which the engine does not do"
    return None


class MixedOptimizer:
    """An optimizer over matrices and AdamW over all other weights, with one state dict.

    Attributes:
        first: the optimizer of the matrices; empty if there are none.
        rest: AdamW; empty if all weights are matrices.
    """

    def __init__(self, first: Sequence[torch.optim.Optimizer], rest: Sequence[torch.optim.Optimizer]) -> None:
        self.first = list(first)
        self.rest = list(rest)

    @property
    def parts(self) -> list[torch.optim.Optimizer]:
        """All optimizers."""
        return [*self.first, *self.rest]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all optimizers."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """State of all optimizers by parameter."""
        return {parameter: state for part in self.parts for parameter, state in part.state.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none)

    def step(self) -> None:
        """Update all weights."""
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all optimizers, with parameters counted through."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for part, start in zip(self.parts, self._starts(), strict=True):
            own = part.state_dict()
            state |= {start + i: x for i, x in own["state"].items()}
            groups += [{**group, "params": [start + i for i in group["params"]]} for group in own["param_groups"]]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        groups = list(state["param_groups"])
        for part, start in zip(self.parts, self._starts(), strict=True):
            n, mine = sum(len(group["params"]) for group in part.param_groups), groups[: len(part.param_groups)]
            groups = groups[len(part.param_groups) :]
            part.load_state_dict(
                {
                    "state": {i - start: x for i, x in state["state"].items() if start <= i < start + n},
                    "param_groups": [{**group, "params": [i - start for i in group["params"]]} for group in mine],
                }
            )

    def _starts(self) -> list[int]:
        starts = [0]
        for part in self.parts:
            starts.append(starts[-1] + sum(len(group["params"]) for group in part.param_groups))
        return starts[:-1]
