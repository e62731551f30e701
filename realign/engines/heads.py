"""The last layer of a model: what it says about tokens, how it is read, and how it starts."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import Any

import torch
from torch import nn

from realign.engines.output import ScalarHead
from realign.functional.logprobs import LMHead


class Head(StrEnum):
    """What a model says about tokens: next-token logits, a score per sequence, or a value per token."""

    causal = "causal"
    score = "score"
    value = "value"


class HeadInit(StrEnum):
    """How a scalar head starts; normal and zero replace a head that the folder has."""

    keep = "keep"
    """As in the folder; where it has none, as transformers initialises one, and only for a model that is trained."""
    normal = "normal"
    """Weights drawn with deviation 1 / sqrt(hidden size + 1), bias 0 (arXiv:1909.08593)."""
    zero = "zero"
    """Weights and bias 0: a critic that starts without an opinion."""


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
    """Start the scalar head of a transformers model anew, in place; `keep` leaves it."""
    if init is HeadInit.keep:
        return
    head: Any = read_head(module)
    init_linear(head.weight_1H, head.bias_1, init, seed=seed)


@torch.no_grad()
def init_linear(weight_1H: torch.Tensor, bias_1: torch.Tensor | None, init: HeadInit, *, seed: int) -> None:
    """Fill the last layer of a scalar head as `init` (normal or zero) says, in place."""
    deviation = 0.0 if init is HeadInit.zero else (weight_1H.shape[1] + 1) ** -0.5
    drawn_1H = torch.randn(weight_1H.shape, generator=torch.Generator().manual_seed(seed))
    weight_1H.copy_(deviation * drawn_1H)
    if bias_1 is not None:
        bias_1.zero_()
