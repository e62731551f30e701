"""Decide whether an accumulated gradient becomes an optimizer step, and run that step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from realign.api.engine import LossWeightFn
from realign.api.sample import SequenceSample
from realign.api.stats import Mean, Stats, Sum
from realign.engines.training.optimizer import OptimizerSpec, ScheduleUnit, learning_rate
from realign.errors import RunError
from realign.models.host import Host

REASONS = ("zero_weight_steps", "zero_gradient_steps", "nonfinite_steps", "vetoed_steps")


class Stepper:
    """An optimizer with its schedule. Skips and counts steps that are vetoed, non-finite or have a zero gradient.

    A skipped step changes no weight, moment or schedule. This includes steps with a zero gradient, where AdamW would
    still change the weights through its moments and weight decay.
    """

    def __init__(
        self,
        name: str,
        spec: OptimizerSpec,
        parameters: Iterable[nn.Parameter],
        embedding_and_head_ids: Collection[int] = (),
        host: Host | None = None,
    ) -> None:
        """Build the optimizer for role `name` over the entries of `parameters` that require a gradient.

        `embedding_and_head_ids` contains the ids of embeddings and heads, which some optimizers treat differently.
        """
        self.name = name
        self.spec = spec
        self._host = host or Host()
        self.parameters = [p for p in parameters if p.requires_grad]
        self.optimizer: Any = spec.build(self.parameters, embedding_and_head_ids)
        self.optimizer_steps = 0
        """Number of optimizer steps taken."""
        self.updates_begun = 0
        """Number of times that this process began to change the weights, also if an error ended the change."""
        self.train_steps = 0
        """Number of completed training steps (rollout batches). The caller sets it."""
        self.nonfinite_in_a_row = 0

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        by_train_step = self.spec.schedule.unit is ScheduleUnit.train_step
        return learning_rate(self.spec, self.train_steps if by_train_step else self.optimizer_steps)

    def zero_grad(self) -> None:
        """Discard the accumulated gradient."""
        self.optimizer.zero_grad(set_to_none=True)

    def differentiate(self, loss: Tensor) -> list[Tensor | None]:
        """Return the gradient of `loss` for each parameter (None if unused), without accumulating it."""
        return list(torch.autograd.grad(loss, self.parameters, allow_unused=True))

    def accumulate(self, gradients: Iterable[Tensor | None]) -> None:
        """Add gradients from `differentiate` to the accumulated gradient (`parameter.grad`)."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None and parameter.grad is not None:
                parameter.grad.add_(gradient)
            elif gradient is not None:
                parameter.grad = gradient.clone()  # two parameters may share one tensor

    def step(
        self, loss: Tensor, weight: Tensor, *, vetoed: bool = False, culprits: Callable[[], str] | None = None
    ) -> Stats:
        """Use the accumulated gradient for one optimizer step, then discard it.

        Args:
            loss: the sum whose gradient, divided by `weight`, was accumulated; 0-d.
            weight: divisor of the loss; 0-d.
            vetoed: skip the step, but report its metrics.
            culprits: describes the source of a non-finite loss or gradient. It is called only in that case, after the
                gradient is discarded, and must leave no gradient.

        Returns:
            `loss`, `grad_norm` (before clipping) and the metrics of `report`.

        Raises:
            RunError: loss or gradient was not finite in `max_nonfinite_in_a_row` consecutive steps.
        """
        norm = self.gradient_norm().to(loss.device)
        # one transfer for both numbers, since each transfer waits for the device
        both = torch.stack([(loss.isfinite() & norm.isfinite()).float(), norm.float()])
        finite, norm_value = self._host.numbers(both)
        if not finite:
            self.zero_grad()
            self._count_nonfinite(loss, norm, f", from {culprits()}" if culprits else "")
            return self.report(skipped="nonfinite_steps")
        self.nonfinite_in_a_row = 0
        stats: Stats = {"loss": Mean(loss, weight), "grad_norm": Mean(norm, torch.ones_like(norm))}
        # With a gradient of 0, weight decay and the moments of earlier steps would still move the weights (ADR 7).
        skipped = "vetoed_steps" if vetoed else None if norm_value else "zero_gradient_steps"
        stats |= self.report(skipped=skipped)
        if skipped is None:
            self.updates_begun += 1
            self.update(norm)
            self.optimizer_steps += 1
        self.zero_grad()
        return stats

    def update(self, norm: Tensor) -> None:
        """Change the weights by the accumulated gradient, whose norm is `norm`, after clipping it."""
        if self.spec.grad_clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.spec.grad_clip, norm)
        self.spec.set_step(self.optimizer, lr=self.lr, step=self.optimizer_steps + 1)
        self.optimizer.step()

    def report(self, *, skipped: str | None) -> Stats:
        """Return `lr`, `optimizer_steps` (taken), `skipped_steps`, and the number skipped for each reason."""
        counts = {"optimizer_steps": skipped is None, "skipped_steps": skipped is not None}
        counts |= {reason: reason == skipped for reason in REASONS}
        return {"lr": single(self.lr), **{name: as_count(n) for name, n in counts.items()}}

    def gradient_norm(self) -> Tensor:
        """Return the norm of the accumulated gradient."""
        return torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])

    def moments(self) -> Iterator[Tensor]:
        """Iterate over the tensors in the optimizer's state."""
        for state in self.optimizer.state.values():
            yield from (x for x in state.values() if isinstance(x, Tensor))

    def _count_nonfinite(self, loss: Tensor, norm: Tensor, origin: str) -> None:
        self.nonfinite_in_a_row += 1
        n, most = self.nonfinite_in_a_row, self.spec.max_nonfinite_in_a_row
        values = f"loss sum {float(loss)}, gradient norm {float(norm)}{origin}"
        if n >= most:
            raise RunError(
                f"models.{self.name}: the loss or gradient of {n} consecutive optimizer steps was not finite "
                f"(optimizer.max_nonfinite_in_a_row={most}). Last: {values}. Lower optimizer.lr or set "
                "optimizer.grad_clip, and check the rewards."
            )
        warnings.warn(
            f"models.{self.name}: the loss or gradient after optimizer step {self.optimizer_steps} is not finite "
            f"({values}). The step is skipped and training continues. Consecutive skips: {n}; the run ends at {most}.",
            stacklevel=2,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return optimizer moments and step counts."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "optimizer_steps": self.optimizer_steps,
            "train_steps": self.train_steps,
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned; settings such as decay rates still come from `spec`.

        Raises:
            ValueError: the moments do not match the parameters. Fused kernels would read outside of their memory.
        """
        settings = [{k: x for k, x in group.items() if k != "params"} for group in self.optimizer.param_groups]
        self._check_moments(state["optimizer"]["state"])
        self.optimizer.load_state_dict(_with_own_counts(state["optimizer"]))
        self._check_dtypes(state["optimizer"]["state"])
        # torch restores the settings of each group too. A resumed run uses those of its config, so they are put back.
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(own)
        self.optimizer_steps = state["optimizer_steps"]
        self.train_steps = state["train_steps"]
        self.nonfinite_in_a_row = state["nonfinite_in_a_row"]

    def _check_moments(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if unknown := [index for index in states if not 0 <= index < len(parameters)]:
            raise ValueError(f"the optimizer has {len(parameters)} parameters, but the state has number {unknown[0]}")
        for index, moments in states.items():
            self.spec.check_moments(index, parameters[index], moments)

    def _check_dtypes(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Check that the optimizer has kept the dtypes of its state: torch converts it to the dtype of the weights."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for index, moments in states.items():
            for name, x in moments.items():
                now = self.optimizer.state[parameters[index]].get(name)
                if isinstance(x, Tensor) and not x.is_floating_point() and now.dtype != x.dtype:
                    raise ValueError(f"{self.spec.label} restores its {name} as {now.dtype}, but it was {x.dtype}")


def _with_own_counts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the step counts of a state, which the optimizer would otherwise increment in the memory of the caller.

    The workers of a Ray group receive a state in memory that they share, where each of them would increment the count.
    """

    def copy_scalar(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) and value.ndim == 0 else value

    moments = {i: {name: copy_scalar(x) for name, x in moment.items()} for i, moment in state["state"].items()}
    return {**state, "state": moments}


def step_weight(data: SequenceSample, loss_weight_fn: LossWeightFn) -> Tensor:
    """Return the divisor of a batch's loss, fp32 and 0-d.

    Raises:
        ValueError: the weight is negative or not finite.
    """
    weight = loss_weight_fn(data).detach().float()
    if not 0 <= float(weight) < float("inf"):
        raise ValueError(f"loss_weight_fn returned {float(weight)}. It must return a finite number of at least 0.")
    return weight


def single(x: float) -> Mean:
    """Return a value of one optimizer step as a metric that is averaged over several steps; it stays on the host."""
    return Mean(torch.tensor(float(x)), torch.ones(()))


def as_count(n: float) -> Sum:
    """Return a count of one optimizer step as a metric that is summed over several steps; it stays on the host."""
    return Sum(torch.tensor(float(n)))
