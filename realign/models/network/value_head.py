"""Heads beside the language-model head of one trunk: a value head, and Q heads (ILQL, arXiv:2206.11871).

One forward pass computes the policy, the values of states, and the values of all tokens of the vocabulary. Q heads
have target heads, which follow them by Polyak averaging.

Shapes: T packed tokens, N hidden states, K Q heads, V vocabulary, H hidden size.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typing_extensions import override

from realign.api.engine import QValues
from realign.api.seeds import derive_seed
from realign.errors import ConfigError, DataError
from realign.functional.logprobs import LMHead, no_autocast, token_logprobs
from realign.models.files.model_folder import tensor_names
from realign.models.files.unread import read_now
from realign.models.network.branches import Branch, TrunkInputs, check_layers, read_stack
from realign.models.network.heads import QHeads, ValueHead, ValueHidden, head_layers, init_linear

ONLINE, TARGET = "q_heads.online.", "q_heads.target."
"""Substrings of the names of the weights of the heads, and of their targets."""

FILE = "value_head.safetensors"
"""File name of the value head in the model folder."""

_METADATA = "value_head"
"""Metadata key of the settings of the value head, as JSON."""


class ValueNetwork(nn.Module):
    """The parameters of a value head. It computes in fp32 from the hidden states."""

    def __init__(
        self, spec: ValueHead, module: Any, hidden_size: int, words: int, *, seed: int, what: str = "value_head"
    ) -> None:
        """Build the value head, and the Q heads for `words` tokens, of the transformers model `module`.

        Raises:
            ConfigError: the model has fewer than `spec.layers` layers, or its layers are not found.
        """
        super().__init__()
        if spec.layers:
            check_layers(f"{what}.layers", spec.layers, read_stack(module))
        self.spec = spec
        # it trains even if the layers that it copies are frozen
        self.branch = Branch(module, spec.layers).requires_grad_(True) if spec.layers else None
        self.head = head_layers(spec.hidden, hidden_size, 1, seed=seed)
        last: Any = self.head[-1]
        init_linear(last.weight, last.bias, spec.init, seed=derive_seed(seed, "last"))
        self.q_heads = (
            None if spec.q_heads is None else QNetwork(spec.q_heads, spec.hidden, hidden_size, words, seed=seed)
        )

    @contextmanager
    def listening(self) -> Iterator[TrunkInputs]:
        """Record the inputs of the branch while the trunk runs."""
        if self.branch is None:
            yield []
            return
        with self.branch.listening() as recorded:
            yield recorded

    def hidden(self, hidden_TH: Tensor, recorded: TrunkInputs) -> Tensor:
        """Return the input [T, H] of the head: the hidden states of the branch, or of the trunk without a branch."""
        return hidden_TH if self.branch is None else self.branch(recorded)

    def forward(self, hidden_NH: Tensor) -> Tensor:
        """Return one value per hidden state, [N] fp32."""
        with no_autocast(hidden_NH):
            return self.head(hidden_NH.float())[:, 0]

    def save(self, folder: Path) -> None:
        """Write `value_head.safetensors`."""
        state = {name: x.contiguous() for name, x in self.state_dict().items()}
        save_file(state, folder / FILE, metadata=self.metadata)

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of `value_head.safetensors`."""
        # one key, because safetensors writes several in random order, and equal models must be equal files
        return {_METADATA: json.dumps(self._shape)}

    def load(self, path: str, what: str) -> None:
        """Load the weights from a local folder, if it contains a value head.

        Raises:
            ConfigError: the saved head has another shape. The message names the setting.
            DataError: the saved weights do not fit the model.
        """
        file = Path(path).expanduser() / FILE
        if not file.is_file():
            return
        tensor_names(file)  # raises if the file is damaged
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
        saved = json.loads(metadata.get(_METADATA, "{}"))
        for name, wanted in self._shape.items():
            if saved.get(name) != wanted:
                raise ConfigError(
                    f"{what}.{name}={wanted}: {str(file)!r} was saved with {name}={saved.get(name)}. Use that value."
                )
        read_now(self)  # a branch starts with the unread weights of the trunk
        try:
            self.load_state_dict(load_file(file))
        except RuntimeError as error:
            raise DataError(f"{what}: the weights in {str(file)!r} do not fit the model: {error}") from error

    @property
    def _shape(self) -> dict[str, str]:
        q_heads = {} if self.spec.q_heads is None else {"q_heads.n": str(self.spec.q_heads.n)}
        return {"layers": str(self.spec.layers), "hidden": self.spec.hidden.value} | q_heads


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
        with no_autocast(hidden_NH):
            hidden_NH = hidden_NH.float()
            inputs = [_inner(head, hidden_NH) for head in self.online]
            heads = list(zip(self.online, inputs, strict=True))
            logprobs = [token_logprobs(inner_NH, _last(head), tokens_N)[0] for head, inner_NH in heads]
            values = [_values_of(head, inner_NH, tokens_N) for head, inner_NH in heads]
            with torch.no_grad():
                targets = [_values_of(head, _inner(head, hidden_NH), tokens_N) for head in self.target]
        return QValues(torch.stack(values), torch.stack(targets).amin(0), torch.stack(logprobs))

    def smallest_target(self, hidden_NH: Tensor) -> Tensor:
        """Return the smallest value of the target heads for each token of the vocabulary: [N, V] fp32."""
        with no_autocast(hidden_NH):
            return torch.stack([head(hidden_NH.float()) for head in self.target]).amin(0)


@dataclass(frozen=True, eq=False, kw_only=True)
class GuidedHead(LMHead):
    """A head for sampling: the logits plus `advantage_scale` times the smallest target Q value of each token.

    Adding the advantage Q - V instead gives the same distribution, since V is the same for all tokens.
    """

    q_heads: QNetwork
    advantage_scale: float

    @override
    def logits(self, hidden_NH: Tensor) -> Tensor:
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


def _values_of(head: Any, inner_NH: Tensor, tokens_N: Tensor) -> Tensor:
    """Return the values [N] of the given tokens."""
    values_N: Tensor = (inner_NH * head[-1].weight[tokens_N]).sum(-1) + head[-1].bias[tokens_N]
    return values_N
