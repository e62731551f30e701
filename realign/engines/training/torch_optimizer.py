"""`TorchOptimizer`: any optimizer class of torch or of another library, with the settings of `OptimizerSpec`."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from realign.engines.training.optimizer import OptimizerSpec, build_adamw, parameter_groups
from realign.errors import SettingsError
from realign.settings import NonNegative

ELEMENTWISE = frozenset({"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD"})
"""Classes of torch.optim that update each element of a weight on its own, so that shards can be updated apart."""

_REFUSED_OPTIMIZERS: Mapping[str, str] = MappingProxyType(
    {
        "LBFGS": "it evaluates the loss several times in each step",
        "SparseAdam": "it needs sparse gradients",
        "Rprop": "it ignores lr after the first step, and so the schedule",
    }
)

_ENGINE_ARGUMENTS = ("params", "lr", "weight_decay", "maximize", "foreach", "fused", "capturable", "differentiable")
"""Arguments that realign sets, or leaves at their defaults."""


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

    by_word: ClassVar[bool] = False  # a config names the class that it wraps

    of: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    only_matrices: bool | None = None
    other_lr: NonNegative | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        cls = self._import()
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
    def build(self, parameters: Iterable[nn.Parameter], embedding_and_head_ids: Collection[int] = ()) -> Any:
        trained = [p for p in parameters if p.requires_grad]
        if not self.splits:
            return self._make(parameter_groups(trained, self.weight_decay), self.peak)
        inner = [p for p in trained if p.ndim == 2 and id(p) not in embedding_and_head_ids]
        rest = [p for p in trained if p.ndim != 2 or id(p) in embedding_and_head_ids]
        first = [self._make([{"params": inner, "weight_decay": self.weight_decay}], self.peak)] if inner else []
        return MixedOptimizer(first, [build_adamw(self, rest)] if rest else [])

    @override
    def set_step(self, optimizer: Any, *, lr: float, step: int) -> None:
        if not isinstance(optimizer, MixedOptimizer):
            for group in optimizer.param_groups:
                group["lr"] = lr
            return
        for part in optimizer.first:
            for group in part.param_groups:
                group["lr"] = lr
        # The rest follows the same schedule from its own peak, and AdamW needs its epsilon set as well.
        peak = self.peak if self.other_lr is None else self.other_lr
        for part in optimizer.rest:
            super().set_step(part, lr=peak * (lr / self.peak if self.peak else 0.0), step=step)

    @override
    def check_moments(self, index: int, parameter: Tensor, moments: Mapping[str, Any]) -> None:
        """Check the moments of torch optimizers; other libraries check the shapes of their state themselves."""
        if not self.of.startswith("torch.optim."):
            return
        shape = list(parameter.shape)
        for name, x in moments.items():
            # A single number is a step count, or a statistic that the class keeps once per weight.
            if not isinstance(x, Tensor) or x.numel() == 1 or list(x.shape) == shape:
                continue
            factored = not self.elementwise and x.ndim == len(shape)  # Adafactor keeps rows and columns
            if not factored or any(n not in (1, m) for n, m in zip(x.shape, shape, strict=True)):
                raise ValueError(f"parameter {index} has shape {shape}, but its {name} has {list(x.shape)}")

    def _import(self) -> type[torch.optim.Optimizer]:
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
            if name in _ENGINE_ARGUMENTS or name not in known:
                valid = ", ".join(key for key in known if key not in _ENGINE_ARGUMENTS)
                raise SettingsError(f"{name}: {self.of} does not take this argument here (valid: {valid})")
        if self.weight_decay and "weight_decay" not in known:
            raise SettingsError(f"weight_decay={self.weight_decay}: {self.of} has no weight decay. Remove it.")
        try:
            # without a rate of its own, the size of the model decides, which isn't known yet
            self._make(
                [{"params": [nn.Parameter(torch.zeros(2, 2))], "weight_decay": self.weight_decay}], self.lr or 1e-6
            )
        except (TypeError, ValueError) as error:
            raise SettingsError(f"arguments={self.arguments}: {self.of} refuses them: {error}") from error

    def _make(self, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
        cls: Any = self._import()
        if "weight_decay" not in _argument_names(cls):
            groups = [{"params": group["params"]} for group in groups]
        arguments = {name: tuple(x) if isinstance(x, list) else x for name, x in self.arguments.items()}
        optimizer: torch.optim.Optimizer = cls(groups, lr=lr, **arguments)
        return optimizer


def _argument_names(cls: type) -> list[str]:
    """Return the names of the arguments of an optimizer class."""
    return list(inspect.signature(cls).parameters)


def _refusal(cls: type[torch.optim.Optimizer]) -> str | None:
    if cls.__module__.startswith("torch.optim") and cls.__name__ in _REFUSED_OPTIMIZERS:
        return _REFUSED_OPTIMIZERS[cls.__name__]
    if "lr" not in _argument_names(cls):
        return "it has no argument lr, which the schedule sets"
    # Schedule-free optimizers: the weights that they train differ from those to evaluate, and `eval` exchanges them.
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
        """Return one state for all optimizers, with their parameters numbered consecutively."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for part, start in zip(self.parts, self._starts(), strict=True):
            # Each optimizer numbers its parameters from 0. Checkpoints and `Stepper` expect one numbering over all
            # groups.
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
