"""Q heads of a language model: values of all tokens of the vocabulary, with target heads (ILQL, arXiv:2206.11871)."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

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
            online = [_at(head, hidden_NH, tokens_N) for head in self.online]
            with torch.no_grad():
                target = [_at(head, hidden_NH, tokens_N)[0] for head in self.target]
            logprobs = [
                token_logprobs(inner_NH, _vocabulary(head), tokens_N)[0]
                for head, (_, inner_NH) in zip(self.online, online, strict=True)
            ]
        values_KN = torch.stack([values_N for values_N, _ in online])
        return QValues(values_KN, torch.stack(target).amin(0), torch.stack(logprobs))

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


def _at(head: nn.Module, hidden_NH: Tensor, tokens_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value [N] of the tokens, and the input [N, H'] of the last layer."""
    assert isinstance(head, nn.Sequential)
    inner_NH, last = head[:-1](hidden_NH), _vocabulary(head)
    assert last.bias_V is not None
    return (inner_NH * last.weight_VH[tokens_N]).sum(-1) + last.bias_V[tokens_N], inner_NH


def _vocabulary(head: nn.Module) -> LMHead:
    """Return the last layer of a Q head, whose logits are its values."""
    assert isinstance(head, nn.Sequential)
    last = head[-1]
    return LMHead(last.weight, last.bias)
