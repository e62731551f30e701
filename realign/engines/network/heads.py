"""The last layer of a model (config node `models.ROLE.head`): what it computes, how it is read, and how it starts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import nn

from realign.engines.network.output import ScalarHead
from realign.functional.logprobs import LMHead
from realign.settings import Count, NonNegativeInt, Settings


class HeadInit(StrEnum):
    """How the last layer of a new scalar head starts."""

    normal = "normal"
    """Weights drawn with standard deviation 1 / sqrt(hidden size + 1), bias 0 (arXiv:1909.08593)."""
    zero = "zero"
    """Weights and bias 0: a critic that starts with the value 0 everywhere."""


class ValueHidden(StrEnum):
    """What a value head computes from a hidden state."""

    linear = "linear"
    """One linear layer."""
    mlp = "mlp"
    """Twice the hidden size, ReLU, one number (as trlX does)."""


@dataclass
class ValueHead(Settings):
    """A value of the state before each token, from the trunk of a language model or a branch off its top."""

    layers: NonNegativeInt = 0
    """Number of top layers that the head copies, with the final norm. The copies start as the trunk's and are not
    recomputed under gradient_checkpointing. With 0 the head reads the trunk's last hidden states."""
    hidden: ValueHidden = ValueHidden.linear
    """linear | mlp."""
    init: HeadInit = HeadInit.zero
    """Start of the last layer if the model's folder has no `value_head.safetensors`: zero | normal."""


class Head(Settings, ABC):
    """What a model computes for tokens; `Causal`, `Score` and `Value` are the choices."""

    def __str__(self) -> str:
        """Return the word for this head in a config."""
        return type(self).__name__.lower()

    @property
    @abstractmethod
    def outputs(self) -> frozenset[str]:
        """What an engine with this head computes, see `PipelinableEngine.outputs`."""

    @property
    @abstractmethod
    def is_scalar(self) -> bool:
        """Whether the last layer gives one number, and not one per token of the vocabulary."""

    @property
    def replaces(self) -> bool:
        """Whether the head of the folder is replaced by a new one."""
        return False

    @abstractmethod
    def auto_class(self) -> Any:
        """Return the class of transformers that loads such models."""

    def start(self, module: Any, *, seed: int) -> None:
        """Replace the head of a transformers model in place, if this says so."""


@dataclass
class Causal(Head):
    """A language model: logits of the next token, and values if it has a value head."""

    value_head: ValueHead | None = None
    """Values beside the log-probs, from the same forward pass. They are saved in the folder of the model and read from
    there. null: none."""
    vocabulary: Count | None = None
    """Number of tokens that are text, the first ones: padding tokens and spare rows of the embedding behind them are
    neither sampled nor in the softmax. The reference needs the same number. null: all."""

    @property
    def outputs(self) -> frozenset[str]:
        """See `Head.outputs`."""
        return frozenset({"logprobs"} | ({"values", "scores"} if self.value_head is not None else set()))

    @property
    def is_scalar(self) -> bool:
        """See `Head.is_scalar`."""
        return False

    def auto_class(self) -> Any:
        """See `Head.auto_class`."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM


@dataclass
class _ScalarHead(Head):
    """A head that gives one number."""

    init: HeadInit | None = None
    """Start of the head: normal | zero replace the one of the folder, and are drawn from the run's seed. null keeps the
    one of the folder; if it has none, transformers initializes one, which only a model that trains may have."""

    @property
    def outputs(self) -> frozenset[str]:
        """See `Head.outputs`."""
        return frozenset({"values", "scores"})

    @property
    def is_scalar(self) -> bool:
        """See `Head.is_scalar`."""
        return True

    @property
    def replaces(self) -> bool:
        """See `Head.replaces`."""
        return self.init is not None

    def start(self, module: Any, *, seed: int) -> None:
        """See `Head.start`."""
        if self.init is not None:
            init_head(module, self.init, seed=seed)


@dataclass
class Score(_ScalarHead):
    """A reward model: one number per sequence."""

    def auto_class(self) -> Any:
        """See `Head.auto_class`."""
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification


@dataclass
class Value(_ScalarHead):
    """A critic: one number per token."""

    def auto_class(self) -> Any:
        """See `Head.auto_class`."""
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification


def read_head(module: Any, *, dropout: bool = False) -> LMHead | ScalarHead:
    """What the last layer of a transformers model computes, as a value that shares its parameters.

    Args:
        module: the model.
        dropout: keep the dropout that transformers puts before the head of a token classifier.

    Raises:
        ValueError: names the family, if no such layer is found.
    """
    config = module.config.get_text_config()
    scalar: Any = getattr(module, "score", None) or getattr(module, "classifier", None)
    if isinstance(scalar, nn.Linear) and scalar.out_features == 1:
        before = getattr(module, "dropout", None)
        rate = before.p if dropout and isinstance(before, nn.Dropout) else 0.0
        return ScalarHead(scalar.weight, scalar.bias, rate)
    last: Any = module.get_output_embeddings()
    if not isinstance(last, nn.Linear) or module.base_model is module:
        raise ValueError(f"model family {config.model_type!r} has no linear last layer over a base model")
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return LMHead(last.weight, last.bias, scale, getattr(config, "final_logit_softcapping", None))


def head_mapping(missing: Collection[str], unexpected: Collection[str]) -> dict[str, str] | None:
    """How to find a scalar head under its other name: some families call that of a critic other than a reward model's.

    Args:
        missing: names of weights that the model has and its folder lacks.
        unexpected: names of weights that the folder has and the model lacks.

    Returns:
        The `key_mapping` of `from_pretrained`; None if no scalar head is under another name.
    """
    for ours, theirs in (("score", "classifier"), ("classifier", "score")):
        if f"{ours}.weight" in missing and f"{theirs}.weight" in unexpected:
            return {rf"^{theirs}\.": f"{ours}."}
    return None


@torch.no_grad()
def init_head(module: Any, init: HeadInit, *, seed: int) -> None:
    """Replace the scalar head of a transformers model in place."""
    head: Any = read_head(module)
    init_linear(head.weight_1H, head.bias_1, init, seed=seed)


@torch.no_grad()
def init_linear(weight_1H: torch.Tensor, bias_1: torch.Tensor | None, init: HeadInit, *, seed: int) -> None:
    """Fill the last layer of a scalar head as `init` says, in place."""
    deviation = 0.0 if init is HeadInit.zero else (weight_1H.shape[1] + 1) ** -0.5
    drawn_1H = torch.randn(weight_1H.shape, generator=torch.Generator().manual_seed(seed))
    weight_1H.copy_(deviation * drawn_1H)
    if bias_1 is not None:
        bias_1.zero_()
