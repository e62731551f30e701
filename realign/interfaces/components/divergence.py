"""Divergences between the distributions of a policy and its teacher over the whole vocabulary. One class is one kind.

A divergence of your own is a subclass of `Divergence` with `per_token`, such as a weighted sum of two of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor
from typing_extensions import override

from realign.api import ModelOutput, SequenceSample
from realign.settings import Range, Settings

ROLE = "teacher"
"""Role of the teacher; its hidden states are the key `teacher_hidden`."""


@dataclass
class Divergence(Settings, ABC):
    """Base class of divergences from the teacher."""

    @abstractmethod
    def per_token(self, output: ModelOutput, data: SequenceSample, temperature: float) -> Tensor:
        """Return [T] divergence in nats at every token of `loss_mask`, 0 elsewhere; differentiable in the policy.

        Args:
            output: output of the policy.
            data: the micro-batch, with `loss_mask` [T] and `teacher_hidden` [T, H].
            temperature: temperature of both distributions.
        """

    def describe(self) -> str:
        """Return the divergence for the launch table."""
        return type(self).__name__


@dataclass
class ForwardKL(Divergence):
    """KL(teacher || policy): the policy covers everything that the teacher finds likely."""

    @override
    def per_token(self, output: ModelOutput, data: SequenceSample, temperature: float) -> Tensor:
        return _from_teacher(output, data, temperature, beta=0.0)

    @override
    def describe(self) -> str:
        return "forward KL, KL(teacher || policy)"


@dataclass
class ReverseKL(Divergence):
    """KL(policy || teacher): the policy avoids what the teacher finds unlikely."""

    @override
    def per_token(self, output: ModelOutput, data: SequenceSample, temperature: float) -> Tensor:
        return _from_teacher(output, data, temperature, beta=1.0)

    @override
    def describe(self) -> str:
        return "reverse KL, KL(policy || teacher)"


@dataclass
class JSD(Divergence):
    """Generalized Jensen-Shannon divergence: beta KL(teacher || m) + (1 - beta) KL(policy || m) (arXiv:2306.13649)."""

    beta: Annotated[float, Range(gt=0, lt=1)] = 0.5
    """Weight of the teacher in the mixture m = beta teacher + (1 - beta) policy. Small values act like forward_kl,
    large ones like reverse_kl; near 0 and 1 the gradient vanishes."""

    @override
    def per_token(self, output: ModelOutput, data: SequenceSample, temperature: float) -> Tensor:
        return _from_teacher(output, data, temperature, beta=self.beta)

    @override
    def describe(self) -> str:
        return f"generalized Jensen-Shannon divergence, beta {self.beta:g}"


def _from_teacher(output: ModelOutput, data: SequenceSample, temperature: float, *, beta: float) -> Tensor:
    hidden_TH, mask_T = data[f"{ROLE}_hidden"], data["loss_mask"]
    return output.divergence(ROLE, hidden_TH, beta=beta, temperature=temperature, where_T=mask_T)


__all__ = ["JSD", "Divergence", "ForwardKL", "ReverseKL"]
