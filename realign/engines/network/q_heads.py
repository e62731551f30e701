"""Q heads of a language model: values of all tokens of the vocabulary, with target heads (ILQL, arXiv:2206.11871)."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from realign.api.q_values import QValues
from realign.api.seeds import derive_seed
from realign.engines.network.heads import QHeads, ValueHidden, head_layers
from realign.functional.logprobs import LMHead, token_logprobs

ONLINE, TARGET = "q_heads.online.", "q_heads.target."
"""Substrings of the names of the weights of the heads, and of their targets."""


class QNetwork(nn.Module):
    """The parameters of the Q heads and of their target heads. They compute in fp32 from the hidden states."""

    def __init__(self, spec: QHeads, hidden: ValueHidden, hidden_size: int, words: int, *, seed: int) -> None:
        """Initialize each head at random, as torch initializes linear layers; the targets are copies."""
        super().__init__()
        seeds = [derive_seed(seed, "q_heads", k) for k in range(spec.n)]
        self.online = nn.ModuleList(head_layers(hidden, hidden_size, words, seed=seed) for seed in seeds)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def at(self, hidden_NH: Tensor, tokens_N: Tensor) -> QValues:
        """Return the values of one token per hidden state: [K, N] and [N], without storing those of all tokens."""
        with torch.autocast(hidden_NH.device.type, enabled=False):
            hidden_NH = hidden_NH.float()
            inputs = [_inner(head, hidden_NH) for head in self.online]
            heads = list(zip(self.online, inputs, strict=True))
            logprobs = [token_logprobs(inner_NH, _last(head), tokens_N)[0] for head, inner_NH in heads]
            values = [_chosen(head, inner_NH, tokens_N) for head, inner_NH in heads]
            with torch.no_grad():
                targets = [_chosen(head, _inner(head, hidden_NH), tokens_N) for head in self.target]
        return QValues(torch.stack(values), torch.stack(targets).amin(0), torch.stack(logprobs))

    def smallest_target(self, hidden_NH: Tensor) -> Tensor:
        """Return the smallest value of the target heads for each token of the vocabulary: [N, V] fp32."""
        with torch.autocast(hidden_NH.device.type, enabled=False):
            return torch.stack([head(hidden_NH.float()) for head in self.target]).amin(0)


@dataclass(frozen=True, eq=False, kw_only=True)
class GuidedHead(LMHead):
    """A head for sampling: the logits plus `advantage_scale` times the smallest target Q value of each token.

    Adding the advantage Q - V instead gives the same distribution, since V is the same for all tokens.
    """

    q_heads: QNetwork
    advantage_scale: float

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """See `LMHead.logits`."""
        return super().logits(hidden_NH) + self.advantage_scale * self.q_heads.smallest_target(hidden_NH)


class TargetUpdate:
    """Polyak averaging of the target heads: target = (1 - rate) * target + rate * online."""

    def __init__(self, names: Iterable[str], parameters: Iterable[Tensor], rate: float) -> None:
        """Pair the weights of the online and target heads by name.

        Args:
            names: names of the parameters.
            parameters: the parameters, or the slices of them that this process stores.
            rate: fraction of the online heads' weights.
        """
        own = dict(zip(names, parameters, strict=True))
        self.pairs = [(x, own[name.replace(TARGET, ONLINE)]) for name, x in own.items() if TARGET in name]
        self.rate = rate

    @torch.no_grad()
    def update(self) -> None:
        """Update the targets after an optimizer step."""
        for target, online in self.pairs:
            target.lerp_(online, self.rate)


def _inner(head: Any, hidden_NH: Tensor) -> Tensor:
    """Return the input [N, H'] of the last layer of a Q head."""
    inner_NH: Tensor = head[:-1](hidden_NH)
    return inner_NH


def _last(head: Any) -> LMHead:
    """Return the last layer of a Q head, whose logits are the values of all tokens."""
    return LMHead(head[-1].weight, head[-1].bias)


def _chosen(head: Any, inner_NH: Tensor, tokens_N: Tensor) -> Tensor:
    """Return the values [N] of the given tokens."""
    values_N: Tensor = (inner_NH * head[-1].weight[tokens_N]).sum(-1) + head[-1].bias[tokens_N]
    return values_N
